"""`torch.func` through a model that has a strategy: from its first forward pass on, as through the model alone."""

import pytest
import torch
from torch import nn

import weft
from weft.testing import largest_difference, run_ranks


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def _computed(model):
    """A derivative in one direction, the rows of a batch one by one, and gradients for each of them."""
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    with torch.no_grad():  # FSDP2 has no graph of gradients
        gradients = torch.func.vmap(torch.func.jacrev(lambda row: model(row).sum()))(x)
    return [
        one.detach()
        for one in (torch.func.jvp(model, (x,), (torch.ones_like(x),))[1], torch.func.vmap(model)(x), gradients)
    ]


def _first_passes(ctx, strategy, stage):
    model = _net()
    if strategy == "zero_partition":
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, _, ctx = weft.zero_partition(model, optimizer, ctx, stage=stage)
    else:
        model, ctx = getattr(weft, strategy)(model, ctx)
    found = _computed(model)
    model(torch.ones(2, 3, dtype=torch.float64) * ctx.rank).sum().backward()  # the strategy still works
    return [*found, *_computed(model)]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")  # torch's own, in `jvp`
@pytest.mark.parametrize(
    ("strategy", "stage"), [("replicate", 0), ("fully_shard", 0), ("zero_partition", 1), ("zero_partition", 3)]
)
def test_torch_func_computes_as_without_a_strategy_from_the_first_forward_pass_on(strategy, stage):
    expected = _computed(_net()) * 2
    for found in run_ranks(_first_passes, 2, strategy, stage):
        assert largest_difference(found, expected) < 1e-12
