"""expert_parallel: a layer in which a token depends on the tokens beside it is refused, however it is written."""

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

    def route(self, x):
        return self.router(x).softmax(-1).topk(2, -1)

    def forward(self, x):
        weights, chosen = self.route(x)
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


# -- functions of the tokens of one rank, around the experts -----------------------------------------------


def relu():
    return Expert(torch.relu)


class ExpertsChoose(Listed):
    """Each expert takes its best tokens; or tokens take the experts that are good enough."""

    def __init__(self, *, unsound):
        super().__init__(relu)
        self.unsound = unsound

    def forward(self, tokens):
        x = tokens.flatten(0, -2)
        scores = self.router(x).softmax(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if self.unsound:
                token = scores[:, number].topk(len(x) // 4).indices
            else:
                token = torch.where(scores[:, number] > 0.25)[0]
            result = result.index_add(0, token, expert(x[token]) * scores[token, number, None])
        return (x + result).view_as(tokens)


class Attending(ExpertsChoose):
    """Attention over the positions of a row, in one module with the experts."""

    def forward(self, x):
        return super().forward(x + F.scaled_dot_product_attention(x, x, x))


class OneRow(nn.Module):
    """A layer of tokens [rows, positions, features], or [tokens, features]."""

    def __init__(self, layer, *, is_flat):
        super().__init__()
        self.layer, self.is_flat = layer, is_flat

    def forward(self, x):
        return self.layer(x.flatten(0, 1) if self.is_flat else x)


class Slots(Listed):
    """Experts see means over tokens."""

    def __init__(self, axis):
        super().__init__(relu)
        self.axis = axis

    def forward(self, x):
        scores = self.router(x)
        if self.axis:
            return x + sum(expert(x * scores[:, n, None].sigmoid()) for n, expert in enumerate(self.experts))
        slots = scores.softmax(0).mT @ x
        rows = [expert(slots[number : number + 1]) for number, expert in enumerate(self.experts)]
        return x + scores.softmax(1) @ torch.cat(rows)


class Routed(Listed):
    """A router with a function of what it gives, [tokens, experts]."""

    def __init__(self, change):
        super().__init__(relu)
        self.change = change

    def route(self, x):
        return self.change(self.router(x)).softmax(-1).topk(2, -1)


class RoutedStack(Stacked):
    def __init__(self, change):
        super().__init__(torch.relu)
        self.change = change

    def forward(self, x):
        weights, chosen = self.change(self.router(x)).softmax(-1).topk(2, -1)
        return x + self.experts(x, chosen, top_k_weights=weights)


class Balanced(Listed):
    """A loss of its router: a product of two means over tokens, or one mean of squares."""

    def __init__(self, load):
        super().__init__(relu)
        self.load = load

    def route(self, x):
        scores = self.router(x).softmax(-1)
        top = scores.topk(2, -1)
        load = self.load(F.one_hot(top.indices, EXPERTS).double().mean((0, 1)))
        self.aux = EXPERTS * (load * scores.mean(0)).sum()
        return top


class Biased(Listed):
    """Experts that many tokens have chosen are chosen less in the next call; or it is only counted how many have."""

    def __init__(self, *, unsound):
        super().__init__(relu)
        self.unsound = unsound
        self.register_buffer("bias", torch.zeros(EXPERTS))

    def route(self, x):
        scores = self.router(x).softmax(-1)
        chosen = (scores + self.bias if self.unsound else scores).topk(2, -1).indices
        if self.training:
            load = F.one_hot(chosen, EXPERTS).sum((0, 1)).double()
            self.bias += 0.05 * (load.mean() - load).sign()
        return scores.gather(1, chosen), chosen


class TimeFirst(Listed):
    """Attention and experts in one module, [positions, rows, features]; what attends may be rows."""

    def __init__(self, axis):
        super().__init__(relu)
        self.axis = axis

    def forward(self, x):
        x = x.view(-1, 4, WIDTH).transpose(0, 1).contiguous()
        scores = torch.einsum("asd,bsd->sab" if self.axis else "abd,acd->abc", x, x).softmax(-1)
        x = x + (scores.matmul(x.transpose(0, 1)).transpose(0, 1) if self.axis else scores.matmul(x))
        return super().forward(x.flatten(0, 1)).view_as(x).transpose(0, 1).flatten(0, 1)


AROUND = {
    "chosen by experts": tuple((lambda one=one: ExpertsChoose(unsound=one)) for one in (True, False)),
    "slots": (lambda: Slots(0), lambda: Slots(1)),
    "jitter by place": (
        lambda: Routed(lambda scores: scores + torch.outer(torch.arange(len(scores)), torch.arange(EXPERTS)).sin()),
        lambda: Routed(lambda scores: scores + torch.arange(EXPERTS).sin()),
    ),
    "stacked, softmax over tokens": (
        lambda: RoutedStack(lambda scores: scores.softmax(0)),
        lambda: RoutedStack(lambda scores: scores.softmax(1)),
    ),
    "stacked, capacity": (
        lambda: RoutedStack(lambda scores: scores * (scores.argmax(-1)[:, None] == torch.arange(4)).cumsum(0).le(3)),
        lambda: RoutedStack(lambda scores: scores * (scores.argmax(-1)[:, None] == torch.arange(4)).cumsum(1).le(3)),
    ),
    "balance": (lambda: Balanced(lambda load: load), lambda: Balanced(lambda load: torch.full_like(load, 0.25))),
    "bias by load": tuple((lambda one=one: Biased(unsound=one)) for one in (True, False)),
    "attention in the layer": (lambda: TimeFirst(0), lambda: TimeFirst(1)),
}
PAIRS = {
    **AROUND,
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
    return F.mse_loss(model(x), y) + getattr(model.layer, "aux", 0)


def train(ctx, make, watch=None, units=None):
    model = made(make)
    if watch is not None:
        watch.begin(model)
    model, ctx = weft.expert_parallel(model, ctx)
    if units is None:
        model, ctx = weft.replicate(model, ctx, unused="zero")
    else:
        model, ctx = weft.fully_shard(model, ctx, units=units, unused="zero")
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


def single_rows(ctx, kind, is_flat):
    refused = []
    for unsound in (True, False):
        torch.manual_seed(0)
        model, _ = weft.expert_parallel(OneRow(kind(unsound=unsound), is_flat=is_flat).double(), ctx)
        x = torch.randn(1, 8, WIDTH, generator=torch.Generator().manual_seed(ctx.rank), dtype=torch.float64)
        try:
            model(x)
        except ProbeFailed:
            refused.append(unsound)
    return refused


@pytest.mark.parametrize(("kind", "is_flat"), [(ExpertsChoose, True), (ExpertsChoose, False), (Attending, False)])
def test_a_rank_with_a_single_row_compares_it_with_another_one(kind, is_flat):
    assert run_ranks(single_rows, 2, kind, is_flat, mesh={"expert": 2}) == [[True], [True]]


class BalancedTogether(Listed):
    """The loss of `Balanced`, of the tokens of all ranks."""

    def __init__(self, ctx):
        super().__init__(relu)
        self.ctx = ctx

    def route(self, x):
        scores = self.router(x).softmax(-1)
        top = scores.topk(2, -1)
        self.aux = weft.balance_loss(scores, top.indices, self.ctx) / 2
        return top


def balanced(ctx):
    """The loss of a router as the error says, though in forward."""
    error = attempt(train, ctx, PAIRS["balance"][0])
    return error.text, train(ctx, lambda: BalancedTogether(ctx))


def test_a_loss_of_the_router_is_that_of_the_tokens_of_all_ranks():
    expected = fit(made(PAIRS["balance"][0]), batches(), loss_of)
    found = run_ranks(balanced, 2, mesh={"expert": 2})
    assert all("weft.balance_loss(probs, chosen, ctx)" in text for text, _ in found)
    check_exact([one for _, one in found], expected)


def without_rows(ctx):
    """A layer that communicates itself, on ranks of which one has no rows."""
    model = made(lambda: BalancedTogether(ctx))
    model, inner = weft.expert_parallel(model, ctx)
    model, inner = weft.replicate(model, inner)
    model(batches()[0][0][: 5 * ctx.rank]).sum().backward()
    return model.layer.aux.item()


def test_a_rank_without_rows_does_not_wait_for_a_layer_that_communicates():
    expected = made(lambda: BalancedTogether(weft.local()))
    expected(batches()[0][0][:5])
    assert run_ranks(without_rows, 2, mesh={"expert": 2}) == [pytest.approx(expected.layer.aux.item())] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routing_of_each_token_is_measured_in_lower_precision_too(dtype):
    assert run_ranks(in_dtype, 2, dtype, mesh={"expert": 2}) == [(True, True)] * 2


def in_dtype(ctx, dtype):
    """Many tokens: in 16 bits, rounding sends some of them to other experts."""
    refused = []
    for unsound in (True, False):
        model = Net(ExpertsChoose(unsound=unsound)) if unsound else Net(Listed(relu))
        model, ctx_of_model = weft.expert_parallel(model.to(dtype), ctx)
        del ctx_of_model
        x = torch.randn(512, 3, generator=torch.Generator().manual_seed(ctx.rank)).to(dtype)
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
                model(x)
        except ProbeFailed:
            refused.append(True)
        else:
            refused.append(False)
    return refused[0], not refused[1]


def both_sharded(ctx, name, units):
    unsound, sound = PAIRS[name]
    return train(ctx, sound, units=units), attempt(lambda *args: train(*args, units=units), ctx, unsound)


@pytest.mark.parametrize("units", [["layer"], ["layer.experts.*"]])
@pytest.mark.parametrize("name", one_in(3, ["chosen by experts", "balance", "bias by load"]))
def test_so_is_one_whose_parameters_are_sharded(name, units):
    expected = fit(made(PAIRS[name][1]), batches(), loss_of)
    found = run_ranks(both_sharded, 2, name, units, mesh={"expert": 2})
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
