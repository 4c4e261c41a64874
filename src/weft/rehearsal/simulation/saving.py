"""`torch.save` without a file: the tensors have no values that could be in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from weft import torch_internals
from weft.peers.pretended import PretendedGroup
from weft.rehearsal.simulation.allocations import plain_parts


@contextlib.contextmanager
def saves_counted(group: PretendedGroup) -> Iterator[None]:
    """Let `torch.save` write nothing, and count the bytes of the tensors as saved by this rank."""

    def count(obj: object, *_: object, **__: object) -> None:
        group.saved = sum(_storages(obj).values())

    module: Any = torch
    save, module.save = module.save, count
    try:
        yield
    finally:
        module.save = save


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
