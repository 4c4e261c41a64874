"""The context: where we run and what was done so far.

distcontext.py  the value, and what can be asked of it
explain.py      as text
start.py        making one; the only reader of the environment
settings.py     which layer sets what
applied.py      the record of one transform
world.py        the live side: how ranks meet through the store
board.py        the store, whose questions have a limit of time
watching.py     the threads that see who waits in vain
connections.py  where this process listens, and cutting its connections
preemption.py   the end of a job that is told to end
closing.py      groups of a world, and its orderly end
"""

from weft.context.applied import Applied
from weft.context.distcontext import DistContext, Restriction
from weft.context.explain import explain
from weft.context.preemption import Preemption, on_preemption
from weft.context.start import adopt, local, start
from weft.context.world import World
from weft.engines import TorchEngine

__all__ = [
    "Applied",
    "DistContext",
    "Preemption",
    "Restriction",
    "TorchEngine",
    "World",
    "adopt",
    "explain",
    "local",
    "on_preemption",
    "start",
]
