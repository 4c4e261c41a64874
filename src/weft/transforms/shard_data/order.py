"""The order of an epoch as a pure function of (seed, epoch), whatever sampler the user brought."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import SequentialSampler

__all__ = ["epoch_order", "mix", "tell_epoch"]


def mix(*parts: object) -> int:
    """Hash some facts into a seed, 0 <= seed < 2**63, the same in every process.

    Example:
        >>> mix(0, 1) == mix(0, 1), mix(0, 1) == mix(1, 0)
        (True, False)
    """
    digest = hashlib.blake2b("/".join(map(repr, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def epoch_order(sampler: Iterable[Any], seed: int, epoch: int) -> Sequence[Any]:
    """Run a sampler with all random sources set to a function of (seed, epoch), and restored after.

    Args:
        sampler: Any sampler or batch sampler. If it has `set_epoch`, it is told the epoch; if it
            has a `generator`, that is seeded too.
        seed: Any integer.
        epoch: Number of the epoch.

    Returns:
        All that the sampler yields in this epoch.
    """
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    tell_epoch(sampler, epoch)
    with _seeded(mix(seed, epoch, "order"), _generators(sampler)):
        return list(sampler)


def tell_epoch(obj: object, epoch: int) -> None:
    """Call `obj.set_epoch(epoch)` if there is such a method."""
    method = getattr(obj, "set_epoch", None)
    if callable(method):
        method(epoch)


def _generators(sampler: Any) -> list[torch.Generator]:
    """The generators of a sampler and of the one it draws from (a `BatchSampler` has one inside)."""
    found = [getattr(sampler, "generator", None), getattr(getattr(sampler, "sampler", None), "generator", None)]
    return [generator for generator in found if isinstance(generator, torch.Generator)]


@contextlib.contextmanager
def _seeded(seed: int, generators: list[torch.Generator]) -> Iterator[None]:
    """Seed python's, numpy's and torch's CPU generators for the body, and restore them."""
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    numpy_state = np.random.get_state()
    generator_states = [generator.get_state() for generator in generators]
    try:
        random.seed(seed)
        torch.manual_seed(seed) if not torch.cuda.is_initialized() else torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        for generator, state in zip(generators, generator_states, strict=True):
            generator.set_state(state)
