"""Reading the tensors of a checkpoint while its files are compared with their hashes.

[Note: one pass] A file that this rank has to check, and wants in long stretches, is read once, from the beginning to
the end: threads read it straight into the tensors, and the hash is taken of what lies there, while the caches still
have it. Of any other file only what is wanted is read; one that this rank has to check too is read beside that.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeAlias

import torch

from weft.checkpoint.files import Damage, check_file, damage_text, other_bytes
from weft.checkpoint.hashes import Hash, new_hash
from weft.checkpoint.manifest import DTYPES, Manifest, TensorEntry
from weft.checkpoint.pieces import Block, block_of, local_part
from weft.checkpoint.reading import Stretch, TensorFiles, read_into
from weft.engines.torch.shards import is_sharded
from weft.errors import CheckpointError, message

__all__ = ["Reader"]

_CHUNK = 4 * 2**20  # bytes that one thread reads at a time
_BUFFERS = 512  # per call of the system, which takes 1024
_SHORT = 4096  # bytes; a file wanted in shorter stretches is read in another way
Chunk: TypeAlias = tuple[int, list[memoryview | int]]  # first byte; memory, or how many bytes nobody wants


class Wanted(NamedTuple):
    """A block of a tensor, and where it goes."""

    name: str
    entry: TensorEntry
    block: Block
    values: torch.Tensor


class Reader:
    """Reads from the files of a checkpoint, at the end of `with`: what `read` gave is filled then.

    In several threads, as fresh memory costs more time than the reading.

    Args:
        folder: Of the checkpoint.
        manifest: Its manifest.
        check: The files to compare with their hashes.
        num_threads: That read, >= 1.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, check: Collection[str] = (), num_threads: int = 1) -> None:
        self._folder = folder
        self._manifest = manifest
        self._files = TensorFiles("restore", {name: folder / name for name in manifest.files})
        self._check = list(check)
        self._num_threads = num_threads
        self._wanted: list[Wanted] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._read_all()
        finally:
            self._files.close()

    def read(self, name: str, like: torch.Tensor | None) -> torch.Tensor:
        """Want a tensor, cut up as `like`, or whole if that is None.

        Raises:
            CheckpointError: There is no such tensor. At the end of `with`: a file does not hold what the
                manifest says; `Damage` if it is not the one that was saved.
        """
        entry = self._manifest.tensors.get(name)
        if entry is not None and entry.same_as is not None:
            name, entry = entry.same_as, self._manifest.tensors[entry.same_as]
        if entry is None:
            raise CheckpointError(
                message(
                    f"restore: {name} is not in the checkpoint",
                    found=f"{len(self._manifest.tensors)} other tensors",
                    expected="every tensor that its values mention",
                    fix="restore an older checkpoint",
                )
            )
        block = Block((0,) * len(entry.shape), entry.shape) if like is None else block_of(like)[0]
        device = local_part(like).device if like is not None and is_sharded(like) else torch.device("cpu")
        values = torch.empty(block.shape, dtype=getattr(torch, entry.dtype), device=device)
        self._wanted.append(Wanted(name, entry, block, values))
        return values if like is None else _cut_like(values, like)

    # -- at the end of `with` --------------------------------------------------------------------

    def _read_all(self) -> None:
        streams: dict[str, list[Stretch]] = {}
        # What goes to an accelerator is put together on the CPU, tensor by tensor.
        others = [wanted for wanted in self._wanted if wanted.values.device.type != "cpu"]
        for file, parts in self._by_file().items():
            stretches = self._stretches(parts) if file in self._check else None
            if stretches is None:
                others += parts
            else:
                streams[file] = stretches
        threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="weft-read")
        checks = ThreadPoolExecutor(1, thread_name_prefix="weft-verify")
        try:
            files = [file for file in self._check if file not in streams]
            found = [checks.submit(check_file, self._folder, file, self._manifest) for file in files]
            for file, stretches in streams.items():
                self._stream(file, stretches, threads)
            found += [threads.submit(self._fill, *part) for part in others]
            for result in found:
                result.result()
        finally:
            threads.shutdown(cancel_futures=True)
            checks.shutdown(cancel_futures=True)

    def _by_file(self) -> dict[str, list[Wanted]]:
        """What is wanted of each file on the CPU, piece by piece, in the order of its bytes."""
        parts: defaultdict[str, list[Wanted]] = defaultdict(list)
        for wanted in sorted(self._wanted, key=_place_in_file):
            for piece in wanted.entry.pieces if wanted.values.device.type == "cpu" else ():
                parts[piece.file].append(wanted._replace(entry=replace(wanted.entry, pieces=(piece,))))
        return dict(sorted(parts.items()))

    def _stretches(self, parts: list[Wanted]) -> list[Stretch] | None:
        """What to read of a file in one pass; None if it has to be read in another way."""
        found: list[Stretch] = []
        try:
            for part in parts:
                for number, stretch in enumerate(self._files.stretches(*part)):
                    if number and len(stretch.memory) < _SHORT:
                        return None
                    found.append(stretch)
        except CheckpointError:  # its hash will tell more
            return None
        found.sort(key=lambda stretch: stretch.start)
        ends = [stretch.start + len(stretch.memory) for stretch in found]
        is_once = all(end <= after.start for end, after in zip(ends, found[1:], strict=False))
        return found if is_once else None

    def _stream(self, file: str, stretches: list[Stretch], threads: ThreadPoolExecutor) -> None:
        """Read a file from the beginning to the end, and compare it with its hash."""
        entry, handle = self._manifest.files[file], self._files.handle(file)
        digest = new_hash(entry.hash)
        ahead: deque[Future[list[memoryview]]] = deque()
        try:
            for start, buffers in _chunks(stretches, entry.bytes):
                ahead.append(threads.submit(_read_chunk, handle, start, buffers))
                if len(ahead) > 2 * self._num_threads:
                    _take(ahead.popleft(), digest)
            while ahead:
                _take(ahead.popleft(), digest)
            found = None if digest.hexdigest() == entry.digest else other_bytes(entry)
        except (OSError, ValueError) as error:
            found = f"{type(error).__name__}: {error}"
        finally:
            wait(ahead)  # or a thread reads from a file that is closed
        if found is not None:
            raise Damage(damage_text(self._folder, file, self._manifest, found))

    def _fill(self, name: str, entry: TensorEntry, block: Block, values: torch.Tensor) -> None:
        on_cpu = values if values.device.type == "cpu" else torch.empty_like(values, device="cpu")
        self._files.read(name, entry, block, on_cpu)
        if on_cpu is not values:
            values.copy_(on_cpu)


def _place_in_file(wanted: Wanted) -> tuple[int, str]:
    """In which order tensors lie in a file; as `file_head` has it."""
    return -DTYPES[wanted.entry.dtype][1], wanted.name


def _cut_like(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's block as a tensor that is cut up as `like`."""
    if not is_sharded(like):
        return values
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  (half a second of imports in torch)

    cut: Any = like
    return DTensor.from_local(
        values, cut.device_mesh, cut.placements, run_check=False, shape=cut.shape, stride=cut.stride()
    )


# -- one pass ----------------------------------------------------------------------------------------


def _chunks(stretches: list[Stretch], end: int) -> Iterator[Chunk]:
    """A file in parts that are read at a time.

    Yields:
        Where each begins, and the memory for it; a number for bytes that nobody wants.
    """
    start = place = 0
    buffers: list[memoryview | int] = []
    for buffer in _covering(stretches, end):
        buffers.append(buffer)
        place += buffer if isinstance(buffer, int) else len(buffer)
        if place - start >= _CHUNK or len(buffers) == _BUFFERS:
            yield start, buffers
            start, buffers = place, []
    if buffers:
        yield start, buffers


def _covering(stretches: list[Stretch], end: int) -> Iterator[memoryview | int]:
    """All bytes of a file, in parts of at most `_CHUNK`."""
    place = 0
    for stretch in (*stretches, Stretch("", end, memoryview(b""))):
        while place < stretch.start:
            size = min(_CHUNK, stretch.start - place)
            yield size
            place += size
        for at in range(0, len(stretch.memory), _CHUNK):
            yield stretch.memory[at : at + _CHUNK]
        place += len(stretch.memory)


def _read_chunk(handle: int, start: int, buffers: list[memoryview | int]) -> list[memoryview]:
    memory = [memoryview(bytearray(one)) if isinstance(one, int) else one for one in buffers]
    read_into(handle, list(memory), start)
    return memory


def _take(read: Future[list[memoryview]], digest: Hash) -> None:
    for memory in read.result():
        digest.update(memory)
