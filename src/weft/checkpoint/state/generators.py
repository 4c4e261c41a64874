"""Random generators of the user's own: torch.Generator, random.Random, and both kinds of numpy's.

Each rank has a state of its own, as with the global ones. At another number of ranks a generator that was
alike on all ranks stays so; of others, each rank gets a state drawn from seed, step, rank and name.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from weft.checkpoint.state.rng_state import numpy_json, numpy_state, python_json, python_state, to_hex, torch_state

__all__ = ["Generator", "generator_kind", "generator_state", "is_generator", "prepare_generator", "restored_from"]

_Python = random.Random  # noqa: S311  (states, no secrets)
Generator: TypeAlias = torch.Generator | _Python | np.random.Generator | np.random.RandomState


def is_generator(obj: object) -> bool:
    """Whether this is a generator whose state can be read; that of the system has none."""
    kinds = (torch.Generator, _Python, np.random.Generator, np.random.RandomState)
    return isinstance(obj, kinds) and not isinstance(obj, random.SystemRandom)


def generator_kind(generator: Generator) -> str:
    """What has to be the same for a state to fit."""
    if isinstance(generator, torch.Generator):
        return f"torch.Generator on {generator.device.type}"
    if isinstance(generator, _Python):
        return "random.Random"
    if isinstance(generator, np.random.Generator):
        return f"numpy.random.Generator of {type(generator.bit_generator).__name__}"
    return "numpy.random.RandomState"


def generator_state(generator: Generator) -> Any:
    """Its state, as JSON."""
    if isinstance(generator, torch.Generator):
        return to_hex(generator.get_state())
    if isinstance(generator, _Python):
        return python_json(*generator.getstate())
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    return numpy_json(*generator.get_state(legacy=True))


def restored_from(states: Sequence[Any], rank: int, world_size: int) -> Any:
    """Which of the states of the ranks that saved a rank goes on from; None if it needs a new one."""
    if len(states) == world_size:
        return states[rank]
    return states[0] if all(state == states[0] for state in states) else None


def prepare_generator(generator: Generator, state: Any, *, new: tuple[int, int, int, str]) -> Callable[[], object]:
    """Check a state without setting it; call the result to go on from it.

    Args:
        generator: Of the kind that the state was read from.
        state: From `generator_state`; None for a new one.
        new: Seed, step, rank and name, of which a new state is a function.

    Raises:
        ValueError: It is not a state of such a generator; a TypeError or LookupError means the same.
    """
    if state is None:
        return _seed(generator, zlib.crc32(" ".join(map(str, new)).encode()))
    if isinstance(generator, torch.Generator):
        values = torch_state(state)
        try:
            torch.Generator(generator.device).set_state(values)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        return partial(generator.set_state, values)
    if isinstance(generator, _Python):
        return partial(generator.setstate, python_state(*state))
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        like: Any = bits.state
        numpy = _like(like, state)
        type(bits)().state = numpy
        return partial(setattr, bits, "state", numpy)
    return partial(generator.set_state, numpy_state(*state))


def _seed(generator: Generator, seed: int) -> Callable[[], object]:
    if isinstance(generator, torch.Generator):
        return partial(generator.manual_seed, seed)
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return partial(setattr, bits, "state", type(bits)(seed).state)
    return partial(generator.seed, seed)


def _plain(value: Any) -> Any:
    """The state of a bit generator as JSON: arrays as hexadecimal digits."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return to_hex(value, value.dtype.newbyteorder("<").str)
    return value.item() if isinstance(value, np.generic) else value


def _like(like: Any, value: Any) -> Any:
    """The state that `_plain` made JSON of; of the form that the generator has now, as numpy checks little."""
    if isinstance(like, Mapping):
        if not isinstance(value, Mapping) or value.keys() != like.keys():
            raise ValueError(f"{value!r:.60} where {sorted(like)} should be")
        return {key: _like(like[key], value[key]) if key != "pos" else _position(value[key]) for key in like}
    if isinstance(like, np.ndarray):
        found = np.frombuffer(bytes.fromhex(value), dtype=like.dtype.newbyteorder("<")).astype(like.dtype)
        if found.shape != like.shape:
            raise ValueError(f"{found.size} numbers where {like.size} should be")
        return found
    if type(value) is not type(_plain(like)) or (isinstance(value, str) and value != like):
        raise ValueError(f"{value!r:.60} where {like!r:.60} should be")
    return value


def _position(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= 624:  # words of a Mersenne twister; numpy reads beyond its keys
        raise ValueError(f"position {value!r:.20}")
    return value
