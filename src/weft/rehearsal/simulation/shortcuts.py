"""What torch does once per rank, and a simulation need not: thousands of views of which it uses two."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from weft import torch_internals


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
    before = getattr(module, name)
    setattr(module, name, lambda tensor, num_chunks, dim: _Chunks(tensor, num_chunks, dim))
    try:
        yield
    finally:
        setattr(module, name, before)
