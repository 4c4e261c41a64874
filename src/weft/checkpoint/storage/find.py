"""Which checkpoints there are, and whether they are whole: `latest`, `best`, `verify`."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path

from weft.checkpoint.format.hashes import HASHES
from weft.checkpoint.format.manifest import NAME, STEP, Damage, FileEntry, Manifest, check_place
from weft.checkpoint.format.plain_files import raise_if_unreadable
from weft.checkpoint.storage.bucket import Bucket, RemotePath
from weft.checkpoint.storage.directory import Directory
from weft.checkpoint.storage.protocol import Storage
from weft.errors import CheckpointError, listed, type_error

_PAUSES_S = (0.001, 0.004, 0.016, 0.064)  # before an empty listing is believed


def path_or_url(directory: str | Path | None) -> Path:
    """A directory of this machine, or a URL.

    Raises:
        TypeError: It is None.
    """
    if isinstance(directory, RemotePath):
        return directory
    if directory is None:
        raise type_error(
            "there is no checkpoint, or no directory: it is None",
            found="None, which weft.checkpoint.latest returns of an empty directory, and best without any score",
            expected="a directory, the path of a checkpoint, or a URL",
            fix="path = weft.checkpoint.best(directory) or weft.checkpoint.latest(directory)",
        )
    scheme, found, rest = os.fspath(directory).partition("://")
    if found and scheme != "file":
        return RemotePath(os.fspath(directory))
    path = Path(rest if found else directory)
    return path if path.name not in ("", "..") else path.resolve()  # "." has a name, too


def storage_of(where: Path) -> Storage:
    """The checkpoints in a directory, or at a URL."""
    return Bucket(where) if isinstance(where, RemotePath) else Directory(where)


def locate(where: Path) -> tuple[Storage, str | None]:
    """The checkpoints in a directory or at a URL; or those around one checkpoint, and the name of that."""
    storage = storage_of(where)
    match = STEP.fullmatch(where.name)
    # Also without its manifest: that is damage, and no new beginning.
    is_named = match is not None and where == step_folder(where.parent, int(match[1]))
    return (storage_of(where.parent), where.name) if is_named or storage.is_one() else (storage, None)


def step_folder(directory: Path, step: int) -> Path:
    """The folder of a step."""
    return directory / f"step-{step:08d}"


def checkpoint_names(storage: Storage) -> list[str]:
    """What has the name of a checkpoint, oldest first.

    A listing is not one moment: beside a run that saves one and removes another, it may show neither.
    """
    found = storage.names()
    for pause in _PAUSES_S:
        if found or not storage.exists():
            break
        time.sleep(pause)
        found = storage.names()
    return found


def checked_manifest(storage: Storage, name: str, *, content: bool) -> Manifest:
    """The manifest of a checkpoint whose files are all there; with `content`, also compared with their hashes.

    Raises:
        Damage: Something is missing or differs; names a file, and a tensor in it.
        CheckpointError: It is of another version of the format.
        OSError: Something cannot be read.
    """
    manifest = storage.manifest(name)
    check_files(storage, name, manifest, manifest.files, content=content)
    check_place(storage.where / name, manifest)
    return manifest


def check_files(
    storage: Storage, name: str, manifest: Manifest, files: Collection[str], *, content: bool = True
) -> None:
    """Compare some files of a checkpoint with its manifest; without `content`, only their sizes.

    Raises:
        Damage: One is missing, is no plain file, or differs; names it, and a tensor in it.
        OSError: One cannot be read.
        MissingExtra: Its hash is one of the package xxhash, which is not installed.
    """
    sizes = storage.sizes(name, files)
    for file in files:
        entry = manifest.files[file]
        found = _difference(storage, name, file, entry, sizes[file], content=content)
        if found is not None:
            held = [tensor for tensor, value in manifest.tensors.items() if any(p.file == file for p in value.pieces)]
            raise Damage(
                f"{storage.where / name / file} is damaged",
                found=f"{found}; it holds {', '.join(held[:3]) or 'no tensors'}{', ...' if len(held) > 3 else ''}",
                expected=f"the file that was saved: {entry.bytes} bytes, {HASHES[entry.hash][0]} {entry.digest[:12]}..",
                fix="weft.restore(state, directory, ctx)  # takes the newest checkpoint that is complete",
            )


def _difference(
    storage: Storage, name: str, file: str, entry: FileEntry, size: int | str, *, content: bool
) -> str | None:
    if size != entry.bytes:
        return size if isinstance(size, str) else f"{size} bytes"
    try:
        if content and storage.digest(name, file, entry.hash) != entry.digest:
            return f"other bytes than were written ({HASHES[entry.hash][0]} differs)"
    except (OSError, ValueError) as error:
        raise_if_unreadable(error)
        return str(error) if isinstance(error, ValueError) else "no such file"
    return None


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
    storage = storage_of(path_or_url(directory))
    storage.check_place("latest")
    newest = complete_checkpoints(storage, most=1)
    return storage.where / newest[0][0] if newest else None


def best(directory: str | Path) -> Path | None:
    """Find the complete checkpoint with the lowest score of those in a directory; None if none has a score.

    Of equal ones the first. As for `latest`, only manifests are read, and sizes of files compared.

    Changes: nothing. Collectives: none.

    Args:
        directory: That was given to `save`, with `score=`; it need not exist. A URL is one too.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: This is no directory, or a checkpoint is of another version of the format.
        OSError: Something cannot be read.

    Example:
        >>> import tempfile, torch, weft
        >>> state, ctx = weft.checkpointable({"model": torch.nn.Linear(2, 2)}, weft.local())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for step, loss in ((10, 0.5), (20, 0.3), (30, 0.4)):
        ...         _ = weft.save(state, folder, step, ctx, keep=1, keep_best=1, score=loss)
        ...     best(folder).name, latest(folder).name
        ('step-00000020', 'step-00000030')
    """
    storage = storage_of(path_or_url(directory))
    storage.check_place("best")
    scored = [(one.score, one.step, name) for name, one in complete_checkpoints(storage) if one.score is not None]
    return storage.where / min(scored)[2] if scored else None


def complete_checkpoints(storage: Storage, *, most: int | None = None) -> list[tuple[str, Manifest]]:
    """Checkpoints whose files are all there, in the right size, with their manifests: the newest first.

    Args:
        storage: Where.
        most: How many are enough; None: all.

    Raises:
        CheckpointError: One is of another version of the format.
        OSError: Something cannot be read.
    """
    while True:
        found: list[tuple[str, Manifest]] = []
        for name in reversed(checkpoint_names(storage)):
            try:
                found.append((name, checked_manifest(storage, name, content=False)))
            except Damage:
                if name not in storage.names():  # a run beside has saved another one and removed it: look again
                    break
            if len(found) == most:
                return found
        else:
            return found


def verify(path: str | Path) -> Manifest:
    """Read every byte of a checkpoint and compare it with its manifest.

    Changes: nothing. Collectives: none.

    Args:
        path: The folder of one checkpoint, or its URL; of a directory, its newest complete one.

    Returns:
        Its manifest.

    Raises:
        CheckpointError: There is none, or something is missing or damaged; the text names the file and a tensor in it.
        OSError: Something cannot be read.

    Example:
        >>> import tempfile, torch, weft
        >>> state, ctx = weft.checkpointable({"model": torch.nn.Linear(2, 2)}, weft.local())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     weft.checkpoint.verify(weft.save(state, folder, 1, ctx)).step
        1
    """
    where = path_or_url(path)
    while True:
        storage, name = find_one("verify", where)
        try:
            return checked_manifest(storage, name, content=True)
        except Damage:
            if storage.where != where or name in storage.names():
                raise  # else a run beside has saved another one and removed it: look again


def find_one(what: str, where: Path) -> tuple[Storage, str]:
    """One checkpoint: the one that is at a path, or the newest complete one of a directory or URL.

    Raises:
        CheckpointError: There is none.
        OSError: Something cannot be read.
    """
    storage, name = locate(where)
    if name is None:
        storage.check_place(what)
        newest = complete_checkpoints(storage, most=1)
        if not newest:
            raise CheckpointError(
                f"{what}: there is no complete checkpoint in {where}",
                found=listed(storage.names()) or "no folder of a checkpoint",
                expected=f"the folder of a checkpoint, with {NAME}, or a directory of such folders",
                fix="restore the files from a copy, or name another directory"
                if storage.names()
                else "the directory that was given to weft.save, or the folder of one checkpoint",
            )
        name = newest[0][0]
    return storage, name
