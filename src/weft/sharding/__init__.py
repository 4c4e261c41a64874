"""What comes before a module is cut into shards; the cutting itself is the engine's.

Shared by the transforms that shard.

shard_checks.py       modules, options and optimizers that cannot be sharded
units.py              which parts are gathered and freed together
meta.py               real tensors for modules on meta
layouts_over_axes.py  parameters that lie along other axes, or whose gradients are summed over others
stages.py             the stages of a pipeline: which layers come one after the other
stage_tensors.py      which rank of a pipeline keeps which parameters
per_rank_dtensor.py   tensors that differ between ranks, as one with a dimension more
owner_step.py         who steps on what: all ranks on what they hold, or an owner on each parameter
shard_module.py       all of it in its order, and the engine
reduce_module.py      the same for gradients that are averaged
find_experts.py       experts that can be divided among ranks
layers/               the same for layers that are cut by a plan

Tested by: tests/transforms/test_fully_shard.py, tests/transforms/test_pipeline.py, tests/training/test_other_axes.py,
    tests/engines/test_owner_step.py
"""

from weft.sharding.layers.tensor_layers import cut_layers
from weft.sharding.layouts_over_axes import broadcast_state, step_meshes
from weft.sharding.meta import WeightSource
from weft.sharding.owner_step import check_who_steps, keep_state_on_cpu, step_in_parts
from weft.sharding.per_rank_dtensor import stacked_over
from weft.sharding.reduce_module import reduce_module
from weft.sharding.shard_checks import check_optimizers, groups_of, optimizers_in
from weft.sharding.shard_module import exchange_parameters, shard_module, sharding_axes
from weft.sharding.units import UnitChoice

__all__ = [
    "UnitChoice",
    "WeightSource",
    "broadcast_state",
    "check_optimizers",
    "check_who_steps",
    "cut_layers",
    "exchange_parameters",
    "groups_of",
    "keep_state_on_cpu",
    "optimizers_in",
    "reduce_module",
    "shard_module",
    "sharding_axes",
    "stacked_over",
    "step_in_parts",
    "step_meshes",
]
