"""Ranks that have no sample left in the last step: whether they go through it with the others, or are done before it.

A batch without rows keeps a rank in step with others whose loop makes collectives: gradients that are reduced, weights
that are gathered, metrics of each batch. In other loops it only does harm: the mean of no rows is not-a-number. So it
is measured what a loop does. A rank without samples goes along if the step before made a collective between ranks that
see different data, or a step of an optimizer. Otherwise it waits until a rank that has samples comes to a collective in
the step, or to the end of the step without one. No loop loses time by that: without collectives inside, the ranks
meet after it, to add up what they found.

[Note: the end of a step] Keys, below the prefix of the world:
    step/<loader>/<iteration>/<step>/<rank>   whether the step of this rank made collectives or steps of an optimizer
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weft import torch_internals
from weft.context import DistContext
from weft.context.rank_facts import rank_groups
from weft.engines.torch.hooks.every_optimizer import before_every_step
from weft.errors import PeerError, warn
from weft.peers.gloo_connections import groups_among
from weft.peers.liveness import find_culprit, is_behind, peer_error

if TYPE_CHECKING:
    from weft.data.split.position import Cursor
    from weft.data.split.read_plan import ReadPlan


_SLICE_S = 0.1  # how long the end of a step is waited for before its rank is asked what it does
_RANKS_PER_S = 1000.0  # that may ask
_KEPT = 10_000  # ends of steps that stay in the store, for ranks that are late


def lock_step(reading: ReadPlan, cursor: Cursor, ctx: DistContext) -> LockStep | None:
    """What watches the loops over a loader; None where no rank is without samples, or all ranks go along anyway."""
    given, world = reading.uneven_ranks, ctx.world
    uneven = reading.plan.allows_empty if given is None else given.uneven == "join" and given.counts is not None
    alone = ctx.data_size == 1 or world.store is None or world.pretended
    if not uneven or alone or ctx.replicas is not None or reading.plan.costs is not None:
        return None
    return LockStep(reading, cursor, ctx)


class LockStep:
    """Watches the loops over one loader.

    Attributes:
        together: Whether the last step of a loop made a collective, or a step of an optimizer.
    """

    def __init__(self, reading: ReadPlan, cursor: Cursor, ctx: DistContext) -> None:
        self.together = False
        self._reading, self._cursor, self._ctx = reading, cursor, ctx
        self._peers = next(ranks for ranks in rank_groups(ctx, ctx.data_axes) if ctx.rank in ranks)
        self._iterations = self._num_groups = 0
        self._counters: list[Callable[[], int]] = []  # of the groups that were there when there were so many
        self._told: deque[str] = deque()
        self._warned = False
        self._optimizer_steps = steps = [0]

        def count(*_: Any) -> None:  # without `self`, which would keep the cursor alive
            steps[0] += 1

        ctx.world.root.holders.add(before_every_step(cursor, count))

    def batches(self, given: Iterator[Any]) -> Iterator[Any]:
        """Yield what an iteration over the loader gives; without what has no rows, if this rank is done before."""
        cursor = self._cursor
        self._iterations += 1
        self._num_groups = 0
        first, stepped = True, self._optimizer_steps[0]
        for batch in given:
            assert cursor.last is not None
            if cursor.last.empty:
                if not self._goes_along(first=first):
                    continue
                if isinstance(batch, TypeError):  # it cannot be made
                    raise batch
                self._warn(evaluates=not torch.is_grad_enabled() or not (first or stepped < self._optimizer_steps[0]))
            first, step, begun = False, cursor.now.steps, self._begun()
            try:
                yield batch
            finally:
                self.together = self._begun() != begun
                if self._leader(step) == self._ctx.rank:
                    self._tell(step)

    def _begun(self) -> tuple[int, int]:
        """How many collectives among ranks that see different data, and steps of optimizers, this rank has begun."""
        known = len(torch_internals.world.found.pg_map)
        if known != self._num_groups:
            peers = {self._ctx.ranks[rank] for rank in self._peers}
            groups: list[Any] = groups_among(self._ctx.world.root.ranks)
            meeting = [group for group in groups if len(peers.intersection(dist.get_process_group_ranks(group))) > 1]
            self._counters = [torch_internals.MESSAGES_BEGUN.of(group) for group in meeting]
            self._num_groups = known
        return sum(count() for count in self._counters), self._optimizer_steps[0]

    def _leader(self, step: int) -> int | None:
        """A rank that has samples in a step in which another one has none, the same for all; None: there is none."""
        cursor, given = self._cursor, self._reading.uneven_ranks
        if given is None:
            return self._peers[0] if step == cursor.now.total else None
        assert given.counts is not None
        done = cursor.now.todo[-1].start // given.per_step
        return self._peers[given.counts.index(max(given.counts))] if done + step > min(given.counts) else None

    def _goes_along(self, *, first: bool) -> bool:
        """Whether this rank, which has no sample in the step, has to make it."""
        cursor = self._cursor
        leader = self._leader(cursor.now.steps)
        if self.together or cursor.weighed or cursor.has_windows or leader is None or len(cursor.now.todo) > 1:
            return True
        if first and self._reading.with_ids:  # `gather_metrics` learns of it what the others bring
            return True
        return self._ask(leader, self._key_of(cursor.now.steps, leader))

    def _ask(self, leader: int, key: str) -> bool:
        """Wait until it is seen what a rank does in the step; whether this one has to do it as well.

        Raises:
            PeerError: That rank failed or died.
        """
        world, root = self._ctx.world, self._ctx.world.root
        store, asked = world.store, root.store
        assert store is not None
        assert asked is not None
        member, end = world.members()[leader], time.monotonic() + world.timeout_s
        at = f"watch/at/{member}"
        while True:
            asked.add("watch/asked", 1)
            found = store.wait_for(key, max(_SLICE_S, world.size / _RANKS_PER_S))
            if found is None:
                theirs = asked.read(at, "collectives")["collectives"] if asked.has(at) else {}
                ahead = is_behind(root.collectives(), theirs) or _is_at_meeting(self._ctx, leader)
                blamed = None if ahead else find_culprit(world, [leader])
                if not ahead and blamed is None and time.monotonic() < end:
                    continue
                found = store.wait_for(key, 0)  # it may have gone on right after the step
                if found is None and blamed is not None:
                    if asked.has(f"parted/{member}") and asked.read(f"parted/{member}", "error")["error"] is None:
                        return False
                    raise peer_error("shard_data", *blamed)
            return True if found is None else bool(store.parsed(key, found))

    def _tell(self, step: int) -> None:
        """Write down that this rank has done a step in which others have no samples."""
        store = self._ctx.world.store
        if store is None or self._ctx.world.closed:
            return
        key = self._key_of(step, self._ctx.rank)
        with contextlib.suppress(PeerError):  # of a store that is gone: the loop may be left because of that
            store.write(key, self.together)
            self._told.append(key)
            if len(self._told) > _KEPT:
                store.delete(self._told.popleft())

    def _key_of(self, step: int, rank: int) -> str:
        return f"step/{self._reading.serial}/{self._iterations}/{step}/{rank}"

    def _warn(self, *, evaluates: bool) -> None:
        cursor, ctx = self._cursor, self._ctx
        weighed = self._reading.with_ids or cursor.weighed or cursor.has_windows or ctx.world.root.numbers["total"] > 0
        if self._warned or weighed or not evaluates:
            return
        self._warned = True
        warn(
            "shard_data: an evaluation got a batch without rows",
            found=f"no sample for rank {ctx.rank} in step {cursor.now.steps}, in which others wait for it: the loop, "
            "or the strategy of the model, makes collectives there. A sum over no rows is 0, a mean is not-a-number",
            expected="sums over samples instead of mean losses, or batches with rows that do not count",
            fix='loader, ctx = weft.shard_data(loader, ctx, uneven="pad", with_ids=True)\n'
            "for (x, y), ids in loader:\n"
            '    total += cross_entropy(model(x), y, reduction="none")[ids.valid].sum().item()\n'
            "    count += ids.valid.sum().item()",
        )


def _is_at_meeting(ctx: DistContext, leader: int) -> bool:
    """Whether another rank has come to a meeting to which this one has not."""
    world = ctx.world
    for each, rank in ((world, leader), (world.root, world.members()[leader])):
        key = f"meet/at/{rank}"
        if each.store is not None and each.store.has(key) and each.store.read(key, "number")["number"] > each.meetings:
            return True
    return False
