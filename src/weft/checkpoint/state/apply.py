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
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from weft.checkpoint.format.dtypes import of_one_kind
from weft.checkpoint.format.manifest import TensorEntry
from weft.checkpoint.reader import Reader
from weft.checkpoint.state.collect import (
    Checkpoint,
    Stateful,
    collect,
    keepers,
    kept_by,
    parameter_names,
    plain_name,
    tell_keepers,
)
from weft.checkpoint.state.generators import (
    Generator,
    generator_kind,
    generator_state,
    is_generator,
    prepare_generator,
    restored_from,
)
from weft.checkpoint.state.json_values import decode, encode
from weft.checkpoint.state.rng_state import drawn_state, prepare_random_state, random_state
from weft.context import DistContext
from weft.errors import CheckpointError, listed
from weft.tensors.dtensor import is_sharded

__all__ = ["Loading"]


class Loading:
    """What a checkpoint gives this rank: found to fit, then read, then put in place.

    Attributes:
        folder: Of the checkpoint.
        manifest: Its manifest.
        missing: Names that the state has and the checkpoint has not.
        unexpected: Names that only the checkpoint has.

    Args:
        state: Whose objects.
        reader: Of the files. It is told what is wanted, and has to be filled before anything is put in place.
        ctx: Whose ranks.
        strict: Raise if names differ.
    """

    def __init__(
        self,
        state: Checkpoint,
        reader: Reader,
        ctx: DistContext,
        *,
        strict: bool,
    ) -> None:
        self._state = state
        self.folder = reader.folder
        self.manifest = manifest = reader.manifest
        self._reader = reader
        self._ctx = ctx
        self._undo = contextlib.ExitStack()  # calls all, also if one raises
        self._live = collect(state, to_save=False)
        self._loaded: dict[str, Any] = {}
        self.missing, self.unexpected = self._compare()
        self._check(strict=strict)
        self._weights = self._find_weights()
        for name, (stored, _) in self._weights.items():
            reader.read_into(stored, self._live.tensors[name])
        for key in state.objects:
            if key in manifest.values:
                self._loaded[key] = self._read_object(key, reader)
        self._set_random = self._random() if state.rng else None

    # -- does it fit -----------------------------------------------------------------------------

    def _compare(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        here = list(_names(self._state, self._live.tensors | self._live.same_as, self._live.values))
        there = list(_names(self._state, self.manifest.tensors, self.manifest.values))
        tied, names_here, names_there = self._names_of(), set(here), set(there)
        missing = [name for name in here if names_there.isdisjoint(tied.get(name, [name]))]
        return tuple(missing), tuple(name for name in there if name not in names_here)

    def _check(self, *, strict: bool) -> None:
        entries = self.manifest.tensors
        tied = {name: self._live.tensors[origin] for name, origin in self._live.same_as.items()}
        wrong = [
            f"{name} of shape {entries[name].shape}, not {tuple(tensor.shape)}"
            for name, tensor in (self._live.tensors | tied).items()
            if name in entries and _is_weight(self._state, name) and entries[name].shape != tuple(tensor.shape)
        ]
        kinds = [
            f"{name} of {entries[name].dtype}, not {str(tensor.dtype).removeprefix('torch.')}"
            for name, tensor in (self._live.tensors | tied).items()
            if name in entries
            and _is_weight(self._state, name)
            and not of_one_kind(getattr(torch, entries[name].dtype), tensor.dtype)
        ]
        if wrong or kinds or (strict and (self.missing or self.unexpected)):
            found = [f"shapes: {listed(wrong)}"] if wrong else []
            found += [f"kinds of numbers: {listed(kinds)}"] if kinds else []
            found += [f"not in the checkpoint: {listed(self.missing)}"] if self.missing else []
            found += [f"only in the checkpoint: {listed(self.unexpected)}"] if self.unexpected else []
            raise CheckpointError(
                f"restore: {self.folder} does not fit the state",
                found="; ".join(found),
                expected="the objects, names and shapes that were saved",
                fix="weft.restore(state, directory, ctx, strict=False)  # keeps what is missing as it is",
            )

    def _names_of(self) -> dict[str, list[str]]:
        """All names of each tied tensor, by each of them."""
        groups: dict[str, list[str]] = {}
        for name, origin in self._live.same_as.items():
            groups.setdefault(origin, [origin]).append(name)
        return {name: names for names in groups.values() for name in names}

    def check_values(self) -> None:
        """Raise if values that were read would be lost.

        Raises:
            CheckpointError: Those of one of two tensors would be, or numbers too large for their dtype.
        """
        wrong = [
            f"{name} and {other} are one tensor, and have two values in the checkpoint"
            for name, (stored, others) in self._weights.items()
            for other in others
            if not self._reader.are_equal(stored, other, self._live.tensors[name])
        ]
        wrong += [
            f"{name} has numbers that {str(self._live.tensors[name].dtype).removeprefix('torch.')} does not have"
            for name, (stored, _) in self._weights.items()
            if getattr(torch, self.manifest.tensors[stored].dtype) != self._live.tensors[name].dtype
            and not self._reader.fits(stored, self._live.tensors[name])
        ]
        if wrong:
            raise CheckpointError(
                f"restore: {self.folder} does not fit the state",
                found=listed(wrong),
                expected="tied weights with one value, and dtypes that hold the values that were saved",
                fix="build the module as it was: the same weights tied, and the same dtypes",
            )

    # -- reading ---------------------------------------------------------------------------------

    def _find_weights(self) -> dict[str, tuple[str, list[str]]]:
        """What the tensors of modules are called in the checkpoint; and for a tied one that was saved as two, both."""
        found: dict[str, tuple[str, list[str]]] = {}
        entries, tied = self.manifest.tensors, self._names_of()
        for name in self._live.tensors:
            there = [one for one in tied.get(name, [name]) if one in entries and _is_weight(self._state, one)]
            if not there:
                continue
            stored = entries[there[0]].same_as or there[0]
            found[name] = stored, [one for one in there[1:] if (entries[one].same_as or one) != stored]
        return found

    def _read_object(self, key: str, reader: Reader) -> Any:
        """The state of one object, in the form its `load_state_dict` takes."""
        obj, saved = self._state.objects[key], self.manifest.values[key]
        try:
            if isinstance(obj, torch.optim.Optimizer):
                return self._read_optimizer(key, obj, saved, reader)
            if is_generator(obj):
                return self._read_generator(key, obj, saved)
            found = decode(saved, lambda name: reader.read(name, self._layout_of(name)))
            if isinstance(obj, nn.Module) and not all(isinstance(found[k], dict) for k in ("extra", "transforms")):
                raise ValueError("not what a module keeps")
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"restore: the values of {key} in {self.folder} cannot be used",
                found=f"{type(error).__name__}: {error}",
                expected=f"what weft.save wrote for a {type(obj).__name__}",
                fix="restore an older checkpoint, or leave the object out of the state",
            ) from error
        return found

    def _layout_of(self, name: str) -> torch.Tensor | None:
        """How a tensor of an object is cut over ranks; what is not comes back whole, in the shape it was saved in."""
        live = self._live.tensors.get(name)
        return live if live is not None and is_sharded(live) else None

    def _read_optimizer(self, key: str, optimizer: torch.optim.Optimizer, saved: Any, reader: Reader) -> Any:
        names = parameter_names(self._state)
        groups = [[names[id(p)] for p in entry["params"]] for entry in optimizer.param_groups]
        _check_groups(key, [entry["params"] for entry in saved["groups"]], groups)
        parameters = {names[id(p)]: p for entry in optimizer.param_groups for p in entry["params"]}
        order = {name: index for index, name in enumerate(name for group in groups for name in group)}

        layouts = {
            id(p): layout
            for obj in self._state.objects.values()
            for part, offer in (keepers(obj) if isinstance(obj, nn.Module) else ())
            for own, p in part.named_parameters()
            if (layout := offer.state_layout(own)) is not None
        }

        keeps = _keeps_tensors(optimizer)
        replaced: set[int] = set()

        def like(parameter: torch.Tensor) -> Callable[[str], torch.Tensor]:
            """Reads state cut up as its parameter, if it has its shape."""

            def read(name: str) -> torch.Tensor:
                held = self._live.tensors.get(name) if keeps else None
                entry = self.manifest.tensors[name]
                if held is not None and id(held) not in replaced and _may_be_overwritten(held, parameter, entry):
                    replaced.add(id(held))
                    reader.read_into(name, held)
                    return held
                shape, layout = entry.shape, layouts.get(id(parameter), parameter)
                return reader.read(name, layout if shape and shape == tuple(layout.shape) else None)

            return read

        state: dict[Any, Any] = {
            order[name]: decode(entry, like(parameters[name])) for name, entry in saved["state"].items()
        }
        shared, more = (
            decode(saved.get(kind, {}), lambda name: reader.read(name, None)) for kind in ("shared", "more")
        )
        changed = {
            order[name]
            for name, parameter in parameters.items()
            if (entry := self.manifest.tensors.get(name)) is None or getattr(torch, entry.dtype) != parameter.dtype
        }
        start, described = 0, []
        for group, entry in zip(groups, saved["groups"], strict=True):
            options = decode(entry["options"], lambda name: reader.read(name, None))
            described.append({**options, "params": list(range(start, start + len(group)))})
            start += len(group)
        return _OptimizerState({**more, "state": {**state, **shared}, "param_groups": described}, changed)

    def _read_generator(self, key: str, generator: Generator, saved: Any) -> Callable[[], object]:
        if saved != {"generator": generator_kind(generator)}:
            raise ValueError(f"{saved!r:.80} for a {generator_kind(generator)}")
        ctx, states = self._ctx, [rank["generators"][key] for rank in self.manifest.ranks]
        if None in states:
            raise ValueError(f"no state of rank {states.index(None)}")
        state = restored_from(states, ctx.rank, ctx.world_size)
        return prepare_generator(generator, state, new=(ctx.seed, self.manifest.step, ctx.rank, key))

    def _random(self) -> Callable[[], None]:
        ranks, ctx = self.manifest.ranks, self._ctx
        if len(ranks) != ctx.world_size or ranks[ctx.rank].get("rng", {}) is None:  # imported from elsewhere
            return drawn_state(self.manifest.step, ctx)
        return prepare_random_state(ranks[ctx.rank].get("rng") or {}, ctx)

    # -- putting in place ------------------------------------------------------------------------

    def load_objects(self) -> None:
        """Give all objects but the weights their state; `undo` takes it back."""
        self._reader.fill()
        self._undo.callback(prepare_random_state(random_state(self._ctx), self._ctx))
        for key, loaded in self._loaded.items():
            obj = self._state.objects[key]
            try:
                self._load_object(obj, loaded)
            except Exception as error:
                raise CheckpointError(
                    f"restore: {key} does not take its state from {self.folder}",
                    found=f"{type(error).__name__}: {error}",
                    expected=f"load_state_dict of {type(obj).__name__} to take what state_dict gave",
                    fix="build the object as it was, or leave it out of the state",
                ) from error

    def _load_object(self, obj: Any, loaded: Any) -> None:
        if is_generator(obj):
            self._undo.callback(prepare_generator(obj, generator_state(obj), new=(0, 0, 0, "")))
            loaded()
            return
        if not isinstance(obj, nn.Module):
            self._load(obj, loaded)
            return
        here = {plain_name(name): name for name in obj.state_dict()}
        for name, value in loaded["extra"].items():
            if name in here:
                self._set_extra(obj.get_submodule(here[name].rpartition(".")[0]), value)
        for kind, offer in kept_by(obj).items():
            if kind in loaded["transforms"]:
                self._load(offer, loaded["transforms"][kind])

    def _load(self, obj: Stateful, loaded: Any) -> None:
        # What an optimizer holds is replaced and not overwritten: no copy is needed.
        if isinstance(obj, torch.optim.Optimizer):
            held = _OptimizerState(obj.state_dict(), set())
            self._undo.callback(lambda: held.load_into(obj))
            loaded.load_into(obj)
            return
        before: Any = _copied(obj.state_dict())
        self._undo.callback(lambda: obj.load_state_dict(before))
        obj.load_state_dict(loaded)

    def _set_extra(self, module: nn.Module, value: Any) -> None:
        before = _copied(module.get_extra_state())
        self._undo.callback(lambda: module.set_extra_state(before))
        module.set_extra_state(value)

    def undo(self) -> None:
        """Give all objects the state they had."""
        self._undo.close()

    def put_weights(self) -> None:
        """Give the tensors of modules and optimizers their values, and the random states.

        Raises:
            CheckpointError: A file is gone or not as it was. The state is part old and part new now.
            OSError: It cannot be read.
        """
        self._undo.pop_all()
        self._reader.put()
        self._reader.close()
        for key, obj in self._state.objects.items():
            if isinstance(obj, nn.Module):
                names = {id(p): f"{key}/{plain_name(name)}" for name, p in obj.named_parameters()}
                tell_keepers(obj, {one: self._live.tensors[n] for one, n in names.items() if n in self._weights})
        self._ctx.engine.relay(self._state.objects.values())
        if self._set_random is not None:
            self._set_random()


class _OptimizerState:
    """What an optimizer's `load_state_dict` takes; loaded without a change of its dtypes.

    torch gives all of a parameter's state the dtype of the parameter: masks and counters too, and
    averages that are kept in a wider one.

    Args:
        content: From `state_dict`.
        changed: Numbers of the parameters whose own dtype is another than it was; theirs are converted.
    """

    def __init__(self, content: dict[str, Any], changed: set[int]) -> None:
        self._content = content
        self._changed = changed

    def load_into(self, optimizer: torch.optim.Optimizer) -> None:
        """Load it; hooks of the optimizer, such as those that cut its state, find the dtypes that were saved."""
        hook = optimizer.register_load_state_dict_post_hook(self._put_back, prepend=True)
        try:
            optimizer.load_state_dict(self._content)
        finally:
            hook.remove()

    def _put_back(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, entry in self._content["state"].items():
            if isinstance(index, int) and index not in self._changed:
                held = optimizer.state[parameters[index]]
                for key in held.keys() & entry.keys() - {"step"}:  # fused and capturable ones need theirs in float32
                    held[key] = _of_saved_dtype(held[key], entry[key])


def _keeps_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `load_state_dict` makes the very tensors it is given the state: that of torch's own, without hooks."""
    hooks = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    is_own = type(optimizer).__module__.startswith("torch.optim.")
    return is_own and not any(getattr(optimizer, name, True) for name in hooks)


def _may_be_overwritten(held: torch.Tensor, parameter: torch.Tensor, entry: TensorEntry) -> bool:
    """Whether what an optimizer holds for a parameter takes the saved values, and stays in `load_state_dict`."""
    return (
        bool(entry.shape)  # counters are few bytes, and torch gives them another dtype
        and entry.shape == tuple(held.shape)
        and entry.dtype == str(held.dtype).removeprefix("torch.")
        and (held.dtype, held.device) == (parameter.dtype, parameter.device)
        and held.is_contiguous()
        and not is_sharded(held)
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
    tensors: dict[str, torch.Tensor] = {}
    text = encode("", value, tensors)
    return decode(text, lambda name: tensors[name].detach().clone())


def _is_weight(state: Checkpoint, name: str) -> bool:
    """Whether a tensor is a parameter or buffer of a module in the state."""
    key, _, rest = name.partition("/")
    return isinstance(state.objects.get(key), nn.Module) and not rest.startswith("#")


def _names(state: Checkpoint, tensors: Iterable[str], values: Mapping[str, Any]) -> Iterable[str]:
    """What is compared: weights, what modules and their transforms keep besides, and objects."""
    yield from (name for name in tensors if _is_weight(state, name))
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
        f"restore: {key} has other parameters or groups than were saved",
        found=listed(differing) if differing else f"{len(saved)} groups saved, {len(here)} here",
        expected="the same parameters in the same groups",
        fix="build the optimizer as it was, or leave it out of the state",
    )
