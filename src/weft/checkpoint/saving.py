"""`save`: every rank writes its part, the main rank commits."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint import commit
from weft.checkpoint.files import sync_folder, write_tensors, write_text
from weft.checkpoint.manifest import NAME, FileEntry, Manifest, Piece, TensorEntry, check
from weft.checkpoint.pieces import block_of, local_part, writers
from weft.checkpoint.randomness import random_state
from weft.checkpoint.ranks import from_main, on_all
from weft.checkpoint.state import Checkpoint, Content, collect
from weft.collectives import gather_objects
from weft.context import DistContext
from weft.engines.torch.shards import is_sharded
from weft.errors import CheckpointError, listed, message

__all__ = ["save"]


def save(state: Checkpoint, directory: str | Path, step: int, ctx: DistContext, *, keep: int | None = None) -> Path:
    """Write a checkpoint; when it returns, on any rank, it is on the disk and complete.

    Each rank writes the blocks it holds, tensors that all hold are shared out. The checkpoint is
    written into a hidden folder and appears with one rename, after every file was brought to the
    disk; a run that is killed at any moment leaves the checkpoints before it as they were. A damaged
    checkpoint of the same step, which `restore` passed over, is renamed to `step-<number>.damaged`.

    Changes: nothing of the state; the directory. Collectives: a few gatherings of names and hashes.

    Args:
        state: From `checkpointable`.
        directory: Of the run, on a file system all ranks share; made if missing.
        step: Number of the checkpoint, >= 0; its folder is `step-<number>`.
        ctx: Whose ranks.
        keep: After the checkpoint is complete, remove all but those with the largest so many steps.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: The step is saved already, somebody else writes there, or ranks differ.
        TypeError: Something in the state cannot be saved; the text names it.
        ValueError: An argument is out of range.
        PeerError: Another rank failed, or does something else that waits for this one. A rank that is
            merely late is waited for, as long as it lives, up to `ctx.timeout_s`.
        OSError: Writing failed, with the reason of the system; the old checkpoints are as they were.

    Example:
        >>> import tempfile, weft
        >>> state, ctx = weft.checkpointable({"model": torch.nn.Linear(2, 2)}, weft.local())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     weft.save(state, folder, 10, ctx).name
        'step-00000010'
    """
    step, where = _checked(state, directory, step, keep)
    ctx.require_collective("save")
    ctx.agree("save", {"step": step, "directory": str(where), "objects": list(state.objects), "keep": keep})
    content = on_all("save", ctx, lambda: collect(state))
    with _only_saver(where, ctx):
        hidden = Path(from_main("save", ctx, lambda: str(commit.begin(where, step))))
        final = commit.target(where, step)
        try:
            mine = on_all("save", ctx, lambda: _write(hidden, content, ctx))
            mine["rank"] = {"rng": random_state(ctx.device)} if state.rng else {}
            parts = gather_objects(mine, ctx)
            from_main("save", ctx, lambda: _commit(hidden, final, step, content, parts))
        except BaseException:
            if ctx.is_main:
                shutil.rmtree(hidden, ignore_errors=True)
            raise
        if keep is not None:
            from_main("save", ctx, lambda: commit.prune(where, keep, final))
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


@contextlib.contextmanager
def _only_saver(directory: Path, ctx: DistContext) -> Iterator[None]:
    """Hold the lock of the directory on the main rank: one job saves at a time."""
    held: list[int] = []
    try:
        from_main("save", ctx, lambda: held.append(_lock(directory)))
        yield
    finally:
        for handle in held:
            os.close(handle)


def _lock(directory: Path) -> int:
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for folder in made:
        sync_folder(folder.parent)  # or a power cut takes the new directory away, and all that is in it
    handle = os.open(directory / ".saving", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
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
    pieces: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for tensor_name, tensor in content.tensors.items():
        block, writes = block_of(tensor)
        if not block.size or (chosen[tensor_name] != ctx.rank if tensor_name in chosen else not writes):
            continue
        mine[tensor_name] = local_part(tensor)
        pieces[tensor_name] = (block.offsets, block.shape)
    entry = write_tensors(hidden / name, mine)
    return {"file": name, "entry": asdict(entry), "pieces": pieces, "digests": _digests(content)}


def _digests(content: Content) -> dict[str, str]:
    """The plain values of each object, and what tensors it has, as hashes to be compared."""
    texts = {key: json.dumps(value) for key, value in content.values.items()}  # a NaN equals itself there
    for name, tensor in content.tensors.items():
        texts[name.partition("/")[0]] += f"{name} {tensor.dtype} {tuple(tensor.shape)} {is_sharded(tensor)};"
    for name, origin in content.same_as.items():
        texts[name.partition("/")[0]] += f"{name} = {origin};"
    return {key: hashlib.sha256(text.encode()).hexdigest() for key, text in texts.items()}


def _check_alike(parts: list[dict[str, Any]]) -> None:
    different = [
        f"{key} on rank {rank}"
        for rank, part in enumerate(parts)
        for key, digest in part["digests"].items()
        if digest != parts[0]["digests"].get(key)
    ]
    if different:
        raise CheckpointError(
            message(
                "save: the state differs between the ranks",
                found=listed(different),
                expected="the same plain values, and the same tensors, cut up alike, on all ranks",
                fix="gather it first: weft.gather_objects(value, ctx)",
            )
        )


def _commit(hidden: Path, final: Path, step: int, content: Content, parts: list[dict[str, Any]]) -> None:
    _check_alike(parts)
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
    wrong = check(manifest)
    if wrong:
        raise CheckpointError(
            message(
                "save: the ranks do not hold each tensor exactly once",
                found=listed(wrong),
                expected="tensors that are whole on all ranks, or cut up without gaps",
                fix="report it with the output of weft.explain(ctx)",
            )
        )
    write_text(hidden / NAME, manifest.text())
    commit.finish(hidden, final)
