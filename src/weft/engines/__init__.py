"""Engines: who executes the transforms. A context holds one; a new backend is a new value.

options.py  what transforms hand to an engine
peers.py    what an engine may ask of the other ranks
torch/      plain torch: the default
xla/        torch-xla
deepspeed/  DeepSpeed's ZeRO, for `zero_partition`

Engines know nothing of contexts and contracts: they are handed groups, devices and options.
"""

from __future__ import annotations

from weft.engines.torch import TorchEngine

# What transforms ask of an engine is what this one answers; others are subclasses that do some of it differently.
Engine = TorchEngine

__all__ = ["Engine", "TorchEngine", "engine_for"]


def engine_for(device: str | None) -> Engine:
    """The engine for a device as the user names it."""
    if device is None or device.partition(":")[0] != "xla":
        return TorchEngine()
    from weft.engines.xla import XlaEngine  # noqa: PLC0415  (only who asks for it pays for it)

    return XlaEngine()
