"""A checkpoint on its way into the objects: first read and checked, then put in place, or nothing of it.

[Note: all or nothing] What can fail comes first: reading, then `load_state_dict` of the user's objects, of
which the old state is kept. The tensors of modules are copied last, when every rank has come so far:
that cannot fail, and needs no second copy of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.checkpoint.manifest import Manifest
from weft.checkpoint.pieces import local_part
from weft.checkpoint.randomness import drawn_state, prepare_random_state, random_state
from weft.checkpoint.reading import Reader
from weft.checkpoint.state import Checkpoint, Stateful, collect, keepers, kept_by, parameter_names
from weft.checkpoint.values import decode, encode
from weft.context import DistContext
from weft.errors import CheckpointError, listed, message

__all__ = ["Loading"]


class Loading:
    """Everything read and checked, on this rank, ready to be put in place.

    Attributes:
        manifest: Of the checkpoint.
        missing: Names that the state has and the checkpoint has not.
        unexpected: Names that only the checkpoint has.
    """

    def __init__(self, state: Checkpoint, folder: Path, manifest: Manifest, ctx: DistContext, *, strict: bool) -> None:
        self._state = state
        self._folder = folder
        self.manifest = manifest
        self._ctx = ctx
        self._reader = Reader(folder, manifest)
        self._undo = contextlib.ExitStack()  # calls all, also if one raises
        self._live = collect(state, to_save=False)
        self._loaded: dict[str, Any] = {}
        self.missing, self.unexpected = self._compare()
        self._check(strict=strict)
        self._tensors = {
            name: self._reader.read(name, tensor)
            for name, tensor in self._live.tensors.items()
            if name in manifest.tensors and _is_weight(state, name)
        }
        for key in state.objects:
            if key in manifest.values:
                self._loaded[key] = self._read_object(key)
        self._set_random = self._random() if state.rng else None

    # -- does it fit -----------------------------------------------------------------------------

    def _compare(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        here = list(_names(self._state, self._live.tensors | self._live.same_as, self._live.values))
        there = list(_names(self._state, self.manifest.tensors, self.manifest.values))
        missing = [name for name in here if name not in set(there)]
        return tuple(missing), tuple(name for name in there if name not in set(here))

    def _check(self, *, strict: bool) -> None:
        entries = self.manifest.tensors
        tied = {name: self._live.tensors[origin] for name, origin in self._live.same_as.items()}
        wrong = [
            f"{name} of shape {entries[name].shape}, not {tuple(tensor.shape)}"
            for name, tensor in (self._live.tensors | tied).items()
            if name in entries and _is_weight(self._state, name) and entries[name].shape != tuple(tensor.shape)
        ]
        if wrong or (strict and (self.missing or self.unexpected)):
            found = [f"shapes: {listed(wrong)}"] if wrong else []
            found += [f"not in the checkpoint: {listed(self.missing)}"] if self.missing else []
            found += [f"only in the checkpoint: {listed(self.unexpected)}"] if self.unexpected else []
            raise CheckpointError(
                message(
                    f"restore: {self._folder} does not fit the state",
                    found="; ".join(found),
                    expected="the objects, names and shapes that were saved",
                    fix="weft.restore(state, directory, ctx, strict=False)  # keeps what is missing as it is",
                )
            )

    # -- reading ---------------------------------------------------------------------------------

    def _read_object(self, key: str) -> Any:
        """The state of one object, in the form its `load_state_dict` takes."""
        obj, saved = self._state.objects[key], self.manifest.values[key]
        try:
            if isinstance(obj, torch.optim.Optimizer):
                return self._read_optimizer(key, obj, saved)
            found = decode(saved, lambda name: self._reader.read(name, self._live.tensors.get(name)))
            if isinstance(obj, nn.Module) and not all(isinstance(found[k], dict) for k in ("extra", "transforms")):
                raise ValueError("not what a module keeps")
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                message(
                    f"restore: the values of {key} in {self._folder} cannot be used",
                    found=f"{type(error).__name__}: {error}",
                    expected=f"what weft.save wrote for a {type(obj).__name__}",
                    fix="restore an older checkpoint, or leave the object out of the state",
                )
            ) from error
        return found

    def _read_optimizer(self, key: str, optimizer: torch.optim.Optimizer, saved: Any) -> Any:
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

        def like(parameter: torch.Tensor) -> Callable[[str], torch.Tensor]:
            """Reads state cut up as its parameter, if it has its shape."""

            def read(name: str) -> torch.Tensor:
                shape, layout = self.manifest.tensors[name].shape, layouts.get(id(parameter), parameter)
                return self._reader.read(name, layout if shape and shape == tuple(layout.shape) else None)

            return read

        state = {order[name]: decode(entry, like(parameters[name])) for name, entry in saved["state"].items()}
        start, described = 0, []
        for group, entry in zip(groups, saved["groups"], strict=True):
            options = decode(entry["options"], lambda name: self._reader.read(name, None))
            described.append({**options, "params": list(range(start, start + len(group)))})
            start += len(group)
        return {"state": state, "param_groups": described}

    def _random(self) -> Callable[[], None]:
        ranks, ctx = self.manifest.ranks, self._ctx
        if len(ranks) != ctx.world_size:
            return drawn_state(ctx.seed, self.manifest.step, ctx.rank)
        return prepare_random_state(ranks[ctx.rank].get("rng") or {}, ctx.device)

    # -- putting in place ------------------------------------------------------------------------

    def load_objects(self) -> None:
        """Give all objects but the weights their state; `undo` takes it back."""
        self._undo.callback(prepare_random_state(random_state(self._ctx.device), self._ctx.device))
        for key, loaded in self._loaded.items():
            obj = self._state.objects[key]
            try:
                self._load_object(obj, loaded)
            except Exception as error:
                raise CheckpointError(
                    message(
                        f"restore: {key} does not take its state from {self._folder}",
                        found=f"{type(error).__name__}: {error}",
                        expected=f"load_state_dict of {type(obj).__name__} to take what state_dict gave",
                        fix="build the object as it was, or leave it out of the state",
                    )
                ) from error

    def _load_object(self, obj: Any, loaded: Any) -> None:
        if not isinstance(obj, nn.Module):
            self._load(obj, loaded)
            return
        for name, value in loaded["extra"].items():
            if name in obj.state_dict():
                self._set_extra(obj.get_submodule(name.rpartition(".")[0]), value)
        for kind, offer in kept_by(obj).items():
            if kind in loaded["transforms"]:
                self._load(offer, loaded["transforms"][kind])

    def _load(self, obj: Stateful, loaded: Any) -> None:
        # What an optimizer holds is replaced and not overwritten: no copy is needed.
        held = obj.state_dict()
        before: Any = held if isinstance(obj, torch.optim.Optimizer) else _copied(held)
        self._undo.callback(lambda: obj.load_state_dict(before))
        obj.load_state_dict(loaded)

    def _set_extra(self, module: nn.Module, value: Any) -> None:
        before = _copied(module.get_extra_state())
        self._undo.callback(lambda: module.set_extra_state(before))
        module.set_extra_state(value)

    def undo(self) -> None:
        """Give all objects the state they had."""
        self._undo.close()

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Put the tensors of modules in place, and the random states."""
        self._undo.pop_all()
        for name, values in self._tensors.items():
            local_part(self._live.tensors[name]).copy_(local_part(values))
        for key, obj in self._state.objects.items():
            for part, offer in keepers(obj) if isinstance(obj, nn.Module) else ():
                names = {id(p): name for name, p in obj.named_parameters()}
                full = {own: f"{key}/{names[id(p)]}" for own, p in part.named_parameters()}
                offer.parameters_changed({own: self._live.tensors[n] for own, n in full.items() if n in self._tensors})
        if self._set_random is not None:
            self._set_random()


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
        message(
            f"restore: {key} has other parameters or groups than were saved",
            found=listed(differing) if differing else f"{len(saved)} groups saved, {len(here)} here",
            expected="the same parameters in the same groups",
            fix="build the optimizer as it was, or leave it out of the state",
        )
    )
