"""expert_parallel of experts in lists, under strategies: training, checkpoints, and going back."""

import pytest
import torch
from torch import nn

import weft
from tests.variants import variant_cases, variants
from weft.testing import run_ranks


class Expert(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.up, self.down = nn.Linear(width, 5), nn.Linear(5, width)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Mixture(nn.Module):
    """Experts without tokens are called with no rows, or left out: then they have no gradient in one process."""

    def __init__(self, skips, width=6, experts=4):
        super().__init__()
        self.skips, self.router = skips, nn.Linear(width, experts)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            if len(row) or not self.skips:
                result = result.index_add(0, row, expert(x[row]) * weights[row, place, None])
        return x + result


def _net(skips):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), Mixture(skips), Mixture(skips), nn.Linear(6, 2)).double()


def _prepared(ctx, skips, strategy):
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(22, size, generator=generator, dtype=torch.float64) for size in (3, 2)]
    model = _net(skips)
    if "expert" in dict(ctx.axes):
        model, ctx = weft.expert_parallel(model, ctx)
    if strategy == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx, unused="zero")
    elif strategy == "replicate":
        model, ctx = weft.replicate(model, ctx, unused="zero")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if strategy == "zero1":
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=1, unused="zero")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=4)
    loader, ctx = weft.shard_data(loader, ctx, mode="split", uneven="empty")
    model, windows, ctx = weft.accumulate_grads(model, loader, ctx, steps=3)
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer, "loader": windows}, ctx)
    return model, optimizer, windows, state, ctx


def _epochs(model, optimizer, windows, ctx, count):
    numbers = []
    for _ in range(count):
        for window in windows:
            total = 0.0
            for x, y in window:
                loss = (model(x) - y).square().mean() * window.share if len(x) else model(x).sum() * 0
                loss.backward()
                total += loss.item()
            norm = weft.clip_grads(model, ctx, max_norm=0.3).item()
            optimizer.step()
            optimizer.zero_grad()
            numbers.append((total, norm))
    return numbers


def _own(model):
    named = {name: p for name, p in model.named_parameters() if not p.is_meta}
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for name, p in named.items()}


def _trained(ctx, skips, strategy, epochs=2, folder=None, *, resumes=False):
    model, optimizer, windows, state, ctx = _prepared(ctx, skips, strategy)
    if resumes:
        weft.restore(state, folder, ctx)
    numbers = _epochs(model, optimizer, windows, ctx, epochs)
    if folder is not None and not resumes:
        weft.save(state, folder, 1, ctx)
    return numbers, _own(model)


def _check(found, expected):
    numbers, parameters = expected
    for step, (loss, norm) in enumerate(numbers):
        assert abs(sum(own[step][0] for own, _ in found) / len(found) - loss) < 1e-12
        assert all(abs(own[step][1] - norm) < 1e-12 for own, _ in found)
    together = {name: value for _, own in found for name, value in own.items()}
    assert sorted(together) == sorted(parameters)
    assert max((together[name] - value).abs().max().item() for name, value in parameters.items()) < 1e-12


MESHES = [({"expert": 2}, 2), ({"data": 2, "expert": 2}, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("skips", "mesh", "ranks", "strategy"),
    [
        (True, *MESHES[0], "replicate"),
        (True, *MESHES[0], "fully_shard"),
        *variant_cases(
            (False, *MESHES[1], "fully_shard"),
            (True, *MESHES[1], "replicate"),
            (False, *MESHES[0], "replicate"),
            (False, *MESHES[0], "zero1"),
            (True, *MESHES[1], "zero1"),
        ),
    ],
)
def test_training_is_that_of_one_process(skips, mesh, ranks, strategy):
    (expected,) = run_ranks(_trained, 1, skips, None)
    _check(run_ranks(_trained, ranks, skips, strategy, mesh=mesh), expected)


@pytest.mark.parametrize(
    ("before", "after"),
    variant_cases(
        ((None, 1, None), ("fully_shard", 4, {"data": 2, "expert": 2})),
        (("replicate", 2, {"expert": 2}), (None, 1, None)),
        (("fully_shard", 4, {"data": 2, "expert": 2}), ("zero1", 2, {"expert": 2})),
    ),
)
def test_a_checkpoint_is_resumed_on_another_mesh(before, after, tmp_path):
    (expected,) = run_ranks(_trained, 1, True, None)
    first = run_ranks(_trained, before[1], True, before[0], 1, tmp_path, mesh=before[2])
    second = run_ranks(_trained, after[1], True, after[0], 1, tmp_path, resumes=True, mesh=after[2])
    half = len(expected[0]) // 2
    _check(second, (expected[0][half:], expected[1]))
    assert all(abs(own[step][1] - expected[0][step][1]) < 1e-12 for own, _ in first for step in range(half))


def _taken_back(ctx, skips, strategy):
    model, optimizer, windows, _, ctx = _prepared(ctx, skips, strategy)
    _epochs(model, optimizer, windows, ctx, 2)
    model, ctx = weft.undo(model, ctx, rebind=optimizer)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()  # on the state of all experts
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fully_shard", *variants("replicate", "zero1")])
def test_undo_gives_every_rank_all_experts(strategy):
    (expected,) = run_ranks(_taken_back, 1, True, None)
    for parameters in run_ranks(_taken_back, 2, True, strategy, mesh={"expert": 2}):
        assert not any(p.is_meta for p in parameters.values())
        assert max((parameters[name] - value).abs().max().item() for name, value in expected.items()) < 1e-12
