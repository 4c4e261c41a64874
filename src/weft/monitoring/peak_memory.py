"""Memory: the peak of a piece of code by kind, giving back what is not used, and what is there, as a file."""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.context import DistContext
from weft.errors import type_error
from weft.peers.pretended import rehearses
from weft.tensors.dtensor import local

_Parts = nn.Module | torch.optim.Optimizer | Mapping[str, Any] | Iterable[Any]
_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


@dataclass(slots=True)
class PeakMemory:
    """The most bytes that this rank had at once, of each kind; filled by `peak_memory` when its body ends.

    Attributes:
        parameters: Parameters and buffers; of a sharded one this rank's part.
        gradients: At the end, and before each `optimizer.step()`.
        optimizer: State of the optimizers.
        rest: What is left of `total`: activations, buckets, other objects; on the CPU also libraries.
        total: On an accelerator the peak of torch's allocator. On the CPU the peak of the process, in which torch
            itself counts.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    rest: int = 0
    total: int = 0


@contextlib.contextmanager
def peak_memory(objects: _Parts, ctx: DistContext) -> Iterator[PeakMemory]:
    """Find out what the memory of a piece of code goes to: parameters, gradients, optimizer state, the rest.

    Changes: resets torch's peak of the accelerator, or the system's peak of this process. Collectives: none.

    Args:
        objects: A module, an optimizer, or a list, tuple or dict of them.
        ctx: Whose rank and device.

    Yields:
        The peaks; all zero until the body has ended.

    Raises:
        TypeError: `objects` holds something else.

    Example:
        >>> import weft
        >>> model = nn.Linear(4, 8)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with weft.monitoring.peak_memory([model, optimizer], weft.local()) as peak:
        ...     model(torch.ones(2, 4)).sum().backward()
        ...     optimizer.step()
        >>> peak.parameters, peak.gradients, peak.optimizer >= 320, peak.total > peak.rest > 0
        (160, 160, True, True)
    """
    parts = list(_parts_in(objects))
    modules = [part for part in parts if isinstance(part, nn.Module)]
    optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
    found = PeakMemory()

    def look() -> None:
        parameters = [p for module in modules for p in module.parameters()]
        parameters += [p for each in optimizers for entry in each.param_groups for p in entry["params"]]
        buffers = [b for module in modules for b in module.buffers()]
        states = [value for each in optimizers for state in each.state.values() for value in state.values()]
        found.parameters = max(found.parameters, _num_bytes([*parameters, *buffers]))
        found.gradients = max(found.gradients, _num_bytes([p.grad for p in parameters]))
        found.optimizer = max(found.optimizer, _num_bytes(states))

    hooks = [each.register_step_pre_hook(lambda *_: look()) for each in optimizers]
    _reset_peak(ctx.device)
    look()
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
        look()
        found.total = _bytes(ctx.device, "VmHWM", torch.accelerator.max_memory_allocated)
        found.rest = max(found.total - found.parameters - found.gradients - found.optimizer, 0)


def _parts_in(objects: object) -> Iterator[nn.Module | torch.optim.Optimizer]:
    if isinstance(objects, (nn.Module, torch.optim.Optimizer)):
        yield objects
        return
    items = objects.values() if isinstance(objects, Mapping) else objects
    if not isinstance(items, Iterable) or isinstance(items, (str, bytes, torch.Tensor)):
        raise type_error(
            f"peak_memory: {type(objects).__name__} is neither module nor optimizer",
            found=type(objects).__name__,
            expected="modules and optimizers, alone or in a list or dict",
            fix="with weft.monitoring.peak_memory([model, optimizer], ctx) as peak: ...",
        )
    for item in items:
        yield from _parts_in(item)


def _num_bytes(values: Iterable[object]) -> int:
    """Bytes of this rank's part of tensors; memory that several of them share counts once."""
    storages: dict[tuple[torch.device, int], int] = {}
    apart = 0
    for value in values:
        if not isinstance(value, torch.Tensor) or value.is_meta:
            continue
        part = local(value.detach() if not value.is_sparse else value.detach().coalesce().values())
        with contextlib.suppress(NotImplementedError, RuntimeError):  # a tensor subclass without memory of its own
            storage = part.untyped_storage()
            storages[part.device, storage.data_ptr()] = storage.nbytes()
            continue
        apart += part.numel() * part.element_size()
    return apart + sum(storages.values())


# -- what the process and the device say -----------------------------------------------------------------


def used_bytes(device: torch.device) -> int:
    """The peak of torch's allocator on an accelerator so far; on the CPU what the process has now.

    Example:
        >>> used_bytes(torch.device("cpu")) > 0
        True
    """
    return _bytes(device, "VmRSS", torch.accelerator.max_memory_allocated)


def _bytes(device: torch.device, of_process: str, of_allocator: Callable[[torch.device], int]) -> int:
    """What the process has on the CPU, what torch's allocator has elsewhere; MPS tells one number only."""
    if device.type == "cpu":
        return _of_process(of_process)
    return int(torch.mps.driver_allocated_memory() if device.type == "mps" else of_allocator(device))


def _reset_peak(device: torch.device) -> None:
    if device.type == "cpu":
        with contextlib.suppress(OSError):  # not on Linux: the peak is that since the start
            _RESET.write_text("5", encoding="ascii")
    elif device.type != "mps":
        torch.accelerator.reset_peak_memory_stats(device)


def _of_process(name: str) -> int:
    """Memory of this process as the system counts it; elsewhere than on Linux its peak so far."""
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith(name)))
    except (OSError, StopIteration):
        import resource  # noqa: PLC0415  (not on Windows)

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak


def release_memory(ctx: DistContext) -> int:
    """Collect what nothing refers to any more, and give memory that torch keeps for later back to the device.

    It frees no object that is still referred to: `del model, optimizer, loader, ctx` first, and with them whatever
    else holds them. Only worth it between two trainings in one process; torch uses what it keeps again.

    Changes: caches of torch's allocator. Collectives: none.

    Args:
        ctx: Whose device; any context, such as `weft.local()`.

    Returns:
        Bytes by which the memory of the device (on the CPU: of the process) shrank.
    """
    device = ctx.device
    before = _bytes(device, "VmRSS", torch.accelerator.memory_reserved)
    gc.collect()
    if device.type == "mps":
        torch.mps.empty_cache()
    elif device.type != "cpu":
        torch.accelerator.empty_cache()
    return max(before - _bytes(device, "VmRSS", torch.accelerator.memory_reserved), 0)


def save_memory_snapshot(folder: str | Path, ctx: DistContext, *, names: Mapping[str, nn.Module] | None = None) -> Path:
    """Write which tensors are in memory on this rank, largest first, into `memory.rank<r>.json`.

    Each with shape, dtype, device, bytes, and the name of the parameter or buffer it belongs to. Tensors that
    only autograd or C++ keeps are not seen; `total_bytes` and, on CUDA, `segments` of the allocator count them.

    Changes: nothing. Collectives: none.

    Args:
        folder: Is made.
        ctx: Whose rank and device.
        names: Modules by name, for the names of their parameters.

    Returns:
        The path of the file.
    """
    known: dict[int, str] = {}
    for prefix, module in (names or {}).items():
        for name, tensor in (*module.named_parameters(prefix), *module.named_buffers(prefix)):
            known[local(tensor).untyped_storage().data_ptr()] = name
            if tensor.grad is not None:
                known[local(tensor.grad).untyped_storage().data_ptr()] = f"gradient of {name}"
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for tensor in [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # without memory: fake, meta, sparse
            storage = tensor.untyped_storage()
            row = {
                "bytes": storage.nbytes(), "shape": list(tensor.shape), "dtype": str(tensor.dtype),
                "device": str(tensor.device), "name": known.get(storage.data_ptr()),
            }  # fmt: skip
            rows.setdefault((row["device"], storage.data_ptr()), row)
    content: dict[str, Any] = {"rank": ctx.rank, "device": str(ctx.device), "total_bytes": used_bytes(ctx.device)}
    content["tensors"] = sorted(rows.values(), key=lambda row: -row["bytes"])
    if ctx.device.type == "cuda":
        content["segments"] = torch.cuda.memory_snapshot()
    path = Path(folder) / f"memory.rank{ctx.rank}.json"
    if not rehearses():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1, default=str), encoding="utf-8")
    return path
