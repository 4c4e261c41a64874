"""Hooks on the steps of optimizers: each belongs to one strategy of one context, and nothing is left of it."""

import gc
import threading
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import optimizer as of_torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

import weft
from weft.engines.torch.hooks.every_optimizer import before_every_step
from weft.engines.torch.steps.watch import Steps
from weft.testing import run_ranks

pytestmark = pytest.mark.usefixtures("warm_ranks")


def _tables():
    return list(of_torch._global_optimizer_pre_hooks), list(of_torch._global_optimizer_post_hooks)


def _program(ctx):
    loader, ctx = weft.shard_data(DataLoader(torch.ones(8, 2), batch_size=2), ctx)
    model, ctx = weft.replicate(nn.Linear(2, 1), ctx)
    return model, loader, torch.optim.AdamW(model.parameters(), 0.1, fused=True)


def _side_by_side(_):
    before, seen, step = _tables(), [], Steps._before

    def spy(steps, optimizer, *call):
        seen.append((id(steps._owner()._module()), id(optimizer)))
        return step(steps, optimizer, *call)

    alone = nn.Linear(2, 1)
    stranger = torch.optim.AdamW(alone.parameters(), 0.1, fused=True)
    contexts = [weft.adopt() for _ in range(2)]
    with mock.patch.object(Steps, "_before", spy):
        programs = [_program(ctx) for ctx in contexts]
        for x in programs[0][1]:
            for model in (alone, *(model for model, *_ in programs)):
                model(x).mean().backward()
            versions = [p._version for p in alone.parameters()]
            for optimizer in (stranger, *(optimizer for *_, optimizer in programs)):
                optimizer.step()
                optimizer.zero_grad()
            assert versions == [p._version for p in alone.parameters()]  # those of weft tell of fused steps
    assert set(seen) == {(id(model), id(optimizer)) for model, _, optimizer in programs}
    assert not stranger._optimizer_step_pre_hooks
    assert not stranger._optimizer_step_post_hooks
    del programs[0], model, optimizer  # one program is gone when its context is closed, the other one is not
    gc.collect()
    for ctx in contexts:
        ctx.close()
    assert _tables() == before


def test_hooks_of_one_strategy_are_not_those_of_another_or_of_a_stranger():
    run_ranks(_side_by_side, 2)


def _collected_in_a_step(ctx):
    def train():
        model, loader, optimizer = _program(ctx)
        for x in loader:
            (model(x).mean() * loader.share).backward()
            optimizer.step()
            optimizer.zero_grad()
        cycle = [model, loader]
        cycle.append(cycle)

    before = _tables()
    gc.disable()
    train()
    handle = register_optimizer_step_pre_hook(lambda *_: print(gc.collect()))
    train()  # in its first step the objects of the first one go
    handle.remove()
    gc.enable()
    gc.collect()
    weft.replicate(nn.Linear(2, 1), ctx)  # what makes a hook takes off those of objects that are gone
    added = [[one for one in after if one not in old] for after, old in zip(_tables(), before, strict=True)]
    assert list(map(len, added)) == [1, 1]


def test_objects_may_be_collected_in_a_step():
    run_ranks(_collected_in_a_step, 2)


class _Owner:
    def __init__(self):
        self.steps = []
        self.hook = before_every_step(self, lambda owner, optimizer: owner.steps.append(optimizer))


def _closure(optimizer, *inside):
    def closure():
        for step in inside:
            step()
        optimizer.zero_grad()
        loss = optimizer.param_groups[0]["params"][0].square().sum()
        loss.backward()
        return loss

    return closure


def test_owners_may_go_in_a_step_that_raises_or_makes_other_steps_or_in_another_thread():
    before = _tables()
    outer = torch.optim.LBFGS([nn.Parameter(torch.ones(1))], max_iter=2)
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    owners = [_Owner() for _ in range(4)]
    stays = _Owner()

    def lose(*_):
        if owners:
            owners.pop()

    def lose_in_a_thread(*_):
        thread = threading.Thread(target=lose)
        thread.start()
        thread.join()

    def fail(*_):
        raise OSError("disk full")

    handles = [register_optimizer_step_pre_hook(lose), register_optimizer_step_pre_hook(lose_in_a_thread)]
    last = _Owner()  # comes after those: the iteration goes on
    outer.step(_closure(outer, lambda: inner.step(_closure(inner))))
    assert not owners
    assert stays.steps == last.steps
    assert stays.steps[:2] == [outer, inner]
    handles.append(register_optimizer_step_pre_hook(fail))
    owners.append(_Owner())
    with pytest.raises(OSError, match="disk full"):
        inner.step(_closure(inner))
    for handle in handles:
        handle.remove()
    del last
    stays.hook.release()
    assert _tables() == before
