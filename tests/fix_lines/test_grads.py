"""Gradients before the step, and those of single samples: `weft.grads`, `weft.grad_chain`."""

import pytest
import torch
from torch import nn

import weft
from tests.fix_lines.told import told

X = torch.ones(3, 4)


def _net():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def _sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


def _mean(model, x, y=None):
    return model(x).square().mean()


def _chained(fix_of, *elements):
    """The line is a call of `grad_chain`, or of an element for one; then a step works."""
    model, ctx = weft.replicate(_net(), weft.local())
    made = fix_of.run(torch=torch, model=model, optimizer=_sgd(model), ctx=ctx)
    optimizer = made["optimizer"]
    for element in elements:
        optimizer, ctx = weft.grad_chain(optimizer, ctx, element)
    _mean(model, X).backward()
    optimizer.step()


def test_what_is_no_element():
    model, ctx = weft.replicate(_net(), weft.local())
    with told("transforms/grad_chain.py", "no functions of gradients and a context") as it:
        weft.grad_chain(_sgd(model), ctx, weft.grads.clip_norm)
    _chained(it)
    with told("transforms/grad_chain.py", "LBFGS evaluates the loss") as it:
        weft.grad_chain(torch.optim.LBFGS(model.parameters()), ctx, weft.grads.clip_norm(1.0))
    _chained(it, weft.grads.clip_norm(1.0))
    with told("checks.py", "optimizer, ctx = weft.{what}(optimizer, ctx)"):
        weft.grad_chain(model, ctx, weft.grads.clip_norm(1.0))


def test_parameters_without_names():
    model = _net()
    with told("grads/named_grads.py", "have no names") as it:
        weft.grad_chain(_sgd(model), weft.local(), weft.grads.clip_norm(1.0))
    weft.grad_chain(it.run(torch=torch, model=model)["optimizer"], weft.local(), weft.grads.clip_norm(1.0))


class Keeper:
    """What DeepSpeed's engine offers."""

    elsewhere = False

    def parameter_shards(self):
        return {}

    def parameters_changed(self, shards):
        pass

    def state_layout(self, name):
        pass

    def gathered(self, *, write):
        pass

    def full_gradient(self, name):
        pass


@weft.transform()
def keep_elsewhere(module: nn.Module, ctx: weft.DistContext) -> tuple[nn.Module, weft.DistContext]:
    return module, ctx.offering(Keeper())


def test_gradients_in_pieces():
    model, ctx = keep_elsewhere(_net(), weft.local())
    with told("transforms/grad_chain.py", "deepspeed") as it:
        weft.grad_chain(_sgd(model), ctx, weft.grads.clip_norm(1.0))
    model = _net()
    made = it.run(model=model, optimizer=_sgd(model), ctx=weft.local())
    weft.grad_chain(made["optimizer"], made["ctx"], weft.grads.clip_norm(1.0))


def test_what_an_element_returns():
    model, ctx = weft.replicate(_net(), weft.local())
    optimizer, ctx = weft.grad_chain(_sgd(model), ctx, lambda grads, ctx: None)
    _mean(model, X).backward()
    with told("grads/chain.py", "no gradients of these parameters") as it:
        optimizer.step()
    _follow(it.fix)


def _follow(fix):
    """The line is one of an element."""
    made = {}
    exec(f"def element(grads, ctx):\n    {fix}", made)
    model, ctx = weft.replicate(_net(), weft.local())
    optimizer, ctx = weft.grad_chain(_sgd(model), ctx, made["element"])
    _mean(model, X).backward()
    optimizer.step()


def test_arguments_of_elements():
    with told("grads/elements.py", "'seed', seed") as it:
        weft.grads.add_noise(0.1, seed=-1)
    it.run()
    model, ctx = weft.replicate(nn.Embedding(4, 2, sparse=True), weft.local())
    optimizer, ctx = weft.grad_chain(_sgd(model), ctx, weft.grads.add_noise(0.1))
    model(torch.tensor([1])).sum().backward()
    with told("grads/elements.py", "sparse gradients have no elements") as it:
        optimizer.step()
    it.run(nn=nn, num=4, dim=2)


def test_samples_that_are_mixed():
    model = nn.Sequential(_net(), nn.BatchNorm1d(2))
    with told("grads/per_sample.py", "does not follow from the sample") as it:
        weft.grads.grad_samples(model, weft.local(), _mean, X)
    it.run(model=model)
    weft.grads.grad_samples(model, weft.local(), _mean, X)


@pytest.mark.parametrize("what", ["module", "chunk_size", "batch"])
def test_samples_with_wrong_arguments(what):
    if what == "module":
        with told("grads/per_sample.py", "check_module(") as it:
            weft.grads.grad_samples(_mean, weft.local(), _mean, X)
    elif what == "chunk_size":
        with told("grads/per_sample.py", "check_count(") as it:
            weft.grads.grad_samples(_net(), weft.local(), _mean, X, chunk_size=0)
    else:
        with told("grads/per_sample.py", "the batch has no number of samples") as it:
            weft.grads.grad_samples(_net(), weft.local(), _mean, X, X[:2])
    it.run(model=_net(), ctx=weft.local(), loss=_mean, x=X, y=X)
