"""Layers that PEFT has put another layer into: the styles of what is inside."""

from __future__ import annotations

import sys
from types import MappingProxyType
from typing import Any

from torch import nn

from weft.errors import value_error
from weft.sharding.layers.linear_layers import word_of

# What is low-rank stays whole between the two halves of an adapter. As "sequence" it may run on a part of the sequence.
_HALVES = MappingProxyType(
    {
        "column": {"lora_A": "sequence", "lora_B": "column"},
        "gather": {"lora_A": "sequence", "lora_B": "gather"},
        "row": {"lora_A": "row", "lora_B": "sequence"},
    }
)


def styles_inside(name: str, part: nn.Module, style: str) -> dict[str, str]:
    """What a style of a layer means for the layers inside it, if PEFT has replaced it.

    Args:
        name: Of the layer in the plan; may be a pattern.
        part: The layer, or what took its place.
        style: As in a plan of tensor parallelism.

    Returns:
        Styles by name; none for a layer that PEFT has not touched.

    Raises:
        ValueError: The adapter computes with more than the two halves of a matrix. Its layer cannot stay whole either:
            the layers beside it would be cut into other heads.
    """
    peft: Any = sys.modules.get("peft")
    if peft is None:
        return {}
    if isinstance(part, peft.utils.ModulesToSaveWrapper):
        return {f"{name}.original_module": style, f"{name}.modules_to_save.*": style}
    if not isinstance(part, peft.tuners.tuners_utils.BaseTunerLayer):
        return {}
    inner: Any = part
    plain = isinstance(part, peft.tuners.lora.Linear) and not any(inner.use_dora.values())
    word = word_of(style)
    if not plain or word not in _HALVES:
        kind = "DoRA" if isinstance(part, peft.tuners.lora.Linear) else f"{type(part).__module__}.{type(part).__name__}"
        raise value_error(
            f"tensor_plan: an adapter in {name} cannot be cut",
            found=f"{kind} in a layer of style {style!r}",
            expected="LoRA of linear layers",
            fix="model, ctx = weft.fully_shard(model, ctx)  # takes every adapter",
        )
    halves = {f"{name}.{half}.*": style if inside == word else inside for half, inside in _HALVES[word].items()}
    return {f"{name}.base_layer": style, **halves}
