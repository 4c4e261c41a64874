"""Engines: who executes the transforms. A context holds one; a new backend is a new value.

protocol.py      what transforms ask of an engine
options.py       what transforms hand to an engine
results.py       what an engine returns
probes.py        what is measured while a program runs, and when
torch_errors.py  what errors of torch mean: a peer is lost, plain tensors beside DTensors
torch/           plain torch: the default
xla/             torch-xla, a guest
deepspeed/       DeepSpeed's ZeRO, for `zero_partition`, a guest

Engines know nothing of contexts and contracts: they are handed groups, devices, options, and a `Ledger`
of weft.peers to ask the other ranks. Guests are found by name alone, when a program asks for them.

Tested by: tests/engines, tests/transforms, tests/probes/test_runner.py
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Literal

from weft.engines.protocol import Engine, Spmd

if TYPE_CHECKING:
    from weft.engines.torch.engine import TorchEngine

__all__ = ["Engine", "Spmd", "TorchEngine", "engine_for", "guest"]


def guest(name: Literal["deepspeed", "xla"]) -> Any:
    """The package of a guest, imported when it is asked for; its library is imported when it is used."""
    return importlib.import_module(f"weft.engines.{name}")


def engine_for(device: str | None) -> Engine:
    """The engine for a device as the user names it."""
    engine: Engine
    if device is None or device.partition(":")[0] != "xla":
        engine = importlib.import_module("weft.engines.torch.engine").TorchEngine()
    else:
        engine = guest("xla").XlaEngine()
    return engine


def __getattr__(name: str) -> Any:
    if name == "TorchEngine":  # imported with the first context, not with the package
        return importlib.import_module("weft.engines.torch.engine").TorchEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
