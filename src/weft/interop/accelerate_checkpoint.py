"""`import_accelerate`: a checkpoint out of a folder that `save_state` of Accelerate wrote."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from torch import nn

from weft.interop.imported import Imported, write_imported
from weft.interop.saved_folder import read_saved


def import_accelerate(
    folder: str | Path,
    out: str | Path,
    *,
    like: Mapping[str, object] | None = None,
    skip: Collection[str] = (),
    step: int | None = None,
) -> Imported:
    """Turn a checkpoint that `Accelerator.save_state` wrote into one of weft, once.

    One process, DDP, and FSDP of both versions, with whole state (`FULL_STATE_DICT`) and sharded
    (`SHARDED_STATE_DICT`), in safetensors and in files of `torch.save`. Accelerate does not have to be installed.
    Nothing in the files is executed: pickles are read as plain values, and a file with anything else in it is
    refused. Tensors are read one by one when they are written.

    The result has the objects `model`, `optimizer` and `scheduler`, further ones as `model_1`, `optimizer_1`, ..., and
    `custom_checkpoint_0`, ... for what was registered: give `weft.checkpointable` these names. `weft.restore` continues
    with them under any strategy and at any number of ranks: moments, schedules and the fp16 scale; at as many ranks as
    saved it, with their random states.

    Without FSDP, the optimizer's file has numbers instead of names for its parameters. `like` gives the names: the
    objects of the program, built as for training, on meta is enough. The model alone will do if the optimizer holds
    `model.parameters()` in one group.

    What cannot be carried over is in `left`: the position in the data, as weft draws another order, so training goes on
    at the start of an epoch; options of the loss scale. Per-rank files of FSDP (`LOCAL_STATE_DICT`) are not read.

    Changes: a new checkpoint in `out`. On an error nothing is written. Collectives: none.

    Args:
        folder: That was given to `save_state`.
        out: Directory of checkpoints, as given to `weft.save`.
        like: Objects of the program by these names, {"model": model, "optimizer": optimizer}; what is saved is
            compared with their names and shapes.
        skip: Names of objects that are left out, such as "optimizer"; "rng" for random states, "scaler" for the
            scale of the loss. Their files are not opened.
        step: Of the checkpoint; default: how often the optimizer has stepped.

    Returns:
        The folder of the checkpoint, its step, the names of its objects, and what stays behind.

    Raises:
        CheckpointError: A file is missing, not whole, or holds more than values; it does not fit `like`, or `like` is
            needed; or `out` has this step, a newer one, or checkpoints of another run.
        TypeError: An object holds something else than tensors and plain values; the text names it.
        OSError: A file cannot be read, or the disk is full.

    Example:
        >>> import weft
        >>> weft.interop.import_accelerate("nowhere", "checkpoints")
        Traceback (most recent call last):
          ...
        weft.errors.CheckpointError: import_accelerate: nowhere is no whole checkpoint
          found:    no folder, or an empty one
          expected: model.safetensors, pytorch_model.bin, or the same of FSDP
          fix:      weft.interop.import_accelerate(folder, out)  # folder as saved, whole; what it never had: skip=[...]
    """
    place = Path(folder)
    found = read_saved("import_accelerate", place, dict(like or {}), skip, _one_group)
    return write_imported("import_accelerate", place.resolve().parent, out, step, found)


def _one_group(model: nn.Module) -> list[list[str]]:
    return [[name for name, _ in model.named_parameters()]]
