"""`watch_loop`: optimizers that step in the loop over a sharded loader, as if there were one rank.

A model without a strategy raises nothing: each rank trains it on its own part of the data. Neither does a mean loss
that is not weighed where ranks have different numbers of samples. What a loop does is seen when an optimizer steps.
"""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from weft.context import DistContext
from weft.contract import GradSync, KeepsParameters, StepsApart, offered, wrapper_of_torch
from weft.data import ShardedLoader
from weft.engines.torch.ddp.trained import is_reduced
from weft.engines.torch.hooks.every_optimizer import before_every_step
from weft.errors import warn
from weft.tensors.bit_sums import can_be_read, sum_of_bits

__all__ = ["watch_loop"]

_STEPS = 16  # in which weights are compared


def watch_loop(loader: ShardedLoader[Any], ctx: DistContext) -> None:
    """Warn, once each, about what a step in the loop over `loader` lacks; as long as somebody has a loader of it.

    Collectives: none, and nobody is waited for; a number of this rank in the store where weights may drift apart.
    """
    if ctx.data_size > 1 and ctx.data_size == ctx.world_size and ctx.world.store is not None:
        before_every_step(loader.weft_cursor, _Watch(loader, ctx))  # the cursor: loaders of windows are copies with it


class _Watch:
    """A hook on all optimizers."""

    def __init__(self, loader: ShardedLoader[Any], ctx: DistContext) -> None:
        self._cursor = weakref.ref(loader.weft_cursor)
        self._reading = loader.weft_reading
        self._ctx = ctx
        self._key = f"loop/{ctx.world.next_number('loop')}"
        self._weighed = False
        self._steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer is about to step."""
        cursor = self._cursor()
        if cursor is None or cursor.last is None or self._ctx.world.closed:
            return  # outside of the loop
        self._weighed = self._weighed or cursor.weighed or self._ctx.world.root.numbers["total"] > 0
        if cursor.has_windows:
            cursor.has_windows = False
            warn(
                "shard_data: a step in a loop over a loader whose windows nobody uses",
                found="accumulate_grads made windows of this loader, and the loop is over the loader itself: it steps "
                "after each micro-batch",
                expected="a loop over the loader that accumulate_grads returned",
                fix="model, windows, ctx = weft.accumulate_grads(model, loader, ctx, steps=4); for window in windows: "
                "for batch in window: ...",
            )
        if not self._weighed:
            self._check_share(*cursor.last_size(self._reading))
        number = self._steps.get(optimizer, 0)
        if number < _STEPS:
            self._steps[optimizer] = _STEPS if self._compare(optimizer, number) else number + 1

    def _check_share(self, own: int | None, everyone: int | None) -> None:
        ranks = self._ctx.data_size
        if own is None or everyone is None or own * ranks == everyone:
            return
        self._weighed = True
        warn(
            "shard_data: a step on a loss that nothing weighs, where ranks have different numbers of samples",
            found=f"{own} samples on rank {self._ctx.rank}, {everyone} on all {ranks} ranks; the mean of their "
            "mean losses is not the mean over the samples",
            expected="mean losses times their share, or sums divided by weft.metrics.denominator",
            fix="loss = cross_entropy(model(x), y) * loader.share",
        )

    def _compare(self, optimizer: torch.optim.Optimizer, number: int) -> bool:
        """Compare weights after the first step with those of the other ranks, as far as they have come.

        Returns:
            Whether there is nothing more to be compared.
        """
        parameters = [p for entry in optimizer.param_groups for p in entry["params"]]
        if number == 0:
            return _is_reduced(parameters)
        world, store = self._ctx.world, self._ctx.world.store
        assert store is not None
        kind = type(optimizer).__name__
        shapes = hashlib.sha256(repr((kind, [list(p.shape) for p in parameters])).encode()).hexdigest()[:16]
        keys = [f"{self._key}/{shapes}/{rank}" for rank in range(world.size)]
        if number == 1:
            store.write(keys[world.rank], torch.stack([sum_of_bits(p).cpu() for p in parameters]).sum().item())
        if not all(store.has(key) for key in keys):
            return False
        if len({store.read(key) for key in keys}) > 1:
            warn(
                f"shard_data: ranks train apart: nothing averages the gradients that {kind} steps on",
                found=f"{len(parameters)} parameters without a strategy, with other values on each rank after a "
                "step, in a loop over a loader of which each rank reads a part",
                expected="a strategy that averages gradients over the ranks",
                fix="model, ctx = weft.replicate(model, ctx)  # or weft.fully_shard, weft.zero_partition",
            )
        return True


def _is_reduced(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether a strategy takes care of one of these parameters, or their values cannot be read here."""
    if any(is_reduced(p) for p in parameters) or not all(can_be_read(p) for p in parameters):  # type: ignore[arg-type]
        return True
    wanted = set(map(id, parameters))
    return any(id(p) in wanted for module in _reduced_modules() for p in module.parameters())


def _reduced_modules() -> Iterator[nn.Module]:
    """The living modules that have a strategy, of weft or of torch."""
    for found in gc.get_objects():
        if issubclass(type(found), nn.Module) and (
            any(offered(found, kind) for kind in (GradSync, KeepsParameters, StepsApart)) or wrapper_of_torch(found)
        ):
            yield found
