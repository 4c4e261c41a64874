"""`skip_nonfinite` alone; what it does together with fp16 modules is in test_with_precision.py."""

import pytest
import torch
from torch import nn

import weft
from weft.errors import AlreadyApplied, ContractError, OrderError
from weft.testing import run_ranks


def _model(policy="fp16"):
    return weft.with_precision(nn.Linear(2, 2), weft.local(), policy)


def test_it_takes_an_optimizer_and_returns_it():
    model, ctx = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    same, after = weft.skip_nonfinite(optimizer, ctx)
    assert same is optimizer and [record.name for record in after.applied] == ["with_precision", "skip_nonfinite"]
    with pytest.raises(AlreadyApplied):
        weft.skip_nonfinite(optimizer, after)


@pytest.mark.parametrize("wrong", [nn.Linear(1, 1), None, {}])
def test_anything_else_is_refused(wrong):
    with pytest.raises(TypeError, match="(?s)not an optimizer.*found:.*fix:"):
        weft.skip_nonfinite(wrong, _model()[1])


def test_an_optimizer_of_other_parameters_comes_too_early():
    with pytest.raises(OrderError, match="knows no module"):
        weft.skip_nonfinite(torch.optim.SGD(nn.Linear(1, 1).parameters()), _model()[1])


@pytest.mark.parametrize("policy", ["bf16", "fp32"])
def test_it_does_nothing_in_other_precisions(policy):
    model, ctx = _model(policy)
    optimizer, ctx = weft.skip_nonfinite(torch.optim.SGD(model.parameters(), lr=1.0), ctx)
    model.weight.grad = torch.full_like(model.weight, torch.inf)
    optimizer.step()
    assert not weft.was_skipped(optimizer) and not model.weight.isfinite().all()


def test_was_skipped_asks_for_an_optimizer_it_knows():
    with pytest.raises(ContractError, match="(?s)was_skipped.*skip_nonfinite"):
        weft.was_skipped(torch.optim.SGD(nn.Linear(1, 1).parameters()))


def _one_bad_rank(ctx):
    torch.manual_seed(0)
    model, ctx = weft.with_precision(nn.Linear(2, 1), ctx, "fp16")
    model, ctx = weft.replicate(model, ctx)
    optimizer, ctx = weft.skip_nonfinite(torch.optim.SGD(model.parameters(), lr=0.1), ctx)
    before, skipped = model.weight.detach().clone(), []
    for factor in (torch.inf if ctx.rank == 1 else 1.0, 1.0):
        optimizer.zero_grad()
        (model(torch.ones(1, 2)).sum() * factor).backward()
        optimizer.step()
        skipped.append((weft.was_skipped(optimizer), torch.equal(model.weight, before)))
    return skipped


def test_one_bad_rank_skips_the_step_on_all():
    assert run_ranks(_one_bad_rank, 2) == [[(True, True), (False, False)]] * 2
