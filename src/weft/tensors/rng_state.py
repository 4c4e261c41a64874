"""`RngState`: the global random states of this process, taken and put back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch


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
