"""What a rehearsal runs a program in: one process, one rank of many, tensors without memory.

pretended_world.py    a default process group with pretended ranks, in place of the one that is there
pretended_tensors.py  which tensors have values, and what is read of those that have none
parameters.py         parameters, which have none; lazy ones
numbers.py            what is read of tensors without values
devices.py            "cuda" and other names of devices, on a machine without one
observe.py            the mode that sees every operation, in simulations and in real runs
settled.py            messages of a real run that are over when they are made
allocations.py        live bytes by kind and line, and their peak
messages.py           collectives by kind and axis
lines.py              the line of the user's program that is running
shortcuts.py          what torch does and a simulation need not

Tested by: tests/rehearsal
"""
