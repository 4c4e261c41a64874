"""Windows of which micro-batches are skipped, that are left early, or in which parameters change.

Compared with a naive loop in one process over the micro-batches that were used.
"""

import time

import pytest
import torch
from torch import nn

import weft
from tests.variants import diagonal, variant_cases, variants
from weft.testing import RanksFailed, largest_difference, run_ranks

pytestmark = pytest.mark.usefixtures("warm_ranks")

REPLICATED = ("replicate", "buckets", "flat", "unused", "zero1")
SHARDED = ("zero2", "zero3", "fully_shard")
STRATEGIES = (*REPLICATED, *SHARDED)
STEPS = 3  # micro-batches per window


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.blocks(x))


def net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Net().double()


def batch(window, part, rank):
    draw = torch.Generator().manual_seed(1000 * window + 10 * part + rank)
    return torch.randn(3, 4, generator=draw, dtype=torch.float64)


def make_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def prepare(strategy, ctx, optimizer=make_optimizer):
    """Model, optimizer and context under a strategy."""
    model = net()
    if strategy == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx)
    elif not strategy.startswith("zero"):
        options = {"flat": {"flat": True}, "unused": {"unused": "zero"}, "buckets": {"bucket_bytes": 100}}
        model, ctx = weft.replicate(model, ctx, **options.get(strategy, {}))
    made = optimizer(model.parameters())
    if strategy.startswith("zero"):
        model, made, ctx = weft.zero_partition(model, made, ctx, stage=int(strategy[-1]))
    return model, made, ctx


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def values(model):
    return [whole(p.detach()).clone() for p in model.parameters()]


def train(ctx, strategy, used, reduce="last", clip=None, set_to_none=True):
    """Train on the micro-batches of which `used[window][part]` holds this rank; `...` leaves the window."""
    model, optimizer, ctx = prepare(strategy, ctx)
    model, windows, ctx = weft.accumulate_grads(
        model, [(w, p) for w in range(len(used)) for p in range(STEPS)], ctx, steps=STEPS, reduce=reduce
    )
    for window in windows:
        for w, p in window:
            if used[w][p] is ...:
                break
            if ctx.rank not in used[w][p]:
                continue
            (model(batch(w, p, ctx.rank)).square().sum() / 10).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return values(model)


def reference(ranks, used, clip=None):
    model = net()
    optimizer = make_optimizer(model.parameters())
    for w, parts in enumerate(used):
        for p, members in enumerate(parts):
            if members is ...:
                break
            for rank in members:
                (model(batch(w, p, rank)).square().sum() / 10 / ranks).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


ALL = (0, 1)
ALIKE = {
    "last": [[ALL, ALL, ()], [ALL, (), ()], [ALL, ALL, ALL]],
    "first": [[(), ALL, ALL], [(), (), ALL]],
    "whole window": [[ALL, ALL, ALL], [(), (), ()], [ALL, ALL, ()], [(), (), ()]],
    "first window": [[(), (), ()], [ALL, ALL, ALL]],
    "left early": [[ALL, ALL, ...], [ALL, ..., ...], [ALL, ALL, ALL], [..., ..., ...], [ALL, (), ...]],
}
ONE = {
    "last": [[ALL, ALL, (0,)], [ALL, (1,), (1,)], [ALL, ALL, ALL]],
    "middle": [[ALL, (0,), ALL], [(1,), ALL, ALL]],
    "everything": [[(0,), (0,), (0,)], [(1,), (), ()], [(), (0,), ()], [ALL, ALL, ALL]],
}


def cases(strategies, uses):
    """Windows that are reduced once, and those of which every micro-batch is, with every second of the others."""
    pairs = diagonal(strategies, uses)
    return [
        *(pytest.param(*pair.values, "last", marks=pair.marks) for pair in pairs),
        *variant_cases(*((*pair.values, "every") for pair in pairs[::2])),
    ]


@pytest.mark.parametrize(("strategy", "used", "reduce"), cases(STRATEGIES, tuple(ALIKE)))
def test_micro_batches_skipped_on_all_ranks(strategy, used, reduce):
    expected = reference(2, ALIKE[used])
    for found in run_ranks(train, 2, strategy, ALIKE[used], reduce):
        assert largest_difference(found, expected) < 1e-13


@pytest.mark.parametrize(("strategy", "used", "reduce"), cases(REPLICATED, tuple(ONE)))
def test_micro_batches_skipped_on_one_rank(strategy, used, reduce):
    expected = reference(2, ONE[used])
    for found in run_ranks(train, 2, strategy, ONE[used], reduce):
        assert largest_difference(found, expected) < 1e-13


@pytest.mark.parametrize("strategy", ["replicate", "flat", "zero1"])
def test_four_ranks_of_which_each_skips_another_one(strategy):
    used = [[(0, 1, 2), (1, 2, 3), (3,)], [(2,), (), ()], [(0, 1, 2, 3)] * 3]
    expected = reference(4, used)
    for found in run_ranks(train, 4, strategy, used):
        assert largest_difference(found, expected) < 1e-13


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "used"),
    [
        ("zero2", ONE["last"]),
        *variant_cases(("zero3", ONE["middle"]), ("fully_shard", ONE["everything"]), ("fully_shard", ONE["last"])),
    ],
)
def test_sharded_units_that_one_rank_does_not_call_are_named(strategy, used):
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(train, 2, strategy, used)
    assert time.monotonic() - start < 50
    assert set(caught.value.traces) == {0, 1}, "one rank did not raise"
    first = caught.value.errors[caught.value.first]
    assert isinstance(first, (weft.errors.PeerError, weft.errors.NotSynchronized)) and "rank" in str(first), first


def _clipped_after_a_break(ctx, strategy, set_to_none):
    """In the second window gradients of the first are there, if they were set to zero."""
    try:
        train(ctx, strategy, [[ALL, ALL, ALL], [ALL, ALL, ...]], clip=0.1, set_to_none=set_to_none)
    except weft.errors.NotSynchronized as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize(("strategy", "set_to_none"), diagonal(STRATEGIES, (True, False)))
def test_clipping_what_a_window_left_early_is_refused(strategy, set_to_none):
    for text in run_ranks(_clipped_after_a_break, 2, strategy, set_to_none):
        assert "in place of break" in text and "found:" in text


def _break_and_then(ctx, strategy, how):
    """Leave a window early, and do something else than a step with what is there."""
    model, optimizer, ctx = prepare(strategy, ctx)
    model, windows, ctx = weft.accumulate_grads(model, list(range(6)), ctx, steps=3)
    for w, window in enumerate(windows):
        for p, _ in enumerate(window):
            (model(batch(w, p, ctx.rank)).square().sum() / 10).backward()
            if w == 0 and p == 1:
                break
        if w == 0:
            if how == "finish":
                for _ in window:
                    pass
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            elif how.startswith("zero"):
                optimizer.zero_grad(set_to_none=how == "zero_grad")
            if how != "finish":
                continue
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize(("strategy", "how"), diagonal(STRATEGIES, ("finish", "nothing", "zero_grad", "zero in place")))
def test_what_a_window_left_early_is_treated_as_gradients_are(strategy, how):
    model = net()
    optimizer = make_optimizer(model.parameters())
    for w in range(2):
        for p in range(2 if w == 0 else 3):
            for rank in ALL:
                (model(batch(w, p, rank)).square().sum() / 20).backward()
        if w == 0 and how == "finish":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        elif w == 0 and how.startswith("zero"):
            optimizer.zero_grad()
        if w == 1 or how == "finish":
            optimizer.step()
            optimizer.zero_grad()
    for found in run_ranks(_break_and_then, 2, strategy, how):
        assert largest_difference(found, values(model)) < 1e-13


# -- parameters that are frozen, unfrozen, added -----------------------------------------------------

# Which parts are trained in each step.
SCHEDULES = {
    "gradual unfreezing": [("head",), ("head",), ("blocks.1", "head"), ("blocks", "head"), ("blocks", "head")],
    "freezing": [("blocks", "head"), ("blocks", "head"), ("head",), ("head",)],
    "in turns": [("blocks",), ("head",), ("blocks",), ("head",)],
    "whole": [("blocks", "head"), (), ("blocks", "head"), ("blocks.0",)],
}


def _set_trained(model, parts):
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(parts) if parts else False)


def _unfreeze(ctx, strategy, schedule, fuse=False):
    def make(parameters):
        return make_optimizer(parameters) if strategy != "sgd" else torch.optim.SGD(parameters, 0.1, momentum=0.9)

    if fuse:
        model, ctx = weft.replicate(net(), ctx, flat=True)
        optimizer, ctx = weft.fuse_step(make(model.parameters()), ctx)
    else:
        model, optimizer, ctx = prepare(strategy, ctx, make)
    for step, parts in enumerate(schedule):
        _set_trained(model, parts)
        loss = model(batch(step, 0, ctx.rank)).square().sum() / 10
        if parts:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def _plainly_unfrozen(ranks, schedule):
    model = net()
    optimizer = make_optimizer(model.parameters())
    for step, parts in enumerate(schedule):
        _set_trained(model, parts)
        for rank in range(ranks if parts else 0):
            (model(batch(step, 0, rank)).square().sum() / 10 / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize(("strategy", "schedule"), diagonal(STRATEGIES, tuple(SCHEDULES)))
def test_parameters_are_frozen_and_unfrozen_while_training(strategy, schedule):
    expected = _plainly_unfrozen(2, SCHEDULES[schedule])
    for found in run_ranks(_unfreeze, 2, strategy, SCHEDULES[schedule]):
        assert largest_difference(found, expected) < 1e-13


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_parameters_are_frozen_and_unfrozen_under_a_fused_step(schedule):
    expected = _plainly_unfrozen(2, schedule)
    for found in run_ranks(_unfreeze, 2, "flat", schedule, fuse=True):
        assert largest_difference(found, expected) < 1e-13


def _frozen_elsewhere(ctx, strategy, on_rank_0):
    model, _, ctx = prepare(strategy, ctx)
    _set_trained(model, on_rank_0 if ctx.rank == 0 else ("head",))
    model(batch(0, 0, ctx.rank)).square().sum().backward()


@pytest.mark.parametrize("on_rank_0", [("blocks",), *variants(("blocks", "head"))], ids=["other ones", "nothing"])
@pytest.mark.parametrize("strategy", ["fully_shard", *variants("replicate", "flat", "zero1", "zero2")])
def test_ranks_that_freeze_other_parameters_are_named(strategy, on_rank_0):
    began = time.monotonic()
    with pytest.raises(RanksFailed, match="trained parameters") as caught:
        run_ranks(_frozen_elsewhere, 2, strategy, on_rank_0, timeout_s=55)
    assert set(caught.value.errors) == {0, 1} and time.monotonic() - began < 15


def _frozen_in_a_window(ctx, strategy):
    model, optimizer, ctx = prepare(strategy, ctx)
    model, windows, ctx = weft.accumulate_grads(model, list(range(6)), ctx, steps=3)
    for w, window in enumerate(windows):
        for p, _ in enumerate(window):
            _set_trained(model, ("blocks", "head") if p != 1 else ("head",))
            (model(batch(w, p, ctx.rank)).square().sum() / 10).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_are_frozen_in_the_middle_of_a_window(strategy):
    model = net()
    optimizer = make_optimizer(model.parameters())
    for w in range(2):
        for p in range(3):
            _set_trained(model, ("blocks", "head") if p != 1 else ("head",))
            for rank in ALL:
                (model(batch(w, p, rank)).square().sum() / 20).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(_frozen_in_a_window, 2, strategy):
        assert largest_difference(found, values(model)) < 1e-13


def _added(ctx, strategy, how):
    model, optimizer, ctx = prepare(strategy, ctx)
    (model(batch(0, 0, ctx.rank)).square().sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    if how == "a layer":
        model.extra = nn.Linear(2, 2).double()
    elif how == "a layer in place of another":
        model.head = nn.Linear(4, 2).double()
    else:
        model.head.weight = nn.Parameter(torch.ones(2, 4, dtype=torch.float64))
    before = values(model)
    try:
        model(batch(1, 0, ctx.rank)).square().sum().backward()
        optimizer.step()
    except weft.errors.ContractError as error:
        return str(error), largest_difference(values(model), before)
    return "nothing raised", None


@pytest.mark.parametrize(
    "how", ["a layer", *variants("a layer in place of another", "a parameter in place of another")]
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_that_were_added_are_named(strategy, how):
    for text, difference in run_ranks(_added, 2, strategy, how):
        assert ("extra.weight" if how == "a layer" else "head.weight") in text, text
        assert ("# in this order" in text or "# after parameters are replaced" in text) and difference == 0


def train_pair(ctx, strategy, skips):
    """A generator and a critic in one window, whose last micro-batch is skipped: (module, rank) in `skips`."""
    pair, optimizers = [], []
    for _ in range(2):
        model, optimizer, ctx = prepare(strategy, ctx)
        pair.append(model)
        optimizers.append(optimizer)
    pair, windows, ctx = weft.accumulate_grads(pair, [(w, p) for w in range(2) for p in range(STEPS)], ctx, steps=STEPS)
    for window in windows:
        for w, p in window:
            for number in (1, 0):  # not in the order in which they were given
                if p < STEPS - 1 or (number, ctx.rank) not in skips:
                    (pair[number](batch(w, p, ctx.rank) * (number + 1)).square().sum() / 10).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [value for model in pair for value in values(model)]


def reference_pair(skips):
    found = []
    for number in range(2):
        model = net()
        optimizer = make_optimizer(model.parameters())
        for w in range(2):
            for p in range(STEPS):
                for rank in range(2):
                    if p < STEPS - 1 or (number, rank) not in skips:
                        (model(batch(w, p, rank) * (number + 1)).square().sum() / 20).backward()
            optimizer.step()
            optimizer.zero_grad()
        found += values(model)
    return found


SKIPS = {"no": [], "one": [(0, 0), (0, 1)], "both": [(0, 0), (0, 1), (1, 0), (1, 1)]}


@pytest.mark.parametrize(("strategy", "skips"), diagonal(("replicate", "flat", "zero1", "fully_shard"), tuple(SKIPS)))
def test_two_modules_of_a_window_that_all_ranks_skip(strategy, skips):
    expected = reference_pair(SKIPS[skips])
    for found in run_ranks(train_pair, 2, strategy, SKIPS[skips]):
        assert largest_difference(found, expected) < 1e-13


@pytest.mark.parametrize("strategy", variants("replicate", "flat", "zero1"))
def test_two_modules_of_a_window_that_one_rank_skips_are_refused(strategy):
    began = time.monotonic()
    with pytest.raises(RanksFailed, match="did not call it|differ|reduces"):
        run_ranks(train_pair, 2, strategy, [(0, 1), (1, 1)], timeout_s=55)
    assert time.monotonic() - began < 15
