"""What DeepSpeed's own `save_checkpoint` wrote: pieces of every rank, put together by the names of parameters.

In stages 1 and 2 all parameters of a group lie one after the other, and each rank has a stretch of that. In stage 3
each parameter is cut into equal stretches, one per rank, the last one filled up.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from weft.errors import CheckpointError, message

__all__ = ["Folder", "Group", "read_folder"]


class Group(NamedTuple):
    """A group of the optimizer.

    Attributes:
        options: Such as `lr`.
        state: By parameter, in the order of the group.
    """

    options: dict[str, Any]
    state: dict[str, dict[str, Any]]


class Folder(NamedTuple):
    """What a folder holds.

    Attributes:
        step: How often the optimizer had stepped.
        weights: Parameters and buffers in float32, by name; tied ones are one tensor.
        groups: Of the optimizer; empty if not asked for.
    """

    step: int
    weights: dict[str, torch.Tensor]
    groups: list[Group]


def read_folder(folder: Path, tag: str | None, *, optimizer: bool) -> Folder:
    """Read all files, in the memory of this process; they are pickles, which DeepSpeed opens.

    Raises:
        CheckpointError: DeepSpeed cannot merge them, or the optimizer's state is of a kind that is not known.
    """
    merging = importlib.import_module("deepspeed.utils.zero_to_fp32")
    loading: Any = importlib.import_module("deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine")
    load: Callable[..., Any] = loading.TorchCheckpointEngine().load
    try:
        weights = merging.get_fp32_state_dict_from_zero_checkpoint(str(folder), tag)
        place = str(folder / (tag if tag is not None else (folder / "latest").read_text().strip()))
        model = load(merging.get_model_state_files(place)[0], "cpu")
        step, shapes = int(model["global_steps"]), model["param_shapes"]
        del model
    except (OSError, ValueError, LookupError, AssertionError, RuntimeError) as error:
        text = _text(folder, "DeepSpeed cannot merge the checkpoint", error, 'tag="global_step1000"')
        raise CheckpointError(text) from error
    if not optimizer:
        return Folder(step, weights, [])
    try:
        ranks = [load(file, "cpu")["optimizer_state_dict"] for file in merging.get_optim_files(place)]
        return Folder(step, weights, _groups(shapes, ranks))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        text = _text(folder, "the optimizer's state cannot be read", error, "optimizer=False")
        raise CheckpointError(text) from error


def _text(folder: Path, what: str, error: BaseException, option: str) -> str:
    return message(
        f"import_deepspeed: {what} in {folder}",
        found=f"{type(error).__name__}: {error}",
        expected="the files of all ranks, as engine.save_checkpoint of DeepSpeed's ZeRO wrote them",
        fix=f"weft.weights.import_deepspeed({str(folder)!r}, out, {option})",
    )


def _groups(shapes: Sequence[Mapping[str, torch.Size]], ranks: Sequence[Mapping[str, Any]]) -> list[Group]:
    """The groups of the optimizer: `shapes` by flat tensor, `ranks` what each of them saved."""
    is_cut_by_parameter = ranks[0]["zero_stage"] == 3
    key = "optimizer_state_dict" if is_cut_by_parameter else "base_optimizer_state"
    pieces = _stretches_of_parameters if is_cut_by_parameter else _stretches_of_groups
    groups = []
    for entry in ranks[0][key]["param_groups"]:
        state: dict[str, dict[str, Any]] = {}
        for index in entry["params"]:
            held = [rank[key]["state"].get(index, {}) for rank in ranks]
            stretches = pieces(index, shapes[index], ranks)
            state |= {name: _merged(held, shapes[index][name], found) for name, found in stretches}
        groups.append(Group({option: value for option, value in entry.items() if option != "params"}, state))
    return groups


Stretches = list[tuple[int, int]]  # of each rank: first element in its flat tensor, and how many


def _stretches_of_groups(
    index: int, shapes: Mapping[str, torch.Size], ranks: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, Stretches]]:
    for name in shapes:
        there = [rank["param_slice_mappings"][index].get(name) for rank in ranks]
        yield name, [(0, 0) if piece is None else (piece.start, piece.numel) for piece in there]


def _stretches_of_parameters(
    index: int, shapes: Mapping[str, torch.Size], ranks: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, Stretches]]:
    start = 0
    for name, shape in shapes.items():
        number = torch.Size(shape).numel()
        size = -(-number // len(ranks))
        yield name, [(start, max(0, min(size, number - rank * size))) for rank in range(len(ranks))]
        start += size


def _merged(held: Sequence[Mapping[str, Any]], shape: torch.Size, stretches: Stretches) -> dict[str, Any]:
    """The state of one parameter; numbers, such as the step, are alike on all ranks."""
    found: dict[str, Any] = {}
    for key, first in held[0].items():
        if not isinstance(first, torch.Tensor) or first.dim() == 0:
            found[key] = first
            continue
        parts = [
            rank[key].reshape(-1)[start : start + size] for rank, (start, size) in zip(held, stretches, strict=True)
        ]
        found[key] = torch.cat(parts).reshape(shape)
    return found
