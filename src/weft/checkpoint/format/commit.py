"""All or nothing: a checkpoint is written into a hidden folder and appears with one rename.

Which checkpoint is the latest is not written down anywhere; it follows from the folders that are
there and complete. One is removed the same way: renamed first, so that no half of it is ever seen.
"""

from __future__ import annotations

import os
import secrets
import shutil
import warnings
from pathlib import Path

from weft.checkpoint.format.manifest import STEP, Damage, Manifest, check_place, read_manifest
from weft.checkpoint.format.remote import fetched, mirror_of, place
from weft.checkpoint.format.safetensors_write import check_file, sync_folder
from weft.checkpoint.history import History
from weft.errors import CheckpointError

__all__ = [
    "begin",
    "check_directory",
    "finish",
    "folders",
    "latest",
    "named_folders",
    "prune",
    "rename_as",
    "saved_already",
    "target",
    "verify",
]


def target(directory: Path, step: int) -> Path:
    """The folder of a step."""
    return directory / f"step-{step:08d}"


def begin(directory: Path, step: int) -> Path:
    """Make the hidden folder that a checkpoint is written into; its name is used only once.

    A rank that outlived its job and still writes thereby spoils nothing but its own folder.

    Raises:
        CheckpointError: The step has already been saved.
    """
    final = target(directory, step)
    if final.exists() or final.is_symlink():
        _set_aside(final, step)
    # What saves and removals that were interrupted left behind; nobody writes there: the lock of the directory is ours.
    for left in (*directory.glob(".step-*.writing"), *directory.glob(".step-*.removing")):
        shutil.rmtree(left, ignore_errors=True)
    path = directory / f".step-{step:08d}.{secrets.token_hex(4)}.writing"
    path.mkdir()
    return path


def _set_aside(final: Path, step: int) -> None:
    """Give a damaged checkpoint another name, so that a run that went back behind it can go on.

    Raises:
        CheckpointError: It is whole, or of another version of the format.
        OSError: It cannot be read.
    """
    try:
        verify(final)
    except Damage:
        rename_as(final, "damaged")
        return
    raise saved_already(final, step)


def saved_already(final: Path, step: int) -> CheckpointError:
    """What to raise if there is a checkpoint of this step."""
    return CheckpointError(
        f"save: step {step} has already been saved",
        found=str(final),
        expected="a new step: existing checkpoints are never changed",
        fix="weft.save(state, directory, step + 1, ctx), or another directory",
    )


def rename_as(folder: Path, what: str) -> None:
    """Give a checkpoint a name that is not one of a checkpoint."""
    place = folder.with_name(f"{folder.name}.{what}")
    while place.exists():
        place = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.{what}")
    folder.rename(place)


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
    try:
        return list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def check_directory(what: str, directory: Path) -> None:
    """Raise if a directory of checkpoints can neither be there nor be made: where a file is, or a link to nothing.

    Raises:
        CheckpointError: Something else has its name, or that of a folder above it.
    """
    found = next((place for place in (directory, *directory.parents) if os.path.lexists(place)), None)
    if found is None or found.is_dir():
        return
    raise CheckpointError(
        f"{what}: {directory} is not a directory of checkpoints",
        found=f"{found} is {'a symbolic link to nothing' if found.is_symlink() else 'a file'}",
        expected="a directory, or for a new run a path that does not exist yet",
        fix="mount the file system that it is on, or name another directory",
    )


def latest(directory: str | Path) -> Path | None:
    """Find the newest complete checkpoint in a directory; None if there is none.

    Only manifests are read, and sizes of files compared; `verify` reads all bytes.

    Changes: nothing. Collectives: none.

    Args:
        directory: That was given to `save`; it need not exist. A URL is one too.

    Returns:
        The folder of the checkpoint with the largest step.

    Raises:
        CheckpointError: This is no directory, or a checkpoint is of another version of the format.
        OSError: Something cannot be read.

    Example:
        >>> latest("/nowhere") is None
        True
    """
    where = place(directory)
    mirror = mirror_of(where)
    if mirror is not None:
        name = mirror.newest()
        return None if name is None else where / name
    check_directory("latest", where)
    tried: list[Path] = []
    while (there := folders(where)) != tried:  # a run beside may have saved the next and removed these
        newest = next((path for path in reversed(there) if _is_complete(path)), None)
        if newest is not None:
            return newest
        tried = there
    return None


def _is_complete(folder: Path) -> bool:
    try:
        _check(folder, content=False)
    except Damage:
        return False
    return True


def verify(path: str | Path) -> Manifest:
    """Read every byte of a checkpoint and compare it with its manifest.

    Changes: nothing. Collectives: none.

    Args:
        path: The folder of one checkpoint, or its URL: then it is fetched first.

    Returns:
        Its manifest.

    Raises:
        CheckpointError: Something is missing or damaged; the text names the file and a tensor in it.
        OSError: Something cannot be read.

    Example:
        >>> import tempfile, torch, weft
        >>> state, ctx = weft.checkpointable({"model": torch.nn.Linear(2, 2)}, weft.local())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     weft.checkpoint.verify(weft.save(state, folder, 1, ctx)).step
        1
    """
    return _check(fetched(place(path)), content=True)


def _check(folder: Path, *, content: bool) -> Manifest:
    manifest = read_manifest(folder)
    for name in manifest.files:
        check_file(folder, name, manifest, content=content)
    check_place(folder, manifest)
    return manifest


def prune(directory: Path, keep: int, saved: Path, history: History) -> None:
    """Remove all but the newest `keep` complete checkpoints, and never the one just saved.

    Those that are known to be damaged do not count. What cannot be removed is left, with a warning.
    """
    try:
        kept = [path for path in folders(directory) if path == saved or history.counts(path)]
        for path in kept[:-keep]:
            if path != saved:
                gone = path.with_name(f".{path.name}.{secrets.token_hex(4)}.removing")
                path.rename(gone)
                history.forget(path)
                shutil.rmtree(gone, ignore_errors=True)
    except OSError as error:
        warnings.warn(
            f"weft: {saved} is saved, but older checkpoints could not be removed: {error}", RuntimeWarning, stacklevel=2
        )
