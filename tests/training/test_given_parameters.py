"""Other parameters in a module: by `functional_call`, by functions of `torch.func`, and by `.data = ...`.

A module uses what it is given, as it does without weft, or raises before anything changes.
"""

import re

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap

import weft
from weft.errors import ContractError
from weft.testing import largest_difference, run_ranks

X = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


class _Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = _net()

    def forward(self, x):
        return functional_call(self.model, {name: p * 2 for name, p in self.model.named_parameters()}, (x,))


def _apply(strategy, model, ctx):
    name, _, option = strategy.partition(" ")
    if name == "zero_partition":
        return weft.zero_partition(model, torch.optim.SGD(model.parameters(), 0.1), ctx, stage=int(option))[::2]
    if name == "tensor_parallel":
        return weft.tensor_parallel(model, ctx, plan={"0": "column", "2": "row"})
    options = {"": {}, "units": {"units": nn.Linear}, "flat": {"flat": True}, "unused": {"unused": "zero"}}[option]
    return getattr(weft, name)(model, ctx, **options)


def _whole(value):
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.detach()


def _refused(text, call, *args):
    with pytest.raises(ContractError) as caught:
        call(*args)
    assert re.search(text, str(caught.value), re.DOTALL), caught.value


# -- functional_call ---------------------------------------------------------------------------------


def _given_to_shards(ctx, strategy):
    found = []
    for warm in (0, 2):
        model, own = _apply(strategy, _net(), ctx)
        for _ in range(warm):
            model(X).sum().backward()
        given = {name: p.detach() * 2 for name, p in model.named_parameters()}
        whole = {name: _whole(p) for name, p in given.items()}
        part = {"0.weight": given["0.weight"]}
        text = " is called with other parameters than its own, which are sharded"
        with torch.no_grad():
            for weights in (given, whole, part, {name: nn.Parameter(p) for name, p in given.items()}):
                _refused(f"{text}.*0.weight.*full_params", functional_call, model, weights, (X,))
            with weft.full_params(model, own, forward=True):  # the fix
                found.append(functional_call(model, whole, (X,)))
                _refused(text, functional_call, model, given, (X,))
        _refused("Adapted", functional_call, model, {n: p * 2 for n, p in model.named_parameters()}, (X,))
        if strategy.endswith("units"):
            model(X)
            one = {name.removeprefix("0."): p for name, p in whole.items() if name.startswith("0.")}
            _refused(text, functional_call, model[0], one, (X,))
        found.append(functional_call(model, dict(model.named_parameters()), (X,)).detach())
        with weft.full_params(model, own):
            found.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
        model(X).sum().backward()
    return found


@pytest.mark.parametrize("strategy", ["zero_partition 2", "zero_partition 3", "fully_shard units"])
def test_a_sharded_module_refuses_other_parameters_and_keeps_its_own(strategy):
    model = _net()
    doubled = functional_call(model, {name: p.detach() * 2 for name, p in model.named_parameters()}, (X,))
    expected = [doubled, model(X).detach(), nn.utils.parameters_to_vector(model.parameters()).detach()] * 2
    for found in run_ranks(_given_to_shards, 2, strategy):
        assert largest_difference(found, expected) < 1e-12


def _adapted(ctx, strategies):
    found = []
    for strategy in strategies:
        model, _ = _apply(strategy, _net(), ctx)
        weights = {name: p * 2 for name, p in model.named_parameters()}
        _refused(r"Adapted\(model\)", functional_call, model, weights, (X,))
        model, _ = _apply(strategy, _Adapted(), ctx)
        model(X[ctx.rank :: 2]).sum().backward()
        found.append({name: _whole(p.grad) for name, p in model.named_parameters()})
    return found


def test_a_module_whose_forward_calls_functional_call_trains():
    model = _Adapted()
    (model(X).sum() / 2).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    strategies = ["replicate", "replicate flat", "zero_partition 1", "fully_shard"]
    for found in run_ranks(_adapted, 2, strategies):
        assert largest_difference(found, [expected] * len(strategies)) < 1e-12


def _given_to_parts(ctx):
    model, _ = _apply("tensor_parallel", _net(), ctx)
    with torch.no_grad():
        output = functional_call(model, {name: p * 2 for name, p in model.named_parameters()}, (X,))
    whole = {name: _whole(p) for name, p in model.named_parameters()}
    _refused("tensor_parallel: Sequential is called with whole tensors", functional_call, model, whole, (X,))
    functional_call(model, {name: p * 2 for name, p in model.named_parameters()}, (X,)).sum().backward()
    gradients = [_whole(p.grad) for p in model.parameters()]
    text = "tensor_parallel: Sequential is called inside torch.func"
    for call, *args in ((vmap(model), X), (jvp, model, (X,), (X,)), (jacrev(model), X)):
        _refused(text, call, *args)
    return [_whole(output), *gradients, _whole(model(X))]


def test_layers_of_tensor_parallel_use_parts_that_they_are_given():
    model = _net()
    output = functional_call(model, {name: p * 2 for name, p in model.named_parameters()}, (X,))
    output.sum().backward()
    expected = [output.detach(), *(p.grad for p in model.parameters()), model(X).detach()]
    for found in run_ranks(_given_to_parts, 2, mesh={"tensor": 2}):
        assert largest_difference(found, expected) < 1e-12


def _given_to_stages(ctx):
    model, ctx = weft.pipeline(nn.Sequential(*_net(), nn.Linear(1, 1).double()), ctx, micro_batches=2, loss=_loss)
    _refused("pipeline: Sequential is called inside torch.func", jvp, model, (X, X), (X, X))
    with torch.no_grad():
        return functional_call(model, {name: p * 2 for name, p in model.named_parameters()}, (X, X[:, :1]))


def _loss(output, target):
    return (output - target).square().mean()


def test_stages_of_a_pipeline_use_what_they_are_given():
    model = nn.Sequential(*_net(), nn.Linear(1, 1).double())
    with torch.no_grad():
        output = functional_call(model, {name: p * 2 for name, p in model.named_parameters()}, (X,))
    for found in run_ranks(_given_to_stages, 2, mesh={"pipeline": 2}):
        assert largest_difference(found, _loss(output, X[:, :1])) < 1e-12


# -- torch.func ------------------------------------------------------------------------------------------


def _functions(model):
    """By name, what is computed with parameters that are arguments."""
    own = dict(model.named_parameters())
    values = {name: p.detach() for name, p in own.items()}
    weight = values["0.weight"]

    def loss(weights, row):
        return functional_call(model, weights, (row[None],)).sum()

    return {
        "gradients of single samples": lambda: vmap(grad(loss), (None, 0))(own, X),
        "their Jacobians": lambda: vmap(jacrev(loss), (None, 0))(values, X),
        "models at once": lambda: vmap(lambda w: functional_call(model, {"0.weight": w}, (X,)))(weight[None] * 2),
        "a Hessian": lambda: hessian(lambda w: functional_call(model, {"0.weight": w}, (X,)).sum())(weight),
    }


def _derivatives(ctx, strategies):
    found = []
    for strategy in strategies:
        for warm in (0, 2):
            model, _ = _apply(strategy, _net(), ctx)
            for _ in range(warm):
                model(X).sum().backward()
            found.append({name: function() for name, function in _functions(model).items()})
            model(X).sum().backward()  # the strategy still works
    return [{name: _detached(value) for name, value in one.items()} for one in found]


def _detached(value):
    return {name: v.detach() for name, v in value.items()} if isinstance(value, dict) else value.detach()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")  # torch's own
def test_gradients_of_single_samples_are_those_of_the_model_alone():
    strategies = ["replicate", "replicate flat", "replicate unused", "zero_partition 1"]
    expected = {name: _detached(function()) for name, function in _functions(_net()).items()}
    for found in run_ranks(_derivatives, 2, strategies):
        assert largest_difference(found, [expected] * 2 * len(strategies)) < 1e-12


def _refused_derivatives(ctx):
    model, ctx = weft.fully_shard(_net(), ctx)
    for function in _functions(model).values():
        _refused("fully_shard: Sequential is called with other parameters.*weft.replicate", function)
    model(X).sum().backward()


def test_gradients_of_single_samples_are_refused_with_shards():
    run_ranks(_refused_derivatives, 2)


# -- p.data = ... ----------------------------------------------------------------------------------------


def _halved(ctx, strategy):
    found = []
    for warm in (0, 1):
        for how in ("data.mul_", "copy_", "full_params", "assigned", "vector"):
            model, own = _apply(strategy, _net(), ctx)
            for _ in range(warm):
                model(X).sum().backward()
            p = next(model.parameters())
            if how == "data.mul_":
                p.data.mul_(0.5)
            elif how == "full_params":
                with weft.full_params(model, own, write=True), torch.no_grad():
                    next(model.parameters()).mul_(0.5)
            else:
                if how == "assigned":
                    p.data = p.data * 0.5
                elif how == "vector":
                    nn.utils.vector_to_parameters(torch.zeros(21, dtype=torch.float64), model.parameters())
                if how != "copy_":
                    _refused(r"\.data of sharded parameters.*0.weight.*p.copy_", model, X)
                    continue
                with torch.no_grad():
                    p.copy_(p * 0.5)
            found.append(_whole(model(X)))
    return found


@pytest.mark.parametrize("strategy", ["zero_partition 2", "zero_partition 3", "fully_shard units", "tensor_parallel"])
def test_data_of_a_sharded_parameter_is_changed_in_place_and_not_assigned(strategy):
    model = _net()
    model[0].weight.data.mul_(0.5)
    mesh = {"tensor": 2} if strategy == "tensor_parallel" else None
    for found in run_ranks(_halved, 2, strategy, mesh=mesh):
        assert largest_difference(found, [model(X).detach()] * 6) < 1e-12


def _moved(ctx):
    model, ctx = weft.fully_shard(_net(), ctx)
    model.float().double()  # exchanges memory and part
    loaded = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    model.load_state_dict(loaded, assign=True)
    return model(X).detach()


def test_what_fsdp_allows_before_the_first_call_stays_allowed():
    for found in run_ranks(_moved, 2):
        assert not found.any()
