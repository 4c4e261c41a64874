"""Reading tensors of a checkpoint, cut up as they are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.files import open_tensors
from weft.checkpoint.manifest import DTYPES, Manifest, Piece
from weft.checkpoint.pieces import Block, block_of, local_part, overlap
from weft.engines.torch.shards import is_sharded
from weft.errors import CheckpointError, message

__all__ = ["Reader"]


class Reader:
    """Reads from files that were verified before."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest
        self._files: dict[str, Any] = {}

    def read(self, name: str, like: torch.Tensor | None) -> torch.Tensor:
        """Read a tensor, cut up as `like`, or whole if that is None.

        Raises:
            CheckpointError: There is no such tensor, or a file does not hold what the manifest says.
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
        values = torch.empty(block.shape, dtype=getattr(torch, entry.dtype))
        for piece in entry.pieces if block.size else ():
            common = overlap(block, Block(piece.offsets, piece.shape))
            if common is not None:
                place = _inside(common, block.offsets)
                values[place] = self._slice(name, entry.dtype, piece, common)
        return values if like is None else _cut_like(values, like)

    def _slice(self, name: str, dtype: str, piece: Piece, block: Block) -> torch.Tensor:
        """The part of a piece that lies in `block`."""
        try:
            if piece.file not in self._files:
                self._files[piece.file] = open_tensors(self._folder / piece.file)
            handle = self._files[piece.file].get_slice(name)
            found = (handle.get_dtype(), tuple(handle.get_shape()))
            if found != (DTYPES[dtype][0], piece.shape):
                raise ValueError(f"{found[0]} of shape {found[1]}")
            part: torch.Tensor = (
                handle[_inside(block, piece.offsets)] if block.shape else self._files[piece.file].get_tensor(name)
            )
        except MemoryError:
            raise
        except Exception as error:
            raise CheckpointError(
                message(
                    f"restore: {name} cannot be read from {self._folder / piece.file}",
                    found=f"{type(error).__name__}: {error}",
                    expected=f"{dtype} of shape {piece.shape}, as the manifest says",
                    fix="restore an older checkpoint",
                )
            ) from error
        return part


def _inside(block: Block, start: tuple[int, ...]) -> tuple[slice, ...]:
    """Where a block lies in one that begins at `start`."""
    return tuple(
        slice(at - zero, at - zero + size) for at, zero, size in zip(block.offsets, start, block.shape, strict=True)
    )


def _cut_like(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's block as a tensor that is cut up as `like`."""
    if not is_sharded(like):
        return values
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  (half a second of imports in torch)

    cut: Any = like
    moved = values.to(local_part(like).device)
    return DTensor.from_local(
        moved, cut.device_mesh, cut.placements, run_check=False, shape=cut.shape, stride=cut.stride()
    )
