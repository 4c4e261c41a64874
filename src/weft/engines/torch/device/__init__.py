"""Devices of this machine.

devices.py        which device, which backend, and what else an engine answers about devices
prefetch.py       batches to the device ahead of use
emptied.py        tensors without memory, whose values wait on the CPU
state_offload.py  the state of optimizers on the CPU between steps

Tested by: tests/context/test_placement.py, tests/simulated_device, tests/gpu
"""
