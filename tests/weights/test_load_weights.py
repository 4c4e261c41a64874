"""load_weights: from files into plain, meta, replicated and sharded modules, each byte once, all or nothing."""

import contextlib
import json
import os
import pickle
import re
import struct
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import weft
from tests.fix_lines.told import told
from weft.errors import CheckpointError, ContextError, OrderError, PeerError
from weft.testing import run_ranks

LINES = r"(.|\n)*found: (.|\n)*expected: (.|\n)*fix: "
STATUS = Path("/proc/self/status")


class Rope(nn.Module):
    """A buffer that is not saved, with what makes it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inverse", torch.empty(3), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        with torch.no_grad():
            self.inverse.copy_(torch.tensor([1.0, 0.5, 0.25]))


class Net(nn.Module):
    """Tied weights, an odd width, an integer buffer, a number as parameter."""

    def __init__(self, width=5):
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.rope = Rope()
        self.mid = nn.Linear(width, width)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.arange(3) + 2**40)

    def forward(self, x):
        return self.head(self.mid(self.embed(x))) * self.gain + self.rope.inverse.sum()


def _net(seed=1, make=Net):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def _other():
    model = _net(2)
    model.seen.zero_()
    return model


def _meta(make=Net):
    with torch.device("meta"):
        return make()


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _equal(model, expected=None, dtype=None):
    """Whether a module has the values of another, with the weights still tied."""
    found, wanted = model.state_dict(), (expected or _net()).state_dict()
    wanted = {n: t.to(dtype) if dtype and t.is_floating_point() else t for n, t in wanted.items()}
    same = all(_whole(found[n]).dtype == t.dtype and torch.equal(_whole(found[n]), t) for n, t in wanted.items())
    return same and list(found) == list(wanted) and model.head.weight is model.embed.weight


def _checkpoint(folder, model=None, step=1):
    state, ctx = weft.checkpointable({"model": model or _net()}, weft.local())
    return weft.save(state, folder, step, ctx)


def _tensors(model=None):
    state = (model or _net()).state_dict()
    return {name: tensor for name, tensor in state.items() if name != "head.weight"}


@pytest.fixture
def forms(tmp_path):
    """The same weights in every form."""
    path = _checkpoint(tmp_path / "run")
    one, many = weft.export(path, tmp_path / "one"), weft.export(path, tmp_path / "many", max_shard_size="100B")
    save_model(_net(), str(tmp_path / "theirs.safetensors"))  # keeps either of the tied names
    save_file({n: t.clone() for n, t in _net().state_dict().items()}, tmp_path / "twice.safetensors")  # both
    return {
        "checkpoint": path, "run": tmp_path / "run", "manifest": path / "manifest.json", "file": one[0],
        "folder": tmp_path / "one", "index": many[-1], "shards": tmp_path / "many",
        "safetensors": tmp_path / "theirs.safetensors", "twice": tmp_path / "twice.safetensors",
    }  # fmt: skip


# -- forms and modules, one process --------------------------------------------------------------------


@pytest.mark.slow
def test_every_form_goes_into_a_real_module_and_one_on_meta(forms):
    ctx = weft.local()
    for form, path in forms.items():
        model = _other()
        before = {name: (p, p.data_ptr()) for name, p in model.named_parameters()}
        loaded = weft.load_weights(model, path, ctx)
        assert _equal(model), form
        assert loaded[1:] == ((), ()) and loaded.path.exists()
        assert all(model.get_parameter(n) is p and p.data_ptr() == at for n, (p, at) in before.items())
        meta = _meta()
        meta.mid.weight.requires_grad_(False)
        meta.gain.mark = "kept"
        weft.load_weights(meta, str(path), ctx)
        assert _equal(meta), form
        assert torch.equal(meta.rope.inverse, _net().rope.inverse)
        assert not meta.mid.weight.requires_grad and meta.gain.requires_grad and meta.gain.mark == "kept"


def test_one_pickle_free_file_per_name_of_hugging_face(tmp_path):
    """What peft, diffusers and the cache of the hub call their files."""
    tensors = _tensors()
    for name in ("adapter_model.safetensors", "diffusion_pytorch_model.safetensors"):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / name)
        (tmp_path / name / "config.json").write_text("{}")
        weft.load_weights(model := _other(), tmp_path / name, weft.local())
        assert _equal(model)
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "abc", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file(tensors, blobs / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    weft.load_weights(model := _other(), snapshot, weft.local())
    assert _equal(model)
    (tmp_path / "link.safetensors").symlink_to(blobs / "0123")  # named by the user
    assert weft.load_weights(_other(), tmp_path / "link.safetensors", weft.local()).missing == ()


def test_dtypes_are_those_of_the_module_or_the_one_asked_for(tmp_path):
    ctx = weft.local()
    low = {n: t.bfloat16() if t.is_floating_point() else t for n, t in _tensors().items()}
    save_file(low, tmp_path / "x.safetensors")
    model = _other()
    weft.load_weights(model, tmp_path / "x.safetensors", ctx)
    assert model.mid.weight.dtype == torch.float32 and torch.equal(model.mid.weight, low["mid.weight"].float())
    path = _checkpoint(tmp_path / "run")
    for module in (_other(), _meta()):
        held = None if module.gain.is_meta else module.gain
        weft.load_weights(module, path, ctx, dtype="bf16")
        assert _equal(module, dtype=torch.bfloat16) and module.seen.dtype == torch.int64
        assert module.rope.inverse.dtype == torch.float32  # not saved: its own affair
        assert held is None or module.gain is held  # an optimizer still has it
    for dtype in ("int8", torch.bool, "nonsense"):
        with pytest.raises(ValueError, match="dtype = .* cannot be used" + LINES):
            weft.load_weights(_other(), path, ctx, dtype=dtype)
    model, later = weft.with_precision(_other(), ctx, "bf16")
    with pytest.raises(ValueError, match="the dtype can no longer be changed" + LINES):
        weft.load_weights(model, path, later, dtype="fp16")
    model = _other()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    save_file(_tensors() | {"gain": torch.tensor(1e6)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="gain does not fit into torch.float16" + LINES):
        weft.load_weights(model, tmp_path / "x.safetensors", ctx, dtype="fp16")
    assert all(torch.equal(t, before[n]) and t.dtype == before[n].dtype for n, t in model.state_dict().items())


def test_strict_names_what_differs_and_partial_returns_it(tmp_path):
    ctx, file = weft.local(), tmp_path / "x.safetensors"
    tensors = _tensors()
    del tensors["gain"], tensors["embed.weight"]
    save_file(tensors | {"more": torch.ones(2), "some": torch.ones(1)}, file)
    model = _other()
    with pytest.raises(
        CheckpointError,
        match=r"not in the file: gain, embed.weight; only in the file: more, some" + r"(.|\n)*strict=False",
    ):
        weft.load_weights(model, file, ctx)
    assert _equal(model, _other())
    loaded = weft.load_weights(model, file, ctx, strict=False)
    assert loaded == (file, ("gain", "embed.weight"), ("more", "some"))
    assert torch.equal(model.mid.weight, _net().mid.weight) and torch.equal(model.embed.weight, _other().embed.weight)
    meta = _meta()
    with pytest.raises(
        CheckpointError, match=r"would have no value\n  found: +gain" + r"(.|\n)*expected: (.|\n)*fix: "
    ):
        weft.load_weights(meta, file, ctx, strict=False)
    assert all(t.is_meta for t in (*meta.parameters(), *meta.buffers()))
    save_file(tensors | {"gain": torch.tensor(2.0)}, file)
    random = torch.get_rng_state()
    weft.load_weights(meta, file, ctx, strict=False)  # what can be drawn is drawn
    assert meta.embed.weight.std() > 0.1 and meta.head.weight is meta.embed.weight
    assert torch.equal(torch.get_rng_state(), random)
    save_file(_tensors() | {"mid.bias": torch.ones(6), "seen": torch.ones(3), "gain": torch.tensor(1)}, file)
    for strict in (True, False):
        with pytest.raises(
            CheckpointError,
            match=r"gain: int64 \(\) for float32 \(\), "
            r"seen: float32 \(3,\) for int64 \(3,\), mid.bias: float32 \(6,\) for float32 \(5,\)",
        ):
            weft.load_weights(_other(), file, ctx, strict=strict)


def test_names_are_changed_on_the_way(tmp_path):
    ctx, file = weft.local(), tmp_path / "x.safetensors"
    save_file({f"module.{name}": tensor for name, tensor in _tensors().items()} | {"rotary.x": torch.ones(1)}, file)
    with pytest.raises(CheckpointError, match=r"rename=lambda name: name.removeprefix\('module.'\)"):
        weft.load_weights(_other(), file, ctx)
    rename = lambda name: None if "rotary" in name else name.removeprefix("module.")  # noqa: E731
    weft.load_weights(model := _other(), file, ctx, rename=rename)
    assert _equal(model)
    save_file({name.removeprefix("mid."): tensor for name, tensor in _tensors().items() if "mid" in name}, file)
    with pytest.raises(CheckpointError, match=r"rename=lambda name: 'mid.' \+ name"):
        weft.load_weights(_other(), file, ctx)
    with pytest.raises(ValueError, match="rename gives two tensors one name" + LINES):
        weft.load_weights(_other(), file, ctx, rename=lambda name: "weight")


def test_tied_weights_that_differ_in_the_file_are_refused(tmp_path):
    tensors = {name: tensor.clone() for name, tensor in _net().state_dict().items()}
    tensors["head.weight"][3, 2] = torch.nan
    tensors["embed.weight"][3, 2] = torch.nan
    save_file(tensors, tmp_path / "x.safetensors")
    weft.load_weights(_other(), tmp_path / "x.safetensors", weft.local())
    tensors["head.weight"][3, 1] += 1
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"embed.weight and head.weight differ" + LINES):
        weft.load_weights(model := _other(), tmp_path / "x.safetensors", weft.local())
    assert _equal(model, _other())


def test_a_module_that_cannot_be_loaded_into_is_refused(tmp_path):
    path, ctx = _checkpoint(tmp_path / "run"), weft.local()
    with pytest.raises(TypeError, match="load_weights: this is not a module" + LINES):
        weft.load_weights({}, path, ctx)
    with pytest.raises(ValueError, match="have no shape yet" + LINES):
        weft.load_weights(nn.LazyLinear(3), path, ctx)

    class Odd(nn.Linear):
        def state_dict(self, *args, **kwargs):
            return super().state_dict(*args, **kwargs) | {"extra": torch.ones(1)}

    with pytest.raises(TypeError, match="extra cannot be loaded" + LINES):
        weft.load_weights(Odd(2, 2), path, ctx)
    meta = _meta()
    optimizer = torch.optim.SGD(meta.parameters(), lr=1.0)
    with pytest.raises(OrderError, match="would keep the old" + LINES):
        weft.load_weights(meta, path, ctx)
    del optimizer
    meta.rope.scale = nn.Parameter(torch.ones(1))  # a value that reset_parameters might change
    with pytest.raises(CheckpointError, match=r"would have no value\n  found: +rope.inverse"):
        weft.load_weights(meta, path, ctx, strict=False)

    def fails():
        raise RuntimeError("the user's own")

    meta = _meta()
    meta.rope.reset_parameters = fails
    with pytest.raises(RuntimeError, match="the user's own"):
        weft.load_weights(meta, path, ctx)
    assert all(t.is_meta for t in (*meta.parameters(), *meta.buffers()))
    with pytest.raises(CheckpointError, match="object = 'teacher' is no module" + LINES):
        weft.load_weights(_other(), path, ctx, object="teacher")
    with pytest.raises(CheckpointError, match="object = 'teacher' has no effect" + LINES):
        weft.load_weights(_other(), tmp_path / "x.safetensors", ctx, object="teacher")


# -- files that cannot be used or trusted --------------------------------------------------------------


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("bomb",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt", "model.pkl"])
def test_a_pickle_is_refused_and_never_opened(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / name).write_bytes(pickle.dumps(Bomb()))
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    for path in (folder / name, folder, folder / "pytorch_model.bin.index.json"):
        with pytest.raises(
            CheckpointError, match="is a pickle, which may run any code" + LINES + ".*save_file.*weights_only=True"
        ):
            weft.load_weights(_other(), path, weft.local())
    (folder / name).rename(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read\n  found: .*torch.save"):
        weft.load_weights(_other(), folder / "model.safetensors", weft.local())
    assert not (tmp_path / "bomb").exists()


@pytest.mark.parametrize(
    "name",
    [
        "../out.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "",
        ".",
        "..",
        "x\0.safetensors",
        "model.safetensors.index.json",
        "linked.safetensors",
        "missing.safetensors",
        "fifo.safetensors",
        "n" * 300 + ".safetensors",
    ],
)
def test_an_index_does_not_lead_out_of_its_folder(tmp_path, name):
    save_file(_tensors(), tmp_path / "out.safetensors")
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "linked.safetensors").symlink_to(tmp_path / "out.safetensors")
    os.mkfifo(folder / "fifo.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(_tensors(), name)}))
    for path in (index, folder):
        with pytest.raises(CheckpointError, match="cannot be (used|read)" + LINES):
            weft.load_weights(_other(), path, weft.local())
    (folder / "model.safetensors").symlink_to(tmp_path / "out.safetensors")
    index.unlink()
    with pytest.raises(CheckpointError, match="cannot be used\n  found: +model.safetensors, a link to"):
        weft.load_weights(_other(), folder, weft.local())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        '{"weight_map": 3}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 1}}',
        "[" * 100000,
        '{"weight_map": {"a": {}}}',
        "\xff",
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path, text):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text, encoding="latin1")
    with pytest.raises(CheckpointError, match="an index that cannot be used" + r"(.|\n)*expected: (.|\n)*fix: "):
        weft.load_weights(_other(), index, weft.local())


def test_an_index_and_its_files_have_to_agree(tmp_path):
    *_, index = weft.export(_checkpoint(tmp_path / "run"), tmp_path / "hf", max_shard_size="100B")
    text = index.read_text()
    index.write_text(text.replace('"gain"', '"gone"'))
    with pytest.raises(CheckpointError, match=r"gone is not in model-0000\d"):
        weft.load_weights(_other(), index, weft.local())
    index.write_text(text)
    save_file({"gain": torch.tensor(9.0)}, index.parent / "model.safetensors")
    with pytest.raises(CheckpointError, match="both model.safetensors.index.json and model.safetensors"):
        weft.load_weights(_other(), index.parent, weft.local())
    weft.load_weights(model := _other(), index, weft.local())
    assert _equal(model)
    first = json.loads(text)["weight_map"]["embed.weight"]
    extra = load_file(index.parent / first) | {"unnamed": torch.ones(1)}
    save_file(extra, index.parent / first)
    with pytest.raises(CheckpointError, match="only in the file: unnamed"):
        weft.load_weights(_other(), index, weft.local())


def _file(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
BAD = {
    "empty": b"",
    "short": b"abc",
    "no header": _file(b""),
    "long header": _file(F32, length=2**63),
    "cut": _file({"a": F32}, b"abc"),
    "longer": _file({"a": F32}, b"abcde"),
    "no json": _file(b"{]"),
    "a list": _file([1, 2]),
    "no entry": _file({"a": 3}),
    "dtype": _file({"a": F32 | {"dtype": "F31"}}, b"abcd"),
    "shape": _file({"a": F32 | {"shape": [-1, -1]}}, b"abcd"),
    "float": _file({"a": F32 | {"shape": [1.0]}}, b"abcd"),
    "true": _file({"a": F32 | {"shape": [True]}}, b"abcd"),
    "size": _file({"a": F32 | {"shape": [2]}}, b"abcd"),
    "offsets": _file({"a": F32 | {"data_offsets": [4, 0]}}, b"abcd"),
    "overlap": _file({"a": F32, "b": F32}, b"abcdefgh"),
    "twice": _file(b'{"a": %b, "a": %b}' % ((json.dumps(F32).encode(),) * 2), b"abcd"),
    "gap": _file({"a": F32 | {"data_offsets": [4, 8]}}, b"abcdefgh"),
    "deep": _file(b"[" * 100000),
    "dict": _file({"a": F32 | {"dtype": {}}}),
    "huge": _file({"a": F32 | {"shape": [2**40, 2**40]}}, b"abcd"),
    "latin": _file(b'{"\xff": 1}'),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_damaged_file_is_named(tmp_path, kind):
    path = tmp_path / "x.safetensors"
    path.write_bytes(BAD[kind])
    with pytest.raises(CheckpointError, match=rf"load_weights: {re.escape(str(path))} cannot be read" + LINES):
        weft.load_weights(nn.Linear(1, 1), path, weft.local())


def test_a_file_cut_anywhere_or_swapped_is_noticed(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(_tensors(), path)
    whole = path.read_bytes()
    for length in (*range(0, len(whole), 37), len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="cannot be read" + LINES):
            weft.load_weights(_other(), path, weft.local())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nothing", "nothing of that name"),
        ("x.npz", "a file"),
        ("empty", "an empty folder"),
        ("two", "a.safetensors, b.safetensors"),
    ],
)
def test_a_path_without_weights_is_told(tmp_path, name, text):
    (tmp_path / "x.npz").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "two").mkdir()
    for one in "ab":
        save_file({"x": torch.ones(1)}, tmp_path / "two" / f"{one}.safetensors")
    with pytest.raises(CheckpointError, match=rf"cannot be used\n  found: +{text}" + r"(.|\n)*expected: (.|\n)*fix: "):
        weft.load_weights(_other(), tmp_path / name, weft.local())


def test_a_flipped_bit_in_a_checkpoint_is_noticed(tmp_path):
    path = _checkpoint(tmp_path / "run")
    (file,) = path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)
    for model in (_other(), _meta()):
        with pytest.raises(CheckpointError, match=r"rank-00000-of-00001.safetensors is damaged"):
            weft.load_weights(model, path, weft.local())
        assert model.gain.is_meta or _equal(model, _other())


# -- several ranks -------------------------------------------------------------------------------------


class Plain(nn.Module):
    """As `Net`, for shards: all of one dtype, a part with a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 5)
        self.rope = Rope()
        self.mid = nn.Linear(5, 5)
        self.head = nn.Linear(5, 9, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.arange(3) + 2**40)

    def forward(self, x):
        return self.head(self.mid(self.embed(x))) + self.rope.inverse.sum()


def _built(ctx, kind):
    """A module with values of its own in some form."""
    model = _meta(Plain) if "meta" in kind else _net(2 + ctx.rank, Plain)
    if not model.seen.is_meta:
        model.seen.zero_()
    optimizer = torch.optim.AdamW(model.parameters()) if "zero" in kind else None
    if kind == "replicate":
        model, ctx = weft.replicate(model, ctx)
    elif kind == "flat":
        model, ctx = weft.replicate(model, ctx, flat=True)
    elif kind.startswith("zero"):
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=int(kind[-1]))
    elif kind == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx, units="mid", reshard_after_forward=False)
        model(torch.tensor([[1, 2]]))  # leaves units gathered
    elif kind == "sharded meta":
        from torch.distributed.fsdp import fully_shard

        fully_shard([model.embed, model.head], mesh=ctx.mesh)
        fully_shard(model, mesh=ctx.mesh)
    return model, ctx, optimizer


KINDS = ["plain", "meta", "replicate", "flat", "zero 1", "zero 2", "zero 3", "fully_shard", "sharded meta"]


def _loads(ctx, kinds, path):
    wrong = []
    for kind in kinds:
        model, after, _ = _built(ctx, kind)
        loaded = weft.load_weights(model, path, after)
        same = _equal(model, _net(1, Plain)) and torch.equal(model.rope.inverse, torch.tensor([1.0, 0.5, 0.25]))
        out = model(torch.tensor([[1, 2], [8, 0]]))
        expected = _net(1, Plain)(torch.tensor([[1, 2], [8, 0]]))
        out.sum().backward()
        if not same or loaded[1:] != ((), ()) or not torch.allclose(out, expected):
            wrong.append(kind)
    return wrong


@pytest.mark.slow
def test_every_kind_of_module_on_several_ranks(tmp_path):
    def saves(ctx, folder):
        model, ctx = weft.fully_shard(_net(1, Plain), ctx, units="mid")
        return weft.save(weft.checkpointable({"model": model}, ctx)[0], folder, 1, ctx)

    path = run_ranks(saves, 3, tmp_path / "run")[0]
    weft.export(path, tmp_path / "hf", max_shard_size="100B")
    assert run_ranks(_loads, 2, KINDS, path) == [[]] * 2
    assert run_ranks(_loads, 3, KINDS, tmp_path / "hf") == [[]] * 3
    weft.load_weights(model := _net(2, Plain), path, weft.local())
    assert _equal(model, _net(1, Plain))


def _on_meshes(ctx, path):
    """Shards along the second dimension, and shards of which several ranks have the same."""
    wrong = []
    for placements in (
        [Replicate(), Shard(0)],
        [Shard(0), Replicate()],
        [Shard(1), Shard(0)],
        [Replicate(), Replicate()],
        [Shard(1), Replicate()],
    ):
        model = _net(2, Plain)
        for part in (model.embed, model.mid):
            cut = nn.Parameter(distribute_tensor(part.weight.detach(), ctx.mesh, placements))
            part.weight = cut
        model.head.weight = model.embed.weight
        counts = _count(lambda model=model: weft.load_weights(model, path, ctx))
        if not _equal(model, _net(1, Plain)):
            wrong.append(placements)
        if sum(weft.collectives.gather_objects(counts, ctx)) != sum(
            t.nbytes for t in _tensors(_net(1, Plain)).values()
        ):
            wrong.append((placements, weft.collectives.gather_objects(counts, ctx)))
    return wrong


def _count(work):
    """Bytes of tensors that are read while work is done: all but headers, whose length is at byte 0 and text at 8."""
    real, total = os.preadv, 0

    def counting(handle, buffers, at):
        nonlocal total
        count = real(handle, buffers, at)
        total += count if at not in (0, 8) else 0
        return count

    os.preadv = counting
    try:
        work()
    finally:
        os.preadv = real
    return total


def test_shards_on_a_mesh_of_two_axes(tmp_path):
    save_file(_tensors(_net(1, Plain)), tmp_path / "x.safetensors")
    assert run_ranks(_on_meshes, 4, tmp_path / "x.safetensors", mesh={"replica": 2, "shard": 2}) == [[]] * 4


def _counts(ctx, path):
    found = {}
    for kind in KINDS[: None if ctx.world_size > 1 else -1]:
        model, after, _ = _built(ctx, kind)
        found[kind] = _count(lambda model=model, after=after: weft.load_weights(model, path, after))
    return found


def test_together_the_ranks_read_each_byte_once(tmp_path):
    save_file(_tensors(_net(1, Plain)), tmp_path / "x.safetensors")
    total = sum(tensor.nbytes for tensor in _tensors(_net(1, Plain)).values())
    for ranks in (1, 2, 4):
        counts = run_ranks(_counts, ranks, tmp_path / "x.safetensors")
        for kind in counts[0]:
            assert sum(one[kind] for one in counts) == total, (kind, [one[kind] for one in counts])
            assert max(one[kind] for one in counts) <= total / ranks + 180  # the largest tensor


def _fails(ctx, path, odd):
    """One rank cannot read, or has another module or file; nobody changes anything."""
    from weft.checkpoint.format import safetensors_read

    texts = []
    for kind in ("replicate", "fully_shard", "meta"):
        model, after, _ = _built(ctx, kind)
        before = {name: _whole(t).clone() for name, t in model.state_dict().items()}
        real = os.preadv

        def broken(handle, buffers, at, real=real):
            if at == 8:
                return real(handle, buffers, at)
            raise OSError(5, "Input/output error")

        with pytest.raises(PeerError if ctx.rank == 0 else OSError) as caught:
            try:
                os.preadv = broken if ctx.rank == 1 else real
                weft.load_weights(model, path, after)
            finally:
                os.preadv = real
        texts.append(str(caught.value))
        assert safetensors_read.os.preadv is real
        after_all = model.state_dict()
        assert all(t.is_meta or torch.equal(_whole(after_all[name]), t) for name, t in before.items())
        assert kind != "meta" or all(t.is_meta for t in model.parameters())
    with pytest.raises((CheckpointError, PeerError), match="does not fit the module"):
        weft.load_weights(nn.Linear(2, 2) if ctx.rank else _net(2, Plain), path, ctx)
    with pytest.raises(ContextError, match="the ranks do not agree" + LINES):
        weft.load_weights(_net(2, Plain), odd if ctx.rank else path, ctx, strict=False)
    with pytest.raises(ContextError, match="the ranks do not agree" + LINES):
        weft.load_weights(_net(2, Plain), path, ctx, strict=ctx.rank == 0)
    model, _, _ = _built(ctx, "fully_shard")
    with told("weights/assign.py", "ctx of weft.start()") as it:
        weft.load_weights(model, path, weft.local())
    it.run(model=model, path=path, ctx=ctx)
    with pytest.raises(ValueError, match="the dtype can no longer be changed" + LINES):
        weft.load_weights(model, path, ctx, dtype="bf16")
    weft.load_weights(model, path, ctx)  # and the same ranks can go on
    assert _equal(model, _net(1, Plain))
    return texts


@pytest.mark.slow
def test_an_error_on_one_rank_leaves_all_as_they_were(tmp_path):
    save_file(_tensors(_net(1, Plain)), tmp_path / "x.safetensors")
    save_file({"other": torch.ones(1)}, tmp_path / "odd.safetensors")
    texts = run_ranks(_fails, 2, tmp_path / "x.safetensors", tmp_path / "odd.safetensors")
    assert all("Input/output error" in text for one in texts for text in one)


def _large(ctx, path):
    peaks = []
    for meta in (False, True):
        with torch.device("meta" if meta else "cpu"):
            model = nn.Sequential(*(nn.Linear(2000, 4000, bias=False) for _ in range(3)))
        if meta:
            from torch.distributed.fsdp import fully_shard

            fully_shard(model, mesh=ctx.mesh)
        else:
            model, ctx = weft.fully_shard(model, ctx)
        Path("/proc/self/clear_refs").write_text("5")
        before = _peak_bytes()
        weft.load_weights(model, path, ctx)
        peaks.append(_peak_bytes() - before)
    return peaks


def _peak_bytes():
    return next(int(line.split()[1]) * 1024 for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are measured on Linux")
def test_memory_is_that_of_the_shard(tmp_path):
    size = 2000 * 4000 * 4
    save_file({f"{n}.weight": torch.ones(4000, 2000) for n in range(3)}, tmp_path / "x.safetensors")
    for peaks in run_ranks(_large, 2, tmp_path / "x.safetensors"):
        assert max(peaks) < size * 3 / 2 + size / 2, peaks  # the shard, and less than a tensor


def test_a_mutated_file_is_read_or_refused_by_name(tmp_path):
    path, random = tmp_path / "x.safetensors", Random(0)
    save_file(_tensors(), path)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(150):
        content = bytearray(whole)
        for _ in range(random.choice([1, 1, 1, 4])):
            content[random.randrange(header)] = random.choice(b'[]{}":,0123456789-eEFIU\\\x00\xff')
        path.write_bytes(content)
        with contextlib.suppress(CheckpointError):
            weft.load_weights(_other(), path, weft.local())


def _saves_sharded(ctx, folder):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    model, ctx = weft.fully_shard(model, ctx, units=nn.Linear)
    state, ctx = weft.checkpointable({"policy": model}, ctx)
    weft.save(state, folder, 1, ctx)
    return whole


def test_tensors_are_read_by_name_without_a_module(tmp_path):
    whole = run_ranks(_saves_sharded, 2, str(tmp_path))[0]
    for names, expected in ((None, list(whole)), ("0.*", ["0.weight", "0.bias"]), (["**.bias"], ["0.bias", "1.bias"])):
        found = weft.weights.read(tmp_path, names=names, object="policy")
        assert set(found) == set(expected)
        assert all(torch.equal(tensor, whole[name]) for name, tensor in found.items())
    save_file({"a": torch.arange(3), "b": torch.ones(2)}, tmp_path / "x.safetensors")
    found = weft.weights.read(tmp_path / "x.safetensors", names=lambda name: name == "a")
    assert list(found) == ["a"] and torch.equal(found["a"], torch.arange(3))
    with pytest.raises(CheckpointError, match="read: no tensors remain" + LINES):
        weft.weights.read(tmp_path, names="2.*", object="policy")
    part = min(tmp_path.glob("step*/*.safetensors"))
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="damaged" + LINES):
        weft.weights.read(tmp_path, object="policy")


def test_the_fix_for_other_shapes_leaves_out_what_does_not_fit(tmp_path):
    state, ctx = weft.checkpointable({"model": nn.Sequential(nn.Embedding(7, 2), nn.Linear(2, 2))}, weft.local())
    path = weft.save(state, tmp_path, 1, ctx)
    model = nn.Sequential(nn.Embedding(10, 2), nn.Linear(2, 2))
    before = model[0].weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"in the module: 0.weight: float32 \(7, 2\)") as caught:
        weft.load_weights(model, path, weft.local())
    line = str(caught.value).rpartition("fix:")[2].strip()
    eval(line, {"weft": weft, "model": model, "path": path, "ctx": ctx})
    assert torch.equal(model[0].weight, before)
    assert torch.equal(model[1].weight, state.objects["model"][1].weight)
