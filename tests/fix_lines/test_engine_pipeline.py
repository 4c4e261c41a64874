"""Layers on several ranks, one stage after the other: `weft.engines.torch.pipeline`."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

import weft
from tests.fix_lines.told import printed, told
from weft.testing import RanksFailed, run_ranks


class Net(nn.Module):
    """Four layers; `between` is done between them, and `norm` is one of them."""

    def __init__(self, between=torch.tanh, norm=nn.Identity, last=nn.Identity):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.layers[1] = nn.Sequential(self.layers[1], norm())
        self.between, self.last = between, last()

    def forward(self, x, scale=None):
        for layer in self.layers:
            x = self.between(layer(x))
        return self.last(x if scale is None else x * scale)


NAMES = [f"layers.{number}" for number in range(4)]


def _data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator)


def _as_one(model, net, *call, loss=mse_loss):
    """A call gives the loss of one process, and backward its gradients."""
    found, expected = model(*call), loss(net(*call[:-1]), call[-1])
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    found.backward()
    expected.backward()
    for p, q in zip(model.parameters(), net.parameters(), strict=True):
        assert p.is_meta or torch.allclose(p.grad, q.grad, atol=1e-6)


def _inputs(ctx):
    x, y = _data()
    model, after = weft.pipeline(Net(), ctx, loss=mse_loss, micro_batches=4)
    with told("engines/torch/pipeline/batch_parts.py", "takes a target") as it:
        model(x)
    it.run(model=model, x=x, y=y)["loss"].backward()
    with told("engines/torch/pipeline/batch_parts.py", "there is nothing to cut") as it:
        model(torch.ones(()), torch.ones(()))
    it.run(model=model, x=x, y=y)

    with told("engines/torch/pipeline/batch_parts.py", "cannot be cut into") as it:
        model(x[:6], y[:6])
    it.fix = "loader = " + it.fix.replace("...", "TensorDataset(x, y)")
    for batch in it.run(DataLoader=DataLoader, TensorDataset=TensorDataset, x=x, y=y)["loader"]:
        model(*batch)
    with told("engines/torch/pipeline/batch_parts.py", "cannot be cut into") as it:
        model(x[:0], y[:0])
    names = {"weft": weft, "loader": DataLoader(TensorDataset(x, y), batch_size=4), "ctx": after}
    loader, _ = eval(it.fix, names)
    for batch in loader:
        model(*batch).backward()

    scale = torch.arange(4.0)
    with told("engines/torch/pipeline/batch_parts.py", "other numbers of rows") as it:
        model(x, scale, y)
    model.zero_grad()
    _as_one(model, Net(), x, eval(it.fix.partition("  #")[0], {"x": scale}), y)
    with told("engines/torch/pipeline/batch_parts.py", "no gradient flows back") as it:
        model(x.clone().requires_grad_(), y)
    model(it.run(x=x.clone().requires_grad_())["x"], y).backward()


class Configured(Net):
    """With options as models of transformers have them."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(output_hidden_states=True, output_attentions=True)

    def forward(self, x, labels, use_cache=None, past_key_values=None, output_router_logits=None):
        return mse_loss(super().forward(x), labels)


def _flags(ctx):
    x, y = _data()
    with told("engines/torch/pipeline/batch_parts.py", "would collect values") as it:
        weft.pipeline(Configured(), ctx)
    model = Configured()
    it.run(model=model)
    model, _ = weft.pipeline(model, ctx)
    with told("engines/torch/pipeline/batch_parts.py", "would collect values") as it:
        model(x, y, use_cache=True, past_key_values=[x], output_router_logits=True)
    options, _, rest = it.fix.partition(" in the call")
    assert rest == ""
    eval(f"model(x, y, {options})", {"model": model, "x": x, "y": y}).backward()


def _root(output, target):
    """A loss that is no mean over rows."""
    return cross_entropy(output, target).sqrt()


def _losses(ctx):
    x, _ = _data()
    labels = torch.tensor([0, -100, -100, 1, 2, 3, 0, 1])
    model, _ = weft.pipeline(Net(), ctx, loss=cross_entropy, micro_batches=4)
    with told("engines/torch/pipeline/losses.py", "is not the loss of the batch") as it:
        model(x, labels)
    model = Net()
    it.fix = it.fix.replace("...", "model, ctx, micro_batches=4", 1)
    it.run(model=model, ctx=ctx, cross_entropy=cross_entropy)
    _as_one(model, Net(), x, labels, loss=cross_entropy)
    options = eval(f"dict({it.fix.rpartition('over rows, ')[2]})")
    single, _ = weft.pipeline(Net(), ctx, loss=_root, **options)
    _as_one(single, Net(), x, labels, loss=_root)
    loss = model(x, labels)
    loss.backward()
    with told("engines/torch/pipeline/losses.py", "has one backward pass") as it:
        loss.backward()
    it.run(model=model, x=x, y=labels)
    with told("engines/torch/pipeline/losses.py", "has one backward pass") as it:
        model(x, labels).backward(create_graph=True)
    it.run(model=model, x=x, y=labels)


def _rows(ctx):
    x, y = _data()
    model, _ = weft.pipeline(Net(norm=lambda: nn.BatchNorm1d(4)), ctx, loss=mse_loss, micro_batches=4)
    with told("engines/torch/pipeline/row_probe.py", "rows of a batch are mixed") as it:
        model(x, y)
    first, second = it.fix.split(", or ")
    assert first == "LayerNorm or GroupNorm for each row"
    model, _ = weft.pipeline(Net(norm=lambda: nn.LayerNorm(4)), ctx, loss=mse_loss, micro_batches=4)
    _as_one(model, Net(norm=lambda: nn.LayerNorm(4)), x, y)
    model = Net(norm=lambda: nn.BatchNorm1d(4))
    eval(second.replace("...", "model, ctx, loss=mse_loss"), {**globals(), "model": model, "ctx": ctx})
    _as_one(model, Net(norm=lambda: nn.BatchNorm1d(4)), x, y)


def _planned(it, ctx, **options):
    """Write what the line says in place of the same options."""
    model, (x, y) = Net(), _data()
    line = it.fix if isinstance(it.fix, str) else it
    written = eval(line.replace("weft.pipeline(..., ", "dict("), {"weft": weft, "model": model})
    model, _ = weft.pipeline(model, ctx, **{"loss": mse_loss, **options, **written})
    _as_one(model, Net(), x, y)


def _schedules(ctx):
    def stages(number):
        size = 4 // number
        return [NAMES[size * at : size * at + size] for at in range(number)]

    two, four = {"stages": stages(2), "micro_batches": 1, "schedule": "looped_bfs"}, {"stages": stages(4)}
    with told("engines/torch/pipeline/schedules.py", "fit the number of stages") as it:
        weft.pipeline(Net(), ctx, loss=mse_loss, **two)
    _planned(it, ctx, **two)
    with told("engines/torch/pipeline/schedules.py", "fit the number of stages") as it:
        weft.pipeline(Net(), ctx, loss=mse_loss, **four)
    _planned(it, ctx, **four)
    three = {"stages": [NAMES[:1], NAMES[1:2], NAMES[2:]], "schedule": "interleaved_1f1b"}
    with told("engines/torch/pipeline/schedules.py", "fit the number of stages") as it:
        weft.pipeline(Net(), ctx, loss=mse_loss, **three)
    _planned(it, ctx, **three)

    for options in (
        {"schedule": "1f1b", "micro_batches": 1},
        {"schedule": "interleaved_zero_bubble", "micro_batches": 5},
    ):
        with told("engines/torch/pipeline/schedules.py", "fit the number of micro-batches") as it:
            weft.pipeline(Net(), ctx, loss=mse_loss, **options)
        first, second = it.fix.split("), or ")
        _planned(SimpleNamespace(fix=f"{first})"), ctx, **options)
        _planned(SimpleNamespace(fix=f"weft.pipeline(..., {second})"), ctx, **{**options, "micro_batches": 1})


def _past_the_module(ctx):
    x, y = _data()
    model, after = weft.pipeline(Net(), ctx, loss=mse_loss, micro_batches=4)
    with told("engines/torch/pipeline/stage_forward.py", "a layer of another stage") as it:
        model.layers[0 if ctx.rank else 3](x)
    call, undone = it.fix.split("  # or ")
    eval(call.replace("...", "x, y"), {"model": model, "x": x, "y": y}).backward()
    model, _ = eval(undone.partition(" to have")[0], {"weft": weft, "model": model, "ctx": after})
    assert torch.equal(model.layers[0](x), Net().layers[0](x))


@pytest.mark.slow
@pytest.mark.parametrize("mistakes", [_inputs, _flags, _losses, _rows, _schedules, _past_the_module])
def test_what_all_ranks_are_told(mistakes):
    run_ranks(mistakes, 2, mesh={"pipeline": 2})


# -- what one rank is told, with which all end -------------------------------------------------------


class Changed(nn.Module):
    """A layer, and what is done before or after it."""

    def __init__(self, layer, before=None, after=None):
        super().__init__()
        self.layer, self.before, self.after = layer, before or nn.Identity(), after or nn.Identity()

    def forward(self, x):
        return self.after(self.layer(self.before(x)))


def _changed(**changes):
    """A net with such layers, by number."""
    model = Net(between=nn.Identity())
    for name, options in changes.items():
        number = int(name.removeprefix("at_"))
        model.layers[number] = Changed(model.layers[number], **options)
    return model


def _doubled(x):
    """Rows, chosen by their values."""
    rows = (x[:, 0] > 0).nonzero()[:, 0]
    return x.index_add(0, rows, x[rows])


def _trimmed(x):
    """Rows of different lengths, as long as the longest one."""
    x = torch.tanh(x)
    keep = torch.arange(4) < 2 + 2 * (x[:, :1] > 0)
    return (x * keep)[:, : int(keep.any(0).sum())]


def _padded(x):
    return nn.functional.pad(x, (0, 4 - x.shape[1]))


def _as_dict(x):
    return {"x": torch.tanh(x)}


def _of_dict(values):
    return values["x"]


class Gained(Net):
    """A parameter is used between two layers of the second stage."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.arange(4.0))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = layer(x * self.gain if number == 3 else x)
        return x


class Gain(nn.Module):
    """It, in a layer."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.arange(4.0))

    def forward(self, x):
        return x * self.gain


def _gained():
    return _changed(at_2={"after": Gain()})


class Skipping(Net):
    """What the first layer gives is needed at the end, too."""

    def __init__(self, past=3):
        super().__init__()
        self.past = past

    def forward(self, x):
        x = first = self.layers[0](x)
        for number, layer in enumerate(self.layers[1:], start=1):
            x = layer(x + first if number == self.past else x)
        return x + first if self.past == 4 else x


class Keeping(Changed):
    def forward(self, x, kept):
        return super().forward(x), kept


class Through(Skipping):
    """The same, passed on by those in between."""

    def __init__(self, past=3):
        super().__init__(past)
        for number in range(1, past):
            self.layers[number] = Keeping(self.layers[number])

    def forward(self, x):
        x = kept = self.layers[0](x)
        for layer in self.layers[1 : self.past]:
            x, kept = layer(x, kept)
        return self.layers[3](x + kept) if self.past == 3 else x + kept


class Noting(nn.Module):
    """A layer that reads what another one has left on an object."""

    def __init__(self, layer, notes, *, is_reader):
        super().__init__()
        self.layer, self.is_reader, self.__dict__["notes"] = layer, is_reader, notes

    def forward(self, x):
        if self.is_reader:
            return self.layer(x + getattr(self.notes, "first", 0.0))
        self.notes.first = self.layer(x)
        return self.notes.first


def _noting():
    model, notes = Net(between=nn.Identity()), SimpleNamespace()
    for number in (0, 3):
        model.layers[number] = Noting(model.layers[number], notes, is_reader=number == 3)
    return model


def _notes(ctx):
    with told("engines/torch/pipeline/row_probe.py", "past the arguments") as it:
        model, _ = weft.pipeline(_noting(), ctx, loss=mse_loss, micro_batches=4)
        model(*_data())
    assert it.fix.startswith("x, kept = layer(x, kept)")
    model, _ = weft.pipeline(Through(), ctx, loss=mse_loss, micro_batches=4)
    _as_one(model, Through(), *_data())


def _own_batches(ctx):
    with told("engines/torch/pipeline/row_probe.py", "different batches") as it:
        model, _ = weft.pipeline(Through(), ctx, loss=mse_loss, micro_batches=4)
        x, y = _data()
        model(x + ctx.rank, y)
    loader = DataLoader(TensorDataset(*_data()), batch_size=8)
    names = {"weft": weft, "loader": loader, "ctx": ctx}
    exec(it.fix, names)
    model, _ = weft.pipeline(Through(), ctx, loss=mse_loss, micro_batches=4)
    for batch in names["loader"]:
        _as_one(model, Through(), *batch)


@pytest.mark.slow
def test_batches_that_differ_along_the_stages():
    run_ranks(_own_batches, 2, mesh={"pipeline": 2})


@pytest.mark.slow
def test_what_goes_past_the_arguments():
    run_ranks(_notes, 2, mesh={"pipeline": 2})


def _call(ctx, make, *args, changes=None, **options):
    model, _ = weft.pipeline(make(*args, **(changes or {})), ctx, micro_batches=4, **options)
    model(*_data()) if "loss" in options else model(_data()[0])


def _told(make, *args, **options):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_call, 2, make, *args, mesh={"pipeline": 2}, **options)
    return str(failed.value)


def _works(ctx, make, *args, changes=None, **options):
    model, _ = weft.pipeline(make(*args, **(changes or {})), ctx, loss=mse_loss, micro_batches=4, **options)
    _as_one(model, make(*args, **(changes or {})), *_data())


def _follow(make, *args, **options):
    run_ranks(_works, 2, make, *args, mesh={"pipeline": 2}, **options)


def _with_classes(ctx, fix):
    y, model = torch.arange(8) % 4, Net()
    exec(fix, {"weft": weft, "torch": torch, "model": model, "ctx": ctx, "x": _data()[0], "y": y})
    _as_one(model, Net(), _data()[0], y, loss=cross_entropy)


@pytest.mark.slow
def test_there_is_no_loss():
    it = printed("engines/torch/pipeline/losses.py", "the call gives no loss", _told(Net))
    run_ranks(_with_classes, 2, it.fix, mesh={"pipeline": 2})


class OfBatch(nn.Module):
    """The last layer gives the mean over the rows, too, or for each row."""

    def __init__(self, dim=0):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        return x, x.mean(self.dim)


def _evaluated(ctx, dim, **options):
    with torch.no_grad():
        model, _ = weft.pipeline(Net(last=lambda: OfBatch(dim)), ctx, **{"micro_batches": 4, **options})
        for found, expected in zip(model(_data()[0]), Net(last=lambda: OfBatch(dim))(_data()[0]), strict=True):
            assert torch.allclose(found, expected)


@pytest.mark.slow
def test_outputs_that_cannot_be_joined():
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_evaluated, 2, 0, mesh={"pipeline": 2})
    it = printed("engines/torch/pipeline/outputs.py", "cannot be joined", str(failed.value))
    first, second = it.fix.split(", or ")
    assert second == "outputs for each row"
    run_ranks(_evaluated_once, 2, first, mesh={"pipeline": 2})
    run_ranks(_evaluated, 2, 1, mesh={"pipeline": 2})


def _evaluated_once(ctx, line):
    _evaluated(ctx, 0, **eval(line.replace("weft.pipeline(..., ", "dict(")))


@pytest.mark.slow
def test_what_is_between_the_layers():
    text = _told(Net, _doubled, loss=mse_loss)
    it = printed("engines/torch/pipeline/remote_output.py", "needs values that", text)
    assert it.fix == "the operation in the forward of a layer, which one rank computes"
    _follow(_changed, changes={"at_0": {"after": _doubled}, "at_2": {"after": _doubled}})


@pytest.mark.slow
def test_what_leaves_a_stage():
    trims = {"at_1": {"after": _trimmed}, "at_2": {"before": _padded}}
    text = _told(_changed, changes=trims, loss=mse_loss)
    it = printed("engines/torch/pipeline/stage_borders.py", "other shapes for one micro-batch", text)
    assert it.fix == "weft.pipeline(..., stages=[...]) that end where all micro-batches have the same shapes"
    _follow(_changed, changes=trims, stages=[NAMES[:1], NAMES[1:]])
    dicts = {"at_1": {"after": _as_dict}, "at_2": {"before": _of_dict}}
    it = printed(
        "engines/torch/pipeline/stage_borders.py", "cannot be sent", _told(_changed, changes=dicts, loss=mse_loss)
    )
    assert it.fix == "weft.pipeline(..., stages=[...]) that end where a layer gives such tensors"
    _follow(_changed, changes=dicts, stages=[NAMES[:3], NAMES[3:]])


@pytest.mark.slow
def test_the_order_of_the_layers():
    text = _told(Net, stages=[[NAMES[0], NAMES[2]], [NAMES[1], NAMES[3]]], loss=mse_loss)
    it = printed("engines/torch/pipeline/stage_forward.py", "fix=fix", text)
    assert it.fix == "weft.pipeline(model, ctx, stages=[[names of layers], ...]) in the order of forward"
    _follow(Net, stages=[NAMES[:2], NAMES[2:]])
    it = printed("engines/torch/pipeline/stage_forward.py", "fix=_OF_ITS", _told(Gained, loss=mse_loss))
    assert it.fix.startswith("stages=[...] with the name of the parameter in the stage that uses it, or")
    _follow(Gained, stages=[NAMES[:2], [*NAMES[2:], "gain"]])
    _follow(_gained)
    it = printed("engines/torch/pipeline/stage_forward.py", "is given what another", _told(Skipping, loss=mse_loss))
    assert it.fix.startswith("x, kept = layer(x, kept)")
    _follow(Through)
    it = printed("engines/torch/pipeline/stage_forward.py", "the output of", _told(Skipping, 4, loss=mse_loss))
    assert it.fix.startswith("x, kept = layer(x, kept)")
    _follow(Through, 4)
