"""`watch_health`: a loss that is NaN, infinite or jumps is known on all ranks in the same step, with its origin.

[Note: what it costs] In a step in which all is well: one all-reduce of three numbers, the norms of the gradients in
one call, for which the device is waited for once, with the loss; and with `origin=True` one sum over the output of each
innermost module, and over its gradient, without waiting for the device. Only when a rank has found something are
these sums looked at, and reported to the others.

[Note: where it arose] The sums are kept in the order in which they were made. The first that is not finite is where
it arose: forward passes come before backward ones, and a gradient is looked at before it is averaged over ranks,
so the rank is the right one too. If a weight is not finite already, that is where it arose.
"""

from __future__ import annotations

import collections
import itertools
import math
import statistics
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from weft import torch_internals
from weft.checks import check_count, option_error
from weft.collectives import gather_objects, reduce
from weft.context import DistContext
from weft.tensors.dtensor import local
from weft.tensors.messages import control_device
from weft.tensors.nested import leaves
from weft.tensors.remote_parameter import is_elsewhere

_FEWEST = 8  # losses before a jump can be distinguished from noise
_MOST = 2**16  # sums that are kept between two calls
_ORDER = ("weight", "output", "gradient of the output", "gradient", "loss")  # which comes before which


class Finding(NamedTuple):
    """What is wrong, the same on all ranks.

    Attributes:
        kind: "nan", "inf" or "spike": of the loss; of what was found if the loss is as it should be.
        step: In which it arose.
        rank: On which it arose; the first of them.
        ranks: All ranks on which something was found.
        what: "weight", "output", "gradient of the output", "gradient" or "loss".
        where: Name of the module or parameter; "" for the loss.
        loss: Of rank `rank`.
    """

    kind: str
    step: int
    rank: int
    ranks: tuple[int, ...]
    what: str
    where: str
    loss: float

    def __str__(self) -> str:
        """One line for people."""
        place = f"{self.what} of {self.where}" if self.where else f"the {self.what}"
        others = [rank for rank in self.ranks if rank != self.rank]
        also = f", then on rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}" if others else ""
        return f"{self.kind} at step {self.step}: first in {place}, on rank {self.rank}{also} (loss {self.loss:g})"


def watch_health(
    module: nn.Module, ctx: DistContext, *, spike: float = 8.0, memory: int = 50, origin: bool = True
) -> Health:
    """Watch a training, and let all ranks know in the same step what is wrong, and where it arose.

    Call what it returns between backward and the optimizer's step. Apply it after the transforms of the module,
    but before `compiled`.

    Changes: with `origin`, the innermost modules get hooks, until `close`. Collectives: none; each call makes
    one all-reduce of three numbers, and one more exchange if something was found.

    Args:
        module: What is trained.
        ctx: The context whose ranks take part.
        spike: A loss is a spike if it lies more than so many deviations above the median of this rank's last
            losses; `math.inf` for never. Deviation: 1.4826 times the median distance from the median.
        memory: How many losses are remembered.
        origin: Whether modules are looked at. Without it a finding names the loss or a gradient, which after
            reducing is the same on all ranks.

    Returns:
        A function `(loss, step) -> Finding or None`.

    Raises:
        ValueError: An option cannot be used.

    Example:
        >>> import weft
        >>> model, ctx = nn.Sequential(nn.Linear(2, 2), nn.LogSigmoid()), weft.local()
        >>> with weft.monitoring.watch_health(model, ctx) as health:
        ...     loss = model(torch.tensor([1.0, math.nan])).sum()
        ...     loss.backward()
        ...     print(health(loss, 7))
        nan at step 7: first in output of 0, on rank 0 (loss nan)
    """
    fix = "weft.monitoring.watch_health(model, ctx, spike=8.0, memory=50)"
    check_count("watch_health", "memory", memory, least=_FEWEST, fix=fix)
    if not spike > 0:
        raise option_error("watch_health", "spike", spike, expected="a number > 0, or math.inf", fix=fix)
    return Health(module, ctx, spike, memory, origin)


class Health:
    """A watch over one module; made by `watch_health`.

    Attributes:
        loss: Mean over the ranks of the last losses that were finite.
    """

    def __init__(self, module: nn.Module, ctx: DistContext, spike: float, memory: int, origin: bool) -> None:
        self.loss = math.nan
        self._module, self._ctx, self._spike = weakref.ref(module), ctx, spike
        self._losses: collections.deque[float] = collections.deque(maxlen=memory)
        self._sums: collections.deque[tuple[str, str, torch.Tensor]] = collections.deque(maxlen=_MOST)
        self._hooks: list[Any] = []
        for name, part in module.named_modules() if origin else ():
            if not any(True for _ in part.children()):
                self._hooks.append(part.register_forward_hook(_weakly(self._see_output, name)))

    def __call__(self, loss: torch.Tensor | float, step: int) -> Finding | None:
        """Look at a step, together with all ranks; between backward and the optimizer's step.

        Changes: nothing. Collectives: one all-reduce of three numbers; if something was found, a gathering
        of texts.

        Args:
            loss: Of this rank; a tensor on an accelerator is waited for.
            step: Its number, the same on all ranks.

        Returns:
            What was found on any rank, the same on all of them; None if all is well.

        Raises:
            PeerError: Another rank failed.
        """
        sums = list(self._sums)
        self._sums.clear()
        value, norms_are_finite = self._read(loss)
        kind = self._kind(value)
        found = kind is not None or not norms_are_finite
        ctx = self._ctx
        total, finite, bad = (value, 1.0, float(found)) if math.isfinite(value) else (0.0, 0.0, 1.0)
        if ctx.world_size > 1:
            device = control_device(ctx.group, ctx.device)
            facts = torch.tensor([total, finite, bad], dtype=torch.float64, device=device)
            total, finite, bad = reduce(facts, ctx).tolist()
        self.loss = total / finite if finite else math.nan
        if kind is None:
            self._losses.append(value)
        if not bad:
            return None
        mine = None
        if found:
            what, where, kind = self._origin(sums, kind)
            mine = [_ORDER.index(what), what, where, kind, repr(value)]
        return _first_of_all(gather_objects(mine, ctx), step)

    def _kind(self, value: float) -> str | None:
        if not math.isfinite(value):
            return "nan" if math.isnan(value) else "inf"
        if len(self._losses) < _FEWEST:
            return None
        middle = statistics.median(self._losses)
        deviation = 1.4826 * statistics.median(abs(each - middle) for each in self._losses)
        # Losses that hardly differ, as at the end of a training, are not measured by their rounding.
        return "spike" if value - middle > self._spike * max(deviation, 1e-3 * abs(middle)) else None

    def _read(self, loss: torch.Tensor | float) -> tuple[float, bool]:
        """The loss, and whether all gradients are finite: the device is waited for once."""
        grads = [local(p.grad).detach() for p in self._parameters().values() if p.grad is not None]
        dense = [grad for grad in grads if not grad.is_sparse and grad.numel()]
        largest = list(torch_internals.foreach_norm(dense, math.inf)) if dense else []
        largest += [grad.coalesce().values().norm(math.inf) for grad in grads if grad.is_sparse]
        device = self._ctx.device
        wide = torch.float32 if device.type == "mps" else torch.float64
        numbers = [torch.as_tensor(loss, dtype=wide).detach().reshape(()), *largest]
        value, *norms = torch.stack([each.to(device, wide) for each in numbers]).tolist()
        return value, all(map(math.isfinite, norms))

    def _parameters(self) -> dict[str, nn.Parameter]:
        module = self._module()
        return {} if module is None else {name: p for name, p in module.named_parameters() if not is_elsewhere(p)}

    def _origin(self, sums: list[tuple[str, str, torch.Tensor]], kind: str | None) -> tuple[str, str, str]:
        """What this rank found first: what it is, its name, and which kind."""
        if kind == "spike":
            return "loss", "", kind
        named = self._parameters()
        weights = (("weight", name, _sum(p)) for name, p in named.items())
        gradients = (("gradient", name, _sum(p.grad)) for name, p in named.items() if p.grad is not None)
        for what, name, total in itertools.chain(weights, sums, gradients if kind is None else ()):
            if not total.isfinite():
                return what, name, kind or ("nan" if total.isnan() else "inf")
        return ("loss", "", kind) if kind is not None else ("gradient", "", "nan")  # of a parameter that is gone by now

    def _see_output(self, name: str, module: nn.Module, _: object, output: object) -> None:
        """Remember the sum of a module's output, and later of its gradient."""
        for _, tensor in leaves(output) if module.training and torch.is_grad_enabled() else ():
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.numel():
                self._sums.append(("output", name, _sum(tensor)))
                if tensor.requires_grad:
                    tensor.register_hook(_weakly(self._see_gradient, name))

    def _see_gradient(self, name: str, gradient: torch.Tensor) -> None:
        self._sums.append(("gradient of the output", name, _sum(gradient)))

    def close(self) -> None:
        """Take the hooks away again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._sums.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _weakly(method: Callable[..., None], name: str) -> Callable[..., None]:
    """A hook that calls a method with a name first, and does not keep its object alive."""
    seen = weakref.WeakMethod(method)

    def hook(*arguments: Any) -> None:
        found = seen()
        if found is not None:
            found(name, *arguments)

    return hook


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Of this rank's part; in float32 at least, as a sum of many finite halves may be none."""
    dtype = tensor.dtype if tensor.dtype == torch.float64 else torch.float32
    return local(tensor.detach()).sum(dtype=dtype)


def _first_of_all(reports: list[Any], step: int) -> Finding:
    """The finding of the rank on which it arose: the earliest kind of place, then the first rank."""
    ranks = tuple(rank for rank, each in enumerate(reports) if each is not None)
    rank = min(ranks, key=lambda each: (reports[each][0], each))
    _, what, where, kind, loss = reports[rank]
    return Finding(kind, step, rank, ranks, what, where, float(loss))
