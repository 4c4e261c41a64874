"""pipeline: stages that mix the rows of a batch, and losses that are no mean over micro-batches, are refused."""

import itertools
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import weft
from tests.variants import one_in
from weft.engines.torch.pipeline import pipelined
from weft.testing import run_ranks

from .attempts import EXACT, STEPS, Watch, attempt, check_exact, check_refused, fit

ROWS, TOKENS, WIDTH, CLASSES = 8, 3, 6, 5


class Block(nn.Module):
    """A layer, and a function of its output: [rows, tokens, features]."""

    def __init__(self, mix=torch.tanh):
        super().__init__()
        self.layer, self.mix = nn.Linear(WIDTH, WIDTH), mix

    def forward(self, x):
        return x + self.mix(self.layer(x))


class Net(nn.Module):
    """Four blocks on two stages."""

    def __init__(self, early=Block, late=Block):
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList([early(), Block(), Block(), late()])
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return self.last(h)


def mean_squares(output, target):
    return F.mse_loss(output, F.one_hot(target, CLASSES).to(output.dtype))


# -- rows ------------------------------------------------------------------------------------------------


def standardised(axes):
    return lambda h: (h - h.mean(axes, keepdim=True)) / (h.var(axes, keepdim=True, unbiased=False) + 1e-5).sqrt()


def attended(axis):
    """Attention of rows to each other, or of tokens."""

    def run(h):
        h = h.movedim(axis, -2)
        return F.scaled_dot_product_attention(h, h, h).movedim(-2, axis)

    return run


def scaled_by_numpy(h):
    return h / np.abs(h.detach().numpy()).max()


def scaled_by_numpy_of_rows(h):
    return h / torch.from_numpy(np.abs(h.detach().numpy()).max(axis=(1, 2), keepdims=True))


def branching(h):
    return h * 2 if h.sum() > 3 else h * -3


def no_branching(h):
    return torch.where(h.sum((1, 2), keepdim=True) > 3, h * 2, h * -3)


def reversed_in_place(axis):
    def run(h):
        h = h.clone()
        h[:] = h.detach().flip(axis) + h
        return h

    return run


class Ranked(torch.autograd.Function):
    """Adds the place of each number among the others, with its gradient written by hand."""

    @staticmethod
    def forward(ctx, h, axis):
        return h + 0.1 * h.argsort(axis).argsort(axis)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def scripted_source(h: torch.Tensor, axis: int) -> torch.Tensor:
    return h - torch.logsumexp(h, dim=[axis], keepdim=True)


def scripted(axis):
    with warnings.catch_warnings(action="ignore"):  # that it is deprecated
        function = torch.jit.script(scripted_source)
    return lambda h: function(h, axis)


class Counter(nn.Module):
    """A factor that depends on how often the block was called, or on nothing but its input."""

    def __init__(self, *, is_used):
        super().__init__()
        self.layer, self.calls, self.is_used = nn.Linear(WIDTH, WIDTH), 0, is_used

    def forward(self, x):
        self.calls += 1
        return x + self.layer(x) / (self.calls if self.is_used else 1)


class Averaging(nn.Module):
    """A buffer with a moving average of what came through, which is read or not."""

    def __init__(self, *, is_used):
        super().__init__()
        self.layer, self.is_used = nn.Linear(WIDTH, WIDTH), is_used
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x):
        h = self.layer(x)
        self.average = 0.9 * self.average + 0.1 * h.detach().mean((0, 1))
        return x + h - (self.average if self.is_used else 0.1)


class Queue(nn.Module):
    """What came before, in a list."""

    def __init__(self, *, is_used):
        super().__init__()
        self.layer, self.is_used, self.seen = nn.Linear(WIDTH, WIDTH), is_used, [torch.zeros(WIDTH)]

    def forward(self, x):
        h = self.layer(x)
        before = self.seen[-1]
        self.seen.append(h.detach().mean((0, 1)))
        return x + (h - before if self.is_used else h)


class Hooked(Block):
    """A hook of the user on a layer."""

    def __init__(self, axis):
        super().__init__()
        self.layer.register_forward_hook(lambda part, args, output: output - output.amax(axis, keepdim=True))


ROWS_MIXED = {
    "batch statistics by hand": (standardised((0, 1)), standardised((1, 2))),
    "functional batch_norm": (
        lambda h: F.batch_norm(h.mT, None, None, training=True).mT,
        lambda h: F.instance_norm(h.mT).mT,
    ),
    "attention": (attended(0), attended(1)),
    "cumsum": (lambda h: h.cumsum(0), lambda h: h.cumsum(1)),
    "sort": (lambda h: h.sort(0).values, lambda h: h.sort(1).values),
    "roll": (lambda h: h + h.roll(1, 0), lambda h: h + h.roll(1, 1)),
    "einsum": (lambda h: torch.einsum("btf,cuf->btf", h, h), lambda h: torch.einsum("btf,buf->btf", h, h)),
    "numpy": (scaled_by_numpy, scaled_by_numpy_of_rows),
    "branch on a value": (branching, no_branching),
    "in place": (reversed_in_place(0), reversed_in_place(1)),
    "function of autograd": (lambda h: Ranked.apply(h, 0), lambda h: Ranked.apply(h, 1)),
    "script": (scripted(0), scripted(1)),
    "vmap": (
        lambda h: torch.func.vmap(lambda one: one - one.max(), 1, 1)(h),
        lambda h: torch.func.vmap(lambda one: one - one.max())(h),
    ),
    "operator of aten": (
        lambda h: torch.ops.aten._softmax.default(h, 0, False),
        lambda h: torch.ops.aten._softmax.default(h, 1, False),
    ),
    "number of rows": (lambda h: h * h.shape[0] / 4, lambda h: h * h.shape[1] / 4),
    "advanced indexing": (lambda h: h + h[[0]], lambda h: h + h[:, [0]]),
    "reshape": (
        lambda h: h.reshape(2, -1, TOKENS, WIDTH).flip(0).reshape(h.shape) + h,
        lambda h: h.reshape(-1, TOKENS, 2, WIDTH // 2).flip(2).reshape(h.shape) + h,
    ),
    "topk": (
        lambda h: h.masked_fill(h < h.topk(2, 0).values[-1:], 0.0),
        lambda h: h.masked_fill(h < h.topk(2, 1).values[:, -1:], 0.0),
    ),
}
BLOCKS = {
    "counter": (lambda: Counter(is_used=True), lambda: Counter(is_used=False)),
    "moving average": (lambda: Averaging(is_used=True), lambda: Averaging(is_used=False)),
    "list of what was seen": (lambda: Queue(is_used=True), lambda: Queue(is_used=False)),
    "hook of the user": (lambda: Hooked(0), lambda: Hooked(1)),
}


class GradientNormed(torch.autograd.Function):
    """Divides the gradient by its norm over some dimensions."""

    @staticmethod
    def forward(ctx, h, dims):
        ctx.dims = dims
        return h.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / (1e-3 + gradient.square().sum(ctx.dims, keepdim=True).sqrt()), None


def with_gradient_hook(change):
    def run(h):
        h = h * 1.0
        if h.requires_grad:
            h.register_hook(change)
        return h

    return run


def in_groups(first):
    """Rows come in groups of two that no micro-batch cuts, or each row with one of the other half."""

    def run(h):
        groups = h.unflatten(0, (-1, 2) if first else (2, -1))
        return (groups - groups.mean(1 if first else 0, keepdim=True)).flatten(0, 1)

    return run


BACKWARD = {
    "hook that centres the gradient": tuple(
        with_gradient_hook(lambda g, dim=dim: g - g.mean(dim, keepdim=True)) for dim in (0, 1)
    ),
    "hook that clips the gradient": (
        with_gradient_hook(lambda g: g * (1e-3 / g.norm()).clamp(max=1)),
        with_gradient_hook(lambda g: g * 0.5),
    ),
    "function that divides the gradient": (
        lambda h: GradientNormed.apply(h, (0, 1, 2)),
        lambda h: h * torch.where(h > 0, 0.5, 1.0),
    ),
    "groups of rows": (in_groups(first=False), in_groups(first=True)),
    "chunks, by number and by size": tuple(
        lambda h, cut=cut: torch.cat([one - one.mean(0) for one in cut(h)])
        for cut in (lambda h: h.chunk(2), lambda h: h.split(2))
    ),
}
ROWS_MIXED |= BACKWARD
PAIRS = {name: tuple((lambda mix=one: Block(mix)) for one in pair) for name, pair in ROWS_MIXED.items()} | BLOCKS
PLACES = dict(zip(PAIRS, itertools.cycle(["early", "late"]), strict=False))


def made(**blocks):
    torch.manual_seed(0)
    return Net(**blocks).double()


def batches():
    draw = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(ROWS, TOKENS, 4, generator=draw, dtype=torch.float64),
            torch.randint(0, CLASSES, (ROWS, TOKENS), generator=draw),
        )
        for _ in range(STEPS)
    ]


def train(ctx, blocks, loss, watch=None, micro_batches=4):
    model = made(**blocks)
    if watch is not None:
        watch.begin(model)
    model, ctx = weft.pipeline(model, ctx, loss=loss, micro_batches=micro_batches)
    return fit(model, batches(), lambda model, batch: model(*batch), watch)


def naive(blocks, loss):
    return fit(made(**blocks), batches(), lambda model, batch: value_of(loss(model(batch[0]), batch[1])))


def value_of(loss):
    return loss[0] / loss[1] if isinstance(loss, tuple) else loss


def both(ctx, name, place):
    unsound, sound = PAIRS[name]
    found = train(ctx, {place: sound}, mean_squares)
    return found, attempt(train, ctx, {place: unsound}, mean_squares)


@pytest.mark.parametrize("name", one_in(7, PLACES))
def test_a_stage_that_mixes_rows_is_refused(name):
    place = PLACES[name]
    expected = naive({place: PAIRS[name][1]}, mean_squares)
    found = run_ranks(both, 2, name, place, mesh={"pipeline": 2})
    check_exact([one for one, _ in found], expected)
    check_refused([one for _, one in found])


# -- losses ----------------------------------------------------------------------------------------------

WEIGHTS = torch.linspace(0.5, 3.0, CLASSES, dtype=torch.float64)


def flat(loss, **options):
    return lambda output, target: loss(output.flatten(0, 1), target.flatten(), **options)


def per_token(output, target):
    return F.cross_entropy(output.mT, target, reduction="none")


def weighted(output, target):
    weights = WEIGHTS[target]
    return (per_token(output, target) * weights).sum(), weights.sum()


def counted(ignored):
    def loss(output, target):
        return flat(F.cross_entropy, ignore_index=ignored, reduction="sum")(output, target), (target != ignored).sum()

    return loss


def masked(output, target):
    mask = target > 1
    return per_token(output, target)[mask].mean()


def masked_and_counted(output, target):
    mask = target > 1
    return (per_token(output, target) * mask).sum(), mask.sum()


def with_penalty(penalty):
    return lambda output, target: mean_squares(output, target) + penalty(output, target)


def hard_examples(output, target):
    """The mean over the rows with the largest losses."""
    return per_token(output, target).mean(1).topk(len(target) // 2).values.mean()


def hard_tokens(output, target):
    return per_token(output, target).topk(2, 1).values.mean()


def contrast(output, target):
    """Each row against all others, or each token against those of its row."""
    flat_rows = F.normalize(output.mean(1), dim=-1)
    return F.cross_entropy(flat_rows @ flat_rows.mT, torch.arange(len(target)))


def contrast_of_tokens(output, target):
    rows = F.normalize(output, dim=-1)
    return F.cross_entropy(rows @ rows.mT, torch.arange(TOKENS).expand(len(target), -1))


def overlap(output, target):
    """A Dice loss over the batch."""
    chances, truth = output.softmax(-1), F.one_hot(target, CLASSES)
    return 1 - 2 * (chances * truth).sum() / (chances.square().sum() + truth.sum())


def overlap_of_rows(output, target):
    chances, truth = output.softmax(-1).flatten(1), F.one_hot(target, CLASSES).flatten(1)
    return (1 - 2 * (chances * truth).sum(1) / (chances.square().sum(1) + truth.sum(1))).mean()


def balanced(output, target):
    """Weights from how often each class is in the batch."""
    counts = torch.bincount(target.flatten(), minlength=CLASSES)
    return (per_token(output, target) / counts[target]).mean()


def balanced_by_numbers(output, target):
    counts = torch.arange(1, CLASSES + 1)
    return (per_token(output, target) / counts[target]).mean()


def equal_weights(*terms):
    return sum(term / term.detach() for term in terms)


def standardised_gradient(terms, dim):
    """Always 0, with a gradient."""
    return ((terms - terms.detach()) / (terms.detach().std(dim, keepdim=True) + 1e-6)).mean()


class Warming:
    """A factor that grows with the number of calls, or not."""

    def __init__(self, growth):
        self.factor, self.growth = 1.0, growth

    def __call__(self, output, target):
        self.factor *= self.growth
        return mean_squares(output, target) * self.factor


class Module(nn.Module):
    """A loss with a class, and options."""

    def __init__(self, **options):
        super().__init__()
        self.inner = nn.CrossEntropyLoss(**options)

    def forward(self, output, target):
        return self.inner(output.mT, target)


LOSSES = {
    "class weights": (flat(F.cross_entropy, weight=WEIGHTS), weighted),
    "ignored number 0": (flat(F.cross_entropy, ignore_index=0), counted(0)),
    "mask": (masked, masked_and_counted),
    "root of a mean": (
        lambda output, target: mean_squares(output, target).sqrt(),
        lambda output, target: (output - target[..., None]).square().mean((1, 2)).sqrt().mean(),
    ),
    "sum": (flat(F.cross_entropy, reduction="sum"), flat(F.cross_entropy)),
    "penalty on the number of rows": (
        with_penalty(lambda output, target: 1e-3 * len(output)),
        with_penalty(lambda output, target: 1e-3 * output.shape[1]),
    ),
    "penalty on a mean": (
        with_penalty(lambda output, target: 1e-3 * output.mean() ** 2),
        with_penalty(lambda output, target: 1e-3 * output.mean((1, 2)).square().mean()),
    ),
    "covariance": (
        with_penalty(lambda output, target: 1e-3 * torch.cov(output.flatten(1).mT).square().sum()),
        with_penalty(lambda output, target: 1e-3 * (output.mT @ output).square().sum((1, 2)).mean()),
    ),
    "hard examples": (hard_examples, hard_tokens),
    "contrast": (contrast, contrast_of_tokens),
    "overlap": (overlap, overlap_of_rows),
    "weights by frequency": (balanced, balanced_by_numbers),
    "flooding": (
        lambda output, target: (mean_squares(output, target) - 0.5).abs(),
        lambda output, target: (output - target[..., None] - 0.5).abs().mean(),
    ),
    "largest error": (
        lambda output, target: (output - target[..., None]).abs().amax(),
        lambda output, target: (output - target[..., None]).abs().amax((1, 2)).mean(),
    ),
    "median": (
        lambda output, target: per_token(output, target).median(),
        lambda output, target: per_token(output, target).median(1).values.mean(),
    ),
    "logarithm": (
        lambda output, target: mean_squares(output, target).log(),
        lambda output, target: (1 + (output - target[..., None]).square()).log().mean(),
    ),
    "terms of equal weight": (
        lambda output, target: equal_weights(mean_squares(output, target), output.square().mean()),
        lambda output, target: mean_squares(output, target) + output.square().mean(),
    ),
    "standardised, in the gradient alone": (
        lambda output, target: standardised_gradient(per_token(output, target).mean(1), 0),
        lambda output, target: standardised_gradient(per_token(output, target), 1),
    ),
    "module": (lambda *both: Module(weight=WEIGHTS)(*both), lambda *both: Module(label_smoothing=0.1)(*both)),
    "factor by calls": (lambda *both: GROWING(*both), lambda *both: CONSTANT(*both)),
    "mean or sum beside the number of terms": (
        lambda output, target: (per_token(output, target).mean(), target.numel()),
        lambda output, target: (per_token(output, target).sum(), target.numel()),
    ),
}
GROWING, CONSTANT = Warming(1.01), Warming(1.0)


def both_losses(ctx, name):
    unsound, sound = LOSSES[name]
    return train(ctx, {}, sound), attempt(train, ctx, {}, unsound)


@pytest.mark.parametrize("name", one_in(6, LOSSES))
def test_a_loss_that_is_no_mean_over_micro_batches_is_refused(name):
    expected = naive({}, LOSSES[name][1])
    found = run_ranks(both_losses, 2, name, mesh={"pipeline": 2})
    check_exact([one for one, _ in found], expected)
    check_refused([one for _, one in found])


# -- tensors whose first dimension is not that of rows, and rows in another order -----------------------------


def time_first(h):
    return h.transpose(0, 1)


class Laid(Net):
    """What goes into the first layer and comes out of the last one is changed."""

    def __init__(self, into, out, mix):
        super().__init__(late=lambda: Block(mix))
        self.into, self.out = into, out

    def forward(self, x):
        return self.out(super().forward(self.into(x)))


class Sorted(Net):
    """Rows are sorted, and brought back into their order or left so."""

    def __init__(self, *, is_sound):
        super().__init__()
        self.is_sound = is_sound

    def forward(self, x):
        order = x.sum((1, 2)).argsort()
        found = super().forward(x[order])
        return found[order.argsort()] if self.is_sound else found


class WithSum(nn.Module):
    """A block that also adds to a sum, for each row or for the batch."""

    def __init__(self, dims):
        super().__init__()
        self.block, self.dims = Block(), dims

    def forward(self, x, total):
        h = self.block(x)
        spread = h - h.mean(self.dims, keepdim=True)
        return h, total + spread.square().mean((1, 2))


class Summing(Net):
    """Returns what its blocks have added up beside its output."""

    def __init__(self, dims):
        super().__init__()
        self.blocks = nn.ModuleList(WithSum(dims) for _ in range(4))

    def forward(self, x):
        h, total = self.first(x), x.new_zeros(len(x))
        for block in self.blocks:
            h, total = block(h, total)
        return self.last(h), total


class WithLossInside(Net):
    """Returns the loss alone."""

    def forward(self, x, target):
        return mean_squares(super().forward(x), target)


def centred(dim):
    return lambda h: h - h.mean(dim, keepdim=True)


def identity(x):
    return x


def of_time_first(output, target):
    return mean_squares(output.transpose(0, 1), target)


def of_flat(output, target):
    return mean_squares(output.unflatten(0, (-1, TOKENS)), target)


def of_sums(output, target):
    return mean_squares(output[0], target) + output[1].mean()


LAYOUTS = {
    "time first between the layers": (
        *(lambda d=d: Laid(time_first, time_first, centred(d)) for d in (1, 0)),
        mean_squares,
    ),
    "time first at the end": (*(lambda d=d: Laid(identity, time_first, centred(d)) for d in (0, 1)), of_time_first),
    "flat between the layers": (
        *(
            lambda mix=mix: Laid(lambda x: x.flatten(0, 1), lambda h: h.unflatten(0, (-1, TOKENS)), mix)
            for mix in (centred(0), centred(1))
        ),
        mean_squares,
    ),
    "flat at the end": (
        *(lambda d=d: Laid(identity, lambda h: h.flatten(0, 1), centred(d)) for d in (0, 1)),
        of_flat,
    ),
    "sorted": (*(lambda one=one: Sorted(is_sound=one) for one in (False, True)), mean_squares),
    "sum beside the output": (*(lambda d=d: Summing(d) for d in (0, 1)), of_sums),
    "loss inside": (*(lambda d=d: WithLossInside(late=lambda: Block(centred(d))) for d in (0, 1)), None),
}


def laid(number, name):
    torch.manual_seed(0)
    return LAYOUTS[name][number]().double()


def trained_with_layout(ctx, number, name, watch=None):
    model = laid(number, name)
    if watch is not None:
        watch.begin(model)
    model, ctx = weft.pipeline(model, ctx, loss=LAYOUTS[name][2], micro_batches=4)
    return fit(model, batches(), lambda model, batch: model(*batch), watch)


def both_layouts(ctx, name):
    return trained_with_layout(ctx, 1, name), attempt(trained_with_layout, ctx, 0, name)


@pytest.mark.parametrize("name", one_in(3, LAYOUTS))
def test_rows_may_be_in_any_dimension(name):
    loss = LAYOUTS[name][2]

    def loss_of(model, batch):
        return model(*batch) if loss is None else loss(model(batch[0]), batch[1])

    found = run_ranks(both_layouts, 2, name, mesh={"pipeline": 2})
    check_exact([one for one, _ in found], fit(laid(1, name), batches(), loss_of))
    check_refused([one for _, one in found])


def evaluated(ctx, name):
    model, ctx = weft.pipeline(laid(1, name), ctx, loss=LAYOUTS[name][2], micro_batches=4)
    with torch.no_grad():
        return [model(batches()[0][0][:rows]) for rows in (8, 6, 5, 2)]


@pytest.mark.parametrize("name", one_in(3, [name for name, (*_, loss) in LAYOUTS.items() if loss is not None]))
def test_outputs_are_joined_in_the_dimension_of_rows(name):
    with torch.no_grad():
        expected = [laid(1, name)(batches()[0][0][:rows]) for rows in (8, 6, 5, 2)]
    for found in run_ranks(evaluated, 2, name, mesh={"pipeline": 2}):
        torch.testing.assert_close(found, expected, atol=EXACT, rtol=0)


# -- what goes from one layer to another past the arguments ----------------------------------------------------


class Passing(Block):
    """A block that leaves something in a place that all blocks know, or is the `reader` of it."""

    def __init__(self, number, place, kind, reader):
        super().__init__()
        self.number, self.kind, self.reader, self.__dict__["place"] = number, kind, reader, place

    def forward(self, x):
        h, place = super().forward(x), self.place
        if self.kind == "counter":
            place["count"] += 1
            return h / (place["count"] if self.number == self.reader else 1)
        if self.number == self.reader:
            return h + (place["root"].kept.clone() if self.kind == "buffer" else place.get("h", 0.0))
        if self.number == 0 and self.kind == "buffer":
            place["root"].kept.copy_(self.layer.weight.detach().abs().mean())
        elif self.number == 0:
            place["h"] = h if self.kind == "value" else h.detach().mean((1, 2), keepdim=True)
        return h


class Passed(Net):
    """The last block is the reader, or the second one, which is in the stage of the first."""

    def __init__(self, kind, reader):
        super().__init__()
        self.__dict__["place"] = {"root": self}
        self.register_buffer("kept", torch.zeros(()))
        self.blocks = nn.ModuleList(Passing(number, self.place, kind, reader) for number in range(4))

    def forward(self, x):
        self.place["count"] = 0
        return super().forward(x)


def passed(kind, reader):
    torch.manual_seed(0)
    return Passed(kind, reader).double()


def trained_with_passing(ctx, kind, reader, watch=None):
    model = passed(kind, reader)
    if watch is not None:
        watch.begin(model)
    model, ctx = weft.pipeline(model, ctx, loss=mean_squares, micro_batches=4)
    return fit(model, batches(), lambda model, batch: model(*batch), watch)


def both_passing(ctx, kind):
    return trained_with_passing(ctx, kind, 1), attempt(trained_with_passing, ctx, kind, 3)


@pytest.mark.parametrize("kind", one_in(4, ["value", "detached value", "counter", "buffer"]))
def test_what_goes_past_the_arguments_to_another_stage_is_refused(kind):
    found = run_ranks(both_passing, 2, kind, mesh={"pipeline": 2})
    expected = fit(passed(kind, 1), batches(), lambda model, batch: mean_squares(model(batch[0]), batch[1]))
    check_exact([one for one, _ in found], expected)
    check_refused([one for _, one in found])


# -- micro-batches and schedules ---------------------------------------------------------------------------


def both_in(ctx, schedule, micro_batches, name):
    pair = PAIRS[name] if name in PAIRS else LOSSES[name]
    found = []
    for number in (1, 0):
        blocks, loss = ({"late": pair[number]}, mean_squares) if name in PAIRS else ({}, pair[number])

        def run(ctx, watch, blocks=blocks, loss=loss):
            model = made(**blocks)
            watch.begin(model)
            model, ctx = weft.pipeline(model, ctx, loss=loss, micro_batches=micro_batches, schedule=schedule)
            return fit(model, batches(), lambda model, batch: model(*batch), watch)

        found.append(run(ctx, Watch()) if number else attempt(run, ctx))
    return found


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "name"),
    [
        ("gpipe", 2, "cumsum"),
        ("interleaved_1f1b", 8, "attention"),  # of which each has one row
        ("zbv_zero_bubble", 4, "batch statistics by hand"),
        ("gpipe", 8, "hard examples"),
        ("looped_bfs", 2, "mask"),
    ],
)
def test_programs_are_refused_under_every_schedule(schedule, micro_batches, name):
    expected = naive({"late": PAIRS[name][1]}, mean_squares) if name in PAIRS else naive({}, LOSSES[name][1])
    found = run_ranks(both_in, 2, schedule, micro_batches, name, mesh={"pipeline": 2})
    check_exact([one for one, _ in found], expected)
    check_refused([one for _, one in found])


# -- terms of parameters of the last stage: the layers of a loss are on the rank that computes it ------------


def regularised(ctx):
    model = made()
    loss = with_penalty(lambda output, target: 1e-2 * model.last.weight.square().sum())
    model, ctx = weft.pipeline(model, ctx, loss=loss, micro_batches=4)
    return fit(model, batches(), lambda model, batch: model(*batch))


def test_a_term_of_parameters_is_a_mean_over_micro_batches():
    model = made()
    loss = with_penalty(lambda output, target: 1e-2 * model.last.weight.square().sum())
    expected = fit(model, batches(), lambda model, batch: loss(model(batch[0]), batch[1]))
    check_exact(run_ranks(regularised, 2, mesh={"pipeline": 2}), expected)


# -- dropout: other numbers for the micro-batches, and right all the same -------------------------------------


class AttentionDropping(Block):
    """Drops weights of an attention over tokens."""

    def __init__(self):
        super().__init__(lambda h: F.scaled_dot_product_attention(h, h, h, dropout_p=0.2 if self.training else 0.0))


DROPOUT = {
    "function": lambda: Block(lambda h: F.dropout(h, 0.2)),
    "function of torch": lambda: Block(lambda h: torch.dropout(h, 0.2, True)),
    "in place": lambda: Block(lambda h: F.dropout(h.clone(), 0.2, inplace=True)),
    "method of torch": lambda: Block(lambda h: torch.dropout_(h.clone(), 0.2, True)),
    "channels": lambda: Block(lambda h: F.dropout1d(h.mT, 0.2).mT),
    "alpha": lambda: Block(lambda h: F.alpha_dropout(h, 0.2, training=True)),
    "operator": lambda: Block(lambda h: torch.ops.aten.native_dropout(h, 0.2, True)[0]),
    "by hand": lambda: Block(lambda h: h * torch.empty_like(h).bernoulli_(0.8) / 0.8),
    "depth": lambda: Block(lambda h: h * (torch.rand(len(h), 1, 1) < 0.8) / 0.8),
    "noise": lambda: Block(lambda h: h + 0.1 * torch.randn_like(h)),
    "attention": AttentionDropping,
}


def trained_with_dropout(ctx, name, place, dtype):
    torch.manual_seed(0)
    model = Net(**{place: DROPOUT[name]}).to(dtype)
    model, ctx = weft.pipeline(model, ctx, loss=mean_squares, micro_batches=4)
    return fit(model, batches(), lambda model, batch: model(batch[0].to(dtype), batch[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", one_in(8, DROPOUT))
def test_a_pipeline_with_dropout_is_not_refused(name, dtype):
    place = ("late", "early")[list(DROPOUT).index(name) % 2]
    for own in run_ranks(trained_with_dropout, 2, name, place, dtype, mesh={"pipeline": 2}):
        assert all(value.isfinite().all() for value in own.values())


def mixed_rows(block):
    """A block whose output is mixed over rows."""
    block.register_forward_hook(lambda part, args, output: output - output.mean(0, keepdim=True))
    return block


def dropout_and_mixing(ctx, name, place):
    return attempt(train, ctx, {place: lambda: mixed_rows(DROPOUT[name]())}, mean_squares)


@pytest.mark.parametrize("name", one_in(8, DROPOUT))
def test_rows_are_compared_beside_dropout(name):
    place = ("early", "late")[list(DROPOUT).index(name) % 2]
    check_refused(run_ranks(dropout_and_mixing, 2, name, place, mesh={"pipeline": 2}))


RANDOM_LOSSES = {
    "dropout": lambda output, target: F.dropout(per_token(output, target), 0.2),
    "noise": lambda output, target: per_token(output + 0.1 * torch.randn_like(output), target),
    "choice of tokens": lambda output, target: per_token(output, target) * (torch.rand(target.shape) < 0.5),
}


def random_losses(ctx, name):
    terms = RANDOM_LOSSES[name]
    found = train(ctx, {}, lambda output, target: terms(output, target).mean())
    return found, attempt(train, ctx, {}, lambda output, target: terms(output, target).mean().sqrt())


@pytest.mark.parametrize("name", one_in(8, RANDOM_LOSSES))
def test_random_losses_are_compared_with_the_same_numbers(name):
    found = run_ranks(random_losses, 2, name, mesh={"pipeline": 2})
    assert all(value.isfinite().all() for own, _ in found for value in own.values())
    check_refused([refused for _, refused in found])


def with_little_memory(ctx, name):
    kept, pipelined._KEPT_BYTES = pipelined._KEPT_BYTES, 1  # two micro-batches at a time
    try:
        unsound, sound = LOSSES[name]
        return train(ctx, {}, sound), attempt(train, ctx, {}, unsound)
    finally:
        pipelined._KEPT_BYTES = kept


def test_the_loss_of_a_batch_that_does_not_fit_is_compared_in_parts():
    name = next(iter(LOSSES))
    found = run_ranks(with_little_memory, 2, name, mesh={"pipeline": 2})
    check_exact([one for one, _ in found], naive({}, LOSSES[name][1]))
    check_refused([one for _, one in found])
