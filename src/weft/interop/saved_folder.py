"""What Accelerate and the Trainer of transformers write alike: weights, optimizers and schedulers in one folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from weft.checkpoint.format.plain_files import parse_json, read_plain
from weft.checkpoint.format.transfer import read_in_parts
from weft.errors import CheckpointError, listed
from weft.interop.imported import Found, loss_scale, named_groups, names_in, plain_weights, random_states
from weft.interop.torch_files import METADATA, damaged, load, read_dcp
from weft.tensors.blocks import whole
from weft.weights.sources import INDEX, MAX_INDEX_BYTES, WeightFiles, from_path
from weft.weights.stored_names import as_named_now

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

    grouping: Callable[[nn.Module], Sequence[Sequence[str]] | None]
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
    found, read = Found(), list[Path]()

    def taken(path: Path) -> Path:
        read.append(path)
        return path

    for number in range(len(list(folder.iterdir())) if folder.is_dir() else 1):
        key = _numbered("model", number)
        weights = _weights(what, folder, number, like.get(key), found, taken)
        if weights is None:
            break
        found.weights[key] = plain_weights(what, key, weights, like)
    if not found.weights:
        raise _missing(what, folder, "model.safetensors, pytorch_model.bin, or the same of FSDP")
    for number, name in enumerate(_numbered("optimizer", each) for each in range(len(found.weights) + 1)):
        saved = None if name in skip else _optimizer(what, folder, number, found, taken)
        if saved is not None:
            model = like.get(_numbered("model", number))
            names = names_in(like, name)
            if names is None and isinstance(model, nn.Module):
                names = layout.grouping(model)
                names = names and [[f"{_numbered('model', number)}/{one}" for one in group] for group in names]
            found.optimizers[name] = named_groups(what, name, saved, found.weights, names)
    if not found.optimizers and "optimizer" not in skip:
        raise _missing(what, folder, "optimizer.bin or optimizer.pt, or the folder optimizer_0")
    for path in sorted(folder.glob("scheduler*.*")) + sorted(folder.glob("custom_checkpoint_*.pkl")):
        if path.stem not in skip:
            found.values[path.stem] = load(what, taken(path))
    scaler = folder / "scaler.pt"
    if scaler.exists() and "scaler" not in skip:
        loss_scale(what, scaler, load(what, taken(scaler)), found)
    ranks = {path.stem.rpartition("_")[2]: taken(path) for path in folder.glob(layout.ranks) if "rng" not in skip}
    names = ["state"] if list(ranks) == ["state"] else [str(rank) for rank in range(len(ranks))]
    if ranks.keys() != set(names):
        raise _missing(what, folder, f"{layout.ranks} of all ranks, from 0; there are {listed(sorted(ranks))}")
    for rank, name in enumerate(names):
        saved = load(what, ranks[name])
        try:
            states = layout.states(saved, rank)
        except (LookupError, TypeError, AttributeError) as error:
            raise damaged(what, ranks[name], error) from error
        found.ranks.append(random_states(what, ranks[name], *states))
    found.left += [] if found.ranks else ["random states: new ones are drawn from seed and step"]
    found.left += _left([path.name for path in sorted(folder.iterdir()) if path not in read])
    return found


def of_rank(states: Any, rank: int) -> torch.Tensor:
    """The state of the device of a rank, of those of all devices of its machine."""
    state: torch.Tensor = states if isinstance(states, torch.Tensor) else states[rank % len(states)]
    return state


def _numbered(name: str, number: int) -> str:
    return f"{name}_{number}" if number else name


def _missing(what: str, folder: Path, expected: str) -> CheckpointError:
    there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    near = [] if there else sorted(path.name for path in folder.parent.glob("*/") if path.is_dir())
    return CheckpointError(
        f"{what}: {folder} is no whole checkpoint",
        found=listed(there) or f"no folder, or an empty one; beside it: {listed(near) or 'nothing'}",
        expected=expected,
        fix=f"weft.interop.{what}(folder, out)  # folder as it was saved, whole; what it never had: skip=[...]",
    )


def _left(names: Sequence[str]) -> Iterator[str]:
    for pattern, why in _LEFT:
        fits = [name for name in names if re.fullmatch(pattern, name)]
        names = [name for name in names if name not in fits]
        if fits:
            yield f"{listed(fits)}: {why}"
    if names:
        yield f"{listed(names)}: not read"


# -- weights and optimizers --------------------------------------------------------------------------------


def _weights(
    what: str, folder: Path, number: int, model: Any, found: Found, taken: Callable[[Path], Path]
) -> dict[str, Any] | None:
    """The weights of a module, in any of the forms they are saved in; None if there is none of this number."""
    suffix = _numbered("", number)
    safe = [folder / f"model{suffix}{end}" for end in (INDEX, ".safetensors")]
    for path in safe:
        if path.exists():
            source = from_path(what, taken(path), "model")
            for piece in (piece for one in source.tensors.values() for piece in one.entry.pieces):
                taken(folder / piece.file)
            source = as_named_now(source, model) if isinstance(model, nn.Module) else source
            return _deferred(source, found)
    shards = folder / f"pytorch_model{suffix}.bin.index.json"
    if shards.exists():
        weights: dict[str, Any] = {}
        for name in _names_in_index(what, taken(shards)):
            weights |= load(what, taken(folder / name))
        return weights
    for path in (folder / f"pytorch_model{suffix}.bin", folder / f"pytorch_model_fsdp{suffix}.bin"):
        if path.exists():
            return dict(load(what, taken(path)))
    sharded = folder / f"pytorch_model_fsdp_{number}"
    if sharded.exists():
        return dict(_part(what, taken(sharded), "model", found))
    return None


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
        if any(Path(name).name != name for name in names):
            raise ValueError("names that lead out of the folder")
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise damaged(what, path, error) from error
    return names


def _optimizer(
    what: str, folder: Path, number: int, found: Found, taken: Callable[[Path], Path]
) -> Mapping[str, Any] | None:
    """The `state_dict` of an optimizer; None if there is none of this number."""
    name = _numbered("optimizer", number)
    sharded = folder / f"optimizer_{number}"
    path = next((path for end in (".bin", ".pt") if (path := folder / f"{name}{end}").exists()), sharded)
    if not path.exists():
        return None
    saved = _part(what, taken(path), "optimizer", found) if path == sharded else load(what, taken(path))
    if not isinstance(saved, Mapping) or "param_groups" not in saved:
        raise damaged(what, path, ValueError("no state of an optimizer"))
    return saved


def _part(what: str, folder: Path, key: str, found: Found) -> Mapping[str, Any]:
    tree = read_dcp(what, folder, found.deferred)
    part = tree.get(key, tree)
    if not isinstance(part, dict):
        raise damaged(what, folder / METADATA, ValueError(f"no {key} in it"))
    return part
