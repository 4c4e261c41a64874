"""Checkpoints in a directory, which all ranks see."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from weft.checkpoint.format.manifest import NAME, STEP, Manifest, read_manifest, step_of
from weft.checkpoint.format.plain_files import digest_of, raise_if_unreadable, read_plain, why_not_plain
from weft.checkpoint.format.safetensors_write import new_file, sync_folder, take_name, write_bytes
from weft.checkpoint.storage.protocol import Draft, changed_bytes
from weft.errors import CheckpointError


class Directory:
    """A `Storage`: each checkpoint is a folder that appeared with one rename."""

    def __init__(self, where: Path) -> None:
        self.where = where

    # -- what is there ---------------------------------------------------------------------------

    def check_place(self, what: str) -> None:
        """See `Storage`: a directory can neither be there nor be made where a file is, or a link to nothing."""
        found = next((place for place in (self.where, *self.where.parents) if os.path.lexists(place)), None)
        if found is None or found.is_dir():
            return
        raise CheckpointError(
            f"{what}: {self.where} is not a directory of checkpoints",
            found=f"{found} is {'a symbolic link to nothing' if found.is_symlink() else 'a file'}",
            expected="a directory, or for a new run a path that does not exist yet",
            fix="mount the file system that it is on, or name another directory",
        )

    def exists(self) -> bool:
        """See `Storage`."""
        return self.where.is_dir()

    def names(self) -> list[str]:
        """See `Storage`."""
        try:
            found = [path for path in self.where.iterdir() if STEP.fullmatch(path.name)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted((path.name for path in found if path.is_symlink() or path.is_dir()), key=step_of)

    def is_one(self) -> bool:
        """See `Storage`."""
        return os.path.lexists(self.where / NAME) or any(self.where.glob("rank-*.safetensors"))

    def stamp(self, name: str) -> object:
        """See `Storage`."""
        state = (self.where / name / NAME).lstat()
        return state.st_ino, state.st_mtime_ns, state.st_size

    def manifest(self, name: str) -> Manifest:
        """See `Storage`."""
        return read_manifest(self.where / name)

    def sizes(self, name: str, files: Iterable[str]) -> dict[str, int | str]:
        """See `Storage`."""
        return {file: _size(self.where / name / file) for file in files}

    def digest(self, folder: str, file: str, kind: str) -> str:
        """See `Storage`."""
        return digest_of(self.where / folder / file, kind)

    # -- a new one -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """See `Storage`: one job saves at a time. The lock ends with the process."""
        self.check_place("save")
        made = [folder for folder in (self.where, *self.where.parents) if not folder.exists()]
        self.where.mkdir(parents=True, exist_ok=True)
        for folder in made:
            sync_folder(folder.parent)  # or a power cut takes the new directory away, and all that is in it
        handle = os.open(self.where / ".saving", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        _held().add(handle)
        try:
            with contextlib.suppress(PermissionError):  # another user made it
                os.fchmod(handle, 0o600)  # a user that can read it could take the lock
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CheckpointError(
                    f"save: another process is saving into {self.where}",
                    found="the lock of the directory is held",
                    expected="one job per directory, one save at a time",
                    fix="give each run a directory of its own",
                ) from error
            yield
        finally:
            if handle in _held():  # not in a process that was forked meanwhile
                _held().discard(handle)
                fcntl.flock(handle, fcntl.LOCK_UN)  # also if a process was forked, and has not let go of it yet
                os.close(handle)

    def begin(self, name: str) -> Draft:
        """See `Storage`: its name is used only once.

        A rank that outlived its job and still writes thereby spoils nothing but its own folder.
        """
        # No other job writes there: this one has the lock of the directory.
        for left in (*self.where.glob(".step-*.writing"), *self.where.glob(".step-*.removing")):
            shutil.rmtree(left, ignore_errors=True)
        draft = Draft(f".{name}.{secrets.token_hex(4)}.writing")
        (self.where / draft.folder).mkdir()
        return draft

    def new_file(self, draft: Draft, file: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """See `Storage`."""
        return new_file(self.where / draft.folder / file)

    def commit(self, draft: Draft, name: str, manifest: bytes, *, aside: str) -> None:
        """See `Storage`."""
        hidden, final = self.where / draft.folder, self.where / name
        write_bytes(hidden / NAME, manifest)
        if not _holds(hidden / NAME, manifest):
            raise changed_bytes(final / NAME)
        sync_folder(hidden)
        take_name(hidden, final, self._free_name(name, aside) if os.path.lexists(final) else None)

    def after_commit(self, name: str) -> None:
        """See `Storage`."""
        sync_folder(self.where)

    def abandon(self, draft: Draft) -> None:
        """See `Storage`."""
        shutil.rmtree(self.where / draft.folder, ignore_errors=True)

    # -- old ones --------------------------------------------------------------------------------

    def set_aside(self, name: str) -> None:
        """See `Storage`."""
        (self.where / name).rename(self._free_name(name, "discarded"))

    def _free_name(self, name: str, word: str) -> Path:
        place = self.where / f"{name}.{word}"
        while os.path.lexists(place):
            place = self.where / f"{name}.{secrets.token_hex(4)}.{word}"
        return place

    def delete(self, name: str) -> None:
        """See `Storage`: renamed first."""
        gone = self.where / f".{name}.{secrets.token_hex(4)}.removing"
        (self.where / name).rename(gone)
        shutil.rmtree(gone)


def _holds(path: Path, text: bytes) -> bool:
    try:
        return read_plain(path, most=len(text)) == text
    except ValueError:
        return False


def _size(path: Path) -> int | str:
    try:
        state = path.lstat()
    except OSError as error:
        raise_if_unreadable(error)
        return "no such file"
    return why_not_plain(state.st_mode) or state.st_size


@functools.cache
def _held() -> set[int]:
    """The locks that this process holds. A process forked from it lets go of them.

    The workers of a loader may be forked during a save, and outlive a killed trainer by seconds: the
    trainer that takes its place would find the directory locked.
    """
    held: set[int] = set()

    def let_go() -> None:
        while held:
            os.close(held.pop())

    os.register_at_fork(after_in_child=let_go)
    return held
