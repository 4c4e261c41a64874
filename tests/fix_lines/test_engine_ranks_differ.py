"""The torch engine on two ranks: what is told where the ranks differ. Each mistake ends the work of its ranks."""

import pytest
import torch
from torch import nn

import weft
from tests.fix_lines.test_engine_strategies_on_ranks import Net, sgd, train, under, window_loop, x_of
from tests.fix_lines.told import printed, told
from weft.testing import RanksFailed, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_ranks")]


def _failed(function, *args):
    with pytest.raises(RanksFailed) as caught:
        run_ranks(function, 2, *args)
    return str(caught.value)


def _scheduled(ctx, reduces):
    model, optimizer, here = under(weft.replicate, ctx)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for step in range(8):
        loss = model(x_of(ctx)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach() * 0 + step * (1 if ctx.rank else -1)  # the loss of this rank
        schedule.step(weft.reduce(loss, here, "mean") if reduces else loss)


def _in_mode(ctx, same):
    model, optimizer, _ = under(weft.replicate, ctx)
    train(model.train(same or ctx.is_main), optimizer, ctx)


def test_settings():
    later = printed("engines/torch/steps/watch.py", "self._peers.compare(", _failed(_scheduled, False))
    first = printed("engines/torch/steps/watch.py", "self._peers.agree(", _failed(_in_mode, False))
    assert later.fix == first.fix
    assert "on all ranks; scheduler.step(weft.reduce(loss, ctx, 'mean')) where a schedule follows a loss" in first.fix
    run_ranks(_scheduled, 2, True)
    run_ranks(_in_mode, 2, True)


def _by_hand(ctx, how):
    model, here = weft.replicate(Net(), ctx)
    optimizer = sgd(model) if how == "backward" else None
    for step in range(4):
        with weft.contract.no_sync(model, here, enabled=how == "apart"):
            loss = model(x_of(ctx, step)).sum()
        if optimizer is not None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            continue
        parameters = list(model.parameters())
        with torch.no_grad():
            for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                p.sub_(0.1 * (weft.reduce(gradient, here, "mean") if how == "reduced" else gradient))
    weft.barrier(here)


def test_weights_that_are_changed_by_hand():
    text = _failed(_by_hand, "of one rank")
    it = printed("engines/torch/hooks/first_steps.py", "which no optimizer has changed", text)
    assert it.fix.startswith("gradient = weft.reduce(gradient, ctx, 'mean')  # or loss.backward(); or, if they are to ")
    for how in ("reduced", "backward", "apart"):
        run_ranks(_by_hand, 2, how)


def _skips(ctx):
    if ctx.is_main:
        window_loop(ctx, skips=True)
        return "no line"
    with told("engines/torch/hooks/first_steps.py", "a rank makes no backward pass") as it:
        window_loop(ctx, skips=True)
    return it.fix


def test_a_rank_without_backward_passes():
    assert run_ranks(_skips, 2)[1] == "(loss * window.share).backward()  # not under `if ctx.is_main:`"
    run_ranks(window_loop, 2)


class Experts(nn.Module):
    """Of two experts, a call uses one; or both, with what is not needed times zero."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x, chosen, *, calls_all=False):
        if calls_all:
            return sum(one(x) * (number == chosen) for number, one in enumerate(self.experts))
        return self.experts[chosen](x)


def _route(ctx, strategy, **options):
    model, optimizer, _ = under(strategy, ctx, Experts())
    for step in range(2):
        model(x_of(ctx, step), ctx.rank, **options).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _by_linear(model, ctx):
    return weft.fully_shard(model, ctx, units=nn.Linear)


def _routed(ctx):
    with told("engines/torch/fsdp/gather_order.py", "the ranks gather different units") as it:
        _route(ctx, _by_linear)
    return it.fix


def _routed_right(ctx):
    _route(ctx, _by_linear, calls_all=True)
    _route(ctx, lambda model, ctx: weft.replicate(model, ctx, unused="zero"))


def _evaluate(ctx, how):
    model, optimizer, here = under(weft.fully_shard, ctx)
    if how.startswith("after steps"):
        train(model, optimizer, ctx)
    with torch.no_grad():
        if how == "gathered":
            with weft.full_params(model, here, forward=True):
                for _ in range(3 if ctx.is_main else 0):
                    model(x_of(ctx))
        elif how == "not equally often":
            for _ in range(2 + ctx.rank):
                model(x_of(ctx))
        elif how == "on all ranks" or ctx.is_main:
            model(x_of(ctx))
    train(model, optimizer, ctx)


def _evaluated(ctx):
    with told("engines/torch/fsdp/gather_order.py", "the ranks gather different units") as it:
        _evaluate(ctx, "on one rank")
    return it.fix


def _evaluated_right(ctx):
    _evaluate(ctx, "on all ranks")
    _evaluate(ctx, "gathered")


def test_units_that_other_ranks_do_not_call():
    lines = run_ranks(_routed, 2)
    assert "call every unit on every rank (multiply what is not needed by zero), or weft.replicate(" in "".join(lines)
    run_ranks(_routed_right, 2)
    line = "evaluate on all ranks, equally often, or with weft.full_params(model, ctx, forward=True)"
    assert line in run_ranks(_evaluated, 2)
    for how in ("not equally often", "after steps, on one rank"):
        with pytest.raises(
            RanksFailed, match="the ranks gather different units(.|\n)*, while rank 1 waits in"
        ) as caught:
            run_ranks(_evaluate, 2, how)
        assert line in str(caught.value)
    run_ranks(_evaluated_right, 2)
