"""`import_deepspeed`: weights out of a folder that DeepSpeed's own `save_checkpoint` wrote."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.files import write_tensors
from weft.checkpoint.weights.publishing import published
from weft.errors import CheckpointError, message

__all__ = ["import_deepspeed"]


def import_deepspeed(path: str | Path, out: str | Path, *, tag: str | None = None) -> Path:
    """Convert the weights of a checkpoint that DeepSpeed itself saved, once, into safetensors.

    **It trusts its input**: DeepSpeed's files are pickles, and who wrote them can run any code here.
    Nothing else in weft reads a pickle. DeepSpeed has to be installed; it merges the partitions of all
    ranks and stages to float32, in the memory of this one process. Then `weft.load_weights` reads the
    result, under any strategy. Moments of the optimizer are left behind.

    Changes: the folder `out`, which appears when it is complete; an earlier one of its kind is
    replaced. Collectives: none.

    Args:
        path: The folder given to DeepSpeed's `save_checkpoint`.
        out: Folder to write.
        tag: Which checkpoint in it; default: the one that its file `latest` names.

    Returns:
        The file with the weights.

    Raises:
        MissingExtra: DeepSpeed is not installed.
        CheckpointError: There is no such checkpoint, or DeepSpeed cannot merge it.

    Example:
        >>> import weft
        >>> weft.import_deepspeed("nowhere", "weights")
        Traceback (most recent call last):
          ...
        weft.errors.CheckpointError: import_deepspeed: there is no checkpoint of DeepSpeed in nowhere
          found:    no folder
          expected: the folder that was given to engine.save_checkpoint
          fix:      weft.import_deepspeed("runs", "weights", tag="global_step1000")
    """
    folder = Path(path)
    if not folder.is_dir() or (tag is not None and not (folder / tag).is_dir()):
        raise CheckpointError(
            message(
                f"import_deepspeed: there is no checkpoint of DeepSpeed in {folder}",
                found="no folder" if not folder.is_dir() else f"no folder {tag}",
                expected="the folder that was given to engine.save_checkpoint",
                fix='weft.import_deepspeed("runs", "weights", tag="global_step1000")',
            )
        )
    weights = _merged(folder, tag)
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, tensor in weights.items():
        first.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
    kept = {name: weights[name].contiguous() for name in first.values()}  # tied weights once
    with published(Path(out), folder, "model") as hidden:
        write_tensors(hidden / "model.safetensors", kept)
    return Path(out) / "model.safetensors"


def _merged(folder: Path, tag: str | None) -> dict[str, torch.Tensor]:
    engine: Any = importlib.import_module("weft.engines.deepspeed")
    engine.deepspeed()
    merging = importlib.import_module("deepspeed.utils.zero_to_fp32")
    try:
        found: dict[str, torch.Tensor] = merging.get_fp32_state_dict_from_zero_checkpoint(str(folder), tag)
    except (OSError, ValueError, KeyError, AssertionError, RuntimeError) as error:
        raise CheckpointError(
            message(
                f"import_deepspeed: DeepSpeed cannot merge the checkpoint in {folder}",
                found=f"{type(error).__name__}: {error}",
                expected="the files of all ranks, as engine.save_checkpoint wrote them",
                fix='weft.import_deepspeed("runs", "weights", tag="global_step1000")',
            )
        ) from error
    return found
