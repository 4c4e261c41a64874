"""torch-xla under a plain loop: one process per host, whose devices are one mesh (SPMD).

library.py                torch-xla itself, if it is there and fits torch
internals.py              its names that are not public
device_layout.py          which device holds which part of a tensor; the end of a step, and of the graph XLA compiles
device_transfer.py        modules, batches and values to the devices and back
activation_checkpoint.py  activations computed again
engine.py                 what transforms ask

Nothing of torch-xla is imported before a context on the device "xla" is made.

[Note: one view] Under SPMD a tensor is one value, however many devices hold parts of it: the program sees whole
parameters and the batch of all devices, and the compiler adds the messages. So a process is one rank, with
any number of devices, and a strategy is nothing but a layout. Names, classes and parameters stay what they are.

Tested by: tests/engines/test_xla.py
"""

from weft.engines.xla.engine import XlaEngine

__all__ = ["XlaEngine"]
