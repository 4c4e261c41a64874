"""What Accelerate and the Trainer of transformers write alike: weights, optimizers and schedulers in one folder."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from weft.checkpoint.format.plain_files import parse_json, read_plain
from weft.checkpoint.format.transfer import read_in_parts
from weft.errors import CheckpointError, listed
from weft.interop.imported import Found, loss_scale, named_groups, names_in, plain_weights, random_states
from weft.interop.torch_files import METADATA, damaged, expect, load, read_dcp
from weft.tensors.blocks import whole
from weft.weights.sources import INDEX, MAX_INDEX_BYTES, WeightFiles, from_path
from weft.weights.stored_names import as_named_now

Grouping: TypeAlias = Callable[[nn.Module], Sequence[Sequence[str]] | None]

# What is of use to the other library alone.
_LEFT = (
    (r"sampler(_\d+)?\.bin|dl_state_dict(_\d+)?\.bin", "the position in the data: it has another order in weft"),
    (r"training_args\.bin", "arguments of the Trainer, a pickle: they are lines of the program"),
    (r"trainer_state\.json", "all but the step: logs, the best metric, the epoch"),
)


class Layout(NamedTuple):
    """What the two libraries do in their own ways.

    Attributes:
        grouping: The parameters of a model that an optimizer holds, group by group, if the program does not show it.
        ranks: The files of random states, a pattern: one of each rank, with a number in its name if there are several.
        states: From what is in such a file to arguments of `random_states`, for a rank.
    """

    grouping: Grouping
    ranks: str
    states: Callable[[Mapping[str, Any], int], tuple[Any, Any, Any, dict[str, torch.Tensor]]]


def read_saved(what: str, folder: Path, like: Mapping[str, Any], skip: Collection[str], layout: Layout) -> Found:
    """Everything but the step.

    Args:
        what: The caller's name.
        folder: Which.
        like: The objects of the program, by name.
        skip: Names of objects that are left out.
        layout: Whose folder it is.

    Raises:
        CheckpointError: A file is missing, or cannot be read, trusted, or does not fit `like`.
        OSError: One cannot be read.
    """
    saved = _SavedFolder(what, folder, like, skip)
    saved.add_modules_and_optimizers(layout.grouping)
    saved.add_objects()
    saved.add_ranks(layout)
    found = saved.found
    found.left += [] if found.ranks else ["random states: new ones are drawn from seed and step"]
    found.left += _left([path.name for path in sorted(folder.iterdir()) if path not in saved.read])
    return found


class _SavedFolder:
    """A folder that is read, and what was found in it.

    Attributes:
        found: What was found.
        read: The files that were read.
    """

    def __init__(self, what: str, folder: Path, like: Mapping[str, Any], skip: Collection[str]) -> None:
        self._what, self._folder, self._like, self._skip = what, folder, like, skip
        self.found = Found()
        self.read: list[Path] = []

    def add_modules_and_optimizers(self, grouping: Grouping) -> None:
        found = self.found
        for number in itertools.count():
            key = _numbered("model", number)
            weights = self._weights(number, self._like.get(key))
            if weights is None:
                break
            found.weights[key] = plain_weights(self._what, key, weights, self._like)
        if not found.weights:
            raise self._missing("model.safetensors, pytorch_model.bin, or the same of FSDP")
        for number in range(len(found.weights) + 1):
            name = _numbered("optimizer", number)
            path = None if name in self._skip else self._optimizer(number)
            if path is not None:
                saved = self._sharded(path, "optimizer") if path.is_dir() else self._mapping(path)
                names = names_in(self._like, name) or self._names(number, grouping)
                found.optimizers[name] = named_groups(self._what, path, name, saved, found.weights, names)
        if not found.optimizers and "optimizer" not in self._skip:
            raise self._missing("optimizer.bin or optimizer.pt, or the folder optimizer_0")

    def _names(self, number: int, grouping: Grouping) -> list[list[str]] | None:
        """The parameters of the model of an optimizer, if the program shows that alone."""
        key = _numbered("model", number)
        model = self._like.get(key)
        groups = grouping(model) if isinstance(model, nn.Module) else None
        return None if groups is None else [[f"{key}/{name}" for name in names] for names in groups]

    def add_objects(self) -> None:
        """Schedulers, what the program has registered, and the scale of the loss."""
        files = [path for pattern in ("scheduler*.*", "custom_checkpoint_*.pkl") for path in self._folder.glob(pattern)]
        for path in sorted(files):
            if path.stem not in self._skip:
                self.found.values[path.stem] = self._load(path)
        scaler = self._folder / "scaler.pt"
        if scaler.exists() and "scaler" not in self._skip:
            loss_scale(self._what, scaler, self._load(scaler), self.found)

    def add_ranks(self, layout: Layout) -> None:
        """Random states."""
        if "rng" in self._skip:
            return
        paths = {path.stem.rpartition("_")[2]: path for path in self._folder.glob(layout.ranks)}
        names = ["state"] if list(paths) == ["state"] else [str(rank) for rank in range(len(paths))]
        if paths.keys() != set(names):
            raise self._missing(f"{layout.ranks} of all ranks, from 0; there are {listed(sorted(paths))}")
        for rank, name in enumerate(names):
            saved = self._load(paths[name])
            try:
                states = layout.states(saved, rank)
            except (LookupError, TypeError, AttributeError) as error:
                raise damaged(self._what, paths[name], error) from error
            self.found.ranks.append(random_states(self._what, paths[name], *states))

    # -- the forms of weights and optimizers -------------------------------------------------------

    def _weights(self, number: int, model: Any) -> dict[str, Any] | None:
        """The weights of a module, in any of the forms they are saved in; None if there is none of this number."""
        suffix = _numbered("", number)
        for end in (INDEX, ".safetensors"):
            path = self._folder / f"model{suffix}{end}"
            if path.exists():
                source = from_path(self._what, path, "model")
                pieces = (piece for one in source.tensors.values() for piece in one.entry.pieces)
                self.read += [path, *(self._folder / piece.file for piece in pieces)]
                source = as_named_now(source, model) if isinstance(model, nn.Module) else source
                return _deferred(source, self.found)
        index = self._folder / f"pytorch_model{suffix}.bin.index.json"
        if index.exists():
            self.read.append(index)
            parts = [self._mapping(self._folder / name) for name in _names_in_index(self._what, index)]
            return dict(itertools.chain.from_iterable(part.items() for part in parts))
        for name in ("pytorch_model", "pytorch_model_fsdp"):
            path = self._folder / f"{name}{suffix}.bin"
            if path.exists():
                return dict(self._mapping(path))
        sharded = self._folder / f"pytorch_model_fsdp_{number}"
        return dict(self._sharded(sharded, "model")) if sharded.exists() else None

    def _optimizer(self, number: int) -> Path | None:
        """The file or folder of an optimizer; None if there is none of this number."""
        files = (self._folder / f"{_numbered('optimizer', number)}{end}" for end in (".bin", ".pt"))
        paths = (path for path in (*files, self._folder / f"optimizer_{number}") if path.exists())
        return next(paths, None)

    def _sharded(self, folder: Path, key: str) -> Mapping[str, Any]:
        self.read.append(folder)
        tree = read_dcp(self._what, folder, self.found.deferred)
        return self._checked(folder / METADATA, tree.get(key, tree))

    def _mapping(self, path: Path) -> Mapping[str, Any]:
        return self._checked(path, self._load(path))

    def _checked(self, path: Path, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise damaged(self._what, path, ValueError(f"{type(value).__name__} in place of values by name"))
        return value

    def _load(self, path: Path) -> Any:
        self.read.append(path)
        return load(self._what, path)

    def _missing(self, expected: str) -> CheckpointError:
        folder = self._folder
        there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        near = [] if there else sorted(path.name for path in folder.parent.glob("*/") if path.is_dir())
        return CheckpointError(
            f"{self._what}: {folder} is no whole checkpoint",
            found=listed(there) or f"no folder, or an empty one; beside it: {listed(near) or 'nothing'}",
            expected=expected,
            fix=f"weft.interop.{self._what}(folder, out)  # folder as saved, whole; what it never had: skip=[...]",
        )


def of_rank(states: Any, rank: int) -> torch.Tensor:
    """The state of the device of a rank, of those of all devices of its machine."""
    state: torch.Tensor = states if isinstance(states, torch.Tensor) else states[rank % len(states)]
    return state


def _numbered(name: str, number: int) -> str:
    return f"{name}_{number}" if number else name


def _left(names: Sequence[str]) -> Iterator[str]:
    for pattern, why in _LEFT:
        fits = [name for name in names if re.fullmatch(pattern, name)]
        names = [name for name in names if name not in fits]
        if fits:
            yield f"{listed(fits)}: {why}"
    if names:
        yield f"{listed(names)}: not read"


def _deferred(source: WeightFiles, found: Found) -> dict[str, Any]:
    """Tensors of safetensors, which are read a few megabytes at a time."""
    return {
        name: found.deferred.add(one.entry.shape, one.dtype, partial(_parts, source, name))
        for name, one in source.tensors.items()
    }


def _parts(source: WeightFiles, name: str) -> Iterator[torch.Tensor]:
    stored = source.tensors[name]
    for _, values in read_in_parts(source.files, stored, whole(stored.entry.shape), stored.dtype):
        yield values


def _names_in_index(what: str, path: Path) -> list[str]:
    try:
        names = list(dict.fromkeys(parse_json(read_plain(path, most=MAX_INDEX_BYTES))["weight_map"].values()))
        expect(all(Path(name).name == name for name in names), "names that lead out of the folder")
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise damaged(what, path, error) from error
    return names
