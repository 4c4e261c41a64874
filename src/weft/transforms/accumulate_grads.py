"""`accumulate_grads`: the loader yields windows of micro-batches, one optimizer step per window.

A window is a value: it has a length, can be asked for the number of tokens in it over all ranks,
and knows which of its micro-batches is the last. Nothing outside it changes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NotRequired, TypedDict, TypeVar, Unpack, overload

import torch
from torch import nn
from torch.utils.data import DataLoader

from weft import torch_internals
from weft.checks import check_choice
from weft.completeness import find_loaders, incomplete
from weft.context import DistContext
from weft.contract import (
    GradSync,
    Part,
    Phase,
    StepsApart,
    applied_to,
    gradient_axes,
    offered,
    transform,
    wrapper_of_torch,
)
from weft.contract.no_sync import grad_syncs
from weft.data.windows.loader import Windows, known_length, windowed
from weft.data.windows.splitter import Remainder, Steps, WindowSplitter, check_steps
from weft.data.windows.sync import Reduce, WindowSync
from weft.engines.torch.steps.in_backward import check_has_gradients
from weft.errors import AlreadyApplied, type_error, value_error

B = TypeVar("B")
M = TypeVar("M", bound=nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module])


class _WindowOptions(TypedDict):
    """What a call gives besides modules and a loader: loaders of torch tell the type of their batches otherwise."""

    steps: Steps
    remainder: NotRequired[Remainder]
    reduce: NotRequired[Reduce]


@overload
def accumulate_grads(
    modules: M, loader: DataLoader[B], ctx: DistContext, **options: Unpack[_WindowOptions]
) -> tuple[M, Windows[B], DistContext]: ...
@overload
def accumulate_grads(
    modules: M, loader: Iterable[B], ctx: DistContext, **options: Unpack[_WindowOptions]
) -> tuple[M, Windows[B], DistContext]: ...
@transform(phase=Phase.FINISH, changes=Part.GRADIENTS, collective=True)
def accumulate_grads(
    modules: Any,
    loader: Any,
    ctx: DistContext,
    *,
    steps: Steps,
    remainder: Remainder = "step",
    reduce: Reduce = "last",
) -> tuple[Any, Any, DistContext]:
    """Let the loader yield windows of micro-batches: one optimizer step per window.

    A window knows its micro-batches, also for the short window at the end of an epoch: multiplying mean losses by
    `window.share` gives exactly the gradient of the mean over all samples of all ranks. Gradients are communicated only
    in the last backward of a window. For means over tokens there is `window.denominator(...)`. `break`, exceptions and
    other loaders inside a window change nothing.

        for window in loader:
            for x, y in window:
                loss = cross_entropy(model(x), y) * window.share
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    Changes: nothing; a copy of the loader comes back. The modules are only marked.
    Collectives: none here (a meeting through the store) and none while iterating.

    Warns:
        UserWarning: A `DataLoader` was not shared, on several ranks that average gradients; see `check`.

    Args:
        modules: The module, or a list, tuple or dict of several, whose gradients are accumulated
            over a window. Parts of them may be replicated instead of the whole.
        loader: A `DataLoader` (after `shard_data`), or any iterable of batches, with or without
            length; without one, windows are read ahead.
        ctx: The current context.
        steps: Micro-batches per window; or a function of the number of windows so far.
        remainder: What to do if an epoch does not fill the last window. "step": a short window; "drop": leave it out;
            "carry": start the first window of the next epoch with it.
        reduce: "last": gradients travel once per window; "every": in each backward (less memory for sharded
            gradients); "scatter": gradients of sharded parameters travel between the ranks that shard them in each
            backward, everything else once per window (hybrid sharding: between the replicas).

    Returns:
        `modules` itself; the loader of windows, with `len` in windows; `ctx` with this transform
        in `applied`.

    Raises:
        AlreadyApplied: A module or the loader is accumulated already; or torch's DDP or FSDP averages the gradients, of
            which a wrapper around the module is found in its first call.
        OrderError: A strategy or `shard_data` is applied afterwards.
        TypeError: The modules or the loader are something else.
        ValueError: An option is out of range, or the modules average over different ranks.
        ContextError: The ranks disagree.

    Example:
        >>> import weft
        >>> model, ctx = weft.replicate(nn.Linear(1, 1), weft.local())
        >>> model, windows, ctx = weft.accumulate_grads(model, [1, 2, 3], ctx, steps=2)
        >>> [list(window) for window in windows]
        [[1, 2], [3]]
    """
    if not callable(steps):
        check_steps(steps, "steps")
    for name, value, allowed in (
        ("remainder", remainder, ("step", "drop", "carry")),
        ("reduce", reduce, ("last", "every", "scatter")),
    ):
        fix = f"weft.accumulate_grads(model, loader, ctx, steps=4, {name}={allowed[0]!r})"
        check_choice("accumulate_grads", name, value, allowed, fix=fix)
    several = _flattened(modules)
    if not several or not all(isinstance(m, nn.Module) for m in several) or not isinstance(loader, Iterable):
        raise type_error(
            "accumulate_grads: takes modules and a loader",
            found=f"{', '.join(type(m).__name__ for m in several) or 'no module'}; {type(loader).__name__}",
            expected="one module, or a list, tuple or dict of them, and an iterable of batches",
            fix="model, loader, ctx = weft.accumulate_grads(model, loader, ctx, steps=4)",
        )
    check_has_gradients("accumulate_grads", [p for module in several for p in module.parameters()])
    syncs = grad_syncs(several)
    watched = [_NotAveragedByTorch(module) for module in several if not syncs and ctx.world_size > 1]
    # Without a strategy gradients are reduced by hand, if at all, and what the ranks read is not ours to judge.
    findings = find_loaders([loader], ctx, sure=True) if syncs else []
    if findings:  # the ranks may have datasets of their own
        warnings.warn(str(incomplete("accumulate_grads", [findings])), stacklevel=3)
    means = {mean for module in several for mean in _means(module)} or {1}
    if len(means) > 1:
        raise value_error(
            "accumulate_grads: the modules average their gradients over different numbers of ranks",
            found=f"{sorted(means)} ranks",
            expected="modules with one denominator in one window",
            fix="one accumulate_grads per module, each with a loader of its own",
        )
    axes = {axis for module in several for axis in gradient_axes(module, ctx)}
    parts = tuple(name for name, _ in ctx.axes if name in axes.difference(ctx.data_axes))
    splitter: WindowSplitter[Any] = WindowSplitter(steps, remainder, WindowSync(reduce, syncs, means.pop(), ctx, parts))
    windows = windowed(loader, splitter)
    # Ranks that differ in one of these would wait for each other for ever.
    number: object = f"schedule, at first {splitter.size_of(0)}" if callable(steps) else steps
    facts = {"steps": number, "remainder": remainder, "reduce": reduce}
    ctx.agree("accumulate_grads", facts | ({"windows per epoch": known_length(windows)} if syncs else {}))
    for each in watched:
        each.begin()
    return modules, windows, ctx


class _NotAveragedByTorch:
    """Refuses torch's wrappers: where no strategy averages gradients, windows are weighted for a program that adds up.

    A wrapper around a module is seen in its first call with gradients, where this ends.
    """

    def __init__(self, module: nn.Module) -> None:
        for part in module.modules():
            self._check(wrapper_of_torch(part))
        self._module = module

    def begin(self) -> None:
        """Look at calls of the module from now on."""
        self._hook = self._module.register_forward_pre_hook(self)

    @torch_internals.untraced
    def __call__(self, module: nn.Module, args: object) -> None:
        """The module is called."""
        if torch.is_grad_enabled():
            self._hook.remove()
            outer = torch_internals.active_ddp()
            is_applied = any(record.name == "accumulate_grads" for record in applied_to(module))  # not undone since
            if is_applied and outer is not None and any(part is module for part in outer.modules()):
                self._check("DistributedDataParallel")

    def _check(self, wrapper: str | None) -> None:
        if wrapper is not None:
            raise AlreadyApplied(
                f"accumulate_grads: torch's {wrapper} averages these gradients",
                found="a mean over the ranks, which window.share does not know of",
                expected="a strategy of weft, or gradients that the program adds up by itself",
                fix=f"model, ctx = weft.replicate(model, ctx)  # without {wrapper}, and before accumulate_grads",
            )


def _flattened(modules: Any) -> list[Any]:
    """The modules in a module, list, tuple or dict."""
    if isinstance(modules, nn.Module) or not isinstance(modules, (Mapping, Sequence)):
        return [modules]
    return list(modules.values() if isinstance(modules, Mapping) else modules)


def _means(module: nn.Module) -> set[int]:
    """Over how many ranks gradients of a module are averaged; 1 is said by those that only add up over other axes."""
    found = [[sync.mean_over for sync in offered(part, GradSync)] for part in module.modules()]
    apart = math.prod(offer.ranks_apart for offer in offered(module, StepsApart))
    means = {math.prod(each) for each in found if each}
    means = {apart * mean for mean in means - {1} or means}
    return means or ({apart} if apart > 1 else means)
