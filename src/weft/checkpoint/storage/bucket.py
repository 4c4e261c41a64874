"""Checkpoints that lie where no rename is: in object stores, by any URL that fsspec knows.

Each rank writes its file straight into the store, under a name that no other save uses. The manifest, written last and
by the main rank, is what makes a checkpoint of them: it is one object, and appears as a whole. Reading goes through
private copies on this machine, so that all that is checked in a directory is checked here. The newest step is also
written down: a listing may lag behind, an object that one asks for does not.

Source: fsspec, https://filesystem-spec.readthedocs.io.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path, PosixPath
from types import MappingProxyType
from typing import IO, Any

from weft.checkpoint.format.hashes import new_hash
from weft.checkpoint.format.manifest import MAX_BYTES, NAME, STEP, Damage, Manifest, parse_manifest, step_of
from weft.checkpoint.storage.protocol import Draft, changed_bytes
from weft.errors import MissingExtra, type_error, value_error

_NEWEST = "newest"
_PART = 2**22
_PACKAGES = MappingProxyType(
    {
        "s3:": "s3fs",
        "s3a:": "s3fs",
        "gs:": "gcsfs",
        "gcs:": "gcsfs",
        "az:": "adlfs",
        "abfs:": "adlfs",
        "abfss:": "adlfs",
    }
)
_PAUSES_S = (0.05, 0.25)  # before what came incomplete is asked for again


class RemotePath(PosixPath):
    """The URL of a checkpoint, with the names and parents of a path; what would touch the disk of this machine raises.

    Example:
        >>> path = RemotePath("s3://bucket/run") / "step-00000010"
        >>> str(path), path.name, str(path.parent)
        ('s3://bucket/run/step-00000010', 'step-00000010', 's3://bucket/run')
    """

    def __str__(self) -> str:
        scheme, _, rest = super().__str__().partition(":")
        return f"{scheme}://{rest.removeprefix('/')}"

    def __fspath__(self) -> str:
        raise type_error(
            f"{self} is not a local path",
            found="a URL, used as the path of a file",
            expected="functions of weft, or of fsspec",
            fix=f"fsspec.open({str(self)!r})",
        )


class Bucket:
    """A `Storage` at a URL: what has a manifest is a checkpoint."""

    def __init__(self, where: RemotePath) -> None:
        try:
            import fsspec  # noqa: PLC0415  (an extra)

            self._store, self._root = fsspec.core.url_to_fs(str(where))
        except ValueError as error:
            raise value_error(
                f"{where} is not a place of checkpoints",
                found=str(error),
                expected="a directory, or a URL that fsspec knows",
                fix='"s3://bucket/run", "gs://bucket/run", "memory://run", or a path without "://"',
            ) from error
        except ImportError as error:
            raise MissingExtra(
                f"checkpoints at {where} need a package that is not installed",
                found=str(error),
                expected="fsspec, and its package for this kind of URL: s3fs, gcsfs, adlfs, ...",
                fix=f"pip install 'torchweft[remote]' {_PACKAGES.get(where.parts[0], '')}".rstrip(),
            ) from error
        self._store.invalidate_cache()  # others write there, too
        self.where = where
        self._stamps: dict[str, object] = {}

    def _at(self, *names: str) -> str:
        return "/".join([self._root, *names])

    def _info(self, path: str) -> dict[str, Any] | None:
        """What the store says of an object; None if there is none."""
        try:
            found: dict[str, Any] = self._store.info(path)
        except FileNotFoundError:
            return None
        return found if found.get("type") == "file" else None

    def _listed(self, path: str) -> dict[str, dict[str, Any]]:
        """What the store says of what is in a folder, by name; the listing may lag behind."""
        try:
            return {Path(str(one["name"])).name: one for one in self._store.ls(path, detail=True)}
        except FileNotFoundError:
            return {}

    def _read(self, path: str, *, most: int = MAX_BYTES + 1) -> bytes | None:
        """An object, or the beginning of a larger one; None if there is none.

        Raises:
            OSError: It cannot be read.
        """
        pauses = iter(_PAUSES_S)
        while True:
            info = self._info(path)
            if info is None:
                return None
            size = min(info["size"], most)
            text: bytes = self._store.cat_file(path, start=0, end=size) if size else b""
            if len(text) == size:
                return text
            _try_again(pauses, path, len(text), size)

    # -- what is there ---------------------------------------------------------------------------

    def check_place(self, what: str) -> None:
        """See `Storage`: a folder of a store is always there."""

    def exists(self) -> bool:
        """See `Storage`: a store does not tell a folder without objects from none."""
        return True

    def names(self) -> list[str]:
        """See `Storage`: what was begun and has no manifest does not count."""
        self._store.invalidate_cache()
        found = set(self._listed(self._root))
        with contextlib.suppress(UnicodeDecodeError):  # a hint, which anyone may have written
            found.add((self._read(self._at(_NEWEST), most=40) or b"").decode())
        infos = {name: self._info(self._at(name, NAME)) for name in found if STEP.fullmatch(name)}
        self._stamps = {name: sorted(map(str, info.items())) for name, info in infos.items() if info is not None}
        return sorted(self._stamps, key=step_of)

    def is_one(self) -> bool:
        """See `Storage`."""
        there = (Path(file) for file in self._listed(self._root))
        return self._info(self._at(NAME)) is not None or any(file.match("rank-*.safetensors") for file in there)

    def stamp(self, name: str) -> object:
        """See `Storage`."""
        return self._stamps.get(name)

    def manifest(self, name: str) -> Manifest:
        """See `Storage`."""
        return self._manifest(name)[1]

    def _manifest(self, name: str) -> tuple[bytes, Manifest]:
        """The text of a manifest, and what it says, checked.

        Raises:
            Damage: There is none.
            CheckpointError: It is of another version of the format.
            OSError: It cannot be read.
        """
        text = self._read(self._at(name, NAME))
        if text is None:
            raise Damage(
                f"{self.where / name} has no manifest",
                found=f"no object {NAME}",
                expected=f"the URL of a checkpoint that weft.save wrote, with {NAME}",
                fix="weft.restore(state, url, ctx)  # takes the newest checkpoint that is complete",
            )
        return text, parse_manifest(text, self.where / name)

    def sizes(self, name: str, files: Iterable[str]) -> dict[str, int | str]:
        """See `Storage`."""
        there = {file: info for file, info in self._listed(self._at(name)).items() if info.get("type") == "file"}
        infos = {file: there.get(file) or self._info(self._at(name, file)) for file in files}
        return {file: "no such file" if info is None else int(info["size"]) for file, info in infos.items()}

    def digest(self, folder: str, file: str, kind: str) -> str:
        """See `Storage`."""
        path, hashed, came = self._at(folder, file), new_hash(kind), 0
        with self._store.open(path, "rb") as stream:
            while part := stream.read(_PART):
                hashed.update(part)
                came += len(part)
        info = self._info(path)
        if info is not None and came < info["size"]:
            raise OSError(errno.EIO, f"{came} of {info['size']} bytes came", path)
        return hashed.hexdigest()

    def copy(self, name: str, folder: Path) -> None:
        """Copy a checkpoint to a new folder of this machine: the manifest, and the files that it names, if they fit it.

        Raises:
            Damage: There is no manifest, or it is not one.
            CheckpointError: It is of another version of the format.
            OSError: A file cannot be read there, or written here.
        """
        self._store.invalidate_cache()
        text, manifest = self._manifest(name)
        sizes = self.sizes(name, manifest.files)
        folder.mkdir()
        (folder / NAME).write_bytes(text)
        for file, entry in manifest.files.items():  # no name leads out of the folder: that was checked
            if sizes[file] == entry.bytes:  # else reading the copy raises, as for a directory
                self._copy(self._at(name, file), folder / file, entry.bytes)

    def _copy(self, path: str, place: Path, size: int) -> None:
        pauses = iter(_PAUSES_S)
        while True:
            with contextlib.suppress(FileNotFoundError):
                self._store.get_file(path, str(place))
            came = place.stat().st_size if place.exists() else 0
            if came == size or self._info(path) is None:
                return
            _try_again(pauses, path, came, size)

    # -- a new one -------------------------------------------------------------------------------

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """See `Storage`: a store has no locks."""
        return contextlib.nullcontext()

    def begin(self, name: str) -> Draft:
        """See `Storage`."""
        for one in self._listed(self._root):
            # Without a manifest under any name: both ways of looking have to agree.
            if STEP.fullmatch(one) and self._info(self._at(one, NAME)) is None:
                there = self._listed(self._at(one))
                if not any(file.startswith(NAME) for file in there):
                    self._remove_folder(one, there)
        return Draft(name, f".{secrets.token_hex(4)}")

    @contextlib.contextmanager
    def new_file(self, draft: Draft, file: str) -> Iterator[IO[bytes]]:
        """See `Storage`."""
        path = self._at(draft.folder, file)
        try:
            stream = self._store.open(path, "wb")
        except FileNotFoundError:  # of the folder: not every store does without
            self._store.makedirs(self._at(draft.folder), exist_ok=True)
            stream = self._store.open(path, "wb")
        with stream:
            yield stream

    def commit(self, draft: Draft, name: str, manifest: bytes, *, aside: str) -> None:
        """See `Storage`."""
        path = self._at(name, NAME)
        old = self._read(path)
        if old is not None:
            self._store.pipe_file(f"{path}.{secrets.token_hex(4)}.{aside}", old)
        failed: Exception = changed_bytes(self.where / name / NAME)
        try:
            self._store.pipe_file(path, manifest)
        except Exception as error:  # noqa: BLE001  (that of a library; the request may have arrived all the same)
            failed = error
        try:
            if self._read(path) == manifest:
                return
        except Exception as error:  # noqa: BLE001
            failed = error
        if old is None:
            self._remove(path)
        else:
            self._store.pipe_file(path, old)
        raise failed

    def after_commit(self, name: str) -> None:
        """See `Storage`."""
        self._store.pipe_file(self._at(_NEWEST), name.encode())

    def abandon(self, draft: Draft) -> None:
        """See `Storage`."""
        with contextlib.suppress(Exception):  # of a library of its own
            if draft.suffix.encode() not in (self._read(self._at(draft.folder, NAME)) or b""):  # else it was committed
                files = self._listed(self._at(draft.folder))
                mine = [file for file in files if file.endswith(f"{draft.suffix}.safetensors")]
                self._remove_folder(draft.folder, mine)

    # -- old ones --------------------------------------------------------------------------------

    def set_aside(self, name: str) -> None:
        """See `Storage`: its files stay where they are, and its manifest gets another name."""
        path = self._at(name, NAME)
        self._store.pipe_file(f"{path}.{secrets.token_hex(4)}.discarded", self._store.cat_file(path))
        self._store.rm_file(path)

    def delete(self, name: str) -> None:
        """See `Storage`: its manifest first."""
        self._remove(self._at(name, NAME))
        self._remove_folder(name, self._listed(self._at(name)))

    def _remove_folder(self, name: str, files: Iterable[str]) -> None:
        for file in files:
            self._remove(self._at(name, file))
        with contextlib.suppress(OSError, NotImplementedError):  # in a store there are no folders
            self._store.rmdir(self._at(name))

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._store.rm_file(path)  # `rm` would take a name for a pattern


def _try_again(pauses: Iterator[float], path: str, came: int, size: int) -> None:
    """Wait before an object that came incomplete is asked for again.

    Raises:
        OSError: It has been often enough.
    """
    pause = next(pauses, None)
    if pause is None:
        raise OSError(errno.EIO, f"{came} of {size} bytes came", path)
    time.sleep(pause)
