"""`restore` and `verify`: everything is read and checked before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.checkpoint import commit
from weft.checkpoint.files import check_file, open_tensors
from weft.checkpoint.manifest import Manifest, read_manifest
from weft.checkpoint.pieces import Block, block_of, local_part, overlap
from weft.checkpoint.state import (
    Checkpoint,
    collect,
    decode,
    kept_by,
    parameter_names,
    set_random_state,
)
from weft.collectives import broadcast
from weft.context import DistContext
from weft.context.world import disagree
from weft.engines.torch.shards import is_sharded
from weft.errors import CheckpointError, listed, message

__all__ = ["Restored", "restore", "verify"]


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What was restored.

    Attributes:
        step: Number given to `save`.
        path: The folder of the checkpoint.
        world_size: Ranks that saved it.
        missing: Names that the state has and the checkpoint has not; they kept their values.
        unexpected: Names that only the checkpoint has.
        skipped: Newer checkpoints that are damaged: folder, and what is wrong with it.
    """

    step: int
    path: Path
    world_size: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    skipped: tuple[tuple[Path, str], ...] = ()


def verify(path: str | Path) -> Manifest:
    """Read every byte of a checkpoint and compare it with its manifest.

    Changes: nothing. Collectives: none.

    Args:
        path: The folder of one checkpoint.

    Returns:
        Its manifest.

    Raises:
        CheckpointError: Something is missing or damaged; the text names the file and a tensor in it.

    Example:
        >>> import tempfile, weft
        >>> state, ctx = weft.checkpointable({"model": nn.Linear(2, 2)}, weft.local())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     weft.verify(weft.save(state, folder, 1, ctx)).step
        1
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    for name in manifest.files:
        check_file(folder, name, manifest)
    return manifest


def restore(state: Checkpoint, directory: str | Path, ctx: DistContext, *, strict: bool = True) -> Restored | None:
    """Go on from the newest checkpoint that is whole, saved at any number of ranks and any strategy.

    All bytes are checked, and all tensors read, before anything is changed: on an error every
    rank keeps what it had. A damaged checkpoint is passed over for the one before it.

    At the number of ranks that saved, the random states go on where they were. At another number,
    each rank gets states of its own, drawn from the step.

    Changes: the objects of `state` in place, and the global random states if they belong to it.
    Collectives: meetings through the store and a few broadcasts of names; each rank reads the
    blocks it holds.

    Args:
        state: From `checkpointable`; built as for training, sharded as it may be.
        directory: That was given to `save`, or the folder of one checkpoint.
        ctx: Whose ranks.
        strict: Raise if names differ. Otherwise what is missing keeps its value.

    Returns:
        Step, and what was missing, left over, or skipped; None if there is no checkpoint yet.

    Raises:
        CheckpointError: There are checkpoints and none is whole, or it does not fit the state.
        TypeError: `state` is something else.
        PeerError: Another rank failed.

    Example:
        >>> import tempfile, weft
        >>> state, ctx = weft.checkpointable({"model": nn.Linear(2, 2)}, weft.local())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     first = weft.restore(state, folder, ctx)
        ...     _ = weft.save(state, folder, 7, ctx)
        ...     first, weft.restore(state, folder, ctx).step
        (None, 7)
    """
    if not isinstance(state, Checkpoint):
        raise TypeError(
            message(
                "restore: this is not a state",
                found=type(state).__name__,
                expected="what weft.checkpointable returned",
                fix='state, ctx = weft.checkpointable({"model": model}, ctx)',
            )
        )
    ctx.agree("restore", {"directory": str(directory), "objects": list(state.objects), "strict": strict})
    found = _on_all(ctx, lambda: _choose(Path(directory)) if ctx.is_main else None)
    chosen, skipped = broadcast(found, ctx)
    if chosen is None:
        return None
    folder = Path(chosen)
    manifest = read_manifest(folder)
    loading = _on_all(ctx, lambda: _Loading(state, folder, manifest, ctx, strict=strict))
    loading.apply()
    ctx.agree("restore: done")
    return Restored(
        step=manifest.step,
        path=folder,
        world_size=manifest.world_size,
        missing=loading.missing,
        unexpected=loading.unexpected,
        skipped=tuple((Path(path), why) for path, why in skipped),
    )


def _on_all(ctx: DistContext, work: Callable[[], Any]) -> Any:
    try:
        result = work()
    except BaseException as error:
        disagree(ctx.world, error)
        raise
    ctx.agree("restore")
    return result


def _choose(directory: Path) -> tuple[str | None, list[tuple[str, str]]]:
    """The newest checkpoint that is whole, and the newer ones that are not."""
    if (directory / "manifest.json").exists():
        verify(directory)
        return str(directory), []
    skipped: list[tuple[str, str]] = []
    for path in reversed(commit.complete(directory)):
        try:
            verify(path)
        except CheckpointError as error:
            skipped.append((str(path), str(error)))
            continue
        return str(path), skipped
    if skipped:
        raise CheckpointError(
            message(
                f"restore: no checkpoint in {directory} is whole",
                found="; ".join(why.splitlines()[0] for _, why in skipped[:3]),
                expected="at least one whole checkpoint",
                fix="restore the files from a copy, or start anew in another directory",
            )
        )
    return None, []


class _Loading:
    """Everything read and checked, on this rank, ready to be put in place."""

    def __init__(self, state: Checkpoint, folder: Path, manifest: Manifest, ctx: DistContext, *, strict: bool) -> None:
        self._state = state
        self._manifest = manifest
        self._ctx = ctx
        self._reader = _Reader(folder, manifest)
        content = collect(state)
        names = parameter_names(state)
        modules = {key: obj for key, obj in state.objects.items() if isinstance(obj, nn.Module)}
        live = {name: p for key, obj in modules.items() for name, p in _own(key, obj)}
        wanted = {**content.tensors, **{name: content.tensors[origin] for name, origin in content.same_as.items()}}
        self.missing = tuple(
            [name for name in wanted if name in live and name not in manifest.tensors]
            + [key for key in state.objects if key not in manifest.values]
            + [name for name in content.tensors if "/#" in name and name not in manifest.tensors]
        )
        self.unexpected = tuple(
            [name for name in manifest.tensors if self._is_module(name) and name not in wanted]
            + [key for key in manifest.values if key not in state.objects]
        )
        self._check(strict=strict, wanted=wanted)
        self._modules = {
            name: self._reader.read(name, tensor)
            for name, tensor in content.tensors.items()
            if name in live and name in manifest.tensors
        }
        self._live = live
        self._others = {
            key: self._read_other(key, obj, names, content.tensors)
            for key, obj in state.objects.items()
            if key in manifest.values
        }

    def _is_module(self, name: str) -> bool:
        return isinstance(self._state.objects.get(name.partition("/")[0]), nn.Module)

    def _check(self, *, strict: bool, wanted: Mapping[str, torch.Tensor]) -> None:
        entries = self._manifest.tensors
        wrong = [
            f"{name} of shape {entries[name].shape}, not {tuple(tensor.shape)}"
            for name, tensor in wanted.items()
            if name in entries and self._is_module(name) and entries[name].shape != tuple(tensor.shape)
        ]
        if wrong or (strict and (self.missing or self.unexpected)):
            found = [f"shapes: {listed(wrong)}"] if wrong else []
            found += [f"not in the checkpoint: {listed(self.missing)}"] if self.missing else []
            found += [f"only in the checkpoint: {listed(self.unexpected)}"] if self.unexpected else []
            raise CheckpointError(
                message(
                    "restore: the checkpoint does not fit the state",
                    found="; ".join(found),
                    expected="the objects, names and shapes that were saved",
                    fix="weft.restore(state, directory, ctx, strict=False)  # keeps what is missing as it is",
                )
            )

    def _read_other(self, key: str, obj: Any, names: Mapping[int, str], current: Mapping[str, torch.Tensor]) -> Any:
        """The state of one object, in the form its `load_state_dict` takes."""
        saved = self._manifest.values[key]
        if isinstance(obj, torch.optim.Optimizer):
            return self._read_optimizer(key, obj, names, saved)
        return decode(saved, lambda name: self._reader.read(name, current.get(name)))

    def _read_optimizer(self, key: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str], saved: Any) -> Any:
        groups = [[names[id(p)] for p in entry["params"]] for entry in optimizer.param_groups]
        if [entry["params"] for entry in saved["groups"]] != groups:
            differing = [
                f"group {index}: {listed(set(a) ^ set(b)) or 'another order'}"
                for index, (a, b) in enumerate(zip([e["params"] for e in saved["groups"]], groups, strict=False))
                if a != b
            ]
            raise CheckpointError(
                message(
                    f"restore: {key} has other parameters or groups than were saved",
                    found=listed(differing) or f"{len(saved['groups'])} groups saved, {len(groups)} here",
                    expected="the same parameters in the same groups",
                    fix="build the optimizer as it was, or leave it out of the state",
                )
            )
        by_name = {names[id(p)]: p for entry in optimizer.param_groups for p in entry["params"]}
        order = {name: index for index, name in enumerate(name for group in groups for name in group)}

        def read(name: str) -> torch.Tensor:
            owner = name.removeprefix(f"{key}/state/").rpartition("/")[0]
            parameter = by_name.get(owner)
            shape = self._manifest.tensors[name].shape
            alike = parameter is not None and shape == tuple(parameter.shape) and len(shape) > 0
            return self._reader.read(name, parameter if alike else None)

        state = {order[name]: decode(entry, read) for name, entry in saved["state"].items()}
        start, described = 0, []
        for group, entry in zip(groups, saved["groups"], strict=True):
            described.append({**decode(entry["options"], read), "params": list(range(start, start + len(group)))})
            start += len(group)
        return {"state": state, "param_groups": described}

    @torch.no_grad()
    def apply(self) -> None:
        """Put everything in place."""
        for name, values in self._modules.items():
            local_part(self._live[name]).copy_(local_part(values))
        for key, loaded in self._others.items():
            obj = self._state.objects[key]
            if isinstance(obj, nn.Module):
                _set_extra(obj, loaded["extra"])
                for kind, offer in kept_by(obj).items():
                    if kind in loaded["transforms"]:
                        offer.load_state_dict(loaded["transforms"][kind])
            else:
                obj.load_state_dict(loaded)
        if self._state.rng:
            self._set_random()

    def _set_random(self) -> None:
        ranks, ctx = self._manifest.ranks, self._ctx
        if len(ranks) == ctx.world_size:
            set_random_state(ranks[ctx.rank].get("rng", {}), ctx.device)
            return
        import random  # noqa: PLC0415

        import numpy as np  # noqa: PLC0415

        seed = hash((self._manifest.step, ctx.rank, ctx.seed)) % 2**32
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)


def _own(key: str, module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            yield f"{key}/{name}", value


def _set_extra(module: nn.Module, extra: Mapping[str, Any]) -> None:
    for name, value in extra.items():
        module.get_submodule(name.rpartition(".")[0]).set_extra_state(value)


class _Reader:
    """Reads tensors of a checkpoint, cut up as they are needed."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest
        self._files: dict[str, Any] = {}

    def read(self, name: str, like: torch.Tensor | None) -> torch.Tensor:
        """Read a tensor, cut up as `like`, or whole if that is None.

        Raises:
            CheckpointError: There is no such tensor, or a file does not hold what the manifest says.
        """
        entry = self._manifest.tensors.get(name)
        if entry is not None and entry.same_as is not None:
            name, entry = entry.same_as, self._manifest.tensors[entry.same_as]
        if entry is None:
            raise CheckpointError(
                message(
                    f"restore: {name} is not in the checkpoint",
                    found=f"{len(self._manifest.tensors)} other tensors",
                    expected="every tensor that its values mention",
                    fix="restore an older checkpoint",
                )
            )
        block = Block((0,) * len(entry.shape), entry.shape) if like is None else block_of(like)[0]
        values = torch.empty(block.shape, dtype=getattr(torch, entry.dtype))
        for piece in entry.pieces:
            common = overlap(block, Block(piece.offsets, piece.shape))
            if common is None and block.size:
                continue
            if common is not None:
                source = self._slice(piece.file, name, common, piece.offsets)
                place = tuple(
                    slice(at - start, at - start + size)
                    for at, start, size in zip(common.offsets, block.offsets, common.shape, strict=True)
                )
                values[place] = source
        if like is None or not is_sharded(like):
            return values
        from torch.distributed.tensor import DTensor  # noqa: PLC0415  (half a second of imports in torch)

        cut: Any = like
        moved = values.to(local_part(like).device)
        return DTensor.from_local(
            moved, cut.device_mesh, cut.placements, run_check=False, shape=cut.shape, stride=cut.stride()
        )

    def _slice(self, file: str, name: str, block: Block, offsets: tuple[int, ...]) -> torch.Tensor:
        try:
            if file not in self._files:
                self._files[file] = open_tensors(self._folder / file)
            handle = self._files[file]
            if not block.shape:
                whole: torch.Tensor = handle.get_tensor(name)
                return whole
            place = tuple(
                slice(at - start, at - start + size)
                for at, start, size in zip(block.offsets, offsets, block.shape, strict=True)
            )
            part: torch.Tensor = handle.get_slice(name)[place]
        except Exception as error:
            raise CheckpointError(
                message(
                    f"restore: {name} cannot be read from {file}",
                    found=f"{type(error).__name__}: {error}",
                    expected="the tensor that the manifest describes",
                    fix="restore an older checkpoint",
                )
            ) from error
        return part
