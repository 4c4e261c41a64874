"""`restore`: everything is read and checked before anything is changed, on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.checkpoint import commit
from weft.checkpoint.files import require_safetensors
from weft.checkpoint.loading import Loading
from weft.checkpoint.manifest import NAME, read_manifest
from weft.checkpoint.ranks import from_main, on_all
from weft.checkpoint.state import Checkpoint
from weft.context import DistContext
from weft.errors import CheckpointError, listed, message

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


def restore(state: Checkpoint, directory: str | Path, ctx: DistContext, *, strict: bool = True) -> Restored | None:
    """Go on from the newest checkpoint that is whole, saved at any number of ranks and any strategy.

    All bytes are checked, and all tensors read, before anything is changed: on an error, also one of
    an object's own `load_state_dict`, every rank keeps what it had. A damaged checkpoint is passed over
    for the one before it.

    At the number of ranks that saved, the random states go on where they were. At another number,
    each rank gets states of its own, drawn from the step.

    Changes: the objects of `state` in place, and the global random states if they belong to it.
    Collectives: meetings through the store; each rank reads the blocks it holds.

    Args:
        state: From `checkpointable`; built as for training, sharded as it may be.
        directory: That was given to `save`, or the folder of one checkpoint.
        ctx: Whose ranks.
        strict: Raise if names differ. Otherwise what is missing keeps its value.

    Returns:
        Step, and what was missing, left over, or skipped; None if there is no checkpoint yet.

    Raises:
        CheckpointError: There are checkpoints and none is whole, or it does not fit the state.
        MissingExtra: The package safetensors is not installed.
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
        raise TypeError(
            message(
                "restore: this is not a state",
                found=type(state).__name__,
                expected="what weft.checkpointable returned",
                fix='state, ctx = weft.checkpointable({"model": model}, ctx)',
            )
        )
    ctx.require_collective("restore")
    ctx.agree("restore", {"directory": str(directory), "objects": list(state.objects), "strict": strict})
    chosen, skipped = from_main("restore", ctx, lambda: _choose(Path(directory)))
    if chosen is None:
        return None
    folder = Path(chosen)
    loading = on_all("restore", ctx, lambda: Loading(state, folder, read_manifest(folder), ctx, strict=strict))
    try:
        on_all("restore", ctx, loading.load_objects)
    except BaseException:
        loading.undo()
        raise
    loading.copy_weights()
    ctx.agree("restore: done")
    return Restored(
        step=loading.manifest.step,
        path=folder,
        world_size=loading.manifest.world_size,
        missing=loading.missing,
        unexpected=loading.unexpected,
        skipped=tuple((Path(path), why) for path, why in skipped),
    )


def _choose(directory: Path) -> tuple[str | None, list[tuple[str, str]]]:
    """The newest checkpoint that is whole, and the newer ones that are not."""
    require_safetensors()
    if (directory / NAME).exists():
        commit.verify(directory)
        return str(directory), []
    skipped: list[tuple[str, str]] = []
    for path in reversed(commit.folders(directory)):
        try:
            commit.verify(path)
        except CheckpointError as error:
            skipped.append((str(path), str(error)))
            continue
        return str(path), skipped
    if skipped:
        raise CheckpointError(
            message(
                f"restore: no checkpoint in {directory} is whole",
                found=listed(" ".join(line.strip() for line in why.splitlines()[:2]) for _, why in skipped),
                expected="at least one whole checkpoint",
                fix="restore the files from a copy, or start anew in another directory",
            )
        )
    return None, []
