"""Where numbers that the host needs travel: those of a device arrive when its other work is done."""

from __future__ import annotations

import torch
import torch.distributed as dist


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
