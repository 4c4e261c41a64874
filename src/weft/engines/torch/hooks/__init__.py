"""Seeing what a module and its gradients do.

method_hooks.py         something before and after a module's calls
graph_walk.py           the graph of the backward pass that is running
backward_session.py     when a backward pass enters a module, and when it has ended
parameter_watch.py      parameters that were added, frozen or unfrozen
parameter_reads.py      a sharded parameter that is read outside its unit
shared_buffers.py       buffers that get the first rank's values
every_optimizer.py      hooks on the steps of all optimizers
first_steps.py          mistakes that are in a program from its first step on
bypassed_forward.py     the error for gradients that came through another method
function_transforms.py  inside `torch.func`
program_lines.py        lines of a user's program, as errors show them

Tested by: tests/training, tests/transforms/test_hooked.py
"""
