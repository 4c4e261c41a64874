"""Modules, weights and optimizers that cannot be sharded: `weft.sharding`."""

import pytest
import torch
from torch import nn

import weft
from tests.fix_lines.told import told
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
    line, _, dense = it.fix.partition(" for each, and this for the rest of the model; or ")
    own = eval(line, {"weft": weft, "embedding": model[0], "ctx": ctx})[1]
    weft.fully_shard(model[1], own)
    trains(model, torch.optim.SparseAdam(model[0].parameters()), torch.optim.Adam(model[1].parameters()), x=words)
    assert dense == "sparse=False in these embeddings, and torch.optim.Adam in place of SparseAdam"
    model, _ = weft.fully_shard(nn.Sequential(nn.Embedding(8, 4, sparse=False), nn.Linear(4, 4)), ctx)
    trains(model, torch.optim.Adam(model.parameters()), x=words)
    model = net()
    handle = model[0].weight.register_hook(lambda gradient: gradient)
    with told("sharding/shard_checks.py", "type(module).__name__, named") as it:
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
    model = it.run(model=net_on_meta(), ctx=ctx, plan=plan, path=path)["model"]
    with torch.no_grad():
        assert model(torch.ones(1, 4)).unique().item() == 41
    with torch.device("meta"):
        model = with_table()
    with told("weights/places/placed_tensors.py", "values are missing") as it:
        weft.place(model, ctx, plan, weights=path)
    model, _ = weft.place(with_lines(it.fix, "model", with_table), ctx, plan, weights=path)
    with torch.no_grad():
        assert model(torch.ones(1, 4)).unique().item() == 41


# -- units, and owners of parameters ---------------------------------------------------------------


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


@pytest.mark.slow
def test_parameters_cannot_lie_so():
    run_ranks(experts_are_beside_others, 4, mesh={"data": 2, "expert": 2})
    run_ranks(parameters_cannot_have_owners, 2)
