"""Tensors that several ranks hold: are they the same?

One rank writes each of them. If ranks have drifted apart, a checkpoint would be a mixture: a state that never was. So
each rank makes a number of the bytes of every such tensor, on the device it is on, in the time of one look at it. Ranks
tell one hash of all numbers; only if that differs do they tell the numbers, to name the tensors.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import torch

from weft.errors import CheckpointError, listed
from weft.tensors.blocks import memory_of

Replicas: TypeAlias = Mapping[str, Mapping[str, int]]  # by object and ranks that hold them alike: numbers by name
_COLUMNS = 1024
_SMALL = 2**16  # bytes
_PART = 2**22  # elements that are widened at a time
_MIX = 0x1E3779B97F4A7C15  # an odd number with bits all over it


def fingerprints(tensors: Mapping[str, torch.Tensor], ranks: Mapping[str, Collection[int]]) -> Replicas:
    """Numbers that are equal if the bytes of tensors are, and next to never otherwise.

    Args:
        tensors: By name, on any device; what this rank holds of them.
        ranks: Who holds the same, by name.
    """
    numbers = {name: _fingerprint(tensor) for name, tensor in tensors.items()}
    elsewhere = {name: number for name, number in numbers.items() if isinstance(number, torch.Tensor)}
    # All at once: each answer of a device is waited for.
    found = dict(zip(elsewhere, torch.stack(list(elsewhere.values())).tolist() if elsewhere else (), strict=True))
    groups: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for name, number in numbers.items():
        group = f"{name.partition('/')[0]} {' '.join(map(str, ranks[name]))}"
        groups[group][name] = found[name] if isinstance(number, torch.Tensor) else number
    return groups


def digests(replicas: Replicas) -> dict[str, str]:
    """One hash of each group of tensors."""
    return {group: hashlib.sha256(json.dumps(numbers).encode()).hexdigest() for group, numbers in replicas.items()}


def differing_groups(told: Sequence[Mapping[str, str]]) -> list[str]:
    """The groups of tensors of which ranks told other hashes."""
    hashes: defaultdict[str, set[str]] = defaultdict(set)
    for one in told:
        for group, digest in one.items():
            hashes[group].add(digest)
    return [group for group, found in hashes.items() if len(found) > 1]


def raise_different(told: Sequence[Replicas]) -> None:
    """Raise, naming tensors and ranks.

    Args:
        told: By each rank: the numbers of the groups that differ.

    Raises:
        CheckpointError: Always.
    """
    by_name: defaultdict[tuple[str, str], defaultdict[int | None, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, groups in enumerate(told):
        for group, numbers in groups.items():
            for name, number in numbers.items():
                by_name[group, name][number].append(rank)
    wrong = [
        f"{name}: one value on {', another on '.join(f'rank {listed(ranks)}' for ranks in found.values())}"
        for (_, name), found in by_name.items()
        if len(found) > 1
    ]
    raise CheckpointError(
        "save: replicas of a tensor have different values",
        found="; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more tensors" if len(wrong) > 3 else ""),
        expected="replicas that are equal, bit for bit, and that nothing changes during a save; and what is of each "
        "rank alone, gathered",
        fix="tensor.data.copy_(weft.broadcast(tensor.data, ctx))  # and weft.check(ctx, model=model) to find why",
    )


@torch.no_grad()
def _fingerprint(tensor: torch.Tensor) -> int | torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.device.type == "cpu" and flat.nbytes <= _SMALL:  # a hash is one call
        return int.from_bytes(hashlib.blake2b(memory_of(flat), digest_size=7).digest(), "little")
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    data = flat.view(torch.uint8)
    whole = data[: data.numel() // 8 * 8]
    # In halves where a number fills eight bytes: the sum of many of those with only high bits has none of them left.
    words = whole.view(torch.int32 if flat.dtype == torch.float64 else torch.int64)
    total = torch.zeros(_COLUMNS, dtype=torch.int64, device=flat.device)
    for part in words.split(_PART):
        rows = part.numel() // _COLUMNS
        total += part[: rows * _COLUMNS].view(rows, _COLUMNS).sum(0, dtype=torch.int64)
        rest = part[rows * _COLUMNS :]
        total[: rest.numel()] += rest
    total[: data.numel() % 8] += data[whole.numel() :]
    return (total * _weights(flat.device)).sum()


@functools.lru_cache(maxsize=8)
def _weights(device: torch.device) -> torch.Tensor:
    """An odd number for each column."""
    return (torch.arange(_COLUMNS, device=device) * 2 + 1) * _MIX
