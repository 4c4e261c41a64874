"""All or nothing: a checkpoint is written into a hidden folder and appears with one rename.

Which checkpoint is the latest is not written down anywhere; it follows from the folders that are
there and complete. One is removed the same way: renamed first, so that no half of it is ever seen.
"""

from __future__ import annotations

import functools
import secrets
import shutil
from pathlib import Path

from weft.checkpoint.files import check_file, sync_folder
from weft.checkpoint.manifest import NAME, STEP, Manifest, check_place, read_manifest
from weft.errors import CheckpointError, message

__all__ = ["begin", "clean", "finish", "folders", "latest", "named_folders", "prune", "target", "verify"]


def target(directory: Path, step: int) -> Path:
    """The folder of a step."""
    return directory / f"step-{step:08d}"


def begin(directory: Path, step: int) -> Path:
    """Make the hidden folder that a checkpoint is written into; its name is used only once.

    A rank that outlived its job and still writes thereby spoils nothing but its own folder.

    Raises:
        CheckpointError: The step is saved already.
    """
    final = target(directory, step)
    if final.exists() or final.is_symlink():
        _set_aside(final, step)
    clean(directory)  # nobody writes there: the lock of the directory is ours
    path = directory / f".step-{step:08d}.{secrets.token_hex(4)}.writing"
    path.mkdir()
    return path


def _set_aside(final: Path, step: int) -> None:
    """Give a damaged checkpoint another name, so that a run that went back behind it can go on."""
    try:
        verify(final)
    except CheckpointError:
        place = final.with_name(f"{final.name}.damaged")
        while place.exists():
            place = final.with_name(f"{final.name}.{secrets.token_hex(4)}.damaged")
        final.rename(place)
        return
    raise CheckpointError(
        message(
            f"save: step {step} is saved already",
            found=str(final),
            expected="a step that is not there: a checkpoint is never changed",
            fix="weft.save(state, directory, step + 1, ctx), or another directory",
        )
    )


def clean(directory: Path) -> None:
    """Remove what saves and removals that were interrupted left behind."""
    for path in (*directory.glob(".step-*.writing"), *directory.glob(".step-*.removing")):
        shutil.rmtree(path, ignore_errors=True)


def finish(written: Path, final: Path) -> None:
    """Let a complete checkpoint appear: the one moment at which it comes into being."""
    sync_folder(written)
    written.rename(final)
    sync_folder(final.parent)


def folders(directory: Path) -> list[Path]:
    """What looks like a checkpoint, oldest first; by number, not by name."""
    return [path for path in named_folders(directory) if not path.is_symlink()]


def named_folders(directory: Path) -> list[Path]:
    """As `folders`, with symbolic links, which are no checkpoints but should not go unnoticed."""
    found = [(int(match[1]), path) for path in _listed(directory) if (match := STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found) if path.is_symlink() or path.is_dir()]


def _listed(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []


def latest(directory: str | Path) -> Path | None:
    """Find the newest complete checkpoint in a directory; None if there is none.

    Only manifests are read, and sizes of files compared; `verify` reads all bytes.

    Changes: nothing. Collectives: none.

    Args:
        directory: That was given to `save`; it need not exist.

    Returns:
        The folder of the checkpoint with the largest step.

    Example:
        >>> latest("/nowhere") is None
        True
    """
    return next((path for path in reversed(folders(Path(directory))) if _is_complete(path)), None)


def _is_complete(folder: Path) -> bool:
    try:
        _check(folder, content=False)
    except CheckpointError:
        return False
    return True


def verify(path: str | Path) -> Manifest:
    """Read every byte of a checkpoint and compare it with its manifest.

    Changes: nothing. Collectives: none.

    Args:
        path: The folder of one checkpoint.

    Returns:
        Its manifest.

    Raises:
        CheckpointError: Something is missing or damaged; the text names the file and a tensor in it.

    Example:
        >>> import tempfile, torch, weft
        >>> state, ctx = weft.checkpointable({"model": torch.nn.Linear(2, 2)}, weft.local())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     weft.verify(weft.save(state, folder, 1, ctx)).step
        1
    """
    return _check(Path(path), content=True)


def _check(folder: Path, *, content: bool) -> Manifest:
    manifest = read_manifest(folder)
    for name in manifest.files:
        check_file(folder, name, manifest, content=content)
    check_place(folder, manifest)
    return manifest


def prune(directory: Path, keep: int, saved: Path) -> None:
    """Remove all but the newest `keep` complete checkpoints, and never the one just saved."""
    kept = [path for path in folders(directory) if path == saved or _has_its_files(path)]
    for path in kept[:-keep]:
        if path != saved:
            gone = path.with_name(f".{path.name}.{secrets.token_hex(4)}.removing")
            path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def _has_its_files(folder: Path) -> bool:
    """As `_is_complete`, but a manifest that is as it was is not read at every save."""
    try:
        stamp = (folder / NAME).lstat()
        sizes = _sizes(folder, stamp.st_ino, stamp.st_mtime_ns, stamp.st_size)
        return all((folder / name).lstat().st_size == size for name, size in sizes)
    except (CheckpointError, OSError):
        return False


@functools.lru_cache(maxsize=64)
def _sizes(folder: Path, *stamp: int) -> tuple[tuple[str, int], ...]:
    return tuple((name, entry.bytes) for name, entry in read_manifest(folder).files.items())
