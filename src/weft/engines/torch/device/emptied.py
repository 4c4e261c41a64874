"""Memory of a device that is given back for a while, under the tensors that lie in it.

A tensor keeps its storage, and the storage has no bytes meanwhile, as FSDP2 does with what it has gathered. So every
view of it has its values again afterwards: shards, buckets of gradients, what optimizers and hooks have at hand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from weft import torch_internals
from weft.tensors.dtensor import local
from weft.tensors.quantized import is_wrapped


@contextlib.contextmanager
def emptied(tensors: Iterable[torch.Tensor], device: torch.device) -> Iterator[None]:
    """Leave tensors without memory on a device inside the body; their values wait on the CPU, pinned for a device.

    What lies elsewhere, or in memory that is not torch's own, as of a mapped file, stays where it is.

    Args:
        tensors: Any; views of one storage share it still.
        device: Which memory is given back.
    """
    pinned = device.type != "cpu" and torch.accelerator.is_available()
    waiting: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
    try:
        with torch.no_grad():
            for storage in _storages(tensors, device):
                place = "meta" if storage.device.type == "meta" else "cpu"  # a rehearsal has no values
                values = torch.empty(storage.nbytes(), dtype=torch.uint8, device=place, pin_memory=pinned)
                waiting.append((storage, values.copy_(_bytes_of(storage), non_blocking=pinned)))
            if pinned:  # streams may still use what is given back, or copy it
                torch.accelerator.synchronize()
            for storage, _ in waiting:
                storage.resize_(0)
        yield
    finally:
        with torch.no_grad():
            for storage, values in waiting:
                if storage.nbytes() != values.nbytes:
                    storage.resize_(values.nbytes)
                    _bytes_of(storage).copy_(values, non_blocking=pinned)
            if pinned:
                torch.accelerator.synchronize()


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor has its values now, and not those of `emptied`."""
    if tensor.is_meta or not tensor.numel() or tensor.layout is not torch.strided:
        return True
    return bool(tensor.untyped_storage().nbytes())


def _storages(tensors: Iterable[torch.Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        part: Any = local(tensor.detach())
        parts = [getattr(part, name) for name in part.__tensor_flatten__()[0]] if is_wrapped(part) else [part]
        for one in parts:
            if one.device.type == device.type and one.layout is torch.strided:
                storage = one.untyped_storage()
                if storage.nbytes() and storage.resizable():
                    found.setdefault(int(torch_internals.STORAGE_ADDRESS.of(storage)), storage)
    return list(found.values())


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
