"""What happens in and around an optimizer's step.

watch.py         every step of the optimizers of a strategy is seen before it changes anything
swapped.py       the step on other tensors than those in the groups, its closure, and who may step on parts
shards.py        the step on this rank's rows (ZeRO stage 1)
full_params.py   the step on whole parameters, where they are in shards
by_owner.py      the step on whole parameters, each on the rank that owns it
one_kind.py      the step where some parameters are sharded and others are not
in_backward.py   the step on each parameter inside backward
local.py         steps on a rank's own gradients, and what the ranks do now and then to their mean
skip.py          the step that is skipped on non-finite gradients
rebind.py        optimizers moved to parameters that were replaced
state_layout.py  where state lies between steps

Tested by: tests/transforms, tests/training/test_one_kind.py, tests/training/test_step_hooks.py,
    tests/engines/test_owner_step.py
"""
