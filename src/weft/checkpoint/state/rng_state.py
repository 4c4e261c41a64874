"""The random states of a rank: python, numpy, torch and the device."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from weft.context import DistContext
from weft.errors import CheckpointError
from weft.tensors.rng_state import RngState

__all__ = ["drawn_state", "numpy_state", "prepare_random_state", "python_state", "random_state", "to_hex"]


_KEYS = 624  # words of a Mersenne twister


def random_state(ctx: DistContext) -> dict[str, Any]:
    """The random states of this rank, as JSON."""
    now = RngState.capture(ctx.device, ctx.engine)
    version, numbers, gauss = now.python
    kind, keys, place, has_gauss, cached = now.numpy
    found: dict[str, Any] = {
        "python": [version, to_hex(numbers, "<u4"), gauss],
        "numpy": [str(kind), to_hex(keys, "<u4"), int(place), int(has_gauss), float(cached)],
        "torch": to_hex(now.cpu),
    }
    if now.device is not None:
        found[ctx.device.type] = to_hex(now.device)
    return found


def to_hex(state: Any, dtype: str = "u1") -> str:
    """Numbers as hexadecimal digits."""
    return np.asarray(state, dtype=dtype).tobytes().hex()


def _numbers(text: str) -> Any:
    return np.frombuffer(bytes.fromhex(text), dtype="<u4").astype(np.uint32)


def _state(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


# `random` and numpy take values on trust that harm later draws (numpy reads beyond its keys), so they are checked here.


def python_state(version: int, numbers: str, gauss: float | None) -> tuple[int, tuple[int, ...], float | None]:
    """The state that `random.setstate` takes, of what `random_state` gives."""
    if not (gauss is None or type(gauss) in (int, float)):
        raise ValueError(f"{gauss!r} as the next normal number of python")
    return version, tuple(_numbers(numbers).tolist()), gauss


def numpy_state(kind: str, keys: str, place: int, has_gauss: int, cached: float) -> tuple[str, Any, int, int, float]:
    """The state that `numpy.random.set_state` takes, of what `random_state` gives."""
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
        cpu = _state(found["torch"])
        other = _state(found[device.type]) if device.type in found else None
        random.Random().setstate(python)  # noqa: S311  (states, no secrets)
        np.random.RandomState().set_state(numpy)
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
