"""export: one merged copy of the weights in the layout of Hugging Face, or nothing."""

import fcntl
import json
import os
import re
import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import weft
import weft.cli
from weft.checkpoint.format.manifest import Piece, TensorEntry
from weft.checkpoint.format.safetensors_read import TensorFiles, contiguous_blocks
from weft.errors import CheckpointError
from weft.tensors.blocks import Block
from weft.testing import run_ranks
from weft.weights.places.module_sizes import parse_size

STATUS = Path("/proc/self/status")
LINES = r"(.|\n)*found: (.|\n)*expected: (.|\n)*fix: "


class Net(nn.Module):
    """Tied weights, an odd width, an integer buffer, a number as parameter, an empty one, one of another dtype."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.mid = nn.Linear(5, 5)
        self.lora = nn.ModuleDict({"a": nn.Linear(5, 2, bias=False), "b": nn.Linear(2, 5, bias=False)})
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.small = nn.Parameter(torch.randn(3, dtype=torch.float16))
        self.register_buffer("seen", torch.arange(3) + 2**40)

    def forward(self, x):
        return self.head(self.mid(self.embed(x))) * self.gain


def _net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Net()


def _saved(folder, model=None, step=1, ctx=None, **objects):
    state, ctx = weft.checkpointable({"model": model or _net(), **objects}, ctx or weft.local())
    return weft.save(state, folder, step, ctx)


def _all(files):
    found = {}
    for file in files:
        if file.suffix == ".safetensors":
            more = load_file(file)
            assert not set(more) & set(found)
            found |= more
    return found


def _same(found, model, without=("head.weight",)):
    expected = {name: tensor for name, tensor in model.state_dict().items() if name not in without}
    assert set(found) == set(expected)
    return all(found[k].dtype == v.dtype and torch.equal(found[k], v) for k, v in expected.items())


def _names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


# -- what is written ---------------------------------------------------------------------------------


def test_one_file_holds_the_weights_bit_for_bit_and_others_read_it(tmp_path):
    ctx = weft.local()
    _saved(tmp_path / "run", step=1, model=Net(), ctx=ctx)
    _saved(tmp_path / "run", step=12, ctx=ctx)
    files = weft.export(tmp_path / "run", tmp_path / "deep" / "out")
    assert files == (tmp_path / "deep" / "out" / "model.safetensors",) and _names(files[0].parent) == [files[0].name]
    assert _names(tmp_path / "deep") == ["out"]
    assert _same(_all(files), _net())  # of the newest; the tied weight is there once
    with safe_open(files[0], framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    # Aligned as safetensors does it, which refuses gaps.
    assert weft.export(tmp_path / "run" / "step-00000001", tmp_path / "out2")


def _trained(ctx, folder, kind):
    model = _net()
    model.none = nn.Parameter(torch.zeros(1, 3))
    model.small = nn.Parameter(torch.arange(3.0))
    if kind == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx, units="mid")
    elif kind == "zero":
        optimizer = torch.optim.AdamW(model.parameters())
        model, _, ctx = weft.zero_partition(model, optimizer, ctx, stage=3)
    else:
        model, ctx = weft.replicate(model, ctx)
    state, ctx = weft.checkpointable({"model": model}, ctx)
    return weft.save(state, folder / kind, 1, ctx)


def test_the_pieces_of_all_ranks_are_merged(tmp_path):
    def saves(ctx, folder):
        return [_trained(ctx, folder, kind) for kind in ("fully_shard", "zero", "replicate")]

    model = _net()
    model.none = nn.Parameter(torch.zeros(1, 3))
    model.small = nn.Parameter(torch.arange(3.0))
    for path in run_ranks(saves, 3, tmp_path)[0]:
        files = weft.export(path, tmp_path / "out", max_shard_size=100)  # the second replaces the first
        assert len(files) > 4 and _same(_all(files), model)


@pytest.mark.parametrize("limit", ["100B", "150B", 300, "0.3KB"])
def test_files_are_as_large_as_allowed_and_the_index_is_complete(tmp_path, limit):
    _saved(tmp_path / "run")
    *files, index = weft.export(tmp_path / "run", tmp_path / "out", max_shard_size=limit)
    assert _names(tmp_path / "out") == sorted(path.name for path in (*files, index))
    assert index.name == "model.safetensors.index.json"
    assert [f.name for f in files] == [
        f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)
    ]
    assert _same(_all(files), _net())
    described, total = json.loads(index.read_text()), 0
    for file in files:
        held = load_file(file)
        size = sum(t.nbytes for t in held.values())
        total += size
        assert size <= (limit if isinstance(limit, int) else parse_size(limit)) or len(held) == 1
        assert all(described["weight_map"].pop(name) == file.name for name in held)
    assert described == {"metadata": {"total_size": total}, "weight_map": {}}


def test_a_second_export_leaves_nothing_of_the_first(tmp_path):
    _saved(tmp_path / "run")
    many = weft.export(tmp_path / "run", tmp_path / "out", max_shard_size="100B")
    (tmp_path / ".out.01234567.writing").mkdir()  # of a process that was killed
    (tmp_path / ".out.89abcdef.writing").mkdir()  # of one that lives
    handle = os.open(tmp_path / ".out.89abcdef.writing", os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        one = weft.export(tmp_path / "run", tmp_path / "out", max_shard_size="1MB")
    finally:
        os.close(handle)
    assert len(many) > 3 and _names(tmp_path / "out") == [one[0].name]
    assert _names(tmp_path) == [".out.89abcdef.writing", "out", "run"]


def test_only_floating_point_tensors_are_converted(tmp_path):
    _saved(tmp_path / "run")
    for dtype in ("bf16", torch.bfloat16, "float64"):
        found = _all(weft.export(tmp_path / "run", tmp_path / "out", dtype=dtype))
        wanted = torch.float64 if dtype == "float64" else torch.bfloat16
        for name, tensor in _net().state_dict().items():
            if name != "head.weight":
                assert torch.equal(found[name], tensor.to(wanted) if tensor.is_floating_point() else tensor)
                assert found[name].dtype == (wanted if tensor.is_floating_point() else torch.int64)


def test_numbers_that_do_not_fit_into_a_dtype_are_named(tmp_path):
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[1, 1] = 1e5
        model.bias[0] = torch.inf  # is one already
    _saved(tmp_path / "run", model)
    with pytest.raises(
        ValueError,
        match=r"weight does not fit into torch.float16\n  found: .* up to 1e\+05\n  expected: (.|\n)*fix: "[:-15],
    ):
        weft.export(tmp_path / "run", tmp_path / "out", dtype="fp16")
    assert _names(tmp_path) == ["run"]
    assert weft.export(tmp_path / "run", tmp_path / "out", dtype="bf16")


def test_adapters_alone_under_other_names(tmp_path):
    _saved(tmp_path / "run")
    export = lambda **options: _all(weft.export(tmp_path / "run", tmp_path / "out", **options))  # noqa: E731
    assert set(export(filter="lora.**")) == {"lora.a.weight", "lora.b.weight"}
    assert set(export(filter=["**.a.*", "gain"])) == {"lora.a.weight", "gain"}
    assert set(export(filter=lambda name: "small" in name)) == {"small"}
    # Of tied names the one that is asked for.
    assert torch.equal(export(filter="head.weight")["head.weight"], _net().head.weight)
    files = weft.export(
        tmp_path / "run", tmp_path / "adapter", filter="lora.**", name="adapter_model",
        rename=lambda name: f"base_model.model.{name}",
    )  # fmt: skip
    assert [file.name for file in files] == ["adapter_model.safetensors"]
    assert set(_all(files)) == {"base_model.model.lora.a.weight", "base_model.model.lora.b.weight"}


def test_another_object_and_one_that_shares_its_weights(tmp_path):
    model = _net()
    _saved(tmp_path / "run", model, other=model.mid, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    found = _all(weft.export(tmp_path / "run", tmp_path / "out", object="other"))
    assert torch.equal(found["weight"], model.mid.weight) and set(found) == {"weight", "bias"}
    for name in ("optimizer", "none"):
        with pytest.raises(CheckpointError, match=rf"object = '{name}' is no module" + LINES + r".*object='model'"):
            weft.export(tmp_path / "run", tmp_path / "out2", object=name)


def test_what_transforms_keep_is_no_weight(tmp_path):
    model, ctx = weft.average_weights(nn.Linear(2, 2), weft.local(), decay=0.9)
    state, ctx = weft.checkpointable({"model": model}, ctx)
    weft.save(state, tmp_path / "run", 1, ctx)
    assert set(_all(weft.export(tmp_path / "run", tmp_path / "out"))) == {"weight", "bias"}


class Averaged(nn.Module):
    """Tied weights, a frozen one, 16 bits, running statistics; no two ranks compute alike."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.mid = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x):
        return self.head(self.mid(self.embed(x)) * self.frozen)


def _averaged(ctx, folder, kind, dtype=torch.float32, buffers="live"):
    """A checkpoint after some steps, and what `state_dict()` holds with the averages in place."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = Averaged().to(dtype)
    if kind == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx, units=["mid"])
    else:
        model, ctx = weft.replicate(model, ctx)
    model, ctx = weft.average_weights(model, ctx, decay=0.75, buffers=buffers)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for step in range(3):
        model(torch.arange(6) % (2 + ctx.rank + step)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        weft.averages(model).update()
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)
    with weft.averages(model).swapped(), weft.full_params(model, ctx):
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return weft.save(state, folder / f"{kind}-{dtype}", 1, ctx), expected


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_averages_are_what_the_module_computes_with_when_they_are_swapped_in(tmp_path, ranks):
    def saves(ctx, folder):
        return [
            _averaged(ctx, folder, kind, dtype, buffers)
            for kind in ("fully_shard", "replicate")
            for dtype, buffers in ((torch.float32, "live"), (torch.bfloat16, "average"))
        ]

    for path, expected in run_ranks(saves, ranks, tmp_path)[0]:
        model = Averaged().to(expected["frozen"].dtype)
        files = weft.export(path, tmp_path / "out", averages=True, max_shard_size=64)
        found = _all(files)
        model.load_state_dict(expected)
        assert len(files) > 3 and _same(found, model)
        weights = _all(weft.export(path, tmp_path / "out", averages=False))
        assert not torch.equal(weights["mid.0.weight"], found["mid.0.weight"])
        read = weft.weights.read(path, averages=True)
        assert _same(read, model)
        other = Averaged().to(expected["frozen"].dtype)
        weft.load_weights(other, path, weft.local(), averages=True)
        assert _same(other.state_dict(), model, without=())
        exported = _all(weft.export(path, tmp_path / "out", averages=True, filter="head.*", dtype="float64"))
        assert list(exported) == ["head.weight"] and exported["head.weight"].dtype == torch.float64


def test_averages_of_a_part_and_of_the_whole(tmp_path):
    model, ctx = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Linear(2, 2), backend="eager")), weft.local()
    model[0], ctx = weft.average_weights(model[0], ctx, decay=0.5)
    weft.averages(model[0]).update()
    before = model[0].weight.detach().clone()
    nn.init.zeros_(model[0].weight)
    weft.averages(model[0]).update()
    path = _saved(tmp_path / "run", model, ctx=ctx)
    found = _all(weft.export(path, tmp_path / "out", averages=True))
    assert torch.equal(found["0.weight"], before / 2) and torch.equal(found["1.weight"], model[1].weight)
    model, ctx = weft.average_weights(model, ctx, decay=0.5)
    for value in (3.0, 1.0):
        nn.init.constant_(model[1].weight, value)
        weft.averages(model).update()
    path = _saved(tmp_path / "both", model, ctx=ctx)
    found = _all(weft.export(path, tmp_path / "out", averages=True))
    assert set(found) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert found["0.weight"].eq(0).all() and found["1.weight"].eq(2).all()


def test_weights_with_averages_beside_them_are_exported_with_a_word(tmp_path, caplog, capsys):
    model, ctx = weft.average_weights(nn.Linear(2, 2), weft.local())
    path, plain = _saved(tmp_path / "run", model, ctx=ctx), _saved(tmp_path / "plain", nn.Linear(2, 2))
    weft.export(path, tmp_path / "out")
    assert [record.name for record in caplog.records] == ["weft"] and "averages=True" in caplog.text
    caplog.clear()
    weft.export(path, tmp_path / "out", averages=False)
    weft.export(path, tmp_path / "out", averages=True)
    weft.export(plain, tmp_path / "out")
    assert not caplog.records
    for options, lines in (([], 1), (["--averages"], 0), (["--no-averages"], 0)):
        assert weft.cli.main(["export", str(path), str(tmp_path / "out"), *options]) == 0
        assert len(caplog.records) == lines
        caplog.clear()
    capsys.readouterr()
    assert weft.cli.main(["export", str(plain), str(tmp_path / "out"), "--averages"]) == 1
    assert "has no averages of 'model'" in capsys.readouterr().err


# -- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size", ["5", "5Gb", "-1B", "0B", "GB", "1e3B", "", 0, -5, 1.5, True, None, "5 gb", "9" * 30 + "B"]
)
def test_a_size_that_is_none_is_refused(tmp_path, size):
    with pytest.raises(ValueError, match="max_shard_size = .* is not a size" + LINES):
        weft.export(tmp_path, tmp_path / "out", max_shard_size=size)


def test_options_that_cannot_be_used_are_refused(tmp_path):
    path = _saved(tmp_path / "run")
    for options, text in (
        ({"dtype": "int8"}, "dtype = 'int8' cannot be used"),
        ({"dtype": torch.int64}, "dtype = torch.int64 cannot be used"),
        ({"dtype": "load"}, "dtype = 'load' cannot be used"),
        ({"name": "../x"}, "name = '../x' cannot be used"),
        ({"name": 5}, "name = 5 cannot be used"),
        ({"filter": 5}, "filter = 5 cannot be used"),
        ({"filter": ["**", 5]}, "filter = ['**', 5] cannot be used"),
        ({"rename": "x"}, "rename = 'x' cannot be used"),
        ({"rename": lambda name: "x"}, "cannot be called 'x'"),
        ({"rename": lambda name: None}, "cannot be called None"),
    ):
        with pytest.raises(ValueError, match=re.escape(text) + LINES):
            weft.export(path, tmp_path / "out", **options)
    for chosen in ("lora.c.*", ["lora.**", "nothing"], [], lambda name: False):
        with pytest.raises(CheckpointError, match="export: no tensors remain" + LINES):
            weft.export(path, tmp_path / "out", filter=chosen)
    assert _names(tmp_path) == ["run"]


def test_a_wrong_directory_is_told_with_the_right_one(tmp_path):
    path = _saved(tmp_path / "runs" / "one")
    for wrong, right in ((tmp_path / "runs", tmp_path / "runs" / "one"), (path / "manifest.json", path),
                         (path / "missing", path)):  # fmt: skip
        with pytest.raises(
            CheckpointError, match="no complete checkpoint" + LINES + " *" + re.escape(f'weft.export("{right}"')
        ):
            weft.export(wrong, tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no complete checkpoint(.|\n)*an empty folder"):
        weft.export(tmp_path / "empty", tmp_path / "out")


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_checkpoint_is_not_exported(tmp_path, damage):
    path = _saved(tmp_path / "run")
    (file,) = path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content if damage == "flip" else content[:-1])
    if damage == "gone":
        file.unlink()
    with pytest.raises(CheckpointError, match=r"rank-00000-of-00001.safetensors is damaged" + LINES):
        weft.export(path, tmp_path / "out")
    assert _names(tmp_path) == ["run"]


def test_a_folder_with_anything_else_in_it_is_left_alone(tmp_path):
    path = _saved(tmp_path / "run")
    out = tmp_path / "out"
    weft.export(path, out)
    (out / "config.json").write_text("{}")
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="is not replaced" + LINES):
        weft.export(path, out)
    assert (out / "model.safetensors").read_bytes() == before
    (out / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"is not replaced\n  found: +model.safetensors"):
        weft.export(path, out, name="adapter_model")
    (tmp_path / "file").write_text("")
    for place, found in ((tmp_path / "file", "a file"), (path, "a checkpoint"), (path / "weights", "a checkpoint"),
                         (tmp_path / "run", ".saving, step-00000001")):  # fmt: skip
        with pytest.raises(CheckpointError, match=rf"is not replaced\n  found: +{found}"):
            weft.export(path, place)
    assert _names(tmp_path) == ["file", "out", "run"]


def test_a_full_disk_leaves_the_earlier_export(tmp_path):
    ctx = weft.local()
    _saved(tmp_path / "run", nn.Linear(2, 2), ctx=ctx)
    (before,) = weft.export(tmp_path / "run", tmp_path / "out")
    _saved(tmp_path / "run", step=2, ctx=ctx)
    old, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, old[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            weft.export(tmp_path / "run", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert set(load_file(before)) == {"weight", "bias"} and _names(tmp_path) == ["out", "run"]


# -- memory ------------------------------------------------------------------------------------------


def _peak_bytes():
    return next(int(line.split()[1]) * 1024 for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are measured on Linux")
def test_memory_does_not_grow_with_the_weights(tmp_path):
    def exports(ctx, folder):
        model = nn.Sequential(*(nn.Linear(4000, 4000, bias=False) for _ in range(2)))
        model, ctx = weft.fully_shard(model, ctx)
        state, ctx = weft.checkpointable({"model": model}, ctx)
        path = weft.save(state, folder, 1, ctx)
        if not ctx.is_main:
            return 0
        del model, state
        Path("/proc/self/clear_refs").write_text("5")
        before = _peak_bytes()
        weft.export(path, folder / "out", dtype="bf16")
        return _peak_bytes() - before

    assert run_ranks(exports, 2, tmp_path)[0] < 48 * 2**20  # for 128 MB of weights


# -- cutting -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (2, 3, 5), (0,), (3, 0), (1, 1, 6), (5, 1)])
@pytest.mark.parametrize("most", [1, 2, 5, 100])
def test_blocks_in_order_cover_a_tensor_as_its_memory_lies(shape, most):
    whole = torch.arange(max(torch.Size(shape).numel(), 1)).reshape(shape) if 0 not in shape else torch.empty(shape)
    parts = [
        whole[tuple(slice(o, o + s) for o, s in zip(*block, strict=True))] for block in contiguous_blocks(shape, most)
    ]
    assert all(part.numel() <= most for part in parts)
    assert [x for part in parts for x in part.flatten().tolist()] == whole.flatten().tolist()


def test_any_block_is_read_from_any_pieces(tmp_path):
    from safetensors.torch import save_file

    whole = torch.randn(6, 8, 3)
    pieces = []
    for number, (rows, columns) in enumerate([((0, 4), (0, 5)), ((0, 4), (5, 8)), ((4, 6), (0, 1)), ((4, 6), (1, 8))]):
        part = whole[rows[0] : rows[1], columns[0] : columns[1]].contiguous()
        save_file({"x": part}, tmp_path / f"{number}")
        pieces.append(Piece(file=f"{number}", offsets=(rows[0], columns[0], 0), shape=tuple(part.shape)))
    files = TensorFiles("read", {f"{number}": tmp_path / f"{number}" for number in range(4)})
    entry = TensorEntry(dtype="float32", shape=(6, 8, 3), pieces=tuple(pieces))
    for offsets, shape in (
        ((0, 0, 0), (6, 8, 3)),
        ((3, 4, 1), (2, 3, 2)),
        ((5, 0, 0), (1, 8, 1)),
        ((0, 0, 2), (6, 8, 1)),
    ):
        out = torch.full(shape, torch.nan)
        files.read("x", entry, Block(offsets, shape), out)
        assert torch.equal(out, whole[tuple(slice(o, o + s) for o, s in zip(offsets, shape, strict=True))])
    files.close()


# -- the command -------------------------------------------------------------------------------------


def test_the_command(tmp_path, capsys):
    _saved(tmp_path / "run")
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    assert weft.cli.main(["export", run, out, "--dtype", "bf16", "--max-shard-size", "60B", "--filter", "lora.**",
                          "--filter", "mid.*", "--name", "adapter"]) == 0  # fmt: skip
    printed = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{out}/adapter-00001-of-0000\d.safetensors  \d+ bytes", printed[0])
    assert printed[-1].startswith(f"{out}/adapter.safetensors.index.json")
    assert weft.cli.main(["export", run, str(tmp_path / "two"), "--max-shard-size", "300"]) == 0
    capsys.readouterr()
    for arguments, code in (([out, "x"], 1), ([run, out], 1), ([run, out, "--dtype", "int8"], 2),
                            ([run, out, "--max-shard-size", "lots"], 2)):  # fmt: skip
        assert weft.cli.main(["export", *arguments]) == code
        assert re.match(r"weft export: (.|\n)*found: (.|\n)*fix: ", capsys.readouterr().err)
