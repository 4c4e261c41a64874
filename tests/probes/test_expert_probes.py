"""expert_parallel: experts for which a token depends on the tokens beside it are refused, however they are written."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import weft
from tests.variants import one_in
from weft.errors import ProbeFailed
from weft.testing import run_ranks

from .attempts import STEPS, attempt, check_exact, check_refused, fit

ROWS, WIDTH, EXPERTS = 16, 6, 4


class Expert(nn.Module):
    """A feed-forward layer with a function between its layers, [tokens, features]."""

    def __init__(self, mix):
        super().__init__()
        self.up, self.down, self.mix = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH), mix

    def forward(self, x):
        return self.down(self.mix(self.up(x)))


class Listed(nn.Module):
    """Experts in a list."""

    def __init__(self, make):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), nn.ModuleList(make() for _ in range(EXPERTS))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            result = result.index_add(0, token, expert(x[token]) * weights[token, place, None])
        return x + result


class StackedExperts(nn.Module):
    """Experts as transformers has them."""

    def __init__(self, mix):
        super().__init__()
        self.num_experts, self.mix = EXPERTS, mix
        self.up = nn.Parameter(torch.randn(EXPERTS, 5, WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 5) / 3)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            if len(token):
                rows = F.linear(self.mix(F.linear(hidden_states[token], self.up[expert])), self.down[expert])
                result = result.index_add(0, token, rows * top_k_weights[token, place, None])
        return result


class Stacked(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), StackedExperts(mix)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        return x + self.experts(x, chosen, top_k_weights=weights)


class Net(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(3, WIDTH), layer, nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.last(self.layer(self.first(x)))


# -- functions of the tokens of one expert -----------------------------------------------------------------


def standardised(axis):
    return lambda h: (h - h.mean(axis, keepdim=True)) / (h.square().mean(axis, keepdim=True) + 1e-3).sqrt()


def up_to_capacity(axis):
    """What comes after the first three is dropped."""

    def drop(h):
        kept = torch.arange(h.shape[axis]) < 3
        return h * (kept[:, None] if axis == 0 else kept)

    return drop


def by_numpy(axis):
    return lambda h: h / (1 + torch.from_numpy(np.linalg.norm(h.detach().numpy(), axis=axis, keepdims=True)))


class Clipped(torch.autograd.Function):
    """The identity, whose backward pass divides by the size of the gradient."""

    @staticmethod
    def forward(ctx, h, axis):
        ctx.axis = axis
        return h.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.axis is None:
            return gradient / 2, None
        return gradient / (1 + gradient.norm(dim=ctx.axis, keepdim=True)), None


def joined_and_split(axis):
    """The tokens of an expert and a token more, which all of them see."""

    def run(h):
        more = torch.cat([h, h.sum(axis, keepdim=True)], axis).cumsum(axis)
        return more.narrow(axis, 0, h.shape[axis]) / 3

    return run


class Counting(nn.Module):
    """Divides by the number of tokens so far, or of features."""

    def __init__(self, axis):
        super().__init__()
        self.layer, self.seen, self.axis = nn.Linear(WIDTH, WIDTH), 0, axis

    def forward(self, x):
        self.seen += x.shape[self.axis]
        return self.layer(x) / (1 + self.seen if self.axis == 0 else x.shape[1])


LISTED = {
    "statistics of tokens": (standardised(0), standardised(1)),
    "capacity": (up_to_capacity(0), up_to_capacity(1)),
    "softmax": (lambda h: h.softmax(0), lambda h: h.softmax(1)),
    "number of tokens": (lambda h: h / (1 + len(h)), lambda h: h / (1 + len(h.mT))),
    "numpy": (by_numpy(0), by_numpy(1)),
    "where on a statistic": (
        lambda h: torch.where(h > h.mean(), h, 0.1 * h),
        lambda h: torch.where(h > h.mean(1, keepdim=True), h, 0.1 * h),
    ),
    "function of autograd": (lambda h: Clipped.apply(h, 0), lambda h: Clipped.apply(h, None)),
    "attention": (
        lambda h: F.scaled_dot_product_attention(h, h, h),
        lambda h: F.scaled_dot_product_attention(h[..., None], h[..., None], h[..., None])[..., 0],
    ),
    "cumsum of what is joined": (joined_and_split(0), joined_and_split(1)),
    "operator of aten": (
        lambda h: torch.ops.aten.roll.default(h, [1], [0]) + h,
        lambda h: torch.ops.aten.roll.default(h, [1], [1]) + h,
    ),
}
STACKED = {
    "stacked, statistics of tokens": (standardised(0), standardised(1)),
    "stacked, scaled by the largest": (
        lambda h: h / (1 + h.abs().max()),
        lambda h: h / (1 + h.abs().amax(-1, keepdim=True)),
    ),
    "stacked, order": (lambda h: h.sort(0).values, lambda h: h.sort(1).values),
    "stacked, vmap": (
        lambda h: torch.func.vmap(lambda one: one / (1 + one.norm()), 1, 1)(h),
        lambda h: torch.func.vmap(lambda one: one / (1 + one.norm()))(h),
    ),
}


def with_hooks(axis):
    """Each expert has a hook of its own, also those of other ranks."""

    def make():
        layer = Listed(lambda: Expert(lambda h: h))
        for expert in layer.experts:
            expert.register_forward_hook(lambda module, args, output: output - output.mean(axis, keepdim=True))
        return layer

    return make


PAIRS = {
    **{name: tuple((lambda mix=one: Listed(lambda: Expert(mix))) for one in pair) for name, pair in LISTED.items()},
    **{name: tuple((lambda mix=one: Stacked(mix)) for one in pair) for name, pair in STACKED.items()},
    "hooks": (with_hooks(0), with_hooks(1)),
    "counter": (lambda: Listed(lambda: Counting(0)), lambda: Listed(lambda: Counting(1))),
}


def made(make):
    torch.manual_seed(0)
    return Net(make()).double()


def batches():
    draw = torch.Generator().manual_seed(1)
    return [[torch.randn(ROWS, n, generator=draw, dtype=torch.float64) for n in (3, 2)] for _ in range(STEPS)]


def loss_of(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


def train(ctx, make, watch=None):
    model = made(make)
    if watch is not None:
        watch.begin(model)
    model, ctx = weft.expert_parallel(model, ctx)
    model, ctx = weft.replicate(model, ctx, unused="zero")
    rows = [[part.chunk(ctx.data_size)[ctx.data_rank] for part in batch] for batch in batches()]
    return fit(model, rows, loss_of, watch)


def both(ctx, name):
    unsound, sound = PAIRS[name]
    return train(ctx, sound), attempt(train, ctx, unsound)


@pytest.mark.parametrize("name", one_in(6, PAIRS))
def test_an_expert_that_mixes_tokens_is_refused(name):
    expected = fit(made(PAIRS[name][1]), batches(), loss_of)
    found = run_ranks(both, 2, name, mesh={"expert": 2})
    check_exact([one for one, _ in found], expected)
    check_refused([one for _, one in found])


def cannot_be_empty(h):
    if not len(h):
        raise RuntimeError("no tokens")
    return h


def refused_on_all_ranks(ctx):
    """An expert of which some ranks have no token, where one process has one."""
    model = made(lambda: Listed(lambda: Expert(cannot_be_empty)))
    with torch.no_grad():
        model.layer.router.bias.copy_(torch.tensor([0.6, 0.5, 0.3, 0.2]))
    model, ctx = weft.expert_parallel(model, ctx)
    x = torch.randn(2 if ctx.rank else 32, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    try:
        model(x)
    except ProbeFailed as error:
        return str(error)


def test_a_layer_that_one_rank_cannot_compute_alone_is_refused_on_all():
    found = run_ranks(refused_on_all_ranks, 4, mesh={"expert": 4})
    assert all("RuntimeError: " in text and "a call that one process can make as well" in text for text in found)
    assert any("no tokens" in text for text in found)
