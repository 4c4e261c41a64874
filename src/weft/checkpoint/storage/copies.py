"""Checkpoints on this machine: those in a directory as they are, those at a URL as copies that only this user sees."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from weft.checkpoint.format.manifest import STEP, Damage
from weft.checkpoint.storage.bucket import Bucket
from weft.checkpoint.storage.directory import Directory
from weft.checkpoint.storage.find import find_one, locate, storage_of
from weft.checkpoint.storage.private_folder import private_folder
from weft.checkpoint.storage.protocol import Storage
from weft.collectives.on_all_ranks import from_main, gathered
from weft.context import DistContext
from weft.errors import CheckpointError, PeerError

R = TypeVar("R")


class Copies:
    """Where this rank finds checkpoints; what `copies` gives.

    Args:
        what: Who asks, for the texts of errors.
        storage: Where they are.
        folder: Of this machine, for copies; None if none are needed.
        makes: Whether this rank makes the copies, or another one that sees the same folder.
        ctx: The context whose ranks ask together.
    """

    def __init__(self, what: str, storage: Storage, folder: Path | None, *, makes: bool, ctx: DistContext) -> None:
        self._what, self._storage, self._folder, self._makes, self._ctx = what, storage, folder, makes, ctx

    def bring(self, name: str) -> Path:
        """The folder of a checkpoint on this machine; all ranks ask for the same. What was brought before is gone.

        Raises:
            Damage: There is none; on every rank.
            OSError: It cannot be read.
            PeerError: Another rank failed.
        """
        if self._folder is None or not isinstance(self._storage, Bucket):
            return self._storage.where / name
        storage, folder = self._storage, self._folder
        copy = folder / (name if STEP.fullmatch(name) else "checkpoint")

        def make() -> None:
            for old in folder.iterdir() if self._makes else ():
                shutil.rmtree(old)
            if self._makes:
                storage.copy(name, copy)

        raise_damage_on_all(self._what, self._ctx, make)
        return copy

    def named(self, text: str) -> str:
        """A text with the names that the files have where they come from."""
        return text if self._folder is None else text.replace(str(self._folder), str(self._storage.where))


@contextlib.contextmanager
def share_copies(what: str, storage: Storage, ctx: DistContext) -> Iterator[Copies]:
    """Let ranks of one machine share the copies of checkpoints at a URL, as long as the body runs.

    Yields:
        What brings a checkpoint here.
    """
    if not isinstance(storage, Bucket):
        yield Copies(what, storage, None, makes=False, ctx=ctx)
        return
    with contextlib.ExitStack() as ending:
        nodes = gathered(what, ctx, lambda: ctx.node_rank)
        first = nodes.index(ctx.node_rank)
        makes = ctx.rank == first
        made = gathered(what, ctx, lambda: str(ending.enter_context(private_folder())) if makes else "")
        folder = Path(made[first])
        if not folder.is_dir():  # ranks of one machine, in containers with folders of their own
            folder, makes = ending.enter_context(private_folder()), True
        found = Copies(what, storage, folder, makes=makes, ctx=ctx)
        try:
            yield found
        except CheckpointError as error:  # which names the files where they come from
            error.args = (found.named(str(error)),)
            raise


def with_newest(what: str, where: Path, ctx: DistContext, work: Callable[[Path], R]) -> R:
    """Do work on one checkpoint on this machine: the one at a path or URL, or the newest complete one there.

    All ranks work on the same one. If a run beside removes it meanwhile, the work is done again, on a newer one. Where
    no checkpoints are, as in a folder of weights, the work gets the path as it is.

    Raises:
        CheckpointError: There is no complete checkpoint at a URL; or of the work.
        PeerError: Another rank failed.
        OSError: Something cannot be read.
    """
    while True:
        name, is_one = from_main(what, ctx, lambda: _chosen(what, where))
        if name is None:
            return work(where)
        storage = storage_of(where.parent if is_one else where)
        with share_copies(what, storage, ctx) as here:
            try:
                return work(here.bring(name))
            except (CheckpointError, PeerError):
                if is_one or name in from_main(what, ctx, storage.names):
                    raise


def _chosen(what: str, where: Path) -> tuple[str | None, bool]:
    """The name of a checkpoint, if there is one, and whether it is the only one that is meant."""
    storage, name = locate(where)
    if name is not None:
        return name, True
    if isinstance(storage, Directory) and not storage.names():
        return None, False
    return find_one(what, where)[1], False


def raise_damage_on_all(what: str, ctx: DistContext, work: Callable[[], R]) -> R:
    """Do work on every rank; if it finds damage on one, all raise the first.

    Raises:
        Damage: On every rank.
        PeerError: Another rank failed.
    """
    results: list[R] = []

    def damage() -> str | None:
        try:
            results.append(work())
        except Damage as error:
            return str(error)
        return None

    for text in gathered(what, ctx, damage):
        if text is not None:
            raise Damage(text)
    return results[0]
