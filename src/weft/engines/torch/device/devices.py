"""`TorchDevices`: where a rank computes, as torch knows devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.engines.torch.device.choose import check_devices, choose_device, default_backend, select_device
from weft.engines.torch.device.prefetch import move, prefetch


@dataclass(frozen=True)
class TorchDevices:
    """The devices of this machine, and what is brought there; the same code for CPU, CUDA, MPS and XPU."""

    def device(self, request: str | None, local_rank: int, world_size: int) -> torch.device:
        """The device of a rank; see `choose_device`."""
        return choose_device(request, local_rank, world_size)

    def select(self, device: torch.device) -> None:
        """Make `device` the current one; see `select_device`."""
        select_device(device)

    def backend(self, device: torch.device) -> str:
        """The process-group backend for tensors on `device`."""
        return default_backend(device)

    def place(self, module: nn.Module, device: torch.device) -> None:
        """Bring a module to `device`; its parameters stay the same objects."""
        module.to(device)

    def move(self, value: Any, device: torch.device, *, skip: frozenset[str] = frozenset()) -> Any:
        """Put a nested value on `device`."""
        return move(value, device, skip=skip)

    def prefetch(self, batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
        """Yield batches on `device`, copied ahead of use."""
        return prefetch(batches, device)

    def check_devices(self, what: str, places: Sequence[str]) -> None:
        """Raise if there is no such device."""
        check_devices(what, places)

    def seed(self, device: torch.device, number: int) -> None:
        """Seed what `torch.manual_seed` does not reach: nothing."""

    def rng_state(self, device: torch.device) -> torch.Tensor | None:
        """The random state of a device, uint8 on the CPU; None if that is the CPU's own."""
        return None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device).cpu()

    def check_rng_state(self, device: torch.device, state: torch.Tensor) -> None:
        """Raise if this is no random state of the device."""
        torch.Generator(device).set_state(state)

    def set_rng_state(self, device: torch.device, state: torch.Tensor) -> None:
        """Resume from a random state."""
        torch.get_device_module(device).set_rng_state(state, device)
