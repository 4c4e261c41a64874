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
    from weft.assembly import assemble as assemble
    from weft.checkpoint import checkpointable as checkpointable
    from weft.checkpoint.restore import restore as restore
    from weft.checkpoint.save import save as save
    from weft.checkpoint.save_async import save_async as save_async
    from weft.collectives import barrier as barrier
    from weft.collectives import broadcast as broadcast
    from weft.collectives import gather as gather
    from weft.collectives import main_first as main_first
    from weft.collectives import reduce as reduce
    from weft.completeness import check as check
    from weft.context import DistContext as DistContext
    from weft.context import adopt as adopt
    from weft.context import local as local
    from weft.context import on_preemption as on_preemption
    from weft.context.explain import explain as explain
    from weft.context.placement import to_device as to_device
    from weft.context.start import start as start
    from weft.contract.transform import compose as compose
    from weft.contract.transform import transform as transform
    from weft.elastic import resilient as resilient
    from weft.launching.launch_function import launch_function as launch_function
    from weft.monitoring.log import log as log
    from weft.monitoring.progress import progress as progress
    from weft.precision import Precision as Precision
    from weft.rehearsal.rehearse import rehearse as rehearse
    from weft.sharding.layers.tensor_plan import tensor_plan as tensor_plan
    from weft.sharding.stages import plan_pipeline as plan_pipeline
    from weft.transforms.accumulate_grads import accumulate_grads as accumulate_grads
    from weft.transforms.average_weights import average_weights as average_weights
    from weft.transforms.average_weights import averages as averages
    from weft.transforms.balance_loss import balance_bias_ as balance_bias_
    from weft.transforms.balance_loss import balance_loss as balance_loss
    from weft.transforms.clip_grads import clip_grads as clip_grads
    from weft.transforms.compile import compile as compile
    from weft.transforms.context_parallel import context_parallel as context_parallel
    from weft.transforms.expert_parallel import expert_parallel as expert_parallel
    from weft.transforms.full_grads import full_grads as full_grads
    from weft.transforms.full_params import full_params as full_params
    from weft.transforms.fully_shard import fully_shard as fully_shard
    from weft.transforms.fuse_step import fuse_step as fuse_step
    from weft.transforms.gather_step import gather_step as gather_step
    from weft.transforms.grad_chain import grad_chain as grad_chain
    from weft.transforms.hooked import hooked as hooked
    from weft.transforms.keyed_dropout import keyed_dropout as keyed_dropout
    from weft.transforms.local_steps import local_steps as local_steps
    from weft.transforms.offloaded import offloaded as offloaded
    from weft.transforms.optimizers import optimizers as optimizers
    from weft.transforms.pipeline import pipeline as pipeline
    from weft.transforms.place import place as place
    from weft.transforms.recompute import recompute as recompute
    from weft.transforms.replicate import replicate as replicate
    from weft.transforms.shard_data import shard_data as shard_data
    from weft.transforms.skip_nonfinite import skip_nonfinite as skip_nonfinite
    from weft.transforms.skip_nonfinite import was_skipped as was_skipped
    from weft.transforms.state_in_bf16 import state_in_bf16 as state_in_bf16
    from weft.transforms.step_in_backward import step_in_backward as step_in_backward
    from weft.transforms.sync_batch_norm import sync_batch_norm as sync_batch_norm
    from weft.transforms.tensor_parallel import tensor_parallel as tensor_parallel
    from weft.transforms.undo import undo as undo
    from weft.transforms.with_precision import loss_scale as loss_scale
    from weft.transforms.with_precision import with_precision as with_precision
    from weft.transforms.zero_partition import zero_partition as zero_partition
    from weft.weights import load_weights as load_weights
    from weft.weights import quantized as quantized
    from weft.weights.export import export as export

_refuse_other_packages(Path(__file__).parents[1])

# Imported when a program asks for one of their names: `import weft` costs little, and most programs need a part of it.
_SUBMODULES = frozenset(
    {
        *("checkpoint", "collectives", "context", "contract", "data", "environments", "grads", "interop"),
        *("metrics", "monitoring", "precision", "rng", "testing", "weights"),
    }
)
# The public names, and where each is.
_HOMES = MappingProxyType(
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
        "transforms": (  # each in the file that is called like it
            "accumulate_grads average_weights clip_grads compile "
            "context_parallel expert_parallel full_grads full_params "
            "fully_shard fuse_step gather_step grad_chain hooked "
            "keyed_dropout local_steps offloaded optimizers pipeline place "
            "recompute replicate shard_data skip_nonfinite state_in_bf16 "
            "step_in_backward sync_batch_norm tensor_parallel undo "
            "with_precision zero_partition"
        ),
        "transforms.average_weights": "averages",
        "transforms.balance_loss": "balance_bias_ balance_loss",
        "transforms.skip_nonfinite": "was_skipped",
        "transforms.with_precision": "loss_scale",
        "weights": "export load_weights quantized",
    }
)
_MODULE_OF = MappingProxyType({name: module for module, names in _HOMES.items() for name in names.split()})
if not TYPE_CHECKING:  # checkers look at the imports above
    __all__ = sorted([*_MODULE_OF, "errors"])  # noqa: PLE0605  (it is a list)


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"weft.{name}")
    if name in _MODULE_OF:
        home = _MODULE_OF[name]
        return getattr(importlib.import_module(f"weft.{home}" + f".{name}" * (home == "transforms")), name)
    raise AttributeError(f"module 'weft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES, *_MODULE_OF})
