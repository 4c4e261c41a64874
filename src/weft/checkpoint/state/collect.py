"""What has to survive, as tensors and plain values, by name.

[Note: names] A module's tensors are `<object>/<key of its state_dict>`, an optimizer's state is
`<object>/state/<name of the parameter>/<key>`: names of parameters and not numbers, so that order and
grouping may be looked at and cut in any way. Values are JSON; tuples, dicts with other keys than
strings and places of tensors are marked in it (json_values.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from torch import nn

from weft import torch_internals
from weft.checkpoint.format.manifest import DTYPES
from weft.checkpoint.format.tensor_blocks import hold_savable
from weft.checkpoint.state.adapters import adapters_of
from weft.checkpoint.state.containers import Filled
from weft.checkpoint.state.json_values import encode
from weft.checks import is_of, other_parameters
from weft.collectives.on_all_ranks import on_all
from weft.context import Applied, DistContext
from weft.contract import (
    KeepsOrder,
    KeepsParameters,
    OwnsState,
    Stateful,
    StepsApart,
    check_not_streamed,
    offered,
    owners,
)
from weft.contract.marks import marks_of
from weft.errors import listed, type_error, value_error
from weft.tensors.blocks import Held
from weft.tensors.dtensor import resting_parameters
from weft.tensors.quantized import quantization_state
from weft.tensors.rng_state import generator_kind, generator_state, is_generator

T = TypeVar("T")
Around: TypeAlias = Callable[[Literal["save", "restore"]], object]


@runtime_checkable
class Checked(Protocol):
    """Anything that cannot be saved at every moment, such as a loader in the middle of a window."""

    def check_savable(self) -> None:
        """Raise if a run could not continue from the state of this moment."""


@dataclass(frozen=True)
class Checkpoint:
    """The objects that are saved and restored together; what `checkpointable` returns.

    Attributes:
        objects: By name.
        rng: Whether the random states of python, numpy and torch belong to it.
        only: Which tensors of modules do, by "<object>/<name>"; None: all.
        before: What is called before the objects are read or changed.
        after: What is called when they have been.
        torn: The checkpoint that could not be restored to the end, if the objects are part of it now.
    """

    objects: Mapping[str, Any]
    rng: bool = True
    only: Callable[[str], bool] | None = None
    before: Around | None = None
    after: Around | None = None
    torn: list[str] = field(default_factory=list, compare=False, repr=False)


def checkpointable(
    objects: Mapping[str, Any],
    ctx: DistContext,
    *,
    rng: bool = True,
    only: Callable[[str], bool] | None = None,
    before: Around | None = None,
    after: Around | None = None,
) -> tuple[Checkpoint, DistContext]:
    """Collect everything that a checkpoint must hold: models, optimizers, schedulers, loaders, your own objects.

    Modules and optimizers may be replicated, sharded or partitioned in any way; they are saved
    under the names of a plain module. The fp16 scale is saved with its module, the random states of
    python, numpy, torch and the device for each rank.

    Changes: nothing. With several ranks it starts a thread, by which a rank in `save` can distinguish a late rank from
    one that will not come. Collectives: none.

    Args:
        objects: By name: modules, optimizers over parameters of these modules, and anything with
            `state_dict` and `load_state_dict`; random generators of your own (torch.Generator,
            random.Random, numpy's), which may differ between the ranks; dicts and lists of numbers and strings, the
            same on all ranks, which `restore` fills in place.
        ctx: The context after all transforms.
        rng: Whether random states belong to it.
        only: Which parameters and buffers of modules belong to it, a function of "<object>/<name>", the same on all
            ranks. The others are neither saved nor restored: frozen weights that come from a file of their own, or a
            head that is trained from scratch. Default: all.
        before: Called with "save" or "restore" on every rank, before the objects are read or changed: to put into
            the optimizer what is to be saved, as `eval()` of a schedule-free one does. The same on all ranks.
        after: Called with "save" or "restore" when they have been, also if that failed. `save_async` calls both
            before it returns.

    Returns:
        The state, for `save` and `restore`; and `ctx` with this in `applied`.

    Raises:
        TypeError: An object has no state, holds what cannot be saved, or is an optimizer of torchao; the text names it.
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
        raise value_error(
            "checkpointable: names cannot be used" if wrong else "checkpointable: there is nothing to save",
            found=listed(map(repr, wrong)) if wrong else "no objects",
            expected='names without "/", other than "rng"',
            fix='weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)',
        )
    held = {name: _held(obj) for name, obj in objects.items()}
    stateless = [
        f"{name}: {type(obj).__name__}"
        for name, obj in held.items()
        if not isinstance(obj, (nn.Module, torch.optim.Optimizer, Stateful)) and not is_generator(obj)
    ]
    if stateless:
        raise type_error(
            "checkpointable: objects without state_dict and load_state_dict",
            found=listed(stateless),
            expected="modules, optimizers, random generators, dicts and lists of values, or objects with both methods",
            fix='put numbers into a dict, {"best": 0.0}, which restore fills; or give the class state_dict() and '
            "load_state_dict(state)",
        )
    for name, obj in held.items():
        if isinstance(obj, Filled):
            encode(name, obj.state_dict(), {})  # what cannot be saved is refused here
    for what, function in (("before", before), ("after", after)):
        if function is not None and not callable(function):
            raise type_error(
                f"checkpointable: {what} cannot be called",
                found=type(function).__name__,
                expected='a function of "save" or "restore"',
                fix=f"weft.checkpointable(objects, ctx, {what}=lambda what: ...)",
            )
    state = Checkpoint(held, rng, only, before, after)
    for name, obj in objects.items():
        check_not_streamed("checkpointable", obj)
        if isinstance(obj, torch.optim.Optimizer):
            _check_state_kept(name, obj)
            _parameters_of(name, obj, parameter_names(state))
    record = Applied(
        name="checkpointable",
        options=(("objects", ", ".join(objects)), ("rng", str(rng)), *([("only", "some")] if only else [])),
        targets=tuple(type(obj).__name__ for obj in objects.values()),
    )
    return state, replace(ctx, applied=(*ctx.applied, record))


@contextmanager
def with_user_hooks(what: Literal["save", "restore"], state: Checkpoint, ctx: DistContext) -> Iterator[None]:
    """Call what the user wants to be called before and after; an error in it is raised on all ranks."""
    before, after = state.before, state.after
    if before is not None:
        on_all(f"{what}: before", ctx, lambda: before(what))
    try:
        yield
    except BaseException:
        if after is not None:
            after(what)
        raise
    if after is not None:
        on_all(f"{what}: after", ctx, lambda: after(what))


def _check_state_kept(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise if the state of an optimizer could not be saved; it will be there after steps only."""
    if is_of(type(optimizer), "torchao"):
        raise type_error(
            f"checkpointable: the state of {name} cannot be saved",
            found=f"{type(optimizer).__name__} of torchao, whose state is tensors of its own classes",
            expected="plain tensors, as in optimizers of torch, and in the 8-bit ones of bitsandbytes",
            fix="optimizer = bitsandbytes.optim.AdamW8bit(model.parameters())  # or leave it out of the state",
        )


def check_state(what: str, state: object) -> None:
    """Raise unless this is what `checkpointable` returned.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(state, Checkpoint):
        raise type_error(
            f"{what}: this is not a state",
            found=type(state).__name__,
            expected="what weft.checkpointable returned",
            fix='state, ctx = weft.checkpointable({"model": model}, ctx)',
        )


def _held(obj: Any) -> Any:
    """What a state holds for an object: for `torch.compile(module)` the module in it, for a dict what fills it."""
    if not isinstance(obj, nn.Module):
        is_plain = isinstance(obj, (MutableMapping, MutableSequence)) and not isinstance(obj, Stateful)
        return Filled(obj) if is_plain else obj
    return torch_internals.MODULES.of(obj).get(torch_internals.COMPILED_MODULE.name, obj)


def plain_name(name: str) -> str:
    """A name in a module without what the wrapper of `torch.compile` adds to it.

    Example:
        >>> wrapper = torch_internals.COMPILED_MODULE.name
        >>> plain_name(f"{wrapper}.layers.0.{wrapper}.weight")
        'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part != torch_internals.COMPILED_MODULE.name)


# -- reading ----------------------------------------------------------------------------------------


@dataclass
class Content:
    """The state of all objects, on this rank.

    Attributes:
        names: Of the parameters of modules, `<object>/<name>`, by id.
        tensors: By name; the live tensors, sharded as they are.
        buffers: Which of them are buffers of modules; rank 0's count.
        same_as: Tensors that are the very same as another: its name.
        seen: Names of the tensors of modules that are there, by the id of the parameter or buffer.
        values: Plain values by object, alike on all ranks.
        generators: States of the user's random generators, on this rank.
        is_divided: Whether only some ranks have a parameter, as in a pipeline, or the state of one; see `Placed` and
            `OwnsState`.
    """

    names: dict[int, str] = field(default_factory=dict)
    tensors: dict[str, Held] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    same_as: dict[str, str] = field(default_factory=dict)
    seen: dict[int, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)
    is_divided: bool = False


def collect(state: Checkpoint, *, to_save: bool = True) -> Content:
    """Read the state of all objects; nothing is changed, nothing copied.

    Args:
        state: Of which objects.
        to_save: Whether it is to be saved; not every moment is right for that. It may be replaced at any time.

    Raises:
        TypeError: A leaf is neither a tensor nor a plain value; the text names it.
    """
    for obj in state.objects.values() if to_save else ():
        parts = list(obj.modules()) if isinstance(obj, nn.Module) else [obj]
        for one in (obj, *(offer for part in parts for offer in offered(part, Checked))):
            if isinstance(one, Checked):
                one.check_savable()
    is_divided = any(
        owners(obj) if isinstance(obj, nn.Module) else offered(obj, OwnsState) for obj in state.objects.values()
    )
    content = Content(parameter_names(state), is_divided=is_divided)
    for key, obj in state.objects.items():
        if isinstance(obj, nn.Module):
            _collect_module(key, obj, content, state.only)
        elif isinstance(obj, torch.optim.Optimizer):
            _collect_optimizer(key, obj, content)
        elif is_generator(obj):
            content.values[key] = {"generator": generator_kind(obj)}
            content.generators[key] = generator_state(obj)
        else:
            content.values[key] = encode(key, obj.state_dict(), content.tensors)
    for name, held in content.tensors.items():
        if held.tensor.is_meta and not is_divided:
            raise type_error(
                f"save: {name} cannot be saved",
                found=f"a tensor of {held.tensor.dtype}, {held.tensor.layout}, on {held.tensor.device}",
                expected=f"a dense tensor with values, of {', '.join(DTYPES)}",
                fix="weft.load_weights(model, path, ctx)  # gives it values",
            )
    return content


def parameter_names(state: Checkpoint) -> dict[int, str]:
    """Name of each parameter of the modules, `<object>/<name>`, by id."""
    return {
        id(p): f"{key}/{plain_name(name)}"
        for key, obj in reversed(list(state.objects.items()))
        if isinstance(obj, nn.Module)
        for (name, _), p in zip(obj.named_parameters(), resting_parameters(obj), strict=True)
    }


def collect_weights(
    key: str, module: nn.Module, content: Content, only: Callable[[str], bool] | None = None, *, what: str = "save"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Add the parameters and buffers of a module to a content, each under the first of its names.

    Args:
        key: The name of the module in the state; "" if there is nothing else.
        module: Which.
        content: To add to.
        only: As for `checkpointable`.
        what: The function that asks, for errors.

    Returns:
        Its tensors by their names in `state_dict()`; and what `get_extra_state` returned, encoded.

    Raises:
        TypeError: Something in `state_dict()` cannot be saved; the text names it.
    """
    values: dict[str, Any] = {}
    # First: FSDP2 puts its shards in place for it.
    found = {plain_name(name): value for name, value in module.state_dict(keep_vars=True).items()}
    elsewhere = kept_shards(module)
    scales = {plain_name(name): tensor for name, tensor in quantization_state(module).items()}
    buffers = {id(tensor) for tensor in module.buffers()}
    held = buffers | {id(tensor) for tensor in module.parameters()}
    for name, value in (found | scales).items():
        full = f"{key}/{name}" if key else name
        if only is not None and id(value) in held and not only(full):
            continue
        if id(value) in content.seen:
            content.same_as[full] = content.seen[id(value)]
        elif (id(value) in held and not name.startswith("#")) or name in scales:  # a # marks what transforms keep
            tensor: Any = elsewhere.get(id(value), value)
            content.tensors[full] = hold_savable(full, tensor, in_place=True, what=what)
            if id(value) in buffers:
                content.buffers.add(full)
            if id(value) in held:
                content.seen[id(value)] = full
        elif is_extra(name):
            values[name] = encode(f"{key}/#{name}", value, content.tensors)
        else:
            raise type_error(
                f"{what}: {full} could not be restored",
                found="a name that begins with #, which marks what transforms keep"
                if id(value) in held
                else f"{type(value).__name__} in state_dict(), no parameter or buffer of the module",
                expected="parameters, buffers, and what get_extra_state() returns",
                fix="give it another name"
                if id(value) in held
                else "return it from get_extra_state() and take it in set_extra_state(state)",
            )
    return found, values


def _collect_module(key: str, module: nn.Module, content: Content, only: Callable[[str], bool] | None) -> None:
    found, values = collect_weights(key, module, content, only)
    keep = extra_state_of(module, Stateful)
    kept = {name: encode(f"{key}/#{name}", offer.state_dict(), content.tensors) for name, offer in keep.items()}
    orders = {
        name: [order] for name, offer in extra_state_of(module, KeepsOrder).items() if (order := offer.sum_order())
    }
    content.values[key] = {"extra": values, "transforms": kept}
    if orders:
        content.values[key]["orders"] = orders
    adapters = adapters_of(module, found)
    if adapters:
        content.values[key]["peft"] = {adapter: one._asdict() for adapter, one in adapters.items()}


def parameter_keepers(module: nn.Module) -> list[tuple[nn.Module, KeepsParameters]]:
    """Parts of a module whose parameters or state lie elsewhere, and who knows where."""
    return [(part, offer) for part in module.modules() for offer in offered(part, KeepsParameters)]


def kept_shards(module: nn.Module) -> dict[int, torch.Tensor]:
    """What stands for parameters whose values lie elsewhere, by the id of the parameter; a collective then."""
    shards = [(part, offer.parameter_shards()) for part, offer in parameter_keepers(module)]
    shards += [(part, offer.common()) for part in module.modules() for offer in offered(part, StepsApart)]
    return {id(dict(part.named_parameters())[name]): shard for part, found in shards for name, shard in found.items()}


def update_keepers(module: nn.Module, changed: Mapping[int, torch.Tensor]) -> None:
    """Tell those who keep parameters elsewhere of new values, by the id of the parameter; a collective then."""
    for part, offer in parameter_keepers(module):
        offer.parameters_changed({own: changed[id(p)] for own, p in part.named_parameters() if id(p) in changed})
    for part in module.modules():
        for apart in offered(part, StepsApart):
            apart.common_changed([own for own, p in part.named_parameters() if id(p) in changed])


def is_extra(name: str) -> bool:
    """Whether a key of a state_dict holds what `get_extra_state` returned."""
    return name.rpartition(".")[2] == str(torch_internals.extra_state.found)


def extra_state_of(module: nn.Module, kind: Callable[..., T]) -> dict[str, T]:
    """What transforms of a module and of its parts have to keep, such as a loss scale.

    Args:
        module: The whole.
        kind: What they offer.

    Returns:
        The offers, by the name of the part and of their class.
    """
    kept: dict[str, T] = {}
    for path, part in module.named_modules():
        for offer in offered(part, kind):
            name = ".".join([*filter(None, [plain_name(path)]), type(offer).__name__.strip("_")])
            while name in kept:
                name += "'"
            kept[name] = offer
    return kept


def _collect_optimizer(key: str, optimizer: torch.optim.Optimizer, content: Content) -> None:
    given = _parameters_of(key, optimizer, content.names)
    order = [name for group in given for name in group]
    saved = dict(optimizer.state_dict())
    states, groups = saved.pop("state"), saved.pop("param_groups")
    shared = {k: state for k, state in states.items() if not isinstance(k, int)}  # of no single parameter

    for offer in offered(optimizer, StepsApart):
        states = {k: {name: _stacked(value, offer) for name, value in state.items()} for k, state in states.items()}
    named = {order[k]: state for k, state in states.items() if k not in shared}
    options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    content.values[key] = optimizer_values(key, named, zip(given, options, strict=True), content.tensors)
    for kind, entries in (("shared", shared), ("more", saved)):
        if entries:
            content.values[key][kind] = encode(f"{key}/{kind}", entries, content.tensors)
    kept = {
        name: encode(f"{key}/#{name}", one.state_dict(), content.tensors)
        for name, one in step_state_of(optimizer).items()
    }
    if kept:
        content.values[key]["transforms"] = kept
    if num_stacked_states(optimizer) > 1:
        content.values[key]["ranks apart"] = num_stacked_states(optimizer)


def optimizer_values(
    key: str, states: Mapping[str, Any], groups: Iterable[tuple[list[str], Mapping[str, Any]]], tensors: dict[str, Held]
) -> dict[str, Any]:
    """What is kept of an optimizer: state by the names of parameters; of each group, their names and its options."""
    return {
        "state": {name: encode(f"{key}/state/{name}", state, tensors) for name, state in states.items()},
        "groups": [
            {"params": params, "options": encode(f"{key}/groups/{index}", options, tensors)}
            for index, (params, options) in enumerate(groups)
        ],
    }


def step_state_of(optimizer: torch.optim.Optimizer) -> dict[str, Stateful]:
    """What transforms of an optimizer alone have to keep, such as a number of steps, by the name of the class."""
    alone = [mark for mark in marks_of(optimizer) if len(mark.record.refs) == 1]  # others are kept with the module
    return {type(one).__name__: one for mark in alone for one in mark.offers if isinstance(one, Stateful)}


def num_stacked_states(optimizer: torch.optim.Optimizer) -> int:
    """How many states of an optimizer there are, one after the other in each tensor that is saved, if several."""
    return math.prod(offer.ranks_apart for offer in offered(optimizer, StepsApart))


def _stacked(value: Any, offer: StepsApart) -> Any:
    """Counters, which have no dimensions, are the same on all ranks."""
    return offer.stacked(value) if isinstance(value, torch.Tensor) and value.dim() else value


def _parameters_of(key: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Names of an optimizer's parameters, group by group."""
    unknown = other_parameters(optimizer, names)
    if unknown:
        raise value_error(
            f"checkpointable: {key} holds parameters that belong to no module in the state",
            found=listed(unknown),
            expected="the modules of all its parameters, under names of their own",
            fix='weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)',
        )
    return [[names[id(p)] for p in entry["params"]] for entry in optimizer.param_groups]
