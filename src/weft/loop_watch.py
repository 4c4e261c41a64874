"""Optimizers that step as if there were one rank: in the loop over a sharded loader, or after `context_parallel`.

A model without a strategy raises nothing: each rank trains it on its own part of the data. Neither does a mean loss
that is not weighed where ranks have different numbers of samples. What a loop does is seen when an optimizer steps.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft.context import DistContext
from weft.contract import GradSync, KeepsParameters, StepsApart, offered, wrapper_of_torch
from weft.data import ShardedLoader
from weft.data.split.map_samples import BatchInfo
from weft.data.split.position import Cursor
from weft.engines.torch.hooks.every_optimizer import before_every_step
from weft.engines.torch.probes.compare import differing_ranks
from weft.engines.torch.reducing.trained import is_reduced
from weft.errors import ContractError, warn
from weft.tensors.checksums import can_be_read, checksums
from weft.tensors.remote_parameter import is_elsewhere

_STEPS = 16  # in which weights are compared


def watch_loop(loader: ShardedLoader[Any], ctx: DistContext) -> None:
    """Warn, once each, about what a step in the loop over `loader` lacks; as long as somebody has a loader of it.

    Collectives: none, and no waiting; a number of this rank in the store where weights may drift apart.
    """
    if ctx.data_size > 1 and ctx.data_size == ctx.world_size and ctx.world.store is not None:
        # The cursor: loaders of windows are copies with it.
        ctx.world.root.holders.add(before_every_step(loader.weft_cursor, _LoopWatch(loader, ctx)))


class PartsWatch:
    """Raises on all ranks when an optimizer steps on gradients of this rank's part of each sequence alone."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        """Look at the first step of each optimizer.

        Args:
            module: Whose parameters need gradients of all parts.
            group: The ranks that have them.
        """
        self._module = weakref.ref(module)
        self._group: dist.ProcessGroup | None = group
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._every_step = before_every_step(self, PartsWatch._look)

    def undo(self) -> None:
        """Look no more."""
        self.release()

    def release(self) -> None:
        """Let the process group go."""
        self._every_step.release()
        self._group = None

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare gradients that no strategy takes care of.

        Collectives: one all-gather of two numbers, if there are any.

        Raises:
            ContractError: They differ between the ranks.
        """
        module = self._module()
        if module is None or self._group is None or optimizer in self._seen:
            return
        self._seen.add(optimizer)
        mine = {id(p) for p in module.parameters() if not is_elsewhere(p)}
        gradients = [p.grad for p in _parameters_without_strategy(optimizer) if id(p) in mine and p.grad is not None]
        if gradients and differing_ranks(gradients, self._group, gradients[0].device):
            raise ContractError(
                f"context_parallel: each rank trains {type(module).__name__} on its part of each sequence alone",
                found=f"{type(optimizer).__name__} steps on {len(gradients)} gradients that differ between the ranks",
                expected="a strategy after context_parallel, which averages gradients over its axis and the data axes",
                fix="model, ctx = weft.replicate(model, ctx)  # or weft.fully_shard, weft.zero_partition",
            )


class _LoopWatch:
    """A hook on all optimizers."""

    def __init__(self, loader: ShardedLoader[Any], ctx: DistContext) -> None:
        self._reading = loader.weft_reading
        self._ctx = ctx
        self._key = f"loop/{ctx.world.next_number('loop')}"
        self._weighed = self._told = False
        self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, _SteppedOptimizer] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()

    def __call__(self, cursor: Cursor, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""
        if cursor.last is None or self._ctx.world.closed:
            return  # outside the loop
        self._weighed = self._weighed or cursor.weighed or self._ctx.world.root.numbers["total"] > 0
        if cursor.has_windows:
            cursor.has_windows = False
            warn(
                "shard_data: a step in a loop over a loader whose windows nobody uses",
                found="accumulate_grads made windows of this loader, and the loop is over the loader itself: it steps "
                "after each micro-batch",
                expected="a loop over the loader that accumulate_grads returned",
                fix="for window in windows:  # as accumulate_grads returned them\n    for x, y in window: ...",
            )
        self._check_repeated(cursor.last)
        if not self._weighed:
            self._check_share(*cursor.last_size(self._reading))
        self._look_at_weights(optimizer)

    def _check_repeated(self, given: BatchInfo) -> None:
        repeated, root = 0 if given.empty else len(given.ids) - given.valid, self._ctx.world.root
        if repeated and root.numbers["sync_batch_norm"] and not self._told:
            self._told = True
            warn(
                "sync_batch_norm: rows that repeat others count in the statistics of a batch",
                found=f'{repeated} of {len(given.ids)} rows on rank {self._ctx.rank}, as of uneven="pad"',
                expected="each sample once, as in one process",
                fix='loader, ctx = weft.shard_data(loader, ctx, uneven="empty")',
            )

    def _check_share(self, own: int | None, everyone: int | None) -> None:
        ranks, shares = self._ctx.data_size, self._reading.shares
        if not shares.short and (own is None or everyone is None or own * ranks == everyone):
            return
        self._weighed = True
        sizes = f"{own} samples on rank {self._ctx.rank}, {everyone} on all {ranks} ranks"
        warn(
            "shard_data: a step on an unweighted loss, with different numbers of samples on the ranks",
            found=f"{shares.odd or sizes}; the mean of their mean losses is not the mean over the samples",
            expected="mean losses times their share, or sums divided by weft.metrics.denominator",
            fix='loss = cross_entropy(model(x), y, reduction="sum") / weft.metrics.denominator(len(y), ctx)'
            if shares.odd
            else "loss = cross_entropy(model(x), y) * loader.share",
        )

    def _look_at_weights(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare weights that no strategy takes care of after a step with those of the other ranks."""
        count = sum(len(entry["params"]) for entry in optimizer.param_groups)
        seen = self._seen.get(optimizer)
        if seen is None or seen.count != count:  # also after add_param_group
            self._seen[optimizer] = _SteppedOptimizer(
                next(self._numbers), count, _parameters_without_strategy(optimizer)
            )
        elif seen.apart and seen.steps < _STEPS:
            seen.steps += 1
            if self._compare(type(optimizer).__name__, seen):
                seen.apart = []

    def _compare(self, kind: str, seen: _SteppedOptimizer) -> bool:
        """Compare them with those of the other ranks, as far as these have come.

        Returns:
            Whether there is nothing more to be compared.
        """
        world, store = self._ctx.world, self._ctx.world.store
        assert store is not None
        shapes = hashlib.sha256(repr((kind, [list(p.shape) for p in seen.apart])).encode()).hexdigest()[:16]
        keys = [f"{self._key}/{seen.number}/{shapes}/{rank}" for rank in range(world.size)]
        if seen.steps == 1:
            store.write(keys[world.rank], sum(checksums(seen.apart)))
        if not all(store.has(key) for key in keys):
            return False
        if len({store.read(key) for key in keys}) > 1:
            warn(
                f"shard_data: ranks train apart: nothing averages the gradients that {kind} steps on",
                found=f"{len(seen.apart)} of its {seen.count} parameters without a strategy, with other values on each "
                "rank after a step, in a loop over a loader of which each rank reads a part",
                expected="a strategy that averages gradients over the ranks, on a module that holds all of them",
                fix="model, ctx = weft.replicate(model, ctx)  # or weft.fully_shard, weft.zero_partition",
            )
        return True


@dataclass
class _SteppedOptimizer:
    """An optimizer that stepped: its parameters that no strategy takes care of, and steps in which they were looked at.

    `number` tells it from others over parameters of the same shapes.
    """

    number: int
    count: int
    apart: list[torch.Tensor]
    steps: int = 0


def _parameters_without_strategy(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of an optimizer that no strategy takes care of; none if values cannot be read here."""
    held = [p for entry in optimizer.param_groups for p in entry["params"]]
    alone = [p for p in held if p.requires_grad and not is_reduced(p)]
    if not alone or not all(map(can_be_read, alone)):
        return []
    covered = {id(p) for module in _reduced_modules() for p in module.parameters()}
    return [p for p in alone if id(p) not in covered]


def _reduced_modules() -> Iterator[nn.Module]:
    """The living modules that have a strategy, of weft or of torch."""
    for found in gc.get_objects():
        if issubclass(type(found), nn.Module) and (
            any(offered(found, kind) for kind in (GradSync, KeepsParameters, StepsApart)) or wrapper_of_torch(found)
        ):
            yield found
