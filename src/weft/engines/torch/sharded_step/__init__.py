"""The step where parameters, or the state of the optimizer, are in shards.

An optimizer's groups hold other tensors while it steps, by steps/swapped.py, and its own again after it.

shards.py        the step on this rank's rows (ZeRO stage 1), or on its shards as plain tensors
full_params.py   the step on whole parameters, on every rank
by_owner.py      the step on whole parameters, each on the rank that owns it
one_kind.py      the step where some parameters are sharded and others are not
state_layout.py  where state lies between steps

Tested by: tests/transforms/test_zero_partition.py, tests/transforms/test_gather_step.py,
    tests/training/test_one_kind.py, tests/engines/test_owner_step.py
"""
