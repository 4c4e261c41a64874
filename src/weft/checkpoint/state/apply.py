"""A checkpoint on its way into the objects: first checked, then put in place, or nothing of it.

[Note: all or nothing] What can fail comes first: the hashes of all files, names, shapes and dtypes, then
`load_state_dict` of the user's objects, of which the old state is kept. What it takes is read into memory of its own,
which the objects keep. Last, when every rank has come so far, the tensors of modules, and those that torch's own
optimizers hold already, get their values in place, from files that are still open. If that fails, because a disk dies
at that moment, some have new values and some old ones: the state is marked, and cannot be saved until a restore
succeeds.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from weft import torch_internals
from weft.checkpoint.format.manifest import Manifest, TensorEntry
from weft.checkpoint.format.transfer import same_number_kind
from weft.checkpoint.state import random_states
from weft.checkpoint.state.collect import (
    Checkpoint,
    Content,
    collect,
    extra_state_of,
    num_stacked_states,
    parameter_keepers,
    plain_name,
    step_state_of,
    update_keepers,
)
from weft.checkpoint.state.json_values import decode, encode
from weft.context import DistContext
from weft.context.placement import values_replaced
from weft.contract import KeepsOrder, OwnsState, Stateful, StepsApart, offered
from weft.errors import CheckpointError, listed
from weft.tensors.blocks import Held, cut_as, hold, sharded_as
from weft.tensors.dtensor import is_sharded, local
from weft.tensors.rng_state import RngState, generator_kind, generator_state, is_generator, prepare_generator, seeding


class TensorSource(Protocol):
    """Where the values come from: a `Reader` of files, or what another replica has sent.

    Attributes:
        folder: For error texts.
        manifest: What there is.
    """

    folder: Path
    manifest: Manifest

    def request(self, name: str, like: Held | None) -> torch.Tensor:
        """A tensor of its own, sharded as `like`, or whole; `read_new` gives it values."""
        ...

    def request_into(self, name: str, held: Held) -> None:
        """Let `read_live` replace the values that a tensor has."""

    def lost_values(self, held: Held, name: str, *others: str) -> Iterator[str]:
        """What would be lost if a tensor took the values of that name, or of several if it is tied."""
        ...

    def read_new(self) -> None:
        """Give values to the tensors of `request`."""

    def read_live(self) -> None:
        """Give values to the tensors of `request_into`."""


@dataclass(frozen=True)
class RestorePlan:
    """What a checkpoint gives this rank: found to fit, and requested.

    Attributes:
        state: Whose objects.
        reader: Of the files, or of what was sent.
        live: The state as it is.
        weights: Tensors of modules: their names in the checkpoint; several for a tied one that was saved as several.
        missing: Names that the state has and the checkpoint has not.
        unexpected: Names that only the checkpoint has.
        loaded: What the objects load, by name; it has its values after `read_new`.
        set_random: Sets the random states, if they belong to the state.
    """

    state: Checkpoint
    reader: TensorSource
    live: Content
    weights: Mapping[str, list[str]]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    loaded: Mapping[str, Any]
    set_random: Callable[[], None] | None


# -- does it fit -------------------------------------------------------------------------------------


def _compare(
    state: Checkpoint, live: Content, reader: TensorSource, *, strict: bool
) -> tuple[dict[str, list[str]], tuple[str, ...], tuple[str, ...]]:
    """What weights are called in the checkpoint, names that only the state has, and names that only it has.

    Raises:
        CheckpointError: There are such names and `strict`; or a shape or a kind of numbers differs.
    """
    entries = reader.manifest.tensors
    tied = {name: [name] for name in live.tensors}  # all names of each tensor
    for name, origin in live.same_as.items():
        tied[origin].append(name)
    all_names = {name: names for names in tied.values() for name in names}
    here = list(_names(state, [*live.tensors, *live.same_as], live.values))
    there = list(_names(state, entries, reader.manifest.values))
    names_here, names_there = set(here), set(there)
    missing = tuple(name for name in here if names_there.isdisjoint(all_names.get(name, [name])))
    unexpected = tuple(name for name in there if name not in names_here)
    shapes: list[str] = []
    kinds: list[str] = []
    weights: dict[str, list[str]] = {}
    for held in live.tensors.values():
        stored = {name: entries[name] for name in tied[held.name] if name in entries and _is_weight(state, name)}
        for name, entry in stored.items():
            if entry.shape != held.shape:
                shapes.append(f"{name} of shape {entry.shape}, not {held.shape}")
            if not same_number_kind(getattr(torch, entry.dtype), held.tensor.dtype):
                kinds.append(f"{name} of {entry.dtype}, not {held.dtype}")
        if stored:
            weights[held.name] = list(dict.fromkeys(entry.same_as or name for name, entry in stored.items()))
    wrong: dict[str, Sequence[str]] = {"shapes": shapes, "kinds of numbers": kinds}
    wrong |= {"not in the checkpoint": missing, "only in the checkpoint": unexpected}
    if shapes or kinds or (strict and (missing or unexpected)):
        raise CheckpointError(
            f"restore: {reader.folder} does not fit the state",
            found="; ".join(f"{what}: {listed(names)}" for what, names in wrong.items() if names),
            expected="the objects, names and shapes that were saved",
            fix="build the model as it was saved, or restore from another directory"
            if shapes or kinds
            else "weft.restore(state, directory, ctx, strict=False)  # keeps what is missing as it is",
        )
    return weights, missing, unexpected


def check_values(plan: RestorePlan) -> None:
    """Raise if values that are read would be lost.

    Raises:
        CheckpointError: Those of one of two tensors would be, or numbers too large for their dtype.
    """
    reader, live = plan.reader, plan.live.tensors
    here = {name: stored for name, stored in plan.weights.items() if not live[name].tensor.is_meta}  # or another rank's
    wrong = [text for name, stored in here.items() for text in reader.lost_values(live[name], *stored)]
    if wrong:
        raise CheckpointError(
            f"restore: {reader.folder} does not fit the state",
            found=listed(wrong),
            expected="tied weights with one value, and dtypes that hold the values that were saved",
            fix="build the module as it was: the same weights tied, and the same dtypes",
        )


# -- what is requested -------------------------------------------------------------------------------


def request(state: Checkpoint, reader: TensorSource, ctx: DistContext, *, strict: bool) -> RestorePlan:
    """Compare a checkpoint with the state, and request all that it holds.

    Args:
        state: Whose objects.
        reader: Of the files.
        ctx: The context whose ranks take part.
        strict: Raise if names differ.

    Raises:
        CheckpointError: It does not fit, or its values cannot be used.
        OSError: A file cannot be read.
    """
    live = collect(state, to_save=False)
    weights, missing, unexpected = _compare(state, live, reader, strict=strict)
    for name, stored in weights.items():
        if not live.tensors[name].tensor.is_meta:  # another rank has it
            reader.request_into(stored[0], live.tensors[name])
    saved = reader.manifest.values
    loaded = {key: _requested(key, state, live, reader, ctx) for key in state.objects if key in saved}
    return RestorePlan(state, reader, live, weights, missing, unexpected, loaded, _random(state, reader, ctx))


def _requested(key: str, state: Checkpoint, live: Content, reader: TensorSource, ctx: DistContext) -> Any:
    """The state of one object, in the form its `load_state_dict` takes."""
    obj, saved = state.objects[key], reader.manifest.values[key]
    is_apart = bool(offered(obj, StepsApart))

    def tensor(name: str) -> torch.Tensor:
        """What is not sharded comes back whole, in the shape it was saved in."""
        held = live.tensors.get(name)
        if held is not None and held.tensor.is_meta:  # another rank has it
            return torch.empty_like(held.tensor)
        if held is None or not held.is_sharded:
            return reader.request(name, None)
        of_others = is_apart and held.shape != reader.manifest.tensors[name].shape  # as many as were apart then
        return reader.request(name, None if of_others else held)

    try:
        if isinstance(obj, torch.optim.Optimizer):
            return _requested_optimizer(key, state, live, reader)
        if is_generator(obj):
            return _prepared_generator(key, obj, reader, ctx)
        found = decode(saved, tensor)
        if isinstance(obj, nn.Module) and not all(isinstance(found[k], dict) for k in ("extra", "transforms")):
            raise ValueError("not what a module keeps")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"restore: the values of {key} in {reader.folder} cannot be used",
            found=f"{type(error).__name__}: {error}",
            expected=f"what weft.save wrote for a {type(obj).__name__}",
            fix="restore an older checkpoint, or leave the object out of the state and restore with strict=False",
        ) from error
    return found


def _requested_optimizer(key: str, state: Checkpoint, live: Content, reader: TensorSource) -> _StateToLoad:
    optimizer, saved, entries = state.objects[key], reader.manifest.values[key], reader.manifest.tensors
    names = live.names
    groups = [[names[id(p)] for p in entry["params"]] for entry in optimizer.param_groups]
    _check_groups(key, [entry["params"] for entry in saved["groups"]], groups)
    parameters = {names[id(p)]: p for entry in optimizer.param_groups for p in entry["params"]}
    order = {name: index for index, name in enumerate(parameters)}
    layouts = {
        id(p): layout
        for obj in state.objects.values()
        for part, offer in (parameter_keepers(obj) if isinstance(obj, nn.Module) else ())
        for own, p in part.named_parameters()
        if (layout := offer.state_layout(own)) is not None
    }
    keeps = _keeps_tensors(optimizer)
    owning = offered(optimizer, OwnsState)
    replaced: set[int] = set()
    of_others = saved.get("ranks apart", 1) != num_stacked_states(optimizer)
    apart = [] if of_others or "ranks apart" not in saved else offered(optimizer, StepsApart)

    def like(parameter: torch.Tensor) -> Callable[[str], torch.Tensor]:
        """Requests state that is sharded as its parameter, if it has its shape."""
        layout = hold("", layouts.get(id(parameter), parameter))

        def requested(name: str) -> torch.Tensor:
            held, entry = live.tensors.get(name) if keeps and not apart else None, entries[name]
            if held is not None and id(held.tensor) not in replaced and _may_be_overwritten(held, parameter, entry):
                replaced.add(id(held.tensor))
                reader.request_into(name, held)
                return held.tensor
            for offer in apart if entry.shape else ():
                is_like = entry.shape[1:] == layout.shape
                own = layout if is_like else hold("", torch.empty(entry.shape[1:], dtype=getattr(torch, entry.dtype)))
                stacked = reader.request(name, hold("", offer.stacked(own.tensor)))
                return sharded_as(local(stacked)[0], own.tensor)
            cut = entry.shape and entry.shape == layout.shape and not owning
            return reader.request(name, layout if cut else None)

        return requested

    def whole(name: str) -> torch.Tensor:
        return reader.request(name, None)

    content: dict[str, Any] = decode(saved.get("more", {}), whole)
    content["state"] = {
        order[name]: decode(entry, like(parameters[name]))
        for name, entry in saved["state"].items()
        if not parameters[name].is_meta and all(one.owns(parameters[name]) for one in owning)  # else another rank's
    }
    content["state"] |= decode(saved.get("shared", {}), whole)
    content["param_groups"] = [
        {**decode(entry["options"], whole), "params": [order[name] for name in group]}
        for group, entry in zip(groups, saved["groups"], strict=True)
    ]
    changed = {
        order[name]
        for name, parameter in parameters.items()
        if name not in entries or getattr(torch, entries[name].dtype) != parameter.dtype
    }
    averaged = {order[name]: p for name, p in parameters.items()} if of_others and "ranks apart" in saved else {}
    return _StateToLoad(content, changed, averaged, decode(saved.get("transforms", {}), whole))


def _prepared_generator(key: str, generator: Any, reader: TensorSource, ctx: DistContext) -> Callable[[], object]:
    manifest, kind = reader.manifest, generator_kind(generator)
    if manifest.values[key] != {"generator": kind}:
        raise ValueError(f"{manifest.values[key]!r:.80} for a {kind}")
    states = [rank["generators"][key] for rank in manifest.ranks]
    if None in states:
        raise ValueError(f"no state of rank {states.index(None)}")
    found = random_states.restored_from(states, ctx.rank, ctx.world_size)
    if found is None:
        return seeding(generator, zlib.crc32(f"{ctx.seed} {manifest.step} {ctx.rank} {key}".encode()))
    return prepare_generator(generator, found)


def _random(state: Checkpoint, reader: TensorSource, ctx: DistContext) -> Callable[[], None] | None:
    ranks = reader.manifest.ranks
    if not state.rng:
        return None
    if len(ranks) != ctx.world_size or ranks[ctx.rank].get("rng", {}) is None:  # imported from elsewhere
        return random_states.drawn_state(reader.manifest.step, ctx)
    return random_states.prepare_random_state(ranks[ctx.rank].get("rng") or {}, ctx)


# -- putting in place --------------------------------------------------------------------------------


def load_objects(plan: RestorePlan, ctx: DistContext, undo: contextlib.ExitStack) -> None:
    """Give all objects but the weights their state; what takes it back is put on `undo`.

    Raises:
        CheckpointError: An object does not take its state, or a file is not as it was.
        OSError: A file cannot be read.
    """
    plan.reader.read_new()
    undo.callback(RngState.capture(ctx.device, ctx.engine).apply, ctx.device, ctx.engine)
    for key, loaded in plan.loaded.items():
        obj = plan.state.objects[key]
        try:
            _load_object(obj, loaded, undo)
        except Exception as error:
            raise CheckpointError(
                f"restore: {key} could not load its state from {plan.reader.folder}",
                found=f"{type(error).__name__}: {error}",
                expected=f"load_state_dict of {type(obj).__name__} to accept what state_dict returned",
                fix="build the object as it was, or leave it out of the state and restore with strict=False",
            ) from error


def _load_object(obj: Any, loaded: Any, undo: contextlib.ExitStack) -> None:
    if is_generator(obj):
        undo.callback(prepare_generator(obj, generator_state(obj)))
        loaded()
    elif isinstance(obj, torch.optim.Optimizer):  # what it holds is replaced and not overwritten: no copy is needed
        undo.callback(_StateToLoad(obj.state_dict(), set()).load_into, obj)
        loaded.load_into(obj)
        for name, kept in step_state_of(obj).items():
            if name in loaded.transforms:
                _load(kept, loaded.transforms[name], undo)
    elif isinstance(obj, nn.Module):
        here = {plain_name(name): name for name in obj.state_dict()}
        for name, value in loaded["extra"].items():
            if name in here:
                part = obj.get_submodule(here[name].rpartition(".")[0])
                undo.callback(part.set_extra_state, _copied(part.get_extra_state()))
                part.set_extra_state(value)
        with_state, with_order = extra_state_of(obj, Stateful), extra_state_of(obj, KeepsOrder)
        for name, offer in with_state.items():
            if name in loaded["transforms"]:
                _load(offer, loaded["transforms"][name], undo)
        for name, one in with_order.items():
            before = one.sum_order()
            undo.callback(one.resume_order, [] if before is None else [before])
            one.resume_order(loaded.get("orders", {}).get(name, []))
    else:
        _load(obj, loaded, undo)


def _load(obj: Stateful, loaded: Any, undo: contextlib.ExitStack) -> None:
    undo.callback(obj.load_state_dict, _copied(obj.state_dict()))
    obj.load_state_dict(loaded)


def put_weights(plan: RestorePlan, ctx: DistContext) -> None:
    """Give the tensors of modules and optimizers their values, and the random states.

    Raises:
        CheckpointError: A file is gone or not as it was. The state is part old and part new now.
        OSError: It cannot be read.
    """
    plan.reader.read_live()
    live = plan.live
    given = {one: live.tensors[name].tensor for one, name in live.names.items() if name in plan.weights}
    for obj in plan.state.objects.values():
        if isinstance(obj, nn.Module):
            update_keepers(obj, given)
    values_replaced(plan.state.objects.values(), ctx)
    if plan.set_random is not None:
        plan.set_random()


class _StateToLoad(NamedTuple):
    """What an optimizer's `load_state_dict` takes; loaded without a change of its dtypes.

    torch gives all of a parameter's state the dtype of the parameter: masks and counters too, and
    averages that are kept in a wider one.

    Attributes:
        content: From `state_dict`.
        changed: Numbers of the parameters whose own dtype is another than it was; theirs are converted.
        averaged: Parameters by number, if their state is that of another number of ranks which stepped apart, one
            after the other: their mean is loaded.
        transforms: What the transforms of the optimizer have kept.
    """

    content: dict[str, Any]
    changed: set[int]
    averaged: Mapping[int, torch.Tensor] = MappingProxyType({})
    transforms: Mapping[str, Any] = MappingProxyType({})

    def load_into(self, optimizer: torch.optim.Optimizer) -> None:
        """Load it; hooks of the optimizer, such as those that cut its state, find the dtypes that were saved."""
        for index, parameter in self.averaged.items():
            entry = self.content["state"].get(index, {})
            entry.update({key: _mean(value, parameter) for key, value in entry.items()})
        hook = optimizer.register_load_state_dict_post_hook(self._put_back, prepend=True)
        try:
            optimizer.load_state_dict(self.content)
        finally:
            hook.remove()

    def _put_back(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, entry in self.content["state"].items():
            if isinstance(index, int) and index not in self.changed:
                held = optimizer.state[parameters[index]]
                for key in held.keys() & entry.keys() - {"step"}:  # fused and capturable ones need theirs in float32
                    held[key] = _of_saved_dtype(held[key], entry[key])


def _mean(value: Any, parameter: torch.Tensor) -> Any:
    """What the ranks had, one after the other, as one, cut as `parameter`; numbers that are codes are the first's."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    mean = value.mean(0) if value.is_floating_point() or value.is_complex() else value[0]
    return cut_as(mean, parameter) if is_sharded(parameter) and mean.shape == parameter.shape else mean


def _keeps_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `load_state_dict` makes the very tensors it is given the state: that of torch's own, without hooks."""
    hooks = (torch_internals.LOAD_OPTIMIZER_PRE_HOOKS, torch_internals.LOAD_OPTIMIZER_POST_HOOKS)
    is_own = type(optimizer).__module__.startswith("torch.optim.")
    return is_own and not any(kind.of(optimizer) for kind in hooks)


def _may_be_overwritten(held: Held, parameter: torch.Tensor, entry: TensorEntry) -> bool:
    """Whether what an optimizer holds for a parameter takes the saved values, and stays in `load_state_dict`."""
    return (
        bool(entry.shape)  # counters are few bytes, and torch gives them another dtype
        and (entry.shape, entry.dtype) == (held.shape, held.dtype)
        and (held.tensor.dtype, held.tensor.device) == (parameter.dtype, parameter.device)
        and held.local.is_contiguous()
    )


def _of_saved_dtype(held: Any, saved: Any) -> Any:
    if isinstance(saved, torch.Tensor):
        return held if held.dtype == saved.dtype else saved.to(held.device)
    if isinstance(saved, dict):
        return {key: _of_saved_dtype(held[key], value) for key, value in saved.items()}
    if isinstance(saved, (list, tuple)):
        return type(saved)(_of_saved_dtype(one, other) for one, other in zip(held, saved, strict=True))
    return saved  # torch makes something else of a text


def _copied(value: Any) -> Any:
    """A nested value with lists, dicts and tensors of its own."""
    tensors: dict[str, Held] = {}
    text = encode("", value, tensors)
    return decode(text, lambda name: tensors[name].tensor.detach().clone())


def _is_weight(state: Checkpoint, name: str) -> bool:
    """Whether a tensor is a parameter or buffer of a module in the state."""
    key, _, rest = name.partition("/")
    return isinstance(state.objects.get(key), nn.Module) and not rest.startswith("#")


def _names(state: Checkpoint, tensors: Iterable[str], values: Mapping[str, Any]) -> Iterable[str]:
    """What is compared: weights, what modules and their transforms keep besides, and objects."""
    yield from (name for name in tensors if _is_weight(state, name) and (state.only is None or state.only(name)))
    for key, value in values.items():
        yield key
        if isinstance(state.objects.get(key), nn.Module) and isinstance(value, dict):
            for kind, mark in (("extra", ""), ("transforms", "#")):
                found = value.get(kind)
                yield from (f"{key}/{mark}{name}" for name in found) if isinstance(found, dict) else ()


def _check_groups(key: str, saved: list[list[str]], here: list[list[str]]) -> None:
    if saved == here:
        return
    differing = [
        f"group {index}: {listed(sorted(set(a) ^ set(b))) or 'another order'}"
        for index, (a, b) in enumerate(zip(saved, here, strict=False))
        if a != b
    ]
    raise CheckpointError(
        f"restore: {key} has different parameters or groups than the saved state",
        found=listed(differing) if differing else f"{len(saved)} groups saved, {len(here)} here",
        expected="the same parameters in the same groups",
        fix="build the optimizer as it was, or leave it out of the state and restore with strict=False",
    )
