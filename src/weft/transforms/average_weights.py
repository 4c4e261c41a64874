"""`average_weights`: averages of a module's weights over training, and the module used with them.

When an average is taken and with which weight is decided here; the tensors are the engine's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, get_args

from torch import nn

from weft.checks import as_number, check_choice, check_count, check_module, check_not_lazy
from weft.context import DistContext
from weft.contract import Part, Phase, check_not_elsewhere, offered, transform
from weft.engines.torch.compute.ema import Buffers, WeightAverages
from weft.errors import ContractError, listed, value_error

M = TypeVar("M", bound=nn.Module)
Decay = float | Callable[[int], float] | None


class Averages:
    """The averaged weights of one module; made by `average_weights`, found by `averages(module)`.

    It has `state_dict` and `load_state_dict`, so that it can be saved with the model, and does not
    keep the module alive. Until the first average is taken, the averages are the weights as they are.

    Attributes:
        num_averaged: How many times weights went into the averages.
    """

    def __init__(self, held: Any, decay: Decay, every: int, start: int) -> None:
        self.num_averaged = 0
        self._held = held
        self._decay = decay
        self._every = every
        self._start = start
        self._calls = 0
        self._is_swapped = False

    def update(self) -> None:
        """Take the weights as they are now into the averages; call it after `optimizer.step()`.

        Changes: the averages. Collectives: none.

        Raises:
            ContractError: Inside of `swapped`, or the module's parameters are others by now.
            ValueError: A decay schedule gave something else than a number from 0 to 1.
        """
        self._check_not_swapped("update()")
        self._calls += 1
        counted = self._calls - self._start
        if counted <= 0 or counted % self._every:
            return
        self._held.update(self._weight() if self.num_averaged else 1.0)
        self.num_averaged += 1

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Let the module compute with the averages inside the body, and as before after it.

        The same module with the same parameter objects, so its `state_dict()` in here is that of the
        averages. Between steps: a backward through a forward pass from the other side would be wrong, and
        torch or `replicate` raises. The weights are kept aside meanwhile: once more this rank's share.

        Changes: values of the module's parameters, and buffers if they are averaged or copied; given back
        bit for bit, also after an error. Collectives: none.

        Yields:
            Nothing.

        Raises:
            ContractError: Inside of another `swapped`, or the module's parameters are others by now.
        """
        self._check_not_swapped("swapped()")
        self._refresh()
        before = self._held.put_in()
        self._is_swapped = True
        try:
            yield
        finally:
            self._is_swapped = False
            self._held.put_back(before)

    def copy_to(self, module: nn.Module) -> None:
        """Write the averages into a module, for good: the averaged one itself, or one like it.

        Changes: values of `module`. Collectives: none.

        Args:
            module: With the same parameter names and shapes, cut over the ranks in the same way.

        Raises:
            ContractError: Inside of `swapped`, or the module's parameters are others by now.
            ValueError: `module` has other weights.
        """
        self._check_not_swapped("copy_to(module)")
        self._refresh()
        self._held.copy_to(module)

    def state_dict(self) -> dict[str, Any]:
        """Give the averages by parameter name, and how far they have come.

        Changes: nothing. Collectives: none.

        Returns:
            Keys "weights" (name to tensor, a DTensor where the parameter is one; not copied),
            "num_averaged" and "calls".

        Raises:
            ContractError: The module's parameters are others by now.
        """
        if not self._is_swapped:
            self._refresh()
        return {"weights": self._held.tensors(), "num_averaged": self.num_averaged, "calls": self._calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state; the module itself is not changed.

        Changes: the averages, all or none. Collectives: none.

        Args:
            state: From `state_dict`; tensors whole, or cut like the module's parameters.

        Raises:
            ContractError: Inside of `swapped`, or the module's parameters are others by now.
            ValueError: It belongs to another model.
        """
        self._check_not_swapped("load_state_dict(state)")
        counts = [state.get(key) for key in ("num_averaged", "calls")]
        weights = state.get("weights")
        if not isinstance(weights, Mapping) or not all(isinstance(count, int) and count >= 0 for count in counts):
            raise value_error(
                "load_state_dict: this is no state of averages",
                found=f"keys {listed(map(repr, state)) or 'none'}",
                expected="'weights', 'num_averaged' and 'calls'",
                fix="averages.load_state_dict(saved)  # from averages.state_dict()",
            )
        self._held.load(weights)
        self.num_averaged, self._calls = int(state["num_averaged"]), int(state["calls"])

    def _refresh(self) -> None:
        """As long as there is no average, the weights stand in for it."""
        if self.num_averaged == 0:
            self._held.update(1.0)

    def _weight(self) -> float:
        """How much of the new weights goes in."""
        if self._decay is None:
            return 1 / (self.num_averaged + 1)
        if not callable(self._decay):
            return 1 - self._decay
        return 1 - _checked_decay(self._decay(self.num_averaged), f"decay({self.num_averaged})")

    def _check_not_swapped(self, call: str) -> None:
        if self._is_swapped:
            what = call.partition("(")[0]
            raise ContractError(
                f"{what}: the module holds its averages at this moment",
                found=f"averages.{what}() inside of `with averages.swapped():`",
                expected=f"{what} after the body",
                fix=f"averages.{call}  # below the body of `with averages.swapped():`",
            )


@transform(phase=Phase.FINISH, changes=Part.PARAMETERS, collective=True)
def average_weights(
    module: M,
    ctx: DistContext,
    *,
    decay: float | Callable[[int], float] | None = 0.999,
    every: int = 1,
    start: int = 0,
    buffers: Buffers = "live",
) -> tuple[M, DistContext]:
    """Keep averages of the weights, which often do better than the last weights themselves.

    `averages = weft.averages(module)` holds them: `averages.update()` after each
    `optimizer.step()`, and `with averages.swapped():` around evaluation. Every rank averages what it
    holds, so sharded weights stay sharded. After a skipped fp16 step the weights are the old ones
    and would count twice: `if not weft.was_skipped(optimizer): averages.update()`.

    The weights are those of `torch.optim.swa_utils.AveragedModel`; for its buffers, see below. The first average is the
    weights, from then on it is `decay * average + (1 - decay) * weights`.

    Source: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992;
    Izmailov et al., "Averaging Weights Leads to Wider Optima", 2018 (decay=None).

    Changes: nothing of `module`. It needs memory for one more copy of this rank's share of the
    trained parameters; 16-bit ones are averaged in float32.
    Collectives: none, but for one meeting through the store here.

    Args:
        module: In its final form: apply precision and a strategy before.
        ctx: The current context.
        decay: From 0 to 1. None: all averaged weights count alike. Or a function of the number of
            averages so far (1, 2, ...), for a warm-up: `lambda n: min(0.999, (1 + n) / (10 + n))`.
        every: Only each `every`-th call of `update` averages.
        start: The first `start` calls of `update` do nothing.
        buffers: "live": the module's buffers (running statistics) are used as they are. "copy": as they were at the
            last average, as `AveragedModel` has them; it differs where the module is called in between, as in a GAN.
            "average": floating-point buffers are averaged too, as with `use_buffers=True`; counters stay live.

    Returns:
        `module` itself, and `ctx` with this transform in `applied`.

    Raises:
        AlreadyApplied: It was applied to `module` before.
        OrderError: A strategy is applied after it; or stage 3 of DeepSpeed was before it.
        ContextError: The ranks ask for different averages.
        TypeError: `module` is not a module.
        ValueError: An option is out of range, or no parameter is trained.
        PeerError: Another rank failed.

    Example:
        >>> import torch, weft
        >>> model, ctx = weft.average_weights(nn.Linear(1, 1, bias=False), weft.local(), decay=0.75)
        >>> averages = weft.averages(model)
        >>> for value in (0.0, 4.0):
        ...     _ = nn.init.constant_(model.weight, value)  # in place of optimizer.step()
        ...     averages.update()
        >>> with averages.swapped():
        ...     model.weight.item()
        1.0
        >>> model.weight.item()
        4.0
    """
    _check_options(module, every, start, buffers)
    if decay is not None and not callable(decay):
        decay = _checked_decay(decay, "decay")
    check_not_elsewhere("average_weights", module, "averages are kept of what the module holds")
    facts = {
        "decay": decay if not callable(decay) else "a function",
        "every": every,
        "start": start,
        "buffers": buffers,
    }
    ctx.agree("average_weights", facts)
    held = WeightAverages(module, buffers=buffers)
    return module, ctx.offering(Averages(held, decay, every, start))


def averages(module: nn.Module) -> Averages:
    """Find the averages of a module.

    Changes: nothing. Collectives: none.

    Args:
        module: One that `average_weights` was applied to.

    Returns:
        Its averages; the same object each time.

    Raises:
        ContractError: `average_weights` was not applied to it.

    Example:
        >>> import weft
        >>> model, ctx = weft.average_weights(nn.Linear(2, 2), weft.local())
        >>> weft.averages(model).num_averaged
        0
    """
    found = offered(module, Averages)
    if not found:
        raise ContractError(
            "averages: this object has no averages",
            found=type(module).__name__,
            expected="a module that average_weights was applied to",
            fix="model, ctx = weft.average_weights(model, ctx)",
        )
    return found[-1]


# -- what can be wrong -------------------------------------------------------------------------------


def _check_options(module: nn.Module, every: object, start: object, buffers: object) -> None:
    check_module("average_weights", module)
    for name, value, least in (("every", every, 1), ("start", start, 0)):
        check_count(
            "average_weights", name, value, least=least, fix=f"weft.average_weights(model, ctx, {name}={least})"
        )
    fix = 'weft.average_weights(model, ctx, buffers="live")'
    check_choice("average_weights", "buffers", buffers, get_args(Buffers), fix=fix)
    check_not_lazy("average_weights", module)
    if not any(p.requires_grad for p in module.parameters()):
        raise value_error(
            f"average_weights: {type(module).__name__} has no weights to average",
            found="no parameter requires a gradient",
            expected="trained parameters",
            fix="model.requires_grad_()",
        )


def _checked_decay(decay: object, name: str) -> float:
    number = None if isinstance(decay, bool) else as_number(decay)
    if number is None or not 0 <= number <= 1:
        raise value_error(
            f"average_weights: {name} = {decay!r} cannot be used",
            found=repr(decay),
            expected="a number from 0 to 1, a function that gives one, or None for equal weights",
            fix="weft.average_weights(model, ctx, decay=0.999)",
        )
    return number
