"""Random trainings with the habits of real programs, against the naive loop in one process.

Micro-batches are skipped (on all ranks, or on one), parameters are frozen and unfrozen, graphs are used for two
backward passes or for a gradient penalty, optimizers take closures, experts are routed, runs are resumed in the
middle. Each training equals the naive float64 loop over the samples that the ranks used, or is refused on all ranks.

`TRAININGS=1000 pytest` of this file tries that many, other ones in each run; without it the same
few are tried every time. A failure prints the `Training`, which can be pasted into `check`.
"""

import dataclasses
import os
import re
import tempfile
import time
from collections import UserDict
from dataclasses import dataclass
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, settings
from torch import nn
from torch.utils.data import DataLoader, Dataset

import weft
from tests.variants import variants
from weft.testing import RanksFailed, largest_difference, run_ranks

pytestmark = pytest.mark.usefixtures("warm_ranks")

_EXAMPLES = os.environ.get("TRAININGS")
_HANG_S = 50.0  # a rank that waits for another has a limit of its own, and a group waits for 60 s
_WIDTH = 4

REPLICATED = ("replicate", "buckets", "flat", "zero1")
SHARDED = ("zero2", "zero3", "fully_shard", "hybrid")


@dataclass(frozen=True)
class Training:
    """One program: how it is distributed, and what it does beside the textbook loop.

    Attributes:
        ranks: Of the run.
        strategy: What makes it distributed.
        unused: As for the strategy.
        optimizer: Name of a constructor below.
        closure: The step is given a closure, which computes the gradients.
        clip: Largest norm of the gradients, or None.
        parameters: What the model has beside ordinary weights: "complex", "empty", "row" (every weight of one row).
        experts: How one of two experts is chosen: "no", "alike" on all ranks, or by each rank its "own".
        batch: What a batch is.
        samples: Of the dataset.
        size: Samples per micro-batch and rank.
        steps: Micro-batches per window; 0 without `accumulate_grads`.
        uneven: As for `shard_data`.
        reduce: As for `accumulate_grads`.
        share: Losses are means times `share`; else sums over a count of the samples.
        skipped: Micro-batches (counted over the run, modulo 7) that are skipped on all ranks.
        skipped_by_one: The same, on the last rank.
        frozen: What is frozen during which steps: (name, first, last).
        backward: "once", "twice" through one graph, "penalty" on the gradients of inputs, "forwards" (two of them).
        set_to_none: As for `zero_grad`.
        resumed: Saved and resumed after so many steps, by new objects; 0 for not at all.
        set_epoch: The resumed program tells its loader the epoch, as scripts do.
        grown: The resumed program has a dataset of another length.
    """

    ranks: int
    strategy: str
    unused: str
    optimizer: str
    closure: bool
    clip: float | None
    parameters: str
    experts: str
    batch: str
    samples: int
    size: int
    steps: int
    uneven: str
    reduce: str
    share: bool
    skipped: tuple[int, ...]
    skipped_by_one: tuple[int, ...]
    frozen: tuple[tuple[str, int, int], ...]
    backward: str
    set_to_none: bool
    resumed: int
    set_epoch: bool
    grown: bool


@st.composite
def trainings(draw):
    def rarely(value, otherwise, of=4):
        return value if draw(st.integers(1, of)) == of else otherwise

    ranks = draw(st.sampled_from([1, 2, 2, 2, 3, 4]))
    strategy = draw(st.sampled_from([*REPLICATED, *SHARDED]))
    experts = rarely(draw(st.sampled_from(["alike", "own"])), "no")
    parameters = rarely(draw(st.sampled_from(["complex", "empty", "row"])), "plain")
    closure = rarely(True, False)
    skipped = draw(st.lists(st.integers(0, 6), max_size=3, unique=True))
    by_one = draw(st.lists(st.integers(0, 6), max_size=2, unique=True)) if draw(st.booleans()) else []
    frozen = [
        (name, first, first + draw(st.integers(0, 3)))
        for name in draw(st.lists(st.sampled_from(["first", "head", "experts.1"]), max_size=2, unique=True))
        for first in [draw(st.integers(0, 4))]
    ]
    resumed = rarely(draw(st.integers(1, 4)), 0)
    # torch's fused kernels take no complex numbers
    elementwise = [name for name in OPTIMIZERS if parameters != "complex" or "fused" not in name]
    optimizer = "lbfgs" if closure and draw(st.booleans()) else draw(st.sampled_from(elementwise))
    return Training(
        ranks=ranks,
        strategy="fully_shard" if strategy == "hybrid" and ranks < 4 else strategy,
        unused="zero" if experts != "no" and draw(st.integers(0, 7)) else draw(st.sampled_from(["error", "zero"])),
        optimizer=optimizer,
        closure=closure,
        clip=rarely(0.1, None),
        parameters=parameters,
        experts=experts,
        batch=draw(st.sampled_from(["tuple", "dict", "encoding", "named", "dataclass"])),
        # LBFGS is chaotic: after 40 steps two plain loops from weights that differ by 2e-16 are apart by 1.
        samples=draw(st.integers(5, 8 if optimizer == "lbfgs" else 26)),
        size=draw(st.integers(1, 3)),
        steps=0 if closure else draw(st.sampled_from([0, 1, 2, 3, 3])),
        uneven=draw(st.sampled_from(["balance", "empty", "drop", "pad"])),
        reduce=rarely("every", "last"),
        share=draw(st.booleans()),
        skipped=() if closure else tuple(skipped),
        skipped_by_one=() if closure else tuple(by_one),
        frozen=tuple(frozen),
        backward=rarely(draw(st.sampled_from(["twice", "penalty", "forwards"])), "once", of=3),
        set_to_none=draw(st.integers(0, 3)) > 0,
        resumed=resumed,
        set_epoch=bool(resumed) and draw(st.booleans()),
        grown=bool(resumed) and rarely(True, False),
    )


# -- the program -------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, parameters):
        super().__init__()
        width = 1 if parameters == "row" else _WIDTH
        self.first = nn.Linear(3, width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 1)
        if parameters == "complex":
            self.phase = nn.Parameter(torch.randn(width, dtype=torch.complex128))
        if parameters == "empty":
            self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x, chosen=None):
        hidden = torch.tanh(self.first(x))
        if hasattr(self, "phase"):
            hidden = (hidden * self.phase).imag + hidden
        for number, expert in enumerate(self.experts):
            if chosen is None or number == chosen:
                hidden = hidden + torch.tanh(expert(hidden))
        out = self.head(hidden)
        return out + self.empty.sum() if hasattr(self, "empty") else out


def net(t):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return Net(t.parameters).double()


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3),
    "adamw one by one": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3, foreach=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    # Without momentum: torch's kernel raises if a parameter gets its first gradient later than others.
    "sgd fused": lambda p: torch.optim.SGD(p, lr=1e-2, weight_decay=0.1, fused=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-3, centered=True),
}


def make_optimizer(t, model):
    if t.optimizer == "lbfgs":
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")
    return OPTIMIZERS[t.optimizer](model.parameters())


class Samples(Dataset):
    def __init__(self, samples):
        draw = torch.Generator().manual_seed(5)
        self.x = torch.randn(samples, 3, generator=draw, dtype=torch.float64)
        self.y = torch.randn(samples, 1, generator=draw, dtype=torch.float64)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return torch.tensor(index), self.x[index], self.y[index]


class Encoding(UserDict):
    """What tokenizers of transformers return: a mapping that is no dict."""

    def to(self, *args, **kwargs):
        self.data = {name: value.to(*args, **kwargs) for name, value in self.data.items()}
        return self


class Named(NamedTuple):
    ids: torch.Tensor
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Record:
    ids: torch.Tensor
    x: torch.Tensor
    y: torch.Tensor


class Collate:
    def __init__(self, kind):
        self.kind = kind

    def __call__(self, samples):
        ids, x, y = (torch.stack(column) for column in zip(*samples, strict=True))
        as_mapping = {"ids": ids, "x": x, "y": y}
        kinds = {
            "tuple": lambda: (ids, x, y),
            "dict": lambda: as_mapping,
            "encoding": lambda: Encoding(as_mapping),
            "named": lambda: Named(ids, x, y),
            "dataclass": lambda: Record(ids, x, y),
        }
        return kinds[self.kind]()


def columns(batch):
    if isinstance(batch, (dict, UserDict)):
        return batch["ids"], batch["x"], batch["y"]
    return tuple(batch) if isinstance(batch, tuple) else (batch.ids, batch.x, batch.y)


def losses(t, model, x, y, chosen):
    """The terms of the loss of each sample, [terms, samples]."""
    if t.backward == "penalty":
        x = x.clone().requires_grad_()
    out = model(x, chosen)
    terms = [(out - y).square().sum(1), out.abs().sum(1)]
    if t.backward == "penalty":
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        terms.append(slope.square().sum(1))
    if t.backward == "forwards":
        terms.append(model(x.flip(0), chosen).square().flip(0).sum(1))
    return torch.stack(terms)


def expert_of(t, number, rank):
    return {"no": None, "alike": number % 2, "own": (number + rank) % 2}[t.experts]


def freeze(t, model, step):
    for name, first, last in t.frozen:
        model.get_submodule(name).requires_grad_(not first <= step <= last)


def distribute(t, model, ctx):
    """The model and its optimizer under the strategy."""
    if t.strategy.startswith("zero"):
        return weft.zero_partition(model, make_optimizer(t, model), ctx, stage=int(t.strategy[-1]), unused=t.unused)
    if t.strategy in ("fully_shard", "hybrid"):
        model, ctx = weft.fully_shard(model, ctx, units=[nn.Linear], unused=t.unused)
    else:
        options = {"flat": {"flat": True}, "buckets": {"bucket_bytes": 100}}.get(t.strategy, {})
        model, ctx = weft.replicate(model, ctx, unused=t.unused, **options)
    return model, make_optimizer(t, model), ctx


@dataclass
class Used:
    """A micro-batch of one rank."""

    samples: list[int]
    expert: int | None = None
    skipped: bool = False


class Program:
    """The objects of one run of the training, and its loop."""

    def __init__(self, t, ctx, samples, log):
        self.t, self.ctx, self.log = t, ctx, log
        self.model, self.optimizer, ctx = distribute(t, net(t), ctx)
        loader = DataLoader(Samples(samples), batch_size=t.size, shuffle=True, collate_fn=Collate(t.batch))
        self.loader, ctx = weft.shard_data(loader, ctx, uneven=t.uneven)
        if t.steps:
            self.model, self.loader, ctx = weft.accumulate_grads(
                self.model, self.loader, ctx, steps=t.steps, reduce=t.reduce
            )
        objects = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}
        self.state, self.ctx = weft.checkpointable(objects, ctx)
        self.step, self.number = 0, 0

    def run(self, stop_after=0):
        """The rest of an epoch; whether it was stopped."""
        t = self.t
        for item in self.loader:
            freeze(t, self.model, self.step)
            window = item if t.steps else [item]
            used = []
            if t.closure:
                self.optimizer.step(lambda window=window, used=used: self.closure(window, used))
            else:
                self.backward(window, used)
                if t.clip is not None:
                    torch.nn.utils.clip_grad_norm_(self.model.parameters(), t.clip)
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=t.set_to_none)
            self.log.append(used)
            self.step += 1
            if self.step == stop_after:
                return True
        return False

    def closure(self, window, used):
        self.optimizer.zero_grad(set_to_none=self.t.set_to_none)
        self.number = self.step  # the same at each call of one step
        used.clear()
        return self.backward(window, used)

    def count(self, window):
        if self.t.steps:
            return window.denominator(lambda b: len(columns(b)[0]))
        return (
            weft.reduce(torch.tensor(float(len(columns(window[0])[0]))), self.ctx, "sum").item() / self.ctx.world_size
        )

    def backward(self, window, used):
        """Gradients of a window; notes what of it this rank used."""
        t, total = self.t, 0.0
        count = None if t.share else self.count(window)
        for batch in window:
            ids, x, y = columns(batch)
            number = self.number
            self.number += 1
            last_rank = self.ctx.rank == self.ctx.world_size - 1
            if number % 7 in t.skipped or (last_rank and number % 7 in t.skipped_by_one):
                used.append(Used(ids.tolist(), skipped=True))
                continue
            chosen = expert_of(t, number, self.ctx.rank)
            used.append(Used(ids.tolist(), chosen))
            terms = losses(t, self.model, x, y, chosen)
            if count is None:
                means = (terms.mean(1) if len(x) else terms.sum(1)) * (window if t.steps else self.loader).share
            else:
                means = terms.sum(1) / count
            if t.backward == "twice":
                means[0].backward(retain_graph=True)
                means[1:].sum().backward()
            else:
                means.sum().backward()
            total += means.sum().item()
        return total


EPOCHS = 2


def train(ctx, t, folder):
    """Parameters, and what this rank used in each step; the program is saved and resumed on the way."""
    log = []
    program = Program(t, ctx, t.samples, log)
    for _ in range(EPOCHS):
        if program.run(t.resumed):
            break
    else:
        return whole(program), log
    weft.save(program.state, folder, program.step, program.ctx)
    step, number = program.step, program.number
    program = Program(t, ctx, t.samples + 3 * t.grown, log)
    weft.restore(program.state, folder, program.ctx)
    program.step, program.number = step, number
    for epoch in range(program.loader.epoch, EPOCHS):
        if t.set_epoch:
            program.loader.set_epoch(epoch)
        program.run()
    return whole(program), log


def whole(program):
    weft.barrier(program.ctx)  # before torch's own messages: a rank that skipped something is not here yet
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in program.model.parameters()]


# -- what it should be -------------------------------------------------------------------------------


def naive(t, logs):
    """Parameters of plain torch in one process over the samples that the ranks used, step by step."""
    model = net(t)
    before, after = Samples(t.samples), Samples(t.samples + 3 * t.grown)  # taken over only where an epoch begins
    optimizer = make_optimizer(t, model)

    def backward(step):
        data = after if step >= t.resumed else before
        parts = [part for log in logs for part in log[step]]
        samples = sum(len(part.samples) for part in parts)
        total = torch.zeros((), dtype=torch.float64)
        for part in parts:
            if not part.skipped:  # without samples there are gradients of zeros, which are gradients to an optimizer
                x, y = data.x[part.samples], data.y[part.samples]
                loss = losses(t, model, x, y, part.expert).sum() / samples
                loss.backward()
                total += loss.detach()
        return total

    for step in range(len(logs[0])):
        freeze(t, model, step)
        if t.resumed and step == t.resumed:
            optimizer.zero_grad()  # a program that begins anew has no gradients, not even zeros
        if t.closure:

            def closure(step=step):
                optimizer.zero_grad(set_to_none=t.set_to_none)
                return backward(step)

            optimizer.step(closure)
        else:
            backward(step)
            if t.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), t.clip)
            optimizer.step()
        optimizer.zero_grad(set_to_none=t.set_to_none)
    return [p.detach() for p in model.parameters()]


def check_samples(t, logs):
    """In each epoch the ranks have every sample once, unless they were asked to repeat or leave out some."""
    seen = [i for log in logs for step in log for used in step for i in used.samples]
    counts = [seen.count(i) for i in range(t.samples)]
    if t.uneven in ("balance", "empty"):
        assert counts == [EPOCHS] * t.samples, counts
    elif t.uneven == "drop":
        assert max(counts) <= EPOCHS, counts
    else:
        assert min(counts) >= EPOCHS, counts


def may_be_refused(t):
    """What torch, or the mathematics, cannot do; by the text of the refusal."""
    several, sharded = t.ranks > 1, t.strategy in SHARDED
    reasons = {
        "length of the dataset": t.grown,
        "with too few samples": t.uneven in ("balance", "drop"),
        "parameter without gradient": t.unused == "error" and t.experts != "no",
        "one rank alone skips": several and bool(t.skipped_by_one) and (sharded or not t.steps),
        "one rank skips what the others reduce twice": several and bool(t.skipped_by_one) and t.backward == "twice",
        "experts of its own": several and sharded and t.experts == "own",
        "create_graph": several and sharded and t.backward == "penalty",
        "second backward": several and t.unused == "zero" and t.backward == "twice",
        "closure": several and t.closure,
        "elementwise": (several or t.strategy.startswith("zero")) and t.optimizer == "lbfgs",
        "fused": several and "fused" in t.optimizer,
        "rprop": several and sharded and t.optimizer == "rprop",
        "complex": several and t.parameters == "complex",
        "torch.complex128": bool(t.resumed) and t.parameters == "complex",  # safetensors has complex64 only
        "empty": several and t.parameters == "empty" and t.strategy == "flat",
    }
    return [name for name, holds in reasons.items() if holds]


def check(t):
    """Raise AssertionError unless the training equals the naive loop, or is refused on all ranks for a reason."""
    mesh = {"replica": 2, "shard": 2} if t.strategy == "hybrid" and t.ranks == 4 else None
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = run_ranks(train, t.ranks, t, folder, mesh=mesh)
        except RanksFailed as failed:
            assert time.monotonic() - began < _HANG_S, f"took {time.monotonic() - began:.0f} s: {failed}"
            return refused(t, failed)
    logs = [log for _, log in found]
    if t.experts == "no":
        check_samples(t, logs)
    expected = naive(t, logs)
    for parameters, _ in found:
        difference = largest_difference(parameters, expected)
        # LBFGS divides by differences of gradients: errors of 1e-16 grow in each iteration.
        limit = 1e-8 if t.optimizer == "lbfgs" else 1e-11
        assert difference <= limit, f"differs by {difference} after {len(logs[0])} steps"
        assert largest_difference(parameters, found[0][0]) == 0, "the ranks differ"
    return f"equal: {t.strategy}, {t.backward}"


def refused(t, failed):
    """Check a refusal: every rank raises it, or a PeerError that names the rank that did."""
    reasons = may_be_refused(t)
    assert reasons, f"refused without a reason: {failed}"
    left = [error.rank for error in failed.errors.values() if getattr(error, "text", "").startswith("left the job")]
    assert len(failed.errors) == t.ranks or left, f"{len(failed.errors)} of {t.ranks} ranks raised: {failed}"
    for rank, error in failed.errors.items():
        # A rank that waits in a collective of torch hears of it from gloo; which rank it was, when its context ends.
        named = isinstance(error, weft.errors.PeerError) or (rank != failed.first and "gloo" in str(error).lower())
        clear = isinstance(error, (weft.errors.WeftError, ValueError, TypeError)) and re.search("found:", str(error))
        assert named or clear, f"rank {rank}: {failed}"
    return f"refused: {', '.join(reasons)}"


@pytest.mark.timeout(100_000 if _EXAMPLES else 240)
@settings(
    max_examples=int(_EXAMPLES or 12),
    derandomize=_EXAMPLES is None,
    database=None,
    deadline=None,
    phases=[Phase.generate],  # a smaller case is not worth the time: each may be one that waits
    suppress_health_check=list(HealthCheck),
)
@given(trainings())
def test_a_random_training_equals_the_naive_loop_or_is_refused(t):
    event(check(t))


# What the cases that were found once have in common.
FOUND = Training(
    ranks=2,
    strategy="replicate",
    unused="error",
    optimizer="adagrad",
    closure=False,
    clip=None,
    parameters="plain",
    experts="no",
    batch="tuple",
    samples=24,
    size=1,
    steps=1,
    uneven="drop",
    reduce="every",
    share=False,
    skipped=(),
    skipped_by_one=(),
    frozen=(),
    backward="once",
    set_to_none=False,
    resumed=0,
    set_epoch=False,
    grown=False,
)


@pytest.mark.parametrize("strategy", ["fully_shard", *variants("zero2", "zero3")])
def test_a_rank_skips_a_window_while_another_freezes_a_layer(strategy):
    """They meet for different things, which had been taken for one."""
    t = dataclasses.replace(
        FOUND, strategy=strategy, batch="dataclass", skipped=(1, 3), skipped_by_one=(2, 4), frozen=(("head", 1, 2),)
    )
    assert check(t).startswith("refused:")


def test_a_rank_skips_the_end_of_a_window_in_which_a_layer_is_unfrozen():
    t = dataclasses.replace(
        FOUND,
        strategy="zero1",
        unused="zero",
        parameters="empty",
        experts="alike",
        batch="encoding",
        samples=21,
        steps=3,
        uneven="pad",
        share=True,
        skipped=(4, 1, 6),
        skipped_by_one=(1, 5),
        frozen=(("experts.1", 4, 4),),
        set_to_none=True,
    )
    assert check(t).startswith("equal")


@pytest.mark.slow
def test_one_rank_skips_the_only_backward_pass_of_a_flat_step():
    """It compares gradients while the other reduces them, in messages that torch.distributed does not see."""
    t = dataclasses.replace(
        FOUND,
        strategy="flat",
        unused="zero",
        optimizer="rprop",
        clip=0.1,
        parameters="empty",
        samples=17,
        size=3,
        steps=0,
        reduce="last",
        share=True,
        skipped=(6, 5, 1),
        skipped_by_one=(3, 2),
        frozen=(("experts.1", 3, 5),),
        backward="forwards",
    )
    assert check(t).startswith("refused:")


@pytest.mark.slow
def test_one_rank_gathers_rows_while_another_is_in_a_second_backward_pass():
    """Where the backward pass waits cannot be seen, but that its thread does nothing."""
    changes = {"samples": 11, "size": 3, "skipped": (1, 0), "skipped_by_one": (3, 1), "backward": "twice"}
    t = dataclasses.replace(FOUND, strategy="zero1", reduce="last", share=True, **changes)
    assert check(t).startswith("refused:")


def test_a_wrong_training_is_noticed():
    """What is above can fail: a rank that leaves samples out differs from the loop that has them."""
    plain = dict.fromkeys((f.name for f in dataclasses.fields(Training)), ())
    t = Training(
        **plain
        | {"ranks": 1, "strategy": "replicate", "unused": "error", "optimizer": "sgd"}
        | {"closure": False, "clip": None, "parameters": "plain", "experts": "no", "batch": "tuple"}
        | {
            "samples": 5,
            "size": 1,
            "steps": 0,
            "uneven": "balance",
            "reduce": "last",
            "share": True,
            "backward": "once",
        }
        | {"set_to_none": True, "resumed": 0, "set_epoch": False, "grown": False}
    )
    [(parameters, log)] = run_ranks(train, 1, t, "")
    assert largest_difference(parameters, naive(t, [log])) < 1e-12
    log[0][0].samples.clear()
    assert largest_difference(parameters, naive(t, [log])) > 1e-6
