"""Reading what may come from anywhere: plain files, to their end, and JSON; or an error that says why not.

Only what was read and differs is damage. A file that is there and does not give its bytes, as on a network file system
in trouble, is tried again, and then an `OSError`.

Python reads values of JSON that lie in each other by recursion. A text may be too deep for that, and then it is none
that weft wrote; or the program has called weft deep in a recursion of its own, and then it says nothing about the text.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from weft.checkpoint.format.hashes import new_hash

_BLOCK = 2**20  # bytes; fits into the caches of a core
_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)
_PAUSES_S = (0.01, 0.05, 0.2)  # before a read that returned nothing is tried again


def raise_if_unreadable(error: Exception) -> None:
    """Raise an error of the system, unless it means that there is no such file: only that is damage.

    Raises:
        OSError: The file cannot be read, perhaps only at this moment.
    """
    if isinstance(error, OSError) and error.errno not in _MISSING:
        raise error


def why_not_plain(mode: int) -> str | None:
    """What stands where a plain file should; None if it is one."""
    if stat.S_ISREG(mode):
        return None
    return "a symbolic link" if stat.S_ISLNK(mode) else "something that is no file"


def open_plain(path: Path) -> tuple[int, int]:
    """Open a plain file to read it; nothing else, as opening a device may do something, and a link leads elsewhere.

    Returns:
        Its descriptor, and its size in bytes.

    Raises:
        ValueError: It is something else.
        OSError: It cannot be opened.
    """
    _check(path.lstat())
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        state = os.fstat(handle)
        _check(state)  # something else may have taken its place
        if hasattr(os, "posix_fadvise"):  # the kernel reads further ahead: from a disk, half of the CPU time
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    except BaseException:
        os.close(handle)
        raise
    return handle, state.st_size


def _check(state: os.stat_result) -> None:
    found = why_not_plain(state.st_mode)
    if found is not None:
        raise ValueError(found)


@contextlib.contextmanager
def closing(handle: int) -> Iterator[int]:
    """Close the descriptor of a file or folder at the end.

    Yields:
        The descriptor.
    """
    try:
        yield handle
    finally:
        os.close(handle)


def read_into(handle: int, memory: memoryview, at: int) -> None:
    """Read from a place in a file until memory is full.

    Raises:
        ValueError: The file ends before.
        OSError: It cannot be read.
    """
    pauses = iter(_PAUSES_S)
    while memory:
        count = os.preadv(handle, [memory], at)
        if count == 0:
            if os.fstat(handle).st_size <= at:
                raise ValueError("the file ends too early")
            pause = next(pauses, None)
            if pause is None:
                raise OSError(errno.EIO, f"a read at byte {at} returned nothing, before the end of the file")
            time.sleep(pause)
        memory, at = memory[count:], at + count


def read_plain(path: Path, *, most: int) -> bytes:
    """All bytes of a plain file.

    Raises:
        ValueError: It is something else, or has more bytes than `most`.
        OSError: It cannot be read.
    """
    handle, size = open_plain(path)
    with closing(handle):
        if size > most:
            raise ValueError(f"{size} bytes, more than {most}")
        text = bytearray(size)
        read_into(handle, memoryview(text), 0)
        return bytes(text)


def digest_of(path: Path, kind: str) -> str:
    """The hash of a plain file.

    Raises:
        ValueError: It is something else, or has become shorter.
        OSError: It cannot be read.
    """
    digest, memory = new_hash(kind), memoryview(bytearray(_BLOCK))
    handle, size = open_plain(path)
    with closing(handle):
        for at in range(0, size, _BLOCK):
            block = memory[: size - at]
            read_into(handle, block, at)
            digest.update(block)
    return digest.hexdigest()


# -- JSON -------------------------------------------------------------------------------------------


def parse_json(text: bytes) -> Any:
    """The value of a text in JSON, in UTF-8.

    Raises:
        ValueError: It is no JSON, or nested too deep.
    """
    try:
        return json.loads(text)
    except RecursionError:  # because of this stack?
        with ThreadPoolExecutor(1) as threads:  # whose stack is empty
            alone = threads.submit(json.loads, text)
    try:
        return alone.result()
    except RecursionError:
        raise ValueError("values in each other, too deep to be read") from None
