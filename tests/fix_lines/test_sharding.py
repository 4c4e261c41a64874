"""What cannot be sharded, cut or divided: `weft.sharding`."""

import pytest
import torch
from torch import nn

import weft
from tests.fix_lines.told import told
from tests.transforms.lm import LM, PLAN
from weft.testing import run_ranks

MLP = {"0": "column", "2": "row"}


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def net_on_meta(make=net):
    with weft.weights.on_meta():
        return make()


def trains(model, *optimizers, x=None):
    """A step of training."""
    model(torch.ones(2, 4) if x is None else x).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def filled(fix, arguments="model, ctx", **names):
    """The value of a line, with the other arguments of the program in the place of its dots."""
    return eval(fix.partition("  #")[0].replace("...", arguments), {"weft": weft, **names})


@pytest.fixture
def path(tmp_path):
    """Weights of a `net` of ones."""
    model = net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    state, ctx = weft.checkpointable({"model": model}, weft.local())
    return weft.save(state, tmp_path, 1, ctx)


# -- options and optimizers of a strategy ----------------------------------------------------------


def options_are_wrong(ctx):
    model = net()
    with told("sharding/shard_checks.py", "reshard_after_forward = {reshard!r}") as it:
        weft.fully_shard(model, ctx, reshard_after_forward=3)
    trains(filled(it.fix, model=model, ctx=ctx)[0])
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with told("sharding/shard_checks.py", "something else than optimizers") as it:
        weft.fully_shard(model, ctx, rebind=[torch.optim.lr_scheduler.StepLR(optimizer, 1)])
    filled(it.fix, model=model, ctx=ctx, optimizer=optimizer)
    trains(model, optimizer)
    model = net()
    stranger = torch.optim.AdamW(net().parameters())
    with told("sharding/shard_checks.py", "hold no parameter of") as it:
        weft.fully_shard(model, ctx, rebind=stranger)
    weft.fully_shard(model, ctx)
    trains(model, it.run(model=model, torch=torch)["optimizer"])
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with told("sharding/shard_checks.py", "would keep the old") as it:
        weft.fully_shard(model, ctx)
    filled(it.fix, model=model, ctx=ctx, optimizer=optimizer)
    trains(model, optimizer)
    model = net()
    optimizer, other = (torch.optim.AdamW(part.parameters()) for part in (model, model[0]))
    with told("sharding/shard_checks.py", "would keep the old") as it:
        weft.zero_partition(model, optimizer, ctx, stage=2)
    namespace = {"other_optimizer": other}
    it.error = other = None
    exec(it.fix, namespace)
    weft.zero_partition(model, optimizer, ctx, stage=2)
    trains(model, optimizer, torch.optim.AdamW(model[0].parameters()))


def parameters_cannot_be_sharded(ctx):
    words = torch.arange(4)
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    with told("sharding/shard_checks.py", "sparse gradients of") as it:
        weft.fully_shard(model, ctx)
    trains(eval(it.fix.partition(", or ")[2], {"weft": weft, "model": model, "ctx": ctx})[0], x=words)
    model = nn.Sequential(nn.Embedding(8, 4, sparse=False), nn.Linear(4, 4))
    trains(weft.fully_shard(model, ctx)[0], x=words)
    model = net()
    handle = model[0].weight.register_hook(lambda gradient: gradient)
    with told("sharding/shard_checks.py", "hooks on parameters of") as it:
        weft.fully_shard(model, ctx)
    assert it.fix.startswith("remove the hooks, or weft.fully_shard(..., ignored=...) ")
    other = net()
    other[0].weight.register_hook(lambda gradient: gradient)
    trains(weft.fully_shard(other, ctx, ignored=other[0])[0])
    handle.remove()
    trains(weft.fully_shard(model, ctx)[0])
    (model := net())[0].bfloat16()
    with told("sharding/shard_checks.py", "parameters of one unit have different dtypes") as it:
        weft.fully_shard(model, ctx)
    trains(weft.fully_shard(model, it.run(model=model, ctx=ctx)["ctx"])[0])
    assert it.fix.endswith("; or other units")
    (model := net())[0].bfloat16()
    weft.fully_shard(model, ctx, units="*")


def axes_are_wrong(ctx):
    model = net()
    with told("sharding/shard_module.py", "cannot be sharded over") as it:
        weft.fully_shard(model, ctx, axis=())
    assert it.fix == "weft.fully_shard(...) without axis: by default over all of them"
    trains(weft.fully_shard(model, ctx)[0])
    with told("sharding/shard_module.py", "cannot be sharded over") as it:
        weft.fully_shard(net(), weft.start(mesh={"a": 2, "b": 1, "c": 1}))
    trains(weft.fully_shard(net(), it.run()["ctx"])[0])


@pytest.mark.slow
def test_a_module_is_sharded_wrongly():
    for mistakes in (options_are_wrong, parameters_cannot_be_sharded, axes_are_wrong):
        run_ranks(mistakes, 2)


# -- modules on meta -------------------------------------------------------------------------------


def loaded(model, ctx):
    """Whether a module has the weights of the file, and trains."""
    with weft.full_params(model, ctx):
        assert all((p == 1).all() for p in model.parameters())
    trains(model)


class Table(nn.Module):
    """A buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, x):
        return x * self.table


class Scale(nn.Module):
    """A parameter that nothing draws."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.scale


def with_table():
    return nn.Sequential(*net(), Table())


def weights_are_given_wrongly(ctx, path):
    ones = {name: torch.ones_like(p) for name, p in net().named_parameters()}
    with told("sharding/shard_checks.py", "weights are for a module on meta") as it:
        weft.fully_shard(model := net(), ctx, weights=lambda: ones)
    it.run(model=model, weights=lambda: ones)
    model, after = weft.fully_shard(model, ctx)
    loaded(model, after)
    with told("sharding/shard_checks.py", "weights are for a module on meta") as it:
        weft.fully_shard(model := net(), ctx, weights=str(path))
    model, after = weft.fully_shard(model, ctx)
    it.run(model=model, path=path, ctx=after)
    loaded(model, after)
    for transform, options in ((weft.fully_shard, {}), (weft.tensor_parallel, {"plan": MLP})):
        with told("sharding/shard_checks.py", "weights = {weights!r} cannot be used") as it:
            transform(model := net_on_meta(), weft.start(mesh={"data": 1, "tensor": 2}), weights=path, **options)
        it.fix = it.fix.replace("...", "model, ctx, **options")
        after = it.run(model=model, ctx=weft.start(mesh={"data": 1, "tensor": 2}), path=path, options=options)["ctx"]
        loaded(model, after)
    start = weft.start(mesh={"data": 1, "tensor": 2})
    model, cut = weft.tensor_parallel(net_on_meta(), start, plan=MLP, weights="later")
    with told("sharding/shard_checks.py", "cannot be drawn, or sent") as it:
        weft.fully_shard(model, cut)
    after = it.run(model=model, ctx=cut, path=path)["ctx"]
    loaded(model, after)


def weights_are_missing(ctx, path):
    with torch.device("meta"):
        model = with_table()
    with told("sharding/meta.py", "weights do not fit") as it:
        weft.fully_shard(model, ctx)
    model = with_lines(first(it, ctx), "model", with_table)
    assert model[0].weight.is_meta
    trains(weft.fully_shard(model, ctx)[0])
    for make in (net, lambda: nn.Sequential(*net(), Scale())):
        model, given = net_on_meta(make), None if make is not net else {"0.weight": torch.ones(1)}
        with told("sharding/meta.py", "weights do not fit") as it:
            weft.fully_shard(model, ctx, weights=given)
        weights = {name: torch.ones_like(value, device="cpu") for name, value in model.state_dict().items()}
        model, after = filled(first(it, ctx), model=model, ctx=ctx, weights=weights)
        loaded(model, after)
    model = net_on_meta(make)
    optimizer = torch.optim.AdamW(model.parameters())
    with told("sharding/meta.py", "weights do not fit") as it:
        weft.zero_partition(model, optimizer, ctx, stage=3)
    names = {"model": model, "ctx": ctx, "optimizer": optimizer, "weights": weights}
    model, after = filled(first(it, ctx), "model, ctx, rebind=optimizer", **names)
    loaded(model, after)


def first(it, ctx):
    """The line that the first rank was told, where it reads for all."""
    return weft.broadcast(it.fix, ctx)


def with_lines(fix, name, make):
    """What a line makes that is `with ...: name = ...`."""
    names = {"weft": weft, "make": make}
    exec(fix.partition("  #")[0].replace("= ...", "= make()"), names)
    return names[name]


@pytest.mark.slow
def test_a_module_on_meta_has_no_values(path):
    run_ranks(weights_are_given_wrongly, 2, path)
    run_ranks(weights_are_missing, 2, path)


def test_a_module_on_meta_is_placed_without_values(path, tmp_path):
    plan, ctx = {"cpu": "1MB"}, weft.local()
    with told("weights/places/placed_tensors.py", "values are missing") as it:
        weft.place(net_on_meta(), ctx, plan)
    model, after = it.run(model=net_on_meta(), ctx=ctx, plan=plan, path=path)["model"], ctx
    with torch.no_grad():
        assert model(torch.ones(1, 4)).unique().item() == 41
    with torch.device("meta"):
        model = with_table()
    with told("weights/places/placed_tensors.py", "values are missing") as it:
        weft.place(model, ctx, plan, weights=path)
    model, after = weft.place(with_lines(it.fix, "model", with_table), ctx, plan, weights=path)
    with torch.no_grad():
        assert model(torch.ones(1, 4)).unique().item() == 41


# -- stages ----------------------------------------------------------------------------------------


def test_stages_are_planned_wrongly():
    layers = [nn.Linear(4, 4) for _ in range(4)]
    with told("sharding/stages.py", "check_module") as it:
        weft.plan_pipeline(layers, 2)
    it.run(model=nn.Sequential(*layers))
    with told("sharding/stages.py", "check_count") as it:
        weft.plan_pipeline(nn.Sequential(*layers), 0)
    it.run(model=nn.Sequential(*layers))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Linear(4, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


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
    with told("sharding/stages.py", "each parameter belongs to one stage") as it:
        weft.pipeline(Blocks(), ctx, stages=[["embed"], ["blocks"]])
    runs(filled(it.fix, model=Blocks(), ctx=ctx))
    for wrong in ("body", 1):
        with told("sharding/stages.py", "_name(what, one, names, known, fix)") as it:
            weft.pipeline(Blocks(), ctx, stages=[["embed", wrong], ["head"]])
        runs(filled(it.fix, model=Blocks(), ctx=ctx))
    model = LM()
    with told("sharding/stages.py", "tied weights would lie on several stages") as it:
        weft.pipeline(model, ctx)
    model.head.weight = nn.Parameter(model.emb.weight.detach().clone())
    weft.pipeline(model, ctx)
    assert "or stages=[...] that keep them together" in it.fix
    weft.pipeline(LM(), ctx, stages=[["emb", "pos", "blocks.0", "head"], ["blocks.1", "norm"]])


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
    model = Mixture(name="branches")
    with told("sharding/find_experts.py", "there are no experts in this") as it:
        weft.expert_parallel(model, ctx)
    model, _ = filled(it.fix, model=model, ctx=ctx)
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
    model, after = eval(it.fix.removesuffix(" before the other transforms"), {"weft": weft, "model": mixtures(), "ctx": ctx})
    weft.replicate(nn.Sequential(model), after)
    model = mixtures()
    handle = hooked(model[0].experts)
    with told("sharding/find_experts.py", "hooks on parameters of experts") as it:
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
        weft.tensor_parallel(embeds(), ctx, plan={"0": "column", "1": "column", "3": "row"})
    cut(embeds(), ctx, tokens(), plan={"1": "column", "3": "row", **entries(f"{{{it.fix}}}")})
    with told("sharding/layers/tensor_checks.py", "have two styles") as it:
        weft.tensor_parallel(net(), ctx, plan={"0": "column", "[02]": "row"})
    assert it.fix == "patterns that do not overlap"
    cut(net(), ctx)
    model = LM()
    tied = {name: style for name, style in PLAN.items() if name != "head"}
    with told("sharding/layers/tensor_checks.py", "a tied parameter has different styles") as it:
        weft.tensor_parallel(model, ctx, plan=tied)
    cut(model, ctx, tokens(), plan={**tied, **entries(it.fix)})
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


@pytest.mark.slow
def test_an_adapter_cannot_be_cut():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(planned(), peft.LoraConfig(r=2, target_modules=["0"], use_dora=True))
    with told("sharding/layers/adapter_layers.py", "an adapter in {name} cannot be cut") as it:
        weft.tensor_parallel(model, weft.local())
    trains(it.run(model=model, ctx=weft.local())["model"])


# -- units, and owners of parameters ---------------------------------------------------------------


def test_units_are_chosen_wrongly():
    ctx = weft.local()
    with told("sharding/units.py", "units are never called") as it:
        weft.fully_shard(Blocks(), ctx, units="blocks")
    filled(it.fix, model=Blocks(), ctx=ctx)


class Summed:
    """The gradient of one parameter is summed over fewer ranks than the others."""

    def layout(self, name):
        return weft.contract.Layout(reduce_over=("data",)) if name == "1.weight" else None


class OfTheirOwn(Summed):
    def layout(self, name):
        return weft.contract.Layout(reduce_over=("data",)) if name.startswith("2.") else None


@weft.transform()
def with_experts(module, ctx, *, offer):
    return module, ctx.offering(offer)


def experts_are_beside_others(ctx):
    with told("sharding/units.py", "are to be sharded over different ranks") as it:
        weft.fully_shard(*with_experts(nn.Sequential(nn.ReLU(), nn.Linear(4, 4)), ctx, offer=Summed()))
    assert it.fix == "put the experts into a module of their own"
    trains(weft.fully_shard(*with_experts(net(), ctx, offer=OfTheirOwn()))[0])


def matrices():
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))


def parameters_cannot_have_owners(ctx):
    from torch.distributed.tensor import DTensor, Shard

    leave = 'leave by="owner" out of the call of gather_step'
    model, after = weft.fully_shard(net(), ctx)
    optimizer = torch.optim.AdamW(model.parameters())
    with told("sharding/owner_step.py", "has no effect on") as it:
        weft.gather_step(optimizer, after, by="owner")
    assert it.fix == leave
    trains(model, weft.gather_step(optimizer, after)[0])
    model = matrices()
    model, optimizer, apart = weft.local_steps(model, torch.optim.Muon(model.parameters()), ctx, every=2)
    with told("sharding/owner_step.py", "cannot have one owner each") as it:
        weft.gather_step(optimizer, apart, by="owner")
    assert it.fix == leave
    trains(model, weft.gather_step(optimizer, apart)[0])
    optimizer = torch.optim.Muon((model := matrices()).parameters())
    optimizer.eval = lambda: None
    with told("sharding/owner_step.py", "outside step, by its state") as it:
        weft.gather_step(optimizer, ctx, by="owner")
    assert it.fix == leave
    trains(model, weft.gather_step(optimizer, ctx)[0])
    rows = torch.ones(1 if ctx.rank else 3, 4)
    model[1].weight = nn.Parameter(DTensor.from_local(rows, ctx.mesh, [Shard(0)], shape=(4, 4), stride=(4, 1)))
    with told("sharding/owner_step.py", "is not cut in chunks") as it:
        weft.gather_step(torch.optim.Muon(model.parameters()), ctx, by="owner")
    found = it.run(model=matrices(), ctx=ctx)
    optimizer, _ = weft.gather_step(torch.optim.Muon(found["model"].parameters()), found["ctx"], by="owner")
    trains(found["model"], optimizer)


@torch.compiler.set_stance("force_eager")  # torchao compiles its step, which takes a minute
def states_cannot_be_divided(ctx):
    from torchao.optim import AdamW8bit

    def made():
        model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
        return model, AdamW8bit(model.parameters(), lr=0.01)

    model, optimizer = made()
    with told("sharding/owner_step.py", "cannot be divided among ranks") as it:
        weft.gather_step(optimizer, ctx)
    trains(model, it.run(optimizer=optimizer, ctx=ctx)["optimizer"], x=torch.ones(2, 64))
    model, optimizer = made()
    with told("sharding/owner_step.py", "cannot be divided among ranks") as it:
        weft.zero_partition(model, optimizer, ctx, stage=2)
    trains(model, it.run(model=model, optimizer=optimizer, ctx=ctx)["optimizer"], x=torch.ones(2, 64))


@pytest.mark.slow
def test_parameters_cannot_lie_so():
    run_ranks(experts_are_beside_others, 4, mesh={"data": 2, "expert": 2})
    run_ranks(parameters_cannot_have_owners, 2)
    pytest.importorskip("torchao")
    run_ranks(states_cannot_be_divided, 2)
