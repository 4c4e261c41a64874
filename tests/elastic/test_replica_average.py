"""The mean of gradients over replicas, by the engine alone: ranks of a world, of which none dies."""

import operator
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from weft.engines.options import ReduceOptions
from weft.engines.torch.reducing.replica_average import ReplicaAverage
from weft.testing import largest_difference, run_ranks

WIDTH = 4


class Replicas:
    """All ranks; what they add up in the step `lost` comes to nothing."""

    def __init__(self, ctx, lost=-1):
        self.size, self.index, self.lost, self.calls = ctx.world_size, ctx.rank, lost, 0

    def add_up(self, tensors: Iterable[torch.Tensor], *, room=False):
        found = list(tensors)
        signal = found[0][-1:] if room else torch.zeros(1)
        signal.zero_()
        for tensor in found:
            dist.all_reduce(tensor)
        assert not signal.any()
        self.calls += 1
        return self.calls - 1 != self.lost


class Branches(nn.Module):
    """Parameters of one shape, of which a batch uses some."""

    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right, self.spare = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, branch):
        with torch.no_grad():
            self.seen += len(x)
        return getattr(self, branch)(torch.tanh(self.trunk(x)))


def _branches():
    torch.manual_seed(0)
    return Branches().double()


def _x(seed):
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _branch(step, rank):
    return ("left", "right")[step % 2] if step < 4 else ("left", "right")[rank % 2]


def _freeze(model, step):
    """Frozen and trained parameters change places, in shapes that stay the same."""
    model.spare.requires_grad_(step >= 3)
    model.right.requires_grad_(step != 2)
    model.left.requires_grad_(step not in (1, 3))


def _train(model, ranks, size, lost=-1):
    """Gradients after each step; `ranks` are those whose batches this process sees, of `size` in all."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    found = []
    for step in range(7):
        _freeze(model, step)
        for part in range(2 if step == 5 else 1):  # two backward passes for one step
            for rank in ranks:
                loss = model(_x(100 * step + 10 * part + rank), _branch(step, rank)).square().sum()
                if step == 6 and rank % 2 == 0:
                    loss = loss + model.spare(_x(rank)).square().sum()
                (loss / (size if len(ranks) > 1 else 1)).backward()
        if step == lost:
            optimizer.zero_grad()  # nothing was added up
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 4)
    return [p.detach().clone() for p in model.parameters()], found


def _on_ranks(ctx, lost):
    model = _branches()
    average = ReplicaAverage(model, Replicas(ctx, lost), ReduceOptions(unused="zero"), alone=True)
    backwards = iter([(step, part) for step in range(7) for part in range(2 if step == 5 else 1)])

    def before(module, args):
        step, part = next(backwards)
        if step == 5:
            average.last_backward() if part else average.begin_window()

    model.register_forward_pre_hook(before)
    found = _train(model, [ctx.rank], ctx.world_size, lost)
    average.undo()
    return found


@pytest.mark.parametrize("n", [2, 4])
def test_parameters_that_are_unused_or_change_places(n):
    expected, gradients = _train(_branches(), list(range(n)), n)
    for parameters, found in run_ranks(_on_ranks, n, -1):
        assert [[g is None for g in step] for step in found] == [[g is None for g in step] for step in gradients]
        assert largest_difference(parameters, expected) < 1e-12


def test_a_step_that_lost_a_replica_has_gradients_of_zero():
    expected, _ = _train(_branches(), [0, 1], 2, lost=4)
    for parameters, found in run_ranks(_on_ranks, 2, 4):
        assert all(g is None for g in found[4])
        assert largest_difference(parameters, expected) < 1e-12


def _addresses(ctx):
    """Where the gradient of the first layer lies: when it has arrived, and when it is averaged."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    average, found = ReplicaAverage(model, Replicas(ctx), ReduceOptions(), alone=True), []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: found.append(p.grad.data_ptr()))
    for _ in range(3):
        model(torch.ones(2, WIDTH)).sum().backward()
        found.append(model[0].weight.grad.data_ptr())
        model.zero_grad()
    average.undo()
    return found[1:]


def test_gradients_arrive_where_they_are_added_up():
    for found in run_ranks(_addresses, 2):
        assert len(found) == 5 and len(set(found)) == 1


def _overlapping(ctx):
    """The buffers of the first replica, while another forward pass waits for its backward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)).double()
    own = list(model.buffers())
    average, found = ReplicaAverage(model, Replicas(ctx), ReduceOptions(), alone=True), []
    one, two = (model(_x(10 * part + ctx.rank)).square().mean() for part in range(2))
    for loss in (one, two):
        loss.backward()
        found += [buffer.clone() for buffer in model.buffers()]
    average.undo()
    return [*found, *(p.grad for p in model.parameters())], all(map(operator.is_, own, model.buffers()))


def test_forward_passes_that_wait_keep_their_buffers():
    (one, same), (two, same_too) = run_ranks(_overlapping, 2)
    assert same and same_too and largest_difference(one, two) == 0
