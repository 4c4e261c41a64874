"""Ranks that wait in a group which does not notice that a peer is gone, as those of NCCL: they raise in seconds, name
the rank to blame, and no parameter has changed.
"""

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.peers.waiting_group import NAME, register, wait_for_all
from tests.variants import variant_cases
from weft.peers import straggler_watch
from weft.testing import RanksFailed, run_ranks

pytestmark = pytest.mark.usefixtures("warm_ranks")

_MESH = {2: None, 4: {"replica": 2, "shard": 2}}


def adopted(ctx, patch, mesh=None):
    """A context over a group of that kind; those that wait in it look after the others often."""
    ctx.world.watch.release()
    patch.setattr(straggler_watch, "_PERIOD_S", 0.05)
    patch.setattr(straggler_watch, "_SURE_S", 0.3)
    register()
    return weft.adopt(dist.new_group(list(range(ctx.world_size)), backend=NAME), device="cpu", mesh=mesh)


# -- what ranks wait in ------------------------------------------------------------------------------


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def _trains(model, optimizer):
    def step():
        model(torch.ones(2, 4)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, model


def replicate(ctx):
    model, ctx = weft.replicate(_model(), ctx)
    return _trains(model, torch.optim.AdamW(model.parameters()))


def stepped_by_hand(ctx):
    model, ctx = weft.replicate(_model(), ctx)

    def step():
        model(torch.ones(2, 4)).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
        model.zero_grad()

    return step, model


def fully_shard(ctx):
    model, ctx = weft.fully_shard(_model(), ctx, units=[nn.Linear])
    return _trains(model, torch.optim.AdamW(model.parameters()))


def hybrid_shard(ctx):
    model, ctx = weft.fully_shard(_model(), ctx, units=[nn.Linear], axis=("replica", "shard"))
    return _trains(model, torch.optim.AdamW(model.parameters()))


def _zero(ctx, stage):
    model = _model()
    model, optimizer, ctx = weft.zero_partition(model, torch.optim.AdamW(model.parameters()), ctx, stage=stage)
    return _trains(model, optimizer)


def zero1(ctx):
    return _zero(ctx, 1)


def zero2(ctx):
    return _zero(ctx, 2)


def zero3(ctx):
    return _zero(ctx, 3)


def torch_ddp(ctx):
    model = nn.parallel.DistributedDataParallel(_model(), process_group=ctx.group)
    return _trains(model, torch.optim.AdamW(model.parameters()))


def reduce(ctx):
    return lambda: weft.reduce(torch.ones(2), ctx), _model()


def torch_reduce_on_an_axis(ctx):
    sub = ctx.on("shard") if "shard" in dict(ctx.axes) else ctx
    return lambda: dist.all_reduce(torch.ones(2), group=sub.group), _model()


def torch_reduce_on_a_group_of_the_user(ctx):
    group = dist.new_group([0, 1], backend=NAME)
    return lambda: dist.all_reduce(torch.ones(2), group=group) if ctx.rank < 2 else weft.barrier(ctx), _model()


def item(ctx):
    def step():
        value = torch.ones(2)
        dist.all_reduce(value, group=ctx.group, async_op=True)
        wait_for_all()
        return value.sum().item()

    return step, _model()


def barrier(ctx):
    return lambda: weft.barrier(ctx), _model()


def save(ctx):
    model, ctx = weft.replicate(_model(), ctx)
    state, ctx = weft.checkpointable({"model": model}, ctx)
    steps = iter(range(1, 9))
    return lambda: weft.save(state, os.environ["CHECKPOINTS"], next(steps), ctx), model


# -- how the other one ends --------------------------------------------------------------------------


def raises():
    raise ValueError("bad data")


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def is_terminated():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def ends_at_once():
    os._exit(0)


def exits():
    sys.exit(3)


def leaves():
    pass


_TEXTS = {raises: "ValueError: bad data", exits: "SystemExit: 3", leaves: "left the job while others still work"}
_GONE = "its process is gone"


def _values(parameters):
    return [getattr(p, "_local_tensor", p).detach().clone() for p in parameters]


def _job(ctx, make, fault):
    with pytest.MonkeyPatch.context() as patch, adopted(ctx, patch, _MESH[ctx.world_size]) as ctx:
        step, model = make(ctx)
        for _ in range(2):
            step()
        parameters = list(model.parameters())  # FSDP2 puts others in their place while a unit is gathered
        before = _values(parameters)
        if ctx.rank == 1:
            fault()
            return
        try:
            for _ in range(2):
                step()
        finally:
            assert all(map(torch.equal, before, _values(parameters))), "a parameter has changed"


_WAITS = [
    replicate, stepped_by_hand, fully_shard, zero1, zero2, zero3, torch_ddp, reduce, torch_reduce_on_an_axis,
    torch_reduce_on_a_group_of_the_user, item, barrier, save,
]  # fmt: skip
_DEFAULT = [(2, replicate, raises), (4, fully_shard, is_killed), (2, item, leaves), (4, torch_reduce_on_an_axis, exits)]
_ALL = [
    *[(4, make, raises) for make in [*_WAITS, hybrid_shard]],
    *[(2, make, is_killed) for make in _WAITS],
    *[(4, replicate, fault) for fault in (is_killed, is_terminated, ends_at_once, exits, leaves)],
    *[(2, reduce, fault) for fault in (is_terminated, ends_at_once, exits, leaves)],
]


@pytest.mark.parametrize(
    ("ranks", "make", "fault"), [*_DEFAULT, *variant_cases(*[case for case in _ALL if case not in _DEFAULT])]
)
def test_who_waits_for_a_rank_that_does_not_come_raises_and_has_changed_nothing(
    ranks, make, fault, tmp_path, monkeypatch
):
    monkeypatch.setenv("CHECKPOINTS", str(tmp_path))
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_job, ranks, make, fault, timeout_s=55)
    assert time.monotonic() - start < 50
    errors = caught.value.errors
    # Ranks of another line may have had no need of it.
    waiting = [0] if make in (torch_reduce_on_an_axis, torch_reduce_on_a_group_of_the_user) else range(ranks)
    for rank in waiting:
        if rank != 1:
            assert isinstance(errors[rank], weft.errors.PeerError), errors
            assert errors[rank].rank == 1 and errors[rank].text.startswith(_TEXTS.get(fault, _GONE)), errors[rank]
