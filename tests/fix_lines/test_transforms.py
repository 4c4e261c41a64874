"""Transforms, in one process: `weft.transforms`."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import weft
from tests.fix_lines.told import told
from tests.transforms.test_accumulate_grads import Summed
from tests.transforms.test_expert_parallel import ListedLayer, StackedLayer
from weft.engines import TorchEngine
from weft.testing import run_ranks
from weft.transforms.local_steps import averaged

X = torch.ones(8, 4)


class Net(nn.Module):
    """Named parts, and a method besides forward."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.first(x).relu())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        query = self.query(x).unsqueeze(1)
        return self.out(functional.scaled_dot_product_attention(query, query, query, is_causal=True).squeeze(1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(4)

    def forward(self, x):
        return x + self.attention(self.norm(x))


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


def backward(model):
    """A model with gradients."""
    model(X).sum().backward()
    return model


def filled(it, text, by):
    """The line with what the program has in place of the dots."""
    assert text in it.fix
    it.fix = it.fix.replace(text, by)
    return it


def pretend(program, ranks=2, **options):
    """Run a function on one of several pretended ranks, in this process."""

    def build(ctx):
        program(ctx)
        return lambda: None

    weft.rehearse(build, ranks, **options)


class OneProcess(TorchEngine):
    """An engine of which one process drives several devices, as far as transforms ask it something."""

    name = "xla"

    def num_devices(self):
        return 2

    def on_mesh(self, axes, data_axes, world_size):
        return self, axes

    def begin(self, device, seed):
        raise NotImplementedError

    def check_dtype(self, what, dtype):
        pass

    def apply_layout(self, module, axes, cut):
        return None

    def values_replaced(self, objects):
        pass

    def fetch(self, tensors):
        return tensors


# -- accumulate_grads --------------------------------------------------------------------------------


def _under_ddp(ctx):
    model = nn.Linear(2, 1)
    loader, ctx = weft.shard_data(DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2), ctx)
    with told("transforms/accumulate_grads.py", "averages these gradients") as it:
        weft.accumulate_grads(DistributedDataParallel(model), loader, ctx, steps=2)
    names = it.run(model=model, ctx=ctx)
    model, windows, ctx = weft.accumulate_grads(names["model"], loader, names["ctx"], steps=2)
    for (x,) in next(iter(windows)):
        model(x).sum().backward()


def test_windows_of_a_model_under_ddp():
    run_ranks(_under_ddp, 2)


def test_windows_with_options_that_do_not_exist():
    for options in ({"remainder": "keep"}, {"reduce": "first"}):
        names = {"model": Net(), "ctx": weft.local(), "loader": [1, 2]}
        with told("transforms/accumulate_grads.py", "check_choice('accumulate_grads', name, value") as it:
            weft.accumulate_grads(names["model"], names["loader"], names["ctx"], steps=2, **options)
        it.run(**names)


def test_windows_of_a_model_in_place_of_the_loader():
    model, loader, ctx = Net(), [1, 2, 3, 4, 5], weft.local()
    with told("transforms/accumulate_grads.py", "takes modules and a loader") as it:
        weft.accumulate_grads(loader, model, ctx, steps=4)
    made = it.run(model=model, loader=loader, ctx=ctx)
    assert [len(window) for window in made["loader"]] == [4, 1]


def test_windows_of_modules_that_average_over_different_ranks():
    @weft.transform()
    def sum_gradients(module, ctx, *, ranks):
        offer = Summed()
        offer.mean_over = ranks
        return module, ctx.offering(offer)

    ctx = weft.local()
    one, ctx = sum_gradients(Net(), ctx, ranks=1)
    two, ctx = sum_gradients(Net(), ctx, ranks=3)
    with told("transforms/accumulate_grads.py", "different numbers of ranks") as it:
        weft.accumulate_grads([one, two], [1, 2], ctx, steps=2)
    assert it.fix == "one accumulate_grads per module, each with a loader of its own"
    for module in (one, two):
        _, loader, ctx = weft.accumulate_grads(module, [1, 2], ctx, steps=2)
        assert len(loader) == 1


# -- average_weights ---------------------------------------------------------------------------------


def test_averages_with_options_that_do_not_exist():
    for options in ({"every": 0}, {"start": -1}):
        with told("transforms/average_weights.py", "check_count(") as it:
            weft.average_weights(Net(), weft.local(), **options)
        it.run(model=Net(), ctx=weft.local())
    with told("transforms/average_weights.py", "check_choice(") as it:
        weft.average_weights(Net(), weft.local(), buffers="mean")
    it.run(model=Net(), ctx=weft.local())
    with told("transforms/average_weights.py", "decay!r} cannot be used") as it:
        weft.average_weights(Net(), weft.local(), decay=99)
    it.run(model=Net(), ctx=weft.local())


def test_averages_of_nothing():
    frozen, lazy = Net().requires_grad_(requires_grad=False), nn.LazyLinear(2)
    with told("transforms/average_weights.py", "has no weights to average") as it:
        weft.average_weights(frozen, weft.local())
    it.run(model=frozen)
    weft.average_weights(frozen, weft.local())
    with told("checks.py", "have no shape yet") as it:
        weft.average_weights(lazy, weft.local())
    it.run(model=lazy, example_batch=X)
    weft.average_weights(lazy, weft.local())


def test_averages_that_are_not_there():
    model, ctx = Net(), weft.local()
    with told("transforms/average_weights.py", "this object has no averages") as it:
        weft.averages(model)
    it.run(model=model, ctx=ctx)
    averages = weft.averages(model)
    averages.update()
    with told("transforms/average_weights.py", "this is no state of averages") as it:
        averages.load_state_dict(model.state_dict())
    it.run(averages=averages, saved=copy.deepcopy(averages.state_dict()))
    assert averages.num_averaged == 1


def test_averages_inside_of_the_averages():
    model, _ = weft.average_weights(Net(), weft.local())
    averages = weft.averages(model)
    state = copy.deepcopy(averages.state_dict())
    for call in (
        lambda: averages.update(),
        lambda: averages.copy_to(model),
        lambda: averages.load_state_dict(state),
        lambda: averages.swapped().__enter__(),
    ):
        with told("transforms/average_weights.py", "holds its averages at this moment") as it, averages.swapped():
            call()
        it.run(averages=averages, module=model, state=state)
    assert averages.num_averaged == 0


# -- clip_grads --------------------------------------------------------------------------------------


def test_clipping_of_something_without_gradients():
    model, ctx = backward(Net()), weft.local()
    used = iter(model.parameters())
    assert len(list(used)) == 4
    with told("transforms/clip_grads.py", "an iterator gave nothing") as it:
        weft.clip_grads(used, ctx, max_norm=1.0)
    it.run(model=model, ctx=ctx)
    with told("transforms/clip_grads.py", "or 'modules'} has no gradients") as it:
        weft.clip_grads(None, ctx, max_norm=1.0)
    it.run(model=model, ctx=ctx)
    with told("transforms/clip_grads.py", "or 'modules'} is no parameter") as it:
        weft.clip_grads([p.half() for p in model.parameters()], ctx, max_norm=1.0)
    it.run(model=model, ctx=ctx)
    with told("transforms/clip_grads.py", "check_context('clip_grads'") as it:
        weft.clip_grads(model, 1.0)
    it.run(model=model, ctx=ctx)


def test_clipping_with_options_that_do_not_exist():
    model, ctx = backward(Net()), weft.local()
    for options in ({"max_norm": "1"}, {"max_norm": 1.0, "norm_type": "inf"}, {"max_value": "2"}):
        with told("grads/limits.py", "is no number") as it:
            weft.clip_grads(model, ctx, **options)
        it.run(model=model, ctx=ctx)
    for options in ({"max_norm": 0}, {"max_norm": 0.5, "norm_type": -2.0}):
        model = backward(Net())
        with told("grads/limits.py", "value!r} cannot be used") as it:
            weft.clip_grads(model, ctx, **options)
        it.run(model=model, ctx=ctx)
        assert weft.clip_grads(model, ctx) < 1.01
    with told("transforms/clip_grads.py", "exclude each other") as it:
        weft.clip_grads(model, ctx, max_norm=math.inf, max_value=1.0)
    it.run(model=model, ctx=ctx)
    with told("transforms/clip_grads.py", "check_choice('clip_grads', 'nonfinite'") as it:
        weft.clip_grads(model, ctx, max_norm=1.0, nonfinite="ignore")
    it.run(model=model, ctx=ctx)


def test_clipping_of_complex_gradients_by_value():
    model = nn.Linear(4, 2, dtype=torch.complex64)
    model(X.cfloat()).abs().sum().backward()
    with told("transforms/clip_grads.py", "cannot limit complex gradients") as it:
        weft.clip_grads(model, weft.local(), max_value=1.0)
    it.run(model=model, ctx=weft.local())


@pytest.mark.parametrize("value", [math.nan, 3e38])
def test_clipping_of_gradients_that_are_not_finite(value):
    model = backward(Net())
    for p in model.parameters():
        p.grad.fill_(value)
    with told("transforms/clip_grads.py", "gradients are not finite") as it, pytest.raises(FloatingPointError):
        weft.clip_grads(model, weft.local(), nonfinite="raise")
    it.run(model=model, ctx=weft.local())
    before = copy.deepcopy(model.state_dict())
    sgd(model).step()
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


# -- compile -----------------------------------------------------------------------------------------


def _compiled(ctx):
    with told("transforms/compile.py", "mode and options cannot be used together") as it:
        weft.compile(Net(), ctx, mode="max-autotune", options={"max_autotune": True})
    it.run(model=Net(), ctx=ctx)
    with told("transforms/compile.py", "have no effect on backend") as it:
        weft.compile(Net(), ctx, backend="eager", mode="max-autotune")
    model = it.run(model=Net(), ctx=ctx)["model"]
    model(X)
    model = torch.compile(Net(), backend="eager")
    with told("transforms/compile.py", "are compiled already") as it:
        weft.compile(model, ctx)
    assert type(it.run(model=model, ctx=ctx)["model"]) is Net
    model = Net()
    model.compile(backend="eager")
    with told("transforms/compile.py", "are compiled already") as it:
        weft.compile(model, ctx)
    assert it.fix.endswith("# in place of module.compile(), once")
    it.run(model=Net(), ctx=ctx)


@pytest.mark.slow
def test_compiling():
    run_ranks(_compiled, 1)  # a process of its own: inductor, which is the default, starts threads and sets variables


# -- context_parallel --------------------------------------------------------------------------------


def test_sequences_split_with_options_that_do_not_exist():
    for mistake, options in (
        (told("transforms/context_parallel.py", "'method', method"), {"method": "ring"}),
        (told("transforms/context_parallel.py", "'order', order"), {"order": "ring"}),
    ):
        with mistake as it:
            weft.context_parallel(Block(), weft.local(), **options)
        it.run(model=Block(), ctx=weft.local())


def test_sequences_split_along_an_axis_of_batches():
    its = []

    def mistake(ctx):
        with told("transforms/context_parallel.py", "batches differ along") as it:
            weft.context_parallel(Block(), ctx, axis="data")
        its.append(it)

    pretend(mistake)
    pretend(lambda ctx: its[0].run(model=Block()), mesh={"data": 1, "context": 2})


def test_sequences_split_by_an_engine_that_does_not_know_it():
    ctx = replace(weft.testing.fake(0, 2, mesh={"data": 1, "context": 2}), engine=OneProcess())
    with told("transforms/context_parallel.py", "check_ranks_send") as it:
        weft.context_parallel(Block(), ctx)
    assert it.fix.startswith("leave context_parallel out; or ")
    model, _ = weft.recompute(Block(), weft.local(), blocks="attention")
    backward(model)


class ByHand(nn.Module):
    """Attention without torch's function."""

    def forward(self, query, key, value):
        return (query @ key.mT).softmax(-1) @ value


class ByTorch(nn.Module):
    def forward(self, query, key, value):
        return functional.scaled_dot_product_attention(query, key, value)


def test_sequences_split_of_attention_by_hand():
    def program(ctx):
        with told("transforms/context_parallel.py", "has no attention that can be caught") as it:
            weft.context_parallel(ByHand(), ctx)
        it.run(F=functional, query=X, key=X, value=X)
        weft.context_parallel(ByTorch(), ctx)
        model, after = weft.recompute(Block(), ctx, blocks=Attention)
        with told("transforms/context_parallel.py", "attention modules themselves") as it:
            weft.context_parallel(model, after)
        model = nn.Sequential(Block(), Block())
        it.run(model=model, ctx=ctx, Block=Block)
        weft.context_parallel(nn.Sequential(Block(), Block()), ctx)

    pretend(program, mesh={"context": 2})


# -- expert_parallel ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("mesh", "data"), [({"data": 1, "expert": 2}, ("data",)), ({"expert": 2}, ())])
def test_experts_along_an_axis_of_one_batch(mesh, data):
    its = []

    def mistake(ctx):
        ctx = weft.start(mesh=mesh, data_axes=data)
        with told("transforms/expert_parallel.py", "batches are the same along") as it:
            weft.expert_parallel(ListedLayer(), ctx)
        its.append(filled(it, "mesh=...", "mesh=mesh"))

    def follow(ctx):
        ctx = eval(its[0].fix, {"weft": weft, "mesh": mesh})
        weft.expert_parallel(ListedLayer(), ctx)

    pretend(mistake, mesh=mesh)
    pretend(follow, mesh=mesh)


def test_experts_whose_values_come_later(tmp_path):
    ctx, path = weft.local(), tmp_path / "model.safetensors"
    plain = ListedLayer()
    save_file(plain.state_dict(), path)
    with told("transforms/expert_parallel.py", "does not fit this") as it:
        weft.expert_parallel(plain, ctx, weights=str(path))
    it.run(model=plain, ctx=ctx)
    with weft.weights.on_meta():
        model = ListedLayer()
    with told("transforms/expert_parallel.py", "does not fit this") as it:
        weft.expert_parallel(model, ctx, weights=str(path))
    model, ctx = eval(it.fix, {"weft": weft, "model": model, "ctx": ctx})
    model, ctx = weft.fully_shard(model, ctx, weights="later")
    weft.load_weights(model, path, ctx)
    assert torch.equal(model.experts[3].up.weight, plain.experts[3].up.weight)


# -- full_grads, full_params -------------------------------------------------------------------------


class Kept:
    """A transform of a user's own, which keeps parameters elsewhere."""

    elsewhere = True

    def parameter_shards(self):
        return {}

    def parameters_changed(self, shards):
        pass

    def state_layout(self, name):
        return None

    def gathered(self, *, write):
        raise NotImplementedError

    def full_gradient(self, name):
        return None


def test_whole_tensors_of_no_module():
    model, ctx = backward(Net()), weft.local()
    with told("transforms/full_grads.py", "check_module(") as it:
        weft.full_grads(model.state_dict(), ctx)
    assert it.run(model=model, ctx=ctx)["gradients"]["first.weight"] is model.first.weight.grad
    with told("transforms/full_params.py", "check_module(") as it:
        weft.full_params(list(model.parameters()), ctx)
    it.run(model=model, ctx=ctx)


def test_whole_parameters_of_modules_that_one_rank_cannot_call():
    @weft.transform()
    def keep(module, ctx):
        return module, ctx.offering(Kept())

    model, ctx = keep(Net(), weft.local())
    with told("transforms/full_params.py", "parameters that another engine keeps") as it:
        weft.full_params(model, ctx, forward=True)
    model, ctx = Net(), weft.local()
    optimizer = sgd(model)
    with told("transforms/offloaded.py", "is another engine's") as again:
        weft.offloaded(*keep(Net(), weft.local())[:1], (), weft.local())
    assert again.fix == it.fix
    model, _, ctx = eval(it.fix, {"weft": weft, "model": model, "optimizer": optimizer, "ctx": ctx})
    with weft.offloaded(model, optimizer, ctx):
        pass
    with weft.full_params(model, ctx, forward=True), torch.no_grad():
        model(X)

    def cut(ctx):
        model, ctx = weft.tensor_parallel(Net(), ctx, plan={"first": "column", "last": "row"})
        with told("transforms/full_params.py", "axes other than those of a strategy") as it:
            weft.full_params(model, ctx, forward=True)
        it.run(model=model, ctx=ctx)
        model(X)

    pretend(cut, mesh={"data": 1, "tensor": 2})


def _writes(ctx):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = sgd(model)
    model, ctx = weft.pipeline(model, ctx, stages=[["0"], ["1"]], micro_batches=2, rebind=optimizer)
    with told("transforms/full_params.py", "each rank has parameters of its own") as it:
        weft.full_params(model, ctx, write=True)
    found = it.run(model=model, ctx=ctx, optimizer=optimizer)
    with weft.full_params(found["model"], found["ctx"], write=True), torch.no_grad():
        for p in found["model"].parameters():
            p.fill_(3.0 + ctx.rank)
    return [p.unique().tolist() for p in found["model"].parameters()]


def test_whole_parameters_of_a_pipeline_are_not_written():
    for values in run_ranks(_writes, 2, mesh={"pipeline": 2}):
        assert all(value == [3.0] for value in values)


# -- gather_step, hooked -----------------------------------------------------------------------------


def test_gathered_steps_of_an_optimizer_of_all_parameters():
    model, ctx = Net(), weft.local()
    model, sharded = weft.fully_shard(model, ctx)
    with told("transforms/gather_step.py", "LBFGS uses all parameters at once") as it:
        weft.gather_step(torch.optim.LBFGS(model.parameters()), sharded)
    model = it.run(model=Net(), ctx=ctx)["model"]
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def loss():
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        return loss

    before = loss().item()
    optimizer.step(loss)
    assert loss() < before


def test_hooks_that_are_none(capsys):
    ctx = weft.local()
    with told("transforms/hooked.py", "no function to call") as it:
        weft.hooked(Net(), ctx, blocks=nn.Linear)
    filled(it, "blocks=...", "blocks=nn.Linear").run(model=(model := Net()), ctx=ctx, nn=nn)
    model(X)
    assert capsys.readouterr().out == "torch.Size([8, 4])\n" * 2
    for name in ("before", "after"):
        with told("transforms/hooked.py", "name} is no function") as it:
            weft.hooked(Net(), ctx, blocks=nn.Linear, **{name: "print"})
        functions = {"first": lambda *given: print(1), "second": lambda *given: print(2)}
        filled(it, "blocks=...", "blocks=nn.Linear").run(model=(model := Net()), ctx=ctx, nn=nn, **functions)
        model(X)
        assert capsys.readouterr().out == "1\n2\n1\n2\n"


def test_a_hook_that_returns_something_else_than_a_pair():
    line = "args"

    def twice(block, args, kwargs):
        args = (2 * args[0],)
        return eval(line)

    model, ctx = weft.hooked(Net(), weft.local(), blocks="first", before=twice)
    with told("transforms/hooked.py", "a function of before= returned") as it:
        model(X)
    line = it.fix.removeprefix("return ")
    found = model(X)
    model, _ = weft.undo(model, ctx)
    assert torch.equal(found, model(2 * X))


# -- local_steps -------------------------------------------------------------------------------------


def test_local_steps_of_something_else():
    model, ctx = Net(), weft.local()
    with told("transforms/local_steps.py", "check_module(") as it:
        weft.local_steps(sgd(model), model, ctx, every=16)
    it.run(model=(model := Net()), optimizer=sgd(model), ctx=ctx)
    with told("transforms/local_steps.py", "check_optimizer(") as it:
        weft.local_steps(Net(), torch.optim.SGD, ctx, every=16)
    it.run(model=(model := Net()), optimizer=sgd(model), ctx=ctx)
    with told("transforms/local_steps.py", "was not applied to this module") as it, averaged(Net(), ctx):
        pass
    made = it.run(model=(model := Net()), optimizer=sgd(model), ctx=ctx)
    with averaged(made["model"], made["ctx"]):
        made["model"](X)


def test_local_steps_along_an_axis_without_batches():
    model = Net()
    with told("transforms/local_steps.py", "axis!r} cannot be used") as it:
        weft.local_steps(model, sgd(model), weft.local(), every=16, axis="replica")
    it.run(model=model, optimizer=sgd(model), ctx=weft.local())
    its = []

    def mistake(ctx):
        model = Net()
        with told("transforms/local_steps.py", "axis!r} cannot be used") as it:
            weft.local_steps(model, sgd(model), ctx, every=16)
        its.append(it)

    def follow(ctx):
        ctx = its[0].run()["ctx"]
        model = Net()
        weft.local_steps(model, sgd(model), ctx, every=16)

    pretend(mistake, mesh={"tensor": 2})
    pretend(follow, mesh={"data": 1, "tensor": 2})


class TwoSets(torch.optim.SGD):
    """Of two sets of parameters, as those of schedulefree."""

    def train(self):
        pass

    def eval(self):
        pass


def test_local_steps_of_an_optimizer_with_two_sets_of_parameters():
    model, ctx = Net(), weft.local()
    with told("transforms/local_steps.py", "keeps a second set of parameters") as it:
        weft.local_steps(model, TwoSets(model.parameters(), 0.1), ctx, every=16)
    assert it.fix == "torch.optim.AdamW with a schedule; or weft.replicate instead of local_steps"
    optimizer = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    weft.local_steps(model, optimizer, ctx, every=16)
    weft.replicate(model := Net(), ctx)
    TwoSets(model.parameters(), 0.1)


def test_local_steps_of_experts():
    its = []

    def mistake(ctx):
        model, after = weft.expert_parallel(StackedLayer(), ctx)
        with told("transforms/local_steps.py", "are cut along") as it:
            weft.local_steps(model, sgd(model), after, every=16)
        its.append(it)
        model, ctx = weft.expert_parallel(ListedLayer(), ctx)
        with told("transforms/local_steps.py", "some ranks have no values of parameters") as it:
            weft.local_steps(model, sgd(model), ctx, every=16)
        it.run(model=model, ctx=ctx)
        sgd(model)

    def follow(ctx):
        assert its[0].fix.endswith(", with the experts along an axis of their own")
        ctx = eval(its[0].fix.partition(", with")[0], {"weft": weft})
        model, ctx = weft.expert_parallel(StackedLayer(), ctx)
        weft.local_steps(model, sgd(model), ctx, every=16)

    pretend(mistake, mesh={"expert": 2})
    pretend(follow, ranks=4, mesh={"data": 2, "expert": 2})


# -- balanced experts ----------------------------------------------------------------------------------------


def test_balance_loss():
    ctx, logits, k = weft.local(), torch.randn(6, 4), 2
    with told("transforms/balance_loss.py", "are not probabilities and numbers") as it:
        weft.balance_loss(logits.softmax(-1), logits.topk(k).values, ctx)
    it.run(probs=logits.softmax(-1), k=k, ctx=ctx)
    with told("transforms/balance_loss.py", "are of other tokens") as it:
        weft.balance_loss(logits.softmax(-1), logits.argmax(-1), ctx)
    it.run(probs=logits.softmax(-1), k=1, ctx=ctx)


def test_balance_bias():
    ctx, experts, chosen = weft.local(), 4, torch.randn(6, 4).topk(2).indices
    counts = chosen.flatten().bincount(minlength=experts)
    with told("transforms/balance_loss.py", "these are not biases and counts") as it:
        weft.balance_bias_(torch.zeros(experts, dtype=torch.bfloat16), counts, ctx)
    router = nn.Module()
    it.run(router=router, torch=torch, experts=experts)
    weft.balance_bias_(router.bias, counts, ctx)
    with told("transforms/balance_loss.py", "do not fit") as it:
        weft.balance_bias_(router.bias, chosen.flatten().bincount(minlength=5), ctx)
    it.run(bias=router.bias, chosen=chosen, ctx=ctx)


def test_balanced_experts_in_an_elastic_job():
    probs = torch.rand(6, 4)
    with weft.start(elastic="replica", device="cpu") as ctx:
        with told("transforms/balance_loss.py", "replicas of an elastic job") as it:
            weft.balance_loss(probs, probs.topk(1).indices, ctx)
    with it.run()["ctx"] as ctx:
        weft.balance_loss(probs, probs.topk(1).indices, ctx)
