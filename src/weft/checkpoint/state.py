"""What has to survive, as tensors and plain values, by name.

[Note: names] A module's tensors are `<object>/<key of its state_dict>`, an optimizer's state is
`<object>/state/<name of the parameter>/<key>`: names of parameters and not numbers, so that order and
grouping may be looked at and cut in any way. Values are JSON; tuples, dicts with other keys than
strings and places of tensors are marked in it (`encode`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from weft.context import Applied, DistContext
from weft.contract import offered
from weft.errors import CheckpointError, listed, message

__all__ = [
    "Checkpoint",
    "Content",
    "Stateful",
    "checkpointable",
    "collect",
    "decode",
    "kept_by",
    "parameter_names",
    "random_state",
    "set_random_state",
]


@runtime_checkable
class Stateful(Protocol):
    """Anything with `state_dict` and `load_state_dict`: schedulers, loaders, averages, your own."""

    def state_dict(self) -> Mapping[str, Any]:
        """What has to survive: nested dicts, lists and tuples of tensors, numbers, strings, None."""

    def load_state_dict(self, state: Any, /) -> object:
        """Go on from it."""


@dataclass(frozen=True)
class Checkpoint:
    """The objects that are saved and restored together; what `checkpointable` returns.

    Attributes:
        objects: By name.
        rng: Whether the random states of python, numpy and torch belong to it.
    """

    objects: Mapping[str, Any]
    rng: bool = True


def checkpointable(objects: Mapping[str, Any], ctx: DistContext, *, rng: bool = True) -> tuple[Checkpoint, DistContext]:
    """Put together everything that has to survive: models, optimizers, schedulers, loaders, your own.

    Modules and optimizers may be replicated, sharded or partitioned in any way; they are saved
    under the names of a plain module. The fp16 scale is saved with its module, the random states of
    python, numpy, torch and the device for each rank.

    Changes: nothing. Collectives: none.

    Args:
        objects: By name: modules, optimizers over parameters of these modules, and anything with
            `state_dict` and `load_state_dict`.
        ctx: The context after all transforms.
        rng: Whether random states belong to it.

    Returns:
        The state, for `save` and `restore`; and `ctx` with this in `applied`.

    Raises:
        TypeError: An object has no state; the text names it.
        ValueError: A name cannot be used, or an optimizer holds a parameter of no module in it.

    Example:
        >>> import weft
        >>> model = nn.Linear(2, 2)
        >>> state, ctx = weft.checkpointable({"model": model}, weft.local())
        >>> list(state.objects)
        ['model']
    """
    wrong = [name for name in objects if not isinstance(name, str) or not name or "/" in name or name == "rng"]
    if wrong or not objects:
        raise ValueError(
            message(
                "checkpointable: names cannot be used" if wrong else "checkpointable: there is nothing to save",
                found=listed(map(repr, wrong)) if wrong else "no objects",
                expected='names without "/", other than "rng"',
                fix='weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)',
            )
        )
    stateless = [
        f"{name}: {type(obj).__name__}"
        for name, obj in objects.items()
        if not isinstance(obj, (nn.Module, torch.optim.Optimizer, Stateful))
    ]
    if stateless:
        raise TypeError(
            message(
                "checkpointable: objects without state_dict and load_state_dict",
                found=listed(stateless),
                expected="modules, optimizers, or objects with both methods",
                fix="give the class state_dict() and load_state_dict(state); the step is an argument of weft.save",
            )
        )
    state = Checkpoint(dict(objects), rng)
    for name, obj in objects.items():
        if isinstance(obj, torch.optim.Optimizer):
            _parameters_of(name, obj, parameter_names(state))
    record = Applied(
        name="checkpointable",
        options=(("objects", ", ".join(objects)), ("rng", str(rng))),
        targets=tuple(type(obj).__name__ for obj in objects.values()),
    )
    return state, replace(ctx, applied=(*ctx.applied, record))


# -- reading ----------------------------------------------------------------------------------------


@dataclass
class Content:
    """The state of all objects, on this rank.

    Attributes:
        tensors: By name; the live tensors, cut up as they are.
        same_as: Tensors that are the very same as another: its name.
        values: Plain values by object, alike on all ranks.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    same_as: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def collect(state: Checkpoint) -> Content:
    """Read the state of all objects; nothing is changed, nothing copied.

    Raises:
        TypeError: A leaf is neither a tensor nor a plain value; the text names it.
    """
    content = Content()
    seen: dict[int, str] = {}
    names = parameter_names(state)
    for key, obj in state.objects.items():
        if isinstance(obj, nn.Module):
            _collect_module(key, obj, content, seen)
        elif isinstance(obj, torch.optim.Optimizer):
            _collect_optimizer(key, obj, names, content)
        else:
            content.values[key] = encode(key, obj.state_dict(), content.tensors)
    return content


def parameter_names(state: Checkpoint) -> dict[int, str]:
    """Name of each parameter of the modules, `<object>/<name>`, by id."""
    return {
        id(p): f"{key}/{name}"
        for key, obj in reversed(list(state.objects.items()))
        if isinstance(obj, nn.Module)
        for name, p in obj.named_parameters()
    }


def _collect_module(key: str, module: nn.Module, content: Content, seen: dict[int, str]) -> None:
    values: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        full = f"{key}/{name}"
        if not isinstance(value, torch.Tensor):
            values[name] = encode(full, value, content.tensors)
        elif id(value) in seen:
            content.same_as[full] = seen[id(value)]
        else:
            content.tensors[full] = value
            seen[id(value)] = full
    kept = {kind: encode(f"{key}/#{kind}", o.state_dict(), content.tensors) for kind, o in kept_by(module).items()}
    content.values[key] = {"extra": values, "transforms": kept}


def kept_by(module: nn.Module) -> dict[str, Stateful]:
    """What transforms of a module have to keep, such as a loss scale, by class name."""
    return {type(offer).__name__.strip("_"): offer for offer in offered(module, Stateful)}


def _collect_optimizer(key: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str], content: Content) -> None:
    given = _parameters_of(key, optimizer, names)
    saved = optimizer.state_dict()
    order = [name for group in given for name in group]
    state: dict[str, Any] = {}
    for index, entry in saved["state"].items():
        state[order[index]] = encode(f"{key}/state/{order[index]}", entry, content.tensors)
    groups = [
        {
            "params": group,
            "options": encode(
                f"{key}/groups/{index}", {k: v for k, v in options.items() if k != "params"}, content.tensors
            ),
        }
        for index, (group, options) in enumerate(zip(given, saved["param_groups"], strict=True))
    ]
    content.values[key] = {"state": state, "groups": groups}


def _parameters_of(key: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Names of an optimizer's parameters, group by group."""
    unknown = [
        f"group {index}: a parameter of shape {tuple(p.shape)}"
        for index, entry in enumerate(optimizer.param_groups)
        for p in entry["params"]
        if id(p) not in names
    ]
    if unknown:
        raise ValueError(
            message(
                f"checkpointable: {key} holds parameters of no module in the state",
                found=listed(unknown),
                expected="the modules of all its parameters, under names of their own",
                fix='weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)',
            )
        )
    return [[names[id(p)] for p in entry["params"]] for entry in optimizer.param_groups]


# -- nested values as JSON --------------------------------------------------------------------------


def encode(path: str, value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """A nested value as JSON; its tensors go into `tensors`, under the path they stand at.

    Raises:
        TypeError: A leaf is something else; the text names its path.
    """
    if isinstance(value, torch.Tensor):
        tensors[path] = value
        return {"$": "tensor", "name": path}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        items = [encode(f"{path}/{index}", item, tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$": "tuple", "items": items}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key != "$" for key in value):
            return {key: encode(f"{path}/{key}", item, tensors) for key, item in value.items()}
        if all(isinstance(key, (str, int, float, bool)) for key in value):
            items = [[key, encode(f"{path}/{key}", item, tensors)] for key, item in value.items()]
            return {"$": "dict", "items": items}
    raise TypeError(
        message(
            f"save: {path} cannot be saved",
            found=f"{type(value).__name__} {value!r:.60}",
            expected="tensors, numbers, strings, None, and lists, tuples and dicts of them",
            fix="leave it out of state_dict(), or turn it into these",
        )
    )


def decode(value: Any, tensors: Callable[[str], torch.Tensor]) -> Any:
    """The nested value that `encode` made JSON of."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("$")
    if kind == "tensor":
        return tensors(value["name"])
    if kind == "tuple":
        return tuple(decode(item, tensors) for item in value["items"])
    if kind == "dict":
        return {key: decode(item, tensors) for key, item in value["items"]}
    return {key: decode(item, tensors) for key, item in value.items()}


# -- random states ----------------------------------------------------------------------------------


def random_state(device: torch.device) -> dict[str, Any]:
    """The random states of this rank, as JSON."""
    version, numbers, gauss = random.getstate()
    kind, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    found: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": [str(kind), np.asarray(keys).tolist(), int(place), int(has_gauss), float(cached)],
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
    }
    if device.type != "cpu":
        found[device.type] = bytes(torch.get_device_module(device).get_rng_state(device).tolist()).hex()
    return found


def set_random_state(found: Mapping[str, Any], device: torch.device) -> None:
    """Go on from these random states.

    Raises:
        CheckpointError: One of them is not what it should be.
    """
    try:
        version, numbers, gauss = found["python"]
        kind, keys, *rest = found["numpy"]
        states = {name: torch.tensor(list(bytes.fromhex(found[name])), dtype=torch.uint8) for name in ("torch",)}
        random.setstate((version, tuple(numbers), gauss))
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(states["torch"])
        if device.type in found:
            state = torch.tensor(list(bytes.fromhex(found[device.type])), dtype=torch.uint8)
            torch.get_device_module(device).set_rng_state(state, device)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            message(
                "restore: the random states in the checkpoint cannot be used",
                found=f"{type(error).__name__}: {error}",
                expected="states of python, numpy and torch",
                fix="weft.checkpointable(objects, ctx, rng=False)",
            )
        ) from error
