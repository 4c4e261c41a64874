"""Where numbers that the host needs travel, which arrive when a device has done its other work; or a peer is lost."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["control_device", "is_communication_error"]

_COMMUNICATION_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "Socket Timeout",
    "NCCL",
    "ProcessGroup",
    "gloo",
)


def control_device(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """Of tensors that every rank reads as soon as they have come.

    Args:
        group: Whose ranks exchange them.
        device: Of its ranks.

    Returns:
        The CPU if the group has a backend for it, as one that `weft.start` has made; else `device`.
    """
    if device.type == "cpu" or group is None or "cpu:" not in dist.get_backend_config(group):
        return device
    return torch.device("cpu")


def is_communication_error(error: BaseException) -> bool:
    """Say whether `error` is what torch.distributed raises when a peer is lost."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _COMMUNICATION_SIGNS)
