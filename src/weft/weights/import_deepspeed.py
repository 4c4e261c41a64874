"""`import_deepspeed`: a checkpoint out of a folder that DeepSpeed's own `save_checkpoint` wrote."""

from __future__ import annotations

import hashlib
import importlib
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.draft import Outline, complete, facts_of, start_draft
from weft.checkpoint.format.safetensors_write import write_tensors
from weft.checkpoint.format.tensor_blocks import Held, hold
from weft.checkpoint.history import history_of
from weft.checkpoint.state.json_values import encode
from weft.context import local
from weft.errors import CheckpointError
from weft.weights.deepspeed_folders import Folder, read_folder

__all__ = ["import_deepspeed"]


def import_deepspeed(
    path: str | Path, directory: str | Path, *, tag: str | None = None, optimizer: bool = True
) -> Path:
    """Turn a checkpoint that DeepSpeed itself saved into one of weft, once.

    **It trusts its input**: DeepSpeed's files are pickles, and who wrote them can run any code here.
    Nothing else in weft reads a pickle. DeepSpeed has to be installed; the pieces of all ranks and
    stages are merged in the memory of this one process, the weights to float32.

    The result has the objects `model` and `optimizer`: `weft.restore(state, directory, ctx, strict=False)`
    goes on with both, moments included, under any strategy and at any number of ranks; `weft.load_weights`
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
        >>> weft.weights.import_deepspeed("nowhere", "checkpoints")
        Traceback (most recent call last):
          ...
        weft.errors.CheckpointError: import_deepspeed: there is no checkpoint of DeepSpeed in nowhere
          found:    no folder
          expected: the folder that was given to engine.save_checkpoint
          fix:      weft.weights.import_deepspeed("runs", "checkpoints", tag="global_step1000")
    """
    folder = Path(path)
    if not folder.is_dir() or (tag is not None and not (folder / tag).is_dir()):
        raise CheckpointError(
            f"import_deepspeed: there is no checkpoint of DeepSpeed in {folder}",
            found="no folder" if not folder.is_dir() else f"no folder {tag}",
            expected="the folder that was given to engine.save_checkpoint",
            fix='weft.weights.import_deepspeed("runs", "checkpoints", tag="global_step1000")',
        )
    engine: Any = importlib.import_module("weft.engines.deepspeed")
    engine.deepspeed()
    found = read_folder(folder, tag, optimizer=optimizer)
    brought, tensors = _outline(found)
    ctx = local()
    source = hashlib.sha256(os.path.realpath(folder).encode(errors="surrogateescape")).hexdigest()
    history_of(ctx, Path(directory)).belongs_to(source[:16])  # what is imported from one folder is one run
    with start_draft("import_deepspeed", Path(directory), found.step, ctx) as draft:
        write = partial(write_tensors, tensors=tensors)
        complete("import_deepspeed", draft, found.step, brought, write, ctx, keep=None)
    return draft.final


def _outline(found: Folder) -> tuple[Outline, dict[str, torch.Tensor]]:
    """What `weft.save` would have brought for a model and its optimizer."""
    tensors: dict[str, Held] = {}
    same_as: dict[str, str] = {}
    first: dict[tuple[int, torch.Size], str] = {}
    for name, tensor in found.weights.items():
        origin = first.setdefault((tensor.data_ptr(), tensor.shape), name) if tensor.numel() else name
        if origin == name:
            tensors[f"model/{name}"] = hold(f"model/{name}", tensor.contiguous())
        else:
            same_as[f"model/{name}"] = f"model/{origin}"
    values: dict[str, Any] = {"model": {"extra": {}, "transforms": {}}}
    if found.groups:
        values["optimizer"] = {
            "state": {
                f"model/{name}": encode(f"optimizer/state/model/{name}", state, tensors)
                for group in found.groups
                for name, state in group.state.items()
                if state
            },
            "groups": [
                {
                    "params": [f"model/{name}" for name in group.state],
                    "options": encode(f"optimizer/groups/{index}", group.options, tensors),
                }
                for index, group in enumerate(found.groups)
            ],
        }
    written = [held for held in tensors.values() if held.block.size]
    brought = Outline(
        tensors={name: facts_of(held) for name, held in tensors.items()},
        same_as=same_as,
        values=values,
        blocks={held.name: held.block for held in written},
        of_rank={"rng": None},
    )
    return brought, {held.name: held.local for held in written}
