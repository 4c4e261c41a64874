"""Engines: who executes the transforms. A context holds one; a new backend is a new value.

Engines know nothing of contexts and contracts: they are handed groups, devices and options.
"""

from weft.engines.torch import TorchEngine

# One engine so far; when the second comes, this becomes the protocol both fulfil.
Engine = TorchEngine

__all__ = ["Engine", "TorchEngine"]
