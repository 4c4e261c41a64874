"""no_sync: loops written elsewhere decide by hand which backward pass communicates."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

import weft
from weft.contract import no_sync
from weft.testing import largest_difference, run_ranks

STRATEGIES = {
    "replicate": lambda model, optimizer, ctx: (weft.replicate(model, ctx)[0], optimizer),
    "flat": lambda model, optimizer, ctx: (weft.replicate(model, ctx, flat=True)[0], optimizer),
    "fully_shard": lambda model, optimizer, ctx: (weft.fully_shard(model, ctx, rebind=optimizer)[0], optimizer),
    "zero1": lambda model, optimizer, ctx: weft.zero_partition(model, optimizer, ctx, stage=1)[:2],
    "zero2": lambda model, optimizer, ctx: weft.zero_partition(model, optimizer, ctx, stage=2)[:2],
    "zero3": lambda model, optimizer, ctx: weft.zero_partition(model, optimizer, ctx, stage=3)[:2],
}
ENDS = ("backward", "step", "cleared", "raised")


def _train(ctx, strategy, end):
    """Updates of 3 micro-batches, the first two of which stay on this rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    model, optimizer = STRATEGIES[strategy](model, optimizer, ctx)
    sent = []
    for batches in data:
        parts = [batch.chunk(ctx.world_size)[ctx.rank] for batch in batches]
        for x in parts[:2]:
            loss = model(x).square().mean()
            with no_sync(model, ctx), CommDebugMode() as counter:
                loss.backward()
            if strategy != "fully_shard" and strategy != "zero3":  # these gather in backward
                sent.append(counter.get_total_counts())
        if end == "cleared":
            optimizer.zero_grad()
        if end == "raised":
            with pytest.raises(KeyError), no_sync(model, ctx):
                raise KeyError
        if end != "step":
            with no_sync(model, ctx, enabled=False):
                model(parts[2]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with weft.full_params(model, ctx):
        return [p.detach().clone() for p in model.parameters()], sum(sent)


@pytest.mark.parametrize(
    ("strategy", "ends"),
    [
        ("replicate", ENDS),
        ("fully_shard", ENDS),
        *(
            pytest.param(one, ENDS, marks=pytest.mark.variant)
            for one in STRATEGIES
            if one not in ("replicate", "fully_shard")
        ),
    ],
)
def test_gradients_that_stayed_are_reduced_or_dropped_as_in_one_process(strategy, ends):
    for end in ends:
        expected, _ = _train(weft.local(), strategy, end)
        for found, sent in run_ranks(_train, 2, strategy, end):
            assert largest_difference(found, expected) < 1e-12, end
            assert not sent


def test_windows_decide_by_themselves():
    model, ctx = weft.replicate(nn.Linear(1, 1), weft.local())
    model, _, ctx = weft.accumulate_grads(model, [1, 2], ctx, steps=2)
    with pytest.raises(weft.errors.ContractError, match="accumulate_grads decides"), no_sync(model, ctx):
        pass
    with pytest.raises(TypeError, match="no_sync"), no_sync([model], ctx):
        pass
