"""Precision(gather=...): sharded modules gather in 16 bits what autocast would cast."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from weft.engines.torch.amp import recast_saved_weights
from weft.testing import largest_difference, run_ranks

bf16, f32 = torch.bfloat16, torch.float32
GATHERED = weft.Precision(param=f32, compute=bf16, output=f32, gather=bf16)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width=16, tied=True, depth=3):
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head, self.spare = nn.Linear(width, 10, bias=False), nn.Linear(2, 2)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


def _model(tied=True):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Model(tied=tied)


def _whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def _train(ctx, policy, steps=1, **options):
    """Four updates of windows of so many micro-batches."""
    model, here = weft.with_precision(_model(), ctx, policy)
    sharded = {"units": Block, "unused": "zero", **options} if ctx.world_size > 1 else {}
    model, here = weft.fully_shard(model, here, **sharded)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen = {p.dtype for p in model.parameters()}
    batches = [torch.randint(0, 10, (8, 5), generator=torch.Generator().manual_seed(s)) for s in range(4 * steps)]
    loader = [batch.chunk(ctx.world_size)[ctx.rank] for batch in batches]
    model, loader, here = weft.accumulate_grads(model, loader, here, steps=steps)
    for window in loader:
        for tokens in window:
            (nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()) / steps).backward()
        optimizer.step()
        optimizer.zero_grad()
    with weft.full_params(model, here):
        inside = [p.detach().clone() for p in model.parameters()]
    found = [_whole(p) for p in model.parameters()]
    assert largest_difference(inside, found) == 0  # in float32, and not as they are gathered
    assert seen == {f32}
    return found


def _both(ctx):
    found = {}
    for steps in (1, 2):
        for options in ({}, {"reshard_after_forward": False}):
            plain = _train(ctx, "bf16", steps, **options)
            found[steps, *options] = largest_difference(plain, _train(ctx, GATHERED, steps, **options))
    reduced = weft.Precision(param=f32, compute=bf16, output=f32, gather=bf16, reduce=bf16)
    _train(ctx, reduced)
    return found


@pytest.mark.slow
def test_the_numbers_are_those_of_autocast():
    for found in run_ranks(_both, 2):
        assert max(found.values()) == 0, found  # what is gathered in 16 bits is what autocast casts, bit for bit


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, {"replica": 2, "shard": 2}])
def test_the_numbers_are_those_of_autocast_on_4_ranks(mesh):
    for found in run_ranks(_both, 4, mesh=mesh):
        assert max(found.values()) == 0, found


def _messages(ctx, policy):
    """Bytes of all-gathers in a forward pass without gradients, and dtypes in it."""
    model, here = weft.with_precision(_model(tied=False), ctx, policy)
    model, here = weft.fully_shard(model, here, units=Block)
    dtypes = {}
    for name, part in model.named_modules():
        part.register_forward_pre_hook(
            lambda part, _, name=name: dtypes.update({name: {p.dtype for p in part.parameters(recurse=False)}})
        )
    sent = []

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counts = func._schema.name == "c10d::_allgather_base_"
            if counts and args[1].dtype is not torch.int64:  # those of the gather order
                sent.append(args[1].nbytes)
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Counted():
        model(torch.zeros(1, 2, dtype=torch.long))
    return sum(sent), dtypes


def test_layers_are_gathered_in_16_bits_and_the_rest_as_it_is():
    (wide, _), _ = run_ranks(_messages, 2, "bf16")
    for half, dtypes in run_ranks(_messages, 2, GATHERED):
        assert dtypes["blocks.0.up"] == dtypes["head"] == {bf16}
        assert dtypes["blocks.0.norm"] == dtypes["embedding"] == {f32}
        rest = 4 * (10 * 16 + 3 * 32) / 2  # bytes per rank of embedding and norms
        assert half - rest == (wide - rest) / 2


def _forward(ctx, policy):
    model, here = Model(width=64, tied=False), ctx
    if policy is not None:
        model, here = weft.with_precision(model, here, policy)
    model, here = weft.fully_shard(model, here, units=Block)
    return lambda: model(torch.zeros(1, 2, dtype=torch.long)).sum()


def test_forward_keeps_no_casts_of_what_was_gathered():
    peaks = {
        policy: weft.rehearse(partial(_forward, policy=policy), 2, steps=1).timeline[-1].peak.total
        for policy in (None, "bf16")
    }
    assert peaks["bf16"] <= 1.1 * peaks[None], peaks


def _casts_made_again(ctx):
    kept = _train(ctx, "bf16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recast_saved_weights, "_SMALL", 0)  # these layers are so small that their casts are kept
        return largest_difference(kept, _train(ctx, "bf16"))


def test_casts_that_backward_makes_again_have_the_same_bits():
    assert set(run_ranks(_casts_made_again, 2)) == {0}


def _changed(ctx):
    model, here = weft.with_precision(Model(width=512, tied=False, depth=1), ctx, "bf16")
    model, here = weft.fully_shard(model, here, units=Block, ignored="head", unused="zero")
    loss = model(torch.zeros(2, 2, dtype=torch.long)).sum()
    with torch.no_grad():
        model.head.weight.mul_(2)  # on every rank
    with pytest.raises(RuntimeError, match=r"shape \(10, 512\) was changed in place"):
        loss.backward()


def test_a_cast_that_cannot_be_made_again_is_an_error():
    run_ranks(_changed, 2)


def _without_autocast(ctx):
    class Fussy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                return self.layer(x.float())

    model, here = weft.with_precision(Fussy(), ctx, GATHERED)
    model, here = weft.fully_shard(model, here)
    with pytest.raises(weft.errors.ContractError, match=r"(?s)found:    a Linear.*fix: .*model.layer, ctx, \"fp32\""):
        model(torch.ones(2, 4))
    model = Fussy()
    _, here = weft.with_precision(model.layer, ctx, "fp32")
    model, here = weft.with_precision(model, here, GATHERED)
    model, here = weft.fully_shard(model, here)
    model(torch.ones(2, 4)).sum().backward()
    model = _model()
    model, here = weft.with_precision(model, ctx, GATHERED)
    model, here = weft.fully_shard(model, here, units=Block)
    model, here = weft.undo(model, here)
    assert not any(part._forward_pre_hooks for part in model.modules())


def test_a_layer_without_autocast_is_named():
    run_ranks(_without_autocast, 2)


@pytest.mark.parametrize(
    "options", [{"gather": bf16}, {"gather": torch.float16, "compute": bf16}, {"gather": f32, "compute": f32}]
)
def test_another_dtype_than_autocasts_is_refused(options):
    with pytest.raises(ValueError, match=r"(?s)found:    gather=.*fix: .*gather=torch.bfloat16"):
        weft.Precision(**options)
