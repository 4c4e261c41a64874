"""From what another library saved to a checkpoint of weft: names of parameters, what fits, and one file, streamed."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

import torch
from torch import nn

from weft.checkpoint.draft import Keep, complete, outline_of, start_saving
from weft.checkpoint.format.manifest import FileEntry
from weft.checkpoint.format.safetensors_write import file_header, write_parts
from weft.checkpoint.format.tensor_blocks import hold_savable
from weft.checkpoint.history import history_of
from weft.checkpoint.state.collect import Content, is_extra
from weft.checkpoint.state.json_values import encode
from weft.checkpoint.storage.find import path_or_url
from weft.context import local
from weft.errors import CheckpointError, listed, value_error
from weft.interop.torch_files import DeferredTensors, damaged
from weft.tensors.blocks import memory_of
from weft.tensors.rng_state import numpy_json, numpy_state, python_json, python_state, to_hex, torch_state

# State of torch's optimizers that has the shape of its parameter; that of Adafactor, for one, has another.
_LIKE_PARAMETERS = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "acc_delta", "sum")
)
# Names that wrappers of torch put between those of modules.
_WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
_SCALER = MappingProxyType({"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000})  # as in weft


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
        weights: Parameters and buffers by name, of each module by the name of that.
        optimizers: Groups of each optimizer, by its name.
        values: Of other objects, such as schedulers, by their names.
        ranks: Random states of each rank, as JSON; None where there are none.
        scale: Of the loss, as with_precision keeps it.
        left: What stays behind, and why.
        deferred: Knows the tensors that are read when they are written.
    """

    weights: dict[str, dict[str, Any]] = field(default_factory=dict)
    optimizers: dict[str, list[Group]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    ranks: list[dict[str, Any] | None] = field(default_factory=list)
    scale: dict[str, float] | None = None
    left: list[str] = field(default_factory=list)
    deferred: DeferredTensors = field(default_factory=DeferredTensors)


# -- one checkpoint --------------------------------------------------------------------------------------


def write_imported(what: str, source: Path, directory: str | Path, step: int, found: Found) -> Imported:
    """Write a checkpoint, tensor by tensor.

    Args:
        what: The caller's name.
        source: What is imported from one such folder is one run.
        directory: Of checkpoints.
        step: Of the checkpoint.
        found: What it holds.

    Raises:
        CheckpointError: `directory` has this step, a newer one, or checkpoints of another run.
        TypeError: Something is of a kind that no checkpoint holds; the text names it.
    """
    content = _content(found)
    written = [held for held in content.tensors.values() if held.block.size]
    tensors = {held.name: held.tensor for held in written}
    first, *others = [{"rng": rank} for rank in found.ranks or [None]]
    brought = outline_of(content, written, first, others=others)
    ctx = local()
    run = hashlib.sha256(os.path.realpath(source).encode(errors="surrogateescape")).hexdigest()[:16]
    history_of(ctx, path_or_url(directory)).belongs_to(run)
    saving = start_saving(what, path_or_url(directory), step, brought, ctx)
    assert saving is not None  # this is not an elastic job

    def write(file: IO[bytes]) -> FileEntry:
        head, order = file_header(tensors)
        values = (memory_of(part) for name in order for part in found.deferred.parts(tensors[name]))
        return write_parts(file, itertools.chain([head], values))

    with saving.ending:
        complete(what, saving, step, brought, write, ctx, keep=Keep())
    return Imported(
        path=saving.path,
        step=step,
        world_size=1 + len(others),
        objects=tuple(content.values),
        left=tuple(found.left),
    )


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
        content.values[key] = {
            "state": {
                name: encode(f"{key}/state/{name}", state, tensors)
                for group in groups
                for name, state in group.state.items()
                if state
            },
            "groups": [
                {"params": list(group.state), "options": encode(f"{key}/groups/{index}", group.options, tensors)}
                for index, group in enumerate(groups)
            ],
        }
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
    tied: dict[int, list[str]] = {}
    for name, tensor in own.items():
        tied.setdefault(id(tensor), []).append(name)
    for first, *others in tied.values():  # safetensors holds one of them, and not always the first
        there = next((name for name in others if name in found), None)
        if first not in found and there is not None:
            found[first] = found.pop(there)
    lost = [names[0] for names in tied.values() if names[0] not in found and not is_extra(names[0])]
    wrong = {
        "not in the files": lost if own else [],
        "only in the files": [name for name in found if name not in own and not is_extra(name)] if own else [],
        "shapes": [
            f"{name} of {tuple(value.shape)}, not {tuple(own[name].shape)}"
            for name, value in found.items()
            if name in own and not is_extra(name) and value.shape != own[name].shape
        ],
        "no tensors": [n for n, value in found.items() if not isinstance(value, torch.Tensor) and not is_extra(n)],
    }
    if any(wrong.values()):
        raise CheckpointError(
            f"{what}: the files do not fit {key}",
            found="; ".join(f"{kind}: {listed(names)}" for kind, names in wrong.items() if names),
            expected="the parameters and buffers of the module that was saved",
            fix=f'like={{"{key}": model}}  # built as it was saved; on meta is enough',
        )
    return found


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
    parts = name.removeprefix("module.").split(".") if is_wrapped else name.split(".")
    return ".".join(part for part in parts if part not in _WRAPPERS)


def named_groups(
    what: str,
    path: Path,
    key: str,
    saved: Mapping[str, Any],
    weights: Mapping[str, Mapping[str, Any]],
    like: Sequence[Sequence[str]] | None,
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
    try:
        groups: list[dict[str, Any]] = [dict(group) for group in saved["param_groups"]]
        numbers = [list(group.pop("params")) for group in groups]
        said = [list(group.pop("param_names", params)) for group, params in zip(groups, numbers, strict=True)]
        state = saved.get("state", {})  # DCP makes text of numbers
        states = [[dict(state.get(n) or state.get(str(n)) or {}) for n in params] for params in numbers]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise damaged(what, path, error) from error
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
    shapes = {
        f"{module}/{name}": value.shape
        for module, each in weights.items()
        for name, value in each.items()
        if isinstance(value, torch.Tensor)
    }
    by_name = dict(zip(itertools.chain(*names), itertools.chain(*states), strict=True))
    wrong = [f"{name}: not among the weights" for name in by_name if name not in shapes] + [
        f"{name}: {kind} of shape {tuple(value.shape)}, not {tuple(shapes[name])}"
        for name, each in by_name.items()
        for kind, value in each.items()
        if kind in _LIKE_PARAMETERS and isinstance(value, torch.Tensor) and value.shape != shapes.get(name, value.shape)
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


def _saved_names(saved: Sequence[Sequence[Any]], weights: Mapping[str, Mapping[str, Any]]) -> list[list[str]] | None:
    """The parameters of groups as `<object>/<name>`; None if they have numbers."""
    flat = list(itertools.chain(*saved))
    if not all(isinstance(name, str) for name in flat):
        return None
    fits = (key for key, each in weights.items() if all(plain(name, flat, each) in each for name in flat))
    owner = next(fits, next(iter(weights), "model"))
    return [[f"{owner}/{plain(name, flat, weights.get(owner, ()))}" for name in names] for names in saved]


def names_in(like: Mapping[str, Any], key: str) -> list[list[str]] | None:
    """The parameters of an optimizer of the program, group by group, as `<object>/<name>`; None without it.

    Raises:
        ValueError: One of them belongs to no module of the program.
    """
    optimizer = like.get(key)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return None
    modules = [(name, one) for name, one in like.items() if isinstance(one, nn.Module)]
    names = {id(p): f"{module}/{plain(name)}" for module, one in modules for name, p in one.named_parameters()}
    if any(id(p) not in names for group in optimizer.param_groups for p in group["params"]):
        raise value_error(
            f"like: {key} holds parameters of no module in it",
            found=listed(name for name, _ in modules) or "no modules",
            expected="the optimizer, and the modules whose parameters it holds",
            fix=f'like={{"model": model, "{key}": optimizer}}',
        )
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def step_of(what: str, given: int | None, found: Found) -> int:
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


# -- random states, and the scale of the loss --------------------------------------------------------------


def random_states(what: str, path: Path, python: Any, numpy: Any, cpu: Any, devices: Mapping[str, Any]) -> Any:
    """The random states of a rank as JSON.

    Args:
        what: The caller's name.
        path: Where they were read.
        python: As of `random.getstate`.
        numpy: As of `numpy.random.get_state`.
        cpu: Of torch, uint8.
        devices: By the kind of device; of several, that of this rank.

    Raises:
        CheckpointError: They are something else.
    """
    try:
        found: dict[str, Any] = {"python": python_json(*python), "numpy": numpy_json(*numpy), "torch": to_hex(cpu)}
        found |= {kind: to_hex(state) for kind, state in devices.items()}
        python_state(*found["python"])
        numpy_state(*found["numpy"])
        torch.Generator().set_state(torch_state(found["torch"]))
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        raise damaged(what, path, error) from error
    return found


def loss_scale(what: str, path: Path, saved: Any, found: Found) -> None:
    """Take over the state of a GradScaler of torch.

    Raises:
        CheckpointError: It is something else.
    """
    if not saved:  # it was off
        return
    try:
        found.scale = {"scale": float(saved["scale"]), "good_steps": int(saved["_growth_tracker"])}
        other = {k: saved[k] for k, usual in _SCALER.items() if saved[k] != usual}
    except (LookupError, TypeError, ValueError) as error:
        raise damaged(what, path, error) from error
    if other:
        found.left.append(f"options of the loss scale, a line of the program (weft.Precision): {other}")
