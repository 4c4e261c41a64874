"""What a transform may be combined with, and in which order: phases, and names for single pairs."""

from __future__ import annotations

from enum import Flag, IntEnum, auto
from typing import NamedTuple


class Phase(IntEnum):
    """When a transform is applied to an object: those of an earlier phase come first.

    Transforms of one phase may come in either order, as may those that change different parts of the object, see
    `Part`. A transform without a phase may come at any time.

    Attributes:
        PREPARE: What the object computes with: dtypes, norms, the batches of a loader.
        RECOMPUTE: What is kept of the forward for backward.
        SPLIT: Layers, experts and sequences that several ranks share.
        GROUPS: Groups of ranks with a part of the model, or with steps, of their own.
        STRATEGY: How ranks keep parameters, reduce gradients and step.
        FINISH: What takes the others as they are: windows, averages, compiling.
    """

    PREPARE = 1
    RECOMPUTE = 2
    SPLIT = 3
    GROUPS = 4
    STRATEGY = 5
    FINISH = 6


class Part(Flag):
    """What a transform changes of an object. Of two that change different parts, either may come first.

    Attributes:
        PARAMETERS: Values, dtypes or placement of parameters.
        FORWARD: What is computed in forward.
        GRADIENTS: What becomes of gradients in backward.
        STEP: What `optimizer.step()` does.
        ALL: All of these.
    """

    PARAMETERS = auto()
    FORWARD = auto()
    GRADIENTS = auto()
    STEP = auto()
    ALL = PARAMETERS | FORWARD | GRADIENTS | STEP


class Rules(NamedTuple):
    """What a transform may be combined with; see `transform`."""

    name: str
    phase: Phase | None
    changes: Part
    before: frozenset[str]
    after: frozenset[str]
    excludes: frozenset[str | Phase]

    def cannot_meet(self, other: Rules) -> bool:
        """Whether the two cannot be applied to one object, in no order."""
        return self._excludes(other) or other._excludes(self)

    def must_precede(self, other: Rules) -> bool:
        """Whether this one may not come after the other. Names decide before phases do."""
        if other.name in self.before or self.name in other.after:
            return True
        if other.name in self.after or self.name in other.before or self.phase is None or other.phase is None:
            return False
        return self.phase < other.phase and self._meets(other)

    def _excludes(self, other: Rules) -> bool:
        return other.name in self.excludes or (other.phase in self.excludes and self._meets(other))

    def _meets(self, other: Rules) -> bool:
        """Whether both change some part of an object."""
        return bool(self.changes & other.changes)
