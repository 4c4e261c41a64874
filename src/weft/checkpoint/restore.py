"""`restore`: everything is read and checked before anything is changed, on all ranks."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from weft.checkpoint.draft import lock
from weft.checkpoint.format import commit
from weft.checkpoint.format.hashes import new_hash
from weft.checkpoint.format.manifest import NAME, STEP, Damage, check_place, read_manifest, step_of
from weft.checkpoint.format.safetensors_write import check_file, sync_folder
from weft.checkpoint.history import history_of
from weft.checkpoint.reader import Reader
from weft.checkpoint.state.apply import Loading
from weft.checkpoint.state.collect import Checkpoint
from weft.collectives.on_all_ranks import from_main, gathered, on_all
from weft.context import DistContext
from weft.errors import CheckpointError, listed, type_error

__all__ = ["Restored", "restore"]


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
    """Go on from the newest checkpoint that is whole, saved at any number of ranks and any strategy.

    Everything is checked before anything is changed: all bytes, names, shapes and dtypes; on an error, also one
    of an object's own `load_state_dict`, every rank keeps what it had. Then each rank reads what it holds, in
    place. If a disk dies at that moment all ranks raise, and the state cannot be saved until a restore succeeds.
    A damaged checkpoint is passed over for the one before it; one that cannot be read at this moment is not, and
    neither is one that a newer version of weft wrote: they raise.

    At the number of ranks that saved, the random states go on where they were. At another number,
    each rank gets states of its own, drawn from the step.

    Changes: the objects of `state` in place, and the global random states if they belong to it.
    Collectives: meetings through the store; each rank reads the blocks it holds, and checks its share of
    the files.

    Args:
        state: From `checkpointable`; built as for training, sharded as it may be.
        directory: That was given to `save`, or the folder of one checkpoint.
        ctx: Whose ranks.
        strict: Raise if names differ. Otherwise what is missing keeps its value.
        discard_newer: After going back to an older checkpoint, rename the newer ones in its directory to
            `step-<number>.discarded`. Otherwise a save below one of them raises, as a restart would take that one.

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
    if not isinstance(state, Checkpoint):
        raise type_error(
            "restore: this is not a state",
            found=type(state).__name__,
            expected="what weft.checkpointable returned",
            fix='state, ctx = weft.checkpointable({"model": model}, ctx)',
        )
    ctx.require_collective("restore")
    facts = {"directory": str(directory), "objects": list(state.objects), "strict": strict}
    ctx.agree("restore", {**facts, "discard_newer": discard_newer})
    with torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
        loading, skipped, there = _read(state, Path(directory), ctx, strict=strict)
        if loading is None:
            return None
        try:
            on_all("restore", ctx, loading.load_objects)
        except BaseException:
            loading.undo()
            raise
        state.torn[:] = [str(loading.folder)]
        on_all("restore: done", ctx, loading.put_weights)
        state.torn.clear()
    run = Path(directory) if loading.folder != Path(directory) else loading.folder.parent
    if discard_newer:
        there = from_main("restore", ctx, lambda: _discard_newer(run, loading.manifest.step))
    damaged = [folder for folder, _ in skipped]
    history_of(ctx, run).restored(loading.manifest.run, map(Path, there), damaged)
    return Restored(
        step=loading.manifest.step,
        path=loading.folder,
        world_size=loading.manifest.world_size,
        missing=loading.missing,
        unexpected=loading.unexpected,
        skipped=tuple(skipped),
    )


def _read(
    state: Checkpoint, directory: Path, ctx: DistContext, *, strict: bool
) -> tuple[Loading | None, list[tuple[Path, str]], list[str]]:
    """Read the newest checkpoint that is whole; gives also the newer ones that are not, and why, and all there are."""
    tried: list[str] = []
    skipped: list[tuple[Path, str]] = []
    while True:
        is_one, folders, there = from_main("restore", ctx, lambda: _candidates(directory))
        if folders == tried:
            break
        skipped.clear()  # a run beside may have saved the next and removed these
        for folder in map(Path, folders):
            attempts: list[_Attempt] = []

            def plan(folder: Path = folder, attempts: list[_Attempt] = attempts) -> str | None:
                attempts.append(_Attempt(state, folder, ctx, strict=strict))
                return attempts[0].damage

            damage = next(filter(None, gathered("restore", ctx, plan)), None)
            attempt = attempts[0]
            damage = damage or next(filter(None, gathered("restore", ctx, attempt.check)), None)
            if damage is None:
                return on_all("restore", ctx, attempt.result), skipped, there
            if is_one:
                raise CheckpointError(damage)
            skipped.append((folder, damage))
        tried = folders
    if skipped:
        raise CheckpointError(
            f"restore: no checkpoint in {directory} is whole",
            found=listed(" ".join(line.strip() for line in why.splitlines()[:2]) for _, why in skipped),
            expected="at least one whole checkpoint",
            fix="restore the files from a copy, or start anew in another directory",
        )
    return None, [], []


def _candidates(directory: Path) -> tuple[bool, list[str], list[str]]:
    """Whether this is the folder of one checkpoint, the checkpoints to be tried, and all in the directory."""
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
    handle = lock(directory)
    try:
        for path in commit.named_folders(directory):
            if step_of(path) > step:
                commit.rename_as(path, "discarded")
        sync_folder(directory)
        return [str(path) for path in commit.named_folders(directory)]
    finally:
        os.close(handle)


class _Attempt:
    """What comes of looking at a checkpoint on this rank: it is damaged, or does not fit, or can be put in place.

    Attributes:
        damage: What is damaged, as far as manifest and sizes tell.
    """

    def __init__(self, state: Checkpoint, folder: Path, ctx: DistContext, *, strict: bool) -> None:
        self.damage: str | None = None
        self._folder = folder
        self._failure: CheckpointError | None = None
        try:
            self._manifest = read_manifest(folder)
            for name, entry in self._manifest.files.items():
                check_file(folder, name, self._manifest, content=False)
                new_hash(entry.hash)  # before anything is read: is it installed?
        except Damage as error:
            self.damage = str(error)
            return
        self._reader = Reader(folder, self._manifest, ctx)
        try:
            self._loading = Loading(state, self._reader, ctx, strict=strict)
        except CheckpointError as error:  # it may not fit because it is damaged
            self._failure = error

    def check(self) -> str | None:
        """Compare this rank's share of the files with their hashes.

        Returns:
            What is damaged.
        """
        try:
            self._reader.check()
            check_place(self._folder, self._manifest)
        except Damage as error:
            return str(error)
        return None

    def result(self) -> Loading:
        """What can be put in place.

        Raises:
            CheckpointError: It does not fit.
        """
        if self._failure is not None:
            raise self._failure
        self._loading.check_values()
        return self._loading
