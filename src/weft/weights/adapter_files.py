"""Adapters of PEFT in checkpoints and in folders of their own."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from weft.checkpoint.state.adapters import Adapter, adapters_of
from weft.checkpoint.state.collect import plain_name
from weft.errors import CheckpointError, ContractError, listed, value_error
from weft.sharding.meta import tensor_slots
from weft.weights.sources import WeightFiles


def check_adapter_options(what: str, peft: object, *, fix: str, **others: object) -> None:
    """Raise unless an adapter is asked for by an option `peft`, and none of `others` with it.

    Raises:
        ValueError: It is another value, or one of the others is neither None nor False.
    """
    if not isinstance(peft, bool | str):
        raise value_error(
            f"{what}: peft = {peft!r:.80} cannot be used",
            found=type(peft).__name__,
            expected="True, or the name of an adapter",
            fix=fix,
        )
    given = [name for name, value in others.items() if value is not None and value is not False]
    if peft and given:
        raise value_error(
            f"{what}: peft= says which tensors are taken, and how they are called",
            found=f"{given[0]}= as well",
            expected="one of them",
            fix=fix,
        )


def stored_adapter(source: WeightFiles, key: str, peft: bool | str) -> Adapter:
    """The adapter of a module in a checkpoint.

    Raises:
        CheckpointError: There is none, or there are several to choose from.
    """
    stored: dict[str, Any] = source.manifest.values[key].get("peft", {}) if source.manifest is not None else {}
    adapters = {name: Adapter(**one) for name, one in stored.items()}
    return chosen_adapter(f"export: {key!r}", adapters, peft, call="weft.export(path, out{})")


def chosen_adapter(what: str, adapters: Mapping[str, Adapter], peft: bool | str, *, call: str) -> Adapter:
    """One of the adapters of a module, by name, or the only one.

    Args:
        what: Who asks, and of what, for errors.
        adapters: By name.
        peft: Its name; True: there is one.
        call: The call that asks, with a place for one more option.

    Raises:
        CheckpointError: There is none, or there are several to choose from.
    """
    name = peft if isinstance(peft, str) else next(iter(adapters)) if len(adapters) == 1 else None
    if name is None or name not in adapters:
        raise CheckpointError(
            f"{what} has no adapter {name!r}" if adapters and name else f"{what}: the adapter is ambiguous",
            found=f"adapters: {listed(map(repr, adapters)) or 'none'}",
            expected="one that PEFT had put into the module when it was saved, with tensors of its own",
            fix=call.format(f", peft={next(iter(adapters))!r}" if adapters else ""),
        )
    return adapters[name]


def plan_merge(module: nn.Module, names: Iterable[str]) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Which layers are merged, as PEFT's `merge_and_unload` does, and what the result is called.

    Args:
        module: A `PeftModel`, or a model of transformers after `add_adapter`.
        names: Of its tensors, as in `state_dict()`.

    Returns:
        What PEFT has put around layers, by name. And from names in the module to those after the merge: what is not
        there is left out.

    Raises:
        ContractError: It has no adapters, or of a kind that is not merged layer by layer.
    """
    peft: Any = sys.modules.get("peft")
    if peft is None or not getattr(module, "peft_config", None):
        _refuse_merge([f"no adapters: {type(module).__name__}"])
    layers: dict[str, nn.Module] = {}
    renames: dict[str, str | None] = {}  # beginnings of names; the longest counts
    refused: list[str] = []
    for given, part in module.named_modules():
        path = plain_name(given)
        if any(path.startswith(f"{one}.") for one in layers):
            continue
        adapted: Any = part
        if isinstance(part, peft.utils.ModulesToSaveWrapper):
            kept = f"modules_to_save.{adapted.active_adapter}" if adapted.active_adapters else "original_module"
            renames |= {f"{path}.": None, f"{path}.{kept}.": f"{path}."}
        elif hasattr(part, "unload_and_optionally_merge_module"):
            refused.append(f"{path}: {type(part).__name__}")
        elif isinstance(part, peft.tuners.tuners_utils.BaseTunerLayer) and hasattr(part, "base_layer"):
            layers[path] = part
            base = next(own for own, one in part.named_modules() if one is adapted.get_base_layer())
            renames |= {f"{path}.": None, f"{path}.{base}.": f"{path}."}
    if refused:
        _refuse_merge(refused)
    outer = "base_model.model." if isinstance(module, peft.PeftModel) else ""
    found: dict[str, str] = {}
    for name in names:
        start = max((one for one in renames if name.startswith(one)), key=len, default="")
        new = renames.get(start, "")
        if new is not None:
            found[name] = (new + name.removeprefix(start)).removeprefix(outer)
    return layers, found


def _refuse_merge(refused: Sequence[str]) -> NoReturn:
    raise ContractError(
        "stream: merge=True, where no adapters can be merged layer by layer",
        found=listed(refused),
        expected="LoRA and others on layers, and whole layers in modules_to_save",
        fix="weft.weights.stream(model, ctx)  # merge=False: adapters apart, under the names of the module",
    )


@torch.no_grad()
def merged(layer: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What PEFT makes of a layer and its active adapters.

    Changes: `tensors`, in place; nothing of the layer.

    Args:
        layer: Of PEFT, around the layer with adapters.
        tensors: Its parameters and buffers, whole, by their names in it.

    Returns:
        The same names; those of the layer inside are merged.
    """
    adapted: Any = layer
    before: list[tuple[dict[str, Any], str, Any]] = []
    already = list(adapted.merged_adapters)
    stand_in = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}
    try:
        for name, tensor in stand_in.items():
            path, _, own = name.rpartition(".")
            for kind, there, old in tensor_slots(layer.get_submodule(path)):
                if there == own:
                    before.append((kind, own, old))
                    kind[own] = tensor
        adapted.merge()
    finally:
        for kind, own, tensor in before:
            kind[own] = tensor
        adapted.merged_adapters[:] = already
    return {name: tensor.data for name, tensor in stand_in.items()}


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
