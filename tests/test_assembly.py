"""`assemble` does what the lines that it shows do, on every rank, and nothing else."""

import dataclasses
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.testing import run_ranks


class Block(nn.Linear):
    def forward(self, x):
        return x + super().forward(x).tanh()


def _parts():
    torch.manual_seed(0)
    model = nn.Sequential(Block(4, 4), Block(4, 4), nn.Linear(4, 1)).double()
    x = torch.randn(24, 4, dtype=torch.float64)
    return model, DataLoader(TensorDataset(x, x.prod(1, keepdim=True)), batch_size=3)


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)


SETTINGS = {
    "replicate": {"recompute": [Block], "accumulate": 2},
    "fully_shard": {
        "strategy": partial(weft.fully_shard, units=Block, reshard_after_forward=False),
        "accumulate": partial(weft.accumulate_grads, steps=2, reduce="every"),
    },
    "zero": {
        "strategy": [weft.sync_batch_norm, partial(weft.zero_partition, stage=2)],
        "compile": partial(weft.compile, backend="eager"),
        "accumulate": 4,
    },
    "16 bits": {"precision": weft.Precision(reduce=torch.bfloat16), "accumulate": 2},
}


def _train(model, optimizer, windows):
    for window in windows:
        for x, y in window:
            (nn.functional.mse_loss(model(x), y) * window.share).backward()
        optimizer.step()
        optimizer.zero_grad()


def _both_ways(ctx, name):
    settings, found = SETTINGS[name], []
    model, loader = _parts()
    parts, after = weft.assemble(ctx, model=model, optimizer=make_optimizer, loader=loader, **settings)
    assert parts.model is model
    _train(parts.model, parts.optimizer, parts.loader)
    with weft.full_params(model, after):
        found.append([p.detach().clone() for p in model.parameters()])
    model, loader = _parts()
    names = {"weft": weft, "torch": torch, "Block": Block, "make_optimizer": make_optimizer}
    names |= {"model": model, "loader": loader, "ctx": ctx}
    exec(str(parts), names)
    _train(names["model"], names["optimizer"], names["loader"])
    with weft.full_params(model, names["ctx"]):
        found.append([p.detach().clone() for p in model.parameters()])
    records = [[(each.name, each.options) for each in context.applied] for context in (after, names["ctx"])]
    return found, records[0] == records[1], parts.lines


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("16 bits", 1),
        ("fully_shard", 2),
        *(pytest.param(name, ranks, marks=pytest.mark.variant) for name in SETTINGS for ranks in (1, 2, 4)),
    ],
)
def test_the_lines_do_what_the_call_did(name, ranks):
    for (one, other), same_records, _ in run_ranks(_both_ways, ranks, name):
        assert same_records
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_lines_read_as_one_writes_them():
    model, loader = _parts()
    parts, _ = weft.assemble(
        weft.local(),
        model=model.float(),
        optimizer=lambda m: torch.optim.SGD(m.parameters()),
        loader=loader,
        precision="fp16",
        recompute=Block,
        strategy=partial(weft.zero_partition, stage=1),
        accumulate=2,
    )
    assert str(parts).splitlines() == [
        "loader, ctx = weft.shard_data(loader, ctx)",
        'model, ctx = weft.with_precision(model, ctx, "fp16")',
        "model, ctx = weft.recompute(model, ctx, blocks=Block)",
        "optimizer = make_optimizer(model)  # SGD",
        "optimizer, ctx = weft.skip_nonfinite(optimizer, ctx)",
        "model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=1)",
        "model, loader, ctx = weft.accumulate_grads(model, loader, ctx, steps=2)",
    ]
    with pytest.raises(dataclasses.FrozenInstanceError):
        parts.model = None


def test_a_model_alone():
    parts, ctx = weft.assemble(weft.local(), model=nn.Linear(2, 1))
    assert (parts.optimizer, parts.loader, str(parts)) == (None, None, "model, ctx = weft.replicate(model, ctx)")
    assert [each.name for each in ctx.applied] == ["replicate"]


@pytest.mark.parametrize(
    ("settings", "error", "found"),
    [
        ({"strategy": "ddp"}, ValueError, r"found:    'ddp'(.|\n)*fix:      weft.assemble"),
        ({"strategy": partial(weft.zero_partition, stage=1)}, ValueError, r"optimizer = None(.|\n)*fix:"),
        ({"accumulate": 2}, ValueError, r"loader = None(.|\n)*fix:"),
        ({"optimizer": make_optimizer(nn.Linear(1, 1))}, TypeError, r"a AdamW(.|\n)*fix:"),
        ({"precision": "bf17"}, ValueError, r"with_precision: policy(.|\n)*found:(.|\n)*fix:"),
    ],
)
def test_what_cannot_be_assembled_is_refused_before_anything_is_changed(settings, error, found):
    with pytest.raises(error, match=found):
        weft.assemble(weft.local(), model=nn.Linear(2, 1), **settings)
