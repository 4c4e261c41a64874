"""Random pipelines against the naive loop: equal to it, or an OrderError.

`PIPELINES=5000 pytest tests/training/test_pipelines.py` tries that many, other ones in each run; without it
the same 50 are tried every time. A failure prints the `Pipeline`, which can be pasted into `check`.
"""

import os
from dataclasses import dataclass

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, event, given, settings
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.testing import largest_difference, run_ranks

_EXAMPLES = os.environ.get("PIPELINES")
_LENGTH = 4  # tokens per sample, of which some count

# Differences allowed after a step. AdamW and RMSprop divide by a gradient's size plus _EPS, so that
# an error of 2**-24 (float32) in a gradient of about 1 can grow by 1 / _EPS, times the lr. In 16 bits
# a gradient is wrong by 2**-8 or 2**-11 of the largest, and small ones by their whole size: 2 * lr.
_LR, _EPS = 0.01, 1e-3
_PER_STEP = {"fp64": 1e-13, "fp32": 2e-6, "bf16": 2 * _LR, "fp16": 2 * _LR}


@dataclass(frozen=True)
class Pipeline:
    """One way to train: what is applied in which order, and on what."""

    ranks: int
    order: tuple[str, ...]
    optimizer_order: tuple[str, ...]
    strategy: str
    units: type | str | int | None
    precision: str
    samples: int
    batch: int
    epochs: int
    steps: tuple[int, ...]
    remainder: str
    reduce: str
    uneven: str
    lengths: tuple[int, ...]
    clip: float | None
    optimizer: str
    groups: bool
    set_to_none: bool
    flat: bool
    bucket_bytes: int
    unused: str

    @property
    def is_right(self):
        """Whether the order is one the design allows."""
        rules = [("with_precision", "strategy"), ("strategy", "accumulate_grads"), ("shard_data", "accumulate_grads")]
        rules_hold = all(
            self.order.index(a) < self.order.index(b) for a, b in rules if a in self.order and b in self.order
        )
        # On one rank there is no flat buffer to step on, and fuse_step does nothing.
        can_fuse = self.flat or self.ranks == 1 or "fuse_step" not in self.optimizer_order
        # An optimizer is told of precision after its module, and before fuse_step.
        told = "skip_nonfinite" in self.optimizer_order
        can_tell = not told or "with_precision" in self.order
        return rules_hold and can_fuse and can_tell and self.optimizer_order != ("fuse_step", "skip_nonfinite")


@st.composite
def pipelines(draw):
    ranks = draw(st.sampled_from([1, 2, 2, 4]))
    precision = draw(st.sampled_from(["none", "fp64", "fp32", "bf16", "fp16"]))
    names = [
        *(["with_precision"] if precision != "none" else []),
        *(["strategy"] if ranks > 1 or draw(st.booleans()) else []),
        *(["shard_data"] if draw(st.integers(0, 4)) else []),
        *(["accumulate_grads"] if draw(st.integers(0, 4)) else []),
    ]
    # Most orders are right ones, or nothing but refusals would be tried.
    order = tuple(names) if draw(st.integers(0, 5)) != 3 else tuple(draw(st.permutations(names)))
    told = precision == "fp16" or draw(st.booleans())
    strategy = draw(st.sampled_from(["replicate", "replicate", "fully_shard", "zero1", "zero2", "zero3"]))
    flat, unused = strategy == "replicate" and draw(st.booleans()), draw(st.sampled_from(["error", "error", "zero"]))
    fuse = (
        strategy == "replicate"
        and unused == "error"
        and (draw(st.booleans()) if flat else draw(st.integers(0, 19)) == 7)
    )
    last = [*(["skip_nonfinite"] if told and precision != "none" else []), *(["fuse_step"] if fuse else [])]
    return Pipeline(
        ranks=ranks,
        order=order,
        optimizer_order=tuple(last[::-1] if draw(st.integers(0, 9)) == 7 else last),
        strategy=strategy,
        units=draw(st.sampled_from([None, nn.Linear, "second", 30])),
        precision=precision,
        samples=draw(st.integers(0, 40)),
        batch=draw(st.integers(1, 6)),
        epochs=draw(st.integers(1, 2)),
        steps=tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))),
        remainder=draw(st.sampled_from(["step", "drop", "carry"])),
        reduce=draw(st.sampled_from(["last", "last", "every"])),
        uneven=draw(st.sampled_from(["balance", "empty", "drop"])),
        lengths=tuple(draw(st.lists(st.integers(0, _LENGTH), min_size=1, max_size=8))),
        clip=draw(st.sampled_from([None, 0.1, 10.0])),
        optimizer=draw(st.sampled_from(["adamw", "sgd", "rmsprop"])),
        groups=draw(st.booleans()),
        set_to_none=draw(st.booleans()),
        flat=flat,
        bucket_bytes=draw(st.sampled_from([1, 200, 25 * 2**20])),
        unused=unused,
    )


# -- the parts of a training -------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.norm = nn.LayerNorm(5)
        self.second.bias = self.first.bias  # tied

    def forward(self, x):
        return self.head(self.norm(torch.tanh(self.second(torch.tanh(self.first(x))))))


def _dtype(p):
    return torch.float64 if p.precision in ("none", "fp64") else torch.float32


def _model(dtype):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Model().to(dtype)


def _dataset(p, dtype):
    """Inputs [samples, length, 3], classes [samples, length], and which tokens count."""
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(p.samples, _LENGTH, 3, generator=draw, dtype=torch.float64).to(dtype)
    y = torch.randint(0, 3, (p.samples, _LENGTH), generator=draw)
    counts = torch.tensor([p.lengths[i % len(p.lengths)] for i in range(p.samples)], dtype=torch.long)
    return TensorDataset(x, y, torch.arange(_LENGTH).expand(p.samples, _LENGTH) < counts[:, None])


def _optimizer(p, model):
    parameters = list(model.parameters())
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": _LR / 2}] if p.groups else parameters
    if p.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=_LR, eps=_EPS, weight_decay=0.1)
    if p.optimizer == "rmsprop":
        return torch.optim.RMSprop(groups, lr=_LR, eps=_EPS)
    return torch.optim.SGD(groups, lr=_LR, momentum=0.9)


def _loss_sum(model, batch):
    x, y, counts = batch
    losses = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
    return (losses * counts.flatten()).sum()


def _finish(p, model, optimizer):
    if p.clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), p.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=p.set_to_none)


def _size_of(p, window):
    return p.steps[min(window, len(p.steps) - 1)]


def _uneven(p):
    """ "balance" raises if a rank would get nothing: not what is tried here."""
    rest = p.samples % (p.batch * p.ranks)
    return "empty" if p.uneven == "balance" and 0 < rest < p.ranks else p.uneven


# -- the naive loop, in one process ------------------------------------------------------------------


def naive(p):
    """Parameters after plain torch in float64 on global batches, and the number of steps."""
    model = _model(torch.float64)
    optimizer = _optimizer(p, model)
    data = _dataset(p, torch.float64)
    windows = _naive_windows(p)
    for window in windows:
        batches = [data[start:stop] for start, stop in window]
        tokens = sum(int(batch[2].sum()) for batch in batches) or 1
        for batch in batches:
            (_loss_sum(model, batch) / tokens).backward()
        _finish(p, model, optimizer)
    return [q.detach() for q in model.parameters()], len(windows)


def _naive_windows(p):
    size = p.batch * p.ranks if "shard_data" in p.order else p.batch
    epoch = [(start, min(start + size, p.samples)) for start in range(0, p.samples, size)]
    if "shard_data" in p.order and _uneven(p) == "drop" and epoch:
        start, stop = epoch.pop()
        stop -= (stop - start) % p.ranks
        epoch += [(start, stop)] if stop > start else []
    if "accumulate_grads" not in p.order:
        return [[batch] for _ in range(p.epochs) for batch in epoch]
    windows, left = [], []
    for _ in range(p.epochs):
        for batch in epoch:
            left.append(batch)
            if len(left) == _size_of(p, len(windows)):
                windows.append(left)
                left = []
        if p.remainder == "step" and left:
            windows.append(left)
        if p.remainder != "carry":
            left = []
    return windows


# -- the pipeline ------------------------------------------------------------------------------------


_SCALE = weft.precision.LossScaling(init=2.0**8)  # low, so that no step is skipped
_FP16 = weft.Precision(param=torch.float32, compute=torch.float16, output=torch.float32, scaling=_SCALE)


def _apply(p, name, model, loader, optimizer, ctx):
    if name == "shard_data":
        loader, ctx = weft.shard_data(loader, ctx, uneven=_uneven(p))
    elif name == "with_precision":
        model, ctx = weft.with_precision(model, ctx, _FP16 if p.precision == "fp16" else p.precision)
    elif name == "strategy":
        model, optimizer, ctx = _distribute(p, model, ctx)
    else:
        steps = p.steps[0] if len(p.steps) == 1 else lambda window: _size_of(p, window)
        model, loader, ctx = weft.accumulate_grads(
            model, loader, ctx, steps=steps, remainder=p.remainder, reduce=p.reduce
        )
    return model, loader, optimizer, ctx


def _distribute(p, model, ctx):
    """The model by its strategy; and the optimizer, if the strategy takes that too."""
    if p.strategy == "replicate":
        model, ctx = weft.replicate(model, ctx, flat=p.flat, bucket_bytes=p.bucket_bytes, unused=p.unused)
        return model, None, ctx
    if p.strategy == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx, units=p.units, unused=p.unused)
        return model, None, ctx
    optimizer = _optimizer(p, model)
    if "skip_nonfinite" in p.optimizer_order and any(r.name == "with_precision" for r in ctx.records(model)):
        optimizer, ctx = weft.skip_nonfinite(optimizer, ctx)
    stage = int(p.strategy[-1])
    units = p.units if stage > 1 else None
    return weft.zero_partition(model, optimizer, ctx, stage=stage, units=units, unused=p.unused)


def train(ctx, p):
    """Parameters and number of steps, or the text of an OrderError."""
    torch.manual_seed(ctx.rank)
    model, loader = _model(_dtype(p)), DataLoader(_dataset(p, _dtype(p)), batch_size=p.batch)
    optimizer = None
    try:
        for name in p.order:
            model, loader, optimizer, ctx = _apply(p, name, model, loader, optimizer, ctx)
        if optimizer is None:
            optimizer = _optimizer(p, model)
            for name in p.optimizer_order:
                optimizer, ctx = getattr(weft, name)(optimizer, ctx)
    except weft.errors.OrderError as error:
        return str(error)
    steps = 0
    for _ in range(p.epochs):
        promised, before = len(loader), steps
        for window in loader:
            if isinstance(window, list):  # not in windows
                tokens = weft.reduce(window[2].sum().double(), ctx, "sum").item() / ctx.world_size or 1
                batches = [window]
            else:
                tokens = window.denominator(lambda batch: batch[2])
                batches = window
            for batch in batches:
                (_loss_sum(model, batch) / tokens).backward()
            _finish(p, model, optimizer)
            assert p.precision != "fp16" or not weft.was_skipped(optimizer)
            steps += 1
        assert steps - before == promised, "len(loader) is not the number of windows"
    return [_whole(q.detach()).clone() for q in model.parameters()], steps


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def check(p):
    """Raise AssertionError unless the pipeline equals the naive loop, or is refused as it should."""
    found = run_ranks(train, p.ranks, p)
    if not p.is_right:
        assert all(isinstance(text, str) and "expected:" in text and "fix:" in text for text in found), found
        return "refused"
    expected, steps = naive(p)
    for result in found:
        assert not isinstance(result, str), f"a right order was refused: {result}"
        assert result[1] == steps
        difference = largest_difference(result[0], expected)
        limit = _PER_STEP["fp64" if p.precision == "none" else p.precision] * max(steps, 10)
        assert difference <= limit, f"differs by {difference} after {steps} steps, allowed are {limit}"
        assert largest_difference(result[0], found[0][0]) == 0, "the ranks differ"
    return f"{(steps > 0 and 'trained') or 'nothing to do'}, {p.precision}, {p.strategy}"


@settings(
    max_examples=int(_EXAMPLES or 15),
    derandomize=_EXAMPLES is None,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(pipelines())
def test_a_random_pipeline_equals_the_naive_loop_or_is_refused(p):
    event(check(p))
