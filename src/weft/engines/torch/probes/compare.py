"""Compare values with those of one process, and with those of the other ranks."""

from __future__ import annotations

import contextlib
import hashlib
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from weft.engines.probes import Compared
from weft.engines.torch_errors import is_communication_error
from weft.errors import WeftError
from weft.tensors.checksums import checksums
from weft.tensors.dtensor import local
from weft.tensors.messages import control_device, gathered
from weft.tensors.nested import leaves, tensors

LIMIT, LOW_LIMIT = 1e-5, 5e-2  # of relative differences; the second of numbers in 16 bits
LOW = (torch.bfloat16, torch.float16)

# What forward raises where ranks have parts of other shapes, or of another kind, than it is written for.
OTHERS = (WeftError, dist.DistError, torch.OutOfMemoryError)
OF_PARTS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, AttributeError)  # but for `OTHERS`


def is_of_parts(error: Exception) -> bool:
    """Whether an error of `OF_PARTS` is none of `OTHERS`, nor of communication."""
    return not isinstance(error, OTHERS) and not is_communication_error(error)


@contextlib.contextmanager
def parts_suppressed() -> Iterator[None]:
    """Go on after errors because of shapes or kinds."""
    try:
        yield
    except OTHERS:
        raise
    except OF_PARTS:
        pass


def is_low(device_type: str, given: Iterable[torch.Tensor]) -> bool:
    """Whether something is computed in 16 bits of these tensors."""
    return torch.is_autocast_enabled(device_type) or any(one.dtype in LOW for one in given)


def returned_tensors(value: Any, *, numbers: bool = True, depth: int = 3) -> list[torch.Tensor]:
    """What a call has returned, as tensors: also numbers and arrays; and if there are no tensors, what objects hold."""
    found = []
    for _, leaf in leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif numbers and isinstance(leaf, (bool, int, float, np.number)):
            found.append(torch.tensor(float(leaf), dtype=torch.float64))
        elif numbers and isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
            found.append(torch.from_numpy(leaf.astype(np.float64)))
    if depth and not any(True for _ in tensors(value)):
        held = [vars(leaf) for _, leaf in leaves(value) if hasattr(leaf, "__dict__") and not callable(leaf)]
        found += [one for attributes in held for one in returned_tensors(attributes, numbers=numbers, depth=depth - 1)]
    return found


def difference(one: Compared) -> float:
    """The norm of the difference, relative to that of what is expected; infinite for other shapes or one NaN."""
    found, expected = _real(one.found.detach()), _real(one.expected.detach())
    if found.shape != expected.shape:
        return float("inf")
    off, norm = _norm(found - expected), _norm(expected)
    if not math.isfinite(off + norm):
        both = (found == expected) | (found.isnan() & expected.isnan())  # infinities and NaN of both are equal
        off, norm = _norm((found - expected).masked_fill(both, 0.0)), _norm(expected.nan_to_num(0.0, 0.0, 0.0))
    relative = off / max(norm, one.floor, 1e-300)
    return relative if relative == relative else float("inf")


def _real(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.double()


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def digest(value: Any) -> torch.Tensor:
    """Numbers that are equal for tensors of equal shapes, dtypes and bits: [2] int64, on the CPU."""
    found = list(tensors(value))
    facts = [(tuple(one.shape), str(one.dtype)) for one in found], checksums(map(local, found))
    return torch.tensor(struct.unpack("2q", hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()))


def differing_ranks(value: Any, group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """The ranks of a group whose value differs from that of the first one.

    Collectives: one all-gather of two numbers.
    """
    everyone = gathered(digest(value).to(control_device(group, device)), group)
    return [rank for rank, one in enumerate(everyone) if not torch.equal(one, everyone[0])]


def largest_over(group: dist.ProcessGroup | None, values: Sequence[float], device: torch.device) -> list[float]:
    """The largest of each value over the ranks. Collectives: one all-reduce."""
    if group is None or not values:
        return list(values)
    message = torch.tensor(values, dtype=torch.float64, device=control_device(group, device))
    dist.all_reduce(message, dist.ReduceOp.MAX, group=group)
    return message.tolist()
