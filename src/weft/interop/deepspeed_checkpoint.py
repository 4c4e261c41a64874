"""`import_deepspeed`: a checkpoint out of a folder that DeepSpeed's own `save_checkpoint` wrote.

The folder holds pieces of every rank, which are put together by the names of parameters. In stages 1 and 2 all
parameters of a group lie one after the other, and each rank has one slice of that. In stage 3 each parameter is divided
into equal slices, one per rank, and the last one is padded.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from weft.engines import guest
from weft.errors import CheckpointError
from weft.interop.imported import Found, Group, write_imported
from weft.tensors.blocks import chunk


def import_deepspeed(
    path: str | Path, directory: str | Path, *, tag: str | None = None, optimizer: bool = True
) -> Path:
    """Turn a checkpoint that DeepSpeed itself saved into one of weft, once.

    **It trusts its input**: DeepSpeed's files are pickles, and who wrote them can run any code here.
    Nothing else in weft does that. DeepSpeed has to be installed; the pieces of all ranks and
    stages are merged in the memory of this one process, the weights to float32.

    The result has the objects `model` and `optimizer`: `weft.restore(state, directory, ctx, strict=False)`
    continues with both, moments included, under any strategy and at any number of ranks; `weft.load_weights`
    takes the weights alone. Random states are drawn anew, from seed and step.

    Changes: a new checkpoint in `directory`, at the step that DeepSpeed counted. Collectives: none.

    Args:
        path: The folder given to DeepSpeed's `save_checkpoint`.
        directory: Of checkpoints, as given to `weft.save`.
        tag: Which checkpoint in the folder; default: the one that its file `latest` names.
        optimizer: Whether the state of the optimizer comes too.

    Returns:
        The folder of the checkpoint.

    Raises:
        MissingExtra: DeepSpeed is not installed.
        CheckpointError: There is no such checkpoint, it cannot be merged, or `directory` has this step, a newer
            one, or checkpoints of another run.

    Example:
        >>> import weft
        >>> weft.interop.import_deepspeed("nowhere", "checkpoints")
        Traceback (most recent call last):
          ...
        weft.errors.CheckpointError: import_deepspeed: there is no checkpoint of DeepSpeed in nowhere
          found:    no folder
          expected: the folder that was given to engine.save_checkpoint
          fix:      weft.interop.import_deepspeed(path, directory)  # path as in save_checkpoint
    """
    folder = Path(path)
    if not folder.is_dir() or (tag is not None and not (folder / tag).is_dir()):
        raise CheckpointError(
            f"import_deepspeed: there is no checkpoint of DeepSpeed in {folder}",
            found="no folder" if not folder.is_dir() else f"no folder {tag}",
            expected="the folder that was given to engine.save_checkpoint",
            fix=_suggested(folder, tag)
            or "weft.interop.import_deepspeed(path, directory)  # path as in save_checkpoint",
        )
    guest("deepspeed").deepspeed()
    step, found = read_folder(folder, tag, optimizer=optimizer)
    return write_imported("import_deepspeed", folder, directory, step, found).path


# -- what lies in the folder ---------------------------------------------------------------------------


def read_folder(folder: Path, tag: str | None, *, optimizer: bool) -> tuple[int, Found]:
    """Read all files, in the memory of this process; they are pickles, which DeepSpeed opens.

    Returns:
        How often the optimizer had stepped; parameters and buffers in float32, of which tied ones are one tensor, and
        the groups of the optimizer, if they are asked for.

    Raises:
        CheckpointError: DeepSpeed cannot merge them, or the optimizer's state is of a kind that is not known.
    """
    merging = importlib.import_module("deepspeed.utils.zero_to_fp32")
    loading: Any = importlib.import_module("deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine")
    load: Callable[..., Any] = loading.TorchCheckpointEngine().load
    found, what = Found(), "DeepSpeed cannot merge the checkpoint"
    fix = _suggested(folder, tag) or "the files of all ranks in one folder, and whole"
    try:
        found.weights["model"] = merging.get_fp32_state_dict_from_zero_checkpoint(str(folder), tag)
        place = str(folder / (tag if tag is not None else (folder / "latest").read_text().strip()))
        model = load(merging.get_model_state_files(place)[0], "cpu")
        step, shapes = int(model["global_steps"]), model["param_shapes"]
        del model
        if optimizer:
            what = "the optimizer's state cannot be read"
            fix = _call(folder, tag, "optimizer=False")
            ranks = [load(file, "cpu")["optimizer_state_dict"] for file in merging.get_optim_files(place)]
            found.optimizers["optimizer"] = _groups(shapes, ranks)
    except (OSError, ValueError, LookupError, AssertionError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"import_deepspeed: {what} in {folder}",
            found=f"{type(error).__name__}: {error}",
            expected="the files of all ranks, as engine.save_checkpoint of DeepSpeed's ZeRO wrote them",
            fix=fix,
        ) from error
    return step, found


def _suggested(folder: Path, tag: str | None) -> str:
    """The call for another checkpoint in a folder; for the folder, if it is one itself; or nothing."""
    if any(folder.glob("*_states.pt")):
        return _call(folder.parent, folder.name)
    with contextlib.suppress(OSError):
        tag = tag or (folder / "latest").read_text().strip()
    files = sorted(folder.glob("*/*_model_states.pt"), key=lambda file: file.stat().st_mtime)
    tags = [file.parent.name for file in files if file.parent.name != tag]
    return _call(folder, tags[-1]) if tags else ""


def _call(folder: Path, tag: str | None, *options: str) -> str:
    options = options if tag is None else (f'tag="{tag}"', *options)
    return f'weft.interop.import_deepspeed("{folder}", directory, {", ".join(options)})'


def _groups(shapes: Sequence[Mapping[str, torch.Size]], ranks: Sequence[Mapping[str, Any]]) -> list[Group]:
    """The groups of the optimizer: `shapes` by flat tensor, `ranks` what each of them saved."""
    in_stage_3 = ranks[0]["zero_stage"] == 3
    key = "optimizer_state_dict" if in_stage_3 else "base_optimizer_state"
    groups = []
    for entry in ranks[0][key]["param_groups"]:
        state: dict[str, dict[str, Any]] = {}
        for index in entry["params"]:
            held = [rank[key]["state"].get(index, {}) for rank in ranks]
            slices = _slices(index, shapes[index], ranks, in_stage_3=in_stage_3)
            state |= {f"model/{name}": _merged(held, shapes[index][name], found) for name, found in slices}
        groups.append(Group({option: value for option, value in entry.items() if option != "params"}, state))
    return groups


Slices = list[tuple[int, int]]  # of each rank: first element in its flat tensor, and how many


def _slices(
    index: int, shapes: Mapping[str, torch.Size], ranks: Sequence[Mapping[str, Any]], *, in_stage_3: bool
) -> Iterator[tuple[str, Slices]]:
    """The slices of each parameter in a flat tensor, see the module."""
    start = 0
    for name, shape in shapes.items():
        if in_stage_3:
            lengths = [chunk(torch.Size(shape).numel(), len(ranks), rank)[1] for rank in range(len(ranks))]
            yield name, [(start, length) for length in lengths]
            start += lengths[0]
        else:
            there = [rank["param_slice_mappings"][index].get(name) for rank in ranks]
            yield name, [(0, 0) if piece is None else (piece.start, piece.numel) for piece in there]


def _merged(held: Sequence[Mapping[str, Any]], shape: torch.Size, slices: Slices) -> dict[str, Any]:
    """The state of one parameter; numbers, such as the step, are alike on all ranks."""
    found: dict[str, Any] = {}
    for key, first in held[0].items():
        if not isinstance(first, torch.Tensor) or first.dim() == 0:
            found[key] = first
            continue
        parts = [rank[key].reshape(-1)[start : start + size] for rank, (start, size) in zip(held, slices, strict=True)]
        found[key] = torch.cat(parts).reshape(shape)
    return found
