"""Code outside of modules: parameters that are created, and losses that are computed, in the dtype of a policy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch

from weft.errors import value_error
from weft.precision.policies import LOW, PolicyName, Precision, named_policy


class _HasDevice(Protocol):
    """A `DistContext`, as far as it matters here."""

    @property
    def device(self) -> torch.device: ...


@contextlib.contextmanager
def autocast(policy: PolicyName | Precision, ctx: _HasDevice) -> Iterator[None]:
    """Compute what is outside a module, such as a loss, as a module with this policy computes.

    A policy with a 16-bit `compute` dtype and wider parameters runs the body under `torch.autocast`. Under another
    policy the body computes in the dtypes of its tensors, also where an autocast surrounds it. If `compute` is None
    nothing changes.

    Changes: torch's autocast inside the body; restored afterwards, also on an error. Collectives: none.

    Args:
        policy: As for `with_precision`.
        ctx: Whose device.

    Yields:
        Nothing.

    Raises:
        ValueError: Unknown policy, or one with a loss scale: that is inside the module, and gradients in float16
            outside it would underflow. Without gradients it may be used.

    Example:
        >>> import weft
        >>> x = torch.ones(2, 2)
        >>> with autocast("bf16", weft.local()):
        ...     (x @ x).dtype
        torch.bfloat16
    """
    precision = named_policy(policy)
    if precision.scaling is not None and torch.is_grad_enabled():
        raise value_error(
            "autocast: gradients in float16 would underflow outside the module, where they are not scaled",
            found=f"{policy!r}, which has a loss scale",
            expected='the loss inside the module, or "bf16", or torch.no_grad()',
            fix='model, ctx = weft.with_precision(model, ctx, "fp16", methods=["loss"])  # a method of the module',
        )
    compute, kind = precision.compute, ctx.device.type
    is_mixed = compute in LOW and precision.param is not compute
    outer = torch.is_autocast_enabled(kind)
    if compute is None or not (is_mixed or outer):
        yield
        return
    with torch.autocast(kind, compute if is_mixed else torch.get_autocast_dtype(kind), enabled=is_mixed):
        yield


@contextlib.contextmanager
def creation_dtype(policy: PolicyName | Precision) -> Iterator[None]:
    """Create parameters in the dtype in which the policy stores them.

    Changes: torch's default dtype inside the body; restored afterwards, also on an error.
    Collectives: none.

    Args:
        policy: As for `with_precision`.

    Raises:
        ValueError: Unknown policy.

    Example:
        >>> with creation_dtype("bf16-true"):
        ...     model = torch.nn.Linear(2, 2)
        >>> model.weight.dtype
        torch.bfloat16
    """
    before = torch.get_default_dtype()
    dtype = named_policy(policy).param
    try:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        yield
    finally:
        torch.set_default_dtype(before)
