"""`on_ranks`: run a function on ranks that have the simulated device, and see that it did nothing a device forbids."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

from tests.simulated_device.device import environment, load, reason_to_skip
from weft.context import DistContext
from weft.testing import RankPool

R = TypeVar("R")
needs_compiler = pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip()))


@functools.cache
def _pool() -> RankPool:
    return RankPool(backend="cpu:gloo,sim:simccl", environment=environment())


def on_ranks(fn: Callable[..., R], n: int, *args: Any, timeout_s: float = 60.0, **kwargs: Any) -> list[R]:
    """As `weft.testing.run_ranks`, each rank with a device of its own; with `mesh=`, on a mesh.

    Raises:
        RanksFailed: Also for work of two streams on the same memory that nothing puts in order.
    """
    return _pool().run(_checked, n, fn, *args, timeout_s=timeout_s, device="sim", **kwargs)


def _checked(ctx: DistContext, fn: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    load().take_hazards()
    found = fn(ctx, *args, **kwargs)
    hazards = load().take_hazards()
    assert not hazards, "\n".join(dict.fromkeys(hazards))
    return found


def on_cpu(value: Any) -> Any:
    """A value with its tensors on the CPU, which the test can read."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {name: on_cpu(one) for name, one in value.items()}
    return type(value)(map(on_cpu, value)) if isinstance(value, (list, tuple)) else value
