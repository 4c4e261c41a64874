"""Which accelerators of this machine a job gets: `--devices auto`, `--devices 0,2`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from weft.errors import ContextError, listed

# By the type of device: the variable by which its driver shows some of them only.
_VARIABLES = MappingProxyType({"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"})


def visible_devices(variables: Mapping[str, str]) -> tuple[str, list[str]]:
    """The variable that chooses accelerators, and the ids of those that this process sees; no device is initialized.

    Args:
        variables: The environment.

    Returns:
        The name, empty if there is no accelerator or no such variable, and the ids.
    """
    kind = torch.accelerator.current_accelerator()
    name = _VARIABLES.get(kind.type, "") if kind is not None else ""
    count = torch.accelerator.device_count() if name else 0
    given = [each.strip() for each in variables.get(name, "").split(",") if each.strip()]
    return name, given[:count] or list(map(str, range(count)))


def chosen_devices(wish: str, there: Sequence[str], *, nproc: int | None = None) -> list[str]:
    """The devices of a wish: "auto" for all, or the first `nproc` of them; or ids with commas between them.

    Args:
        wish: What was asked for.
        there: Ids of the devices of this machine.
        nproc: The number of processes, if it was given.

    Returns:
        Their ids, one per process.

    Raises:
        ContextError: There are no such devices, or another number than processes.

    Example:
        >>> chosen_devices("auto", ["0", "1", "2"]), chosen_devices("2,0", ["0", "1", "2"])
        (['0', '1', '2'], ['2', '0'])
    """
    named = list(there) if wish == "auto" else [each.strip() for each in wish.split(",")]
    found = named[:nproc] if wish == "auto" else named
    wrong = not found or len(set(found)) < len(found) or not set(found) <= set(there)
    if wrong or nproc not in (None, len(found)):
        processes = "" if nproc is None else f" -n {nproc}"
        raise ContextError(
            f"launch: --devices {wish} cannot be used",
            found=f"--devices {wish}{processes}; devices of this machine: {listed(there) or 'none'}",
            expected="auto, or distinct device ids, one per process",
            fix=f"weft launch --devices {','.join(there[: nproc or 2])} train.py"
            if there
            else "weft launch -n 2 train.py",
        )
    return found
