"""Optimizer steps at other moments than after every reduced backward pass, or on other ranks.

local_steps.py      steps on a rank's own gradients, and what the ranks do now and then to their mean
backward_step.py    the step on each parameter inside backward
owners.py           which rank owns which parameter
owner_step.py       the step on whole parameters, each on the rank that owns it
replica_average.py  gradients averaged over replicas that may be lost in between
"""
