"""What would let the ranks drift apart is done right, or raises on all of them before a step changes anything."""

import gc
import itertools
import time

import pytest
import torch
from torch import nn

import weft
from tests.data.test_windows_in_parts import (
    REPLICATED,
    SHARDED,
    batch,
    make_optimizer,
    net,
    prepare,
    values,
)
from tests.variants import pairs, variant_cases, variants
from weft.testing import RanksFailed, largest_difference, run_ranks

pytestmark = pytest.mark.usefixtures("warm_ranks")

STRATEGIES = (*REPLICATED, *SHARDED)


def _loss(model, ctx, step):
    return model(batch(step, 0, ctx.rank)).square().sum() / 10


# -- gradients that are not reduced ------------------------------------------------------------------


def _not_reduced(ctx, strategy, how):
    model, optimizer, ctx = prepare(strategy, ctx)
    if how == "a hook":
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: p.data.add_(p.grad, alpha=-0.1))
    elif how == "a step in a hook":
        for p in model.parameters():
            p.register_hook(lambda _: optimizer.step())
    before = values(model)
    try:
        if how == "autograd.grad":
            loss = _loss(model, ctx, 0)
            parameters = list(model.parameters())  # of which the outermost ones are whole now, if they are sharded
            gradients = torch.autograd.grad(loss, parameters)
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient
            optimizer.step()
        else:
            _loss(model, ctx, 0).backward()
    except (weft.errors.WeftError, RuntimeError) as error:
        return str(error), largest_difference(before, values(model))
    return "nothing raised", None


@pytest.mark.parametrize("how", ["a hook", "a step in a hook", "autograd.grad"])
@pytest.mark.parametrize("strategy", REPLICATED)
def test_steps_on_gradients_of_one_rank_are_refused(strategy, how):
    for text, difference in run_ranks(_not_reduced, 2, strategy, how):
        assert "found:" in text and "fix:" in text, text
        expected = {"a hook": "hooks on parameters of Net", "a step in a hook": "inside a backward pass"}
        assert expected.get(how, "gradients that were not averaged") in text, text
        assert difference == 0


def _backward_left_out(ctx, strategy, set_to_none):
    model, optimizer, ctx = prepare(strategy, ctx)
    for step in range(3):
        if not (ctx.rank == 1 and step == 2):
            _loss(model, ctx, step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)  # gradients of zero look like some of a backward pass
    return "nothing raised"


@pytest.mark.parametrize(
    ("strategy", "set_to_none"),
    [("replicate", True), *variant_cases(*((one, bool(at % 2)) for at, one in enumerate(REPLICATED)))],
)
def test_a_step_of_a_rank_that_left_its_backward_pass_out_is_named(strategy, set_to_none):
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 0 waits in a collective"):
        run_ranks(_backward_left_out, 2, strategy, set_to_none)
    assert time.monotonic() - start < 50


def _first_backward_left_out(ctx, strategy):
    """The optimizer is made after the strategy, and one rank has not called the model when it steps."""
    model, ctx = getattr(weft, strategy)(net(), ctx)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        weft.reduce(torch.tensor(1.0), ctx, "sum")  # a message of another size than those of a backward pass
        if step or ctx.rank != 1:
            _loss(model, ctx, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("strategy", variants("replicate", "fully_shard"))
def test_a_first_step_without_a_backward_pass_is_named(strategy):
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 0 waits in a collective"):
        run_ranks(_first_backward_left_out, 2, strategy)
    assert time.monotonic() - start < 50


def _another_program(ctx, strategy):
    """The optimizer of the first program is gone, and the second one has no gradients in its first step."""
    model, optimizer, _ = prepare(strategy, ctx)
    _loss(model, ctx, 0).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    del optimizer
    gc.collect()
    other, optimizer, _ = prepare(strategy, ctx)
    optimizer.step()
    return other is not model


@pytest.mark.parametrize("strategy", ["replicate", "fully_shard"])
def test_a_second_program_may_begin_with_a_step_that_has_nothing_to_do(strategy):
    assert run_ranks(_another_program, 2, strategy) == [True, True]


def _graph_of_gradients(ctx, strategy):
    model, _, ctx = prepare(strategy, ctx)
    with pytest.raises(weft.errors.ContractError, match=r"(?s)create_graph=True through .*autograd\.grad|replicate\("):
        _loss(model, ctx, 0).backward(create_graph=True)


def test_gradients_of_gradients_are_refused():
    for strategy in STRATEGIES:
        run_ranks(_graph_of_gradients, 2, strategy)


@pytest.mark.parametrize("strategy", SHARDED)
def test_autograd_grad_of_sharded_parameters_is_refused(strategy):
    for text, difference in run_ranks(_not_reduced, 2, strategy, "autograd.grad"):
        assert "torch.autograd.grad through Net, whose parameters are sharded" in text
        assert "fix:      model, ctx = weft.replicate(model, ctx)" in text and difference == 0


def _stepped_by_hand(ctx, strategy, *, reduces):
    model, _, ctx = prepare(strategy, ctx)
    for step in range(4):
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(_loss(model, ctx, step), parameters)
        with torch.no_grad():
            for p, gradient in zip(parameters, gradients, strict=True):
                p.sub_(0.1 * (weft.reduce(gradient, ctx, "mean") if reduces else gradient))
    weft.barrier(ctx)
    return values(model)


@pytest.mark.parametrize("strategy", ["replicate", *variants("flat", "zero1")])
def test_weights_that_are_changed_by_hand_and_drift_apart_are_named(strategy):
    first, second = run_ranks(_stepped_by_hand, 2, strategy, reduces=True)
    assert largest_difference(first, second) == 0
    with pytest.raises(RanksFailed, match=r"(?s)which no optimizer has changed.*a sum of their bits.*weft\.reduce\("):
        run_ranks(_stepped_by_hand, 2, strategy, reduces=False)


def _reduced_by_hand(ctx, strategy):
    model, optimizer, ctx = prepare(strategy, ctx)
    for step in range(3):
        parameters = list(model.parameters())
        for p, gradient in zip(parameters, torch.autograd.grad(_loss(model, ctx, step), parameters), strict=True):
            p.grad = weft.reduce(gradient, ctx, "mean")
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("strategy", REPLICATED)
def test_gradients_that_are_equal_on_all_ranks_may_be_set_by_hand(strategy):
    expected = _plainly(2, 3)
    for found in run_ranks(_reduced_by_hand, 2, strategy):
        assert largest_difference(found, expected) < 1e-13


def _plainly(ranks, steps, per_step=1):
    model = net()
    optimizer = make_optimizer(model.parameters())
    for step in range(steps):
        for rank in range(ranks):
            (model(batch(step, 0, rank)).square().sum() / 10 / ranks * per_step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def _steps_twice(ctx, strategy):
    """Two steps on the same gradients."""
    model, optimizer, ctx = prepare(strategy, ctx)
    for step in range(2):
        _loss(model, ctx, step).backward()
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_second_step_on_reduced_gradients_is_fine(strategy):
    model = net()
    optimizer = make_optimizer(model.parameters())
    for step in range(2):
        for rank in range(2):
            (model(batch(step, 0, rank)).square().sum() / 20).backward()
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(_steps_twice, 2, strategy):
        assert largest_difference(found, values(model)) < 1e-13


def _input_gradients(ctx, strategy):
    """Gradients of inputs (adversarial examples, saliency) between the steps."""
    model, optimizer, ctx = prepare(strategy, ctx)
    for step in range(3):
        x = batch(step, 0, ctx.rank).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x)
        (model(x.detach() + 0.1 * slope.sign()).square().sum() / 10).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_of_inputs(strategy):
    model = net()
    optimizer = make_optimizer(model.parameters())
    for step in range(3):
        for rank in range(2):
            x = batch(step, 0, rank).requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x)
            (model(x.detach() + 0.1 * slope.sign()).square().sum() / 20).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(_input_gradients, 2, strategy):
        assert largest_difference(found, values(model)) < 1e-13


def _penalty(model, x):
    x = x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (model(x).square().sum() + (slope.norm(dim=1) - 1).square().sum()) / 10


def _penalized(ctx, strategy):
    model, optimizer, ctx = prepare(strategy, ctx)
    try:
        for step in range(2):
            _penalty(model, batch(step, 0, ctx.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
    except weft.errors.ContractError as error:
        return str(error)
    return values(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gradient_penalty_is_exact_or_refused(strategy):
    model = net()
    optimizer = make_optimizer(model.parameters())
    for step in range(2):
        for rank in range(2):
            (_penalty(model, batch(step, 0, rank)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(_penalized, 2, strategy):
        if strategy in SHARDED:
            assert "create_graph=True" in found and "weft.replicate(model, ctx)" in found
        else:
            assert largest_difference(found, values(model)) < 1e-13


# -- two backward passes of one graph ----------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(4))
        self.double()

    def forward(self, x):
        hidden = self.norm(self.first(x)) * self.scale
        return self.last(torch.tanh(hidden) * self.scale)


def _backward_twice(ctx, strategy):
    made = []

    def make(parameters):
        made.append(torch.optim.SGD(parameters, 0.05))
        return made[-1]

    model = Normed()
    if strategy.startswith("zero"):
        model, optimizer, ctx = weft.zero_partition(model, make(model.parameters()), ctx, stage=int(strategy[-1]))
    elif strategy == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx)
        optimizer = make(model.parameters())
    else:
        model, ctx = weft.replicate(model, ctx, flat=strategy == "flat")
        optimizer = make(model.parameters())
    for step in range(2):
        one, two = model(batch(step, 0, ctx.rank)).square().sum(0)
        one.backward(retain_graph=True)
        two.backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model), [b.clone() for b in model.buffers()]


@pytest.mark.parametrize("strategy", ["replicate", "flat", "zero1", "zero2", "zero3", "fully_shard"])
def test_two_backward_passes_of_one_graph_with_buffers(strategy):
    models = [Normed(), Normed()]
    for step in range(2):
        for rank, model in enumerate(models):
            one, two = model(batch(step, 0, rank)).square().sum(0)
            (one + two).backward()
        for p, q in zip(*(model.parameters() for model in models), strict=True):
            p.grad = q.grad = (p.grad + q.grad) / 2
        for model in models:
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(0.05 * p.grad)
            model.zero_grad()
        for ours, first in zip(models[1].buffers(), models[0].buffers(), strict=True):
            ours.copy_(first)
    for parameters, buffers in run_ranks(_backward_twice, 2, strategy):
        assert largest_difference(parameters, values(models[0])) < 1e-13
        assert largest_difference(buffers, list(models[0].buffers())) < 1e-13


# -- closures ----------------------------------------------------------------------------------------


def _lbfgs(ctx, line_search, late, as_number):
    model = net()
    if late:
        model, ctx = weft.replicate(model, ctx)
    optimizer = torch.optim.LBFGS(model.parameters(), 0.5, max_iter=5, line_search_fn=line_search)
    if not late:
        model, ctx = weft.replicate(model, ctx)
    losses = []
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            loss = (model(batch(step, 0, ctx.rank)) - ctx.rank).square().sum() / 10  # very different losses
            loss.backward()
            return loss.item() if as_number else loss

        losses.append(float(optimizer.step(closure)))
    return values(model), losses


@pytest.mark.parametrize("as_number", [False, True])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_decides_by_the_loss_of_all_ranks(line_search, late, as_number):
    model, expected = net(), []
    optimizer = torch.optim.LBFGS(model.parameters(), 0.5, max_iter=5, line_search_fn=line_search)
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            losses = [(model(batch(step, 0, rank)) - rank).square().sum() / 20 for rank in range(2)]
            sum(losses).backward()
            return sum(losses)

        expected.append(optimizer.step(closure).item())
    for found, losses in run_ranks(_lbfgs, 2, line_search, late, as_number):
        assert largest_difference(found, values(model)) < 1e-10  # 15 steps, each of which divides by small numbers
        assert losses == pytest.approx(expected, rel=1e-10)


# -- settings ----------------------------------------------------------------------------------------


def _other_settings(ctx, strategy, what, when):
    model = nn.Sequential(net(), nn.Dropout(0.0))
    optimizer = None
    if strategy == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx)
    elif not strategy.startswith("zero"):
        model, ctx = weft.replicate(model, ctx)
    groups = [{"params": list(model.parameters())[:2]}, {"params": list(model.parameters())[2:]}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    if strategy.startswith("zero"):
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=int(strategy[-1]))
    for step in range(60 if when < 60 else 400):
        if ctx.rank == 1 and step == when:
            if what == "lr":
                optimizer.param_groups[1]["lr"] = 0.02
            elif what == "betas":
                optimizer.param_groups[0]["betas"] = (0.8, 0.99)
            elif what == "dropout":
                model[1].p = 0.5
            else:
                model.eval()
        model(batch(step, 0, ctx.rank)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return "nothing raised"


TEXTS = {
    "lr": "group 1: lr: 0.01 on rank 0, 0.02 on rank 1",
    "betas": "group 0: betas: [0.9, 0.999] on rank 0, [0.8, 0.99] on rank 1",
    "dropout": "dropout: {'1': 0.0} on rank 0, {'1': 0.5} on rank 1",
    "training": "training: '11 of 11 parts' on rank 0, '0 of 11 parts' on rank 1",
}


QUICK = (("replicate", "lr"), ("fully_shard", "dropout"))


@pytest.mark.parametrize(
    ("strategy", "what", "when"),
    [
        *((*case, 3) for case in QUICK),
        *variant_cases(
            *((*case, 3) for case in itertools.product(("replicate", "fully_shard"), TEXTS) if case not in QUICK)
        ),
        *variant_cases(*((*case, when) for case in QUICK for when in (0, 140))),
    ],
)
def test_other_settings_on_one_rank_are_named(strategy, what, when):
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_other_settings, 2, strategy, what, when)
    assert set(caught.value.traces) == {0, 1}, "one rank did not raise"
    assert TEXTS[what] in str(caught.value), caught.value


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_other_settings_under_zero_are_named(strategy):
    with pytest.raises(RanksFailed, match="group 1: lr: 0.01 on rank 0, 0.02 on rank 1"):
        run_ranks(_other_settings, 2, strategy, "lr", 1)


def _in_the_last_step(ctx):
    model, optimizer, ctx = prepare("replicate", ctx)
    for step in range(3):
        if step == 2 and ctx.rank == 1:
            optimizer.param_groups[0]["lr"] = 1.0
        _loss(model, ctx, step).backward()
        optimizer.step()


def test_other_settings_in_the_last_step_are_named_when_the_context_is_closed():
    with pytest.raises(RanksFailed, match="group 0: lr: 0.01 on rank 0, 1.0 on rank 1"):
        run_ranks(_in_the_last_step, 2)


# -- weights -----------------------------------------------------------------------------------------


def _skipped(model, optimizer):
    optimizer.param_groups[0]["params"][0].grad = None


ON_ONE_RANK = {
    "clipped": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "cleared": lambda _, optimizer: optimizer.zero_grad(),
    "without one gradient": _skipped,
    "scaled": lambda model, _: next(model.parameters()).grad.mul_(2.0),
    "weights written": lambda model, _: next(model.parameters()).data.add_(1.0),
    "state written": lambda _, optimizer: next(iter(optimizer.state.values()))["exp_avg"].mul_(2.0),
}


def _changed_on_one_rank(ctx, strategy, what, when):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    if strategy == "hybrid":
        model, ctx = weft.fully_shard(model, ctx, axis=("replica", "shard"))
    elif strategy == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx)
    elif not strategy.startswith("zero"):
        if strategy == "tensor":
            model, ctx = weft.tensor_parallel(model, ctx, plan={"0": "column", "2": "row"})
        model, ctx = weft.replicate(model, ctx, flat=strategy == "flat")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if strategy.startswith("zero"):
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=int(strategy[-1]))
    for step in range(when + 20):
        model(batch(step, 0, ctx.data_rank)).square().sum().backward()
        if ctx.coordinates.get("replica", ctx.rank) == 1 and step == when:
            ON_ONE_RANK[what](model, optimizer)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("strategy", "what", "when"),
    [*(("replicate", what, 2) for what in ("clipped", "scaled", "weights written", "state written")),
     ("flat", "scaled", 1), ("replicate", "scaled", 100)],
)  # fmt: skip
def test_weights_that_drift_apart_on_one_rank_are_seen(strategy, what, when):
    with pytest.raises(RanksFailed, match="replicate: weights before step .* of AdamW: the ranks do not agree"):
        run_ranks(_changed_on_one_rank, 2, strategy, what, when)


@pytest.mark.parametrize(
    ("strategy", "what", "when"),
    [
        pytest.param("replicate", "cleared", 2, marks=pytest.mark.slow),
        ("fully_shard", "cleared", 20),
        pytest.param("zero1", "without one gradient", 20, marks=pytest.mark.slow),
        *variant_cases(
            ("replicate", "without one gradient", 2),
            ("flat", "cleared", 20),
            ("fully_shard", "without one gradient", 2),
            ("zero1", "cleared", 20),
            ("zero2", "cleared", 2),
            ("zero3", "cleared", 20),
        ),
    ],
)
def test_gradients_that_are_missing_on_one_rank_are_named_in_the_same_step(strategy, what, when):
    left = 3 if what == "without one gradient" else 0
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_changed_on_one_rank, 2, strategy, what, when)
    error = str(caught.value.errors[1])
    assert f"step {when + 1} of AdamW, with {left} gradients, 4 before: rank 0 of 2 did not call it" in error
    assert " around it, and no choice by one rank's loss before; " in error


def _thinning(ctx, strategy):
    """Other parameters have gradients in each step, on all ranks alike."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    if strategy == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if strategy == "zero1":
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=1)
    for step in range(40):
        model(batch(step, 0, ctx.rank)).square().sum().backward()
        for at, p in enumerate(model.parameters()):
            if step % (at + 2) == 0:
                p.grad = None
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("strategy", ["zero1", *variants("fully_shard")])
def test_other_gradients_in_each_step_are_no_error_where_all_ranks_have_the_same(strategy):
    run_ranks(_thinning, 2, strategy)


def _plateau(ctx):
    model, optimizer, ctx = prepare("replicate", ctx)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for step in range(8):
        _loss(model, ctx, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step(float(step * (1 if ctx.rank else -1)))  # the rank's own loss


def test_a_learning_rate_that_follows_the_loss_of_one_rank_is_named():
    with pytest.raises(RanksFailed, match=r"(?s)group 0: lr: .* on rank 0, .* on rank 1"):
        run_ranks(_plateau, 2)


# -- units that other ranks do not call --------------------------------------------------------------


class Experts(nn.Module):
    """Two experts of which a rank uses one."""

    def __init__(self, sizes=(3, 3)):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(3, n), nn.Linear(n, 3)) for n in sizes)
            self.last = nn.Linear(3, 1)

    def forward(self, x, expert):
        return self.last(self.experts[expert](x))


def _routed(ctx, stage, sizes, when, unused):
    model = Experts(sizes)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    units = nn.Sequential
    model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=stage, units=units, unused=unused)
    for step in range(6):
        same = step < when
        chosen = [0, 1] if same or unused == "error" else [(ctx.rank + step) % 2]
        if unused == "error" and not same and ctx.rank:
            chosen.reverse()
        loss = sum(model(torch.ones(2, 3) * (step + ctx.rank), one).sum() for one in chosen)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return "nothing raised"


@pytest.mark.parametrize(
    ("stage", "sizes", "when", "unused"),
    [
        (3, (3, 3), 0, "error"),
        *variant_cases((3, (3, 3), 3, "error")),
        *variant_cases(*(case for case in pairs((3, 2), ((3, 3), (3, 5)), (0, 3), ("error", "zero")) if case[0] == 2)),
        *variant_cases((3, (3, 5), 0, "zero")),
    ],
)
def test_ranks_that_gather_other_units_are_named(stage, sizes, when, unused):
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_routed, 2, stage, sizes, when, unused)
    assert time.monotonic() - start < 50
    assert set(caught.value.traces) == {0, 1}, "one rank did not raise"
    text = str(caught.value)
    assert "rank 0 gathers 'experts.0'" in text or "waits in a collective" in text, text
    errors = caught.value.errors.values()
    assert all(isinstance(error, (weft.errors.NotSynchronized, weft.errors.PeerError)) for error in errors), text


def _alike(ctx, strategy):
    """The same units on all ranks, but others in each step; and evaluations now and then."""
    model = Experts()
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    options = {"stage": int(strategy[-1]), "unused": "zero"}
    model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, units=nn.Sequential, **options)
    draw = torch.Generator().manual_seed(0)
    for step in range(30):
        expert = int(torch.randint(2, (), generator=draw))
        model(torch.ones(2, 3) / (step + ctx.rank + 1), expert).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            with torch.no_grad():
                for expert in range(int(torch.randint(3, (), generator=draw))):
                    model(torch.ones(1, 3), expert % 2)
    return values(model)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_units_that_all_ranks_choose_alike(strategy):
    model = Experts()
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    draw = torch.Generator().manual_seed(0)
    for step in range(30):
        expert = int(torch.randint(2, (), generator=draw))
        for rank in range(2):
            (model(torch.ones(2, 3) / (step + rank + 1), expert).square().sum() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            torch.randint(3, (), generator=draw)
    for found in run_ranks(_alike, 2, strategy):
        assert largest_difference(found, values(model)) < 2e-5


def _evaluates_alone(ctx, strategy, known):
    model, optimizer, ctx = prepare(strategy, ctx)
    for step in range(4):
        _loss(model, ctx, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            if known and step < 3:
                model(batch(0, 0, 0))
            if ctx.rank == 0 and step == 3:
                for _ in range(3):
                    model(batch(0, 0, 0))
    for step in range(4):
        _loss(model, ctx, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("strategy", "known"), variant_cases(("fully_shard", True), ("zero2", False), ("zero3", True)))
def test_an_evaluation_of_one_rank_under_sharding_is_named(strategy, known):
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_evaluates_alone, 2, strategy, known)
    assert time.monotonic() - start < 50
    assert set(caught.value.traces) == {0, 1}, "one rank did not raise"
    assert "rank" in str(caught.value.errors[caught.value.first])


# -- errors of one rank ------------------------------------------------------------------------------


def _caught(ctx, strategy):
    """One rank leaves a parameter out, and goes on as if nothing had happened."""
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model.forward = lambda x, both: model[0](x) + (model[1](x) if both else 0)
    model, ctx = weft.replicate(model, ctx, flat=strategy == "flat", bucket_bytes=10)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(5000):
        try:
            model(torch.ones(1, 2), not (step == 1 and ctx.rank == 0)).sum().backward()
        except weft.errors.UnusedParameters:
            return "raised"
        optimizer.step()
        optimizer.zero_grad()
    return "nothing raised"


@pytest.mark.parametrize("strategy", ["replicate", *variants("flat")])
def test_peers_of_a_rank_that_left_a_parameter_out_do_not_wait(strategy):
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_caught, 2, strategy)
    assert time.monotonic() - start < 50
    assert isinstance(caught.value.errors[1], weft.errors.PeerError)


def train_in_another_order(ctx):
    """Two modules of one shape, whose backward passes rank 1 makes in the other order."""
    pair, optimizers = [], []
    for seed in range(2):
        torch.manual_seed(seed)
        model, ctx = weft.replicate(nn.Linear(2, 2).double(), ctx)
        pair.append(model)
        optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        losses = [model(torch.full((1, 2), float(ctx.rank), dtype=torch.float64)).square().sum() for model in pair]
        for loss in reversed(losses) if ctx.rank == 1 and step == 1 else losses:
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_modules_that_are_reduced_in_another_order_on_one_rank_are_named():
    # Of the two modules the one is named whose comparison rank 0 has come to when rank 1 looks.
    with pytest.raises(RanksFailed, match="of all modules: (3 on rank 0, 4|4 on rank 0, 3) on rank 1"):
        run_ranks(train_in_another_order, 2)
