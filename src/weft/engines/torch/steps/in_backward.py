"""Step inside backward, on each parameter as soon as its gradient is there and reduced, which is then freed.

torch calls hooks on a parameter when its gradient has been accumulated, and FSDP2 calls those on a sharded parameter
when the gradients of its unit have been reduced.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from weft import torch_internals
from weft.engines.torch.steps.combined_optimizer import plain_step
from weft.engines.torch.steps.swapped import exchange
from weft.errors import ContractError, OrderError
from weft.tensors.dtensor import is_sharded


class BackwardStep:
    """The hooks on the parameters of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        self._shards: dict[int, Any] = {}  # on which the step is made, as plain tensors
        if any(is_sharded(p) for p in parameters):
            from weft.engines.torch.sharded_step.shards import HeldShard  # noqa: PLC0415  (torch.distributed.tensor)

            self._shards = {id(p): HeldShard(p) for p in parameters if is_sharded(p)}
        self._optimizer = weakref.ref(optimizer)
        self._step = plain_step(optimizer)
        self._places = {id(p): place for place, entry in enumerate(optimizer.param_groups) for p in entry["params"]}
        self._stepped: set[int] = set()
        self._handles: list[Any] = [p.register_post_accumulate_grad_hook(self.arrive) for p in parameters]
        self._handles.append(optimizer.register_step_pre_hook(self._on_step))

    def undo(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _on_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The user's own step, which finds no gradients of these parameters, ends the step."""
        self._stepped.clear()

    def arrive(self, parameter: torch.Tensor) -> None:
        """A gradient is there: step on it, and free it.

        Raises:
            ContractError: It is the second one of this step.
        """
        optimizer = self._optimizer()
        if optimizer is None or parameter.grad is None:
            return
        if id(parameter) in self._stepped:
            raise ContractError(
                "step_in_backward: a second gradient of one parameter before optimizer.step()",
                found=f"a parameter of shape {tuple(parameter.shape)}, which was stepped on with the first one",
                expected="one backward pass per step, through one call of each part: gradients are not accumulated",
                fix="loss.backward(); optimizer.step()  # in each iteration",
            )
        self._stepped.add(id(parameter))
        shard = self._shards.get(id(parameter))
        if shard is not None:
            shard.enter(optimizer)
        stepped = parameter if shard is None else shard.values
        at = self._places[id(parameter)]
        held = exchange(optimizer, [[stepped] if place == at else [] for place in range(len(optimizer.param_groups))])
        try:
            self._step(optimizer)
        finally:
            exchange(optimizer, held)
            if shard is not None:
                shard.leave(optimizer)
            torch.autograd.graph.increment_version(parameter)  # steps on shards and fused ones do not
        parameter.grad = None


def check_has_gradients(what: str, parameters: Iterable[torch.Tensor]) -> None:
    """Raise if parameters have no gradients after backward, because they are stepped on inside it.

    Raises:
        OrderError: They are.
    """
    if any(map(is_stepped_in_backward, parameters)):
        raise OrderError(
            f"{what}: needs the gradients of all parameters after backward, where there are none",
            found="step_in_backward on an optimizer, which steps on each gradient and frees it in backward",
            expected=f"either {what} or step_in_backward",
            fix=f"leave step_in_backward out, or {what}",
        )


def is_stepped_in_backward(parameter: torch.Tensor) -> bool:
    """Whether an optimizer steps on a parameter inside backward, and frees its gradient there."""
    hooks = torch_internals.ACCUMULATE_HOOKS.of(parameter) or {}
    return any(isinstance(getattr(hook, "__self__", None), BackwardStep) for hook in hooks.values())
