"""All or nothing: a checkpoint is written into a hidden folder and appears with one rename.

Which checkpoint is the latest is not written down anywhere; it follows from the folders that are
there and complete.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from weft.checkpoint.files import sync_folder
from weft.checkpoint.manifest import NAME, read_manifest
from weft.errors import CheckpointError, message

__all__ = ["begin", "clean", "complete", "finish", "hidden", "latest", "prune", "target"]

_NAME = re.compile(r"step-(\d{1,18})")


def target(directory: Path, step: int) -> Path:
    """The folder of a step."""
    return directory / f"step-{step:08d}"


def hidden(directory: Path, step: int) -> Path:
    """The folder a step is written into before it is complete."""
    return directory / f".step-{step:08d}.writing"


def begin(directory: Path, step: int) -> None:
    """Make the hidden folder that a checkpoint is written into.

    Raises:
        CheckpointError: The step is saved already.
    """
    directory.mkdir(parents=True, exist_ok=True)
    final = target(directory, step)
    path = hidden(directory, step)
    if final.exists():
        raise CheckpointError(
            message(
                f"save: step {step} is saved already",
                found=str(final),
                expected="a step that is not there: a checkpoint is never changed",
                fix="weft.save(state, directory, step + 1, ctx), or another directory",
            )
        )
    clean(directory)  # nobody writes there: the lock of the directory is ours
    path.mkdir()


def clean(directory: Path) -> None:
    """Remove what saves that were interrupted left behind."""
    for path in directory.glob(".step-*.writing"):
        shutil.rmtree(path, ignore_errors=True)


def finish(written: Path, final: Path) -> None:
    """Let a complete checkpoint appear: the one moment at which it comes into being."""
    sync_folder(written)
    written.rename(final)
    sync_folder(final.parent)


def complete(directory: Path) -> list[Path]:
    """The checkpoints whose manifest can be read, oldest first; by number, not by name."""
    found: list[tuple[int, Path]] = []
    for path in directory.iterdir() if directory.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            try:
                read_manifest(path)
            except CheckpointError:
                continue
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found)]


def latest(directory: str | Path) -> Path | None:
    """Find the newest complete checkpoint in a directory; None if there is none.

    Only manifests are read; `verify` reads all bytes.

    Changes: nothing. Collectives: none.

    Args:
        directory: That was given to `save`; it need not exist.

    Returns:
        The folder of the checkpoint with the largest step.

    Example:
        >>> latest("/nowhere") is None
        True
    """
    found = complete(Path(directory))
    return found[-1] if found else None


def prune(directory: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints; each one's manifest goes first."""
    for path in complete(directory)[:-keep]:
        (path / NAME).unlink()
        shutil.rmtree(path, ignore_errors=True)
