"""What Accelerate and the Trainer of transformers write alike: weights, optimizers and schedulers in one folder."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import nn

from weft.checkpoint.format.transfer import Stored, read_in_parts
from weft.checkpoint.state.random_states import as_json, checked_states
from weft.errors import CheckpointError, listed
from weft.interop.imported import Found, loss_scale, named_groups, names_in, plain_weights
from weft.interop.torch_files import deferred, expect, load, read_dcp, values_alone
from weft.tensors.blocks import whole
from weft.weights.sources import INDEX, WeightFiles, from_path
from weft.weights.stored_names import as_named_now

Grouping: TypeAlias = Callable[[nn.Module], Sequence[Sequence[str]] | None]

# What is of use to the other library alone, by how its name begins.
_LEFT = MappingProxyType({
    "sampler": "the position in the data: weft draws another order",
    "dl_state_dict": "the position in the data: weft draws another order",
    "training_args": "arguments of the Trainer, a pickle: they are lines of the program",
    "trainer_state": "all but the step: logs, the best metric, the epoch",
})  # fmt: skip

# The files of random states, one of each rank, with a number in its name if there are several; and what Accelerate
# calls the states in them, in the words of the Trainer.
_RANKS = ("random_states_*.pkl", "rng_state*.pth")
_STATES = MappingProxyType({"random_state": "python", "numpy_random_seed": "numpy", "torch_manual_seed": "cpu"})


def read_saved(what: str, folder: Path, like: Mapping[str, Any], skip: Collection[str], grouping: Grouping) -> Found:
    """Everything but the step.

    Args:
        what: The caller's name.
        folder: Which.
        like: The objects of the program, by name.
        skip: Names of objects that are left out.
        grouping: The parameters of a model that an optimizer holds, group by group, if the program does not show it.

    Raises:
        CheckpointError: A file is missing, or cannot be read, trusted, or does not fit `like`.
        OSError: One cannot be read.
    """
    saved = _SavedFolder(what, folder, like, skip)
    saved.add_modules_and_optimizers(grouping)
    saved.add_objects()
    saved.add_ranks()
    found = saved.found
    found.left += [] if found.ranks else ["random states: new ones are drawn from seed and step"]
    for path in sorted(folder.iterdir()):
        if path not in saved.read:
            why = (text for begin, text in _LEFT.items() if path.name.startswith(begin))
            found.left.append(f"{path.name}: {next(why, 'not read')}")
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
        for number in itertools.count():
            name = _numbered("optimizer", number)
            path = self._first(f"{name}.bin", f"{name}.pt", f"optimizer_{number}")
            if path is None:
                break
            if name not in self._skip:
                saved = self._named(path, "optimizer")
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

    def add_ranks(self) -> None:
        """Random states."""
        if "rng" in self._skip:
            return
        paths = {path.stem.rpartition("_")[2]: path for kind in _RANKS for path in self._folder.glob(kind)}
        names = ["state"] if list(paths) == ["state"] else [str(rank) for rank in range(len(paths))]
        if paths.keys() != set(names):
            raise self._missing(f"{' or '.join(_RANKS)} of all ranks, from 0; there are {listed(sorted(paths))}")
        for rank, name in enumerate(names):
            saved = self._load(paths[name])
            with values_alone(self._what, paths[name]):
                found = as_json(*_random_states(saved, rank))
                checked_states(found)
            self.found.ranks.append(found)

    # -- the forms of weights and optimizers -------------------------------------------------------

    def _weights(self, number: int, model: Any) -> dict[str, Any] | None:
        """The weights of a module, in any of the forms they are saved in; None if there is none of this number."""
        suffix = _numbered("", number)
        path = self._first(f"model{suffix}{INDEX}", f"model{suffix}.safetensors")
        if path is not None:
            source = from_path(self._what, path, "model")
            pieces = (piece for one in source.tensors.values() for piece in one.entry.pieces)
            self.read += [path, *(self._folder / piece.file for piece in pieces)]
            source = as_named_now(source, model) if isinstance(model, nn.Module) else source
            return _deferred(source)
        begin = "pytorch_model"
        path = self._first(f"{begin}{suffix}.bin", f"{begin}_fsdp{suffix}.bin", f"{begin}_fsdp_{number}")
        return None if path is None else dict(self._named(path, "model"))

    def _first(self, *names: str) -> Path | None:
        """The first of these files and folders that is there."""
        return next((path for name in names if (path := self._folder / name).exists()), None)

    def _named(self, path: Path, key: str) -> Mapping[str, Any]:
        """Values by name, of a file, or of a part of what DCP saved into a folder."""
        self.read.append(path)
        is_file = path.is_file()
        tree = {key: load(self._what, path)} if is_file else read_dcp(self._what, path)
        found: Mapping[str, Any] = tree.get(key, {})
        with values_alone(self._what, path):
            expect(isinstance(found, Mapping) and all(isinstance(name, str) for name in found), "no values by name")
        return found

    def _load(self, path: Path) -> Any:
        self.read.append(path)
        return load(self._what, path)

    def _missing(self, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self._what}: {self._folder} is no whole checkpoint",
            found=listed(sorted(path.name for path in self._folder.glob("*"))) or "no folder, or an empty one",
            expected=expected,
            fix=f"weft.interop.{self._what}(folder, out)  # folder as saved, whole; what it never had: skip=[...]",
        )


def _random_states(saved: Mapping[str, Any], rank: int) -> tuple[Any, Any, Any, dict[str, torch.Tensor]]:
    """What `as_json` takes of the states in a file: of python, numpy and torch, and of the device of a rank."""
    named = {_STATES.get(name) or re.sub(r"torch_(\w+)_manual_seed", r"\1", name): saved[name] for name in saved}
    python, numpy, cpu = (named.pop(name) for name in ("python", "numpy", "cpu"))
    devices = {
        name: state if isinstance(state, torch.Tensor) else state[rank % len(state)]  # of all devices of a machine
        for name, state in named.items()
        if not isinstance(state, int)  # Accelerate also keeps a number of steps
    }
    return python, numpy, cpu, devices


def _numbered(name: str, number: int) -> str:
    return f"{name}_{number}" if number else name


def _deferred(source: WeightFiles) -> dict[str, Any]:
    """Tensors of safetensors, which are read a few megabytes at a time."""

    def read(stored: Stored) -> Iterator[torch.Tensor]:
        block = whole(stored.entry.shape)
        return (values for _, values in read_in_parts(source.files, stored, block, stored.dtype))

    return {name: deferred(one.entry.shape, one.dtype, partial(read, one)) for name, one in source.tensors.items()}
