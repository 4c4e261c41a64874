"""weft makes a training loop distributed by composing functions.

    with weft.start() as ctx:
        loader, ctx = weft.shard_data(loader, ctx)
        model, ctx = weft.with_precision(model, ctx, "bf16")
        model, ctx = weft.replicate(model, ctx)
        ...                                                     # plain PyTorch from here on

Layers, each importing only those below it:
    cli, testing        commands; test worlds and laws
    interop             other libraries
    transforms          one room per transform; beside it checkpoint, tracking, profiling and reporting
    contract, collectives, placing    what a transform is; values between ranks; values to devices
    seeding, sizing, padding          random numbers, sizes and shapes of batches
    context             where we run and what was done so far
    engines             who executes
    launchers, nested, errors
"""

import importlib
from typing import TYPE_CHECKING, Any

from weft import errors as errors
from weft.collectives import (
    all_to_all,
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
    reduce_scatter,
    scatter,
    sync_rng,
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

if TYPE_CHECKING:
    from weft import checkpoint as checkpoint
    from weft import interop as interop
    from weft import profiling as profiling
    from weft import reporting as reporting
    from weft import testing as testing
    from weft import tracking as tracking
    from weft.calling import launch_function
    from weft.checking import check
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
    from weft.collectives.metrics import Rows, denominator, gather_metrics, weighted_mean
    from weft.padding import length_batches, pad_collate, padding_share
    from weft.profiling import Health, Throughput, peak_memory, profile, throughput, watch_health
    from weft.seeding import Seeded, Seeds, keyed_uniform, set_seed, worker_seeds
    from weft.sizing import BatchMath, batch_math, find_batch_size, split_between
    from weft.tracking import log, logger, progress
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
    from weft.transforms.shard_data import DataPlan, SeekableStream, ShardedLoader, shard_data
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

__version__ = "0.2.0"


# Rooms that are imported when somebody asks for one of their names: most of the package, of which a program needs some.
LATER = {
    "calling": "launch_function",
    "checking": "check",
    "checkpoint": "Checkpoint LoadedWeights Restored RunningSave checkpointable export import_deepspeed "
    "latest load_weights restore save save_async verify",
    "collectives.metrics": "Rows denominator gather_metrics weighted_mean",
    "padding": "length_batches pad_collate padding_share",
    "profiling": "Health Throughput peak_memory profile throughput watch_health",
    "sizing": "BatchMath batch_math find_batch_size split_between",
    "tracking": "log logger progress",
    "transforms.accumulate_grads": "Window Windows accumulate_grads",
    "transforms.average_weights": "Averages average_weights averages",
    "transforms.clip_grads": "clip_grads",
    "transforms.compiled": "compiled",
    "transforms.full_grads": "full_grads",
    "transforms.fully_shard": "fully_shard",
    "transforms.fuse_step": "fuse_step",
    "transforms.gather_step": "gather_step",
    "transforms.gathered": "gathered",
    "transforms.plain": "plain",
    "transforms.recompute": "recompute",
    "transforms.replicate": "replicate",
    "transforms.sync_batch_norm": "sync_batch_norm",
    "transforms.with_precision": "LossScaling Precision creation_dtype loss_scale skipped with_precision",
    "transforms.zero_partition": "zero_partition",
    "seeding": "Seeded Seeds keyed_uniform set_seed worker_seeds",
    "transforms.shard_data": "DataPlan SeekableStream ShardedLoader shard_data",
}
_ROOM_OF = {name: room for room, names in LATER.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in ("checkpoint", "interop", "profiling", "reporting", "testing", "tracking"):
        return importlib.import_module(f"weft.{name}")
    if name in _ROOM_OF:
        return getattr(importlib.import_module(f"weft.{_ROOM_OF[name]}"), name)
    raise AttributeError(f"module 'weft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "AlreadyApplied",
    "Applied",
    "Averages",
    "BatchMath",
    "Checkpoint",
    "CheckpointError",
    "CollectiveRefused",
    "ContextError",
    "ContractError",
    "DataPlan",
    "DistContext",
    "GradSync",
    "Health",
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
    "Rows",
    "RunningSave",
    "Seeded",
    "Seeds",
    "SeekableStream",
    "ShardedLoader",
    "StaleContext",
    "Throughput",
    "Topology",
    "Undoable",
    "UnusedParameters",
    "WeftError",
    "Window",
    "Windows",
    "accumulate_grads",
    "adopt",
    "all_to_all",
    "any_rank",
    "average_weights",
    "averages",
    "barrier",
    "batch_math",
    "broadcast",
    "check",
    "checkpointable",
    "clip_grads",
    "compiled",
    "compose",
    "creation_dtype",
    "denominator",
    "errors",
    "explain",
    "export",
    "find_batch_size",
    "full_grads",
    "fully_shard",
    "fuse_step",
    "gather",
    "gather_metrics",
    "gather_objects",
    "gather_step",
    "gathered",
    "import_deepspeed",
    "interop",
    "keyed_uniform",
    "latest",
    "launch_function",
    "length_batches",
    "load_weights",
    "local",
    "log",
    "logger",
    "loss_scale",
    "main_first",
    "offered",
    "on_preemption",
    "on_rank",
    "pad_across",
    "pad_collate",
    "padding_share",
    "peak_memory",
    "plain",
    "print_once",
    "profile",
    "profiling",
    "progress",
    "recompute",
    "reduce",
    "reduce_scatter",
    "replicate",
    "reporting",
    "restore",
    "save",
    "save_async",
    "scatter",
    "set_seed",
    "shard_data",
    "skipped",
    "split_between",
    "start",
    "sync_batch_norm",
    "sync_rng",
    "testing",
    "throughput",
    "to_device",
    "together",
    "topology",
    "tracking",
    "transform",
    "verify",
    "watch_health",
    "weighted_mean",
    "with_precision",
    "worker_seeds",
    "zero_partition",
]
