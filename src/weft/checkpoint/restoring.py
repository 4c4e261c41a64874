"""`restore`: everything is read and checked before anything is changed, on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.checkpoint import commit
from weft.checkpoint.files import Damage, check_file
from weft.checkpoint.hashes import new_hash
from weft.checkpoint.loading import Loading
from weft.checkpoint.manifest import NAME, STEP, check_place, read_manifest
from weft.checkpoint.node_memory import NodeMemory, Offer
from weft.checkpoint.ranks import from_main, gathered, on_all
from weft.checkpoint.reader import Reader
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
    Collectives: meetings through the store; each rank reads the blocks it holds, and checks its share of
    the files. What the ranks of a node want alike is read once, into memory that they share until it is copied, or
    passed on from one to the others. What is not in the page cache and nobody else reads goes past it.

    Args:
        state: From `checkpointable`; built as for training, sharded as it may be.
        directory: That was given to `save`, or the folder of one checkpoint.
        ctx: Whose ranks.
        strict: Raise if names differ. Otherwise what is missing keeps its value.

    Returns:
        Step, and what was missing, left over, or skipped; None if there is no checkpoint yet.

    Raises:
        CheckpointError: There are checkpoints and none is whole, or it does not fit the state.
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
    loading, skipped = _read(state, Path(directory), ctx, strict=strict)
    if loading is None:
        return None
    try:
        on_all("restore", ctx, loading.load_objects)
    except BaseException:
        loading.undo()
        raise
    loading.copy_weights()
    ctx.agree("restore: done")
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
) -> tuple[Loading | None, list[tuple[Path, str]]]:
    """Read the newest checkpoint that is whole; gives also the newer ones that are not, and why."""
    is_one, folders = from_main("restore", ctx, lambda: _candidates(directory))
    skipped: list[tuple[Path, str]] = []
    for folder in map(Path, folders):
        attempt, told = _planned(state, folder, ctx, strict=strict)
        damage = next((one["damage"] for one in told if one["damage"]), None)
        if damage is None:
            attempt.let_read(told)
            damage = next(filter(None, gathered("restore", ctx, attempt.read)), None)
        if damage is None:
            return on_all("restore", ctx, attempt.result), skipped
        if is_one:
            raise CheckpointError(damage)
        skipped.append((folder, damage))
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


def _candidates(directory: Path) -> tuple[bool, list[str]]:
    """Whether this is the folder of one checkpoint, and the checkpoints to be tried."""
    match = STEP.fullmatch(directory.name)
    is_named = match is not None and directory == commit.target(directory.parent, int(match[1]))
    if (directory / NAME).exists() or is_named or any(directory.glob("rank-*.safetensors")):
        return True, [str(directory)]  # also without its manifest: that is damage, and no new beginning
    return False, [str(path) for path in reversed(commit.named_folders(directory))]


def _planned(
    state: Checkpoint, folder: Path, ctx: DistContext, *, strict: bool
) -> tuple[_Attempt, list[dict[str, Any]]]:
    """What this rank would read, and what every rank tells of that."""
    attempts: list[_Attempt] = []

    def plan() -> dict[str, Any]:
        attempts.append(_Attempt(state, folder, ctx, strict=strict))
        return attempts[0].told()

    told = gathered("restore", ctx, plan)
    return attempts[0], told


class _Attempt:
    """What comes of reading a checkpoint on this rank: it is damaged, or does not fit, or is read.

    What was read is put in place later, when all ranks have found their share to be whole.
    """

    def __init__(self, state: Checkpoint, folder: Path, ctx: DistContext, *, strict: bool) -> None:
        self._ctx = ctx
        self._folder = folder
        self._damage: str | None = None
        self._failure: CheckpointError | None = None
        self._offer: Offer | None = None
        self._memory: NodeMemory | None = None
        self._only_check = False
        self._others_read = 0  # a bit for each file
        try:
            self._manifest = read_manifest(folder)
            for name, entry in self._manifest.files.items():
                check_file(folder, name, self._manifest, content=False)
                new_hash(entry.hash)  # before anything is read: is it installed?
        except CheckpointError as error:
            self._damage = str(error)
            return
        self._reader = Reader(folder, self._manifest, ctx)
        try:
            self._loading = Loading(state, self._reader, ctx, strict=strict)
        except CheckpointError as error:
            self._failure = error

    def told(self) -> dict[str, Any]:
        """What the other ranks have to know before it is read, as JSON."""
        if self._damage is None and self._failure is None:
            self._offer = self._reader.offer()
        offer = None if self._offer is None else self._offer.told(self._ctx)
        files = self._reader.files() if self._offer is not None else []
        return {
            "damage": self._damage,
            "fits": self._failure is None,
            "offer": offer,
            "node": self._ctx.node_rank,
            "files": hex(sum(1 << number for number in files)),
        }

    def let_read(self, told: list[dict[str, Any]]) -> None:
        """Prepare for `read`, by what all ranks told. A collective."""
        self._only_check = not all(one["fits"] for one in told)
        if self._offer is not None and not self._only_check:
            self._memory = NodeMemory.of("restore", self._ctx, self._offer, [one["offer"] for one in told])
            self._offer.close()
            passing = self._memory is not None and self._memory.passing is not None
            known = self._memory.ranks if self._memory is not None and passing else [self._ctx.rank]
            for rank, one in enumerate(told):
                if one["node"] == self._ctx.node_rank and rank not in known:
                    self._others_read |= int(one["files"], 16)

    def read(self) -> str | None:
        """Read what this rank needs, while it compares its share of the files with their hashes.

        Returns:
            What is damaged.
        """
        try:
            if not self._only_check:
                self._fill()
            if self._only_check or self._failure is not None:  # it may not fit because it is damaged
                self._reader.check()
            check_place(self._folder, self._manifest)
        except CheckpointError as error:
            return str(error)
        finally:
            if self._memory is not None and self._memory.passing is not None:
                self._memory.passing.close()
        return None

    def _fill(self) -> None:
        try:
            others = [number for number in range(len(self._manifest.files)) if self._others_read >> number & 1]
            self._reader.fill(self._memory, others)
        except Damage:
            raise
        except CheckpointError as error:
            self._failure = error

    def result(self) -> Loading:
        """What was read.

        Raises:
            CheckpointError: It does not fit.
        """
        if self._failure is not None:
            raise self._failure
        self._loading.check_values()
        return self._loading
