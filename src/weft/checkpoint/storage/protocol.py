"""Where checkpoints lie: what a directory and an object store have in common, so that both give the same guarantees.

[Note: all or nothing] A checkpoint is written as a draft, which is not taken for one, and comes into being in one
moment: a directory renames a hidden folder, an object store gets the manifest. Nothing that is there already is changed
before that moment, and nothing older is removed before it. Which checkpoint is the latest is written down nowhere; it
follows from those that are there and complete.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from weft.checkpoint.format.manifest import Manifest


class Draft(NamedTuple):
    """The place of a checkpoint that is being written; of this one save, and of no other.

    Attributes:
        folder: The name of its folder.
        suffix: What its files are called besides.
    """

    folder: str
    suffix: str = ""

    def file(self, rank: int, world_size: int) -> str:
        """The name of the file of a rank."""
        return f"rank-{rank:05d}-of-{world_size:05d}{self.suffix}.safetensors"


class Storage(Protocol):
    """The checkpoints of a run, each with a name such as step-00000010.

    Whatever cannot be read or written raises `OSError`.
    """

    @property
    def where(self) -> Path:
        """The directory, or the URL."""
        ...

    # -- what is there ---------------------------------------------------------------------------

    def check_place(self, what: str) -> None:
        """Raise `CheckpointError` if something else is there."""

    def exists(self) -> bool:
        """Whether there may be checkpoints at all."""
        ...

    def names(self) -> list[str]:
        """What has the name of a checkpoint, oldest first: also what is damaged, or a link."""
        ...

    def is_one(self) -> bool:
        """Whether this is the place of one checkpoint, whole or not, instead of several."""
        ...

    def stamp(self, name: str) -> object:
        """What changes with the manifest of a checkpoint."""
        ...

    def manifest(self, name: str) -> Manifest:
        """The manifest of a checkpoint, checked; raises `Damage` if there is none."""
        ...

    def sizes(self, name: str, files: Iterable[str]) -> dict[str, int | str]:
        """The size of each of these files; in words, what is there if that is no file."""
        ...

    def digest(self, folder: str, file: str, kind: str) -> str:
        """The hash of a file as it lies there."""
        ...

    # -- a new one -------------------------------------------------------------------------------

    def lock(self) -> AbstractContextManager[None]:
        """Keep other jobs from saving here, as far as they can be kept; raises `CheckpointError` if one does."""
        ...

    def begin(self, name: str) -> Draft:
        """Begin a checkpoint, and remove what saves that were interrupted have left."""
        ...

    def new_file(self, draft: Draft, file: str) -> AbstractContextManager[IO[bytes]]:
        """A file of a draft, to be written."""
        ...

    def commit(self, draft: Draft, name: str, manifest: bytes, *, aside: str) -> None:
        """Make a draft a checkpoint; one that has its name gets another, with the word `aside` behind it.

        Raises:
            OSError: It could not be, or what is read back of it differs.
        """

    def after_commit(self, name: str) -> None:
        """What makes a checkpoint last, or be found sooner."""

    def abandon(self, draft: Draft) -> None:
        """Remove a draft; never raises."""

    # -- old ones --------------------------------------------------------------------------------

    def set_aside(self, name: str) -> None:
        """Give a checkpoint a name that is not one of a checkpoint: the same, with `.discarded` behind it."""

    def delete(self, name: str) -> None:
        """Remove a checkpoint, so that no half of it is ever seen; raises `OSError` if something stays."""


def changed_bytes(file: Path) -> OSError:
    """What to raise if a file of a draft cannot be read back."""
    problem = "what is read back differs from what was written; nothing was committed"
    return OSError(errno.EIO, problem, str(file))
