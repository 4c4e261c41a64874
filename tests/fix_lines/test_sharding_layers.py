"""Layers and experts that cannot be divided: stages, experts and tensor parallelism of `weft.sharding`."""

import pytest
import torch
from torch import nn

import weft
from tests.fix_lines.test_sharding import Blocks, filled, net, trains
from tests.fix_lines.told import told
from tests.lm import LM, PLAN
from weft.testing import run_ranks

MLP = {"0": "column", "2": "row"}


# -- stages ----------------------------------------------------------------------------------------


def test_stages_are_planned_wrongly():
    layers = [nn.Linear(4, 4) for _ in range(4)]
    with told("sharding/stages.py", "check_module") as it:
        weft.plan_pipeline(layers, 2)
    it.run(model=nn.Sequential(*layers))
    with told("sharding/stages.py", "check_count") as it:
        weft.plan_pipeline(nn.Sequential(*layers), 0)
    it.run(model=nn.Sequential(*layers))


class Lm(nn.Module):
    """Of which the operations depend on values."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.lm_head = nn.Linear(4, 4)

    def forward(self, x):
        return self.lm_head(x if x.sum() > 0 else -x)


def test_costs_of_layers_are_given_wrongly():
    with told("sharding/stages.py", "cost tells nothing of layers") as it:
        weft.plan_pipeline(Lm(), 4, cost=3.0)
    it.run(model=Lm())
    with told("sharding/stages.py", "costs are numbers that are not negative") as it:
        weft.plan_pipeline(Lm(), 4, cost=lambda name, layer: -1.0)
    it.run(model=Lm())
    with told("engines/torch/compute/layer_flops.py", "cannot be counted") as it:
        weft.plan_pipeline(Lm(), 4, cost=torch.ones(1, 4))
    it.run(model=Lm())


def runs(staged):
    """A step of a model and its context whose layers are in stages."""
    staged[0](torch.ones(8, 4)).backward()


def stages_are_given_wrongly(ctx):
    two_per_rank = {"schedule": "interleaved_1f1b", "micro_batches": 8}
    with told("sharding/stages.py", "has fewer blocks than there are stages") as it:
        weft.pipeline(Blocks(), ctx, **two_per_rank)
    assert it.fix == "fewer ranks along the axis, a schedule with one stage per rank, or stages=[...]"
    runs(weft.pipeline(Blocks(), weft.start(mesh={"data": 2, "pipeline": 1}), **two_per_rank))
    runs(weft.pipeline(Blocks(), ctx, schedule="1f1b", micro_batches=8))
    four = [["embed"], ["blocks.0"], ["blocks.1"], ["head"]]
    runs(weft.pipeline(Blocks(), ctx, **two_per_rank, stages=four))
    with told("sharding/stages.py", "the number of stages does not fit") as it:
        weft.pipeline(Blocks(), ctx, stages=[["embed", "blocks", "head"], []])
    runs(filled(it.fix, model=Blocks(), ctx=ctx))
    with told("sharding/stages.py", "each layer belongs to one stage") as it:
        weft.pipeline(Blocks(), ctx, stages=[["embed"], ["blocks"]])
    runs(filled(it.fix, model=Blocks(), ctx=ctx))
    for wrong in ("body", 1):
        with told("sharding/stages.py", "_name(one, names, known, fix)") as it:
            weft.pipeline(Blocks(), ctx, stages=[["embed", wrong], ["head"]])
        runs(filled(it.fix, model=Blocks(), ctx=ctx))


# -- experts ---------------------------------------------------------------------------------------


class Mixture(nn.Module):
    """A layer with a list of experts."""

    def __init__(self, experts=4, name="experts", make=lambda: nn.Linear(4, 4)):
        super().__init__()
        self.name, self.router = name, nn.Linear(4, experts)
        setattr(self, name, nn.ModuleList(make() for _ in range(experts)))

    def forward(self, x):
        weight, chosen = self.router(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(getattr(self, self.name)):
            result[chosen == number] = expert(x[chosen == number])
        return result * weight[:, None]


class Counting(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("calls", torch.zeros(()))


def mixtures(change=lambda first: None, **options):
    """Two mixtures, in the first of which something was changed."""
    model = nn.Sequential(Mixture(**options), Mixture())
    change(model[0].experts)
    return model


def uneven(experts):
    experts[1] = nn.Linear(4, 4, bias=False)


def tied(experts):
    experts[1].weight = experts[0].weight


def hooked(experts):
    return experts[0].weight.register_hook(lambda gradient: gradient)


def divided(model, ctx, **options):
    """Experts are divided, and the model is called."""
    model, ctx = weft.expert_parallel(model, ctx, **options)
    return model(torch.ones(2, 4)), ctx


def experts_cannot_be_found(ctx):
    model = nn.Sequential(Mixture(name="branches"), Mixture(name="branches"))
    with told("sharding/find_experts.py", "there are no experts in this") as it:
        weft.expert_parallel(model, ctx)
    model, _ = filled(it.fix, model=model, ctx=ctx)
    assert [sum(p.is_meta for p in part.parameters()) for part in model] == [4, 4]
    model(torch.ones(2, 4))
    with told("sharding/find_experts.py", "there are no experts in this") as it:
        weft.expert_parallel(net(), ctx)
    assert it.fix == "leave expert_parallel out: there is nothing to divide"
    with told("sharding/find_experts.py", "computes its experts is not known") as it:
        weft.expert_parallel(mixtures(), ctx, experts="*.router")
    filled(it.fix, model=mixtures(), ctx=ctx)[0](torch.ones(2, 4))
    with told("sharding/find_experts.py", "cannot be divided among the ranks") as it:
        weft.expert_parallel(Mixture(3), ctx)
    divided(Mixture(3), it.run()["ctx"])


def experts_cannot_be_divided(ctx):
    without = "weft.expert_parallel(..., experts=...) without '0.experts'"
    with told("sharding/find_experts.py", "are not alike") as it:
        weft.expert_parallel(mixtures(uneven), ctx)
    assert it.fix == without
    divided(mixtures(uneven), ctx, experts="1.experts")
    with told("sharding/find_experts.py", "experts have buffers, which") as it:
        weft.expert_parallel(mixtures(make=Counting), ctx)
    assert it.fix == without
    divided(mixtures(make=Counting), ctx, experts="1.experts")
    model = nn.ModuleList([Stacked(), Stacked()])
    model[0].register_buffer("calls", torch.zeros(2))
    with told("sharding/find_experts.py", "has buffers that belong to single experts") as it:
        weft.expert_parallel(model, ctx)
    assert it.fix == "weft.expert_parallel(..., experts=...) without '0'"
    weft.expert_parallel(model, ctx, experts="1")
    with told("sharding/find_experts.py", "are used in several places") as it:
        weft.expert_parallel(model := mixtures(tied), ctx)
    assert it.fix == "untie them, or leave these experts out of experts=..."
    divided(mixtures(tied), ctx, experts="1.experts")
    model[0].experts[1].weight = nn.Parameter(torch.ones(4, 4))
    divided(model, ctx)
    model, sharded = weft.replicate(mixtures(), ctx)
    with told("sharding/find_experts.py", "already sharded or replicated") as it:
        weft.expert_parallel(nn.Sequential(model), sharded)
    assert it.fix.endswith(" before the other transforms")
    model, after = eval(
        it.fix.removesuffix(" before the other transforms"), {"weft": weft, "model": mixtures(), "ctx": ctx}
    )
    weft.replicate(nn.Sequential(model), after)
    model = mixtures()
    handle = hooked(model[0].experts)
    with told("sharding/find_experts.py", "then the hooks") as it:
        weft.expert_parallel(model, ctx)
    assert it.fix.endswith(" first, then the hooks")
    handle.remove()
    model, _ = eval(it.fix.removesuffix(" first, then the hooks"), {"weft": weft, "model": model, "ctx": ctx})
    hooked(model[0].experts)


class Stacked(nn.Module):
    """Experts in one parameter, as transformers has them."""

    num_experts = 2

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4, 4))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states


@pytest.mark.slow
def test_layers_and_experts_cannot_be_divided():
    run_ranks(stages_are_given_wrongly, 2, mesh={"pipeline": 2})
    run_ranks(experts_cannot_be_found, 2, mesh={"expert": 2})
    run_ranks(experts_cannot_be_divided, 2, mesh={"expert": 2})


# -- tensor parallelism ----------------------------------------------------------------------------


def cut(module, ctx, x=None, **options):
    """Layers are cut, and the module is trained."""
    options = {"plan": MLP, **options}
    trains(weft.tensor_parallel(module, ctx, **options)[0], x=x)


def tokens():
    return torch.zeros(2, 8, dtype=torch.long)


def entries(fix):
    """What a line `plan={..., "name": "style"}` adds to a plan."""
    return eval(fix.removeprefix("plan=").replace("{..., ", "{"))


class Attention(nn.Module):
    """Attention of torch, or with `split` of four linear layers."""

    def __init__(self, *, split=False):
        super().__init__()
        self.split = split
        if split:
            self.q, self.k, self.v, self.out = (nn.Linear(4, 4) for _ in range(4))
        else:
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        if not self.split:
            return self.attention(x, x, x)[0]
        q, k, v = (y.unflatten(-1, (-1, 2)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def embeds(**options):
    return nn.Sequential(nn.Embedding(8, 4, **options), *net())


def planned():
    model = net()
    model._tp_plan = {"0": "colwise", "2": "rowwise"}
    return model


def test_a_plan_cannot_be_made():
    ctx = weft.local()
    with told("sharding/layers/tensor_plan.py", "check_module") as it:
        weft.tensor_plan([net()])
    it.run(model=planned())
    for model in (net(), nn.Sequential(nn.Conv1d(2, 4, 1))):
        with told("sharding/layers/tensor_plan.py", "has no plan for tensor parallelism") as it:
            weft.tensor_plan(model)
        it.run(model=model, ctx=ctx)
    for plan, model in ((None, net()), ("own", planned()), ({}, planned()), ({}, nn.Sequential(nn.Conv1d(2, 4, 1)))):
        with told("sharding/layers/tensor_checks.py", "plan = {plan!r} cannot be used") as it:
            weft.tensor_parallel(model, ctx, plan=plan)
        it.run(model=model, ctx=ctx)


def plans_are_wrong(ctx):
    with told("sharding/layers/tensor_checks.py", "the style of {pattern!r} is unknown") as it:
        weft.tensor_parallel(net(), ctx, plan={"0": "columns", "2": "row"})
    cut(net(), ctx, plan={**MLP, **entries(it.fix)})
    with told("sharding/layers/tensor_checks.py", "matches no part of") as it:
        weft.tensor_parallel(net(), ctx, plan={"0.weight": "column", "2": "row"})
    cut(net(), ctx, plan={eval(it.fix): "column", "2": "row"})
    with told("sharding/layers/tensor_checks.py", "matches no part of") as it:
        weft.tensor_parallel(net(), ctx, plan={"up": "column", "2": "row"})
    it.run(model=net())
    with told("sharding/layers/tensor_checks.py", "is never called") as it:
        weft.tensor_parallel(Attention(), ctx, plan={"attention.out_proj": "row"})
    assert it.fix == "an attention of four linear layers and scaled_dot_product_attention"
    cut(Attention(split=True), ctx, torch.ones(2, 3, 4), plan={"[qkv]": "column", "out": "row"})
    with told("sharding/layers/tensor_checks.py", "cannot be cut as") as it:
        weft.tensor_parallel(embeds(max_norm=1.0), ctx, plan={"0": "vocab", "1": "column", "3": "row"})
    assert it.fix == "leave '0' out of the plan: it stays whole on every rank"
    cut(embeds(max_norm=1.0), ctx, tokens(), plan={"1": "column", "3": "row"})
    with told("sharding/layers/tensor_checks.py", "cannot be cut as") as it:
        weft.tensor_parallel(embeds(sparse=True), ctx, plan={"0": "vocab", "1": "column", "3": "row"})
    assert it.fix.endswith(", or sparse=False, and Adam in place of SparseAdam")
    cut(embeds(sparse=False), ctx, tokens(), plan={"0": "vocab", "1": "column", "3": "row"})
    with told("sharding/layers/tensor_checks.py", "cannot be cut as") as it:
        weft.tensor_parallel(embeds(), ctx, plan={"0": "column", "1": "column", "3": "row"})
    cut(embeds(), ctx, tokens(), plan={"1": "column", "3": "row", **entries(f"{{{it.fix}}}")})
    fused = nn.ModuleDict({"qkv": nn.Linear(4, 12)})
    for wrong in ("column:5", "column:8,8"):
        with told("sharding/layers/tensor_checks.py", "do not add up to its outputs") as it:
            weft.tensor_parallel(fused, ctx, plan={"qkv": wrong})
    assert it.fix.startswith('"column:3" for queries, keys and values')
    weft.tensor_parallel(fused, ctx, plan={"qkv": "column:3"})
    with told("sharding/layers/tensor_checks.py", "have two styles") as it:
        weft.tensor_parallel(net(), ctx, plan={"0": "column", "[02]": "row"})
    assert it.fix == "patterns that do not overlap"
    cut(net(), ctx)
    model = LM()
    tied = {name: style for name, style in PLAN.items() if name != "head"}
    with told("sharding/layers/tensor_checks.py", "a tied parameter has different styles") as it:
        weft.tensor_parallel(model, ctx, plan=tied)
    cut(model, ctx, tokens(), plan={**tied, **entries(it.fix)})
    model = net()
    handle = hooked(model)
    with told("sharding/layers/tensor_checks.py", "then the hooks") as it:
        weft.tensor_parallel(model, ctx, plan=MLP)
    assert it.fix == "weft.tensor_parallel(model, ctx) first, then the hooks"
    handle.remove()
    hooked(weft.tensor_parallel(model, ctx, plan=MLP)[0])
    after = weft.tensor_parallel(net(), ctx, plan=MLP)
    with told("sharding/layers/tensor_checks.py", "parts of the plan are already sharded") as it:
        weft.tensor_parallel(nn.Sequential(after[0], net()), after[1], plan={"*.0": "column", "*.2": "row"})
    assert it.fix == "leave them out of the plan, or load the model without a plan of its own"
    cut(nn.Sequential(after[0], net()), after[1], plan={"1.0": "column", "1.2": "row"})


def sizes_are_not_divisible(ctx):
    small = nn.Sequential(nn.Embedding(1, 4), *net())
    with told("sharding/layers/tensor_checks.py", "has too few rows for the ranks") as it:
        weft.tensor_parallel(small, ctx, plan={"0": "vocab", "1": "column", "3": "row"})
    assert it.fix == "leave it out of the plan: it stays whole on every rank"
    cut(small, ctx, tokens(), plan={"1": "column", "3": "row"})
    odd = nn.Sequential(nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 4)), net())
    with told("sharding/layers/tensor_checks.py", "is not divisible by the") as it:
        weft.tensor_parallel(odd, ctx, plan={"*.0": "column", "0.1": "row", "1.2": "row"})
    assert it.fix == "leave it out of the plan"
    cut(odd, ctx, plan={"1.0": "column", "1.2": "row"})
    with told("sharding/layers/tensor_layers.py", "batches differ along") as it:
        weft.tensor_parallel(net(), weft.start(), plan=MLP, axis="data")
    cut(net(), it.run()["ctx"])


def heads_are_not_divisible(ctx):
    model = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 4))
    with told("sharding/layers/tensor_checks.py", "is not divisible by the") as it:
        weft.tensor_parallel(model, ctx, plan=MLP)
    cut(model, it.run()["ctx"])


def sequences_are_not_covered(ctx):
    plan = {name: style for name, style in PLAN.items() if name != "blocks.*.norm?"}
    with told("sharding/layers/tensor_checks.py", "needs one list of blocks") as it:
        weft.tensor_parallel(net(), ctx, plan=MLP, sequence=True)
    filled(it.fix, "model, ctx, plan=plan", model=net(), ctx=ctx, plan=MLP)
    with told("sharding/layers/tensor_checks.py", "may need the whole sequence") as it:
        weft.tensor_parallel(LM(), ctx, plan=plan, sequence=True)
    assert entries(it.fix) == {"blocks.*.norm1": "sequence", "blocks.*.norm2": "sequence"}
    cut(LM(), ctx, tokens(), plan={**plan, **entries(it.fix)}, sequence=True)
    model = LM()
    model.config = type("Config", (), {"output_hidden_states": True})()
    with told("sharding/layers/tensor_checks.py", "may need the whole sequence") as it:
        weft.tensor_parallel(model, ctx, plan=PLAN, sequence=True)
    cut(model, ctx, tokens(), plan=PLAN, **eval(f"dict({it.fix})"))


@pytest.mark.slow
def test_layers_cannot_be_cut():
    for mistakes in (plans_are_wrong, sizes_are_not_divisible, sequences_are_not_covered):
        run_ranks(mistakes, 2, mesh={"tensor": 2})
    run_ranks(heads_are_not_divisible, 4, mesh={"tensor": 4})


class OneProcess(weft.engines.TorchEngine):
    """An engine of which one process drives all devices; it has one."""

    name = "mine"
    check_dtype = values_replaced = apply_layout = lambda *_: None

    def num_devices(self):
        return 1

    def on_mesh(self, axes, data_axes, world_size):
        return self, axes

    def begin(self, device, seed):
        return type("Held", (), {"release": lambda _: None})()

    def fetch(self, tensors):
        return tensors


def test_an_engine_cannot_cut_layers():
    ctx = weft.local(engine=OneProcess())
    with told("sharding/layers/tensor_layers.py", "not supported by this engine") as it:
        weft.tensor_parallel(net(), ctx, plan=MLP)
    trains(it.run(model=net(), ctx=ctx)["model"])
