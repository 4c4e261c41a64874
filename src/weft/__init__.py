"""weft makes a training loop distributed by composing functions.

    with weft.start() as ctx:
        loader, ctx = weft.shard_data(loader, ctx)
        model, ctx = weft.with_precision(model, ctx, "bf16")
        model, ctx = weft.replicate(model, ctx)
        ...                                                     # plain PyTorch from here on

Layers, each importing only those below it:
    cli, testing        commands; test worlds and laws
    transforms          one room per transform
    contract, collectives, placing    what a transform is; values between ranks; values to devices
    context             where we run and what was done so far
    engines             who executes
    launchers, nested, errors
"""

import importlib
from typing import TYPE_CHECKING, Any

from weft import errors as errors
from weft.collectives import (
    any_rank,
    barrier,
    broadcast,
    gather,
    gather_objects,
    main_first,
    on_rank,
    pad_across,
    print_once,
    reduce,
    together,
)
from weft.context import Applied, DistContext, Preemption, adopt, explain, local, on_preemption, start
from weft.contract import GradSync, ReducesIn, Undoable, compose, offered, transform
from weft.errors import (
    AlreadyApplied,
    CheckpointError,
    CollectiveRefused,
    ContextError,
    ContractError,
    MissingExtra,
    NameChanged,
    NotSynchronized,
    OrderError,
    PeerError,
    StaleContext,
    UnusedParameters,
    WeftError,
)
from weft.launchers import Topology, topology
from weft.placing import to_device
from weft.transforms.accumulate_grads import Window, Windows, accumulate_grads
from weft.transforms.average_weights import Averages, average_weights, averages
from weft.transforms.clip_grads import clip_grads
from weft.transforms.compiled import compiled
from weft.transforms.full_grads import full_grads
from weft.transforms.fully_shard import fully_shard
from weft.transforms.fuse_step import fuse_step
from weft.transforms.gather_step import gather_step
from weft.transforms.gathered import gathered
from weft.transforms.plain import plain
from weft.transforms.recompute import recompute
from weft.transforms.replicate import replicate
from weft.transforms.shard_data import shard_data
from weft.transforms.sync_batch_norm import sync_batch_norm
from weft.transforms.with_precision import (
    LossScaling,
    Precision,
    creation_dtype,
    loss_scale,
    skipped,
    with_precision,
)
from weft.transforms.zero_partition import zero_partition

if TYPE_CHECKING:
    from weft import checkpoint as checkpoint
    from weft import testing as testing
    from weft.checkpoint import (
        Checkpoint,
        LoadedWeights,
        Restored,
        RunningSave,
        checkpointable,
        export,
        import_deepspeed,
        latest,
        load_weights,
        restore,
        save,
        save_async,
        verify,
    )

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import two rooms when they are first asked for: half of the package, of which many programs need nothing."""
    if name in ("checkpoint", "testing"):
        return importlib.import_module(f"weft.{name}")
    if name in __all__:  # and not here: see the names above
        return getattr(importlib.import_module("weft.checkpoint"), name)
    raise AttributeError(f"module 'weft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "AlreadyApplied",
    "Applied",
    "Averages",
    "Checkpoint",
    "CheckpointError",
    "CollectiveRefused",
    "ContextError",
    "ContractError",
    "DistContext",
    "GradSync",
    "LoadedWeights",
    "LossScaling",
    "MissingExtra",
    "NameChanged",
    "NotSynchronized",
    "OrderError",
    "PeerError",
    "Precision",
    "Preemption",
    "ReducesIn",
    "Restored",
    "RunningSave",
    "StaleContext",
    "Topology",
    "Undoable",
    "UnusedParameters",
    "WeftError",
    "Window",
    "Windows",
    "accumulate_grads",
    "adopt",
    "any_rank",
    "average_weights",
    "averages",
    "barrier",
    "broadcast",
    "checkpointable",
    "clip_grads",
    "compiled",
    "compose",
    "creation_dtype",
    "errors",
    "explain",
    "export",
    "full_grads",
    "fully_shard",
    "fuse_step",
    "gather",
    "gather_objects",
    "gather_step",
    "gathered",
    "import_deepspeed",
    "latest",
    "load_weights",
    "local",
    "loss_scale",
    "main_first",
    "offered",
    "on_preemption",
    "on_rank",
    "pad_across",
    "plain",
    "print_once",
    "recompute",
    "reduce",
    "replicate",
    "restore",
    "save",
    "save_async",
    "shard_data",
    "skipped",
    "start",
    "sync_batch_norm",
    "testing",
    "to_device",
    "together",
    "topology",
    "transform",
    "verify",
    "with_precision",
    "zero_partition",
]
