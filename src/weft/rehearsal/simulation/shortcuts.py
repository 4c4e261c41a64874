"""What torch does and a simulation need not: a view for each of thousands of ranks; files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from weft import torch_internals
from weft.peers.pretended import PretendedGroup
from weft.private_names import replaced
from weft.rehearsal.simulation.allocations import plain_parts


class _Chunks:
    """What `torch.chunk` returns, filled up with tensors without elements; each is made when it is asked for."""

    def __init__(self, tensor: torch.Tensor, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim

    def __getitem__(self, index: int) -> torch.Tensor:
        length = self._tensor.size(self._dim)
        width = -(-length // self._count)
        start = index * width
        if start >= length:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(width, length - start))

    def __len__(self) -> int:
        return self._count


@contextlib.contextmanager
def fewer_fsdp_chunks() -> Iterator[None]:
    """Let FSDP2 make the chunks that it uses, and no others."""
    module, name = torch_internals.chunk.home  # imported here: it takes half a second
    with replaced(module, **{name: lambda tensor, num_chunks, dim: _Chunks(tensor, num_chunks, dim)}):
        yield


@contextlib.contextmanager
def saves_counted(group: PretendedGroup) -> Iterator[None]:
    """Let `torch.save` write nothing, as tensors have no values, and count their bytes as saved by this rank."""

    def count(obj: object, *_: object, **__: object) -> None:
        group.saved = sum(_storages(obj).values())

    with replaced(torch, save=count):
        yield


def _storages(obj: object) -> dict[int, int]:
    """Sizes of storages by address: tensors that share one are written once."""
    found: dict[int, int] = {}
    for leaf in torch_internals.tree.found.tree_leaves(obj):
        if hasattr(leaf, "state_dict"):
            found |= _storages(leaf.state_dict())
        for part in plain_parts(leaf) if isinstance(leaf, torch.Tensor) else ():
            storage = part.untyped_storage()
            found[torch_internals.STORAGE_ADDRESS.of(storage)] = storage.nbytes()
    return found
