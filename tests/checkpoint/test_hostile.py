"""Checkpoints and weights that somebody has made to do harm, wherever they lie and whatever reads them.

Nothing outside of the place that was asked for changes, nothing is run, nothing waits for ever, and every error is one
of weft's, which names the file.
"""

import hashlib
import json
import os
import pickle
import re
import shutil
import stat
import struct
import tempfile
from pathlib import Path

import fsspec
import pytest
from torch import nn

import weft
from weft.errors import CheckpointError

NAME = "manifest.json"
DATA = "rank-00000-of-00001.safetensors"
OUTSIDE = "outside"  # beside the place, a file that must not change


def seal(rest):
    rest = rest if isinstance(rest, bytes) else rest.encode("utf-8", "surrogatepass")
    return b'{"sha256": "%s",\n%s' % (hashlib.sha256(rest).hexdigest().encode(), rest)


def text(data):
    return seal(json.dumps(data)[1:])


def safetensors(header, body=b"\0" * 64):
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + body


def entry(data):
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


HEADER = {"model/weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}


def manifest(data=None, **changes):
    data = safetensors(HEADER) if data is None else data
    piece = {"file": DATA, "offsets": [0, 0], "shape": [4, 4]}
    return {
        "step": 5,
        "world_size": 1,
        "values": {"model": {"extra": {}, "transforms": {}}},
        "ranks": [{}],
        "run": "r",
        "format": "weft checkpoint 2",
        "files": {DATA: entry(data)},
        "tensors": {"model/weight": {"dtype": "float32", "shape": [4, 4], "pieces": [piece], "same_as": None}},
        **changes,
    }


def changed(*path, to):
    """A manifest in which one value is another; the key "KEY" renames."""
    found = manifest()
    target = found
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = to
    return found


def named(name):
    """A manifest whose file has another name, in all places."""
    found = manifest()
    found["files"] = {name: found["files"].pop(DATA)}
    found["tensors"]["model/weight"]["pieces"][0]["file"] = name
    return found


_TENSOR = ("tensors", "model/weight")
_PIECE = (*_TENSOR, "pieces", 0)
NAMES = [
    "../outside",
    "../../../../../../../../etc/passwd",
    "/etc/passwd",
    "{tmp}/outside",
    "..",
    ".",
    "",
    "a/../../outside",
    "a\\..\\outside",
    "\0",
    "a\0.safetensors",
    "..safetensors",
    "-rf.safetensors",
    "~/x.safetensors",
    "x\n.safetensors",
    "CON",
    "x" * 300 + ".safetensors",
    "\u202e.safetensors",
    "manifest.json",
    "x.pt",
    "file:///etc/passwd",
    "s3://a/b",
]
MANIFESTS = {
    **{f"a file called {name!r:.40}": named(name) for name in NAMES},
    **{f"a piece in {name!r:.40}": changed(*_PIECE, "file", to=name) for name in ("../outside", "/etc/passwd", "no")},
    **{
        f"{v!r:.30} bytes": changed("files", DATA, "bytes", to=v) for v in (-1, 2**63, 1e300, True, "64", None, 10**400)
    },
    **{
        f"shape {v!r:.30}": changed(*_TENSOR, "shape", to=v)
        for v in ([-4, -4], [2**62, 4], [2**40, 0, 2**40], [1] * 10_000, [[4], 4], [4.0, 4], "44", None, [True, 16])
    },
    **{f"offsets {v!r:.30}": changed(*_PIECE, "offsets", to=v) for v in ([1, 0], [-1, 0], [0], [0, 0, 0], [10**30, 0])},
    **{f"a piece of {v!r:.30}": changed(*_PIECE, "shape", to=v) for v in ([5, 4], [4, 3], [2**61, 2**61], [0, 0])},
    **{
        f"dtype {v!r:.30}": changed(*_TENSOR, "dtype", to=v)
        for v in ("load", "__class__", "float128", [], None, "int64")
    },
    **{f"same as {v!r:.30}": changed(*_TENSOR, "same_as", to=v) for v in ("model/weight", "no", "../x", 3, ["a"])},
    **{f"step {v!r:.30}": changed("step", to=v) for v in (-1, 6, 10**18, 10**30, 1.5, True, "5", "../5", None)},
    **{f"world size {v!r:.30}": changed("world_size", to=v) for v in (-1, 0, 2, 2**40, "1")},
    **{f"ranks {v!r:.30}": changed("ranks", to=v) for v in ([], [[]], {}, None, [None], [{"rng": 3}])},
    **{
        f"values {v!r:.40}": changed("values", "model", to=v)
        for v in (
            3,
            [],
            {},
            {"$": "tensor"},
            {"$": "tensor", "name": "model/weight"},
            {"extra": []},
            {"extra": {"weight": 1}, "transforms": {"x": {"$": "tensor", "name": "../x"}}},
            {"$": []},
        )
    },
    **{f"score {v!r:.30}": changed("score", to=v) for v in ("low", [], True, 10**400)},
    **{f"run {v!r:.30}": changed("run", to=v) for v in (3, [], {"a": 1})},
    **{
        f"format {v!r:.30}": changed("format", to=v)
        for v in ("weft checkpoint 99", "other", None, 2, ["weft checkpoint 2"])
    },
    **{f"files {v!r:.30}": changed("files", to=v) for v in ([], None, {DATA: []}, {DATA: {}}, {DATA: {"bytes": 64}})},
    **{
        f"hash {v!r:.30}": changed("files", DATA, to={"bytes": 64, **v})
        for v in ({"md5": "0" * 32}, {"sha256": "0" * 63}, {"sha256": "x" * 64}, {"sha256": 3}, {"__class__": "0" * 64})
    },
    "other tensors": changed("tensors", to=[]),
    "no tensors": changed("tensors", to=None),
}
TEXTS = {
    "empty": b"",
    "a brace": b"{",
    "null": seal("null"),
    "a list": seal("[]"),
    "not UTF-8": seal(b'"\xff\xfe": 1}'),
    "deep lists": seal('"step": ' + "[" * 100_000),
    "deep objects": seal('"a":' * 1 + '{"a":' * 100_000),
    "deep values": seal(json.dumps(manifest())[1:-1] + ', "values": {"model": ' + "[" * 650 + "]" * 650 + "}}"),
    "a long number": seal('"step": ' + "9" * 10_000 + "}"),
    "NaN": seal(json.dumps(changed("step", to=float("nan")))[1:]),
    "half a surrogate": seal('"step": "\ud800"}'),
    "a wrong seal": text(manifest())[:20] + b"0" + text(manifest())[21:],
    "cut off": text(manifest())[:-9],
    "zeros": b"\0" * 1000,
    "a pickle": pickle.dumps({"step": 5}),
}


_TENSOR_64 = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}


def headers(name):
    """Files for a tensor of this name, of 64 bytes."""

    def header(**changes):
        return safetensors({name: {**_TENSOR_64, **changes}})

    twice = b'{"%s": %s, "%s": %s}' % ((name.encode(), json.dumps(_TENSOR_64).encode()) * 2)
    return {
        "empty": b"",
        "seven bytes": b"\1" * 7,
        "no header": struct.pack("<Q", 0),
        "a long header": struct.pack("<Q", 2**63),
        "a header of 2**40": struct.pack("<Q", 2**40) + b"{}" * 40,
        "not JSON": safetensors(b"hello"),
        "a list": safetensors([]),
        "deep": safetensors(b'{"a":' * 50_000),
        "deep lists": safetensors(b"[" * 50_000),
        "not UTF-8": safetensors(b'{"\xff": 1}'),
        "a name twice": safetensors(twice),
        "a pickle": pickle.dumps(nn.Linear(2, 2)),
        "a zip": b"PK\3\4" + b"\0" * 100,
        "too short": safetensors({name: _TENSOR_64}, b"\0" * 60),
        "too long": safetensors({name: _TENSOR_64}, b"\0" * 70),
        "an entry that is a list": safetensors({name: []}),
        "an entry that is null": safetensors({name: None}),
        "another name": safetensors({"bias": _TENSOR_64}),
        "overlap": safetensors({name: _TENSOR_64, "b": _TENSOR_64}),
        "a long number": safetensors(b"[" + b"9" * 9999 + b"]"),
        **{f"dtype {v!r:.20}": header(dtype=v) for v in ("F128", "load", None, [], 3, "I32")},
        **{
            f"shape {v!r:.20}": header(shape=v)
            for v in ([-4, -4], [2**62, 4], [2**40, 0, 2**40], [[4]], "44", None, [4.0, 4], [True, 16], [16])
        },
        **{
            f"offsets {v!r:.20}": header(data_offsets=v)
            for v in ([-8, 56], [64, 0], [0, 2**70], [0], [0, 64, 64], "ab", None, [0.0, 64])
        },
        "no elements": safetensors({name: {"dtype": "F32", "shape": [2**40, 0], "data_offsets": [0, 0]}}, b""),
    }


HEADERS = headers("model/weight")


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path(tempfile.gettempdir()) / "exploded",))


def links(folder, outside):
    """Things that are no files, as the manifest or as a file that it names."""
    for name in (NAME, DATA):
        for kind, make in {
            "a link outside": lambda path: path.symlink_to(outside),
            "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
            "a link to itself": lambda path: path.symlink_to(path.name),
            "a folder": Path.mkdir,
            "a pipe": os.mkfifo,
            "a device": lambda path: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5)),
        }.items():
            path = folder / name
            path.unlink()
            try:
                make(path)
            except PermissionError:  # only root makes devices
                continue
            yield f"{kind} as {name}"
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
            path.write_bytes(text(manifest()) if name == NAME else safetensors(HEADER))


# -- where they lie, and what reads them -----------------------------------------------------------------


def readers(place):
    """Everything that reads what is at a place: a path or a URL of one checkpoint, and of the directory around it."""
    model = nn.Linear(4, 4, bias=False)
    one, around = f"{place}/step-00000005", str(place)

    def restore(path):
        state, ctx = weft.checkpointable({"model": model}, weft.local(), rng=False)
        return weft.restore(state, path, ctx)

    yield "restore", one, lambda: restore(one)
    yield "restore", around, lambda: restore(around)
    yield "verify", one, lambda: weft.checkpoint.verify(one)
    yield "latest", around, lambda: weft.checkpoint.latest(around)
    yield "best", around, lambda: weft.checkpoint.best(around)
    yield "load_weights", one, lambda: weft.load_weights(model, one, weft.local())
    yield "load_weights", around, lambda: weft.load_weights(model, around, weft.local())
    yield "read", one, lambda: weft.weights.read(one)
    yield "export", one, lambda: weft.export(one, Path(tempfile.gettempdir()) / "exported")


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A folder with a place in it, and everything else that must not change."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / OUTSIDE).write_text("original")
    (tmp_path / "run" / "step-00000005").mkdir(parents=True)
    fsspec.filesystem("memory").store.clear()
    yield tmp_path
    fsspec.filesystem("memory").store.clear()


def seen(folder):
    """Every file below a folder, with its content."""
    files = (Path(root) / name for root, _, names in os.walk(folder) for name in names)
    return {str(path): path.read_bytes() for path in files if path.is_file() and not path.is_symlink()}


def plant(world, files):
    """Put files into a checkpoint: in a directory, and as objects, of which any name is possible."""
    folder = world / "run" / "step-00000005"
    shutil.rmtree(folder)
    folder.mkdir()
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    for name, data in files.items():
        if "/" not in name and name not in ("", ".", "..") and "\0" not in name and len(name) < 250:
            (folder / name).write_bytes(data)
        path = memory._strip_protocol(f"memory://bucket/run/step-00000005/{name}")
        memory.store[path] = fsspec.implementations.memory.MemoryFile(memory, path, data)
    return folder, [f"{world}/run", f"file://{world}/run", "memory://bucket/run"]


def check(world, files, *, may_work=False):
    """Read it in every way; what is right, is up to the kind, as long as nothing else happens."""
    _, places = plant(world, files)
    before = seen(world)
    for place in places:
        for what, path, call in readers(place):
            try:
                call()
            except CheckpointError as error:
                assert re.search(r"found: (.|\n)*fix: ", str(error)), (what, path, error)
                assert place.removeprefix("file://") in str(error), (what, path, error)
            else:
                assert may_work or what in ("latest", "best"), (what, path, "worked")
            shutil.rmtree(world / "tmp" / "exported", ignore_errors=True)
            assert seen(world) == before, (what, path)
            assert not (world / "tmp" / "exploded").exists()
    assert not list((world / "tmp").iterdir())


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_hostile_manifest(world, kind):
    data = json.loads(json.dumps(MANIFESTS[kind]).replace("{tmp}", str(world)))
    names = data["files"] if isinstance(data["files"], dict) else ()
    files = {name: safetensors(HEADER) for name in names if isinstance(name, str)}
    files |= {DATA: safetensors(HEADER), NAME: text(data)}
    check(world, files, may_work=kind.startswith(("values", "ranks", "dtype 'int64'")))


@pytest.mark.parametrize("kind", TEXTS)
def test_a_text_that_is_no_manifest(world, kind):
    check(world, {DATA: safetensors(HEADER), NAME: TEXTS[kind]}, may_work=kind == "deep values")


@pytest.mark.parametrize("kind", HEADERS)
def test_a_hostile_header_of_which_the_hash_is_right(world, kind):
    data = HEADERS[kind]
    check(world, {DATA: data, NAME: text(manifest(data))}, may_work=True)


def test_the_one_they_are_made_of_can_be_read(world):
    _, places = plant(world, {DATA: safetensors(HEADER), NAME: text(manifest())})
    for place in places:
        for _, _, call in readers(place):
            call()
            shutil.rmtree(world / "tmp" / "exported", ignore_errors=True)


def test_links_pipes_and_devices_are_not_opened(world):
    folder, places = plant(world, {DATA: safetensors(HEADER), NAME: text(manifest())})
    before = seen(world)
    del before[str(folder / NAME)], before[str(folder / DATA)]
    for kind in links(folder, world / OUTSIDE):
        for place in places[:2]:
            for what, path, call in readers(place):
                try:
                    call()
                except CheckpointError as error:
                    assert "step-00000005" in str(error) or "run" in str(error), (kind, what, error)
                else:
                    assert what in ("latest", "best"), (kind, what, path)
        now = seen(world)
        assert {name: now[name] for name in before} == before, kind


@pytest.mark.parametrize("hint", [b"", b"../../x", b"/etc/passwd", b"step-00000009", b"\xff\xfe", b"step-" + b"9" * 500,
                                  b"step-00000005\0", b"\0" * 10**6])  # fmt: skip
def test_a_hostile_hint_changes_nothing(world, hint):
    _, places = plant(world, {DATA: safetensors(HEADER), NAME: text(manifest())})
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/bucket/run/newest", hint)
    for _, _, call in readers(places[-1]):
        call()
        shutil.rmtree(world / "tmp" / "exported", ignore_errors=True)
    state, ctx = weft.checkpointable({"model": nn.Linear(4, 4, bias=False)}, weft.local(), rng=False)
    weft.restore(state, places[-1], ctx)
    weft.save(state, places[-1], 6, ctx, keep=1)
    assert weft.checkpoint.latest(places[-1]).name == "step-00000006"


# -- weights in the layout of Hugging Face ---------------------------------------------------------------

_INDEX = "model.safetensors.index.json"
_ONE = {"weight": _TENSOR_64}
INDICES = {
    **{f"a file called {name!r:.40}": {"weight_map": {"weight": name}} for name in NAMES},
    **{
        f"a map {v!r:.30}": {"weight_map": v}
        for v in ([], None, {}, 3, {"weight": 3}, {"weight": None}, {"weight": ["a"]})
    },
    "itself": {"weight_map": {"weight": _INDEX}},
    "no map": {},
    "a list": [],
    "null": None,
    "a tensor that is not there": {"weight_map": {"bias": "a.safetensors"}},
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"weight_map":' * 100_000,
    "not UTF-8": b'{"\xff": 1}',
    "empty": b"",
    "zeros": b"\0" * 100,
    "a pickle": pickle.dumps({"weight_map": {}}),
    "a long number": b"9" * 10_000,
}


def _weights(world, call):
    before = seen(world)
    with pytest.raises(CheckpointError, match=r"(model|a\.safetensors|weights)(.|\n)*found: (.|\n)*fix: "):
        call()
    assert seen(world) == before and not (world / "tmp" / "exploded").exists()


def _reads(path):
    model = nn.Linear(4, 4, bias=False)
    return [lambda: weft.load_weights(model, path, weft.local()), lambda: weft.weights.read(path)]


@pytest.mark.parametrize("kind", INDICES)
def test_a_hostile_index(world, kind):
    folder, data = world / "weights", INDICES[kind]
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(safetensors(_ONE))
    raw = data if isinstance(data, bytes) else json.dumps(data).replace("{tmp}", str(world)).encode()
    (folder / _INDEX).write_bytes(raw)
    for path in (folder, folder / _INDEX, f"file://{folder}"):
        for call in _reads(path):
            _weights(world, call)


@pytest.mark.parametrize("kind", HEADERS)
def test_a_hostile_header_of_weights(world, kind):
    folder = world / "weights"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(headers("weight")[kind])
    for path in (folder, folder / "model.safetensors"):
        load, read = _reads(path)
        _weights(world, load)
        if kind in (
            "no elements",
            "another name",
            "dtype 'I32'",
            "shape [16]",
        ):  # it can be read as it is, and does not fit the model
            read()
        else:
            _weights(world, read)


@pytest.mark.parametrize("name", ["model.safetensors", _INDEX])
def test_links_pipes_and_devices_among_weights_are_not_opened(world, name):
    folder = world / "weights"
    folder.mkdir()
    (world / "elsewhere.safetensors").write_bytes(safetensors(_ONE))
    (world / "index.json").write_text(json.dumps({"weight_map": {"weight": "elsewhere.safetensors"}}))
    for make in (
        lambda path: path.symlink_to(world / ("index.json" if name == _INDEX else "elsewhere.safetensors")),
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to("gone"),
        lambda path: path.symlink_to(path.name),
        os.mkfifo,
        Path.mkdir,
    ):
        path = folder / name
        make(path)
        for call in _reads(folder):
            _weights(world, call)
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
