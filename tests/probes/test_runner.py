"""Probes as such: when they run, that they leave nothing behind, and probes of the user's own transforms."""

import itertools
import random
import warnings
from collections import Counter, deque
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import weft
from weft.contract import Probe
from weft.engines.probes import Compared, Schedule
from weft.errors import ContextError, ProbeFailed
from weft.testing import RanksFailed, run_ranks

from .attempts import whole

WIDTH = 8


# -- no trace ---------------------------------------------------------------------------------------------


class Busy(nn.Module):
    """Changes all that a forward may change: what is random, buffers, attributes, and what they hold."""

    def __init__(self):
        super().__init__()
        self.calls, self.seen, self.sizes, self.kinds = 0, [], {}, set()
        self.recent, self.total = deque(maxlen=3), torch.zeros(())
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x):
        self.calls += 1
        self.seen.append(float(x.detach().sum()))
        self.recent.append(self.calls)
        self.kinds.add(self.calls % 5)
        self.sizes[self.calls] = tuple(x.shape)
        self.total += 1
        self.average.mul_(0.9).add_(x.detach().flatten(0, -2).mean(0), alpha=0.1)
        self.latest = random.random() + float(np.random.rand())
        return F.dropout(x, 0.25, self.training)

    def state(self):
        held = self.calls, self.seen, self.sizes, sorted(self.kinds), list(self.recent)
        return repr((*held, float(self.total), getattr(self, "latest", None)))


class Feedforward(nn.Module):
    def __init__(self):
        super().__init__()
        self.busy, self.up, self.down = Busy(), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.busy(x))))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.busy = 2, Busy()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        x = self.busy(x)
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.busy, self.router = Busy(), nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        weights, chosen = self.router(self.busy(x)).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            result = torch.where((chosen == number)[..., None], expert(x), result)
        return x + result * weights[..., None]


class Net(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.first, self.parts, self.last = nn.Linear(4, WIDTH), nn.ModuleList([part(), part()]), nn.Linear(WIDTH, 3)

    def forward(self, x):
        h = self.first(x)
        for part in self.parts:
            h = part(h)
        return self.last(h)


def tensor(model, ctx):
    return weft.tensor_parallel(model, ctx, plan={"parts.*.up": "column", "parts.*.down": "row"})


def context(model, ctx):
    model, ctx = weft.context_parallel(model, ctx)
    return weft.replicate(model, ctx)


def experts(model, ctx):
    model, ctx = weft.expert_parallel(model, ctx)
    return weft.replicate(model, ctx, unused="zero")


def pipeline(model, ctx):
    return weft.pipeline(model, ctx, loss=F.mse_loss, micro_batches=2)


def recompute(model, ctx):
    return weft.recompute(model, ctx, blocks=nn.Linear)


AXES = {
    "tensor": (tensor, Feedforward),
    "context": (context, Attention),
    "expert": (experts, Experts),
    "pipeline": (pipeline, Feedforward),
    "data": (recompute, Feedforward),
}


def three_steps(ctx, axis, mode):
    """All that three steps leave behind."""
    warnings.simplefilter("always")
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    ctx, (apply, part) = replace(ctx, probes=mode), AXES[axis]
    model = Net(part).double()
    hooks = Counter()
    for name, each in model.named_modules():
        each.register_forward_pre_hook(lambda part, args, name=name: hooks.update([f"before {name}"]))
        each.register_forward_hook(lambda part, args, output, name=name: hooks.update([f"after {name}"]))
    model, ctx = apply(model, ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    draw, found = torch.Generator().manual_seed(1), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            x, y = (torch.randn(4, 8, n, generator=draw, dtype=torch.float64) for n in (4, 3))
            if axis == "context":
                x, y = weft.data.split_sequence((x, y), ctx)
            loss = model(x, y) if axis == "pipeline" else F.mse_loss(model(x), y)
            loss.backward()
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and not p.is_meta}
            found.append({name: bits(gradient) for name, gradient in gradients.items()})
            optimizer.step()
            optimizer.zero_grad()
    return {
        "gradients": found,
        "parameters": {name: bits(p) for name, p in whole(model).items()},
        "buffers": {name: bits(b) for name, b in model.named_buffers() if not b.is_meta},
        "random states": (bits(torch.get_rng_state()), repr(random.getstate()), repr(np.random.get_state())),
        "hooks": dict(hooks),
        "attributes": [part.state() for part in model.modules() if isinstance(part, Busy)],
        "warnings": [str(one.message) for one in caught],
    }


def bits(value):
    value = value.detach()
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return tuple(value.shape), value.cpu().numpy().tobytes()


@pytest.mark.parametrize("axis", AXES)
def test_a_step_after_a_probe_is_the_step_without_it(axis):
    without = run_ranks(three_steps, 2, axis, "off", mesh={axis: 2})
    measured = run_ranks(three_steps, 2, axis, "every", mesh={axis: 2})
    for one, other in zip(without, measured, strict=True):
        for what, value in one.items():
            assert other[what] == value, what


# -- when -------------------------------------------------------------------------------------------------


def due(schedule, unit, calls, kind=None):
    return [number for number in range(1, calls + 1) if schedule.is_due(unit, kind)]


def test_powers_of_two_are_measured_and_then_multiples():
    assert due(Schedule("auto", ["one"]), "one", 4096) == [
        1,
        2,
        4,
        8,
        16,
        32,
        64,
        128,
        256,
        512,
        1024,
        2048,
        3072,
        4096,
    ]


def test_units_take_turns_and_each_is_measured_in_its_first_call():
    schedule = Schedule("auto", ["one", "two", "three"])
    found = {name: due(schedule, name, 8192) for name in ("one", "two", "three")}
    assert all(calls[0] == 1 for calls in found.values())
    later = [call for calls in found.values() for call in calls[1:]]
    assert sorted(later) == [2, 4, 8, 16, 32, 64, 128, 256, 512, *range(1024, 8193, 1024)]
    assert all(len(calls) > 4 for calls in found.values())


def test_each_kind_of_call_is_measured_in_its_first_call():
    schedule = Schedule("auto", ["one", "two"])
    kinds = ["train", "evaluate", "train", "train", "half"]
    assert [schedule.is_due("one", kind) for kind in kinds] == [1, 1, 2, 0, 1]


@pytest.mark.parametrize(("mode", "calls"), [("every", [1, 2, 3, 4, 5, 6, 7]), ("off", [])])
def test_all_calls_or_none(mode, calls):
    assert due(Schedule(mode, ["one", "two"]), "two", 7) == calls


# -- settings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "every", "off"])
def test_explain_has_the_mode(mode):
    lines = [line for line in weft.explain(weft.local(probes=mode)).splitlines() if line.startswith("  probes ")]
    assert len(lines) == 1 and mode in lines[0]


@pytest.mark.parametrize("mode", ["never", "", 1, True, None])
def test_another_mode_is_refused(mode):
    if mode is None:
        assert weft.local().probes == "auto"
        return
    with pytest.raises((ValueError, TypeError, ContextError), match="probes"):
        weft.local(probes=mode)


@pytest.mark.parametrize("mode", ["every", "off", "auto"])
def test_the_variable_sets_the_mode(monkeypatch, mode):
    monkeypatch.setenv("WEFT_PROBES", mode)
    with weft.start() as ctx:
        assert ctx.probes == mode
        assert "WEFT_PROBES" in weft.explain(ctx)
    with weft.start(probes="off") as ctx:
        assert ctx.probes == "off"


def test_a_wrong_variable_is_refused(monkeypatch):
    monkeypatch.setenv("WEFT_PROBES", "sometimes")
    with pytest.raises(ContextError, match="WEFT_PROBES='sometimes'"):
        weft.start()


# -- probes of the user's own transforms --------------------------------------------------------------------


class Doubled:
    """The probe of a transform whose units return the same on all ranks, as twice the input."""

    outside, spare = False, None
    cause, fix = "someone changed it", "do_not_change_it()"

    def __init__(self, unit, group):
        self.units, self.group, self.measured = {"part": unit}, group, 0

    def equal_inputs(self, name, args, kwargs):
        return args

    def alone(self, name, args, kwargs):
        return args[0] * 2

    def measure(self, name, args, kwargs, *, gradients):
        self.measured += 1
        yield Compared("the double", self.units[name](*args), args[0] * 2)


class Doubling(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x):
        return x * self.factor


PROBES = []


@weft.transform(collective=True)
def doubling(module, ctx, *, outside=False, kind=Doubled):
    probe = kind(module, ctx.group)
    probe.outside = outside
    PROBES[:] = [probe]
    return module, ctx.offering(probe)


def doubled(ctx, factor, mode, outside, calls):
    module, ctx = doubling(Doubling(factor), replace(ctx, probes=mode), outside=outside)
    assert isinstance(PROBES[0], Probe)
    for _ in range(calls):
        module(torch.ones(3)).sum().backward()
    return PROBES[0].measured


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize(("mode", "measured"), [("every", 6), ("auto", 3), ("off", 0)])
def test_a_probe_that_is_offered_runs_as_the_context_says(outside, mode, measured):
    assert run_ranks(doubled, 2, 2.0, mode, outside, 6) == [measured, measured]


@pytest.mark.parametrize("outside", [False, True])
def test_a_probe_that_is_offered_fails_on_all_ranks(outside):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(doubled, 2, 3.0, "auto", outside, 1)
    assert sorted(failed.value.errors) == [0, 1]
    for error in failed.value.errors.values():
        assert isinstance(error, ProbeFailed)
        for text in ("doubling", "part of Doubling", "the double", "someone changed it", "do_not_change_it()"):
            assert text in str(error)


class DoubledTwice(Doubled):
    """The second result is off by a little more than the first, as another order of sums would make it."""

    def measure(self, name, args, kwargs, *, gradients):
        found, expected = self.units[name](*args), args[0] * 2
        yield Compared("the first", found, expected)
        yield Compared("the second", found * (1 + 1e-6), expected)


def doubled_twice(ctx):
    module, ctx = doubling(Doubling(3.0), ctx, kind=DoubledTwice)
    module(torch.ones(3))


def test_rounding_does_not_decide_which_difference_is_named():
    with pytest.raises(RanksFailed) as failed:
        run_ranks(doubled_twice, 2)
    assert all("the first" in str(error) for error in failed.value.errors.values())


def on_one_rank(ctx):
    """What is wrong on one rank alone."""
    module, ctx = doubling(Doubling(3.0 if ctx.rank else 2.0), ctx)
    try:
        module(torch.ones(3))
    except ProbeFailed as error:
        return str(error)
    return None


def test_what_is_wrong_on_one_rank_fails_on_all():
    other, one = run_ranks(on_one_rank, 2)
    assert "doubling" in other and "the double" in one


def after_undo(ctx):
    module, ctx = doubling(Doubling(2.0), ctx)
    module(torch.ones(3))
    weft.undo(module, ctx)
    module.factor.data.fill_(3.0)
    return module(torch.ones(3)).tolist(), PROBES[0].measured


def test_undo_takes_probes_off():
    assert run_ranks(after_undo, 2) == [([3.0, 3.0, 3.0], 1)] * 2


def without_gradients(ctx):
    """Calls in evaluation and without gradients are other kinds of calls."""
    module, ctx = doubling(Doubling(2.0), replace(ctx, probes="auto"))
    for gradients, training in itertools.product((True, False), repeat=2):
        module.train(training)
        with torch.set_grad_enabled(gradients):
            for _ in range(3):
                module(torch.ones(3))
    return PROBES[0].measured


def test_each_mode_of_call_is_measured():
    assert run_ranks(without_gradients, 2) == [8, 8]


LOST = "[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"


class Lost(Doubled):
    """A peer is gone while this is measured."""

    def measure(self, name, args, kwargs, *, gradients):
        raise RuntimeError(LOST)


def loses_a_peer(ctx, outside):
    module, ctx = doubling(Doubling(2.0), ctx, outside=outside, kind=Lost)
    try:
        module(torch.ones(3))
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("outside", [False, True])
def test_a_peer_that_is_lost_meanwhile_is_no_mistake_of_the_module(outside):
    assert run_ranks(loses_a_peer, 2, outside) == [LOST, LOST]
