"""A folder that appears with one rename when it is complete, in the place of an earlier one of its kind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from weft.checkpoint.format.plain_files import closing
from weft.checkpoint.format.safetensors_write import sync_folder, take_name
from weft.checkpoint.state.adapters import CONFIG
from weft.checkpoint.storage.private_folder import remove_if_left
from weft.errors import CheckpointError, listed


@contextlib.contextmanager
def published(out: Path, source: Path, name: str) -> Iterator[Path]:
    """Give a hidden folder beside `out` to write into; it becomes `out` if the body succeeds.

    Between the two renames that replace an earlier export there is none for an instant. What a process
    that was killed left behind is removed by the next; one that still writes holds a lock.

    Yields:
        The hidden folder.

    Raises:
        CheckpointError: `out` holds something else than an earlier export.
    """
    out = out.resolve()
    _check(out, source.resolve(), name)
    out.parent.mkdir(parents=True, exist_ok=True)
    _clean(out, "writing")
    hidden = out.with_name(f".{out.name}.{secrets.token_hex(4)}.writing")
    hidden.mkdir()
    with closing(os.open(hidden, os.O_RDONLY)) as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield hidden
            sync_folder(hidden)
            _check(out, source.resolve(), name)  # again: a good while has passed
            old = out.with_name(f".{out.name}.{secrets.token_hex(4)}.removing")
            take_name(hidden, out, old if out.exists() else None)
            sync_folder(out.parent)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
    _clean(out, "removing")  # not before: if a process was killed between the renames, it is all there was


def _check(out: Path, source: Path, name: str) -> None:
    ours = re.compile(re.escape(name) + r"(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?|" + re.escape(CONFIG))
    foreign, other = None, out
    if out == source or source in out.parents:
        foreign, other = "a checkpoint, which is never changed", source
    elif out.exists() and not out.is_dir():
        foreign = "a file"
    elif out.exists():
        others = sorted(one.name for one in out.iterdir() if not ours.fullmatch(one.name) or not one.is_file())
        foreign = listed(others) if others else None
    if foreign is not None:
        raise CheckpointError(
            f"export: {out} is not replaced",
            found=foreign,
            expected=f"no folder yet, an empty one, or one with an earlier export called {name!r}",
            fix=f'out = "{other.with_name(other.name + "-weights")}"',
        )


def _clean(out: Path, kind: str) -> None:
    """Remove the earlier export, or what processes that were killed had written."""
    left = re.compile(re.escape(f".{out.name}.") + rf"[0-9a-f]{{8}}\.{kind}")
    for path in [one for one in out.parent.iterdir() if left.fullmatch(one.name)]:
        remove_if_left(path)
