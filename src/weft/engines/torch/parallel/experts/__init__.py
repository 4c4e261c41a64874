"""Experts on several ranks: each rank holds some of them, and tokens go to where they are.

divided.py              which rank holds which experts, and everybody's again
stacked.py              experts that are parts of stacked parameters
listed.py               experts that are modules in a list
expert_placeholders.py  what takes the place of listed experts while the module around them runs
all_to_all.py           which rows of tensors go to which ranks
whole_experts.py        expert parallelism, measured: all experts on each rank, and the layers around them
local_losses.py         losses of routers over the batch of one rank, which are refused

Tested by: tests/transforms/test_expert_parallel.py, tests/engines/test_expert_lists.py
"""
