"""Weights that other libraries have quantized: bitsandbytes in layers of its own, torchao in tensors of its own."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

_TEXT = 512


def quantized_parts(module: nn.Module) -> dict[str, str]:
    """Parts with quantized weights, by name: "4 bits", "8 bits", or "torchao"."""
    found: dict[str, str] = {}
    bitsandbytes: Any = sys.modules.get("bitsandbytes")
    for name, part in module.named_modules():
        if bitsandbytes is not None and isinstance(part, bitsandbytes.nn.Linear4bit):
            found[name] = "4 bits"
        elif bitsandbytes is not None and isinstance(part, bitsandbytes.nn.Linear8bitLt):
            found[name] = "8 bits"
        elif any(map(is_wrapped, part.parameters(recurse=False))):
            found[name] = "torchao"
    return found


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor is torchao's, which has its numbers in several others."""
    torchao: Any = sys.modules.get("torchao.utils")
    return torchao is not None and isinstance(tensor, torchao.TorchAOBaseTensor)


def keep_order(module: nn.Module) -> None:
    """Let weights of 4 bits stay in the order in which they are stored.

    On CPUs with AVX512-BF16, bitsandbytes reorders them for its fast kernel in the first forward of an evaluation. From
    then on no gradient passes the layer, and its weight can neither be sharded nor gathered.
    """
    for name, kind in quantized_parts(module).items():
        if kind == "4 bits":
            part: Any = module.get_submodule(name)
            part.support_avx512bf16_for_cpu = False
            if getattr(getattr(part.weight, "quant_state", None), "packing_format_for_cpu", False):
                part.state_dict()  # which puts them in order again


def quantization_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """What bitsandbytes keeps beside quantized weights, by key of `state_dict()`: scales, and how to read them.

    Restoring writes into these tensors. The text that describes a weight is one too, of a length that is always the
    same; what it says that can differ between two modules of one kind is in `nested_offset`.
    """
    found: dict[str, torch.Tensor] = {}
    for name, kind in quantized_parts(module).items():
        if kind == "torchao":
            continue
        part: Any = module.get_submodule(name)
        for key, value in part.state_dict(prefix=f"{name}.", keep_vars=True).items():
            if key not in (f"{name}.weight", f"{name}.bias"):
                found[key] = _padded(value) if ".quant_state." in key else value
        state = getattr(part, "quant_state", None)
        if state is not None and state.nested:
            found[f"{name}.weight.nested_offset"] = state.offset
    return found


def _padded(text: torch.Tensor) -> torch.Tensor:
    """JSON as bytes, with spaces at its end."""
    return nn.functional.pad(text, (0, -len(text) % _TEXT), value=ord(" "))
