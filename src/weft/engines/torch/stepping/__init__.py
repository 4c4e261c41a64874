"""Optimizer steps at other moments than after every reduced backward pass, on other ranks, or on other tensors.

local_steps.py      steps on a rank's own gradients, and what the ranks do now and then to their mean
backward_step.py    the step on each parameter inside backward
owners.py           which rank owns which parameter
owner_step.py       the step on whole parameters, each on the rank that owns it
one_kind.py         the step where some parameters are sharded and others are not
replica_average.py  gradients averaged over replicas that may be lost in between
"""
