"""What happens in and around an optimizer's step.

watch.py               every step of the optimizers of a strategy is seen before it changes anything
swapped.py             the step on other tensors than those in the groups, its closure, and who may step on parts
step_by_parts.py       the step on a few parameters after the other, whose state is put away after
combined_optimizer.py  several optimizers as one
in_backward.py         the step on each parameter inside backward
local.py               steps on a rank's own gradients, and what the ranks do now and then to their mean
skip.py                the step that is skipped on non-finite gradients
rebind.py              optimizers moved to parameters that were replaced

[Note: order in a step] torch calls hooks on all optimizers first, then those on this one as they were registered:

1. watch: hooks on all optimizers attach `Steps` to one that it has not seen; of the hooks on it `Steps` comes first,
   reduces what is pending, and compares settings.
2. skip: `SkippingStep`, whose transform comes before strategies.
3. chain: `GradChain` of weft.grads, which moves the next ones behind itself.
4. parts: `StepByParts`, which makes steps 5 to 7 for a few parameters after the other.
5. swap: `StepsOnOthers` of a strategy, of which there is one, or two that step on different groups; `step_on_one_kind`
   moves its own behind all others.
6. the step of the class.
7. put back: the same hooks; those of the program that come after see an optimizer as it is between steps.
8. exchange: `LocalSteps` moves itself behind all others.

Tested by: tests/transforms, tests/training/test_step_hooks.py, tests/engines/test_offload.py
"""
