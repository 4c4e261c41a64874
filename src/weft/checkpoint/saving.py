"""`save`: every rank writes its part, the main rank commits."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from weft.checkpoint import commit
from weft.checkpoint.files import write_tensors, write_text
from weft.checkpoint.manifest import NAME, FileEntry, Manifest, Piece, TensorEntry
from weft.checkpoint.pieces import block_of, local_part, writers
from weft.checkpoint.state import Checkpoint, Content, collect, random_state
from weft.collectives import gather_objects
from weft.context import DistContext
from weft.context.world import disagree
from weft.engines.torch.shards import is_sharded
from weft.errors import CheckpointError, message

__all__ = ["save"]

R = TypeVar("R")


def save(state: Checkpoint, directory: str | Path, step: int, ctx: DistContext, *, keep: int | None = None) -> Path:
    """Write a checkpoint; when it returns, on any rank, it is on the disk and complete.

    Each rank writes the blocks it holds, tensors that all hold are shared out. The checkpoint is
    written into a hidden folder and appears with one rename, after every file was brought to the
    disk; a run that is killed at any moment leaves the checkpoints before it as they were.

    Changes: nothing of the state; the directory. Collectives: a few gatherings of names and hashes.

    Args:
        state: From `checkpointable`.
        directory: Of the run, on a file system all ranks share; made if missing.
        step: Number of the checkpoint, >= 0; its folder is `step-<number>`.
        ctx: Whose ranks.
        keep: After the checkpoint is complete, remove all but the newest so many.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: The step is saved already, or somebody else writes there.
        TypeError: Something in the state cannot be saved; the text names it.
        ValueError: An argument is out of range.
        PeerError: Another rank failed, or did not call `save`.
        OSError: Writing failed, with the reason of the system; the old checkpoints are as they were.

    Example:
        >>> import tempfile, weft
        >>> state, ctx = weft.checkpointable({"model": torch.nn.Linear(2, 2)}, weft.local())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     weft.save(state, folder, 10, ctx).name
        'step-00000010'
    """
    step, where = _checked(state, directory, step, keep)
    ctx.agree("save", {"step": step, "directory": str(where), "objects": list(state.objects), "keep": keep})
    content = _on_all(ctx, lambda: collect(state))
    with _only_saver(where, ctx):
        _on_main(ctx, lambda: commit.begin(where, step))
        hidden = commit.hidden(where, step)
        try:
            mine = _on_all(ctx, lambda: _write(hidden, content, ctx))
            mine["rank"] = {"rng": random_state(ctx.device)} if state.rng else {}
            parts = gather_objects(mine, ctx)
            final = commit.target(where, step)
            _on_main(ctx, lambda: _commit(hidden, final, step, content, parts))
        except BaseException:
            if ctx.is_main:
                commit.clean(where)
            raise
    if keep is not None:
        _on_main(ctx, lambda: commit.prune(where, keep))
    return final


def _checked(state: Checkpoint, directory: str | Path, step: int, keep: int | None) -> tuple[int, Path]:
    if not isinstance(state, Checkpoint):
        raise TypeError(
            message(
                "save: this is not a state",
                found=type(state).__name__,
                expected="what weft.checkpointable returned",
                fix='state, ctx = weft.checkpointable({"model": model}, ctx)',
            )
        )
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ValueError(
                message(
                    f"save: {name} = {value!r} cannot be used",
                    found=repr(value),
                    expected=f"a whole number >= {least}",
                    fix="weft.save(state, directory, step, ctx, keep=3)",
                )
            )
    return step, Path(directory)


def _on_all(ctx: DistContext, work: Callable[[], R]) -> R:
    """Do work that may fail on one rank; the peers, which are at the next meeting, learn of it."""
    try:
        result = work()
    except BaseException as error:
        disagree(ctx.world, error)
        raise
    ctx.agree("save")
    return result


def _on_main(ctx: DistContext, work: Callable[[], R]) -> R | None:
    return _on_all(ctx, lambda: work() if ctx.is_main else None)


@contextlib.contextmanager
def _only_saver(directory: Path, ctx: DistContext) -> Iterator[None]:
    """Hold the lock of the directory on the main rank: one job saves at a time."""
    handle = _on_main(ctx, lambda: _lock(directory))
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _lock(directory: Path) -> int:
    directory.mkdir(parents=True, exist_ok=True)
    handle = os.open(directory / ".saving", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise CheckpointError(
            message(
                f"save: somebody else is saving into {directory}",
                found="the lock of the directory is held",
                expected="one job per directory, one save at a time",
                fix="give each run a directory of its own",
            )
        ) from error
    return handle


def _write(hidden: Path, content: Content, ctx: DistContext) -> dict[str, Any]:
    """Write this rank's file; tells what is in it."""
    whole = {name: tensor for name, tensor in content.tensors.items() if not is_sharded(tensor)}
    chosen = writers(whole, ctx.world_size)
    name = f"rank-{ctx.rank:05d}-of-{ctx.world_size:05d}.safetensors"
    mine: dict[str, torch.Tensor] = {}
    pieces: dict[str, list[list[int]]] = {}
    for tensor_name, tensor in content.tensors.items():
        block, writes = block_of(tensor)
        if not block.size or (chosen[tensor_name] != ctx.rank if tensor_name in chosen else not writes):
            continue
        part = local_part(tensor)
        # A view would take the whole storage with it.
        alone = part.numel() * part.element_size() == part.untyped_storage().nbytes()
        mine[tensor_name] = (
            part if alone and part.is_contiguous() else part.clone(memory_format=torch.contiguous_format)
        )
        pieces[tensor_name] = [list(block.offsets), list(block.shape)]
    entry = write_tensors(hidden / name, mine)
    return {"file": name, "entry": asdict(entry), "pieces": pieces, "values": _texts(content)}


def _texts(content: Content) -> dict[str, str]:
    """The plain values of each object as text, to be compared (a NaN is equal to itself there)."""
    return {key: json.dumps(value) for key, value in content.values.items()}


def _commit(hidden: Path, final: Path, step: int, content: Content, parts: list[dict[str, Any]]) -> None:
    different = [
        f"{key} on rank {rank}"
        for rank, part in enumerate(parts)
        for key in content.values
        if part["values"].get(key) != parts[0]["values"].get(key)
    ]
    if different:
        raise CheckpointError(
            message(
                "save: plain values differ between the ranks",
                found=", ".join(different[:5]),
                expected="the same state on all ranks (tensors may be cut up; random states are kept per rank)",
                fix="gather it first: weft.gather_objects(value, ctx)",
            )
        )
    tensors: dict[str, TensorEntry] = {}
    for name, tensor in content.tensors.items():
        found = tuple(
            Piece(file=part["file"], offsets=tuple(part["pieces"][name][0]), shape=tuple(part["pieces"][name][1]))
            for part in parts
            if name in part["pieces"]
        )
        dtype = str(tensor.dtype).removeprefix("torch.")
        tensors[name] = TensorEntry(dtype=dtype, shape=tuple(tensor.shape), pieces=found)
    for name, origin in content.same_as.items():
        entry = tensors[origin]
        tensors[name] = TensorEntry(dtype=entry.dtype, shape=entry.shape, same_as=origin)
    manifest = Manifest(
        step=step,
        world_size=len(parts),
        tensors=tensors,
        values=content.values,
        ranks=[part["rank"] for part in parts],
        files={part["file"]: FileEntry(**part["entry"]) for part in parts},
    )
    write_text(hidden / NAME, manifest.text())
    commit.finish(hidden, final)
