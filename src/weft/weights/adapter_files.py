"""Adapters of PEFT in checkpoints and in folders of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from weft.checkpoint.state.adapters import Adapter, adapters_of
from weft.errors import CheckpointError, listed, value_error
from weft.weights.sources import WeightFiles


def check_adapter_options(peft: object, filter: object, rename: object) -> None:
    """Raise unless these options of `export` go together.

    Raises:
        ValueError: They do not.
    """
    if not isinstance(peft, bool | str):
        raise value_error(
            f"export: peft = {peft!r:.80} cannot be used",
            found=type(peft).__name__,
            expected="True, or the name of an adapter",
            fix="weft.export(path, out, peft=True)",
        )
    if peft and (filter is not None or rename is not None):
        raise value_error(
            "export: peft= says which tensors are written, and how they are called",
            found="filter= as well" if filter is not None else "rename= as well",
            expected="one of them",
            fix="weft.export(path, out, peft=True)",
        )


def stored_adapter(source: WeightFiles, key: str, peft: bool | str) -> Adapter:
    """The adapter of a module in a checkpoint.

    Raises:
        CheckpointError: There is none, or there are several to choose from.
    """
    stored: dict[str, Any] = source.manifest.values[key].get("peft", {}) if source.manifest is not None else {}
    name = peft if isinstance(peft, str) else next(iter(stored)) if len(stored) == 1 else None
    if name not in stored:
        raise CheckpointError(
            f"export: {key!r} has no adapter {name!r}" if stored and name else "export: the adapter is ambiguous",
            found=f"adapters: {listed(map(repr, stored)) or 'none'}",
            expected="one that PEFT had put into the module when it was saved, with tensors of its own",
            fix=f"weft.export(path, out, peft={next(iter(stored))!r})" if stored else "weft.export(path, out)",
        )
    return Adapter(**stored[name])


def names_in_module(module: nn.Module, folder: Path) -> dict[str, str]:
    """Which tensor of a module is which one in the folder of an adapter; of several adapters, the active one.

    Raises:
        CheckpointError: The module has no adapter.
    """
    there = adapters_of(module, module.state_dict(keep_vars=True)) if isinstance(module, nn.Module) else {}
    active: Any = getattr(module, "active_adapter", None)
    active = active() if callable(active) else active  # a method in transformers
    name = next(iter(there)) if len(there) == 1 else active
    if name not in there:
        raise CheckpointError(
            f"load_weights: {folder} holds an adapter, and the module has none that is active",
            found=f"{type(module).__name__} with adapters: {listed(map(repr, there)) or 'none'}",
            expected="a module of PEFT with an adapter of the same kind",
            fix="model = peft.get_peft_model(model, peft.PeftConfig.from_pretrained(folder))  # before the transforms",
        )
    return there[name].names
