"""`restore`: everything is read and checked before anything is changed, on all ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from weft.checkpoint.draft import lock
from weft.checkpoint.format import commit
from weft.checkpoint.format.hashes import new_hash
from weft.checkpoint.format.manifest import NAME, STEP, Damage, Manifest, read_manifest, step_of
from weft.checkpoint.format.remote import Mirror, mirror_of, place
from weft.checkpoint.format.safetensors_write import check_file, sync_folder
from weft.checkpoint.history import history_of
from weft.checkpoint.reader import Reader
from weft.checkpoint.state.apply import Plan, check_values, load_objects, put_weights, request
from weft.checkpoint.state.collect import Checkpoint, around, check_state
from weft.collectives.on_all_ranks import from_main, gathered, on_all
from weft.context import DistContext
from weft.errors import CheckpointError, listed

__all__ = ["Restored", "restore"]

R = TypeVar("R")


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


def restore(
    state: Checkpoint, directory: str | Path, ctx: DistContext, *, strict: bool = True, discard_newer: bool = False
) -> Restored | None:
    """Resume from the newest intact checkpoint, saved on any number of ranks and under any strategy.

    Everything is checked before anything is changed: all bytes, names, shapes and dtypes; on an error, also one of an
    object's own `load_state_dict`, every rank keeps what it had. Then each rank reads what it holds, in place. If a
    disk fails at that moment, all ranks raise, and the state cannot be saved until a restore succeeds. A damaged
    checkpoint is skipped in favor of the one before it; one that cannot be read at this moment, or that a newer version
    of weft wrote, raises instead.

    On the same number of ranks, the random states continue where they were. On a different number, each rank gets its
    own states, derived from the step.

    Changes: the objects of `state` in place, and the global random states if they belong to it.
    Collectives: meetings through the store; each rank reads the blocks it holds, and checks its share of
    the files.

    Args:
        state: From `checkpointable`; built as for training, sharded as it may be.
        directory: That was given to `save`, or the folder of one checkpoint; or the URL of one of these. From a
            URL the checkpoint is fetched first, once per machine.
        ctx: The context whose ranks take part.
        strict: Raise if names differ. Otherwise what is missing keeps its value.
        discard_newer: After going back to an older checkpoint, rename the newer ones in its directory to
            `step-<number>.discarded`. Otherwise saving an older step than one of them raises, as a restart would use
            the newer one.

    Returns:
        Step, and what was missing, left over, or skipped; None if there is no checkpoint yet.

    Raises:
        CheckpointError: There are checkpoints and none is whole, or it does not fit the state; `directory` is
            something else; or another version of weft wrote the newest one.
        OSError: Something cannot be read.
        MissingExtra: It was written with the package xxhash, which is not installed here.
        TypeError: `state` is something else.
        PeerError: Another rank failed.

    Example:
        >>> import tempfile, torch, weft
        >>> state, ctx = weft.checkpointable({"model": torch.nn.Linear(2, 2)}, weft.local())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     first = weft.restore(state, folder, ctx)
        ...     _ = weft.save(state, folder, 7, ctx)
        ...     first, weft.restore(state, folder, ctx).step
        (None, 7)
    """
    check_state("restore", state)
    ctx.require_collective("restore")
    facts = {"directory": str(directory), "objects": list(state.objects), "strict": strict}
    ctx.agree("restore", {**facts, "discard_newer": discard_newer})
    with torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
        where = place(directory)
        plan, skipped, there = _newest(state, where, ctx, strict=strict)
        if plan is None:
            return None
        with around("restore", state, ctx):
            with contextlib.ExitStack() as undo:
                on_all("restore", ctx, lambda: load_objects(plan, ctx, undo))
                undo.pop_all()
            state.torn[:] = [str(plan.reader.folder)]
            on_all("restore: done", ctx, lambda: put_weights(plan, ctx))
            state.torn.clear()
    folder, manifest = plan.reader.folder, plan.reader.manifest
    mirror = _mirror(where)
    if mirror is not None:
        mirror.drop(folder.name)
        folder, skipped = mirror.url / folder.name, [(mirror.url / one.name, why) for one, why in skipped]
    run = where if folder != where else folder.parent
    if discard_newer and not ctx.world.pretended:
        there = from_main("restore", ctx, lambda: _discard_newer(run, manifest.step))
    history_of(ctx, run).restored(manifest.run, map(Path, there), [damaged for damaged, _ in skipped])
    return Restored(
        step=manifest.step,
        path=folder,
        world_size=manifest.world_size,
        missing=plan.missing,
        unexpected=plan.unexpected,
        skipped=tuple(skipped),
    )


def _newest(
    state: Checkpoint, directory: Path, ctx: DistContext, *, strict: bool
) -> tuple[Plan | None, list[tuple[Path, str]], list[str]]:
    """The newest checkpoint that is whole; also the newer ones that are not, and why, and all there are."""
    tried: list[str] = []
    skipped: list[tuple[Path, str]] = []
    while (found := from_main("restore", ctx, lambda: _candidates(directory)))[1] != tried:
        is_one, tried, there = found
        skipped.clear()  # a run beside may have saved the next and removed these
        for name in tried:
            folder = _fetched(name, directory, ctx)
            try:
                return _planned(state, folder, ctx, strict=strict), skipped, there
            except Damage as error:
                if is_one:
                    raise
                skipped.append((folder, str(error)))
    if skipped:
        raise CheckpointError(
            f"restore: no checkpoint in {directory} is complete",
            found=listed(" ".join(line.strip() for line in why.splitlines()[:2]) for _, why in skipped),
            expected="at least one complete checkpoint",
            fix="restore the files from a copy, or start anew in another directory",
        )
    return None, [], []


def _planned(state: Checkpoint, folder: Path, ctx: DistContext, *, strict: bool) -> Plan:
    """Read a checkpoint as far as nothing is changed.

    Raises:
        Damage: It is damaged; on every rank, also if only one has found it.
        CheckpointError: It is whole, and does not fit.
        OSError: It cannot be read.
        PeerError: Another rank failed.
    """

    def plan() -> tuple[Reader, Plan | CheckpointError]:
        reader = Reader(folder, _inspected(folder), ctx)
        try:
            return reader, request(state, reader, ctx, strict=strict)
        except CheckpointError as error:  # it may not fit because it is damaged
            return reader, error

    def checked() -> Plan:
        if isinstance(found, CheckpointError):
            raise found
        check_values(found)
        return found

    reader, found = _undamaged(ctx, plan)
    _undamaged(ctx, reader.check)
    return on_all("restore", ctx, checked)


def _mirror(directory: Path) -> Mirror | None:
    """Of a URL: that of a directory, or of one checkpoint in it."""
    return mirror_of(directory.parent if STEP.fullmatch(directory.name) else directory)


def _fetched(name: str, directory: Path, ctx: DistContext) -> Path:
    """The folder of a checkpoint on this machine."""
    mirror = _mirror(directory)
    return Path(name) if mirror is None else on_all("restore", ctx, lambda: mirror.fetch(Path(name).name))


def _inspected(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    for name, entry in manifest.files.items():
        check_file(folder, name, manifest, content=False)
        new_hash(entry.hash)  # before anything is read: is it installed?
    return manifest


def _undamaged(ctx: DistContext, work: Callable[[], R]) -> R:
    """Do work on every rank; if it finds damage on one, all raise the first."""
    results: list[R] = []

    def damage() -> str | None:
        try:
            results.append(work())
        except Damage as error:
            return str(error)
        return None

    for text in gathered("restore", ctx, damage):
        if text is not None:
            raise Damage(text)
    return results[0]


def _candidates(directory: Path) -> tuple[bool, list[str], list[str]]:
    """Whether this is the folder of one checkpoint, the checkpoints to be tried, and all in the directory."""
    mirror = _mirror(directory)
    if mirror is not None:
        named = mirror.refresh()
        is_one = bool(STEP.fullmatch(directory.name))
        return is_one, [directory.name] if is_one else named[::-1], named[::-1]
    commit.check_directory("restore", directory)
    match = STEP.fullmatch(directory.name)
    is_named = match is not None and directory == commit.target(directory.parent, int(match[1]))
    if (directory / NAME).exists() or is_named or any(directory.glob("rank-*.safetensors")):
        # Also without its manifest: that is damage, and no new beginning.
        return True, [str(directory)], [str(path) for path in commit.named_folders(directory.parent)]
    there = [str(path) for path in reversed(commit.named_folders(directory))]
    return False, there, there


def _discard_newer(directory: Path, step: int) -> list[str]:
    """Rename checkpoints newer than a step; gives those that are left."""
    mirror = _mirror(directory)
    if mirror is not None:
        for name in mirror.refresh():
            if step_of(Path(name)) > step:
                mirror.discard(name)
        return mirror.refresh()
    handle = lock(directory)
    try:
        for path in commit.named_folders(directory):
            if step_of(path) > step:
                commit.rename_as(path, "discarded")
        sync_folder(directory)
        return [str(path) for path in commit.named_folders(directory)]
    finally:
        os.close(handle)
