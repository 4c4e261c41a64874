"""DeepSpeed's ZeRO under a plain loop; imports nothing of DeepSpeed until an engine is made.

library.py    DeepSpeed itself, and what it leaves in the process taken back
ds_config.py  its configuration, with what the pipeline owns filled in
build.py      an engine around a module and an optimizer
buffers.py    where its optimizers keep gradients, weights and state
optimizer_state.py  parameters and state in the form of all strategies
partition.py  the hooks by which it works under a plain loop
"""

from weft.engines.deepspeed.build import check_config, partition
from weft.engines.deepspeed.ds_config import Facts, complete, read
from weft.engines.deepspeed.library import check_accelerator, deepspeed, load_async_io
from weft.engines.deepspeed.partition import Order, Partition

__all__ = [
    "Facts",
    "Order",
    "Partition",
    "check_accelerator",
    "check_config",
    "complete",
    "deepspeed",
    "load_async_io",
    "partition",
    "read",
]
