"""Tensors that several ranks hold: are they the same?

One rank writes each of them. If ranks have drifted apart, a checkpoint would be a mixture: a state that never was. So
each rank makes a checksum of every such tensor. Ranks tell one hash of all of them; only if that differs do they tell
the checksums, to name the tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

import torch

from weft.errors import CheckpointError, listed
from weft.tensors.checksums import checksums

Replicas: TypeAlias = Mapping[str, Mapping[str, int]]  # by object and ranks that hold them alike: numbers by name


def begin_fingerprints(tensors: Mapping[str, torch.Tensor], ranks: Mapping[str, Collection[int]]) -> Future[Replicas]:
    """Begin to make checksums of tensors. On a CPU a thread makes them: while the disk writes, there is time for it.

    Args:
        tensors: By name, on any device; what this rank holds of them.
        ranks: Who holds the same, by name.
    """

    def make() -> Replicas:
        groups: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for name, number in zip(tensors, checksums(tensors.values()), strict=True):
            groups[f"{name.partition('/')[0]} {' '.join(map(str, ranks[name]))}"][name] = number
        return groups

    if {tensor.device.type for tensor in tensors.values()} == {"cpu"}:
        thread = ThreadPoolExecutor(1, thread_name_prefix="weft-checksums")
        made = thread.submit(make)
        thread.shutdown(wait=False)  # it ends after this
        return made
    made = Future()  # at once: a thread would not be on the stream of this one
    made.set_result(make())
    return made


def digests(replicas: Replicas) -> dict[str, str]:
    """One hash of each group of tensors."""
    return {group: hashlib.sha256(json.dumps(numbers).encode()).hexdigest() for group, numbers in replicas.items()}


def differing_groups(told: Sequence[Mapping[str, str]]) -> list[str]:
    """The groups of tensors of which ranks told other hashes."""
    different = dict.fromkeys(group_and_hash for one in told for group_and_hash in one.items())
    return [group for group, count in Counter(group for group, _ in different).items() if count > 1]


def raise_different(
    told: Sequence[Replicas], alone: Collection[str], own_buffers: Collection[str], plain: Collection[str]
) -> None:
    """Raise, naming tensors and ranks.

    Args:
        told: By each rank: the numbers of the groups that differ.
        alone: Names of parameters whose gradients no strategy averages.
        own_buffers: Names of buffers that no strategy keeps equal.
        plain: Objects that are no modules and no optimizers, such as dicts.

    Raises:
        CheckpointError: Always.
    """
    by_name: defaultdict[tuple[str, str], defaultdict[int | None, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, groups in enumerate(told):
        for group, numbers in groups.items():
            for name, number in numbers.items():
                by_name[group, name][number].append(rank)
    different = {name: found for (_, name), found in by_name.items() if len(found) > 1}
    wrong = [
        f"{name}: one value on {', another on '.join(f'rank {listed(ranks)}' for ranks in found.values())}"
        for name, found in different.items()
    ]
    apart = [one for one in alone if any(name == one or f"/state/{one}/" in name for name in different)]
    buffers = different.keys() & set(own_buffers)
    raise CheckpointError(
        "save: replicas of a tensor have different values",
        found="; ".join(wrong[:3])
        + (f"; and {len(wrong) - 3} more tensors" if len(wrong) > 3 else "")
        + (f"; no strategy averages the gradients of {listed(apart)}" if apart else ""),
        expected="replicas that are equal, bit for bit, and that nothing changes during a save; and what is of each "
        "rank alone, gathered",
        fix='p.grad = weft.reduce(p.grad, ctx, "mean")  # before its optimizer steps, and before the first step '
        "p.data.copy_(weft.broadcast(p.data, ctx)); or a strategy, which does both"
        if apart
        else 'value = weft.reduce(value, ctx, "mean")  # before a buffer is updated with it, sums without "mean"; for '
        "batch norms, model, ctx = weft.sync_batch_norm(model, ctx)"
        if buffers
        else "value = weft.gather(value, ctx)  # in the dict, of each rank's own: along dimension 0. What should be "
        "the same on all ranks follows from weft.reduce or weft.broadcast"
        if all(name.partition("/")[0] in plain for name in different)
        else "tensor.data.copy_(weft.broadcast(tensor.data, ctx))  # and weft.check(ctx, model=model) to find why",
    )
