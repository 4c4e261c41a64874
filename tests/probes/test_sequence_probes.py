"""context_parallel: what mixes the positions of a sequence, but for attention, is refused, however it is written."""

import functools
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import weft
from tests.fix_lines.told import told
from tests.variants import one_in, variant_cases
from weft.testing import run_ranks

from .attempts import STEPS, attempt, check_exact, check_refused, fit

ROWS, LENGTH, WIDTH = 4, 8, 8


class Attention(nn.Module):
    """The one part that may mix positions."""

    def __init__(self):
        super().__init__()
        self.num_heads = 2
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Attention, and something after it."""

    def __init__(self, mix):
        super().__init__()
        self.first, self.attention, self.last = nn.Linear(4, WIDTH), Attention(), nn.Linear(WIDTH, 3)
        self.mix = mix

    def forward(self, x):
        h = self.first(x)
        return self.last(h + self.mix(h + self.attention(h)))


# -- functions of [rows, positions, features] ----------------------------------------------------------


def pooled(axis):
    return lambda h: h + h.mean(axis, keepdim=True)


def convolved(size):
    """A convolution over positions, of as many as its kernel has."""

    def convolve(h):
        draw = torch.Generator().manual_seed(3)
        kernel = torch.randn(WIDTH, WIDTH, size, generator=draw, dtype=h.dtype)
        return F.conv1d(h.mT, kernel, padding=size // 2).mT

    return convolve


def halves(h):
    """Positions far away, by reshaping."""
    early, late = h.reshape(len(h), 2, -1, WIDTH).unbind(1)
    return torch.cat([early + late, late - early], 1)


def halves_of_features(h):
    early, late = h.reshape(len(h), h.shape[1], 2, -1).unbind(2)
    return torch.cat([early + late, late - early], 2)


def windows(step):
    """Each position with the one before it, or each feature with another one, by strides."""

    def read(h):
        h = h.contiguous()
        flat = torch.cat([h.new_zeros(WIDTH), h.flatten()])
        return h + flat[WIDTH - step :].as_strided(h.shape, h.stride())

    return read


class Cleared(torch.autograd.Function):
    """Sets what is below the largest number to zero, with its gradient written by hand."""

    @staticmethod
    def forward(ctx, h, axis):
        mask = h >= h.amax(axis, keepdim=True)
        ctx.save_for_backward(mask)
        return h * mask

    @staticmethod
    def backward(ctx, gradient):
        (mask,) = ctx.saved_tensors
        return gradient * mask, None


def scripted_source(h: torch.Tensor, axis: int) -> torch.Tensor:
    total = torch.cumsum(h, dim=axis)
    return total / (1.0 + total.abs())


@functools.cache
def scripted():
    with warnings.catch_warnings(action="ignore"):  # that it is deprecated
        return torch.jit.script(scripted_source)


def in_place(axis):
    def subtract(h):
        h = h.clone()
        h.sub_(h.detach().amin(axis, keepdim=True)).clamp_(max=2.0)
        return h

    return subtract


def by_numpy(axis):
    return lambda h: h * torch.from_numpy(np.quantile(h.detach().abs().numpy(), 0.7, axis=axis, keepdims=True))


def chosen(axis):
    """What is among the largest: a router in which experts choose tokens, or tokens experts."""
    return lambda h: torch.zeros_like(h).scatter(axis, *reversed(h.topk(2, axis)))


def branching(h):
    return h if h[0].sum() > 0 else -h


def no_branching(h):
    return torch.where(h.sum(-1, keepdim=True) > 0, h, -h)


def chunked(axis):
    def run(h):
        return torch.cat([part - part.mean(axis, keepdim=True) for part in h.tensor_split(2)])

    return run


def over_rows_in_python(axis):
    def run(h):
        return torch.stack([row / (1 + torch.linalg.vector_norm(row, dim=axis, keepdim=True)) for row in h])

    return run


FUNCTIONS = {
    "mean": (pooled(1), pooled(2)),
    "cumsum": (lambda h: h.cumsum(1), lambda h: h.cumsum(2)),
    "functional convolution": (convolved(3), convolved(1)),
    "group_norm": (
        lambda h: F.group_norm(h.mT, 2).mT,
        lambda h: F.group_norm(h.flatten(0, 1), 2).unflatten(0, h.shape[:2]),
    ),
    "roll": (lambda h: h + 2 * h.roll(1, 1), lambda h: h + 2 * h.roll(1, 2)),
    "maximum": (lambda h: h - h.amax(1, keepdim=True), lambda h: h - h.amax(2, keepdim=True)),
    "first position": (lambda h: h + h[:, :1], lambda h: h + h[:, :, :1]),
    "last position by index": (lambda h: h * h.select(1, -1)[:, None], lambda h: h * h.select(2, -1)[..., None]),
    "einsum": (
        lambda h: torch.einsum("btf,bsg->btf", h, h) / 100,
        lambda h: torch.einsum("btf,btg->btf", h, h) / 100,
    ),
    "reshape": (halves, halves_of_features),
    "as_strided": (windows(WIDTH), windows(0)),
    "function of autograd": (lambda h: Cleared.apply(h, 1), lambda h: Cleared.apply(h, 2)),
    "script": (lambda h: scripted()(h, 1), lambda h: scripted()(h, 2)),
    "in place": (in_place(1), in_place(2)),
    "numpy": (by_numpy(1), by_numpy(2)),
    "topk": (chosen(1), chosen(2)),
    "sort": (lambda h: h.sort(1)[0], lambda h: h.sort(2)[0]),
    "branch on a value": (branching, no_branching),
    "operator of aten": (
        lambda h: torch.ops.aten._log_softmax.default(h, 1, False),
        lambda h: torch.ops.aten._log_softmax.default(h, 2, False),
    ),
    "statistics of the batch": (
        lambda h: F.batch_norm(h.mT, None, None, training=True).mT,
        lambda h: F.layer_norm(h, (WIDTH,)),
    ),
    "vmap": (
        lambda h: torch.func.vmap(lambda row: row - row.logsumexp(0))(h),
        lambda h: torch.func.vmap(torch.func.vmap(lambda one: one - one.logsumexp(0)))(h),
    ),
    "advanced indexing": (lambda h: h + h[:, [0]], lambda h: h + h[:, :, [0]]),
    "where on a statistic": (
        lambda h: torch.where(h > h.median(), h, 0.1 * h),
        lambda h: torch.where(h > h.median(-1, keepdim=True).values, h, 0.1 * h),
    ),
    "number of positions": (lambda h: h / h.shape[1], lambda h: h / h.shape[2]),
    "average over neighbours": (
        lambda h: F.avg_pool1d(h.mT, 3, 1, 1).mT,
        lambda h: F.avg_pool1d(h, 3, 1, 1),
    ),
    "loop over rows": (over_rows_in_python(0), over_rows_in_python(1)),
    "chunks of rows": (chunked(1), chunked(2)),
    "fourier transform": (
        lambda h: torch.fft.rfft2(h, dim=(1,)).real.repeat_interleave(2, 1)[:, : h.shape[1]],
        lambda h: torch.fft.fft(h, dim=2).real,
    ),
    "distances": (
        lambda h: torch.cdist(h, h).mean(-1, keepdim=True) * h,
        lambda h: torch.cdist(h.unsqueeze(-1), h.unsqueeze(-1)).mean(-1) * h,
    ),
}


# -- modules that do something else than to compute a function between layers --------------------------


class Counts(Model):
    """A number of positions seen so far, or of rows."""

    def __init__(self, axis):
        super().__init__(self.weighted)
        self.seen, self.axis = 0, axis

    def weighted(self, h):
        self.seen += h.shape[self.axis]
        return h / self.seen


class Prepends(Model):
    """One more position, made inside; or as many features."""

    def __init__(self, axis):
        super().__init__(torch.tanh)
        self.axis = axis

    def forward(self, x):
        h = self.first(x)
        more = torch.cat([torch.ones_like(h.narrow(self.axis, 0, 1)), h], self.axis)
        h = self.attention(more if self.axis == 1 else more[..., 1:])
        return self.last(h[:, 1:] if self.axis == 1 else h)


class WithLoss(Model):
    """Returns its loss, which is a mean over positions."""

    def __init__(self, loss):
        super().__init__(torch.tanh)
        self.loss = loss

    def forward(self, x, y):
        return self.loss(super().forward(x), y)


class Divided(WithLoss):
    """Is given the number of positions."""

    def forward(self, x, y, count):
        return super().forward(x, y) / count


class Reports(WithLoss):
    """Returns another number beside its loss."""

    def __init__(self, report):
        super().__init__(lambda output, y: (F.mse_loss(output, y), report(output)))


def summed(output, y):
    return F.mse_loss(output, y, reduction="sum")


def times_length(output, y):
    return F.mse_loss(output, y) * y.shape[1]


def shifted(output, y):
    return F.mse_loss(output[:, :-1], y[:, 1:])


def not_shifted(output, y):
    return F.mse_loss(output, y)


def masked(output, y):
    mask = (y > 0).any(-1)
    return (output - y)[mask].square().mean()


def masked_by_zero(output, y):
    mask = (y > 0).any(-1, keepdim=True)
    return ((output - y) * mask).square().mean()


def root(output, y):
    return F.mse_loss(output, y).sqrt()


def root_of_positions(output, y):
    return (output - y).square().mean(-1).sqrt().mean()


def variance(output, y):
    return F.mse_loss(output, y) + output.var()


def variance_of_positions(output, y):
    return F.mse_loss(output, y) + output.var(-1).mean()


class Hooked(Model):
    """A hook of the user on a layer."""

    def __init__(self, axis):
        super().__init__(torch.tanh)
        self.last.register_forward_pre_hook(lambda part, args: (args[0] - args[0].mean(axis, keepdim=True),))


class Penalised(Model):
    """A second output for the whole batch: of the outputs, or of parameters."""

    def __init__(self, penalty):
        super().__init__(torch.tanh)
        self.penalty = penalty

    def forward(self, x):
        output = super().forward(x)
        return output, self.penalty(self, output)


class TimeFirst(Model):
    """Returns [positions * rows, features]."""

    def forward(self, x):
        return time_first(super().forward(x))


def time_first(rows_first):
    return rows_first.transpose(0, 1).flatten(0, 1)


MODULES = {
    "one more position": (lambda: Prepends(1), lambda: Prepends(2)),
    "length that is written down": (
        lambda: Model(lambda h: h * torch.ones(LENGTH, 1, dtype=h.dtype)),
        lambda: Model(lambda h: h * torch.ones(WIDTH, dtype=h.dtype)),
    ),
    "positions before rows": (lambda: TimeFirst(pooled(1)), lambda: TimeFirst(pooled(2))),
    "counter": (lambda: Counts(1), lambda: Counts(0)),
    "sum of losses": (lambda: WithLoss(summed), lambda: Divided(summed)),
    "mean times length": (lambda: WithLoss(times_length), lambda: WithLoss(not_shifted)),
    "mean divided by a number": (
        lambda: Divided(lambda output, y: times_length(output, y) ** 2),
        lambda: Divided(summed),
    ),
    "sum beside a loss": (
        lambda: Reports(lambda output: output.abs().sum()),
        lambda: Reports(lambda output: output.detach().abs().sum()),
    ),
    "loss that shifts": (lambda: WithLoss(shifted), lambda: WithLoss(not_shifted)),
    "loss over what a mask chooses": (lambda: WithLoss(masked), lambda: WithLoss(masked_by_zero)),
    "root of a mean": (lambda: WithLoss(root), lambda: WithLoss(root_of_positions)),
    "variance in a loss": (lambda: WithLoss(variance), lambda: WithLoss(variance_of_positions)),
    "hook of the user": (lambda: Hooked(1), lambda: Hooked(2)),
    "norm of all outputs": (
        lambda: Penalised(lambda self, output: output.norm()),
        lambda: Penalised(lambda self, output: self.last.weight.norm()),
    ),
}
PAIRS = {name: tuple((lambda mix=one: Model(mix)) for one in pair) for name, pair in FUNCTIONS.items()} | MODULES


def made(make):
    torch.manual_seed(0)
    return make().double()


def batches(rows=ROWS, length=LENGTH):
    draw = torch.Generator().manual_seed(2)
    return [[torch.randn(rows, length, n, generator=draw, dtype=torch.float64) for n in (4, 3)] for _ in range(STEPS)]


def loss_of(model, batch):
    x, y = batch
    if isinstance(model, Divided):
        return model(x, y, y.numel())
    if isinstance(model, Reports):
        return sum(one for one in model(x, y) if one.requires_grad)
    if isinstance(model, WithLoss):
        return model(x, y)
    output, y = model(x), time_first(y) if isinstance(model, TimeFirst) else y
    return F.mse_loss(output[0], y) + output[1] if isinstance(output, tuple) else F.mse_loss(output, y)


def train(ctx, make, order="zigzag", method="heads", watch=None, data=None):
    model = made(make)
    if watch is not None:
        watch.begin(model)
    model, ctx = weft.context_parallel(model, ctx, method=method, order=order)
    model, ctx = weft.replicate(model, ctx)
    rows = [[part.chunk(ctx.data_size)[ctx.data_rank] for part in batch] for batch in data or batches()]
    parts = [weft.data.split_sequence(tuple(batch), ctx, order=order) for batch in rows]
    return fit(model, parts, loss_of, watch)


def both(ctx, name):
    unsound, sound = PAIRS[name]
    return train(ctx, sound), attempt(lambda ctx, watch: train(ctx, unsound, watch=watch), ctx)


@pytest.mark.parametrize("name", one_in(6, PAIRS))
def test_what_mixes_positions_is_refused(name):
    _, sound = PAIRS[name]
    expected = fit(made(sound), batches(), loss_of)
    found = run_ranks(both, 2, name, mesh={"context": 2})
    check_exact([one for one, _ in found], expected)
    check_refused([one for _, one in found])


# -- how sequences are divided, and strategies -----------------------------------------------------------


def backwards(h):
    return h + 2 * h.flip(1)


def in_both_orders(ctx):
    make = functools.partial(Model, backwards)
    refused = attempt(lambda ctx, watch: train(ctx, make, "contiguous", watch=watch), ctx)
    return train(ctx, make, "zigzag"), refused


def test_sequences_read_backwards_are_right_where_each_rank_has_both_ends():
    """A zig-zag part turned round is the part of the same rank of the sequence turned round."""
    expected = fit(made(functools.partial(Model, backwards)), batches(), loss_of)
    found = run_ranks(in_both_orders, 2, mesh={"context": 2})
    check_exact([one for one, _ in found], expected)
    check_refused([one for _, one in found])


def by_gathering(ctx, name):
    unsound, sound = PAIRS[name]
    refused = attempt(lambda ctx, watch: train(ctx, unsound, "contiguous", "gather", watch), ctx)
    return train(ctx, sound, "contiguous", "gather"), refused


@pytest.mark.parametrize(
    "name", one_in(4, ["cumsum", "loss that shifts", "average over neighbours", "number of positions"])
)
def test_what_mixes_positions_is_refused_where_keys_are_gathered(name):
    expected = fit(made(PAIRS[name][1]), batches(), loss_of)
    found = run_ranks(by_gathering, 2, name, mesh={"context": 2})
    check_exact([one for one, _ in found], expected)
    check_refused([one for _, one in found])


def test_what_mixes_positions_is_refused_beside_data_parallel():
    expected = fit(made(PAIRS["cumsum"][1]), batches(), loss_of)
    found = run_ranks(both, 4, "cumsum", mesh={"data": 2, "context": 2})
    check_exact([one for one, _ in found], expected)
    check_refused([one for _, one in found])


# -- large batches, of which some is looked at ---------------------------------------------------------------


def mean_of_labels(output, y):
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


def mean_of_positions(output, y):
    return F.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="none").mean()


def with_labels(rows, length, short):
    """One row is padded at the right."""
    found = []
    for x, y in batches(rows, length):
        labels = y.argmax(-1)
        labels[short, length * 5 // 8 :] = -100
        found.append([x, labels])
    return found


def centred(axes):
    """Rows in groups of four, less their mean."""

    def centre(h):
        groups = h.unflatten(0, (-1, 4))
        return (groups - groups.mean(axes, keepdim=True)).flatten(0, 1)

    return centre


LABELS = (lambda: WithLoss(mean_of_labels), lambda: WithLoss(mean_of_positions))
GROUPS = tuple(lambda axes=axes: Model(centred(axes)) for axes in ((1, 2), 1))
LARGE = [
    (LABELS, with_labels(ROWS, LENGTH, 3)),
    (LABELS, with_labels(16, 256, 13)),
    (LABELS, with_labels(2, 2048, 1)),  # of these, some of the positions
    (GROUPS, batches(4, 1024)),
]


def large(ctx, number, order):
    (unsound, sound), data = LARGE[number]
    refused = attempt(lambda ctx, watch: train(ctx, unsound, order, watch=watch, data=data), ctx)
    return train(ctx, sound, order, data=data), refused


@pytest.mark.parametrize(
    ("number", "order"), [(0, "contiguous"), *variant_cases((1, "zigzag"), (2, "contiguous"), (3, "zigzag"))]
)
def test_what_shows_in_one_row_of_a_large_batch_is_refused(number, order):
    (_, sound), data = LARGE[number]
    expected = fit(made(sound), data, loss_of)
    found = run_ranks(large, 2, number, order, mesh={"context": 2})
    check_exact([one for one, _ in found], expected)
    check_refused([one for _, one in found])


# -- what errors say ------------------------------------------------------------------------------------------


def as_told(ctx, name, order):
    """What each position computes is gathered, and the loss is computed outside of the module."""
    parts = [weft.data.split_sequence((*batch, torch.arange(LENGTH)[None]), ctx, order=order) for batch in batches()]
    loss = OUTSIDE[name]
    with told("engines/torch/probes/runner.py", "at most {limit}") as it:
        train(ctx, lambda: WithLoss(loss), order)
    model, ctx = weft.context_parallel(made(lambda: Model(torch.tanh)), ctx, order=order)
    model, ctx = weft.replicate(model, ctx)
    it.fix = it.fix.split("outside, on all ranks: ")[1]

    def gathered(output, at):
        return it.run(output=output, position_ids=at, ctx=ctx)["every"].transpose(0, 1)

    def loss_outside(model, part):
        x, y, at = part
        return loss(gathered(model(x), at), gathered(y, at))

    return fit(model, parts, loss_outside)


OUTSIDE = {
    "shift": shifted,
    "variance": variance,
    "pooled": lambda output, y: F.mse_loss(output.mean(1).square(), y.mean(1)),
}


@pytest.mark.parametrize(
    ("name", "order"), variant_cases(("shift", "zigzag"), ("variance", "contiguous"), ("pooled", "zigzag"))
)
def test_what_is_gathered_is_that_of_one_process(name, order):
    expected = fit(made(lambda: WithLoss(OUTSIDE[name])), batches(), loss_of)
    check_exact(run_ranks(as_told, 2, name, order, mesh={"context": 2}), expected)


def counted_as_told(ctx):
    data = with_labels(ROWS, LENGTH, 3)
    parts = [weft.data.split_sequence(tuple(batch), ctx) for batch in data]
    with told("engines/torch/probes/runner.py", "at most {limit}") as it:
        train(ctx, lambda: WithLoss(sum_of_labels), data=data)
    model, ctx = weft.context_parallel(made(lambda: Divided(sum_of_labels)), ctx)
    model, ctx = weft.replicate(model, ctx)
    it.fix = it.fix.split("where not all count: ")[1].split(" of this rank")[0]

    def loss(model, part):
        x, y = part
        return model(x, y, it.run(number=(y >= 0).sum().item(), ctx=ctx)["count"])

    return fit(model, parts, loss)


def sum_of_labels(output, y):
    return F.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="sum")


@pytest.mark.slow
def test_a_sum_that_is_divided_by_a_count_is_that_of_one_process():
    expected = fit(made(lambda: WithLoss(mean_of_labels)), with_labels(ROWS, LENGTH, 3), loss_of)
    check_exact(run_ranks(counted_as_told, 2, mesh={"context": 2}), expected)


# -- random numbers ----------------------------------------------------------------------------------------


def dropped(ctx, make):
    return train(ctx, lambda: Model(make))


@pytest.mark.parametrize("draw", ["functional", "module"])
def test_dropout_of_each_position_is_not_refused(draw):
    drop = nn.Dropout(0.5) if draw == "module" else functools.partial(F.dropout, p=0.5)
    for own in run_ranks(dropped, 2, drop, mesh={"context": 2}):
        assert all(value.isfinite().all() for value in own.values())
