"""`import_trainer`: a checkpoint out of a folder `checkpoint-<step>` that the Trainer of transformers wrote."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from weft.checkpoint.format.plain_files import parse_json, read_plain
from weft.interop.imported import Imported, write_imported
from weft.interop.saved_folder import read_saved
from weft.interop.torch_files import values_alone

_MAX_BYTES = 2**28  # of trainer_state.json, which holds the log


def import_trainer(
    folder: str | Path,
    out: str | Path,
    *,
    like: Mapping[str, object] | None = None,
    skip: Collection[str] = (),
    step: int | None = None,
) -> Imported:
    """Turn a checkpoint that the `Trainer` of transformers wrote into one of weft, once.

    Of one process, DDP, and FSDP, in one file or in several with an index. The Trainer's arguments are a pickle of its
    own classes, which is not opened; what else is said in `import_accelerate` holds here too.

    The result has the objects `model`, `optimizer` and `scheduler`: give `weft.checkpointable` these names.

    Without FSDP, `like` has to give names to the parameters in the optimizer. With the model alone, its groups are
    those that the installed transformers makes by `Trainer.get_decay_parameter_names`, with and without decay; the
    optimizer of the program has to have the same ones, in this order. A model of transformers also tells under which
    names it stores its weights.

    What cannot be carried over is in `left`: the position in the data, logs and the best metric, arguments; and
    adapters, of which the Trainer saves nothing but themselves, are not read.

    Changes: a new checkpoint in `out`. On an error nothing is written. Collectives: none.

    Args:
        folder: `checkpoint-<step>`, in the output folder of the Trainer.
        out: Directory of checkpoints, as given to `weft.save`.
        like: Objects of the program by these names, {"model": model, "optimizer": optimizer}; what is saved is
            compared with their names and shapes.
        skip: Names of objects that are left out, as for `import_accelerate`.
        step: Of the checkpoint; default: `global_step` of the Trainer.

    Returns:
        The folder of the checkpoint, its step, the names of its objects, and what stays behind.

    Raises:
        CheckpointError: A file is missing, not whole, or holds more than values; it does not fit `like`, or `like` is
            needed; or `out` has this step, a newer one, or checkpoints of another run.
        TypeError: An object holds something else than tensors and plain values; the text names it.
        OSError: A file cannot be read, or the disk is full.

    Example:
        >>> import weft
        >>> weft.interop.import_trainer("run/checkpoint-500", "checkpoints")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
          ...
        weft.errors.CheckpointError: import_trainer: run/checkpoint-500 is no whole checkpoint
          found:    no folder, or an empty one
          ...
    """
    what, place = "import_trainer", Path(folder)
    found = read_saved(what, place, dict(like or {}), skip, _decayed_and_others)
    path = place / "trainer_state.json"
    if step is None:
        with values_alone(what, path):
            step = int(parse_json(read_plain(path, most=_MAX_BYTES))["global_step"])
    return write_imported(what, place.resolve().parent, out, step, found)


def _decayed_and_others(model: nn.Module) -> list[list[str]] | None:
    """The two groups of parameters that the Trainer makes; None if transformers is not installed."""
    try:
        trainer: Any = importlib.import_module("transformers").Trainer
    except ImportError:
        return None
    decayed = set(trainer.get_decay_parameter_names(None, model))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    return [[n for n in trained if n in decayed], [n for n in trained if n not in decayed]]
