"""What fails on 16 ranks alone fails in a rehearsal of 16, with the same error."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.errors import ContextError
from weft.testing import run_ranks


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = 12
        self.q, self.k, self.v, self.out = (nn.Linear(48, 48, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        return self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def heads(ctx):
    weft.tensor_parallel(nn.Sequential(Attention()), ctx, plan={"0.[qkv]": "column", "0.out": "row"})


def words(ctx):
    weft.tensor_parallel(nn.Sequential(nn.Embedding(20, 4)), ctx, plan={"0": "vocab"})


def dataset(ctx):
    loader, ctx = weft.shard_data(DataLoader(TensorDataset(torch.ones(12, 4)), 1), ctx)
    return lambda: next(iter(loader))


def batch(ctx):
    weft.shard_data(DataLoader(TensorDataset(torch.ones(64, 4)), 8), ctx, mode="split")


def unit(ctx):
    if 40 % ctx.world_size:
        raise RuntimeError(f"a unit of 40 rows cannot be divided by {ctx.world_size}")


def view(ctx):
    model, ctx = weft.replicate(nn.Linear(48, 48), ctx)
    return lambda: model(torch.ones(2, 48)).view(ctx.world_size * 5, -1)


def errors(ctx, programs):
    found = []
    for program in programs:
        try:
            program(ctx)()
        except (ValueError, RuntimeError, ContextError) as error:
            found.append((type(error), str(error)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "programs"),
    [({"data": 16}, [dataset, batch, unit, view]), ({"tensor": 16}, [heads, words])],
    ids=["data", "tensor"],
)
def test_errors_of_16_ranks_are_those_of_a_real_run(mesh, programs):
    then = run_ranks(errors, 16, programs, mesh=mesh)[0]
    assert len(then) == len(programs)
    for program, (kind, text) in zip(programs, then, strict=True):
        with pytest.raises(kind) as caught:
            weft.rehearse(program, 16, mesh=mesh)
        assert str(caught.value) == text
        assert "rank 0 of 16, at tests/rehearsal/test_errors.py:" in caught.value.__notes__[-1]
