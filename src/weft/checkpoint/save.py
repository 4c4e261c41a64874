"""`save`: every rank writes its part, the main rank commits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from weft.checkpoint.draft import Keep, complete, outline, start_saving
from weft.checkpoint.format.manifest import MAX_STEP
from weft.checkpoint.format.safetensors_write import tensor_parts
from weft.checkpoint.state.collect import Checkpoint, check_state, with_user_hooks
from weft.checkpoint.storage.find import path_or_url, step_folder
from weft.checks import as_number, check_count
from weft.collectives.on_all_ranks import on_all
from weft.context import DistContext
from weft.errors import CheckpointError, type_error, value_error
from weft.peers.pretended import PretendedGroup


def save(
    state: Checkpoint,
    directory: str | Path,
    step: int,
    ctx: DistContext,
    *,
    keep: int | None = None,
    keep_best: int | None = None,
    score: float | None = None,
    fresh: bool = False,
) -> Path:
    """Write a checkpoint; when it returns, on any rank, it is on the disk and complete.

    Each rank writes the blocks it holds; tensors that all ranks hold are divided among them. The checkpoint is written
    to a hidden folder, read back, and appears with one rename, after every file was flushed to disk; a run that is
    killed at any moment leaves the checkpoints before it as they were. Once it is there nothing raises: what fails
    then, such as the removal of an older one, is a warning.

    A step that was saved already is left as it is if the values are the same, so a save may be tried again; otherwise
    it is an error. A damaged checkpoint of the same step is renamed to `step-<number>.damaged`. A job that has resumed
    from another directory goes back to that step: checkpoints of the same run here that are newer belong to a branch
    that was abandoned, and those in the way are renamed to `step-<number>.discarded`.

    In an elastic job, nothing is written during a step that has failed, which is repeated, nor if another replica has
    saved this step.

    Changes: nothing of the state; the directory. Collectives: a few gatherings of names and hashes.

    Args:
        state: From `checkpointable`.
        directory: Of the run, on a file system all ranks share; created if missing. Or a URL that fsspec knows,
            such as "s3://bucket/run" (extra `remote`): each rank writes its file into the store, and the manifest,
            written last, commits.
        step: Number of the checkpoint, >= 0 and below 10**18; its folder is `step-<number>`.
        ctx: The context whose ranks take part.
        keep: After the checkpoint is complete, remove all but the newest `keep` checkpoints by step. Those known to be
            damaged do not count; what cannot be removed is left, with a warning.
        keep_best: Keep, besides, as many of those with the lowest scores. Needs `keep`. None: with a score, none of
            them; without one, all that have a score, which only a save with a score or `keep_best` removes.
        score: How good this one is, such as the loss of an evaluation; lower is better (for an accuracy: `-accuracy`).
            The same on all ranks. None, or a number that is not finite: it is none of the best.
        fresh: Begin a new run in a directory that may hold checkpoints of others: those that this job finds with its
            first save are renamed to `step-<number>.discarded` before anything is written. No effect later, if the job
            has restored from this directory, or in a job started again by its launcher (`ctx.attempt`).

    Returns:
        The folder of the checkpoint; of a URL, a path that prints as one.

    Raises:
        CheckpointError: The step has already been saved with other values, or a newer one is there that this job did
            not save since it restored; the directory is that of another run, and not `fresh`; another job saves there;
            ranks differ; or names or values are too large to be read again.
        TypeError: Something in the state cannot be saved; the text names it.
        ValueError: An argument is out of range.
        PeerError: Another rank failed, or does something else that waits for this one. A rank that is
            merely late is waited for, as long as it lives, up to `ctx.timeout_s`.
        OSError: Writing failed, with the reason of the system; the old checkpoints are as they were.

    Example:
        >>> import tempfile, torch, weft
        >>> state, ctx = weft.checkpointable({"model": torch.nn.Linear(2, 2)}, weft.local())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     weft.save(state, folder, 10, ctx).name
        'step-00000010'
    """
    where, kept = check_ready_to_save("save", state, directory, step, ctx, keep, keep_best, score, fresh)
    with with_user_hooks("save", state, ctx):
        brought, mine = on_all("save", ctx, lambda: outline(state, ctx))
        if isinstance(ctx.world.group, PretendedGroup):
            return note_rehearsed_save(where, step, mine, ctx.world.group)
        saving = start_saving("save", where, step, brought, ctx, fresh=fresh)
        if saving is not None:
            with saving.ending:
                complete(saving, brought, tensor_parts(mine), ctx, keep=kept, score=score)
    return step_folder(where, step)


def check_ready_to_save(
    what: str,
    state: Checkpoint,
    directory: str | Path,
    step: int,
    ctx: DistContext,
    keep: int | None,
    keep_best: int | None,
    score: float | None,
    fresh: bool,
) -> tuple[Path, Keep]:
    """What every save begins with: arguments, the save before it, and whether all ranks are here.

    Returns:
        The directory, and what is kept there.

    Raises:
        TypeError: This is not a state, or the score is no number.
        ValueError: An argument is out of range.
        CheckpointError: The state was not restored to the end.
        PeerError: A rank does not come, or failed.
        BaseException: Of the save before it, which ran in the background and failed unseen.
    """
    check_state(what, state)
    check_count(
        what, "step", step, least=0, below=MAX_STEP + 1, fix=f"weft.{what}(state, directory, 0, ctx)  # a Python int"
    )
    if keep is not None:
        check_count(what, "keep", keep, fix=f"weft.{what}(state, directory, step, ctx, keep=3)")
    fix = f"weft.{what}(state, directory, step, ctx, keep=1, keep_best=3, score=loss)"
    if keep_best is not None:
        check_count(what, "keep_best", keep_best, least=0, fix=fix)
    if keep_best and keep is None:
        raise value_error(
            f"{what}: keep_best = {keep_best} has no effect without keep",
            found=f"keep_best={keep_best}, keep=None: nothing is removed",
            expected="how many of the newest stay, and how many of the best besides",
            fix=fix,
        )
    number = None if isinstance(score, bool) else as_number(score)
    if score is not None and number is None:
        raise type_error(
            f"{what}: score = {score!r:.60} is not a number",
            found=type(score).__name__,
            expected="a float that is the same on all ranks; lower is better",
            fix=f"weft.{what}(state, directory, step, ctx, score=float(loss))",
        )
    ctx.require_collective(what)
    if state.torn:
        raise CheckpointError(
            f"{what}: the state is part of another checkpoint",
            found=f"weft.restore of {state.torn[0]} failed after it had changed some tensors",
            expected="a state that belongs to one step",
            fix="weft.restore(state, directory, ctx)  # until it succeeds; or build the objects anew",
        )
    where = path_or_url(directory)
    facts = {"step": step, "directory": str(where), "objects": list(state.objects), "keep": keep}
    facts |= {"keep_best": keep_best, "score": repr(number), "fresh": fresh}
    on_all(what, ctx, lambda: _end_of_running(ctx), facts)
    return where, Keep(keep, 0 if keep_best is None and score is not None else keep_best)


def note_rehearsed_save(directory: Path, step: int, written: Mapping[str, torch.Tensor], group: PretendedGroup) -> Path:
    """In a rehearsal, note what this rank would write; the folder, which is not made."""
    group.saved = sum(tensor.nbytes for tensor in written.values())
    return step_folder(directory, step)


def _end_of_running(ctx: DistContext) -> None:
    """Wait for a save in the background; raises its error if it was not raised yet."""
    background = ctx.world.root.background
    failure = None if background is None else background.finish(math.inf)
    if failure is not None:
        raise failure
