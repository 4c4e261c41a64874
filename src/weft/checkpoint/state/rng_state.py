"""The random states of a rank: python, numpy, torch and the device."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from weft.context import DistContext
from weft.errors import CheckpointError
from weft.tensors.rng_state import RngState

__all__ = [
    "drawn_state",
    "numpy_json",
    "numpy_state",
    "prepare_random_state",
    "python_json",
    "python_state",
    "random_state",
    "to_hex",
    "torch_state",
]


_KEYS = 624  # words of a Mersenne twister


def random_state(ctx: DistContext) -> dict[str, Any]:
    """The random states of this rank, as JSON."""
    now = RngState.capture(ctx.device, ctx.engine)
    found = {"python": python_json(*now.python), "numpy": numpy_json(*now.numpy), "torch": to_hex(now.cpu)}
    if now.device is not None:
        found[ctx.device.type] = to_hex(now.device)
    return found


def to_hex(state: Any, dtype: str = "u1") -> str:
    """Numbers as hexadecimal digits."""
    return np.asarray(state, dtype=dtype).tobytes().hex()


def _numbers(text: str) -> Any:
    return np.frombuffer(bytes.fromhex(text), dtype="<u4").astype(np.uint32)


def torch_state(text: str) -> torch.Tensor:
    """The state that `set_state` of a generator of torch takes, of hexadecimal digits."""
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def python_json(version: int, numbers: Sequence[int], gauss: float | None) -> list[Any]:
    """The state of `random.getstate` as JSON."""
    return [version, to_hex(numbers, "<u4"), gauss]


def numpy_json(kind: Any, keys: Any, place: Any, has_gauss: Any, cached: Any) -> list[Any]:
    """The state of `numpy.random.get_state` as JSON."""
    return [str(kind), to_hex(keys, "<u4"), int(place), int(has_gauss), float(cached)]


# `random` and numpy take values on trust that harm later draws (numpy reads beyond its keys), so they are checked here.


def python_state(version: int, numbers: str, gauss: float | None) -> tuple[int, tuple[int, ...], float | None]:
    """The state that `random.setstate` takes, of what `python_json` gives."""
    if not (gauss is None or type(gauss) in (int, float)):
        raise ValueError(f"{gauss!r} as the next normal number of python")
    state = version, tuple(_numbers(numbers).tolist()), gauss
    random.Random().setstate(state)  # noqa: S311  (states, no secrets)
    return state


def numpy_state(kind: str, keys: str, place: int, has_gauss: int, cached: float) -> tuple[str, Any, int, int, float]:
    """The state that `numpy.random.set_state` takes, of what `numpy_json` gives."""
    words = _numbers(keys)
    if kind != "MT19937" or words.shape != (_KEYS,):
        raise ValueError(f"{kind!r} with {words.size} keys as the state of numpy, where MT19937 has {_KEYS}")
    if type(place) is not int or not 0 <= place <= _KEYS or has_gauss not in (0, 1) or type(cached) not in (int, float):
        raise ValueError(f"{[place, has_gauss, cached]!r} behind the keys of numpy")
    return kind, words, place, int(has_gauss), float(cached)


def prepare_random_state(found: Mapping[str, Any], ctx: DistContext) -> Callable[[], None]:
    """Check random states without setting them; call the result to set them.

    Raises:
        CheckpointError: One of them is not what it should be.
    """
    device, engine = ctx.device, ctx.engine
    try:
        python, numpy = python_state(*found["python"]), numpy_state(*found["numpy"])
        cpu = torch_state(found["torch"])
        other = torch_state(found[device.type]) if device.type in found else None
        torch.Generator().set_state(cpu)
        if other is not None:
            engine.check_rng_state(device, other)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            "restore: the random states in the checkpoint cannot be used",
            found=f"{type(error).__name__}: {error}",
            expected="states of python, numpy and torch",
            fix="weft.checkpointable(objects, ctx, rng=False)",
        ) from error

    states = RngState(python, numpy, cpu, other)
    return lambda: states.apply(device, engine)


def drawn_state(step: int, ctx: DistContext) -> Callable[[], None]:
    """New random states for a rank that did not save one; a function of seed, step and rank."""
    number = zlib.crc32(f"{ctx.seed} {step} {ctx.rank}".encode())

    def apply() -> None:
        random.seed(number)
        np.random.seed(number)
        torch.manual_seed(number)
        ctx.engine.seed(ctx.device, number)

    return apply
