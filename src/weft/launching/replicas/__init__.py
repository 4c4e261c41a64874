"""The replicas of an elastic job: each is started again alone.

supervise.py     what the first node's launcher does: it watches replicas, and decides who makes steps together
processes.py     a replica, as its node sees it; the processes on this node
remote_nodes.py  the other nodes, as the first launcher sees them
joined_node.py   what the launcher of another node does
messages.py      what replicas and other launchers have to say
forms.py         whether a message has the form that it should have
loss_log.py      who was lost, when, why, and what it cost

Tested by: tests/elastic, tests/launching/test_forms.py
"""

from weft.launching.replicas.processes import LocalNode
from weft.launching.replicas.supervise import supervise_replicas

__all__ = ["LocalNode", "supervise_replicas"]
