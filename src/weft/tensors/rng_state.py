"""The random states of this process, taken and put back; those of generators as JSON, and back."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

_KEYS = 624  # words of a Mersenne twister
_Python = random.Random  # noqa: S311  (states, no secrets)
Generator: TypeAlias = torch.Generator | _Python | np.random.Generator | np.random.RandomState


def seed_torch(number: int) -> None:
    """As `torch.manual_seed`, which without an accelerator writes a stack trace for each kind that might begin."""
    seed = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
    seed(number)


class DeviceRng(Protocol):
    """Who knows the random state of a device; engines do."""

    def rng_state(self, device: torch.device) -> torch.Tensor | None:
        """The state, uint8 on the CPU; None if that is the CPU's own."""

    def set_rng_state(self, device: torch.device, state: torch.Tensor) -> None:
        """Set it."""


class RngState(NamedTuple):
    """Random states of python, numpy, torch's CPU, a device, and generators.

    Attributes:
        python: As of `random.getstate`.
        numpy: As of `numpy.random.get_state`.
        cpu: Of torch's default generator, uint8.
        device: Of the accelerator, as its engine gives it; None if there is none.
        generators: Of further generators of torch.
    """

    python: Any
    numpy: Any
    cpu: torch.Tensor
    device: torch.Tensor | None = None
    generators: tuple[torch.Tensor, ...] = ()

    @classmethod
    def capture(
        cls,
        device: torch.device | None = None,
        engine: DeviceRng | None = None,
        generators: Sequence[torch.Generator] = (),
    ) -> RngState:
        """The states now; with an engine, that of its device too."""
        return cls(
            random.getstate(),
            np.random.get_state(),
            torch.default_generator.get_state(),
            None if device is None or engine is None else engine.rng_state(device),
            tuple(generator.get_state() for generator in generators),
        )

    def apply(
        self,
        device: torch.device | None = None,
        engine: DeviceRng | None = None,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        """Put the states in place; `device`, `engine` and `generators` as for `capture`."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.default_generator.set_state(self.cpu)
        if device is not None and engine is not None and self.device is not None:
            engine.set_rng_state(device, self.device)
        for generator, state in zip(generators, self.generators, strict=True):
            generator.set_state(state)

    def on_cpu(self) -> RngState:
        """The same, with tensors on the CPU, where generators take them from."""
        device = None if self.device is None else self.device.cpu()
        return self._replace(cpu=self.cpu.cpu(), device=device, generators=tuple(g.cpu() for g in self.generators))


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


def prepare_generator(generator: Generator, state: Any) -> Callable[[], object]:
    """Check a state without setting it; call the result to continue from it.

    Args:
        generator: Of the kind that the state was read from.
        state: From `generator_state`.

    Raises:
        ValueError: It is not a state of such a generator; a TypeError or LookupError means the same.
    """
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


def seeding(generator: Generator, seed: int) -> Callable[[], object]:
    """What seeds a generator, of any kind."""
    if isinstance(generator, torch.Generator):
        return partial(generator.manual_seed, seed)
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return partial(setattr, bits, "state", type(bits)(seed).state)
    return partial(generator.seed, seed % 2**32)


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
        if not 0 <= _like(like.get("pos", 0), value.get("pos", 0)) <= _KEYS:  # numpy reads beyond its keys
            raise ValueError(f"position {value['pos']!r:.20}")
        return {key: _like(like[key], value[key]) for key in like}
    if isinstance(like, np.ndarray):
        found = np.frombuffer(bytes.fromhex(value), dtype=like.dtype.newbyteorder("<")).astype(like.dtype)
        if found.shape != like.shape:
            raise ValueError(f"{found.size} numbers where {like.size} should be")
        return found
    if type(value) is not type(_plain(like)) or (isinstance(value, str) and value != like):
        raise ValueError(f"{value!r:.60} where {like!r:.60} should be")
    return value


# -- as JSON -------------------------------------------------------------------------------------------


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
