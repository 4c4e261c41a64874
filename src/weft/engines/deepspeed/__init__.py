"""DeepSpeed's ZeRO under a plain loop; imports nothing of DeepSpeed until an engine is made.

A guest: it is looked up by name. `weft.interop.deepspeed_partition` checks arguments and lets the ranks agree first.

library.py          DeepSpeed itself, and what it leaves in the process taken back
internals.py        its names that are not public
ds_config.py        its configuration, with what the pipeline owns filled in
build.py            an engine around a module and an optimizer
buffers.py          where its optimizers keep gradients, weights and state
parameters.py       parameters and the state of an optimizer in the form of all strategies
backward.py         backward passes of a plain loop, as those buffers see them
step.py             a step, made by DeepSpeed
placeholders.py     what stands in `p.grad` for gradients that lie there
partition.py        the hooks by which it works under a plain loop

Tested by: tests/engines/test_deepspeed.py, tests/engines/test_deepspeed_checkpoint.py,
    tests/engines/test_deepspeed_disk.py, tests/engines/test_deepspeed_missing.py
"""

from weft.engines.deepspeed.library import deepspeed, load_async_io

__all__ = ["deepspeed", "load_async_io"]
