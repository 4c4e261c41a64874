"""`save`: every rank writes its part, the main rank commits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from weft.checkpoint.draft import complete, outline, start_draft
from weft.checkpoint.format import commit
from weft.checkpoint.format.manifest import MAX_STEP
from weft.checkpoint.format.remote import place
from weft.checkpoint.format.safetensors_write import write_tensors
from weft.checkpoint.state.collect import Checkpoint, around, check_state
from weft.checks import check_count
from weft.collectives.on_all_ranks import on_all
from weft.context import DistContext
from weft.errors import CheckpointError
from weft.peers.pretended import PretendedGroup

__all__ = ["come_together", "counted", "save"]


def save(state: Checkpoint, directory: str | Path, step: int, ctx: DistContext, *, keep: int | None = None) -> Path:
    """Write a checkpoint; when it returns, on any rank, it is on the disk and complete.

    Each rank writes the blocks it holds; tensors that all ranks hold are divided among them. The checkpoint is written
    to a hidden folder and appears with one rename, after every file was flushed to disk; a run that is killed at any
    moment leaves the checkpoints before it as they were. A damaged checkpoint of the same step, which `restore` passed
    over, is renamed to `step-<number>.damaged`.

    In an elastic job, nothing is written during a step that has failed, which is repeated, nor if another replica has
    saved this step.

    Changes: nothing of the state; the directory. Collectives: a few gatherings of names and hashes.

    Args:
        state: From `checkpointable`.
        directory: Of the run, on a file system all ranks share; created if missing. Or a URL that fsspec knows,
            such as "s3://bucket/run" (extra `remote`): each rank writes to this machine and sends its file,
            and the manifest, sent last, commits.
        step: Number of the checkpoint, >= 0 and below 10**18; its folder is `step-<number>`.
        ctx: The context whose ranks take part.
        keep: After the checkpoint is complete and was read back, remove all but the newest `keep` checkpoints by step.
            Those known to be damaged do not count; what cannot be removed is left, with a warning.

    Returns:
        The folder of the checkpoint; of a URL, a path that prints as one.

    Raises:
        CheckpointError: The step has already been saved, or a newer one is there that this job did not save since it
            restored; the directory is that of another run; another process writes there; or ranks differ.
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
    where = come_together("save", state, directory, step, ctx, keep)
    with around("save", state, ctx):
        brought, mine = on_all("save", ctx, lambda: outline(state, ctx))
        if isinstance(ctx.world.group, PretendedGroup):
            return counted(where, step, mine, ctx.world.group)
        draft = start_draft("save", where, step, ctx)
        if draft is not None:
            with draft.ending:
                complete("save", draft, step, brought, lambda path: write_tensors(path, mine), ctx, keep=keep)
    return commit.target(where, step)


def come_together(
    what: str, state: Checkpoint, directory: str | Path, step: int, ctx: DistContext, keep: int | None
) -> Path:
    """What every save begins with: arguments, the save before it, and whether all ranks are here.

    Returns:
        The directory.

    Raises:
        TypeError: This is not a state.
        ValueError: An argument is out of range.
        CheckpointError: The state was not restored to the end.
        PeerError: A rank does not come, or failed.
        BaseException: Of the save before it, which ran in the background and failed unseen.
    """
    check_state(what, state)
    fix = f"weft.{what}(state, directory, step, ctx, keep=3)"
    check_count(what, "step", step, least=0, below=MAX_STEP + 1, fix=fix)
    if keep is not None:
        check_count(what, "keep", keep, fix=fix)
    ctx.require_collective(what)
    if state.torn:
        raise CheckpointError(
            f"{what}: the state is part of another checkpoint",
            found=f"weft.restore of {state.torn[0]} failed after it had changed some tensors",
            expected="a state that belongs to one step",
            fix="weft.restore(state, directory, ctx) until it succeeds, or build the objects anew",
        )
    where = place(directory)
    facts = {"step": step, "directory": str(where), "objects": list(state.objects), "keep": keep}
    on_all(what, ctx, lambda: _end_of_running(ctx), facts)
    return where


def counted(directory: Path, step: int, written: Mapping[str, torch.Tensor], group: PretendedGroup) -> Path:
    """In a rehearsal, note what this rank would write; the folder, which is not made."""
    group.saved = sum(tensor.nbytes for tensor in written.values())
    return commit.target(directory, step)


def _end_of_running(ctx: DistContext) -> None:
    """Wait for a save in the background; raises its error if nobody has seen it."""
    background = ctx.world.root.background
    failure = None if background is None else background.finish(math.inf)
    if failure is not None:
        raise failure
