"""`check`: what is missing in a program is found, on all ranks, with the line to write."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import weft
from weft.testing import fake, run_ranks


def _parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    return model, DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2)


def _text(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except (weft.errors.ContractError, weft.errors.PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


STRATEGIES = ["replicate", "flat", "fully_shard", "zero1", "zero2", "zero3"]


def _apply(strategy, model, ctx):
    optimizer = torch.optim.AdamW(model.parameters())
    if strategy in ("replicate", "flat"):
        model, ctx = weft.replicate(model, ctx, flat=strategy == "flat")
    elif strategy == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx, units=nn.Linear, rebind=optimizer)
    else:
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=int(strategy[-1]))
    return model, optimizer, ctx


def _complete(ctx, strategy):
    model, loader = _parts()
    loader, ctx = weft.shard_data(loader, ctx)
    model, optimizer, ctx = _apply(strategy, model, ctx)
    weft.check(ctx, model=model, optimizer=optimizer, loader=loader)
    model, loader, ctx = weft.accumulate_grads(model, loader, ctx, steps=2)
    weft.check(ctx, model={"a": [model]}, optimizer=[optimizer], loader={"train": loader})
    for window in loader:
        for (x,) in window:
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weft.check(ctx, model=model, optimizer=optimizer, loader=[loader])
    return "complete"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_complete_program_passes(strategy):
    assert run_ranks(_complete, 2, strategy) == ["complete"] * 2


def test_one_rank_needs_nothing():
    model, loader = _parts()
    weft.check(weft.local(), model=model, optimizer=torch.optim.SGD(model.parameters()), loader=loader)


def _incomplete(ctx):
    model, loader = _parts()
    found = {
        "nothing": _text(weft.check, ctx, model=model, optimizer=torch.optim.SGD(model.parameters()), loader=loader)
    }
    replicated, replicated_ctx = weft.replicate(_parts()[0], ctx)
    with pytest.warns(UserWarning, match="each of 2 ranks reads all of it") as warned:
        weft.accumulate_grads(replicated, loader, replicated_ctx, steps=2)
    assert [one.filename for one in warned] == [__file__]
    found["loader"] = f"ContractError: {warned[0].message}"
    own = [range(2 * ctx.rank, 2 * ctx.rank + 2)]
    of_own = DataLoader(loader.dataset, batch_sampler=own)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again, again_ctx = weft.replicate(_parts()[0], ctx)
        weft.accumulate_grads(again, of_own, again_ctx, steps=2)
        weft.accumulate_grads(_parts()[0], loader, ctx, steps=2)  # gradients are not averaged
    found["model"] = _text(weft.check, ctx, model=model, loader=weft.shard_data(loader, ctx)[0])
    half = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2), "frozen": nn.Linear(2, 2)})
    half["frozen"].requires_grad_(False)
    half["body"], ctx = weft.replicate(half["body"], ctx)
    found["half"] = _text(weft.check, ctx, model=half)
    sharded, ctx = weft.fully_shard(_parts()[0], ctx)
    found["dead"] = _text(weft.check, ctx, model=sharded, optimizer=torch.optim.SGD(_parts()[0].parameters()))
    found["one rank"] = _text(weft.check, ctx, model=model if ctx.rank else half["body"])
    if (solo := ctx.only(0)).here:
        found["parts"] = _text(weft.check, solo, model=sharded)
        found["state"] = _text(weft.check, solo, model=sharded.state_dict())
        found["whole"] = _text(weft.check, solo, model=half.state_dict())
    return found


def test_what_is_missing_is_found_on_all_ranks():
    zero, one = run_ranks(_incomplete, 2)
    assert "one rank holds a part only of" in zero.pop("parts") and "weft.save(state" in zero.pop("state")
    assert zero.pop("whole") == "nothing raised"
    assert zero == one
    assert [name for name, text in zero.items() if not (text.startswith("ContractError: ") and "fix:" in text)] == []
    assert "DataLoader was not shared: each of 2 ranks reads all of it" in zero["nothing"]
    assert "no strategy for Sequential: each of 2 ranks trains 0.weight, 0.bias" in zero["nothing"]
    assert "weft.shard_data(loader, ctx)" in zero["nothing"] and "weft.replicate(model, ctx)" in zero["nothing"]
    assert "accumulate_grads: the program is not complete" in zero["loader"] and "was not shared" in zero["loader"]
    assert "no strategy" in zero["model"] and "shared" not in zero["model"]
    assert "trains head.weight, head.bias for itself" in zero["half"]
    assert "SGD holds none of the parameters of FSDPSequential" in zero["dead"]
    assert "for itself (on rank 1)" in zero["one rank"]


def test_data_that_is_split_by_others_counts_as_shared():
    data = TensorDataset(torch.randn(8, 4))
    loader = DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    ctx = fake(rank=0, world_size=2)
    weft.check(ctx, loader=loader)
    weft.check(ctx, loader=weft.shard_data(loader, ctx, already_sharded=True)[0])
    with pytest.raises(weft.errors.ContractError, match="list was not shared"):
        weft.check(ctx, loader=[1, 2])


def _wrapped(ctx):
    found = []
    for call in (weft.replicate, weft.fully_shard):
        model = nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))
        weft.check(ctx, model=model)
        found.append(_text(call, model, ctx))
    return found


def test_a_module_that_torch_replicates_is_refused_by_name():
    for replicated, sharded in run_ranks(_wrapped, 2):
        assert (
            "AlreadyApplied: replicate: torch's DistributedDataParallel already reduces these gradients" in replicated
        )
        assert "leave DistributedDataParallel(...) out" in sharded


class _Pairs:
    """Reduces over pairs of ranks."""

    mean_over = 2

    def begin_window(self):
        pass

    last_backward = begin_window

    def end_window(self, *, left=False):
        pass


@weft.transform()
def in_pairs(module, ctx):
    return module, ctx.offering(_Pairs())


def test_a_strategy_over_some_of_the_data_axes():
    model, ctx = in_pairs(_parts()[0], fake(rank=0, world_size=4, mesh={"replica": 2, "shard": 2}))
    with pytest.raises(
        weft.errors.ContractError, match=r"(?s)averaged over 2 of 4 ranks \(in_pairs\).*replica, shard"
    ) as caught:
        weft.check(ctx, model=model)
    assert "no strategy" not in str(caught.value)
    model, ctx = in_pairs(_parts()[0], fake(rank=0, world_size=4, mesh={"data": 2, "tensor": 2}, data_axes=["data"]))
    weft.check(ctx, model=model)
