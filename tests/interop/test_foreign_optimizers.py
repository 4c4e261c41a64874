"""Optimizers of other libraries: in 8 bits, and those that average instead of following a schedule."""

import pytest
import torch
from torch import nn

import weft
from weft.testing import largest_difference, run_ranks

bitsandbytes = pytest.importorskip("bitsandbytes")
torchao = pytest.importorskip("torchao.optim")
schedulefree = pytest.importorskip("schedulefree")

STRATEGIES = ("replicate", "fully_shard", "gather_step", "owner", "zero1", "zero2", "zero3")
OPTIMIZERS = {
    "bitsandbytes": lambda parameters: bitsandbytes.optim.AdamW8bit(parameters, lr=0.01),
    "torchao": lambda parameters: torchao.AdamW8bit(parameters, lr=0.01),
    "schedulefree": lambda parameters: schedulefree.AdamWScheduleFree(parameters, lr=0.01, warmup_steps=2),
}
# What an error has to contain; everything else works.
REFUSED = {
    ("bitsandbytes", "fully_shard"): "weft.gather_step(optimizer, ctx)",
    **{("torchao", one): 'by="owner")' for one in ("gather_step", "zero1", "zero2", "zero3")},
    ("schedulefree", "owner"): 'leave by="owner" out',
    ("schedulefree", "zero1"): "stage=2",
}


def _build(ctx, kind, strategy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))  # 8 bits need 4096 elements per shard
    if kind == "schedulefree":
        model.double()
    if strategy in ("fully_shard", "gather_step", "owner"):
        model, ctx = weft.fully_shard(model, ctx)
    optimizer = OPTIMIZERS[kind](model.parameters())
    if strategy == "replicate":
        model, ctx = weft.replicate(model, ctx)
    elif strategy in ("gather_step", "owner"):
        by = "owner" if strategy == "owner" else "all"
        optimizer, ctx = weft.gather_step(optimizer, ctx, by=by)
    elif strategy != "fully_shard":
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=int(strategy[-1]))
    return model, optimizer, ctx


def _steps(model, optimizer, ctx, steps):
    for step in steps:
        if hasattr(optimizer, "train"):
            optimizer.train()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        model(x.chunk(ctx.world_size)[ctx.rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _result(model, optimizer, ctx):
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    with weft.full_params(model, ctx):
        return [p.detach().clone() for p in model.parameters()]


@torch.compiler.set_stance("force_eager")  # torchao compiles its step, which takes a minute
def _train(ctx, kind, strategies):
    found = {}
    for strategy in strategies:
        try:
            model, optimizer, here = _build(ctx, kind, strategy)
            _steps(model, optimizer, here, range(3))
            found[strategy] = _result(model, optimizer, here)
        except weft.errors.WeftError as error:
            found[strategy] = str(error)
    return found


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_they_step_as_in_one_process_or_are_refused(kind):
    expected = _train(weft.local(), kind, ["replicate"])["replicate"]
    for found in run_ranks(_train, 2, kind, STRATEGIES):
        for strategy, result in found.items():
            refusal = REFUSED.get((kind, strategy))
            if refusal is not None:
                assert isinstance(result, str) and refusal in result, (strategy, result)
            else:
                assert not isinstance(result, str), (strategy, result)
                # A last bit of a gradient, which two ranks average in another order, may round a state to another
                # one of 256 numbers; the strategies have the same bits.
                assert largest_difference(result, expected) < (1e-12 if kind == "schedulefree" else 1e-3), strategy
                assert largest_difference(result, found["replicate"]) < (1e-12 if kind == "schedulefree" else 1e-7)


def test_state_that_cannot_be_saved_is_refused_before_training():
    model, optimizer, ctx = _build(weft.local(), "torchao", "replicate")
    with pytest.raises(TypeError, match=r"(?s)found:    AdamW8bit of torchao.*fix: .*bitsandbytes.optim.AdamW8bit"):
        weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)


def _resumed(ctx, folder):
    """Saved in training mode, in the middle of a run."""
    found = []
    for strategy in ("replicate", "fully_shard", "zero2", "zero3"):
        model, optimizer, here = _build(ctx, "schedulefree", strategy)
        state, here = weft.checkpointable({"model": model, "optimizer": optimizer}, here)
        _steps(model, optimizer, here, range(2))
        weft.save(state, f"{folder}/{strategy}", 2, here)
        _steps(model, optimizer, here, range(2, 4))
        whole = _result(model, optimizer, here)
        model, optimizer, here = _build(ctx, "schedulefree", strategy)
        state, here = weft.checkpointable({"model": model, "optimizer": optimizer}, here)
        weft.restore(state, f"{folder}/{strategy}", here)
        _steps(model, optimizer, here, range(2, 4))
        found.append(largest_difference(whole, _result(model, optimizer, here)))
    return found


def test_a_schedule_free_run_resumes_bit_for_bit(tmp_path):
    for found in run_ranks(_resumed, 2, str(tmp_path)):
        assert found == [0, 0, 0, 0]
