"""What a program has to be, so that its steps can be made again; and what has to be alike on all replicas."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.checkpoint.state.collect import Checkpoint, check_state
from weft.context import DistContext
from weft.data.split.sharded_loader import ShardedLoader
from weft.elastic.step_mark import averaged_parameters
from weft.engines.torch.reducing.buckets import sparse_gradients
from weft.errors import ContextError, ContractError, listed, type_error, value_error
from weft.peers.replica_groups import ReplicaGroup
from weft.version import __version__

_FIT = frozenset(
    ("shard_data", "replicate", "fully_shard", "accumulate_grads", "with_precision", "recompute", "compile")
)
_LONG = 200  # characters of a fact that is shown in full


def check_program(loader: Any, ctx: DistContext, state: Checkpoint) -> tuple[ReplicaGroup, torch.optim.Optimizer]:
    """The replicas and the optimizer of a program.

    Raises:
        ContextError: It is no elastic job.
        ContractError: A step could not be made again.
        TypeError: The loader or the state is something else.
        ValueError: The state is not complete.
    """
    check_state("resilient", state)
    if ctx.replicas is None:
        raise ContextError(
            "resilient: this is not an elastic job",
            found=f"mesh {dict(ctx.axes)}",
            expected="a context of one replica",
            fix='with weft.start(mesh={"replica": -1}, elastic="replica") as ctx: ...',
        )
    if not isinstance(loader, ShardedLoader):
        raise type_error(
            "resilient: the samples of this loader cannot be divided again",
            found=type(loader).__name__,
            expected="a loader of shard_data, or the windows over one",
            fix="loader, ctx = weft.shard_data(loader, ctx)",
        )
    reading = loader.weft_reading
    plan = reading.plan
    if plan.step_units is None or reading.planned(loader.weft_cursor.now.todo) is None or plan.costs is not None:
        what = "batches without a size, a stream, data that was split already, dispatch, or cost="
        raise _unfit(
            f"the samples of a step are not known beforehand: {what}",
            "a map-style dataset, whose samples are split into batches of a known size",
            "loader, ctx = weft.shard_data(DataLoader(dataset, batch_size=8), ctx)",
        )
    if plan.uneven not in ("balance", "empty"):
        found = f'uneven="{plan.uneven}" makes other samples of other numbers of replicas'
        fix = f'loader, ctx = weft.shard_data(loader, ctx)  # without uneven="{plan.uneven}"'
        raise _unfit(found, 'uneven="balance" or "empty"', fix)
    strange = sorted({record.name for record in ctx.applied} - _FIT - {"checkpointable"})
    if strange:
        raise _unfit(
            f"not supported in an elastic job: {listed(strange)}",
            f"of transforms only {', '.join(sorted(_FIT))}",
            f"leave {listed(strange)} out",
        )
    return ctx.replicas, _optimizer_of(loader, state)


def _unfit(found: str, expected: str, fix: str) -> ContractError:
    return ContractError("resilient: a step could not be repeated", found=found, expected=expected, fix=fix)


def _optimizer_of(loader: Any, state: Checkpoint) -> torch.optim.Optimizer:
    optimizers = [obj for obj in state.objects.values() if isinstance(obj, torch.optim.Optimizer)]
    modules = [obj for obj in state.objects.values() if isinstance(obj, nn.Module)]
    if len(optimizers) != 1 or all(obj is not loader for obj in state.objects.values()):
        raise value_error(
            "resilient: the state lacks objects that a new replica needs",
            found=f"{len(optimizers)} optimizers; " + listed(state.objects),
            expected="modules, one optimizer, whose step ends a step of the job, and the loader itself",
            fix='state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer, "loader": loader}, ctx)',
        )
    averaged = averaged_parameters(modules)
    unfit = [name for module in modules for name in sparse_gradients(module)]
    unfit += [name for module in modules for name, p in module.named_parameters() if p.is_complex()]
    if unfit:
        found = f"sparse or complex gradients: {listed(unfit)}"
        raise _unfit(found, "dense gradients of real numbers", "nn.Embedding(..., sparse=False)")
    if any(id(p) not in averaged for group in optimizers[0].param_groups for p in group["params"]):
        found = "parameters whose gradients nobody averages"
        raise _unfit(found, "modules that are replicated or sharded", "model, ctx = weft.replicate(model, ctx)")
    return optimizers[0]


def facts_of_program(state: Checkpoint, loader: ShardedLoader[Any], ctx: DistContext) -> dict[str, str]:
    """What has to be alike on all replicas, as short texts; those that only one of two has are not compared."""
    plan, total = loader.weft_reading.plan, loader.weft_reading.total
    found = {
        "weft": __version__,
        "torch": torch.__version__,
        "objects": _digest(json.dumps([_facts_of_object(key, obj) for key, obj in state.objects.items()]).encode()),
        "samples": f"{plan.per_step} of {total} in a step, uneven={plan.uneven!r}, drop_last={plan.drop_last}",
        "transforms": ", ".join(record.name for record in ctx.applied),
    }
    for record in ctx.applied:
        text = str(record)
        key = record.name if record.name not in found else f"{record.name}, number {len(found)}"
        found[key] = text if len(text) < _LONG else _digest(text.encode())
    return found | _facts_of_files()


def _facts_of_object(key: str, obj: object) -> list[object]:
    if not isinstance(obj, nn.Module):
        return [key, type(obj).__name__]
    parameters = [f"{name} {p.dtype} {tuple(p.shape)} {p.requires_grad}" for name, p in obj.named_parameters()]
    buffers = [f"{name} {buffer.dtype} {tuple(buffer.shape)}" for name, buffer in obj.named_buffers()]
    return [key, re.sub(r"0x[0-9a-f]+", "", repr(obj)), parameters, buffers]


def _facts_of_files() -> dict[str, str]:
    """The script, and what was imported from its folder."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is None or not Path(main).is_file():
        return {}
    found = {"script": _digest(Path(main).read_bytes())}
    folder = f"{Path(main).resolve().parent}{os.sep}"
    for module in [*sys.modules.values()]:
        file = getattr(module, "__file__", None) or ""
        if file.startswith(folder) and "site-packages" not in file and Path(file).is_file():
            found[file.removeprefix(folder)] = _digest(Path(file).read_bytes())
    return found


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
