"""`restore`: everything is read and checked before anything is changed, on all ranks."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import torch

from weft.checkpoint.format.hashes import new_hash
from weft.checkpoint.format.manifest import Damage, Manifest, read_manifest, step_of
from weft.checkpoint.history import history_of
from weft.checkpoint.reader import Reader
from weft.checkpoint.state.apply import RestorePlan, check_values, load_objects, put_weights, request
from weft.checkpoint.state.collect import Checkpoint, check_state, with_user_hooks
from weft.checkpoint.storage.copies import Copies, raise_damage_on_all, share_copies
from weft.checkpoint.storage.directory import Directory
from weft.checkpoint.storage.find import check_files, checkpoint_names, locate, path_or_url, storage_of
from weft.checkpoint.storage.protocol import Storage
from weft.collectives.on_all_ranks import from_main, on_all
from weft.context import DistContext
from weft.errors import CheckpointError, listed


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
            URL the checkpoint is copied first, once per machine, to a temporary folder of this user.
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
        where = path_or_url(directory)
        one = from_main("restore", ctx, lambda: _one_of(where))
        storage = storage_of(where if one is None else where.parent)
        with share_copies("restore", storage, ctx) as here:
            found, skipped, there = _newest(state, storage, one, here, ctx, strict=strict)
            if found is None:
                return None
            plan, name = found
            with with_user_hooks("restore", state, ctx):
                with contextlib.ExitStack() as undo:
                    on_all("restore", ctx, lambda: load_objects(plan, ctx, undo))
                    undo.pop_all()
                state.torn[:] = [here.named(str(plan.reader.folder))]
                on_all("restore: done", ctx, lambda: put_weights(plan, ctx))
                state.torn.clear()
    manifest = plan.reader.manifest
    if discard_newer and not ctx.world.pretended:
        there = from_main("restore", ctx, lambda: _discard_newer(storage, manifest.step))
    history_of(ctx, storage.where).note_restored(manifest.run, manifest.step, there, [each for each, _ in skipped])
    return Restored(
        step=manifest.step,
        path=storage.where / name,
        world_size=manifest.world_size,
        missing=plan.missing,
        unexpected=plan.unexpected,
        skipped=tuple((storage.where / each, why) for each, why in skipped),
    )


def _one_of(where: Path) -> str | None:
    """The name of the checkpoint that is at a path; None if that is a directory of them."""
    storage, name = locate(where)
    if name is None:
        storage.check_place("restore")
    return name


def _newest(
    state: Checkpoint, storage: Storage, one: str | None, here: Copies, ctx: DistContext, *, strict: bool
) -> tuple[tuple[RestorePlan, str] | None, list[tuple[str, str]], list[str]]:
    """The newest checkpoint that is whole, the newer ones that are not and why, and the names of all there are."""
    while True:
        there = from_main("restore", ctx, lambda: checkpoint_names(storage))
        skipped: list[tuple[str, str]] = []
        for name in there[::-1] if one is None else [one]:
            try:
                return (_planned(state, here.bring(name), ctx, strict=strict), name), skipped, there
            except Damage as error:
                if one is not None:
                    raise
                if name not in from_main("restore", ctx, storage.names):
                    break  # a run beside has saved another one and removed it: look again
                skipped.append((name, here.named(str(error))))
        else:
            break
    if skipped:
        raise CheckpointError(
            f"restore: no checkpoint in {storage.where} is complete",
            found=listed(" ".join(line.strip() for line in why.splitlines()[:2]) for _, why in skipped),
            expected="at least one complete checkpoint",
            fix="restore the files from a copy, or start anew in another directory",
        )
    return None, [], []


def _planned(state: Checkpoint, folder: Path, ctx: DistContext, *, strict: bool) -> RestorePlan:
    """Read a checkpoint as far as nothing is changed.

    Raises:
        Damage: It is damaged; on every rank, also if only one has found it.
        CheckpointError: It is whole, and does not fit.
        OSError: It cannot be read.
        PeerError: Another rank failed.
    """

    def plan() -> tuple[Reader, RestorePlan | CheckpointError]:
        reader = Reader(folder, _inspected(folder), ctx)
        try:
            return reader, request(state, reader, ctx, strict=strict)
        except CheckpointError as error:  # it may not fit because it is damaged
            return reader, error

    def checked() -> RestorePlan:
        if isinstance(found, CheckpointError):
            raise found
        check_values(found)
        return found

    reader, found = raise_damage_on_all("restore", ctx, plan)
    raise_damage_on_all("restore", ctx, reader.check)
    return on_all("restore", ctx, checked)


def _inspected(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    check_files(Directory(folder.parent), folder.name, manifest, manifest.files, content=False)
    for kind in {entry.hash for entry in manifest.files.values()}:
        new_hash(kind)  # before anything is read: is it installed?
    return manifest


def _discard_newer(storage: Storage, step: int) -> list[str]:
    """Rename checkpoints newer than a step; gives those that are left."""
    with storage.lock():
        for name in storage.names():
            if step_of(name) > step:
                storage.set_aside(name)
        left = storage.names()
        if left:
            storage.after_commit(left[-1])
        return left
