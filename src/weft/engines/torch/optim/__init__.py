"""What happens around an optimizer's step.

step_watch.py       every step of the optimizers of a strategy is seen before it changes anything
closures.py         the closure that a step may be given
rebind.py           optimizers moved to parameters that were replaced
state_layout.py     where state lies between steps
zero1_step.py       the step on this rank's rows (ZeRO stage 1)
swapped_step.py     the step on other tensors than those in the groups
full_param_step.py  the step on whole parameters, where they are in shards
flat_step.py        the step on one flat buffer
skip_step.py        the step that is skipped on non-finite gradients
grad_norm.py        the norm of gradients in shards, and clipping
ema.py              averages of weights, shard by shard
"""
