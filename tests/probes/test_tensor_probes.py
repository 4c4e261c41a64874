"""tensor_parallel: what mixes the features that ranks share out is refused, however it is written."""

import queue
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import weft
from tests.fix_lines.told import Told, told
from tests.variants import one_in
from weft.errors import ProbeFailed
from weft.testing import RanksFailed, run_ranks

from .attempts import STEPS, attempt, check_exact, check_refused, fit

ROWS, WIDTH, HIDDEN = 4, 6, 8
PLAN = {"up": "column", "down": "row"}


class Feedforward(nn.Module):
    """Layers of which each rank has half of the features, with something between them."""

    def __init__(self, between, hidden=HIDDEN):
        super().__init__()
        self.first, self.last = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(hidden, WIDTH)
        self.between = between

    def forward(self, x):
        residual = torch.tanh(self.first(x))
        return self.last(residual + self.down(self.between(self.up(residual))))


# -- functions between the layers ----------------------------------------------------------------------


def centered(axis):
    def center(h):
        return h - h.mean(axis, keepdim=True)

    return center


def gate_of(parts):
    """A gate and what it is for, from one layer: `parts` takes them apart."""

    def gated(h):
        gate, value = parts(h)
        return torch.sigmoid(gate) * value

    return gated


def strided(starts, step):
    def parts(h):
        rows, width = h.shape
        size = (rows, width // 2)
        return [h.contiguous().as_strided(size, (width, step), start * (width // 2) ** (step == 1)) for start in starts]

    return parts


def subtract_in_place(axis):
    def subtract(h):
        h = h * 1.0
        h -= h.detach().amax(axis, keepdim=True)
        return h.mul_(0.5)

    return subtract


def scripted_source(h: torch.Tensor, axis: int) -> torch.Tensor:
    return h - torch.logsumexp(h, dim=axis, keepdim=True)


class ScaledGradient(torch.autograd.Function):
    """The identity, whose backward pass divides by the norm of the gradient."""

    @staticmethod
    def forward(ctx, h, axis):
        ctx.axis = axis
        return h.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / (1 + gradient.norm(dim=ctx.axis, keepdim=True)), None


class MeanOut(torch.autograd.Function):
    """Takes the mean away, with its gradient written by hand."""

    @staticmethod
    def forward(ctx, h, axis):
        ctx.axis = axis
        return h - h.mean(axis, keepdim=True)

    @staticmethod
    def backward(ctx, gradient):
        return gradient - gradient.mean(ctx.axis, keepdim=True), None


def by_numpy(axis):
    return lambda h: h * torch.from_numpy(1 / (1 + np.median(np.abs(h.detach().numpy()), axis=axis, keepdims=True)))


def kept_largest(axis):
    return lambda h: h.masked_fill(h < h.topk(2, axis).values.amin(axis, keepdim=True), 0.0)


def branching(h):
    return h * 2 if h.mean() > 0 else h


def no_branching(h):
    return torch.where(h > 0, h * 2, h)


def counted_share(h):
    """The share of what is positive, as a Python number."""
    return h * (1 + int((h > 0).sum()) / h.numel())


def counted_share_of_features(h):
    return h * (1 + (h > 0).sum(0) / h.shape[0])


def pulled(axis):
    def pull(h):
        place = h.detach().argmax(axis, keepdim=True)
        return h + torch.gather(h, axis, place)

    return pull


def spectrum(axis):
    return lambda h: torch.fft.fft(h, dim=axis).real


def sequence_of(norm):
    """One function made of several, held in a list."""
    steps = [torch.tanh, norm, lambda h: h * 3]

    def run(h):
        for step in steps:
            h = step(h)
        return h

    return run


FUNCTIONS = {
    "method softmax": (lambda h: h.softmax(-1), lambda h: h.softmax(0)),
    "functional layer_norm": (
        lambda h: F.layer_norm(h, h.shape[-1:]),
        lambda h: F.layer_norm(h.mT, h.mT.shape[-1:]).mT,
    ),
    "group_norm with groups of a number or of a size": (
        lambda h: F.group_norm(h, 2),
        lambda h: F.group_norm(h, h.shape[-1] // 2),
    ),
    "closure over an axis": (centered(-1), centered(0)),
    "unflatten and unbind": (
        gate_of(lambda h: h.repeat(1, 2).unflatten(-1, (2, -1)).flip(-1).unbind(-2)),
        gate_of(lambda h: h.repeat_interleave(2, -1).unflatten(-1, (-1, 2)).unbind(-1)),
    ),
    "glu of what is repeated": (
        lambda h: F.glu(h.repeat_interleave(2, -1), -1),
        lambda h: F.glu(h.repeat(1, 2), -1),
    ),
    "einsum": (
        lambda h: h * torch.einsum("bi,bi->b", h, h)[:, None],
        lambda h: h * torch.einsum("bi,bi->i", h, h)[None],
    ),
    "cumsum": (lambda h: h.cumsum(-1), lambda h: h.cumsum(0)),
    "sort": (lambda h: h.sort(-1).values, lambda h: h.sort(0).values),
    "topk": (kept_largest(-1), kept_largest(0)),
    "argmax and gather": (pulled(-1), pulled(0)),
    "operator of aten": (
        lambda h: torch.ops.aten.roll.default(h, [1], [1]),
        lambda h: torch.ops.aten.roll.default(h, [1], [0]),
    ),
    "flip": (lambda h: h + 2 * h.flip(-1), lambda h: h + 2 * h.flip(0)),
    "advanced indexing": (lambda h: h * h[:, [0, 0]][:, :1], lambda h: h * h[[0, 0]][:1]),
    "slice": (lambda h: h[:, :1] + h, lambda h: h[:1] + h),
    "pooling with or without overlap": (
        lambda h: F.max_pool1d(h, 3, 1, 1),
        lambda h: F.max_pool1d(h, 2).repeat_interleave(2, -1),
    ),
    "vmap": (
        lambda h: torch.func.vmap(lambda one: one / (1 + one.norm()))(h),
        lambda h: torch.func.vmap(lambda one: one / (1 + one.norm()), 1, 1)(h),
    ),
    "where on a statistic": (
        lambda h: torch.where(h > h.median(), h, 0.1 * h),
        lambda h: torch.where(h > h.median(0).values, h, 0.1 * h),
    ),
    "branch on a value": (branching, no_branching),
    "in place": (subtract_in_place(-1), subtract_in_place(0)),
    "function of autograd": (lambda h: MeanOut.apply(h, -1), lambda h: MeanOut.apply(h, 0)),
    "gradient alone": (lambda h: ScaledGradient.apply(h, -1), lambda h: ScaledGradient.apply(h, 0)),
    "numpy": (by_numpy(-1), by_numpy(0)),
    "python number": (counted_share, counted_share_of_features),
    "number of features": (lambda h: h / h.shape[-1], lambda h: h / h.shape[0]),
    "fourier transform": (spectrum(-1), spectrum(0)),
    "list of functions": (sequence_of(centered(1)), sequence_of(centered(0))),
    "number of rows, in the program": (
        lambda h: h.view(ROWS, -1).softmax(-1),
        lambda h: h.view(ROWS, -1).softmax(0),
    ),
    "number of rows, and as it was": (
        lambda h: h.view(ROWS, -1).softmax(-1).view(h.shape),
        lambda h: h.view(ROWS, -1).softmax(0).view(h.shape),
    ),
    "number for each row": (
        lambda h: h.softmax(-1) * torch.linspace(1, 2, ROWS, dtype=h.dtype)[:, None],
        lambda h: h.softmax(0) * torch.linspace(1, 2, ROWS, dtype=h.dtype)[:, None],
    ),
    "product of matrices": (lambda h: h @ h.mT @ h, lambda h: (h.mT[:, :, None] * h.mT[:, None]).sum(-1).mT * h),
}


# -- modules of their own ------------------------------------------------------------------------------


class Attention(nn.Module):
    """Query, key and value from one layer, by heads or by kinds first."""

    def __init__(self, heads_first):
        super().__init__()
        self.first, self.last = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.up, self.down = nn.Linear(WIDTH, 24, bias=False), nn.Linear(8, WIDTH)
        self.heads_first = heads_first

    def forward(self, x):
        h = self.first(x)[None]
        if self.heads_first:
            q, k, v = self.up(h).reshape(1, ROWS, -1, 3, 4).unbind(3)
        else:
            q, k, v = self.up(h).reshape(1, ROWS, 3, -1, 4).unbind(2)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.last(self.down(y.transpose(1, 2).flatten(2))[0])


class HeadsByNumber(nn.Module):
    """A norm of heads, whose number or size is written down."""

    def __init__(self, **shape):
        super().__init__()
        self.first, self.last = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.shape = shape.get("number", -1), shape.get("size", -1)

    def forward(self, x):
        heads = torch.unflatten(self.up(self.first(x)), -1, self.shape)
        return self.last(self.down(F.normalize(heads, dim=-1).flatten(1)))


class ReadsWeights(Feedforward):
    """A factor from the weights of another layer."""

    def __init__(self, read):
        super().__init__(lambda h: h * (1 + read(self)))


class FixedMask(Feedforward):
    """A mask of features, as a buffer."""

    def __init__(self, *, inside):
        super().__init__(lambda h: h * self.mask if inside else h)
        self.register_buffer("mask", torch.arange(HIDDEN if inside else WIDTH).fmod(2))
        self.is_inside = inside

    def forward(self, x):
        residual = torch.tanh(self.first(x))
        h = self.down(self.between(self.up(residual)))
        return self.last(residual + (h if self.is_inside else h * self.mask))


class Remembers(Feedforward):
    """A moving average of what was seen, as a plain attribute."""

    def __init__(self, seen):
        super().__init__(self.scaled)
        self.average, self.seen = torch.ones((), dtype=torch.float64), seen

    def scaled(self, h):
        self.average = 0.5 * self.average + 0.5 * self.seen(self, h).detach()
        return h * self.average


class Hooked(Feedforward):
    """A hook of the user on the row layer."""

    def __init__(self, axis):
        super().__init__(torch.tanh)
        self.down.register_forward_pre_hook(lambda part, args: (args[0] - args[0].mean(axis, keepdim=True),))


class HookedEverywhere(Feedforward):
    """One hook on all parts, which changes the input of one of them."""

    def __init__(self, axis):
        super().__init__(torch.tanh)

        def center(part, args):
            if part is self.down:
                return (args[0] - args[0].mean(axis, keepdim=True),)
            return None

        for part in (self.first, self.down, self.last):
            part.register_forward_pre_hook(center)


class HookedGradient(Feedforward):
    """A hook of the user on a gradient."""

    def __init__(self, axis):
        super().__init__(self.hooked)
        self.axis = axis

    def hooked(self, h):
        if h.requires_grad:
            h.register_hook(self.clipped)
        return torch.tanh(h)

    def clipped(self, gradient):
        if self.axis is None:  # the same for the halves of a batch as for the whole
            return gradient / 2
        return gradient / (1 + gradient.abs().amax(self.axis, keepdim=True))


class Scripted(Feedforward):
    """A function that torch has compiled to its own language."""

    def __init__(self, axis):
        super().__init__(lambda h: self.compiled(h, axis))
        with warnings.catch_warnings(action="ignore"):  # that it is deprecated
            self.compiled = torch.jit.script(scripted_source)


class Strided(Feedforward):
    """Halves of the features, or every second one, by strides."""

    def __init__(self, starts, step):
        super().__init__(gate_of(strided(starts, step)), hidden=HIDDEN // 2)


class Alone(nn.Module):
    """The two layers and nothing else: no gradient leaves them."""

    def __init__(self, between):
        super().__init__()
        self.up, self.down, self.between = nn.Linear(5, HIDDEN), nn.Linear(HIDDEN, 3), between

    def forward(self, x):
        return self.down(self.between(self.up(x)))


class Penalised(Feedforward):
    """Returns a penalty beside its output."""

    def __init__(self, axes):
        super().__init__(torch.tanh)
        self.axes = axes

    def forward(self, x):
        residual = torch.tanh(self.first(x))
        h = self.down(self.between(self.up(residual)))
        return self.last(residual + h) + self.penalty(residual, h)

    def penalty(self, residual, h):
        inside = self.up(residual) if self.axes == "inside" else h
        return 0.01 * inside.square().sum()


class Previous(Feedforward):
    """What was there in the call before, as a plain attribute."""

    def __init__(self, axis):
        super().__init__(self.mixed)
        self.previous, self.axis = None, axis

    def mixed(self, h):
        before, self.previous = self.previous, h.detach()
        return h if before is None else h + before - before.mean(self.axis, keepdim=True)


class Result:
    """What is returned, as an object."""

    def __init__(self, value):
        self.value = value


class Returns(Feedforward):
    """Returns more than one tensor."""

    def __init__(self, returned, between=torch.tanh):
        super().__init__(between)
        self.returned = returned

    def forward(self, x):
        residual = torch.tanh(self.first(x))
        h = self.up(residual)
        return self.returned(self.last(residual + self.down(self.between(h))), h.detach(), residual.detach())


class Noisy(Feedforward):
    """Random numbers between the layers, or after them."""

    def __init__(self, draw, *, inside):
        super().__init__(draw if inside else torch.tanh)
        self.draw, self.is_inside = draw, inside

    def forward(self, x):
        result = super().forward(x)
        return result if self.is_inside else self.draw(result)


def zeros_by_hand(h):
    mask = torch.empty_like(h).bernoulli_(0.5)
    return h * mask * 2


MODULES = {
    "query, key and value of one layer": (lambda: Attention(heads_first=False), lambda: Attention(heads_first=True)),
    "heads by number or by size": (lambda: HeadsByNumber(number=2), lambda: HeadsByNumber(size=2)),
    "weights of the layer read": (
        lambda: ReadsWeights(lambda self: self.up.weight.detach().mean()),
        lambda: ReadsWeights(lambda self: self.first.weight.detach().mean()),
    ),
    "weights read elsewhere, with their gradient": (
        lambda: ReadsWeights(lambda self: self.first.weight.mean()),
        lambda: ReadsWeights(lambda self: self.first.weight.mean().item()),
    ),
    "mask of all features": (lambda: FixedMask(inside=True), lambda: FixedMask(inside=False)),
    "moving average of a statistic": (
        lambda: Remembers(lambda self, h: h.abs().max()),
        lambda: Remembers(lambda self, h: self.first.weight.abs().max()),
    ),
    "what the call before has left": (lambda: Previous(-1), lambda: Previous(0)),
    "hook of the user": (lambda: Hooked(-1), lambda: Hooked(0)),
    "one hook on several parts": (lambda: HookedEverywhere(-1), lambda: HookedEverywhere(0)),
    "hook of a gradient": (lambda: HookedGradient(-1), lambda: HookedGradient(0)),
    "script": (lambda: Scripted(1), lambda: Scripted(0)),
    "as_strided": (lambda: Strided((0, 1), 1), lambda: Strided((0, 1), 2)),
    "number beside the output": (
        lambda: Returns(lambda output, h, residual: (output, h.mean().item())),
        lambda: Returns(lambda output, h, residual: (output, residual.mean().item())),
    ),
    "as many outputs as features": (
        lambda: Returns(lambda output, h, residual: [output, *h.unbind(-1)]),
        lambda: Returns(lambda output, h, residual: [output, *residual.unbind(-1)]),
    ),
    "object": (
        lambda: Returns(lambda output, h, residual: Result(output), lambda h: h.softmax(-1)),
        lambda: Returns(lambda output, h, residual: Result(output), lambda h: h.softmax(0)),
    ),
    "gradient of parameters that ranks share out": (
        lambda: Alone(lambda h: ScaledGradient.apply(h, -1)),
        lambda: Alone(lambda h: ScaledGradient.apply(h, 0)),
    ),
    "penalty on what each rank has": (lambda: Penalised("inside"), lambda: Penalised("outside")),
}
PAIRS = {
    name: tuple((lambda between=one: Feedforward(between)) for one in pair) for name, pair in FUNCTIONS.items()
} | MODULES


def made(make):
    torch.manual_seed(0)
    model = make().double()
    if isinstance(model, Feedforward) and hasattr(model.up, "bias"):
        with torch.no_grad():  # features of one rank are mostly positive, those of the other mostly negative
            model.up.bias.copy_(torch.linspace(1.0, -1.5, HIDDEN))
    return model


def batches():
    draw = torch.Generator().manual_seed(1)
    return [[torch.randn(ROWS, n, generator=draw, dtype=torch.float64) for n in (5, 3)] for _ in range(STEPS)]


def loss_of(model, batch):
    x, y = batch
    output = model(x)
    output = output.value if isinstance(output, Result) else output
    return F.mse_loss(output[0] if isinstance(output, (tuple, list)) else output, y)


def train(ctx, make, watch=None):
    model = made(make)
    if watch is not None:
        watch.begin(model)
    model, ctx = weft.tensor_parallel(model, ctx, plan=PLAN)
    return fit(model, batches(), loss_of, watch)


def both(ctx, name):
    unsound, sound = PAIRS[name]
    return train(ctx, sound), attempt(train, ctx, unsound)


# -- random numbers: between the layers, each rank draws those of its own features ----------------------

RANDOM = {
    "functional dropout": lambda h: F.dropout(h, 0.5, training=True),
    "operator of dropout": lambda h: torch.ops.aten.native_dropout(h, 0.5, True)[0],
    "alpha dropout": lambda h: F.alpha_dropout(h, 0.5, training=True),
    "zeros by hand": zeros_by_hand,
    "noise": lambda h: h + torch.randn_like(h),
    "random slopes": lambda h: F.rrelu(h, training=True),
    "python": lambda h: h * random.random() if h.shape[-1] == HIDDEN else h,
}


def both_random(ctx, name):
    torch.manual_seed(1)
    return (
        train(ctx, lambda: Noisy(RANDOM[name], inside=False)),
        attempt(train, ctx, lambda: Noisy(RANDOM[name], inside=True)),
    )


@pytest.mark.parametrize("name", one_in(8, RANDOM))
def test_random_numbers_between_the_layers_are_refused_and_after_them_are_not(name):
    (one, other), refused = zip(*run_ranks(both_random, 2, name, mesh={"tensor": 2}), strict=True)
    assert all(torch.equal(one[key], other[key]) for key in one)
    check_refused(refused)


# -- inputs that differ between the ranks ---------------------------------------------------------------


class Inputs(nn.Module):
    """Layers that are given several inputs, also by name and nested."""

    def __init__(self):
        super().__init__()
        self.inner = Feedforward(torch.tanh)

    def forward(self, batch, *, scale=1.0, mask=None):
        h = self.inner(batch["x"]) * scale
        return h if mask is None else h * mask


def differing(ctx, change):
    model = made(Inputs)
    model, ctx = weft.tensor_parallel(model, ctx, plan={"inner.up": "column", "inner.down": "row"})
    batch = {"x": torch.ones(ROWS, 5, dtype=torch.float64)}
    return model(*change(ctx, batch["x"])).sum().item()


CHANGES = {
    "values": lambda ctx, x: [{"x": x + ctx.rank}],
    "one value": lambda ctx, x: [{"x": x.index_fill(0, torch.tensor([2]), 1 + 1e-15 * ctx.rank)}],
    "rows": lambda ctx, x: [{"x": x[: ROWS - ctx.rank]}],
    "features in another order": lambda ctx, x: [{"x": x.cumsum(1).roll(ctx.rank, 1)}],
    "dtype": lambda ctx, x: [{"x": x.float() if ctx.rank else x}],
    "no rows": lambda ctx, x: [{"x": x[: 0 if ctx.rank else ROWS]}],
    "not a number": lambda ctx, x: [{"x": x / (1 - ctx.rank)}],
}


def refused_inputs(ctx, name):
    return attempt(lambda ctx, watch: (watch.begin(nn.Linear(1, 1)), differing(ctx, CHANGES[name])), ctx)


@pytest.mark.parametrize("name", one_in(4, CHANGES))
def test_inputs_that_differ_between_the_ranks_are_named(name):
    for refused in run_ranks(refused_inputs, 2, name, mesh={"tensor": 2}):
        assert refused is not None and refused.error == "ProbeFailed"
        assert "other values or shapes on rank 1 than on 0" in refused.text
        assert "shard_data" in refused.text


# -- the ranks, and strategies ---------------------------------------------------------------------------


def train_with(ctx, strategy, make, watch=None):
    model = made(make)
    model, ctx = weft.tensor_parallel(model, ctx, plan=PLAN)
    model, ctx = getattr(weft, strategy)(model, ctx)
    halves = [[part.chunk(ctx.data_size)[ctx.data_rank] for part in batch] for batch in batches()]
    return fit(model, halves, loss_of, watch)


def both_with(ctx, strategy, name):
    unsound, sound = ROWS_APART[name]
    return train_with(ctx, strategy, sound), attempt(train_with, ctx, strategy, unsound)


ROWS_APART = {
    "maximum": (
        lambda: Feedforward(lambda h: h - h.amax(-1, keepdim=True)),
        lambda: Feedforward(lambda h: h - h.amax(-1, keepdim=True) * 0),
    ),
    "gradient": (
        lambda: HookedGradient(-1),
        lambda: HookedGradient(None),
    ),
}


@pytest.mark.parametrize(("strategy", "name"), [("replicate", "gradient"), ("fully_shard", "maximum")])
def test_what_mixes_features_is_refused_beside_data_parallel(strategy, name):
    expected = fit(made(ROWS_APART[name][1]), batches(), loss_of)
    found = run_ranks(both_with, 4, strategy, name, mesh={"data": 2, "tensor": 2})
    check_exact([one for one, _ in found], expected)
    check_refused([one for _, one in found])


def test_a_failed_probe_ends_the_ranks_with_the_part_and_the_fix():
    unsound, _ = PAIRS["method softmax"]
    with pytest.raises(RanksFailed) as failed:
        run_ranks(train, 2, unsound, mesh={"tensor": 2})
    assert sorted(failed.value.errors) == [0, 1]
    for error in failed.value.errors.values():
        assert isinstance(error, ProbeFailed)
        text = str(error)
        assert "tensor_parallel" in text and "Feedforward" in text
        assert "one process" in text and "out of the plan" in text


def rows_computed(ctx, rows):
    seen = queue.SimpleQueue()  # a list would be put back
    model, ctx = weft.tensor_parallel(Feedforward(lambda h: seen.put(tuple(h.shape)) or h), ctx, plan=PLAN)
    model(torch.ones(rows, 5))
    shapes = [seen.get() for _ in range(seen.qsize())]
    return [n for n, width in shapes if width == HIDDEN]


@pytest.mark.parametrize(("rows", "whole"), [(12, 6), (3, 2), (2, 2), (1, 1)])
def test_each_rank_computes_few_rows_with_all_features(rows, whole):
    found = run_ranks(rows_computed, 2, rows, mesh={"tensor": 2})
    assert found == [[whole]] * 2


@pytest.mark.parametrize("name", one_in(6, PAIRS))
def test_what_mixes_features_is_refused(name):
    _, sound = PAIRS[name]
    expected = fit(made(sound), batches(), loss_of)
    found = run_ranks(both, 2, name, mesh={"tensor": 2})
    check_exact([one for one, _ in found], expected)
    check_refused([one for _, one in found])


def _trained_in_stages(ctx, model, plan):
    """Its parameters after a step."""
    model, ctx = weft.tensor_parallel(model, ctx, plan=plan)
    model, ctx = weft.pipeline(model, ctx, loss=nn.functional.mse_loss, micro_batches=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 16).view(4, 4)
    model(x, target=x).backward()
    optimizer.step()
    with weft.full_params(model, ctx):
        return {name: p.detach().clone() for name, p in model.named_parameters() if not p.is_meta}


def _layers():
    torch.manual_seed(0)
    return [nn.Linear(4, 4) for _ in range(4)]


def _without_blocks(ctx):
    styles = ("column", "row", "column", "row")
    with told("engines/torch/probes/runner.py", "layers that belong together, in no smaller module") as it:
        _trained_in_stages(ctx, nn.Sequential(*_layers()), {str(at): style for at, style in enumerate(styles)})
    return it.fix


def _with_blocks(ctx, fix):
    it, layers = Told(), _layers()
    it.fix = fix
    blocks = [it.run(nn=nn, up=layers[at], down=layers[at + 1])["block"] for at in (0, 2)]
    return _trained_in_stages(ctx, nn.Sequential(*blocks), {"*.0": "column", "*.2": "row"})


@pytest.mark.slow
def test_divided_layers_of_a_pipeline_are_in_blocks():
    fixes = {fix for fix in run_ranks(_without_blocks, 4, mesh={"pipeline": 2, "tensor": 2}) if fix}
    (fix,) = fixes
    (expected,) = run_ranks(_with_blocks, 1, fix, mesh={"pipeline": 1, "tensor": 1})
    for found in run_ranks(_with_blocks, 4, fix, mesh={"pipeline": 2, "tensor": 2}):
        assert found and all(torch.allclose(p, expected[name], atol=1e-6) for name, p in found.items())
