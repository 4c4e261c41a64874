"""Reading the tensors of a checkpoint: what is new into memory of its own, what already exists in place.

[Note: two passes] First everything is checked: each rank compares its share of the files with their hashes, and looks
up where each block that it requests lies. Then it reads these blocks from files that are still open, straight into the
tensors they are for. No second copy of the state is made, and ranks need nothing of each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch.autograd.graph import increment_version

from weft.checkpoint.format.manifest import Manifest, check_place
from weft.checkpoint.format.safetensors_read import TensorFiles
from weft.checkpoint.format.transfer import Stored, Transfer, equal_bits, is_faithful, read_blocks, read_in_parts
from weft.checkpoint.storage.directory import Directory
from weft.checkpoint.storage.find import check_files
from weft.collectives.on_all_ranks import num_threads
from weft.context import DistContext
from weft.errors import CheckpointError
from weft.tensors.blocks import Block, Held, sharded_as, whole


class Reader:
    """Reads from the files of a checkpoint: first tensors are requested, then all of them are read.

    Args:
        folder: Of the checkpoint.
        manifest: Its manifest.
        ctx: The context whose ranks take part; each compares some of the files with their hashes.
    """

    def __init__(self, folder: Path, manifest: Manifest, ctx: DistContext) -> None:
        self.folder = folder
        self.manifest = manifest
        self._ctx = ctx
        self._files = TensorFiles("restore", {name: folder / name for name in manifest.files})
        self._new: list[Transfer] = []
        self._live: list[Transfer] = []

    # -- first pass ------------------------------------------------------------------------------

    def request(self, name: str, like: Held | None) -> torch.Tensor:
        """A tensor in memory of its own, sharded as `like`, or whole if that is None; `read_new` gives it values.

        Raises:
            CheckpointError: There is no such tensor, or not of the shape of `like`, or the files do not hold it.
            OSError: A file cannot be opened.
        """
        stored, block = self._found(name, like)
        device = like.local.device if like is not None and like.is_sharded else torch.device("cpu")
        values = torch.empty(block.shape, dtype=stored.dtype, device=device)
        self._new.append(Transfer(stored, block, values))
        return values if like is None else sharded_as(values, like.tensor)

    def request_into(self, name: str, held: Held) -> None:
        """Let `read_live` replace the values that a tensor has.

        Raises:
            CheckpointError: As with `request`.
            OSError: A file cannot be opened.
        """
        self._live.append(Transfer(*self._found(name, held), held.local))

    def _found(self, name: str, like: Held | None) -> tuple[Stored, Block]:
        tensors = self.manifest.tensors
        if name not in tensors:
            raise CheckpointError(
                f"restore: {name} is not in the checkpoint",
                found=f"{len(tensors)} other tensors",
                expected="every tensor that the saved values refer to",
                fix="restore an older checkpoint",
            )
        name = tensors[name].same_as or name
        entry = tensors[name]
        if like is not None and entry.shape != like.shape:
            raise CheckpointError(
                f"restore: {name} has another shape in the checkpoint",
                found=f"{entry.shape}, where the state has {like.shape}, sharded over ranks",
                expected="the shape that was saved",
                fix="build the object as it was, or leave it out of the state and restore with strict=False",
            )
        block = whole(entry.shape) if like is None else like.block
        self._files.check(name, entry, block)
        return Stored(name, entry), block

    def check(self) -> None:
        """Compare this rank's share of the files with their hashes.

        Raises:
            Damage: A file differs, or the folder is another checkpoint's.
            OSError: It cannot be read.
        """
        share = list(self.manifest.files)[self._ctx.rank :: self._ctx.world_size]
        check_files(Directory(self.folder.parent), self.folder.name, self.manifest, share)
        check_place(self.folder, self.manifest)

    def lost_values(self, held: Held, name: str, *others: str) -> Iterator[str]:
        """What would be lost if a tensor took values that are stored under one name, or several if it is tied.

        Yields:
            A text for each of these problems.

        Raises:
            CheckpointError: The files do not hold them.
            OSError: They cannot be read.
        """
        dtype = held.tensor.dtype
        if not others and self.manifest.tensors[name].dtype == held.dtype:
            return
        stored, block = self._found(name, held)
        for other in others:
            twin, _ = self._found(other, held)
            if stored.dtype != twin.dtype or not equal_bits(self._files, stored, twin, block, stored.dtype):
                yield f"{held.name} and {other} are one tensor, and have two values in the checkpoint"
        parts = read_in_parts(self._files, stored, block, stored.dtype) if stored.dtype != dtype else ()
        if not all(is_faithful(values, values.to(dtype)) for _, values in parts):
            yield f"{held.name} has numbers that {held.dtype} does not have"

    # -- second pass -----------------------------------------------------------------------------

    def read_new(self) -> None:
        """Give values to the tensors of `request`.

        Raises:
            CheckpointError: A file is gone or not as it was.
            OSError: It cannot be read.
        """
        read_blocks(self._files, self._new, num_threads=num_threads(self._ctx))

    def read_live(self) -> None:
        """Give values to the tensors of `request_into`, and close the files.

        If it fails, some have new values and some old ones.

        Raises:
            CheckpointError: A file is gone or not as it was.
            OSError: It cannot be read.
        """
        read_blocks(self._files, self._live, num_threads=num_threads(self._ctx))
        for _, _, out in self._live:
            if out.device.type == "cpu" and not out.is_inference():
                increment_version(out)  # for autograd, which has not seen it change
        self._files.close()
        self._new.clear()
        self._live.clear()
