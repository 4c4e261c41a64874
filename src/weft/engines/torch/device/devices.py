"""`TorchDevices`: where a rank computes, as torch knows devices."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.engines.torch.device.prefetch import move, prefetch
from weft.errors import ContextError, MissingExtra, value_error


@dataclass(frozen=True)
class TorchDevices:
    """The devices of this machine, and what is brought there; the same code for CPU, CUDA, MPS and XPU."""

    def device(self, request: str | None, local_rank: int, world_size: int) -> torch.device:
        """Pick the device of this rank.

        Args:
            request: "cpu", an accelerator type, or a type with an index; None picks the accelerator
                that torch finds, else the CPU. An explicit index is taken literally and not checked,
                so that no driver is touched; a type without one takes `local_rank` modulo the count.
            local_rank: Of this process on its node.
            world_size: Of the job.

        Returns:
            The device, with an index if its type has several.

        Raises:
            ContextError: No such device here, or it cannot be used by several processes (MPS).
            MissingExtra: A TPU is asked for, and torch_tpu, which tells torch of it, is not installed.
        """
        present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if request is None:
            wanted = torch.device(present.type) if present is not None else torch.device("cpu")
        else:
            wanted = _parse(request)
        if wanted.type == "mps" and world_size > 1:
            raise ContextError(
                f"start: device = {wanted} cannot serve {world_size} ranks",
                found=f"world size {world_size} on mps",
                expected="one process: torch has no collectives on mps",
                fix='weft.start(device="cpu"), or launch with -n 1',
            )
        if wanted.type in ("cpu", "mps", "meta") or wanted.index is not None:
            return wanted
        if present is None or present.type != wanted.type:
            raise ContextError(
                f"start: device = {request!r} is not available",
                found=f"accelerator {present}" if present is not None else "no accelerator",
                expected=f"torch built for {wanted.type}, and a device of that type",
                fix='weft.start(device="cpu")',
            )
        return torch.device(wanted.type, local_rank % max(torch.accelerator.device_count(), 1))

    def select(self, device: torch.device) -> None:
        """Make it the current one of its type, on which torch puts what is asked for by type alone."""
        present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if present is not None and present.type == device.type and device.index is not None:
            torch.accelerator.set_device_index(device.index)

    def backend(self, device: torch.device) -> str:
        """The process-group backends for tensors on `device` and on the CPU."""
        if device.type == "cpu":
            return "gloo"
        fast = torch.distributed.get_default_backend_for_device(device.type)
        return f"cpu:gloo,{device.type}:{fast}"

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
        """Raise if a device is not there.

        Raises:
            ValueError: There is no such accelerator here.
        """
        here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        count = torch.accelerator.device_count() if here is not None else 0
        wrong = [
            place
            for place in places
            if (device := torch.device(place)).type != "cpu"
            and (here is None or device.type != here.type or (device.index or 0) >= count)
        ]
        if wrong:
            raise value_error(
                f"{what}: {wrong[0]} is not available",
                found=f"{count} of {here.type}" if here is not None else "no accelerator",
                expected="devices of this machine",
                fix='weft.weights.plan_placement(model, {"cpu": "30GB", "disk": None})',
            )

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


def _parse(request: str) -> torch.device:
    if request.partition(":")[0] == "tpu":
        _load_tpu(request)
    try:
        return torch.device(request)
    except RuntimeError as error:
        raise ContextError(
            f"start: device = {request!r} is not a device",
            found=repr(request),
            expected='a device type with or without an index, such as "cpu", "cuda" or "cuda:1"',
            fix='weft.start(device="cpu")',
        ) from error


def _load_tpu(request: str) -> None:
    """Import torch_tpu, unless torch knows the device already."""
    try:
        torch.device("tpu")
    except RuntimeError:
        try:
            importlib.import_module("torch_tpu")
        except ImportError as error:
            raise MissingExtra(
                f"start: device = {request!r} needs the package torch_tpu",
                found=f"{type(error).__name__}: {error}",
                expected="torch_tpu, with which torch has the device (torch 2.11 to 2.15), on a machine with a TPU",
                fix='pip install torch_tpu  # or, with torch 2.9 and torch-xla: weft.start(device="xla")',
            ) from error


def hardware_of(device: torch.device) -> str:
    """What tells a device apart from all others, whatever a process may see; empty if its driver does not say."""
    properties = torch.get_device_module(device).get_device_properties(device)
    parts = [getattr(properties, name, "") for name in ("uuid", "pci_domain_id", "pci_bus_id", "pci_device_id")]
    return ":".join(str(part) for part in parts if part != "")
