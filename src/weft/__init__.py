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

from weft import errors as errors
from weft import testing as testing
from weft.checkpoint import Checkpoint, Restored, checkpointable, latest, restore, save, verify
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
from weft.context import Applied, DistContext, adopt, explain, local, start
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
from weft.transforms.fully_shard import fully_shard
from weft.transforms.fuse_step import fuse_step
from weft.transforms.gather_step import gather_step
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

__version__ = "0.1.0"

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
    "LossScaling",
    "MissingExtra",
    "NameChanged",
    "NotSynchronized",
    "OrderError",
    "PeerError",
    "Precision",
    "ReducesIn",
    "Restored",
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
    "fully_shard",
    "fuse_step",
    "gather",
    "gather_objects",
    "gather_step",
    "latest",
    "local",
    "loss_scale",
    "main_first",
    "offered",
    "on_rank",
    "pad_across",
    "plain",
    "print_once",
    "recompute",
    "reduce",
    "replicate",
    "restore",
    "save",
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
