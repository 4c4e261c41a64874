"""All ranks have rank 0's buffers after each reduced backward pass, however many forward passes wait for theirs."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.functional import batch_norm

import weft
from tests.variants import variants
from weft.testing import largest_difference, run_ranks

pytestmark = pytest.mark.usefixtures("warm_ranks")


class _Around(nn.Module):
    """Two layers, and between them something with a buffer."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.between, self.last = nn.Linear(4, 6), kind(), nn.Linear(6, 2)

    def forward(self, x):
        return self.last(self.between(self.first(x)))


class _Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())


class _Statistics(nn.Module):
    """A batch norm that is no class of torch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))

    def forward(self, x):
        return batch_norm(x, self.mean, self.var, training=self.training)


class _NewAverage(nn.Module):
    """A moving average in a new tensor at each call, which autograd keeps."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(6))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x * self.mean


class _AverageOfSteps(nn.Module):
    """A moving average in place, once per step, which autograd keeps in all calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(6))
        self.stepped = True

    def forward(self, x):
        if self.stepped and self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.stepped = False
        return x * self.mean


class _Mask(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.arange(6) / 3)

    def forward(self, x):
        return x * self.mask


KINDS = [_Block, _Statistics, _NewAverage, _AverageOfSteps, _Mask]
# f: a forward pass; a letter: the backward pass of that one; e: an evaluation; E, T: model.eval() and model.train().
PATTERNS = {
    "one after the other": [("f", 0), ("f", 1), ("b", 0), ("b", 1)],
    "another way round": [("f", 0), ("f", 1), ("b", 1), ("b", 0)],
    "overlapping": [("f", 0), ("f", 1), ("b", 0), ("f", 2), ("b", 1), ("b", 2)],
    "two at once": [("f", 0), ("f", 1), ("b", 0, 1), ("f", 2), ("b", 2)],
    "evaluated in between": [("f", 0), ("f", 1), ("b", 0), ("e", 3), ("b", 1)],
    "one in eval mode": [("f", 0), ("mode", False), ("f", 1), ("mode", True), ("b", 0), ("b", 1)],
    "retained": [("f", 0), ("f", 1), ("r", 0), ("b", 1), ("b", 0)],
    "one without": [("f", 0), ("f", 1), ("b", 0)],
}


def _x(rank, number):
    return torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * number + rank))


def _evaluated(model, rank, number):
    model.eval()
    with torch.no_grad():
        found = model(_x(rank, number))
    model.train()
    return found


def _reduce(models):
    """What a strategy does when a backward pass has ended."""
    for same in zip(*(model.parameters() for model in models), strict=True):
        mean = sum(p.grad for p in same) / len(models)
        for p in same:
            p.total, p.grad = getattr(p, "total", 0) + mean, None
    for model in models[1:]:
        for name, value in models[0].named_buffers():
            owner, _, own = name.rpartition(".")
            model.get_submodule(owner)._buffers[own] = value.clone()


def _alone(kind, pattern, n):
    """What `n` ranks find, in one process: the values of rank 0 are in new tensors, so graphs keep what they had."""
    models = [_Around(kind).double() for _ in range(n)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    found = [[] for _ in models]
    for step in range(2):
        losses = [{} for _ in models]
        for what, *numbers in pattern:
            if what in "br":
                for its in losses:
                    sum(its[number] for number in numbers).backward(retain_graph=what == "r")
                _reduce(models)
            for rank, model in enumerate(models):
                if what == "f":
                    losses[rank][numbers[0]] = model(_x(rank, 10 * step + numbers[0])).square().mean()
                elif what == "e":
                    found[rank].append(_evaluated(model, rank, numbers[0]))
                elif what == "mode":
                    model.train(numbers[0])
                else:
                    found[rank] += [buffer.clone() for buffer in model.buffers()]
        for model, optimizer in zip(models, optimizers, strict=True):
            for p in model.parameters():
                p.grad, p.total = p.total, 0
            optimizer.step()
            optimizer.zero_grad()
            model.between.stepped = True
    return [[*values, *model.parameters()] for values, model in zip(found, models, strict=True)]


def _strategy(name, model, ctx):
    if name.startswith("zero"):
        stage = int(name[4])
        model, optimizer, ctx = weft.zero_partition(model, torch.optim.SGD(model.parameters(), 0.1), ctx, stage=stage)
        return model, optimizer, ctx
    if "recompute" in name and isinstance(model.between, _Block):
        model, ctx = weft.recompute(model, ctx, blocks=[_Block])
    if "fully_shard" in name:
        model, ctx = weft.fully_shard(model, ctx)
    else:
        options = {"flat": {"flat": True}, "buckets": {"bucket_bytes": 100}}.get(name, {})
        model, ctx = weft.replicate(model, ctx, **options)
    return model, torch.optim.SGD(model.parameters(), 0.1), ctx


def _on_ranks(ctx, name, kind, pattern):
    model, optimizer, ctx = _strategy(name, _Around(kind).double(), ctx)
    found, own = [], list(model.buffers())
    for step in range(2):
        losses = {}
        for what, *numbers in pattern:
            if what in "br":
                sum(losses[number] for number in numbers).backward(retain_graph=what == "r")
            if what == "f":
                losses[numbers[0]] = model(_x(ctx.rank, 10 * step + numbers[0])).square().mean()
            elif what == "e":
                found.append(_evaluated(model, ctx.rank, numbers[0]))
            elif what == "mode":
                model.train(numbers[0])
            else:
                found += [buffer.clone() for buffer in model.buffers()]
        optimizer.step()
        optimizer.zero_grad()
        model.between.stepped = True
    if kind is not _NewAverage and len(losses) == sum(len(one) - 1 for one in pattern if one[0] == "b"):
        assert all(a is b for a, b in zip(own, model.buffers(), strict=True)), "the module has other tensors"
    with weft.full_params(model, ctx):
        return [*found, *(p.detach().clone() for p in model.parameters())]


def _all_on_ranks(ctx, name, cases):
    return [_on_ranks(ctx, name, kind, PATTERNS[title]) for kind, title in cases]


def _cases(name):
    """Where forward runs again in backward, it is to run in the mode it ran in."""
    every = itertools.product(KINDS, PATTERNS)
    return [(kind, title) for kind, title in every if "recompute" not in name or "eval mode" not in title]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "zero1",
        *variants("replicate", "flat", "buckets", "fully_shard", "zero3", "recompute, fully_shard hybrid"),
    ],
)
def test_forward_passes_that_wait_keep_their_buffers_and_all_ranks_get_those_of_rank_0(name):
    hybrid = "hybrid" in name
    n, mesh = (4, {"replica": 2, "shard": 2}) if hybrid else (2, None)
    cases = _cases(name)
    answers = run_ranks(_all_on_ranks, n, name, cases, mesh=mesh)
    for place, (kind, title) in enumerate(cases):
        expected = _alone(kind, PATTERNS[title], n)
        for rank in range(n):
            worst = largest_difference(answers[rank][place], expected[rank])
            assert worst < 1e-12, f"{kind.__name__}, {title}, rank {rank}: {worst}"


def _windows(ctx, split):
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(24, 4, dtype=torch.float64))
    loader, ctx = weft.shard_data(torch.utils.data.DataLoader(data, batch_size=4), ctx)
    model, ctx = weft.replicate(_Around(_Block).double(), ctx)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, loader, ctx = weft.accumulate_grads(model, loader, ctx, steps=2)
    for window in loader:
        for (x,) in window:
            losses = [model(sign * x).square().mean() * window.share for sign in (1, -1)]
            for loss in losses if split else [sum(losses)]:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*model.buffers(), *(p.detach() for p in model.parameters())]


def test_two_forward_passes_per_micro_batch():
    one, two = run_ranks(_windows, 2, True)
    whole, _ = run_ranks(_windows, 2, False)
    assert largest_difference(one, two) == 0 and largest_difference(one, whole) < 1e-12


def _adversaries(ctx, alone):
    """Three forward passes of the discriminator, of which two have backward passes of their own."""
    makes, judges = _Around(_Block).double(), _Around(_Block).double()
    makes.last = nn.Linear(6, 4).double()
    if not alone:
        makes, ctx = weft.replicate(makes, ctx)
        judges, ctx = weft.replicate(judges, ctx)
    optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (makes, judges)]
    for step in range(3):
        made = makes(_x(0, step))
        true, false = judges(_x(0, step + 50)).square().mean(), -judges(made.detach()).square().mean()
        true.backward()
        false.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        judges(made).square().mean().backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
    return [t.detach().clone() for part in (makes, judges) for t in (*part.buffers(), *part.parameters())]


def test_two_networks_of_which_one_is_called_three_times():
    expected = _adversaries(weft.local(), True)
    for found in run_ranks(_adversaries, 2, False):
        assert largest_difference(found, expected) < 1e-12
