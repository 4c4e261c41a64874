"""Reading the tensors of a checkpoint while its files are compared with their hashes.

[Note: one pass] A file that this rank has to check, and wants in long stretches, is read once, from the beginning to
the end: threads read it straight into the tensors, and the hash is taken of what lies there, while the caches still
have it. Of any other file only what is wanted is read; one that this rank has to check too is read beside that.

What is only looked at until it is copied may lie in memory that ranks of a node share, see
`[Note: once per node]` in node_memory.py.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from weft.checkpoint.files import Damage, check_file, damage_text, other_bytes
from weft.checkpoint.hashes import Hash, new_hash
from weft.checkpoint.manifest import DTYPES, Manifest, TensorEntry
from weft.checkpoint.node_memory import NodeMemory, Offer
from weft.checkpoint.pieces import Block, block_of, local_part
from weft.checkpoint.ranks import num_threads
from weft.checkpoint.reading import Stretch, TensorFiles, read_into
from weft.context import DistContext
from weft.engines.torch.shards import is_sharded
from weft.errors import CheckpointError, message

__all__ = ["Reader"]

_CHUNK = 4 * 2**20  # bytes that one thread reads at a time
_BUFFERS = 512  # per call of the system, which takes 1024
_ALIGNED = 64  # bytes; as torch's own memory
_SHORT = 4096  # bytes; a file wanted in shorter stretches is read in another way
Chunk: TypeAlias = tuple[int, list[memoryview | int]]  # first byte; memory, or how many bytes nobody wants


class Wanted(NamedTuple):
    """A block of a tensor, and where it goes.

    Attributes:
        place: In the memory of the node, if it may go there.
    """

    name: str
    entry: TensorEntry
    block: Block
    values: torch.Tensor
    place: int | None = None


class Reader:
    """Reads from the files of a checkpoint; what `read` and `look_at` gave is filled by `fill`.

    In several threads, as fresh memory costs more time than the reading.

    Args:
        folder: Of the checkpoint.
        manifest: Its manifest.
        ctx: Whose ranks; each compares some of the files with their hashes.
    """

    def __init__(self, folder: Path, manifest: Manifest, ctx: DistContext) -> None:
        self.folder = folder
        self.manifest = manifest
        self._files = TensorFiles("restore", {name: folder / name for name in manifest.files})
        self._rank = ctx.rank
        self._checkers = {name: number % ctx.world_size for number, name in enumerate(manifest.files)}
        self._num_threads = max(num_threads(ctx), 2)  # as one of them waits for the disk
        self._wanted: list[Wanted] = []
        self._to_share = 0  # bytes
        self._shared: NodeMemory | None = None

    def read(self, name: str, like: torch.Tensor | None) -> torch.Tensor:
        """Want a tensor, cut up as `like`, or whole if that is None.

        Raises:
            CheckpointError: There is no such tensor.
        """
        wanted = self._want(name, like)
        self._wanted.append(wanted)
        return wanted.values if like is None else _cut_like(wanted.values, like)

    def look_at(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Want a tensor as with `read`, to be copied from and dropped: other ranks may have the same memory.

        Raises:
            CheckpointError: There is no such tensor.
        """
        wanted = self._want(name, like)
        nbytes = wanted.values.numel() * wanted.values.element_size()
        if not nbytes or wanted.block.shape != wanted.entry.shape or is_sharded(like):
            return self.read(name, like)
        self._wanted.append(wanted._replace(place=self._to_share))
        self._to_share += -(-nbytes // _ALIGNED) * _ALIGNED
        return wanted.values

    def offer(self) -> Offer:
        """What may be shared with other ranks."""
        wanted = [(one.name, one.entry) for one in self._wanted if one.place is not None]
        return Offer(hashlib.sha256(repr((self.folder.name, wanted)).encode()).hexdigest(), self._to_share)

    def check(self) -> None:
        """Compare this rank's files with their hashes, and read nothing.

        Raises:
            Damage: One is not the one that was saved.
        """
        for name in self._to_check():
            check_file(self.folder, name, self.manifest)

    def fill(self, shared: NodeMemory | None = None) -> None:
        """Read what is wanted, and compare this rank's files with their hashes.

        Args:
            shared: Memory for what `look_at` gave. It is filled when all ranks that have it are here.

        Raises:
            CheckpointError: A file does not hold what the manifest says; `Damage` if it is not the one that was saved.
        """
        self._shared = shared
        try:
            self._fill_all(shared)
        finally:
            self._files.close()

    def drop(self) -> None:
        """Give back the memory of what `look_at` gave; nobody may have it any more."""
        self._wanted.clear()
        if self._shared is not None:
            self._shared.drop()

    def _want(self, name: str, like: torch.Tensor | None) -> Wanted:
        entry = self.manifest.tensors.get(name)
        if entry is not None and entry.same_as is not None:
            name, entry = entry.same_as, self.manifest.tensors[entry.same_as]
        if entry is None:
            raise CheckpointError(
                message(
                    f"restore: {name} is not in the checkpoint",
                    found=f"{len(self.manifest.tensors)} other tensors",
                    expected="every tensor that its values mention",
                    fix="restore an older checkpoint",
                )
            )
        block = Block((0,) * len(entry.shape), entry.shape) if like is None else block_of(like)[0]
        device = local_part(like).device if like is not None and is_sharded(like) else torch.device("cpu")
        return Wanted(name, entry, block, torch.empty(block.shape, dtype=getattr(torch, entry.dtype), device=device))

    def _to_check(self) -> list[str]:
        return [name for name, rank in self._checkers.items() if rank == self._rank]

    # -- filling ---------------------------------------------------------------------------------

    def _fill_all(self, shared: NodeMemory | None) -> None:
        self._move_to(shared)
        to_check = self._to_check()
        streams: dict[str, list[Stretch]] = {}
        # What goes to an accelerator is put together on the CPU, tensor by tensor.
        others = [(1.0, wanted) for wanted in self._wanted if wanted.values.device.type != "cpu"]
        for file, parts in self._by_file(shared).items():
            stretches = self._stretches(parts) if file in to_check else None
            if stretches is None:
                others += [(number / len(parts), part) for number, part in enumerate(parts)]
            else:
                streams[file] = stretches
        threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="weft-read")
        checks = ThreadPoolExecutor(1, thread_name_prefix="weft-verify")
        waiting = deque(sorted(others, key=itemgetter(0)))
        done, total = 0, sum(self.manifest.files[file].bytes for file in streams)
        try:
            files = [file for file in to_check if file not in streams]
            found = [checks.submit(check_file, self.folder, file, self.manifest) for file in files]
            for file, stretches in streams.items():
                for size in self._stream(file, stretches, threads):
                    # Of the other files as much: other ranks read them at the same pace, so their pages are there.
                    done += size
                    while waiting and waiting[0][0] * total < done:
                        found.append(threads.submit(self._fill, *waiting.popleft()[1][:4]))
            found += [threads.submit(self._fill, *part[:4]) for _, part in waiting]
            for result in found:
                result.result()
        finally:
            threads.shutdown(cancel_futures=True)
            checks.shutdown(cancel_futures=True)

    def _move_to(self, shared: NodeMemory | None) -> None:
        """Let what may be shared lie in memory that is."""
        for wanted in self._wanted if shared is not None else ():
            if shared is not None and wanted.place is not None:
                values = wanted.values
                start = wanted.place
                memory = shared.memory[start : start + values.numel() * values.element_size()].view(values.dtype)
                values.set_(memory.untyped_storage(), memory.storage_offset(), values.shape, values.stride())

    def _by_file(self, shared: NodeMemory | None) -> dict[str, list[Wanted]]:
        """What this rank reads of each file on the CPU, piece by piece, in the order of its bytes."""
        parts: defaultdict[str, list[Wanted]] = defaultdict(list)
        readers = self._readers(shared)
        for wanted in sorted(self._wanted, key=_place_in_file):
            for piece in wanted.entry.pieces if wanted.values.device.type == "cpu" else ():
                if wanted.place is None or readers[piece.file] == self._rank:
                    parts[piece.file].append(wanted._replace(entry=replace(wanted.entry, pieces=(piece,))))
        return dict(sorted(parts.items()))

    def _readers(self, shared: NodeMemory | None) -> dict[str, int]:
        """Who reads what is shared, by file."""
        if shared is None:
            return dict.fromkeys(self._checkers, self._rank)
        return {
            name: shared.reader_of(number, checker) for number, (name, checker) in enumerate(self._checkers.items())
        }

    def _stretches(self, parts: list[Wanted]) -> list[Stretch] | None:
        """What to read of a file in one pass; None if it has to be read in another way."""
        found: list[Stretch] = []
        try:
            for part in parts:
                for number, stretch in enumerate(self._files.stretches(*part[:4])):
                    if number and len(stretch.memory) < _SHORT:
                        return None
                    found.append(stretch)
        except CheckpointError:  # its hash will tell more
            return None
        found.sort(key=lambda stretch: stretch.start)
        ends = [stretch.start + len(stretch.memory) for stretch in found]
        is_once = all(end <= after.start for end, after in zip(ends, found[1:], strict=False))
        return found if is_once else None

    def _stream(self, file: str, stretches: list[Stretch], threads: ThreadPoolExecutor) -> Iterator[int]:
        """Read a file from the beginning to the end, and compare it with its hash.

        Yields:
            How many bytes were read since the last time.

        Raises:
            Damage: It is not the one that was saved, or cannot be read.
        """
        entry, handle = self.manifest.files[file], self._files.handle(file)
        digest = new_hash(entry.hash)
        ahead: deque[Future[list[memoryview]]] = deque()
        try:
            for start, buffers in _chunks(stretches, entry.bytes):
                ahead.append(threads.submit(_read_chunk, handle, start, buffers))
                if len(ahead) > 2 * self._num_threads:
                    yield _take(ahead.popleft(), digest)
            while ahead:
                _take(ahead.popleft(), digest)
            found = None if digest.hexdigest() == entry.digest else other_bytes(entry)
        except (OSError, ValueError) as error:
            found = f"{type(error).__name__}: {error}"
        finally:
            wait(ahead)  # or a thread reads from a file that is closed
        if found is not None:
            raise Damage(damage_text(self.folder, file, self.manifest, found))

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


def _take(read: Future[list[memoryview]], digest: Hash) -> int:
    """Hash what was read; gives the number of bytes."""
    memories = read.result()
    for memory in memories:
        digest.update(memory)
    return sum(map(len, memories))
