"""The replicas of an elastic job: each is started again alone.

supervise.py  what the launcher does: it starts replicas, watches them, and decides who makes steps together
processes.py  the processes of one replica
story.py      who was lost, when, why, and what it cost
"""

from weft.launching.replicas.supervise import supervise_replicas

__all__ = ["supervise_replicas"]
