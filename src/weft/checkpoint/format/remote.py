"""Checkpoints that lie where no rename is: in object stores, by any URL that fsspec knows.

[Note: mirror] Every rank writes its file into a folder of this machine, below that for temporary files, and sends it
from there; the manifest, sent last and by the main rank, is what makes a checkpoint of them: it is one object, and
appears as a whole. Reading goes the other way: what is needed is fetched, and then read as a checkpoint in a directory
is. So all that is checked there is checked here. The newest step is also written down: a listing may lag behind, an
object that one asks for does not.

Source: fsspec, https://filesystem-spec.readthedocs.io.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path, PosixPath
from typing import Any

from weft.checkpoint.format.hashes import new_hash
from weft.checkpoint.format.manifest import NAME, STEP, read_head
from weft.errors import MissingExtra, type_error

__all__ = ["Mirror", "RemotePath", "fetched", "mirror_of", "place"]

_NEWEST = "newest"
_PART = 2**22


class RemotePath(PosixPath):
    """The URL of a checkpoint, with the names and parents of a path; what would touch the disk of this machine raises.

    Example:
        >>> path = RemotePath("s3://bucket/run") / "step-00000010"
        >>> str(path), path.name, str(path.parent)
        ('s3://bucket/run/step-00000010', 'step-00000010', 's3://bucket/run')
    """

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def __fspath__(self) -> str:
        raise type_error(
            f"{self} is not a local path",
            found="a URL, used as the path of a file",
            expected="functions of weft, or of fsspec",
            fix=f"fsspec.open({str(self)!r})",
        )


def place(directory: str | Path) -> Path:
    """A directory of this machine, or a URL."""
    if isinstance(directory, RemotePath):
        return directory
    scheme, found, rest = os.fspath(directory).partition("://")
    if not found:
        return Path(directory)
    return Path(rest) if scheme == "file" else RemotePath(os.fspath(directory))


def mirror_of(directory: Path) -> Mirror | None:
    """The mirror of a URL; None for a directory of this machine."""
    return Mirror(directory) if isinstance(directory, RemotePath) else None


def fetched(path: Path) -> Path:
    """A checkpoint on this machine: itself, or a copy of what a URL says; of a directory, the newest that is complete.

    Raises:
        OSError: It cannot be fetched.
    """
    if not isinstance(path, RemotePath):
        return path
    if STEP.fullmatch(path.name):
        return Mirror(path.parent).fetch(path.name)
    mirror = Mirror(path)
    name = mirror.newest()
    return mirror.fetch(name) if name is not None else mirror.local


class Mirror:
    """A folder of this machine that stands for a URL: manifests of what is there, and files on their way.

    Args:
        url: Of a directory of checkpoints.

    Attributes:
        local: The folder.
    """

    def __init__(self, url: Path) -> None:
        try:
            import fsspec  # noqa: PLC0415  (an extra)

            self._files, self._root = fsspec.core.url_to_fs(str(url))
        except ImportError as error:
            raise MissingExtra(
                f"checkpoints at {url} need a package that is not installed",
                found=str(error),
                expected="fsspec, and its package for this kind of URL: s3fs, gcsfs, adlfs, ...",
                fix="pip install 'weft[remote]' s3fs",
            ) from error
        self.url = url
        self._newest = ""
        base = Path(tempfile.gettempdir()) / f"weft-{getpass.getuser()}"
        self.local = base / hashlib.sha256(str(url).encode()).hexdigest()[:16]

    # -- what is there -------------------------------------------------------------------------------

    def refresh(self) -> list[str]:
        """Bring the manifests here; what is no longer there goes from the mirror too.

        Returns:
            Names of the checkpoints that have a manifest, oldest first.
        """
        self._files.invalidate_cache()
        self.local.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self._newest = self._files.cat_file(f"{self._root}/{_NEWEST}").decode()
        names = {Path(str(one["name"])).name for one in self._listed(self._root)}
        names |= {self._newest} if STEP.fullmatch(self._newest) else set()
        found = [name for name in names if STEP.fullmatch(name) and self._bring_manifest(name)]
        for left in self.local.iterdir():
            if STEP.fullmatch(left.name) and left.name not in found:
                shutil.rmtree(left, ignore_errors=True)
        return sorted(found, key=lambda name: int(name.partition("-")[2]))

    def _listed(self, path: str) -> list[dict[str, Any]]:
        try:
            listed: list[dict[str, Any]] = self._files.ls(path, detail=True)
        except FileNotFoundError:
            return []
        return listed

    def _bring_manifest(self, name: str) -> bool:
        try:
            data: bytes = self._files.cat_file(f"{self._root}/{name}/{NAME}")
        except FileNotFoundError:
            return False
        folder = self.local / name
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / NAME
        if not kept.exists() or kept.read_bytes() != data:
            for old in folder.glob("*.safetensors"):  # of another checkpoint
                old.unlink(missing_ok=True)
            kept.write_bytes(data)
        return True

    def newest(self) -> str | None:
        """The name of the newest checkpoint whose files are all there."""
        return next((name for name in reversed(self.refresh()) if self.is_complete(name)), None)

    def is_complete(self, name: str) -> bool:
        """Whether all files are there, in the size that the manifest says."""
        sizes = {Path(str(one["name"])).name: one["size"] for one in self._listed(f"{self._root}/{name}")}
        for file, size in read_head(self.local / name).sizes.items():
            if sizes.get(file) != size:
                with contextlib.suppress(FileNotFoundError):
                    sizes[file] = self._files.size(f"{self._root}/{name}/{file}")  # the listing may lag behind
            if sizes.get(file) != size:
                return False
        return True

    # -- there and back ------------------------------------------------------------------------------

    def put(self, file: Path, name: str) -> None:
        """Send a file to the checkpoint of this name."""
        self._files.put_file(str(file), f"{self._root}/{name}/{file.name}")

    def digest(self, file: str, name: str, kind: str) -> str:
        """The hash of a file as it lies there."""
        hashed = new_hash(kind)
        with self._files.open(f"{self._root}/{name}/{file}", "rb") as stream:
            while part := stream.read(_PART):
                hashed.update(part)
        return hashed.hexdigest()

    def commit(self, manifest: Path, name: str) -> None:
        """Send the manifest: from now on it is a checkpoint."""
        self.put(manifest, name)
        self._files.pipe_file(f"{self._root}/{_NEWEST}", name.encode())

    def fetch(self, name: str) -> Path:
        """Bring a whole checkpoint here; ranks of one machine share the copy.

        Returns:
            Its folder.

        Raises:
            OSError: A file cannot be read there, or written here.
        """
        self.local.mkdir(parents=True, exist_ok=True)
        folder = self.local / name
        with self._locked(name):
            if not self._bring_manifest(name):
                return folder
            for file, size in read_head(folder).sizes.items():
                if not (folder / file).exists() or (folder / file).stat().st_size != size:
                    with contextlib.suppress(FileNotFoundError):  # whoever reads it says so, as of a directory
                        self._files.get_file(f"{self._root}/{name}/{file}", str(folder / file))
        return folder

    def drop(self, name: str) -> None:
        """Remove the copies of files, and keep the manifest."""
        for file in (self.local / name).glob("*.safetensors"):
            file.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        handle = os.open(self.local / f".{name}.fetching", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    # -- what goes -----------------------------------------------------------------------------------

    def delete(self, name: str) -> None:
        """Remove a checkpoint: its manifest first, so that no half of it is ever one."""
        self._files.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{name}/{NAME}")
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(f"{self._root}/{name}", recursive=True)
        shutil.rmtree(self.local / name, ignore_errors=True)

    def discard(self, name: str) -> None:
        """Let a checkpoint be none, and keep its files: the manifest gets another name."""
        path = f"{self._root}/{name}"
        self._files.pipe_file(f"{path}/{NAME}.discarded", self._files.cat_file(f"{path}/{NAME}"))
        self._files.rm_file(f"{path}/{NAME}")
        shutil.rmtree(self.local / name, ignore_errors=True)

    def remove_leftovers(self) -> None:
        """Remove files of saves that were never committed; nobody else saves there."""
        for one in self._listed(self._root):
            name = Path(str(one["name"])).name
            if STEP.fullmatch(name) and not self._bring_manifest(name):
                kept = {Path(str(file["name"])).name for file in self._listed(f"{self._root}/{name}")}
                if f"{NAME}.discarded" not in kept:
                    self.delete(name)
