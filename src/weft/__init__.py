"""weft makes a training loop distributed by composing functions.

    with weft.start() as ctx:
        loader, ctx = weft.shard_data(loader, ctx)
        model, ctx = weft.with_precision(model, ctx, "bf16")
        model, ctx = weft.replicate(model, ctx)
        ...                                                     # plain PyTorch from here on

The names that most programs use are here. The rest is in `weft.data`, `weft.metrics`, `weft.weights`,
`weft.checkpoint`, `weft.collectives`, `weft.contract`, `weft.grads`, `weft.monitoring`, `weft.precision`, `weft.rng`,
`weft.environments`, `weft.errors` and `weft.testing`. docs/architecture.md shows which package may import which.
"""

import importlib
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from weft import errors as errors
from weft.version import __version__ as __version__
from weft.version import refuse_other_packages as _refuse_other_packages

if TYPE_CHECKING:
    from weft import checkpoint as checkpoint
    from weft import collectives as collectives
    from weft import context as context
    from weft import contract as contract
    from weft import data as data
    from weft import environments as environments
    from weft import grads as grads
    from weft import interop as interop
    from weft import metrics as metrics
    from weft import monitoring as monitoring
    from weft import precision as precision
    from weft import rng as rng
    from weft import testing as testing
    from weft import weights as weights
    from weft.assembly import assemble
    from weft.checkpoint import checkpointable
    from weft.checkpoint.restore import restore
    from weft.checkpoint.save import save
    from weft.checkpoint.save_async import save_async
    from weft.collectives import barrier, broadcast, gather, main_first, reduce
    from weft.completeness import check
    from weft.context import DistContext, adopt, local, on_preemption
    from weft.context.explain import explain
    from weft.context.placement import to_device
    from weft.context.start import start
    from weft.contract.transform import compose, transform
    from weft.elastic import resilient
    from weft.launching.launch_function import launch_function
    from weft.monitoring.log import log
    from weft.monitoring.progress import progress
    from weft.precision import Precision
    from weft.rehearsal.rehearse import rehearse
    from weft.sharding.layers.tensor_plan import tensor_plan
    from weft.sharding.stages import plan_pipeline
    from weft.transforms.accumulate_grads import accumulate_grads
    from weft.transforms.average_weights import average_weights, averages
    from weft.transforms.balance_loss import balance_bias_, balance_loss
    from weft.transforms.clip_grads import clip_grads
    from weft.transforms.compile import compile
    from weft.transforms.context_parallel import context_parallel
    from weft.transforms.expert_parallel import expert_parallel
    from weft.transforms.full_grads import full_grads
    from weft.transforms.full_params import full_params
    from weft.transforms.fully_shard import fully_shard
    from weft.transforms.fuse_step import fuse_step
    from weft.transforms.gather_step import gather_step
    from weft.transforms.grad_chain import grad_chain
    from weft.transforms.hooked import hooked
    from weft.transforms.keyed_dropout import keyed_dropout
    from weft.transforms.local_steps import local_steps
    from weft.transforms.offloaded import offloaded
    from weft.transforms.optimizers import optimizers
    from weft.transforms.pipeline import pipeline
    from weft.transforms.place import place
    from weft.transforms.recompute import recompute
    from weft.transforms.replicate import replicate
    from weft.transforms.shard_data import shard_data
    from weft.transforms.skip_nonfinite import skip_nonfinite, was_skipped
    from weft.transforms.state_in_bf16 import state_in_bf16
    from weft.transforms.step_in_backward import step_in_backward
    from weft.transforms.sync_batch_norm import sync_batch_norm
    from weft.transforms.tensor_parallel import tensor_parallel
    from weft.transforms.undo import undo
    from weft.transforms.with_precision import loss_scale, with_precision
    from weft.transforms.zero_partition import zero_partition
    from weft.weights import load_weights, quantized
    from weft.weights.export import export

_refuse_other_packages(Path(__file__).parents[1])

# Imported when a program asks for one of their names: `import weft` costs little, and most programs need a part of it.
_SUBMODULES = frozenset(
    {
        *("checkpoint", "collectives", "context", "contract", "data", "environments", "grads", "interop"),
        *("metrics", "monitoring", "precision", "rng", "testing", "weights"),
    }
)
# Where a name is, if not in the file of `transforms` that is called like it.
_ELSEWHERE = MappingProxyType(
    {
        "assembly": "assemble",
        "checkpoint": "checkpointable restore save save_async",
        "collectives": "barrier broadcast gather main_first reduce",
        "completeness": "check",
        "context": "DistContext adopt explain local on_preemption start",
        "context.placement": "to_device",
        "contract": "compose transform",
        "elastic": "resilient",
        "launching.launch_function": "launch_function",
        "monitoring": "log progress",
        "precision": "Precision",
        "rehearsal.rehearse": "rehearse",
        "sharding.layers.tensor_plan": "tensor_plan",
        "sharding.stages": "plan_pipeline",
        "transforms.average_weights": "averages",
        "transforms.balance_loss": "balance_bias_ balance_loss",
        "transforms.skip_nonfinite": "was_skipped",
        "transforms.with_precision": "loss_scale",
        "weights": "export load_weights quantized",
    }
)
_MODULE_OF = MappingProxyType({name: module for module, names in _ELSEWHERE.items() for name in names.split()})


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"weft.{name}")
    if name in __all__:
        return getattr(importlib.import_module(f"weft.{_MODULE_OF.get(name, f'transforms.{name}')}"), name)
    raise AttributeError(f"module 'weft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES, *__all__})


__all__ = [
    "DistContext",
    "Precision",
    "accumulate_grads",
    "adopt",
    "assemble",
    "average_weights",
    "averages",
    "balance_bias_",
    "balance_loss",
    "barrier",
    "broadcast",
    "check",
    "checkpointable",
    "clip_grads",
    "compile",
    "compose",
    "context_parallel",
    "errors",
    "expert_parallel",
    "explain",
    "export",
    "full_grads",
    "full_params",
    "fully_shard",
    "fuse_step",
    "gather",
    "gather_step",
    "grad_chain",
    "hooked",
    "keyed_dropout",
    "launch_function",
    "load_weights",
    "local",
    "local_steps",
    "log",
    "loss_scale",
    "main_first",
    "offloaded",
    "on_preemption",
    "optimizers",
    "pipeline",
    "place",
    "plan_pipeline",
    "progress",
    "quantized",
    "recompute",
    "reduce",
    "rehearse",
    "replicate",
    "resilient",
    "restore",
    "save",
    "save_async",
    "shard_data",
    "skip_nonfinite",
    "start",
    "state_in_bf16",
    "step_in_backward",
    "sync_batch_norm",
    "tensor_parallel",
    "tensor_plan",
    "to_device",
    "transform",
    "undo",
    "was_skipped",
    "with_precision",
    "zero_partition",
]
