"""Weights: read, written, placed, tied. What needs PEFT, bitsandbytes or torchao is in tests/interop."""

import glob
import importlib
import json
import shlex
import sys

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

import weft
from tests.fix_lines.told import told
from weft.cli import main
from weft.testing import run_ranks
from weft.weights import PlacementPlan, find_tied, on_meta, plan_placement


class Net(nn.Module):
    """Tied weights, unless they are not."""

    def __init__(self, tie_word_embeddings=True):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.mid = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        if tie_word_embeddings:
            self.tie_weights()

    def tie_weights(self):
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.mid(self.embed(x)))


class Rope(nn.Module):
    """A buffer that is not saved, and a parameter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(3), persistent=False)
        self.scale = nn.Parameter(torch.ones(3))


class Drawn(Rope):
    def reset_parameters(self):
        with torch.no_grad():
            self.scale.fill_(2.0)
            self.table.fill_(1.0)


def _meta(make=Net):
    with torch.device("meta"):
        return make()


def _saved(folder, **objects):
    state, ctx = weft.checkpointable(objects or {"model": Net()}, weft.local())
    return weft.save(state, folder, 1, ctx)


def _same(model, other):
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def _options(it, **names):
    """The options that a line sets."""
    known = {"weft", "torch", "__builtins__", *names}
    return {name: value for name, value in it.run(torch=torch, **names).items() if name not in known}


# -- load_weights --------------------------------------------------------------------------------------


def test_what_is_no_module_or_dtype(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net, ctx = Net(), weft.local()
    save_model(net, "model.safetensors")
    with told("weights/targets.py", "check_module") as it:
        weft.load_weights(None, "model.safetensors", ctx)
    model = Net()
    it.run(model=model, ctx=ctx)
    assert _same(model, net)
    with told("weights/sources.py", "'dtype', dtype") as it:
        weft.load_weights(model, "model.safetensors", ctx, dtype="int8")
    weft.load_weights(model, "model.safetensors", ctx, **_options(it))
    assert model.mid.weight.dtype == torch.bfloat16
    model, later = weft.with_precision(Net(), ctx, "bf16")
    with told("weights/assign.py", "the dtype can no longer") as it:
        weft.load_weights(model, "model.safetensors", later, dtype="fp16")
    assert "first, then the transforms; or no dtype" in it.fix
    weft.load_weights(model, "model.safetensors", later)
    model = Net()
    weft.load_weights(model, "model.safetensors", ctx, dtype="fp16")
    weft.with_precision(model, ctx, "bf16")


def test_files_that_do_not_fit_the_module(tmp_path):
    path, ctx, net = tmp_path / "x.safetensors", weft.local(), Net(tie_word_embeddings=False)
    save_file({f"model.{name}": t for name, t in net.state_dict().items()}, path)
    with told("weights/assign.py", "does not fit the module") as it:
        weft.load_weights(model := Net(tie_word_embeddings=False), path, ctx)
    it.run(model=model, path=path, ctx=ctx)
    assert _same(model, net)
    with told("weights/assign.py", "rename gives two tensors") as it:
        weft.load_weights(model, path, ctx, rename=lambda name: name.rpartition(".")[2])
    weft.load_weights(model, path, ctx, rename=eval(it.fix.partition("=")[2]))
    with told("weights/assign.py", "and {other.key} differ") as it:
        weft.load_weights(Net(), path, ctx, rename=lambda name: name.removeprefix("model."))
    assert "tie_word_embeddings=False" in it.fix
    weft.load_weights(Net(tie_word_embeddings=False), path, ctx, rename=lambda name: name.removeprefix("model."))
    for model in (nn.Sequential(nn.Embedding(9, 4)), nn.Sequential(nn.Embedding(7, 4), nn.Linear(2, 2))):
        save_file({"0.weight": net.embed.weight.detach()}, path)
        with told("weights/assign.py", "does not fit the module") as it:
            weft.load_weights(model, path, ctx)
        it.run(model=model, path=path, ctx=ctx)
    assert torch.equal(model[0].weight, net.embed.weight)


class _TiedLater(Net):
    """Ties its weights when it is asked to, as models of transformers on meta."""

    def __init__(self):
        super().__init__(tie_word_embeddings=False)


def test_tied_weights_are_saved_once(tmp_path):
    path, ctx = tmp_path / "x.safetensors", weft.local()
    save_file({name: t for name, t in Net().state_dict().items() if name != "head.weight"}, path)
    model = _meta(_TiedLater)
    with told("weights/assign.py", "does not fit the module") as it:
        weft.load_weights(model, path, ctx)
    it.run(model=model)
    weft.load_weights(model, path, ctx)
    assert model.head.weight is model.embed.weight and not model.head.weight.is_meta


def test_other_calls_that_read_say_their_own_line(tmp_path):
    path, ctx, net = tmp_path / "x.safetensors", weft.local(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = plan_placement(net, {"cpu": None})
    save_file({f"model.{name}": t for name, t in net.state_dict().items()}, path)
    with told("weights/assign.py", "does not fit the module") as it:
        weft.place(model := _meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), ctx, plan, weights=path)
    it.run(model=model, ctx=ctx, plan=plan, path=path)
    assert _same(model, net)


class _Odd(nn.Linear):
    """What is saved is not only parameters."""

    def state_dict(self, *args, **kwargs):
        return super().state_dict(*args, **kwargs) | {"extra": torch.ones(1)}

    def load_state_dict(self, state, *args, **kwargs):
        return super().load_state_dict({k: v for k, v in state.items() if k != "extra"}, *args, **kwargs)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_that_saves_other_things(tmp_path, device):
    path, net = tmp_path / "x.safetensors", nn.Linear(2, 2)
    save_file(net.state_dict(), path)
    model = _Odd(2, 2, device=device)
    with told("weights/targets.py", "cannot be loaded") as it:
        weft.load_weights(model, path, weft.local())
    it.run(model=model, path=path)
    assert _same(model, net)


def test_what_would_have_no_value(tmp_path):
    path, ctx = tmp_path / "x.safetensors", weft.local()
    save_file({"scale": torch.full((3,), 5.0)}, path)
    with told("weights/targets.py", "tensors on meta") as it:
        weft.load_weights(_meta(Rope), path, ctx)
    with on_meta():
        model = Rope()
    weft.load_weights(model, path, ctx)
    assert model.table.sum() == 3 and model.scale.sum() == 15
    assert "or add reset_parameters()" in it.fix
    weft.load_weights(model := _meta(Drawn), path, ctx)
    assert model.table.sum() == 3 and model.scale.sum() == 15
    save_file({}, path)
    weft.load_weights(model := _meta(Drawn), path, ctx, strict=False)
    assert model.scale.sum() == 6


# -- where weights come from ---------------------------------------------------------------------------


def test_a_checkpoint_with_other_modules(tmp_path):
    net, ctx = Net(), weft.local()
    path = _saved(tmp_path / "run", policy=net)
    with told("weights/sources.py", "is no module in") as it:
        weft.load_weights(model := Net(), path, ctx)
    it.run(model=model, path=path, ctx=ctx)
    assert _same(model, net)
    with told("weights/sources.py", "is no module in") as it:
        weft.place(Net(), ctx, {"cpu": None}, weights=path)
    it.run(path=path, out=tmp_path / "out")
    assert "read from out" in it.fix
    model, _ = weft.place(_meta(), ctx, {"cpu": None}, weights=tmp_path / "out")
    assert _same(model, net)
    nothing = _saved(tmp_path / "other", draws=torch.Generator())
    with told("weights/sources.py", "is no module in") as it:
        weft.export(nothing, tmp_path / "weights")
    found = it.run(model=net, ctx=weft.local())
    weft.export(weft.save(found["state"], tmp_path / "again", 1, found["ctx"]), tmp_path / "weights")


def test_a_directory_without_a_checkpoint(tmp_path):
    path, ctx = _saved(tmp_path / "runs" / "one"), weft.local()
    with told("weights/sources.py", "no complete checkpoint") as it:
        weft.export(tmp_path / "runs", tmp_path / "out")
    assert it.run(out=tmp_path / "out")
    manifest = path / "manifest.json"
    text = manifest.read_text()
    manifest.unlink()
    with told("weights/sources.py", "no complete checkpoint") as it:
        weft.place(Net(), ctx, {"cpu": None}, weights=path.parent)
    manifest.write_text(text)  # as in the directory that is meant
    it.run(model=Net(), ctx=ctx, plan={"cpu": None}, directory=path.parent)


def test_one_option_too_many(tmp_path):
    path, net, ctx = tmp_path / "x.safetensors", Net(), weft.local()
    save_model(net, path)
    with told("weights/sources.py", "has no effect here") as it:
        weft.load_weights(model := Net(), path, ctx, object="policy")
    it.run(model=model, path=path, ctx=ctx)
    assert _same(model, net)
    with told("weights/sources.py", "has no effect here") as it:
        weft.weights.read(path, object="policy")
    assert it.run(path=path)
    with told("weights/sources.py", "has no effect here") as it:
        weft.load_weights(model := Net(), path, ctx, averages=True)
    it.run(model=model, path=path, ctx=ctx)
    assert _same(model, net)


def test_averages_that_are_not_there(tmp_path):
    path, out, ctx = _saved(tmp_path / "run"), tmp_path / "out", weft.local()
    with told("weights/sources.py", "has no averages of") as it:
        weft.export(path, out, averages=True)
    it.run(path=path, out=out)
    with told("weights/sources.py", "has no averages of") as it:
        weft.load_weights(Net(), path, ctx, averages=True)
    it.run(model=Net(), path=path, ctx=ctx)
    policy, ctx = weft.average_weights(Net(), ctx)
    path = _saved(tmp_path / "two", model=Net(), policy=policy)
    with told("weights/sources.py", "has no averages of") as it:
        weft.weights.read(path, averages=True)
    assert "averages=True" in it.fix and it.run(path=path)


def test_a_path_without_weights(tmp_path):
    net, ctx = nn.Linear(2, 2), weft.local()
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": "gone.safetensors"}}))
    for wrong in (tmp_path, tmp_path / "modle.safetensors", tmp_path / "config.json"):
        with told("weights/sources.py", "{path} cannot be used") as it:
            weft.load_weights(model := nn.Linear(2, 2), wrong, ctx)
        it.run(model=model, ctx=ctx)
        assert _same(model, net)
        with told("weights/sources.py", "{path} cannot be used") as it:
            weft.weights.read(wrong)
        assert it.run()
        with told("weights/sources.py", "{path} cannot be used") as it:
            weft.place(nn.Linear(2, 2), ctx, {"cpu": None}, weights=wrong)
        it.run(model=nn.Linear(2, 2), ctx=ctx, plan={"cpu": None})


@pytest.mark.parametrize("names", [["model.bin"], ["model-00001-of-00002.bin", "model-00002-of-00002.bin"]])
def test_a_pickle(tmp_path, names):
    net = Net()
    state, half = net.state_dict(), len(net.state_dict()) // 2
    parts = [state] if len(names) == 1 else [dict(list(state.items())[:half]), dict(list(state.items())[half:])]
    for name, part in zip(names, parts, strict=True):
        torch.save(part, tmp_path / name)
    torch.save({"lr": 1}, tmp_path / "optimizer.pt")
    with told("weights/sources.py", "is a pickle") as it:
        weft.load_weights(Net(), tmp_path, weft.local())
    it.run(save_file=save_file, load=torch.load, glob=glob.glob)
    weft.load_weights(model := Net(), tmp_path, weft.local())
    assert _same(model, net)


def test_the_command_line_reads(tmp_path, capsys):
    save_file(nn.Linear(2, 2).state_dict(), tmp_path / "a.safetensors")
    save_file(nn.Linear(2, 2).state_dict(), tmp_path / "b.safetensors")
    with told("weights/sources.py", "{path} cannot be used") as it:
        main(["estimate", str(tmp_path)])
    assert it.fix.startswith("weft estimate ")
    assert main([word.strip('"') for word in it.fix.split()[1:]]) == 0
    assert "int8" in capsys.readouterr().out


# -- export --------------------------------------------------------------------------------------------


def test_options_of_export(tmp_path):
    path, out = _saved(tmp_path / "run"), tmp_path / "out"

    def follow(it):
        if it.fix.startswith("weft."):
            it.run(path=path, out=out)
        else:
            weft.export(path, out, **_options(it))
        assert [one.name for one in out.iterdir()] == ["model.safetensors"]

    with told("weights/export.py", "num_bytes_of('export'") as it:
        weft.export(path, out, max_shard_size="5 gigabytes")
    follow(it)
    with told("weights/export.py", "'name', name") as it:
        weft.export(path, out, name="../x")
    follow(it)
    with told("weights/export.py", "rename = {rename!r") as it:
        weft.export(path, out, rename="model.")
    follow(it)
    with told("weights/export.py", "cannot be called") as it:
        weft.export(path, out, rename=lambda name: "x")
    follow(it)
    with told("weights/sources.py", "{option} = {filter!r") as it:
        weft.export(path, out, filter=5)
    follow(it)
    with told("weights/sources.py", "no tensors remain") as it:
        weft.export(path, out, filter="layers.*")
    follow(it)


# -- stream --------------------------------------------------------------------------------------------


def test_options_of_stream():
    model, ctx = Net(), weft.local()
    with told("weights/stream.py", "num_bytes_of('stream'") as it:
        weft.weights.stream(model, ctx, bucket_bytes=0)
    it.run(model=model, ctx=ctx)
    with told("weights/stream.py", "check_module(what") as it:
        weft.weights.stream(model.state_dict(), ctx)
    it.run(model=model, ctx=ctx)
    with told("weights/export.py", "rename = {rename!r") as it:
        weft.weights.stream(model, ctx, rename="model.")
    assert dict(weft.weights.stream(model, ctx, **_options(it)))
    with pytest.raises(TypeError, match=r"local_parts(?s:.*)weft.weights.local_parts\(model, ctx\)"):
        weft.weights.local_parts(model.state_dict(), ctx)


def _leaves_alone(ctx):
    model, ctx = weft.fully_shard(Net(), ctx)
    with told("weights/stream.py", "has left the loop early") as it:
        for _ in weft.weights.stream(model, ctx, bucket_bytes=100):
            if ctx.is_main:
                break
    if ctx.is_main:
        return list(it.run(model=model, ctx=ctx)["weights"])
    assert "1 of 2 buckets taken" in str(it.error)
    return list(dict(weft.weights.stream(model, ctx)))


def test_leaving_a_stream_alone():
    assert run_ranks(_leaves_alone, 2) == [["embed.weight", "mid.weight", "mid.bias"]] * 2


def _smaller_context(world):
    model, _ = weft.fully_shard(Net(), world)
    ctx = world.subset([0])
    if ctx.here:
        with told("weights/stream.py", "ctx of weft.start()") as it:
            weft.weights.stream(model, ctx)
        line = it.fix
    else:
        line = "weft.weights.stream(model, ctx)"
    exec(f"assert dict({line.partition('  #')[0]})", {"weft": weft, "model": model, "ctx": world})


def test_a_context_without_some_of_the_shards():
    run_ranks(_smaller_context, 2)


def test_nothing_to_export(tmp_path):
    path = _saved(tmp_path / "run", model=nn.Tanh(), policy=Net())
    with told("weights/sources.py", "no tensors remain") as it:
        weft.export(path, tmp_path / "out")
    assert it.fix == "path or object= with tensors in it"
    assert weft.export(path, tmp_path / "out", object="policy")


def test_an_index_that_is_too_large(tmp_path, monkeypatch):
    path, out = _saved(tmp_path / "run"), tmp_path / "out"
    monkeypatch.setattr(importlib.import_module("weft.weights.export"), "MAX_INDEX_BYTES", 10)
    with told("weights/export.py", "index would be too large") as it:
        weft.export(path, out, max_shard_size="100B")
    it.run(path=path, out=out)
    assert [one.name for one in out.iterdir()] == ["model.safetensors"]


def test_a_folder_that_is_not_replaced(tmp_path):
    path = _saved(tmp_path / "run")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    for out in (tmp_path / "out", path, path / "weights"):
        with told("weights/publish.py", "is not replaced") as it:
            weft.export(path, out)
        assert weft.export(path, it.run()["out"])


# -- tied ----------------------------------------------------------------------------------------------


def test_tied_weights():
    model = Net()
    with told("weights/tied.py", "check_module('find_tied'") as it:
        find_tied(model.state_dict())
    it.run(model=model)
    groups = find_tied(model)
    with told("weights/tied.py", "check_module('tie'") as it:
        weft.weights.tie(groups, model)
    it.run(model=model, groups=groups)
    apart = Net(tie_word_embeddings=False)
    with told("weights/tied.py", "cannot be tied") as it:
        weft.weights.tie(apart, [("embed.weight", "mid.weight")])
    it.run(model=apart, original=model)
    assert find_tied(apart) == groups


# -- places --------------------------------------------------------------------------------------------


def _layers(width=16, count=4):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def test_plans(tmp_path):
    model, budgets = _layers(), {"cpu": None}
    with told("weights/places/module_sizes.py", "check_module") as it:
        weft.weights.module_sizes(model.state_dict())
    it.run(model=model)
    with told("weights/places/plan_placement.py", "check_module") as it:
        plan_placement(model.state_dict(), budgets)
    it.run(model=model, budgets=budgets)
    with told("weights/places/plan_placement.py", "budgets are bytes") as it:
        plan_placement(model, "auto")
    assert it.run(model=model)
    with told("weights/places/plan_placement.py", "budgets cannot be used") as it:
        plan_placement(model, {"cpu": "20 apples"})
    assert it.run(model=model)
    with told("weights/places/plan_placement.py", "the text is not a plan") as it:
        PlacementPlan.from_json('{"cpu": "20GB"}')
    plan = it.run(model=model, budgets=budgets)["plan"]
    assert PlacementPlan.from_json(plan.to_json()) == plan
    with told("weights/places/plan_placement.py", "the plan does not fit") as it:
        weft.place(_layers(count=3), weft.local(), plan)
    model = _layers(count=3)
    weft.place(model, weft.local(), it.run(model=model, budgets=budgets)["plan"])
    for budgets in ({"cpu": 100}, {"cpu": 100, "disk": None}):
        with told("weights/places/plan_placement.py", "the module does not fit") as it:
            plan_placement(model, budgets)
        more = it.run()["budgets"]
        assert plan_placement(model, more).used()["cpu"] <= more["cpu"]


def test_what_is_placed_has_values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net, ctx = _layers(), weft.local()
    save_file(net.state_dict(), "model.safetensors")
    for model, plan in ((_meta(_layers), {"cpu": None}), (_layers(), {"cpu": 3000, "disk": None})):
        with told("weights/places/placed_tensors.py", "values are missing") as it:
            weft.place(model, ctx, plan)
        placed = it.run(model=model, ctx=ctx, plan=plan, path="model.safetensors")["model"]
        with torch.no_grad():
            assert torch.equal(placed(torch.ones(1, 16)), net(torch.ones(1, 16)))


# -- quantized, as far as no library is needed ---------------------------------------------------------


def test_quantized_without_a_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with told("weights/quantization/quantized_layers.py", "needs {engine}") as it:
        weft.quantized(_layers(), weft.local(), "nf4")
    assert shlex.split(it.fix) == ["pip", "install", "bitsandbytes"]
    with told("weights/quantization/quantized_layers.py", "double=True has no effect") as it:
        weft.quantized(_layers(), weft.local(), "int8", double=True)
    assert _options(it) == {"double": False}


def test_quantized_in_a_rehearsal(capsys):
    def body(ctx):
        weft.quantized(_layers(), ctx, "nf4")

    with told("weights/quantization/quantize.py", "check_not_pretended") as it:
        weft.rehearse(body, 4)
    assert it.fix == "weft estimate MODEL  # int8, int4"
    assert main(["estimate", "torch.nn:Linear(64, 64)"]) == 0
    assert {"int8", "int4"} <= set(capsys.readouterr().out.split())
