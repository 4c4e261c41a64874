"""The context: where we run and what was done so far.

distcontext.py   the value, and the record of one transform in it
rank_facts.py    its numbers: ranks, axes, coordinates
sub_contexts.py  smaller contexts: along axes, over some ranks, for one rank
guards.py        whether a collective may run on it
explain.py       as text
start.py         making one; the only reader of the environment
settings.py      which layer sets what
config.py        the file that settings may come from
placement.py     values and modules brought to the device of a context
preemption.py    the end of a job that is asked to end
shutdown.py      groups of a world, and its orderly end

Tested by: tests/context
"""

from weft.context.distcontext import Applied, DistContext
from weft.context.explain import explain
from weft.context.guards import Restriction
from weft.context.preemption import Preemption, on_preemption
from weft.context.start import adopt, local, start
from weft.peers.world import World

__all__ = [
    "Applied",
    "DistContext",
    "Preemption",
    "Restriction",
    "World",
    "adopt",
    "explain",
    "local",
    "on_preemption",
    "start",
]
