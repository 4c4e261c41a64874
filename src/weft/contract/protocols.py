"""What transforms offer each other, and what they ask for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch


@runtime_checkable
class ScattersGradients(Protocol):
    """Offered beside `GradSync` by transforms that shard gradients, and need not keep whole ones through a window."""

    def begin_scattered_window(self) -> None:
        """A window begins, in which every backward pass adds up gradients over the ranks that shard a parameter.

        The last one also adds them up over the ranks that hold copies. Otherwise as `GradSync.begin_window`.
        """


@runtime_checkable
class EndsBackward(Protocol):
    """Offered by transforms that do something when a backward pass ends, found by hooks on what parts return."""

    def without_backward(self) -> AbstractContextManager[None]:
        """A context in which backward passes are not of the user: their gradients arrive later, in one that is."""
        ...


@runtime_checkable
class ReducesIn(Protocol):
    """Offered by transforms that choose the dtype in which gradients travel.

    Attributes:
        reduce_dtype: The dtype; None: that of the gradient.
    """

    reduce_dtype: torch.dtype | None


@runtime_checkable
class ReducesOver(Protocol):
    """Offered by transforms that give the ranks along a mesh axis different parts of one batch.

    Strategies average gradients over these axes as well as over the data axes. So the loss of a rank is the mean
    over its part, and the mean over these ranks is the mean over the batch.

    Attributes:
        axes: Names of the mesh axes.
    """

    axes: tuple[str, ...]


@runtime_checkable
class SlicesInside(Protocol):
    """Offered by transforms under which ranks have different positions of one sequence inside a module only.

    Its inputs and outputs are the same on these ranks, and so is the loss.

    Attributes:
        slice_axes: Names of the mesh axes.
    """

    slice_axes: tuple[str, ...]


@runtime_checkable
class StepsApart(Protocol):
    """Offered by transforms under which the ranks along some axes step on gradients of their own.

    Strategies average no gradients over these axes. Parameters, and the optimizer's state, differ between the ranks
    along them; checkpoints hold of parameters what is common to them, and of the state what each of them has.

    Attributes:
        apart_over: Names of the mesh axes.
        ranks_apart: Number of ranks along them: what these ranks compute is averaged in the end.
    """

    apart_over: tuple[str, ...]
    ranks_apart: int

    def common(self) -> dict[str, torch.Tensor]:
        """What is common to these ranks, and is saved and loaded instead of the parameters, by their names."""
        ...

    def common_changed(self, names: Collection[str]) -> None:
        """What is common has new values for these parameters: continue from there."""

    def stacked(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all these ranks along a new first dimension, of which this rank has its own, in its memory."""
        ...


@runtime_checkable
class OwnsState(Protocol):
    """Offered by transforms of an optimizer under which each rank keeps the state of some parameters, whole."""

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether this rank keeps the state of a parameter."""
        ...


class Layout(NamedTuple):
    """Where a parameter lies. Along axes that are named nowhere here, every rank holds a copy.

    Attributes:
        cut: Axes whose ranks hold different parts of it.
        owner: `(axis, coordinate)`, where only the ranks at this coordinate hold it; on the others it is on meta,
            under its own name, or a copy with the owner's gradient, which counts once.
        reduce_over: Axes over which its gradient is summed. It is then divided by `mean_over` of the strategy, which
            is the same number for all parameters.
        mesh: Of a DTensor: the axes along each dimension of its mesh; `layouts` fills it in.
    """

    cut: tuple[str, ...] = ()
    owner: tuple[tuple[str, int], ...] = ()
    reduce_over: tuple[str, ...] = ()
    mesh: tuple[tuple[str, ...], ...] = ()


@runtime_checkable
class Placed(Protocol):
    """Offered by transforms that place parameters where neither the tensor nor the context tells; see `layouts`."""

    def layout(self, name: str) -> Layout | None:
        """Where a parameter lies, by its name in the module this is offered on; None: nothing to add."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """Anything with `state_dict` and `load_state_dict`: schedulers, loaders, averages, your own."""

    def state_dict(self) -> Mapping[str, Any]:
        """What has to survive: nested dicts, lists and tuples of tensors, numbers, strings, None."""
        ...

    def load_state_dict(self, state: Any, /) -> object:
        """Resume from it."""


@runtime_checkable
class KeepsOrder(Protocol):
    """Offered by transforms that find out while a program runs in which order they add up gradients.

    A sum has the same bits in the same order only, so the order is saved with the module. Unlike what is `Stateful`, it
    need not fit: a checkpoint without it, or of another strategy, is restored as any other.
    """

    def sum_order(self) -> Any:
        """The order, in plain values; None before it is found."""
        ...

    def resume_order(self, orders: Sequence[Any], /) -> None:
        """Add up in that of these orders which is one of the present gradients, or in the one to begin with.

        There are several where ranks have different parameters, as in a pipeline.
        """


@runtime_checkable
class StreamsParts(Protocol):
    """Offered by transforms under which some parts of a module have values only while they are called.

    Attributes:
        streamed: Names of these parts.
    """

    streamed: tuple[str, ...]


@runtime_checkable
class Chooses(Protocol):
    """Offered by transforms that choose something by themselves, so that `weft.explain` can say it.

    Attributes:
        chosen: What, in words; empty: nothing.
    """

    chosen: str


@runtime_checkable
class KeepsParameters(Protocol):
    """Offered by transforms that keep parameters or their state elsewhere than in module and optimizer.

    Attributes:
        elsewhere: Whether the module has no values of its parameters between steps.
    """

    elsewhere: bool

    def parameter_shards(self) -> dict[str, torch.Tensor]:
        """Values of the parameters that the module itself has none of, by name, cut over the ranks; a collective."""
        ...

    def parameters_changed(self, shards: Mapping[str, torch.Tensor]) -> None:
        """Take new values: from `shards` for the parameters named there, else from the module; a collective."""

    def state_layout(self, name: str) -> torch.Tensor | None:
        """A tensor without values, cut up as the optimizer's state of this parameter is to be given."""

    def gathered(self, *, write: bool) -> AbstractContextManager[None]:
        """A context in which the module has all parameters whole."""
        ...

    def full_gradient(self, name: str) -> torch.Tensor | None:
        """The whole gradient of a parameter, None if it has none; a collective."""


@runtime_checkable
class ComputesAlone(Protocol):
    """Offered by transforms under which calling a module takes all ranks, but need not while parameters are whole."""

    def alone(self) -> AbstractContextManager[None]:
        """A context in which calls without gradients make no collectives."""
        ...
