"""What comes before a module is cut into shards; the cutting itself is the engine's.

Shared by the transforms that shard.

shard_checks.py       modules, options and optimizers that cannot be sharded
units.py              which parts are gathered and freed together
meta.py               real tensors for modules on meta
layouts_over_axes.py  parameters that lie along other axes, or whose gradients are summed over others
stages.py             the stages of a pipeline: which layers come one after the other
stage_tensors.py      which rank of a pipeline keeps which parameters
per_rank_dtensor.py   tensors that differ between ranks, as one with a dimension more
owner_step.py         steps on whole parameters, each on the rank that owns it
shard_module.py       all of it in its order, and the engine
find_experts.py       experts that can be divided among ranks
layers/               the same for layers that are cut by a plan

Tested by: tests/transforms/test_fully_shard.py, tests/transforms/test_pipeline.py, tests/training/test_other_axes.py,
    tests/engines/test_owner_step.py
"""

from weft.sharding.layers.tensor_layers import cut_layers
from weft.sharding.layers.tensor_plan import TensorPlan, tensor_plan
from weft.sharding.layouts_over_axes import broadcast_state, facts_of, reductions, step_meshes
from weft.sharding.meta import WeightSource
from weft.sharding.owner_step import check_divides_state, check_owners, step_by_owners
from weft.sharding.per_rank_dtensor import stacked_over
from weft.sharding.shard_checks import check_optimizers, groups_of, optimizers_in
from weft.sharding.shard_module import exchange_parameters, shard_module, sharding_axes

__all__ = [
    "TensorPlan",
    "WeightSource",
    "broadcast_state",
    "check_divides_state",
    "check_optimizers",
    "check_owners",
    "cut_layers",
    "exchange_parameters",
    "facts_of",
    "groups_of",
    "optimizers_in",
    "reductions",
    "shard_module",
    "sharding_axes",
    "stacked_over",
    "step_by_owners",
    "step_meshes",
    "tensor_plan",
]
