"""From what another library saved to a checkpoint of weft: names of parameters, what fits, and one file, streamed."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from weft.checkpoint.draft import Keep, complete, outline_of, start_saving
from weft.checkpoint.format.safetensors_write import file_header
from weft.checkpoint.format.tensor_blocks import hold_savable
from weft.checkpoint.history import history_of
from weft.checkpoint.state.collect import Content, is_extra, optimizer_values, plain_name
from weft.checkpoint.state.json_values import encode
from weft.checkpoint.storage.find import path_or_url
from weft.context import local
from weft.errors import CheckpointError, listed
from weft.interop.torch_files import parts_of, values_alone
from weft.tensors.blocks import memory_of

# State of torch's optimizers that has the shape of its parameter; that of Adafactor, for one, has another.
_LIKE_PARAMETERS = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "acc_delta", "sum")
)
_SCALER = MappingProxyType({"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000})  # as in weft
Weights: TypeAlias = Mapping[str, Mapping[str, Any]]  # tensors of each module by name


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What was imported.

    Attributes:
        path: The folder of the checkpoint.
        step: Of the checkpoint.
        world_size: Ranks whose random states it has; 1 if it has none.
        objects: Their names, as `weft.checkpointable` is to name them.
        left: What stays behind, and why.
    """

    path: Path
    step: int
    world_size: int
    objects: tuple[str, ...]
    left: tuple[str, ...]


class Group(NamedTuple):
    """A group of an optimizer.

    Attributes:
        options: Such as `lr`.
        state: By parameter, `<object>/<name>`, in the order of the group.
    """

    options: dict[str, Any]
    state: dict[str, dict[str, Any]]


@dataclass
class Found:
    """What a folder of another library holds.

    Attributes:
        weights: Parameters and buffers by name, of each module by the name of that; they may be `deferred`.
        optimizers: Groups of each optimizer, by its name.
        values: Of other objects, such as schedulers, by their names.
        ranks: Random states of each rank, as JSON; None where there are none.
        scale: Of the loss, as with_precision keeps it.
        left: What stays behind, and why.
    """

    weights: dict[str, dict[str, Any]] = field(default_factory=dict)
    optimizers: dict[str, list[Group]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    ranks: list[dict[str, Any] | None] = field(default_factory=list)
    scale: dict[str, float] | None = None
    left: list[str] = field(default_factory=list)


# -- one checkpoint --------------------------------------------------------------------------------------


def write_imported(what: str, source: Path, directory: str | Path, step: int | None, found: Found) -> Imported:
    """Write a checkpoint, tensor by tensor.

    Args:
        what: The caller's name.
        source: What is imported from one such folder is one run.
        directory: Of checkpoints.
        step: Of the checkpoint; None: how often the optimizer has stepped.
        found: What it holds.

    Raises:
        CheckpointError: The step is not known; or `directory` has it, a newer one, or checkpoints of another run.
        TypeError: Something is of a kind that no checkpoint holds; the text names it.
    """
    content, step = _content(found), _step(what, step, found)
    written = [held for held in content.tensors.values() if held.block.size]
    tensors = {held.name: held.tensor for held in written}
    first, *others = [{"rng": rank} for rank in found.ranks or [None]]
    brought = replace(outline_of(content, written, first), others=others)
    ctx = local()
    run = hashlib.sha256(os.path.realpath(source).encode(errors="surrogateescape")).hexdigest()[:16]
    history_of(ctx, path_or_url(directory)).belongs_to(run)
    saving = start_saving(what, path_or_url(directory), step, brought, ctx)
    assert saving is not None  # this is not an elastic job
    with saving.ending:
        complete(saving, brought, _file_parts(tensors), ctx, keep=Keep())
    objects, left = tuple(content.values), tuple(found.left)
    return Imported(path=saving.path, step=step, world_size=1 + len(others), objects=objects, left=left)


def _file_parts(tensors: Mapping[str, torch.Tensor]) -> Iterator[Any]:
    """A safetensors file of tensors, part by part, for `write_parts`; what is deferred is read one by one."""
    head, order = file_header(tensors)
    yield head
    yield from (memory_of(part) for name in order for part in parts_of(tensors[name]))


def _content(found: Found) -> Content:
    """What `weft.save` would have collected of these objects."""
    content = Content()
    tensors = content.tensors
    for key, weights in found.weights.items():
        extra = {name: encode(f"{key}/#{name}", each, tensors) for name, each in weights.items() if is_extra(name)}
        transforms = {} if found.scale is None else {"LossScale": found.scale}
        content.values[key] = {"extra": extra, "transforms": transforms}
        first: dict[tuple[int, torch.Size], str] = {}
        for name, tensor in weights.items():
            if name in extra:
                continue
            is_here = tensor.numel() and not tensor.is_meta
            origin = first.setdefault((tensor.data_ptr(), tensor.shape), name) if is_here else name
            if origin == name:
                tensors[f"{key}/{name}"] = hold_savable(f"{key}/{name}", tensor)
            else:
                content.same_as[f"{key}/{name}"] = f"{key}/{origin}"
    for key, groups in found.optimizers.items():
        states = {name: state for group in groups for name, state in group.state.items() if state}
        named = ((list(group.state), group.options) for group in groups)
        content.values[key] = optimizer_values(key, states, named, tensors)
    for key, value in found.values.items():
        content.values[key] = encode(key, value, tensors)
    return content


# -- names -----------------------------------------------------------------------------------------------


def plain_weights(what: str, key: str, weights: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Weights of a module by the names it has without wrappers, compared with the module, if there is one.

    Raises:
        CheckpointError: Names or shapes differ from those of the module; or something is no tensor.
    """
    model = like.get(key)
    own = model.state_dict(keep_vars=True) if isinstance(model, nn.Module) else {}
    found = {plain(name, weights, own): value for name, value in weights.items()}
    first: dict[int, str] = {}
    for name, tensor in own.items():  # safetensors holds one of tied ones, and not always the first
        origin = first.setdefault(id(tensor), name)
        if origin not in found and name in found:
            found[origin] = found.pop(name)
    there = {name: _shape(value) for name, value in found.items() if not is_extra(name)}
    here = {name: _shape(own[name]) for name in own if name in there or (name in first.values() and not is_extra(name))}
    wrong = [
        f"{name}: {there.get(name, 'not')} in the files, {here.get(name, 'not')} in the module"
        for name in {**here, **there}
        if there.get(name) is None or (own and there[name] != here.get(name))
    ]
    if wrong:
        raise CheckpointError(
            f"{what}: the files do not fit {key}",
            found=listed(wrong),
            expected="the parameters and buffers of the module that was saved",
            fix=f'like={{"{key}": model}}  # built as it was saved; on meta is enough',
        )
    return found


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def plain(name: str, among: Iterable[str] = (), own: Collection[str] = ()) -> str:
    """A name without those of wrappers; with `module.` if that is a part of the module itself.

    Args:
        name: As it was saved.
        among: All names beside it: where each begins with `module.`, that is a wrapper's.
        own: Names of the module, if it is known.

    Example:
        >>> plain("module._orig_mod.fc.weight", ["module._orig_mod.fc.weight"])
        'fc.weight'
    """
    is_wrapped = all(one.startswith("module.") for one in among) and name not in own
    return plain_name(name.removeprefix("module.") if is_wrapped else name)


def named_groups(
    what: str, path: Path, key: str, saved: Mapping[str, Any], weights: Weights, like: Sequence[Sequence[str]] | None
) -> list[Group]:
    """The groups of an optimizer, whose parameters have names instead of numbers.

    Args:
        what: The caller's name.
        path: Where it was read.
        key: Name of the optimizer.
        saved: Its `state_dict`, by numbers or by names of parameters.
        weights: Tensors of each module.
        like: Names of the parameters in the program, group by group, if it has said them: `<object>/<name>`.

    Raises:
        CheckpointError: It is no state of an optimizer; names are not known, or not those of the weights; or state is
            of another shape.
    """
    with values_alone(what, path):
        groups: list[dict[str, Any]] = [dict(group) for group in saved["param_groups"]]
        numbers = [list(group.pop("params")) for group in groups]
        said = [list(group.pop("param_names", params)) for group, params in zip(groups, numbers, strict=True)]
        state = saved.get("state", {})  # DCP makes text of numbers
        states = [[dict(state.get(n) or state.get(str(n)) or {}) for n in params] for params in numbers]
    names = _saved_names(numbers, weights) or _saved_names(said, weights)  # FSDP1 says those of its flat parameters
    if names is None:
        names = [list(one) for one in like or ()]
    if [len(one) for one in names] != [len(one) for one in numbers]:
        raise CheckpointError(
            f"{what}: the names of the parameters in {key} are not known",
            found=f"groups of {[len(one) for one in numbers]} parameters, and names for {[len(one) for one in names]}",
            expected="names in the files, or the model and the optimizer of the program that saved; on meta is enough",
            fix=f'like={{"model": model, "{key}": optimizer}}  # with torch.device("meta"): model = build()',
        )
    by_name = dict(zip(itertools.chain(*names), itertools.chain(*states), strict=True))
    shapes = {f"{module}/{name}": _shape(value) for module, each in weights.items() for name, value in each.items()}
    wrong = [f"{name}: not among the weights" for name in by_name if name not in shapes] + [
        f"{name}: {kind} of shape {_shape(value)}, not {shapes[name]}"
        for name, each in by_name.items()
        for kind, value in each.items()
        if kind in _LIKE_PARAMETERS and _shape(value) not in (None, shapes.get(name, _shape(value)))
    ]
    if wrong:
        raise CheckpointError(
            f"{what}: the state of {key} does not fit the weights",
            found=listed(wrong),
            expected="state of the shape of its parameter, for parameters that are among the weights",
            fix=f'like={{"model": model, "{key}": optimizer}}  # with the groups, and the order, that it had',
        )
    if like is not None and [set(one) for one in like] == [set(one) for one in names]:
        names = [list(one) for one in like]  # FSDP1 may have an order of its own
    return [Group(options, {name: by_name[name] for name in one}) for options, one in zip(groups, names, strict=True)]


def _saved_names(saved: Sequence[Sequence[Any]], weights: Weights) -> list[list[str]] | None:
    """The parameters of groups as `<object>/<name>`; None if they have numbers."""
    flat = list(itertools.chain(*saved))
    if not all(isinstance(name, str) for name in flat):
        return None
    fits = (key for key, each in weights.items() if all(plain(name, flat, each) in each for name in flat))
    owner = next(fits, next(iter(weights), "model"))
    return [[f"{owner}/{plain(name, flat, weights.get(owner, ()))}" for name in names] for names in saved]


def names_in(like: Mapping[str, Any], key: str) -> list[list[str]] | None:
    """The parameters of an optimizer of the program, group by group, as `<object>/<name>`; None without it."""
    optimizer = like.get(key)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return None
    modules = [(name, one) for name, one in like.items() if isinstance(one, nn.Module)]
    names = {id(p): f"{module}/{plain(name)}" for module, one in modules for name, p in one.named_parameters()}
    return [[names[id(p)] for p in group["params"] if id(p) in names] for group in optimizer.param_groups]


def _step(what: str, given: int | None, found: Found) -> int:
    """The step of a checkpoint: the one that was given, or how often the optimizer has stepped.

    Raises:
        CheckpointError: Nothing says it.
    """
    states = (state for groups in found.optimizers.values() for group in groups for state in group.state.values())
    counted = [int(state["step"]) for state in states if "step" in state]
    if given is None and not counted:
        raise CheckpointError(
            f"{what}: the step is not known",
            found="no optimizer that counts its steps",
            expected="the number of optimizer steps that the run has made",
            fix=f"weft.interop.{what}(folder, out, step=1000)",
        )
    return max(counted) if given is None else given


# -- the scale of the loss ------------------------------------------------------------------------------


def loss_scale(what: str, path: Path, saved: Any, found: Found) -> None:
    """Take over the state of a GradScaler of torch.

    Raises:
        CheckpointError: It is something else.
    """
    if not saved:  # it was off
        return
    with values_alone(what, path):
        state = {name.strip("_"): value for name, value in saved.items()}
        found.scale = {"scale": float(state["scale"]), "good_steps": int(state["growth_tracker"])}
        other = {k: state[k] for k, usual in _SCALER.items() if state[k] != usual}
        found.left += [f"options of the loss scale, a line of the program (weft.Precision): {other}"] if other else []
