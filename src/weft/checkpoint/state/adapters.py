"""Adapters of PEFT in a module: their configuration, and which of its tensors are theirs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

# The file that PEFT keeps a configuration in, beside the weights.
CONFIG = "adapter_config.json"


class Adapter(NamedTuple):
    """What PEFT stores of one adapter.

    Attributes:
        config: Its configuration, as in adapter_config.json.
        names: From the name of a tensor in PEFT's file to the one in the module.
    """

    config: dict[str, Any]
    names: dict[str, str]


def adapters_of(module: nn.Module, tensors: Mapping[str, Any]) -> dict[str, Adapter]:
    """The adapters that PEFT has put into a module, by name.

    PEFT itself says which tensors belong to an adapter, and what they are called in its files. An adapter whose file
    holds something that is computed when it is saved, as in prompt learning, is left out.

    Args:
        module: A `PeftModel`, or a model of transformers after `add_adapter`.
        tensors: Its parameters and buffers, by their names in `state_dict()`.

    Returns:
        None of them for a module without PEFT.
    """
    configs = getattr(module, "peft_config", None)
    # What made the adapters has imported it; without adapters the import is spared.
    peft: Any = sys.modules.get("peft")
    if peft is None or not isinstance(configs, Mapping):
        return {}
    own = {id(tensor): name for name, tensor in tensors.items()}
    # PEFT reads adapters into a `PeftModel`, in which the model is two levels deep.
    prefix = "" if isinstance(module, peft.PeftModel) else "base_model.model."
    found: dict[str, Adapter] = {}
    for adapter, config in configs.items():
        # Embeddings of the model itself are not looked at: that asks a server about the size of its vocabulary.
        stored = peft.get_peft_model_state_dict(
            module, state_dict=dict(tensors), adapter_name=adapter, save_embedding_layers=False
        )
        if stored and all(id(tensor) in own for tensor in stored.values()):
            names = {prefix + name: own[id(tensor)] for name, tensor in stored.items()}
            found[adapter] = Adapter(_plain(config, module), names)
    return found


def _plain(config: Any, module: nn.Module) -> dict[str, Any]:
    model: Any = module
    base = model.get_base_model() if hasattr(module, "get_base_model") else model
    known = config.base_model_name_or_path or getattr(base, "name_or_path", None) or None
    # As PEFT writes it: an adapter that is read is not trained unless that is asked for.
    values = config.to_dict() | {"inference_mode": True, "base_model_name_or_path": known}
    plain: dict[str, Any] = json.loads(json.dumps(values, default=_listed))
    return plain


def _listed(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
