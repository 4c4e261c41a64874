"""What comes before a module is cut into shards; the cutting itself is the engine's.

Shared by the transforms that shard.

shard_checks.py  modules, options and optimizers that cannot be sharded
units.py         which parts are gathered and freed together
meta.py          real tensors for modules on meta
shard_module.py  all of it in its order, and the engine
"""

from weft.sharding.meta import WeightSource
from weft.sharding.shard_checks import check_optimizers, layouts, optimizers_in
from weft.sharding.shard_module import exchange_parameters, shard_module, sharding_axes

__all__ = [
    "WeightSource",
    "check_optimizers",
    "exchange_parameters",
    "layouts",
    "optimizers_in",
    "shard_module",
    "sharding_axes",
]
