"""What calls have in common: arguments, metrics, random numbers, the watched loop, `check` and `assemble`."""

import pathlib
import sys
import tomllib
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import weft
from tests.fix_lines.told import told
from weft.testing import fake, run_ranks

EXTRAS = tomllib.loads((pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
EXTRAS = EXTRAS["optional-dependencies"]


def installs(fix, package):
    """Whether a line installs a package, by an extra of weft."""
    command, extra = fix.removesuffix("]'").split("'torchweft[")
    return command == "pip install " and any(one.startswith(package) for one in EXTRAS[extra])


def _net():
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def _loader(samples=8, **options):
    return DataLoader(TensorDataset(torch.randn(samples, 4), torch.arange(samples) % 3), batch_size=2, **options)


def test_arguments(monkeypatch):
    with weft.start(device="cpu") as ctx:
        model = nn.Linear(2, 2)
        with told("checks.py", "model, ctx = weft.{what}(model, ctx)") as it:
            weft.replicate(None, ctx)
        it.run(model=model, ctx=ctx)

        optimizer = torch.optim.SGD(model.parameters())
        with told("checks.py", "optimizer, ctx = weft.{what}(optimizer, ctx)") as it:
            weft.gather_step(_net(), ctx)
        it.run(optimizer=optimizer, ctx=ctx)
        with told("checks.py", "optimizer, ctx = weft.{what}(optimizer, ctx)") as it:
            weft.gather_step([torch.optim.SGD(model.parameters())], ctx)
        optimizer = it.run(model=nn.Sequential(_net()), ctx=ctx, torch=torch)["optimizer"]
        weft.gather_step(optimizer, ctx)

        with told("checks.py", "is unknown") as it:
            weft.gather_step(torch.optim.SGD(_net().parameters()), ctx, by="first")
        it.fix = it.fix.replace("...", "optimizer, ctx")
        it.run(gather_step=weft.gather_step, optimizer=torch.optim.SGD(_net().parameters()), ctx=ctx)

        lazy = nn.LazyLinear(2)
        with told("checks.py", "have no shape yet") as it:
            weft.replicate(lazy, ctx)
        it.run(model=lazy, example_batch=torch.ones(2, 4))
        weft.replicate(lazy, ctx)

    monkeypatch.setattr("torch.__version__", "2.12.0")
    with told("checks.py", "torch>={least}") as it:
        weft.step_in_backward(torch.optim.SGD(model.parameters()), fake(world_size=2))
    monkeypatch.setattr("torch.__version__", it.fix.removeprefix("pip install 'torch>=").removesuffix("'"))
    with pytest.raises(weft.errors.ContractError, match="fully_shard"):  # further on
        weft.step_in_backward(torch.optim.SGD(model.parameters()), fake(world_size=2))

    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with told("checks.py", "MissingExtra") as it:
        weft.monitoring.report.page.render([])
    assert installs(it.fix, "plotly")


def test_metrics():
    with weft.start(device="cpu") as ctx:
        ids = weft.metrics.SampleIds(ids=torch.tensor([1, 0]), valid=torch.tensor([True, True]))
        losses = torch.tensor([0.5, 0.25])
        with told("metrics.py", "leaves do not have one entry per row") as it:
            weft.metrics.gather_metrics({"loss": losses.mean()}, ctx, ids=ids)
        it.run(losses=losses, ctx=ctx, ids=ids)

        value = 0.5
        with told("metrics.py", "is neither a tensor nor a list") as it:
            weft.metrics.gather_metrics({"loss": value}, ctx, ids=ids)
        assert it.run(value=value, ctx=ctx, ids=ids)

        with told("metrics.py", "weighted_mean: a weight is negative") as it:
            weft.metrics.weighted_mean(torch.tensor(0.5), ctx, weight=-1)
        it.run(loss=torch.tensor(0.5), ctx=ctx, batch=losses)

        with told("metrics.py", "total_count([count]") as it:
            weft.metrics.denominator(-1, ctx)
        it.run(batch=losses, ctx=ctx)

        model, x, y = _net(), torch.ones(2, 4), torch.tensor([0, 1])
        batch, count = {"x": x, "owner": "nobody"}, len(x)
        batch["y"] = y[:1]  # rows that do not agree
        windows = weft.accumulate_grads(model, [batch], ctx, steps=1)[1]
        for window in windows:
            for _ in window:
                with told("metrics.py", "samples of a batch cannot be counted") as it:
                    assert window.share
                loss_sum = cross_entropy(model(x), y, reduction="sum")
                assert it.run(loss_sum=loss_sum, count=count, ctx=ctx)["loss"] == loss_sum / 2
        for window in windows:
            assert window.denominator(lambda batch: len(batch["x"])) == 2


def test_metrics_of_an_elastic_job():
    with weft.start(elastic="replica", device="cpu") as whole:
        loader, ctx = weft.shard_data(_loader(), whole)
        model, ctx = weft.replicate(_net(), ctx)
        for x, y in loader:
            with told("metrics.py", "replicas of an elastic job") as it:
                weft.metrics.denominator(len(y), ctx)
            it.run(cross_entropy=cross_entropy, model=model, loader=loader, x=x, y=y)["loss"].backward()


def test_random_numbers():
    with weft.start(device="cpu") as ctx:
        with told("rng.py", "'worker', worker") as it:
            weft.rng.worker_seeds(-1, ctx)
        it.run(ctx=ctx)
        with told("rng.py", "'epoch', epoch") as it:
            weft.rng.worker_seeds(0, ctx, epoch=-1)
        it.run(ctx=ctx)
        with told("rng.py", "'seed', seed") as it:
            weft.rng.set_seed(-1, ctx)
        it.run(ctx=ctx)
        with told("rng.py", "'ranks', ranks") as it:
            weft.rng.set_seed(0, ctx, ranks="equal")
        it.run(ctx=ctx)
        loader, _ = weft.shard_data(_loader(), ctx, with_ids=True)
        for _, rows in loader:
            with told("rng.py", "ids cannot be used") as it:
                weft.rng.keyed_uniform(rows.ids.float(), seed=ctx.seed, epoch=0)
            it.run(rows=rows, ctx=ctx)


# -- on two ranks --------------------------------------------------------------------------------------


def _step(optimizer, loss):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _loops(ctx):
    def begin(samples=16, of_model=weft.replicate):
        loader, own = weft.shard_data(_loader(samples), ctx)
        model, own = of_model(_net(), own) if of_model else (_net(), own)
        return model, torch.optim.SGD(model.parameters(), 0.1), loader, own

    names = {"cross_entropy": cross_entropy}
    model, optimizer, loader, own = begin()
    model, windows, own = weft.accumulate_grads(model, loader, own, steps=2)
    with told("loop_watch.py", "windows nobody uses") as it:
        for x, y in loader:
            _step(optimizer, cross_entropy(model(x), y) * loader.share)
    it.fix = it.fix.replace("...", "(cross_entropy(model(x), y) * window.share).backward()") + "\n    optimizer.step()"
    it.run(model=model, optimizer=optimizer, windows=windows, **names)

    model, optimizer, loader, own = begin(samples=15)
    with told("loop_watch.py", "unweighted loss") as it:
        for x, y in loader:
            _step(optimizer, cross_entropy(model(x), y))
    model, optimizer, loader, own = begin(samples=15)
    for x, y in loader:
        _step(optimizer, it.run(model=model, loader=loader, x=x, y=y, **names)["loss"])

    def collate(samples):
        kept = [sample for sample in samples if sample[1] != ctx.rank]  # leaves some out
        return torch.stack([x for x, _ in kept]), torch.stack([y for _, y in kept])

    model, own = weft.replicate(_net(), ctx)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader, own = weft.shard_data(_loader(16, collate_fn=collate), own)
    with told("loop_watch.py", "unweighted loss") as it:
        for x, y in loader:
            _step(optimizer, cross_entropy(model(x), y))
    for x, y in loader:
        _step(optimizer, it.run(model=model, ctx=own, x=x, y=y, **names)["loss"])

    model, optimizer, loader, own = begin(of_model=None)
    with told("loop_watch.py", "ranks train apart") as it:
        for x, y in loader:
            _step(optimizer, cross_entropy(model(x), y) * loader.share)
            weft.barrier(ctx)  # the rank that comes first does not wait for the values of the others
    found = it.run(model=_net(), ctx=own)
    model = found["model"]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in loader:
        _step(optimizer, cross_entropy(model(x), y) * loader.share)


def _norms_over_ranks(ctx):
    def with_norms(uneven):
        loader, own = weft.shard_data(_loader(15), ctx, uneven=uneven)
        model, own = weft.sync_batch_norm(nn.Sequential(nn.BatchNorm1d(4), _net()), own)
        model, own = weft.replicate(model, own)
        return model, torch.optim.SGD(model.parameters(), 0.1), loader

    model, optimizer, loader = with_norms("pad")
    weft.barrier(ctx)
    if ctx.rank:  # which repeats one
        with told("loop_watch.py", "repeat others") as it:
            for x, y in loader:
                _step(optimizer, cross_entropy(model(x), y) * loader.share)
        assert 'uneven="empty"' in it.fix
    else:
        for x, y in loader:
            _step(optimizer, cross_entropy(model(x), y) * loader.share)
    model, optimizer, loader = with_norms("empty")
    for x, y in loader:
        _step(optimizer, cross_entropy(model(x), y, reduction="sum") / weft.metrics.denominator(len(y), ctx))


@pytest.mark.slow
def test_loops():
    run_ranks(_loops, 2)
    run_ranks(_norms_over_ranks, 2)


def test_an_incomplete_program():
    ctx = fake(world_size=2)
    with told("completeness.py", "the program is not complete") as it:
        weft.check(ctx, loader=_loader())
    found = it.run(loader=_loader(), ctx=ctx)
    weft.check(found["ctx"], loader=found["loader"])


def _incomplete(ctx, folder):
    model, optimizer = _net(), torch.optim.SGD(_net().parameters())
    names = {"loader": _loader(), "model": model, "torch": torch, "ctx": ctx}
    with told("completeness.py", "the program is not complete") as it:
        weft.check(ctx, model=model, optimizer=optimizer, loader=names["loader"])
    assert it.fix.count("\n") == 2
    it.fix = it.fix.replace("\n            ", "\n")  # of which the error makes a column
    found = it.run(**names)
    weft.check(found["ctx"], model=found["model"], optimizer=found["optimizer"], loader=found["loader"])

    model, _ = weft.replicate(_net(), ctx.on("shard"))
    with told("completeness.py", "the program is not complete") as it:
        weft.check(ctx, model=model)
    found = it.run(model=_net(), ctx=ctx)
    weft.check(found["ctx"], model=found["model"])

    model, sharded = found["model"], found["ctx"]
    if ctx.is_main:
        with told("completeness.py", "the program is not complete") as it:
            weft.check(sharded.only(0), model=model)
    it.fix = weft.broadcast(it.fix, ctx)
    state, sharded = weft.checkpointable({"model": model}, sharded)
    it.run(state=state, directory=folder, step=1, ctx=sharded)
    with weft.full_params(model, sharded):
        if ctx.is_main:
            weft.check(sharded.only(0), model=model)


@pytest.mark.slow
def test_incomplete_programs(tmp_path):
    run_ranks(_incomplete, 4, str(tmp_path), mesh={"replica": 2, "shard": 2})


class Number(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self):
        return self.value


def _trained(ctx, *, call=None, fix=""):
    """What three steps make of a number that is trained on the samples of all ranks."""
    p = nn.Parameter(torch.zeros((), dtype=torch.float64))
    number = (lambda: p) if call is None else call(p)
    optimizer = torch.optim.AdamW([p], 0.1)
    entropy = torch.linspace(-1, 2, 8, dtype=torch.float64).chunk(ctx.world_size)[ctx.rank]
    for _ in range(3):
        (number().exp() * entropy).mean().backward()
        exec(fix, {"weft": weft, "p": p, "ctx": ctx})
        optimizer.step()
        optimizer.zero_grad()
    return p.item()


def _container(ctx):
    results = [_trained(ctx)] if ctx.world_size == 1 else []
    if ctx.world_size > 1:
        for numbers in (nn.ParameterList([torch.zeros(1)]), nn.ParameterDict({"alpha": torch.zeros(1)})):
            with told("completeness.py", "the program is not complete") as it:
                weft.check(ctx, model=numbers, optimizer=torch.optim.SGD(numbers.parameters()))
            assert "by hand, which check cannot know" in str(it.error) and "left out of weft.check" in it.fix
            results.append(_trained(ctx, fix=it.fix))
            whole, _ = weft.replicate(numbers, ctx)
            with told("engines/torch/hooks/bypassed_forward.py", "past forward") as it:
                next(whole.parameters()).sum().backward()
            assert "has no forward" in str(it.error)
            results.append(_trained(ctx, fix=it.fix))
    results.append(_trained(ctx, call=lambda p: weft.replicate(Number(p), ctx)[0]))  # as both say

    model = nn.ModuleDict({"actor": nn.Sequential(_net()), "critics": nn.ModuleList([_net()])})
    if ctx.world_size > 1:
        with told("completeness.py", "the program is not complete") as it:
            weft.check(ctx, model=model)
        assert it.fix.splitlines()[0].startswith("model.actor, ctx = weft.replicate(model.actor, ctx)")
        it.fix = it.fix.replace("\n            ", "\n")
        found = it.run(model=model, ctx=ctx)
        weft.check(found["ctx"], model=model)
        model = nn.ModuleDict({"actor": nn.Sequential(_net()), "critics": nn.ModuleList([_net()])})
        whole, _ = weft.replicate(model, ctx)
        with told("engines/torch/hooks/bypassed_forward.py", "past forward") as it:
            whole["critics"][0](torch.ones(1, 4)).sum().backward()
        assert it.fix == "model.critics[0], ctx = weft.replicate(model.critics[0], ctx)"
        it.run(model=(model := nn.ModuleDict({"critics": nn.ModuleList([_net()])})), ctx=ctx)
        model["critics"][0](torch.ones(1, 4) * ctx.rank).sum().backward()
        gradient = model["critics"][0].weight.grad
        assert torch.equal(gradient, torch.full_like(gradient, (ctx.world_size - 1) / 2))
    return results


@pytest.mark.slow
def test_containers_that_are_never_called():
    ((expected, *_),) = run_ranks(_container, 1)
    for ranks in (2, 4):
        for found in run_ranks(_container, ranks):
            assert len(found) == 5 and found == pytest.approx([expected] * 5, abs=1e-12)


def test_assemble():
    with weft.start(device="cpu") as ctx:
        names = {"ctx": ctx, "partial": partial, "torch": torch}
        optimizer = torch.optim.AdamW(_net().parameters())

        def follow(given):
            it.fix = it.fix.replace(", ...", given)
            it.run(model=_net(), loader=_loader(), optimizer=lambda m: torch.optim.SGD(m.parameters()), **names)

        with told("assembly.py", "is unknown") as it:
            weft.assemble(ctx, model=_net(), strategy="zero")
        follow(", optimizer=optimizer")
        with told("assembly.py", "made when the parameters are final") as it:
            weft.assemble(ctx, model=_net(), optimizer=optimizer)
        follow("")
        strategy = partial(weft.zero_partition, stage=1)
        with told("assembly.py", "this strategy needs the optimizer") as it:
            weft.assemble(ctx, model=_net(), strategy=strategy)
        names["strategy"] = strategy
        follow(", strategy=strategy")
        with told("assembly.py", "windows are made of a loader") as it:
            weft.assemble(ctx, model=_net(), accumulate=2)
        follow("")
