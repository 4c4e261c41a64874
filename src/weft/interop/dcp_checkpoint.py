"""`import_dcp`: a checkpoint out of a folder that torch.distributed.checkpoint wrote."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.checkpoint.state.collect import is_extra
from weft.errors import CheckpointError, listed
from weft.interop.imported import Found, Imported, loss_scale, named_groups, names_in, plain_weights, write_imported
from weft.interop.torch_files import METADATA, read_dcp

_STEPS = ("step", "global_step", "iteration")


def import_dcp(
    folder: str | Path,
    out: str | Path,
    *,
    like: Mapping[str, object] | None = None,
    skip: Collection[str] = (),
    step: int | None = None,
) -> Imported:
    """Turn a checkpoint that `torch.distributed.checkpoint.save` (DCP) wrote into one of weft, once.

    From any number of ranks, under any strategy of torch. Nothing in the files is executed: their pickles are read as
    plain values, and a file with anything else in it is refused. Tensors are put together one by one when they are
    written: memory is a few times the largest of them.

    What the state consists of is seen from it, at any depth: a module and an optimizer, such as
    `{"model": ..., "optimizer": ...}`, the same within `{"app": ...}`, or a module's `state_dict()` alone. What has
    `param_groups` is an optimizer, also with `flatten_optimizer_state_dict`; what consists of tensors is a module,
    unless `like` has another object of that name; what a GradScaler saved is the scale of the loss; any other dict,
    such as that of a scheduler or a StatefulDataLoader, is an object. Each keeps the last part of its name: give
    `weft.checkpointable` these names, which are in `objects` of the result.

    Names of parameters are in the file if its state came from torch's `get_state_dict`. For an optimizer that was saved
    by its own `state_dict()`, `like` has to give them: the objects of the program by name, on meta is enough.

    What cannot be carried over is in `left`: single numbers and tensors beside the objects, of which
    `step` is taken; random states, which torch has no form for. Compressed files are not read.

    Changes: a new checkpoint in `out`. On an error nothing is written. Collectives: none.

    Args:
        folder: The `checkpoint_id` given to `torch.distributed.checkpoint.save`.
        out: Directory of checkpoints, as given to `weft.save`.
        like: Objects of the program by these names, {"model": model, "optimizer": optimizer}; what is saved is
            compared with their names and shapes.
        skip: Names of objects that are left out.
        step: Of the checkpoint; default: what is called `step`, `global_step` or `iteration`, else how often the
            optimizer has stepped.

    Returns:
        The folder of the checkpoint, its step, the names of its objects, and what stays behind.

    Raises:
        CheckpointError: A file is missing, not whole, or holds more than values; it does not fit `like`, or `like` is
            needed; or `out` has this step, a newer one, or checkpoints of another run.
        TypeError: An object holds something else than tensors and plain values; the text names it.
        OSError: A file cannot be read, or the disk is full.

    Example:
        >>> import tempfile, torch, warnings, weft
        >>> import torch.distributed.checkpoint as dcp
        >>> state = {"model": torch.nn.Linear(2, 2).state_dict()}
        >>> with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # that there is one process
        ...     _ = dcp.save(state, checkpoint_id=folder + "/theirs", no_dist=True)
        ...     found = weft.interop.import_dcp(folder + "/theirs", folder + "/run", step=7)
        >>> found.path.name, found.objects
        ('step-00000007', ('model',))
    """
    what, place = "import_dcp", Path(folder)
    if not (place / METADATA).exists():
        raise CheckpointError(
            f"import_dcp: {place} is no whole checkpoint of torch.distributed.checkpoint",
            found=listed(sorted(path.name for path in place.glob("*"))) or "no folder, or an empty one",
            expected=f"the folder given to dcp.save, with {METADATA}, which is written when all else is there",
            fix="weft.interop.import_dcp(checkpoint_id, out)  # of the last save that has ended",
        )
    found, given = Found(), dict(like or {})
    parts = _parts(read_dcp(what, place))
    names = [path[-1] if path else "model" for path, _ in parts]
    parts_by_name = {
        name if names.count(name) == 1 else ".".join(path): value
        for name, (path, value) in zip(names, parts, strict=True)
    }
    kept = {name: value for name, value in parts_by_name.items() if name not in skip}
    for name, value in kept.items():
        if _is_module(value) and isinstance(given.get(name, nn.Module()), nn.Module):
            found.weights[name] = plain_weights(what, name, value, given)
    for name, value in kept.items():
        if name in found.weights:
            continue
        if step is None and name in _STEPS and isinstance(value, (int, torch.Tensor)):
            step = int(value)
        elif not isinstance(value, dict):
            found.left.append(f"{name}: {'a tensor' if isinstance(value, torch.Tensor) else repr(value)[:60]}")
        elif _is_optimizer(value):
            groups, names_here = _unflattened(value), names_in(given, name)
            found.optimizers[name] = named_groups(what, place, name, groups, found.weights, names_here)
            if "param_groups" not in value:
                found.left.append(f"{name}: which parameters were a group; those with the same options are one")
        elif {"scale", "growth_tracker"} <= {str(key).strip("_") for key in value}:
            loss_scale(what, place / METADATA, value, found)
        else:
            found.values[name] = _with_numbers(value)
    found.left.append("random states: new ones are drawn from seed and step")
    return write_imported(what, place.resolve().parent, out, step, found)


def _with_numbers(value: Any) -> Any:
    """Values of an object, with whole numbers for keys that DCP has made text of, as milestones of a schedule."""
    if not isinstance(value, dict):
        return value
    are_numbers = all(isinstance(key, str) and key.isdecimal() for key in value)
    return {int(key) if are_numbers else key: _with_numbers(each) for key, each in value.items()}


def _is_optimizer(value: Mapping[str, Any]) -> bool:
    """Whether this is the state of an optimizer, nested or flat."""
    return any(str(name).partition(".")[0] == "param_groups" for name in value)


def _is_module(value: Any) -> bool:
    if not isinstance(value, dict) or not value or _is_optimizer(value):
        return False
    return all(isinstance(each, torch.Tensor) or is_extra(str(name)) for name, each in value.items())


def _parts(tree: dict[str, Any]) -> list[tuple[tuple[str, ...], Any]]:
    """The objects in a state, by path: dicts around an optimizer or a module are no objects themselves."""

    def walk(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        if isinstance(node, dict) and not _is_optimizer(node) and not _is_module(node):
            inner = [each for each in node.values() if isinstance(each, dict)]
            if not path or any(_is_optimizer(each) or _is_module(each) for each in inner):
                for name, each in node.items():
                    yield from walk(each, (*path, str(name)))
                return
        yield path, node

    return list(walk(tree, ()))


def _unflattened(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of an optimizer whose keys are "state.<name>.<key>" and "param_groups.<name>.<option>".

    It says of each parameter what its options are; those with the same ones are a group.
    """
    if "param_groups" in saved:
        return saved
    found: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for path, value in saved.items():
        kind, _, rest = path.partition(".")
        name, _, key = rest.rpartition(".")
        found[kind].setdefault(name, {})[key] = value
    groups: dict[str, dict[str, Any]] = {}
    for name, options in found["param_groups"].items():
        groups.setdefault(repr(sorted(options.items())), {**options, "params": []})["params"].append(name)
    return {"state": found["state"], "param_groups": list(groups.values())}
