"""Temporary folders that only this user can enter, and that do not stay if the process is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from weft.checkpoint.format.plain_files import closing

_OLD_S = 600.0  # a folder of this age is locked, or was left behind


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder among the temporary files, with a name that cannot be guessed; gone at the end.

    Folders of earlier processes of this user, which were killed, are removed first.

    Yields:
        The folder.
    """
    prefix = f"weft-copy-{os.getuid()}-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        remove_if_left(left, age_s=_OLD_S)
    with (
        tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name,
        closing(os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as handle,
    ):
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield Path(name)


def remove_if_left(folder: Path, *, age_s: float = 0.0) -> None:
    """Remove a folder of this user that no process holds a lock of; never raises.

    Args:
        folder: Which.
        age_s: How long ago it was changed at least.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(OSError), closing(os.open(folder, flags)) as handle:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        state = os.fstat(handle)
        if state.st_uid == os.getuid() and time.time() - state.st_mtime >= age_s:
            shutil.rmtree(folder, ignore_errors=True)
