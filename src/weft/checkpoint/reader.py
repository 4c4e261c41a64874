"""Reading the tensors of a checkpoint: what is new into memory of its own, what is there already in place.

[Note: two passes] First everything is checked: each rank compares its share of the files with their hashes, and looks
up where each block that it wants lies. Then it reads these blocks from files that are still open, straight into the
tensors they are for. No second copy of the state is made, and ranks need nothing of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from weft.checkpoint.format.dtypes import is_faithful
from weft.checkpoint.format.manifest import DTYPES, Manifest, TensorEntry
from weft.checkpoint.format.safetensors_read import TensorFiles, in_order, inside
from weft.checkpoint.format.safetensors_write import check_file
from weft.checkpoint.format.tensor_blocks import Block, block_of, local_part
from weft.collectives.on_all_ranks import num_threads
from weft.context import DistContext
from weft.errors import CheckpointError
from weft.tensors.dtensor import is_sharded

__all__ = ["Reader"]

_PART_BYTES = 16 * 2**20  # of a tensor that is converted, or copied to a device
_SHARE_BYTES = 8 * 2**20  # that a thread reads at a time
_SHARE_TENSORS = 512


class _Wanted(NamedTuple):
    """A block of a tensor in the files, and where it goes."""

    name: str
    entry: TensorEntry
    block: Block
    out: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.block.size * DTYPES[self.entry.dtype][1]


class Reader:
    """Reads from the files of a checkpoint. It is told what is wanted, then `fill` and `put` read it.

    Args:
        folder: Of the checkpoint.
        manifest: Its manifest.
        ctx: Whose ranks; each compares some of the files with their hashes.
    """

    def __init__(self, folder: Path, manifest: Manifest, ctx: DistContext) -> None:
        self.folder = folder
        self.manifest = manifest
        self._files = TensorFiles("restore", {name: folder / name for name in manifest.files})
        self._to_check = [name for number, name in enumerate(manifest.files) if number % ctx.world_size == ctx.rank]
        self._num_threads = num_threads(ctx)
        self._new: list[_Wanted] = []
        self._live: list[_Wanted] = []

    # -- what is wanted --------------------------------------------------------------------------

    def read(self, name: str, like: torch.Tensor | None) -> torch.Tensor:
        """Want a tensor in memory of its own, cut up as `like`, or whole if that is None; `fill` gives it values.

        Raises:
            CheckpointError: There is no such tensor, or not of the shape of `like`, or the files do not hold it.
            OSError: A file cannot be opened.
        """
        name, entry, block = self._found(name, like)
        device = local_part(like).device if like is not None and is_sharded(like) else torch.device("cpu")
        values = torch.empty(block.shape, dtype=getattr(torch, entry.dtype), device=device)
        self._new.append(_Wanted(name, entry, block, values))
        return values if like is None else _cut_like(values, like)

    def read_into(self, name: str, live: torch.Tensor) -> None:
        """Want a tensor in place of the values that another has; `put` gives it them.

        Raises:
            CheckpointError: As with `read`.
            OSError: A file cannot be opened.
        """
        self._live.append(_Wanted(*self._found(name, live), local_part(live)))

    def _found(self, name: str, like: torch.Tensor | None) -> tuple[str, TensorEntry, Block]:
        entry = self.manifest.tensors.get(name)
        if entry is not None and entry.same_as is not None:
            name, entry = entry.same_as, self.manifest.tensors[entry.same_as]
        if entry is None:
            raise CheckpointError(
                f"restore: {name} is not in the checkpoint",
                found=f"{len(self.manifest.tensors)} other tensors",
                expected="every tensor that its values mention",
                fix="restore an older checkpoint",
            )
        if like is not None and entry.shape != tuple(like.shape):
            raise CheckpointError(
                f"restore: {name} has another shape in the checkpoint",
                found=f"{entry.shape}, where the state has {tuple(like.shape)}, cut over ranks",
                expected="the shape that was saved",
                fix="build the object as it was, or leave it out of the state",
            )
        block = Block((0,) * len(entry.shape), entry.shape) if like is None else block_of(like)
        self._files.check(name, entry, block)
        return name, entry, block

    # -- first pass ------------------------------------------------------------------------------

    def check(self) -> None:
        """Compare this rank's share of the files with their hashes.

        Raises:
            Damage: One is not the one that was saved.
            OSError: One cannot be read.
        """
        self._in_threads(self._to_check, lambda file: check_file(self.folder, file, self.manifest))

    def fits(self, name: str, live: torch.Tensor) -> bool:
        """Whether numbers stay what they are in the dtype of the tensor that they are for.

        Raises:
            CheckpointError: The files do not hold it.
            OSError: They cannot be read.
        """
        parts = self._parts(_Wanted(*self._found(name, live), local_part(live)))
        return all(is_faithful(values, values.to(live.dtype)) for _, values in parts)

    def are_equal(self, name: str, other: str, live: torch.Tensor) -> bool:
        """Whether two tensors of the checkpoint have the same values, in the block that a rank holds.

        Raises:
            CheckpointError: The files do not hold them.
            OSError: They cannot be read.
        """
        one, two = (self._parts(_Wanted(*self._found(each, live), local_part(live))) for each in (name, other))
        bits = zip(one, two, strict=True)
        return all(a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b)) for (_, a), (_, b) in bits)

    # -- second pass -----------------------------------------------------------------------------

    def fill(self) -> None:
        """Give values to what `read` gave.

        Raises:
            CheckpointError: A file is gone or not as it was.
            OSError: It cannot be read.
        """
        self._read_all(self._new)

    def put(self) -> None:
        """Give values to the tensors of `read_into`. If it fails, some have new values and some old ones.

        Raises:
            CheckpointError: A file is gone or not as it was.
            OSError: It cannot be read.
        """
        self._read_all(self._live)
        for wanted in self._live:
            if wanted.out.device.type == "cpu" and not wanted.out.is_inference():
                increment_version(wanted.out)  # for autograd, which has not seen it change

    def close(self) -> None:
        """Close the files."""
        self._files.close()
        self._new.clear()
        self._live.clear()

    def _read_all(self, wanted: list[_Wanted]) -> None:
        ordered = sorted(wanted, key=_place)
        for one in ordered:
            if one.out.device.type != "cpu":
                self._read(one)
        self._in_threads(_shares(one for one in ordered if one.out.device.type == "cpu"), self._read_share)

    def _read_share(self, share: Iterable[_Wanted]) -> None:
        for wanted in share:
            self._read(wanted)

    @torch.no_grad()
    def _read(self, wanted: _Wanted) -> None:
        name, entry, block, out = wanted
        if getattr(torch, entry.dtype) == out.dtype and out.device.type == "cpu" and out.is_contiguous():
            self._files.read(name, entry, block, out)
            return
        for part, values in self._parts(wanted):
            out[inside(part, (0,) * len(part.shape))].copy_(values)

    def _parts(self, wanted: _Wanted) -> Iterator[tuple[Block, torch.Tensor]]:
        """A block in parts, on the CPU, in the dtype that was saved; the values hold until the next is read."""
        dtype = getattr(torch, wanted.entry.dtype)
        memory = torch.empty(min(wanted.nbytes, _PART_BYTES), dtype=torch.uint8)
        for part in in_order(wanted.block.shape, _PART_BYTES // dtype.itemsize):
            values = memory[: part.size * dtype.itemsize].view(dtype).view(part.shape)
            offsets = tuple(a + b for a, b in zip(part.offsets, wanted.block.offsets, strict=True))
            self._files.read(wanted.name, wanted.entry, Block(offsets, part.shape), values)
            yield part, values

    def _in_threads(self, items: Iterable[Any], work: Callable[[Any], None]) -> None:
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="weft-read") as threads:
            results = [threads.submit(work, item) for item in items]
            try:
                for result in results:
                    result.result()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise


def _place(wanted: _Wanted) -> tuple[int, str]:
    """In which order tensors lie in a file; as `file_head` has it."""
    return -DTYPES[wanted.entry.dtype][1], wanted.name


def _shares(wanted: Iterable[_Wanted]) -> Iterator[list[_Wanted]]:
    """Tensors in groups that are worth a thread's while."""
    share: list[_Wanted] = []
    size = 0
    for one in wanted:
        share.append(one)
        size += one.nbytes
        if size >= _SHARE_BYTES or len(share) >= _SHARE_TENSORS:
            yield share
            share, size = [], 0
    yield share


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1).view(torch.uint8)


def _cut_like(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's block as a tensor that is cut up as `like`."""
    if not is_sharded(like):
        return values
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  (half a second of imports in torch)

    cut: Any = like
    return DTensor.from_local(
        values, cut.device_mesh, cut.placements, run_check=False, shape=cut.shape, stride=cut.stride()
    )
