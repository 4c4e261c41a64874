"""What a program has to be, so that its steps can be made again; and what has to be alike on all replicas."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.checkpoint.state.collect import Checkpoint, check_state
from weft.context import DistContext
from weft.contract import GradSync, offered
from weft.data.split.sharded_loader import ShardedLoader
from weft.errors import ContextError, ContractError, listed, type_error, value_error
from weft.peers.replica_groups import ReplicaGroup
from weft.version import __version__

__all__ = ["check_program", "facts_of_program"]

_FIT = frozenset(
    ("shard_data", "replicate", "fully_shard", "accumulate_grads", "with_precision", "recompute", "compile")
)
_CALL = "for batch in weft.resilient(loader, ctx, state=state): ..."


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
            "resilient: this is no elastic job",
            found=f"mesh {dict(ctx.axes)}",
            expected="a context of one replica",
            fix='with weft.start(mesh={"replica": -1}, elastic="replica") as ctx: ...',
        )
    if not isinstance(loader, ShardedLoader):
        raise type_error(
            "resilient: the samples of this loader cannot be divided anew",
            found=type(loader).__name__,
            expected="a loader of shard_data, or the windows over one",
            fix="loader, ctx = weft.shard_data(loader, ctx)",
        )
    reading = loader.weft_reading
    plan = reading.plan
    if plan.step_units is None or reading.planned(loader.weft_cursor.todo) is None or plan.costs is not None:
        what = "batches without a size, a stream, data that was split already, dispatch, or cost="
        raise _unfit("the samples of a step are not known beforehand", what)
    if plan.uneven not in ("balance", "empty"):
        raise _unfit(f'uneven="{plan.uneven}" makes other samples of other numbers of replicas', 'uneven="balance"')
    strange = sorted({record.name for record in ctx.applied} - _FIT - {"checkpointable"})
    if strange:
        raise _unfit(
            f"not supported in an elastic job: {listed(strange)}", f"of transforms only {listed(sorted(_FIT))}"
        )
    return ctx.replicas, _optimizer_of(loader, state)


def _unfit(found: str, expected: str) -> ContractError:
    return ContractError("resilient: a step could not be made again", found=found, expected=expected, fix=_CALL)


def _optimizer_of(loader: Any, state: Checkpoint) -> torch.optim.Optimizer:
    optimizers = [obj for obj in state.objects.values() if isinstance(obj, torch.optim.Optimizer)]
    modules = [obj for obj in state.objects.values() if isinstance(obj, nn.Module)]
    if len(optimizers) != 1 or all(obj is not loader for obj in state.objects.values()):
        raise value_error(
            "resilient: the state does not have all that a new replica needs",
            found=f"{len(optimizers)} optimizers; " + listed(state.objects),
            expected="modules, one optimizer, whose step ends a step of the job, and the loader itself",
            fix='state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer, "loader": loader}, ctx)',
        )
    averaged = {
        id(p) for module in modules for part in module.modules() if offered(part, GradSync) for p in part.parameters()
    }
    if any(id(p) not in averaged for group in optimizers[0].param_groups for p in group["params"]):
        raise _unfit("parameters whose gradients nobody averages", "model, ctx = weft.replicate(model, ctx)")
    return optimizers[0]


def facts_of_program(state: Checkpoint) -> dict[str, str]:
    """What has to be alike on all replicas, as short texts."""
    objects = {
        key: [f"{name} {value.dtype} {tuple(value.shape)}" for name, value in _tensors(obj)]
        for key, obj in state.objects.items()
    }
    kinds = {key: type(obj).__name__ for key, obj in state.objects.items()}
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    script = Path(main).read_bytes() if main is not None and Path(main).is_file() else b""
    return {
        "weft": __version__,
        "torch": torch.__version__,
        "objects": _digest(json.dumps([kinds, objects]).encode()),
        "script": _digest(script),
    }


def _tensors(obj: object) -> list[tuple[str, torch.Tensor]]:
    return [*obj.named_parameters(), *obj.named_buffers()] if isinstance(obj, nn.Module) else []


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
