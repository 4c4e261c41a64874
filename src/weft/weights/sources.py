"""Where weights come from: a safetensors file, an index with its files, a folder of these, or a checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import torch

from weft.checkpoint.format.manifest import NAME, Manifest, Piece, TensorEntry, check_place, read_manifest
from weft.checkpoint.format.plain_files import parse_json, raise_if_unreadable, read_plain
from weft.checkpoint.format.safetensors_read import TensorFiles
from weft.checkpoint.format.transfer import Stored
from weft.checkpoint.state.collect import plain_name
from weft.checkpoint.storage.directory import Directory
from weft.checkpoint.storage.find import check_files, complete_checkpoints
from weft.checks import option_error
from weft.contract.select_modules import Names, fits_pattern
from weft.errors import CheckpointError, listed, value_error
from weft.tensors.blocks import whole

INDEX = ".safetensors.index.json"
MAX_INDEX_BYTES = 2**28
_SHORT = MappingProxyType({"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"})
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_PART = r"-\d+-of-\d+"  # in the names of files that have a part of the weights each
_CALLS = MappingProxyType(
    {
        "export": "weft.export({}, out)",
        "read": "weft.weights.read({})",
        "place": "model, ctx = weft.place(model, ctx, plan, weights={})",
        "quantized": "model, ctx = weft.quantized(model, ctx, scheme, weights={})",
        "estimate": "weft estimate {}",
    }
)


def reading(what: str, path: str, option: str = "") -> str:
    """The line that calls a function with a path to read from, for the texts of errors.

    Example:
        >>> reading("read", '"model.safetensors"')
        'weft.weights.read("model.safetensors")'
    """
    if option and what == "quantized":  # which has none
        return f"{reading('load_weights', path, option)}  # then weft.quantized, without weights="
    call = _CALLS.get(what, "weft.load_weights(model, {}, ctx)").format(path)
    return f"{call[:-1]}, {option})" if option else call


class WeightFiles(NamedTuple):
    """Tensors by the names a module has for them, and the files they lie in.

    Attributes:
        path: Of the file, index or folder.
        tensors: What there is; tied ones are equal.
        files: To read from.
        manifest: Of a checkpoint.
        dtypes: By key, what averages are rounded to that are kept in more bits than the weights.
    """

    path: Path
    tensors: dict[str, Stored]
    files: TensorFiles
    manifest: Manifest | None = None
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({})

    def dtype_of(self, stored: Stored) -> torch.dtype:
        """The dtype that a tensor has in the module."""
        return self.dtypes.get(stored.key, stored.dtype)

    def verify(self, used: Iterable[Stored], *, number: int = 0, of: int = 1) -> None:
        """Compare the files that tensors of a checkpoint lie in with their hashes: one in `of` files, from a number.

        Raises:
            CheckpointError: One is damaged; the text names it.
            OSError: One cannot be read.
        """
        if self.manifest is not None:
            files = sorted({piece.file for one in used for piece in one.entry.pieces})[number::of]
            check_files(Directory(self.path.parent), self.path.name, self.manifest, files)


def floating_dtype(what: str, dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype by itself or by name.

    Raises:
        ValueError: It is unknown, or not for real numbers.

    Example:
        >>> floating_dtype("f", "bf16"), floating_dtype("f", "torch.float16"), floating_dtype("f", None)
        (torch.bfloat16, torch.float16, None)
    """
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    found = getattr(torch, _SHORT.get(name, name), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        expected = "a floating-point dtype: only tensors of these are converted"
        raise option_error(what, "dtype", dtype, expected=expected, fix="dtype=torch.bfloat16")
    return found


def chosen_tensors(what: str, tensors: Mapping[str, Stored], filter: Names | None, *, option: str) -> dict[str, Stored]:
    """The tensors that the user wants, tied ones once.

    Args:
        what: The function that asks, for the texts of errors.
        tensors: All there are.
        filter: A pattern, several, or a function of the name; None for all.
        option: The name of that argument.

    Raises:
        CheckpointError: None is left.
        ValueError: `filter` is something else.
    """
    if filter is None:
        names = list(tensors)
    elif callable(filter):
        names = [name for name in tensors if filter(name)]
    else:
        patterns = [filter] if isinstance(filter, str) else list(filter) if isinstance(filter, Iterable) else [filter]
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise value_error(
                f"{what}: {option} = {filter!r:.80} cannot be used",
                found=listed(sorted({type(one).__name__ for one in patterns if not isinstance(one, str)})),
                expected="a pattern, several patterns, or a function of the name",
                fix=f'{option}="**.weight"  # or lambda name: "lora_" in name',
            )
        names = [name for name in tensors if any(fits_pattern(name, pattern) for pattern in patterns)]
        idle = [one for one in patterns if not any(fits_pattern(name, one) for name in names)]
        names = [] if idle else names
    if not names:
        raise CheckpointError(
            f"{what}: no tensors remain",
            found=f"{len(tensors)} tensors: {listed(tensors) or 'none'}",
            expected="tensors, with at least one match for each pattern",
            fix=f"{option}={next(iter(tensors))!r}" if tensors else "path or object= with tensors in it",
        )
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(tensors[name].key, name)
    return {name: tensors[name] for name in first.values()}


# -- checkpoints -------------------------------------------------------------------------------------


def from_checkpoint(what: str, path: Path, key: str, *, averages: bool = False) -> WeightFiles:
    """The tensors of one module in a checkpoint, or in the newest complete one of a directory.

    Raises:
        CheckpointError: There is none, or it has no such module, or no averages of it.
    """
    folder = _checkpoint_folder(what, path)
    manifest = read_manifest(folder)
    check_place(folder, manifest)
    modules = [name for name, value in manifest.values.items() if isinstance(value, dict) and "extra" in value]
    if key not in modules:
        chooses = what in ("export", "load_weights", "read")
        call, then = (what, "") if chooses else ("export", "  # and read from out")
        raise CheckpointError(
            f"{what}: object = {key!r} is no module in {folder}",
            found=f"modules: {listed(map(repr, modules)) or 'none'}",
            expected="the name a module was given in weft.checkpointable",
            fix=reading(call, "path", f"object={modules[0]!r}") + then
            if modules
            else 'state, ctx = weft.checkpointable({"model": model}, ctx)  # and save again',
        )
    tensors = {
        name.removeprefix(f"{key}/"): Stored(entry.same_as or name, manifest.tensors[entry.same_as or name])
        for name, entry in manifest.tensors.items()
        if name.startswith(f"{key}/") and not name.startswith(f"{key}/#")  # what transforms keep is no weight
    }
    files = TensorFiles(what, {name: folder / name for name in manifest.files})
    source = WeightFiles(folder, tensors, files, manifest)
    return _averaged(what, source, key, modules) if averages else source


def averages_in(manifest: Manifest, key: str) -> dict[str, Stored]:
    """The averages of a module in a checkpoint, those that `average_weights` of one of its parts keeps included."""
    pattern = re.compile(rf"{re.escape(key)}/#((?:.*\.)?)Averages'*/weights/(.+)", re.DOTALL)
    found = [match for name in manifest.tensors if (match := pattern.fullmatch(name))]
    found.sort(key=lambda match: len(match[1]), reverse=True)  # the averages of the whole count, the last ones
    return {plain_name(match[1] + match[2]): Stored(match[0], manifest.tensors[match[0]]) for match in found}


def _averaged(what: str, source: WeightFiles, key: str, modules: list[str]) -> WeightFiles:
    """The same with averages in place of the weights that have some, for all names of tied ones."""
    assert source.manifest is not None
    averages = averages_in(source.manifest, key)
    if not averages:
        others = [name for name in modules if averages_in(source.manifest, name)]
        option = f"object={others[0]!r}, averages=True" if others else f"object={key!r}"
        raise CheckpointError(
            f"{what}: {source.path} has no averages of {key!r}",
            found=f"averages of {listed(map(repr, others))}" if others else "no averages",
            expected="a module that weft.average_weights was applied to before it was saved",
            fix=reading(what, "path", option) + ("" if others else "  # the weights themselves"),
        )
    weights = source.tensors
    instead = {weights[name].key: stored for name, stored in averages.items() if name in weights}
    dtypes = {instead[one.key].key: one.dtype for one in weights.values() if one.key in instead}
    tensors = {**averages, **{name: instead.get(one.key, one) for name, one in weights.items()}}
    return source._replace(tensors={name: tensors[name] for name in (*weights, *tensors)}, dtypes=dtypes)


def _checkpoint_folder(what: str, path: Path) -> Path:
    if os.path.lexists(path / NAME):
        return path
    directory = Directory(path)
    newest = complete_checkpoints(directory, most=1) if directory.names() else []
    if newest:
        return path / newest[0][0]
    near = [path.parent, *(sorted(path.iterdir()) if path.is_dir() else [])]
    meant = next((one for one in near if one.is_dir() and _is_complete(one)), None)
    raise CheckpointError(
        f"{what}: there is no complete checkpoint in {path}",
        found=listed(directory.names()) or _content(path),
        expected=f"the folder of a checkpoint, with {NAME}, or a directory of such folders",
        fix=reading(what, f'"{meant}"') if meant else f"{reading(what, 'directory')}  # that of weft.save",
    )


def _is_complete(path: Path) -> bool:
    """Whether this is a complete checkpoint, or a directory with one."""
    if not (path / NAME).exists():
        return bool(complete_checkpoints(Directory(path), most=1))
    return path.name in dict(complete_checkpoints(Directory(path.parent)))


def _content(path: Path) -> str:
    if not path.is_dir():
        return "a file" if path.exists() else "nothing of that name"
    return listed(sorted(one.name for one in path.iterdir())) or "an empty folder"


# -- the Hugging Face layout -------------------------------------------------------------------------


def from_path(what: str, path: Path, key: str, *, averages: bool = False) -> WeightFiles:
    """The tensors of a file, an index, a folder or a checkpoint.

    Raises:
        CheckpointError: There are none, or they are in a form that cannot be read or trusted.
    """
    if path.name == NAME:
        path = path.parent
    if os.path.lexists(path / NAME) or Directory(path).names():
        return from_checkpoint(what, path, key, averages=averages)
    if key != "model" or averages:
        raise CheckpointError(
            f"{what}: {'averages = True' if averages else f'object = {key!r}'} has no effect here",
            found=f"{path} is no checkpoint",
            expected="object and averages for checkpoints of weft, which may hold several modules and their averages",
            fix=reading(what, "path"),
        )
    chosen = _in_folder(what, path) if path.is_dir() else path
    if chosen.suffix in _PICKLES:
        _refuse_pickle(what, chosen)
    if not chosen.is_file() or chosen.suffix not in (".json", ".safetensors"):
        _refuse(what, chosen, _content(chosen))
    # A file that the user names may be a link; one found in a folder must not lead out of it.
    place = chosen.resolve() if chosen is path else _place(what, path, chosen.name)
    if chosen.suffix == ".json":
        return _from_index(what, chosen, place)
    return _joined(what, chosen, {chosen.name: place}, {})


def _in_folder(what: str, folder: Path) -> Path:
    """The file or index in a folder; transformers calls it "model", others by other names."""
    names = {one.name for one in folder.iterdir()}
    if {f"model{INDEX}", "model.safetensors"} <= names:
        _refuse(what, folder, f"both model{INDEX} and model.safetensors")
    indices = [name for name in names if name.endswith(INDEX)]
    files = [name for name in names if name.endswith(".safetensors")]
    usual = [name for name in (f"model{INDEX}", "model.safetensors") if name in names]
    pickles = sorted(name for name in names if Path(name).suffix in _PICKLES)
    chosen = usual or indices or files
    if pickles and not chosen:
        _refuse_pickle(what, folder / min(pickles, key=lambda name: ("model" not in name, name)))
    if len(chosen) != 1:
        _refuse(what, folder, _content(folder))
    return folder / chosen[0]


def _from_index(what: str, path: Path, place: Path) -> WeightFiles:
    try:
        places: Any = parse_json(read_plain(place, most=MAX_INDEX_BYTES))["weight_map"]
        if not places or not all(isinstance(file, str) for file in places.values()):
            raise ValueError("no names of files")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise_if_unreadable(error)
        _refuse(what, path, f"an index that cannot be used: {type(error).__name__}: {error}", error)
    files = {file: _place(what, path.parent, file) for file in dict.fromkeys(places.values())}
    if any(file.endswith(INDEX) for file in files):
        _refuse(what, path, "an index that names itself")
    return _joined(what, path, files, places)


def _joined(what: str, path: Path, places: dict[str, Path], index: dict[str, str]) -> WeightFiles:
    """Everything that files hold; where an index says which file a tensor is in, that one."""
    files = TensorFiles(what, places)
    tensors: dict[str, Stored] = {}
    twice: list[str] = []
    for file in places:
        for name, (dtype, shape, _) in files.slots(file).items():
            if index.get(name, file) != file:
                continue
            twice += [name] if name in tensors else []
            piece = Piece(file=file, offsets=whole(shape).offsets, shape=shape)
            tensors[name] = Stored(name, TensorEntry(dtype=dtype, shape=shape, pieces=(piece,)))
    lost = [f"{name} is not in {file}" for name, file in index.items() if name not in tensors]
    if lost or twice:
        _refuse(what, path, listed([*lost, *(f"{name} is in several files" for name in twice)]))
    return WeightFiles(path, tensors, files)


def _place(what: str, folder: Path, name: str) -> Path:
    """The path of a file in a folder; a name or link that leads out of it is refused.

    One kind of link is followed: the cache of Hugging Face keeps the files of a model in `blobs`, and
    `snapshots/<revision>` has links to them.
    """
    if Path(name).suffix in _PICKLES:
        _refuse_pickle(what, folder / name)
    if Path(name).name != name or "\0" in name or len(name) > 255 or not name.endswith((".safetensors", INDEX)):
        _refuse(what, folder, f"the name {name!r:.100}, which is not that of a safetensors file in the folder")
    place = folder / name
    if place.is_symlink():
        home = folder.resolve()
        allowed = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
        place = place.resolve()
        if place.parent not in allowed:
            _refuse(what, folder, f"{name}, a link to {place}")
    return place


def _refuse(what: str, path: Path, found: str, cause: BaseException | None = None) -> NoReturn:
    folder = path if path.is_dir() else path.parent
    whole = [one for one in sorted(folder.glob("*.safetensors")) if one != path and not re.search(_PART, one.name)]
    usable = [one for one in whole if one.is_file()]
    raise CheckpointError(
        f"{what}: {path} cannot be used",
        found=found,
        expected="a whole .safetensors file; an index with its files beside it; a folder with one of these; "
        "or a checkpoint of weft",
        fix=reading(what, f'"{usable[0] if usable else "model.safetensors"}"'),
    ) from cause


def _refuse_pickle(what: str, path: Path) -> NoReturn:
    parts = path.with_name(re.sub(_PART, "-*", path.name))
    files, file = ("", f'"{path}"') if parts == path else (f'f in glob("{parts}") for ', "f")
    raise CheckpointError(
        f"{what}: {path} is a pickle, which may run any code when it is read",
        found=path.name,
        expected="safetensors",
        # Without their modules: a test looks for names of functions that unpickle, in all of the package.
        fix=f"save_file({{k: t.clone() for {files}k, t in load({file}, weights_only=True).items()}}, "
        f'"{path.with_name("model.safetensors")}")  # of torch and safetensors.torch, if you trust it',
    )
