"""Let an optimizer step on flat buffers while it keeps its own parameter groups and state.

Before `step()` each group's parameters are exchanged for slices of the flat buffer, after it they
are put back. Between steps the optimizer looks as always: its groups hold the user's parameters,
its state holds views of the flat state, `state_dict` and schedulers work.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from weft.engines.torch.flat import FlatBuffer, FlatPiece
from weft.engines.torch.reducer import GradientReducer
from weft.errors import ContractError, OrderError, listed, message

__all__ = ["FlatStep", "check_elementwise", "flat_buffer_of"]

# Optimizers whose update of an element depends on that element alone.
_ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise `ValueError` if the update of an element may depend on others."""
    if type(optimizer) not in _ELEMENTWISE:
        raise ValueError(
            message(
                f"fuse_step: {type(optimizer).__name__} cannot step on a flat buffer",
                found=type(optimizer).__name__,
                expected="one of " + ", ".join(kind.__name__ for kind in _ELEMENTWISE),
                fix="leave weft.fuse_step out",
            )
        )


def flat_buffer_of(optimizer: torch.optim.Optimizer, reducers: Sequence[object]) -> FlatBuffer:
    """Find the flat buffer that holds all parameters of `optimizer`.

    Raises:
        OrderError: None of the reducers keeps one.
        ContractError: Parameters in it may be without gradient.
    """
    wanted = {id(p) for entry in optimizer.param_groups for p in entry["params"]}
    for reducer in reducers:
        if not isinstance(reducer, GradientReducer) or not isinstance(reducer.channel, FlatBuffer):
            continue
        if wanted <= {id(p) for piece in reducer.channel.pieces for p in piece.parameters}:
            if reducer.finds_unused:
                raise ContractError(
                    message(
                        'fuse_step: parameters may be without gradient with unused="zero"',
                        found='replicate(..., flat=True, unused="zero")',
                        expected="a gradient for every parameter in every step",
                        fix='weft.replicate(model, ctx, flat=True, unused="error")',
                    )
                )
            return reducer.channel
    raise OrderError(
        message(
            "fuse_step: the optimizer's parameters do not lie in a flat buffer",
            found=f"{len(wanted)} parameters with storages of their own",
            expected="replicate(..., flat=True), then the optimizer, then fuse_step",
            fix="model, ctx = weft.replicate(model, ctx, flat=True)",
        )
    )


class _Run:
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

    def is_attached(self) -> bool:
        """Whether every parameter's gradient lies in the buffer."""
        return all(map(operator.is_, [p.grad for p in self.parameters], self._views))

    def split_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Show each parameter its part of the state, as views."""
        start = 0
        for p in self.parameters:
            stop = start + p.numel()
            optimizer.state[p] = {
                key: value[start:stop].view(p.shape) if _is_elementwise(value, self.values) else value
                for key, value in self.state.items()
            }
            start = stop

    def join_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Build the flat state from the parameters', after `load_state_dict`."""
        states = [optimizer.state.get(p, {}) for p in self.parameters]
        joined: dict[str, Any] = {}
        for key, first in states[0].items():
            values = [state.get(key) for state in states]
            if isinstance(first, torch.Tensor) and first.shape == self.parameters[0].shape and first.dim() > 0:
                joined[key] = torch.cat([value.reshape(-1) for value in values if value is not None])
            else:
                if any(value is None or bool(value != first) for value in values):
                    raise ContractError(
                        message(
                            f"fuse_step: the loaded state {key!r} differs between parameters of one group",
                            found=listed(values),
                            expected="one value per group: its parameters were always stepped together",
                            fix="load the state before weft.fuse_step, or go on without it",
                        )
                    )
                joined[key] = first
        self.state = joined
        if joined:
            self.split_state(optimizer)


def _is_elementwise(value: object, like: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == like.shape


class FlatStep:
    """The hooks that exchange parameters for flat slices around `optimizer.step()`."""

    def __init__(self, optimizer: torch.optim.Optimizer, buffer: FlatBuffer) -> None:
        groups = [list(entry["params"]) for entry in optimizer.param_groups]
        buffer.lay_out([p for group in groups for p in group])
        self._runs = [_runs_of(group, buffer.pieces) for group in groups]
        self._all = [run for runs in self._runs for run in runs]
        self._flat = [[run.values for run in runs] for runs in self._runs]
        self._plain: list[list[torch.Tensor]] | None = None
        if optimizer.state:
            self._join(optimizer)
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            optimizer.register_load_state_dict_post_hook(self._join),
        ]

    def undo(self) -> None:
        """Take the hooks off; the state stays with the parameters."""
        for handle in self._handles:
            handle.remove()

    def _join(self, optimizer: torch.optim.Optimizer) -> None:
        for run in self._all:
            run.join_state(optimizer)

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) > 1 or kwargs:
            raise ContractError(
                message(
                    "fuse_step: step() was called with a closure",
                    found="optimizer.step(closure)",
                    expected="backward first, then optimizer.step()",
                    fix="loss = closure(); optimizer.step()",
                )
            )
        for run in self._all:
            run.values.grad = run.gradients if _has_gradients(run) else None
            if run.state:
                optimizer.state[run.values] = run.state
        self._plain = [entry["params"] for entry in optimizer.param_groups]
        for entry, flat in zip(optimizer.param_groups, self._flat, strict=True):
            entry["params"] = flat

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self._plain is not None
        for entry, plain in zip(optimizer.param_groups, self._plain, strict=True):
            entry["params"] = plain
        self._plain = None
        for run in self._all:
            state = optimizer.state.pop(run.values, None)
            if state and not run.state:
                run.state = state
                run.split_state(optimizer)
            # The parameters changed without torch noticing: their version is what tells others.
            torch.autograd.graph.increment_version(run.parameters)


def _has_gradients(run: _Run) -> bool:
    """Whether the run's gradients are there; puts strangers into the buffer first."""
    if run.is_attached():
        return True
    missing = [p for p in run.parameters if p.grad is None]
    if len(missing) == len(run.parameters):
        return False
    if missing:
        raise ContractError(
            message(
                f"fuse_step: {len(missing)} of {len(run.parameters)} parameters have no gradient",
                found=listed(f"a parameter of shape {tuple(p.shape)}" for p in missing),
                expected="all gradients of a group, or none",
                fix="optimizer.zero_grad() for all, or go on without weft.fuse_step",
            )
        )
    run.piece.attach()
    return True


def _runs_of(group: Sequence[torch.Tensor], pieces: Sequence[FlatPiece]) -> list[_Run]:
    """Cut a group into the longest stretches that lie side by side in one piece."""
    places = {id(p): (number, index) for number, piece in enumerate(pieces) for index, p in enumerate(piece.parameters)}
    wanted = sorted(places[id(p)] for p in group)
    runs: list[_Run] = []
    start = 0
    for end in range(1, len(wanted) + 1):
        if end == len(wanted) or wanted[end] != (wanted[end - 1][0], wanted[end - 1][1] + 1):
            number, first = wanted[start]
            runs.append(_Run(pieces[number], first, wanted[end - 1][1] + 1))
            start = end
    return runs
