"""`Memory`: live bytes on one rank by kind, and which lines of the program hold them."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations", "buffers", "other")


@dataclass(frozen=True)
class Holder:
    """Live bytes of one kind that one line of the program made.

    Attributes:
        kind: One of the kinds of `Memory`.
        bytes: Their sum.
        where: The line of the user's program, "train.py:41"; None if it is not known.
    """

    kind: str
    bytes: int
    where: str | None = None


@dataclass(frozen=True)
class Memory:
    """Live bytes of tensors on one rank, by kind. Not the process: no code, no allocator, no workspaces of kernels.

    Attributes:
        parameters: This rank's parts of the parameters.
        gradients: Of its parts.
        optimizer: State of optimizers.
        gathered: Whole parameters, gradients and buckets that a strategy holds for a while.
        activations: What the forward keeps for the backward, and what is computed in between.
        buffers: Of modules.
        other: Everything else, such as batches.
        where: The line of the user's program that was running, "train.py:41".
        holders: Which lines made the most of it, largest first.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    activations: int = 0
    buffers: int = 0
    other: int = 0
    where: str | None = None
    holders: tuple[Holder, ...] = ()

    @property
    def total(self) -> int:
        """The sum of all kinds.

        Example:
            >>> Memory(parameters=400, gradients=400, optimizer=800).total
            1600
        """
        return sum(getattr(self, kind) for kind in KINDS)


@dataclass(frozen=True)
class Moment:
    """A part of the program.

    Attributes:
        label: "build", "step 1", ...
        at_rest: What is live at its end.
        peak: The highest within it.
    """

    label: str
    at_rest: Memory
    peak: Memory
