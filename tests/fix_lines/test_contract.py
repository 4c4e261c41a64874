"""Rules of transforms, parts of modules, and tensors: `weft.contract` and `weft.tensors`."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import weft
from tests.fix_lines.told import told
from weft.testing import run_ranks

NET, SELECT, CHECKS = "contract/transform.py", "contract/select_modules.py", "contract/module_checks.py"


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def trains(model, *optimizers):
    """A step of training."""
    model(torch.ones(2, 4)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


# -- what a transform is ---------------------------------------------------------------------------


def test_a_transform_is_called_wrongly():
    model, ctx = net(), weft.local()
    with told(NET, "{name}: {problem}") as it:
        weft.with_precision(model, ctx, polcy="bf16")
    it.run(module=model, ctx=ctx, policy="bf16")
    with told(NET, "is not a context") as it:
        weft.accumulate_grads(net(), [torch.ones(2, 4)] * 4, None, steps=2)
    found = it.run(modules=net(), loader=[torch.ones(2, 4)] * 4, ctx=ctx)
    assert len(next(iter(found["loader"]))) == 2


def test_a_transform_breaks_a_rule():
    with told(NET, "takes no context after its objects") as it:

        @weft.transform()
        def scaled(module, by):
            return module

    weft.transform()(it.run(__name__=__name__)["scaled"])

    @weft.transform()
    def frozen(module, ctx):
        return module.requires_grad_(requires_grad=False)

    with told(NET, "a transform returns its objects") as it:
        frozen(net(), weft.local())

    # `def frozen(module, ctx): ...; return module, ctx`
    names = {"__name__": __name__}
    exec(f"def frozen(module, ctx):\n    {it.fix}", names)
    model, ctx = weft.transform()(names["frozen"])(net(), weft.local())

    @weft.transform()
    def doubled(module, ctx):
        return nn.Sequential(module, module), ctx

    with told(NET, "changed the {what} of the module") as it:
        doubled(net(), ctx)
    assert it.fix == "return the same module from doubled, with hooks instead of wrappers"

    @weft.transform()
    def doubled(module, ctx):
        module.register_forward_hook(lambda module, args, result: 2 * result)
        return module, ctx

    doubled(net(), ctx)


def test_transforms_are_combined_wrongly():
    ctx = weft.local()
    model, once = weft.replicate(net(), ctx)
    with told(NET, "already has this transform") as it:
        weft.replicate(model, once)
    assert it.fix == "leave one of the two calls of replicate out"
    with told(NET, "cannot be combined with {other.name} on one") as it:
        weft.fully_shard(model, once)
    assert it.fix == "leave replicate or fully_shard out"
    weft.fully_shard(net(), ctx)
    with told(NET, "comes too late, after {other.name}") as it:
        weft.with_precision(model, once, "bf16")
    assert it.fix == "move the call of with_precision before that of replicate"
    weft.replicate(*weft.with_precision(net(), ctx, "bf16"))


def test_the_context_of_a_transform_is_dropped():
    ctx, loader = weft.local(), [torch.ones(2, 4)] * 4
    model, _ = weft.with_precision(net(), ctx, "bf16")
    with told(NET, "the context does not know") as it:
        weft.accumulate_grads(model, loader, ctx, steps=2)
    assert it.fix == "module, ctx = weft.with_precision(module, ctx, policy='bf16')  # pass this ctx on"
    found = it.run(module=net(), ctx=ctx)
    model, loader, ctx = weft.accumulate_grads(found["module"], loader, found["ctx"], steps=2)
    with told("contract/marks.py", "the context does not know") as it:
        weft.undo(model, found["ctx"])
    assert it.fix == "modules, loader, ctx = weft.accumulate_grads(modules, loader, ctx, steps=2)  # pass this ctx on"
    assert weft.undo(model, ctx)[1].applied == ()


def test_two_functions_decide_when_to_communicate():
    model, ctx = weft.replicate(net(), weft.local())
    with told("contract/no_sync.py", "check_module") as it, weft.contract.no_sync([model], ctx):
        pass
    it.run(model=model, ctx=ctx)
    windows, loader, ctx = weft.accumulate_grads(model, [torch.ones(2, 4)] * 4, ctx, steps=2)
    with told("contract/no_sync.py", "accumulate_grads decides") as it, weft.contract.no_sync(windows, ctx):
        pass
    assert "# without no_sync" in it.fix
    it.run(loader=loader)


# -- parts of a module -----------------------------------------------------------------------------


class Blocks(nn.Module):
    def __init__(self, part=lambda: nn.Linear(4, 4)):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(part(), nn.ReLU()) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def chosen(fix):
    """What a line chooses that says what to choose: the words in quotes."""
    return fix.split('"')[1::2]


def test_parts_are_chosen_wrongly():
    ctx = weft.local()
    with told(SELECT, "chosen parts are nested") as it:
        weft.recompute(Blocks(), ctx, blocks=["blocks.*", nn.Linear])
    for one in chosen(it.fix):
        weft.recompute(Blocks(), ctx, blocks=one)
    with told(SELECT, "chosen parts are never called") as it:
        weft.recompute(Blocks(), ctx, blocks=nn.ModuleList)
    weft.recompute(Blocks(), ctx, blocks=eval(it.fix))
    with told(SELECT, "chooses no parts of a module") as it:
        weft.fully_shard(Blocks(), ctx, ignored=1.5)
    weft.fully_shard(Blocks(), ctx, ignored=eval(it.fix))
    with told(SELECT, "no part of") as it:
        weft.recompute(Blocks(), ctx, blocks="layers.*")
    for one in chosen(it.fix):
        weft.recompute(Blocks(), ctx, blocks=one)
    with told(SELECT, "parts cannot be chosen by size") as it:
        weft.recompute(model := Blocks(lambda: nn.LazyLinear(4)), ctx, blocks=10)
    it.run(model=model, example_batch=torch.ones(2, 4))
    weft.recompute(model, ctx, blocks=10)
