"""Let an optimizer step on flat buffers while it keeps its own parameter groups and state.

Before `step()` each group's parameters are exchanged for slices of the flat buffer, after it they
are put back. Between steps the optimizer looks as always: its groups hold the user's parameters,
its state holds views of the flat state, `state_dict` and schedulers work.

[Note: shared state] What torch keeps once per parameter and the flat step once per run (the number
of steps, say) is shown to each parameter as an element of a vector. Elements are tensors of their
own: a plain optimizer that gets the state, by loading, copying or undoing, counts each of them.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.engines.torch.hooks.every_optimizer import parameters_of
from weft.engines.torch.reducing.flat_buffer import FlatBuffer, FlatPiece
from weft.engines.torch.reducing.reducer import GradientReducer
from weft.engines.torch.steps.swapped import SHARED_STATE, StepsOnOthers, check_no_closure, check_same_groups, ids_of
from weft.errors import ContractError, OrderError, listed


def flat_buffer_of(optimizer: torch.optim.Optimizer, reducers: Sequence[object]) -> FlatBuffer:
    """Find the flat buffer that holds all parameters of `optimizer`.

    Raises:
        OrderError: None of the reducers keeps one.
        ContractError: Parameters in it may be without gradient.
    """
    wanted = {id(p) for p in parameters_of(optimizer) if p.requires_grad}
    for reducer in reducers:
        if not isinstance(reducer, GradientReducer) or not isinstance(reducer.transport.channel, FlatBuffer):
            continue
        channel = reducer.transport.channel
        if channel.keeps_values and wanted <= {id(p) for piece in channel.pieces for p in piece.parameters}:
            if reducer.finds_unused:
                raise ContractError(
                    'fuse_step: parameters may be without gradient with unused="zero"',
                    found='replicate(..., flat=True, unused="zero")',
                    expected="a gradient for every parameter in every step",
                    fix='weft.replicate(model, ctx, flat=True, unused="error")',
                )
            return reducer.transport.channel
    raise OrderError(
        "fuse_step: the optimizer's parameters are not in a flat buffer",
        found=f"{len(wanted)} parameters with storage of their own",
        expected="replicate(..., flat=True), then the optimizer, then fuse_step",
        fix="model, ctx = weft.replicate(model, ctx, flat=True)",
    )


class _FlatSlice:
    """A slice of a flat piece that stands in for consecutive parameters of one group."""

    def __init__(self, piece: FlatPiece, first: int, last: int) -> None:
        self.piece = piece
        self.parameters = piece.parameters[first:last]
        self._views = piece.views[first:last]
        sizes = [p.numel() for p in piece.parameters]
        start, stop = sum(sizes[:first]), sum(sizes[:last])
        self.values = nn.Parameter(piece.values[start:stop])
        self.gradients = piece.gradients[start:stop]
        self.state: dict[str, Any] = {}
        self._copies: dict[str, torch.Tensor] = {}

    def has_gradients(self) -> bool:
        """Whether the gradients are there; puts strangers into the buffer first."""
        if all(map(operator.is_, [p.grad for p in self.parameters], self._views)):
            return True
        missing = [p for p in self.parameters if p.grad is None]
        if len(missing) == len(self.parameters):
            return False
        if missing:
            raise ContractError(
                f"fuse_step: {len(missing)} of {len(self.parameters)} parameters have no gradient",
                found=listed(f"a parameter of shape {tuple(p.shape)}" for p in missing),
                expected="all gradients of a group, or none",
                fix="optimizer.zero_grad() for all, or continue without weft.fuse_step",
            )
        self.piece.attach()
        return True

    def split_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Show each parameter its part of the state, as views; see [Note: shared state]."""
        sizes, shapes = [p.numel() for p in self.parameters], [p.shape for p in self.parameters]
        parts: dict[str, list[Any]] = {}
        for key, value in self.state.items():
            if not isinstance(value, torch.Tensor):
                parts[key] = [value] * len(sizes)
            elif key in SHARED_STATE:
                self._copies[key] = copies = value.expand(len(sizes)).clone()
                parts[key] = [copies[index] for index in range(len(sizes))]
            else:
                parts[key] = [part.view(shape) for part, shape in zip(value.split(sizes), shapes, strict=True)]
        for index, p in enumerate(self.parameters):
            optimizer.state[p] = {key: part[index] for key, part in parts.items()}

    def refresh_copies(self) -> None:
        """Show each parameter what changed in the shared state."""
        for key, copies in self._copies.items():
            copies.copy_(self.state[key])

    def join_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Build the flat state from the parameters', as `load_state_dict` or an earlier layout left it."""
        states = [optimizer.state.get(p, {}) for p in self.parameters]
        self.state, self._copies = {}, {}
        for key in dict.fromkeys(key for state in states for key in state):
            values = [state.get(key) for state in states]
            whole = all(isinstance(value, torch.Tensor) for value in values)
            if whole and key not in SHARED_STATE:
                self.state[key] = torch.cat([value.reshape(-1) for value in values])
            elif any(value is not values[0] and not (whole and torch.equal(value, values[0])) for value in values):
                raise ContractError(
                    f"fuse_step: the state {key!r} differs between parameters of one group",
                    found=listed(values),
                    expected="one value per group: its parameters were always stepped together",
                    fix="load the state before weft.fuse_step, or continue without it",
                )
            else:
                self.state[key] = values[0].clone() if whole else values[0]
        if self.state:
            self.split_state(optimizer)


class FlatStep(StepsOnOthers):
    """The hooks that exchange parameters for flat slices around `optimizer.step()`."""

    def __init__(self, optimizer: torch.optim.Optimizer, buffer: FlatBuffer) -> None:
        self._groups = [list(entry["params"]) for entry in optimizer.param_groups]
        self._held = ids_of(optimizer)
        self._runs: list[_FlatSlice] = []
        buffer.lay_out([p for group in self._groups for p in group if p.requires_grad])
        self._buffer = weakref.ref(buffer)  # it holds the process group
        self._adopt_layout(optimizer, buffer.pieces)
        super().__init__(optimizer, self._before, self._after, self._join)
        # Torch's own spends more time on being traced and profiled than on the gradients.
        zero_grad = partial(_zero_grad, weakref.ref(optimizer))
        setattr(optimizer, "zero_grad", zero_grad)  # noqa: B010  (of this instance alone)

    def undo(self) -> None:
        """Take the hooks off; the state stays with the parameters."""
        optimizer = self._unhook()
        if optimizer is not None:
            optimizer.__dict__.pop("zero_grad", None)

    def _adopt_layout(self, optimizer: torch.optim.Optimizer, pieces: list[FlatPiece]) -> None:
        """Find the parameters in the buffer; another optimizer of the same module may lay it out anew."""
        self._pieces = pieces
        placed = {id(p) for piece in pieces for p in piece.parameters}
        self._frozen = [[p for p in group if id(p) not in placed] for group in self._groups]
        for run in self._runs:  # those of the layout before
            run.split_state(optimizer)
        runs = [_runs_of([p for p in group if id(p) in placed], pieces, optimizer) for group in self._groups]
        self._runs = [run for same in runs for run in same]
        self._flat = [[run.values for run in same] for same in runs]
        self._join(optimizer)

    def _join(self, optimizer: torch.optim.Optimizer) -> None:
        for run in self._runs:
            run.join_state(optimizer)

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._own is not None:
            self._put_back(optimizer)  # the last step raised half-way
        check_no_closure("fuse_step", (*args[1:], *kwargs.values()))
        check_same_groups(
            "fuse_step: the parameter groups of the optimizer changed",
            optimizer,
            self._held,
            expected="the groups that fuse_step was applied to",
            fix="add all groups first: optimizer, ctx = weft.fuse_step(optimizer, ctx)",
        )
        buffer = self._buffer()
        if buffer is not None and buffer.pieces is not self._pieces:  # frozen or unfrozen, or of another optimizer
            self._adopt_layout(optimizer, buffer.pieces)
        gradients = [run.gradients if run.has_gradients() else None for run in self._runs]
        for run, gradient in zip(self._runs, gradients, strict=True):
            run.values.grad = gradient
            if run.state:
                optimizer.state[run.values] = run.state
        # A gradient from before a parameter was frozen counts, as in a plain step.
        pairs = zip(self._flat, self._frozen, strict=True)
        self._give(optimizer, [[*flat, *(p for p in frozen if p.grad is not None)] for flat, frozen in pairs])

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._put_back(optimizer)

    def _put_back(self, optimizer: torch.optim.Optimizer) -> None:
        self._give_back(optimizer)
        for run in self._runs:
            state = optimizer.state.pop(run.values, None)
            if state and not run.state:
                run.state = state
                run.split_state(optimizer)
            elif run.values.grad is not None:
                run.refresh_copies()
            # The parameters changed without torch noticing: their version is what tells others.
            torch.autograd.graph.increment_version(run.parameters)


def _zero_grad(owner: weakref.ref[torch.optim.Optimizer], set_to_none: bool = True) -> None:
    """`optimizer.zero_grad` of one optimizer."""
    optimizer = owner()
    assert optimizer is not None
    if not set_to_none:
        type(optimizer).zero_grad(optimizer, set_to_none=False)
        return
    for parameter in parameters_of(optimizer):
        parameter.grad = None


def _runs_of(
    group: Sequence[torch.Tensor], pieces: Sequence[FlatPiece], optimizer: torch.optim.Optimizer
) -> list[_FlatSlice]:
    """Cut a group into the longest stretches that lie side by side in one piece and were stepped equally often."""
    places = {id(p): (number, index) for number, piece in enumerate(pieces) for index, p in enumerate(piece.parameters)}
    wanted = sorted(places[id(p)] for p in group)
    shared = [_shared_state(optimizer, pieces[number].parameters[index]) for number, index in wanted]
    runs: list[_FlatSlice] = []
    start = 0
    for end in range(1, len(wanted) + 1):
        goes_on = end < len(wanted) and wanted[end] == (wanted[end - 1][0], wanted[end - 1][1] + 1)
        if not goes_on or shared[end] != shared[end - 1]:
            number, first = wanted[start]
            runs.append(_FlatSlice(pieces[number], first, wanted[end - 1][1] + 1))
            start = end
    return runs


def _shared_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, object]:
    """What the state of a parameter has in common with that of its neighbours; a parameter unfrozen late has other."""
    state = optimizer.state.get(parameter, {})
    return {
        key: float(value) if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
        if key in SHARED_STATE or not isinstance(value, torch.Tensor)
    }
