"""offloaded: memory is given back inside, and all comes back bit for bit; on a device, see tests/simulated_device."""

import pytest
import torch
from torch import nn

import weft
from tests import lm
from tests.fix_lines.told import told
from tests.variants import variant_cases
from weft.tensors.dtensor import local
from weft.testing import run_ranks

HOWS = ("fully_shard", "zero1", "fuse", "local_steps")
MORE = ("replicate", "zero2", "zero3", "fp16", "powersgd", "gather_step")


class Model(lm.LM):
    def __init__(self):
        super().__init__()
        self.ends = nn.BatchNorm1d(lm.LENGTH)

    def forward(self, x):
        logits = super().forward(x)
        return logits + 0 * self.ends(logits.detach()).mean()


def _composed(ctx, how):
    torch.manual_seed(0)
    model = Model().to(torch.float32 if how == "fp16" else torch.float64)
    if how == "fp16":
        model, ctx = weft.with_precision(model, ctx, "fp16")
    if how in ("fully_shard", "gather_step"):
        model, ctx = weft.fully_shard(model, ctx, units=[lm.Block], reshard_after_forward=how != "gather_step")
    elif how in ("replicate", "fuse", "fp16", "powersgd"):
        compress = weft.precision.PowerSGD(rank=2) if how == "powersgd" else None
        model, ctx = weft.replicate(model, ctx, flat=how == "fuse", compress=compress)
    kind = torch.optim.Adafactor if how == "gather_step" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-2)
    if how.startswith("zero"):
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=int(how[-1]))
    elif how == "local_steps":
        model, optimizer, ctx = weft.local_steps(model, optimizer, ctx, every=2)
    elif how in ("fuse", "gather_step"):
        optimizer, ctx = getattr(weft, {"fuse": "fuse_step"}.get(how, how))(optimizer, ctx)
    elif how == "fp16":
        optimizer, ctx = weft.skip_nonfinite(optimizer, ctx)
    return model, optimizer, ctx


def _held(model, optimizer):
    state = [value for one in optimizer.state.values() for value in one.values() if isinstance(value, torch.Tensor)]
    return [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None), *state]


def _train(world, how, *, away):
    model, optimizer, ctx = _composed(world, how)
    emptied = 0
    for step in range(6):
        rows = weft.data.split_between(lm.samples(8 * (step + 1))[-8:], ctx)
        for moment in range(2):
            if moment:
                lm.loss_of(model, rows).backward()
            held = _held(model, optimizer)
            with weft.offloaded(model, optimizer, ctx) if away else torch.no_grad():
                emptied += sum(not local(one).untyped_storage().nbytes() for one in held)
            assert all(one is two for one, two in zip(held, _held(model, optimizer), strict=True))
        optimizer.step()
        optimizer.zero_grad(set_to_none=bool(step % 2))
    return [local(one.detach()).clone() for one in _held(model, optimizer)], emptied


def _away_and_back(ctx, hows):
    for how in hows:
        (found, emptied), (expected, none) = _train(ctx, how, away=True), _train(ctx, how, away=False)
        assert none == 0 < emptied
        assert all(map(torch.equal, found, expected)), how


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "hows"), [(2, HOWS), *variant_cases((1, HOWS), (2, MORE), (4, HOWS), (4, MORE))])
def test_twelve_times_away_and_the_run_is_the_same_bit_for_bit(ranks, hows):
    run_ranks(_away_and_back, ranks, hows, probes="off", timeout_s=120)


def _makes_room(ctx):
    model, ctx = weft.fully_shard(nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))), ctx, units=[nn.Linear])
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.ones(2, 512)).mean().backward()
        optimizer.step()
        with weft.offloaded(model, optimizer, ctx):
            torch.empty(2**22)
        optimizer.zero_grad()

    return step


@pytest.mark.slow
def test_a_rehearsal_shows_that_the_memory_is_free():
    found = weft.rehearse(_makes_room, ranks=8)
    assert found.at_rest.total > 2**21
    assert 4 * 2**22 <= found.step_peak.total < 4 * 2**22 + 2**16


def test_after_an_exception_all_is_back_too():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = [one.clone() for one in _held(model, optimizer)]
    with pytest.raises(KeyError), weft.offloaded(model, optimizer, weft.local()):
        optimizer.zero_grad()
        raise KeyError
    assert model.weight.grad is None
    expected = [one for one, now in zip(before, [1] * 2 + [0] * 2 + [1] * 6, strict=True) if now]
    assert all(map(torch.equal, expected, _held(model, optimizer)))
    model(torch.ones(1, 2)).sum().backward()  # and it is called again


def test_inside_nothing_uses_it(tmp_path):
    model, ctx, x = nn.Sequential(nn.Linear(2, 2)), weft.local(), torch.ones(1, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    names = {"model": model, "optimizer": optimizer, "ctx": ctx, "x": x}
    state, _ = weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)
    for part in (model, model[0]):
        with told("transforms/offloaded.py", "that wait in the memory") as it, weft.offloaded(model, optimizer, ctx):
            part(x)
        it.run(**names)
        assert part(x).shape == (1, 2)
    with told("transforms/offloaded.py", "that wait in the memory") as it, weft.offloaded(model, optimizer, ctx):
        optimizer.step()
    it.run(**names)
    with told("checkpoint/format/tensor_blocks.py", "has no values now") as it, weft.offloaded(model, optimizer, ctx):
        weft.save(state, tmp_path, 1, ctx)
    it.run(**names)
    weft.save(state, tmp_path, 1, ctx)


def test_what_is_refused():
    model, ctx = nn.Linear(2, 2), weft.local()
    with told("transforms/offloaded.py", "check_module('offloaded'") as it:
        weft.offloaded(model.state_dict(), (), ctx)
    it.run(model=model, optimizer=(), ctx=ctx)
    with pytest.raises(TypeError, match="something else than optimizers"):
        weft.offloaded(model, [model], ctx)
