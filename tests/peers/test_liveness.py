"""Which rank is to blame: one that belongs to the group in which another waits, and did not do its part."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.variants import variant_cases, variants
from weft.collectives import primitives
from weft.peers import straggler_watch
from weft.testing import RanksFailed, run_ranks

pytestmark = pytest.mark.usefixtures("warm_ranks")

_MESH = {"data": 2, "tensor": 2}


def _looks_often(patch, mesh):
    """A context of its own in which ranks that wait look after the others every few hundredths of a second."""
    patch.setattr(straggler_watch, "_PERIOD_S", 0.05)
    patch.setattr(straggler_watch, "_SURE_S", 0.2)
    patch.setattr(straggler_watch, "_STUCK_S", 0.4)
    patch.setattr(straggler_watch, "_STUCK_TOGETHER_S", 0.2)
    patch.setattr(primitives, "_SLICE", primitives._SLICE / 10)
    look = straggler_watch.StragglerWatch._look

    def counted(watch, world, store, place):
        look(watch, world, store, place)
        store.add(f"looks/{world.rank}", 1)

    patch.setattr(straggler_watch.StragglerWatch, "_look", counted)
    return weft.adopt(mesh=mesh)


def _until(condition):
    while not condition():
        time.sleep(0.01)


def _is_late(ctx, left, waiting):
    """Wait until ranks have left, and those that wait have looked at that often enough to be sure of what they see."""
    store = ctx.world.root.store
    for rank in left:
        _until(lambda rank=rank: store.has(f"parted/{rank}"))
    for rank in waiting:
        enough = store.add(f"looks/{rank}", 0) + 25
        _until(lambda rank=rank, enough=enough: store.add(f"looks/{rank}", 0) >= enough)


# -- what ranks wait in ------------------------------------------------------------------------------


def _reduce(ctx, sub):
    return lambda: weft.reduce(torch.ones(1), sub)


def _torch_reduce(ctx, sub):
    return lambda: dist.all_reduce(torch.ones(1), group=sub.group)


def _barrier(ctx, sub):
    return lambda: weft.barrier(sub)


def _gather_backward(ctx, sub):
    return lambda: weft.gather(torch.ones(2, requires_grad=True), sub, grad=True).sum().backward()


def _replicate(ctx, sub):
    model, _ = weft.replicate(nn.Linear(2, 2), sub)
    return lambda: model(torch.ones(1, 2)).sum().backward()


def _fully_shard(ctx, sub):
    model, _ = weft.fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), sub)
    return lambda: model(torch.ones(1, 2)).sum().backward()


_CALLS = [_reduce, _torch_reduce, _barrier, *variants(_gather_backward, _replicate, _fully_shard)]


def _other_line_leaves(ctx, make, mesh, axes):
    """The ranks of the first line wait for their last one, after all others have left."""
    with pytest.MonkeyPatch.context() as patch, _looks_often(patch, mesh) as ctx:
        sub = ctx.on(axes)
        call = make(ctx, sub)
        call()
        if 0 not in sub.ranks:
            return "left"
        last = sub.ranks[-1]
        if ctx.rank == last:
            _is_late(ctx, [rank for rank in range(ctx.world_size) if rank not in sub.ranks], sub.ranks[:-1])
        call()
        weft.reduce(torch.ones(1), sub)
        return "done"


@pytest.mark.parametrize("make", _CALLS)
def test_ranks_of_another_line_may_leave_first(make):
    assert run_ranks(_other_line_leaves, 4, make, _MESH, "data", timeout_s=55) == ["done", "left"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "axes"),
    [
        (_reduce, "data"),
        (_torch_reduce, ("data", "tensor")),
        (_barrier, ("data", "expert")),
        (_replicate, "data"),
        (_replicate, ("data", "tensor")),
    ],
)
def test_ranks_of_another_line_of_a_larger_mesh_may_leave_first(make, axes):
    found = run_ranks(_other_line_leaves, 8, make, {**_MESH, "expert": 2}, axes)
    assert found.count("done") == (2 if axes == "data" else 4) and found.count("left") == 8 - found.count("done")


def _subset_goes_on(ctx):
    with pytest.MonkeyPatch.context() as patch, _looks_often(patch, {"data": 3}) as ctx:
        sub = ctx.subset([0, 2])
        if not sub.here:
            return "left"
        if ctx.rank == 2:
            _is_late(ctx, [1], [0])
        weft.barrier(sub)
        return float(weft.reduce(torch.ones(1), sub, "sum"))


def test_who_is_not_in_a_subset_may_leave_first():
    assert run_ranks(_subset_goes_on, 3, timeout_s=55) == [2.0, "left", 2.0]


def _did_its_part(ctx, call):
    """Rank 0 has sent what it has to send, and leaves; rank 1 is late, and rank 2 waits for it."""
    with pytest.MonkeyPatch.context() as patch, _looks_often(patch, {"data": 3}) as ctx:
        weft.barrier(ctx)
        if ctx.rank == 1:
            _is_late(ctx, [0], [2])
        found = call(ctx)
        assert ctx.world.failure is None
        return found


def _gather(ctx):
    rows = [torch.zeros(1) for _ in range(3)] if ctx.rank == 2 else None
    dist.gather(torch.full((1,), float(ctx.rank)), rows, dst=2)
    return rows and [float(row) for row in rows]


def _sends(ctx):
    """Rank 2 is in the middle: it has more messages than the others."""
    value = torch.full((1,), float(ctx.rank))
    found = []
    if ctx.rank == 0:
        dist.send(value, 2)
    if ctx.rank == 2:
        for source in (0, 1):
            dist.recv(value, source)
            found.append(float(value))
    if ctx.rank == 1:
        dist.send(value, 2)
    return found


@pytest.mark.parametrize(
    ("call", "expected"), [(_gather, [None, None, [0.0, 1.0, 2.0]]), (_sends, [[], [], [0.0, 1.0]])]
)
def test_who_did_its_part_and_left_is_not_to_blame(call, expected):
    assert run_ranks(_did_its_part, 3, call, timeout_s=55) == expected


class _Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(2, 2) for _ in range(3))

    def forward(self, x):
        return self.third(self.second(self.first(x)))


def _pipeline(ctx, leaver):
    """The middle stage has more messages than the others; the last one is late, or one leaves."""
    with pytest.MonkeyPatch.context() as patch, _looks_often(patch, {"pipe": 3}) as ctx:
        model, _ = weft.pipeline(_Layers(), ctx, loss=nn.functional.mse_loss, axis="pipe", micro_batches=4)
        x = torch.ones(4, 2)
        model(x, x).backward()
        if ctx.rank == leaver:
            return "left"
        if ctx.rank == 2 and leaver is None:
            _is_late(ctx, [], [0, 1])
        model(x, x).backward()
        weft.barrier(ctx)
        return "done"


@pytest.mark.slow
def test_a_stage_that_is_late_is_waited_for_and_one_that_left_is_named():
    assert run_ranks(_pipeline, 3, None, timeout_s=55) == ["done"] * 3
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_pipeline, 3, 0, timeout_s=55)
    assert _named(caught.value) == {1: 0, 2: 0}


# -- what is a failure still -------------------------------------------------------------------------


def _fault(kind):
    if kind == "raises":
        raise ValueError("bad data")
    if kind == "killed":
        os.kill(os.getpid(), 9)


def _own_line_fails(ctx, make, kind):
    """Rank 2 does not come; rank 0 waits for it; ranks 1 and 3 are busy until rank 0 knows."""
    with pytest.MonkeyPatch.context() as patch, _looks_often(patch, _MESH) as ctx:
        sub, store = ctx.on("data"), ctx.world.store
        call = make(ctx, sub)
        call()
        store.add("ready", 1)
        _until(lambda: store.add("ready", 0) == ctx.world_size)  # a rank still in its first call would be told, too
        if 0 not in sub.ranks:
            _until(lambda: store.has("named"))
            return "busy"
        if ctx.rank == 2:
            return _fault(kind)
        try:
            call()
        finally:
            store.set("named", "1")
        return "done"


def _named(failed):
    return {rank: error.rank for rank, error in failed.errors.items() if isinstance(error, weft.errors.PeerError)}


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (_reduce, "leaves"),
        (_torch_reduce, "leaves"),
        (_barrier, "leaves"),
        (_barrier, "raises"),
        *variant_cases(
            (_replicate, "leaves"),
            (_fully_shard, "leaves"),
            *[(make, kind) for make in (_reduce, _torch_reduce, _replicate) for kind in ("raises", "killed")],
            (_barrier, "killed"),
        ),
    ],
)
def test_who_does_not_come_is_named_by_its_line_alone(make, kind):
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_own_line_fails, 4, make, kind, timeout_s=55)
    failed = caught.value
    assert _named(failed) == {0: 2}
    text = {"leaves": "left the job", "raises": "ValueError: bad data", "killed": "its process is gone"}[kind]
    assert failed.errors[0].text.startswith(text)


def _other_line_fails(ctx, kind):
    """Rank 1 fails; rank 0 waits for rank 2 of its line, which comes when rank 0 knows."""
    with pytest.MonkeyPatch.context() as patch, _looks_often(patch, _MESH) as ctx:
        sub, store = ctx.on("data"), ctx.world.store
        weft.reduce(torch.ones(1), sub)  # which asks for its shape once
        if ctx.rank == 1:
            return _fault(kind)
        if ctx.rank == 0:
            try:
                weft.reduce(torch.ones(1), sub)
            finally:
                store.set("named", "1")
        _until(lambda: store.has("named"))
        return "busy"


@pytest.mark.parametrize("kind", ["raises", *variants("killed")])
def test_a_failure_in_another_line_ends_the_job(kind):
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_other_line_fails, 4, kind, timeout_s=55)
    assert _named(caught.value) == {0: 1}


def _sends_no_more(ctx):
    """Rank 0 leaves, and rank 1 waits for a message of it, rank 2 for one of rank 1."""
    with pytest.MonkeyPatch.context() as patch, _looks_often(patch, {"data": 3}) as ctx:
        if ctx.rank:
            dist.recv(torch.ones(1), ctx.rank - 1)
        return "left"


def test_who_sends_no_message_is_named():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_sends_no_more, 3, timeout_s=55)
    assert _named(caught.value) == {1: 0, 2: 0}


def _fails_in_a_smaller_group(ctx):
    sub = ctx.subset([1, 2])
    if sub.here:
        with weft.collectives.all_or_none(sub):
            if ctx.rank == 2:
                raise ValueError("bad data")
    else:
        weft.barrier(ctx)


def test_ranks_are_named_by_their_numbers_in_the_job():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_fails_in_a_smaller_group, 3, timeout_s=55)
    assert _named(caught.value) == {0: 2, 1: 2}
