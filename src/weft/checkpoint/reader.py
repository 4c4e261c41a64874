"""Reading the tensors of a checkpoint while its files are compared with their hashes.

[Note: one pass] A file that this rank has to check, and wants in long stretches, is read once, from the beginning to
the end, block by block: each is hashed and copied to its places while the caches still have it. Of any other file only
what is wanted is read; one that this rank has to check too is read beside that.

What is only looked at until it is copied may lie in memory that ranks of a node share, see
`[Note: once per node]` in node_memory.py; the rest they pass on to each other, see `[Note: passing on]` in passing.py.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from weft.checkpoint.blocks import Blocks, Places
from weft.checkpoint.files import Damage, check_file, damage_text, other_bytes
from weft.checkpoint.hashes import new_hash
from weft.checkpoint.manifest import DTYPES, Manifest, TensorEntry
from weft.checkpoint.node_memory import NodeMemory, Offer
from weft.checkpoint.passing import Passing
from weft.checkpoint.pieces import Block, block_of, local_part
from weft.checkpoint.ranks import num_threads
from weft.checkpoint.reading import Stretch, TensorFiles
from weft.context import DistContext
from weft.engines.torch.shards import is_sharded
from weft.errors import CheckpointError, message

__all__ = ["Reader"]

_ALIGNED = 64  # bytes; as torch's own memory
_SHORT = 4096  # bytes; a file wanted in shorter stretches is read in another way


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


class _Plan:
    """How the files are read.

    Attributes:
        streams: Those this rank reads from the beginning to the end, and where their bytes go.
        given: What of those it passes on to other ranks.
        expected: Where what other ranks pass on goes, by rank and number of the file.
        passed: The parts of that, by number of the file.
        others: Parts that are read one by one; how far on in their file they lie, from 0 to 1.
    """

    def __init__(self, others: list[tuple[float, Wanted]]) -> None:
        self.streams: dict[str, list[Stretch]] = {}
        self.given: dict[str, list[Stretch]] = {}
        self.expected: defaultdict[int, dict[int, Places]] = defaultdict(dict)
        self.passed: dict[int, list[Wanted]] = {}
        self.others = others


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
        self._num_threads = num_threads(ctx)
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
        nbytes = _nbytes(wanted)
        if not nbytes or wanted.block.shape != wanted.entry.shape or is_sharded(like):
            return self.read(name, like)
        self._wanted.append(wanted._replace(place=self._to_share))
        self._to_share += -(-nbytes // _ALIGNED) * _ALIGNED
        return wanted.values

    def offer(self) -> Offer:
        """What may be shared with other ranks."""
        shared = [one for one in self._wanted if one.place is not None]
        rest = [one for one in self._wanted if one.place is None and one.values.device.type == "cpu"]
        wants, more = (
            hashlib.sha256(repr((self.folder.name, [one[:3] for one in each])).encode()).hexdigest()
            for each in (shared, rest)
        )
        return Offer(wants, self._to_share, more, sum(map(_nbytes, rest)))

    def files(self) -> list[int]:
        """The numbers of the files that hold what is wanted."""
        names = {piece.file for wanted in self._wanted for piece in wanted.entry.pieces}
        return [number for number, name in enumerate(self.manifest.files) if name in names]

    def check(self) -> None:
        """Compare this rank's files with their hashes, and read nothing.

        Raises:
            Damage: One is not the one that was saved.
        """
        for name in self._to_check():
            check_file(self.folder, name, self.manifest)

    def fill(self, shared: NodeMemory | None = None, others_read: Collection[int] = ()) -> None:
        """Read what is wanted, and compare this rank's files with their hashes.

        Args:
            shared: Memory for what `look_at` gave. It is filled when all ranks that have it are here.
            others_read: Numbers of the files that other processes of this node read at the same time.

        Raises:
            CheckpointError: A file does not hold what the manifest says; `Damage` if it is not the one that was saved.
        """
        self._shared = shared
        try:
            self._fill_all(shared, others_read)
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

    def _fill_all(self, shared: NodeMemory | None, others_read: Collection[int]) -> None:
        self._move_to(shared)
        plan = self._plan(shared)
        to_check = self._to_check()
        threads = ThreadPoolExecutor(self._num_threads + 1, thread_name_prefix="weft-read")  # one waits for the disk
        checks = ThreadPoolExecutor(1, thread_name_prefix="weft-verify")
        passing = None if shared is None else shared.passing
        waiting = deque(sorted(plan.others, key=itemgetter(0)))
        done, total = 0, sum(self.manifest.files[file].bytes for file in plan.streams)
        try:
            if passing is not None:
                passing.take(plan.expected)
            files = [file for file in to_check if file not in plan.streams]
            found = [checks.submit(check_file, self.folder, file, self.manifest) for file in files]
            blocks = Blocks(2 * (self._num_threads + 1), threads)
            read_twice = {piece.file for _, wanted in plan.others for piece in wanted.entry.pieces}
            for number, file in enumerate(self.manifest.files):
                if file not in plan.streams:
                    continue
                is_alone = number not in others_read and file not in read_twice
                for size in self._stream(number, file, plan, passing, blocks, alone=is_alone):
                    # Of the other files as much: other ranks read them at the same pace, so their pages are there.
                    done += size
                    while waiting and waiting[0][0] * total < done:
                        found.append(threads.submit(self._fill, *waiting.popleft()[1][:4]))
            rest = [part for _, part in waiting]
            if passing is not None:
                passing.end()
                taken = passing.taken()
                rest += [part for number, parts in plan.passed.items() if number not in taken for part in parts]
            found += [threads.submit(self._fill, *part[:4]) for part in rest]
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
                memory = shared.memory[start : start + _nbytes(wanted)].view(values.dtype)
                values.set_(memory.untyped_storage(), memory.storage_offset(), values.shape, values.stride())

    def _plan(self, shared: NodeMemory | None) -> _Plan:
        """How each file is read."""
        # What goes to an accelerator is put together on the CPU, tensor by tensor.
        plan = _Plan([(1.0, wanted) for wanted in self._wanted if wanted.values.device.type != "cpu"])
        numbers = {name: number for number, name in enumerate(self.manifest.files)}
        for file, parts in self._by_file().items():
            number, checker = numbers[file], self._checkers[file]
            reader = self._rank if shared is None else shared.reader_of(number, checker)
            own = [part for part in parts if part.place is None]
            mine = parts if reader == self._rank else own
            passes = shared is not None and shared.passing is not None
            if passes and shared is not None and checker not in shared.ranks:
                passes = 2 * sum(map(_nbytes, own)) >= self.manifest.files[file].bytes  # it is read whole
            stretches = self._stretches(own) if passes else None
            if checker == self._rank or (reader == self._rank and stretches):
                everything = self._stretches(mine)
                if everything is not None:
                    plan.streams[file] = everything
                    plan.given[file] = stretches or []
                    continue
            elif stretches:
                plan.expected[reader][number] = Places(stretches)
                plan.passed[number] = own
                continue
            plan.others += [(place / len(mine), part) for place, part in enumerate(mine)]
        return plan

    def _by_file(self) -> dict[str, list[Wanted]]:
        """What is wanted of each file on the CPU, piece by piece, in the order of its bytes."""
        parts: defaultdict[str, list[Wanted]] = defaultdict(list)
        for wanted in sorted(self._wanted, key=_place_in_file):
            for piece in wanted.entry.pieces if wanted.values.device.type == "cpu" else ():
                parts[piece.file].append(wanted._replace(entry=replace(wanted.entry, pieces=(piece,))))
        return {file: parts[file] for file in self.manifest.files if file in parts}

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

    def _stream(
        self, number: int, file: str, plan: _Plan, passing: Passing | None, blocks: Blocks, *, alone: bool
    ) -> Iterator[int]:
        """Read a file from the beginning to the end, and compare it with its hash if that is for this rank to do.

        Yields:
            How many bytes were read since the last time.

        Raises:
            Damage: It is not the one that was saved, or cannot be read.
        """
        entry, handle = self.manifest.files[file], self._files.handle(file)
        digest = new_hash(entry.hash) if self._checkers[file] == self._rank else None
        places, given = Places(plan.streams[file]), Places(plan.given[file])
        in_threads = self._num_threads > 1
        try:
            for block in blocks.of(handle, entry.bytes, alone=alone, places=places if in_threads else None):
                if digest is not None:
                    digest.update(block.memory)
                if not in_threads:
                    places.put(block)
                if passing is not None and any(given.parts(block)):
                    passing.give(number, block)
                yield len(block.memory)
            if passing is not None:
                passing.all_given(number)
            found = None if digest is None or digest.hexdigest() == entry.digest else other_bytes(entry)
        except (OSError, ValueError) as error:
            found = f"{type(error).__name__}: {error}"
        if found is not None:
            raise Damage(damage_text(self.folder, file, self.manifest, found))

    def _fill(self, name: str, entry: TensorEntry, block: Block, values: torch.Tensor) -> None:
        on_cpu = values if values.device.type == "cpu" else torch.empty_like(values, device="cpu")
        self._files.read(name, entry, block, on_cpu)
        if on_cpu is not values:
            values.copy_(on_cpu)


def _nbytes(wanted: Wanted) -> int:
    return wanted.values.numel() * wanted.values.element_size()


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
