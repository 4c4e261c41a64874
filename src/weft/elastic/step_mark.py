"""What a step that failed has changed, and putting it back.

The optimizer's step does nothing after a failure. Everything else may change before it and after it: buffers in
forward, random states, the learning rate, the position in the data, modules that are averages of others. What the loop
itself does to weights comes after their gradients, so a copy of the moment of the failure is enough for them.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from weft import torch_internals
from weft.checkpoint.state.collect import Checkpoint
from weft.context import DistContext
from weft.contract import GradSync, offered
from weft.errors import ContractError, listed
from weft.tensors.dtensor import local
from weft.tensors.rng_state import RngState, generator_state, is_generator, prepare_generator

_PLAIN = frozenset({int, float, bool, str, type(None)})


def averaged_parameters(modules: list[nn.Module]) -> dict[int, nn.Parameter]:
    """The parameters whose gradients replicas average, by id."""
    parts = (part for module in modules for part in module.modules() if offered(part, GradSync))
    return {id(p): p for part in parts for p in part.parameters()}


class StepMark:
    """The state between two steps, as far as a step that fails changes it.

    Attributes:
        position: Of the loader.
    """

    def __init__(self, state: Checkpoint, loader: Any, ctx: DistContext) -> None:
        objects = state.objects.values()
        self.position: dict[str, Any] = {}
        self._loader, self._ctx, self._has_rng = loader, ctx, state.rng
        # Walking through a model costs more than all the rest; its modules are those of now.
        models = [obj for obj in objects if isinstance(obj, nn.Module)]
        self._modules = [part for model in models for part in model.modules()]
        self._optimizers = [obj for obj in objects if isinstance(obj, torch.optim.Optimizer)]
        apart = (nn.Module, torch.optim.Optimizer)
        self._others = [obj for obj in objects if not isinstance(obj, apart) and obj is not loader]
        self._averaged = averaged_parameters(models)
        self._names = {id(p): name for model in models for name, p in model.named_parameters()}
        self._apart = [p for model in models for p in model.parameters() if id(p) not in self._averaged]
        self._frozen: dict[nn.Parameter, tuple[int, int]] = {}
        self._values: list[Any] = []
        self._options: list[list[dict[str, Any]]] = []
        self._random: RngState | None = None
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self._is_taken = False

    def begin(self) -> None:
        """Weights that no optimizer steps have the values of now; from here on they are to keep them."""
        stepped = {id(p) for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]}
        self._frozen = {p: _change_marks(p) for key, p in self._averaged.items() if key not in stepped}

    @torch.no_grad()
    def take(self) -> None:
        """Note the state of this moment.

        Raises:
            ContractError: The step before has changed weights that could not be put back.
        """
        if any(_change_marks(p) != marks for p, marks in self._frozen.items()):
            self._check_frozen()
        self.position = self._loader.state_dict()
        self._values = [_value_of(obj) for obj in self._others]
        self._options = [[_options_of(group) for group in optimizer.param_groups] for optimizer in self._optimizers]
        self._random = RngState.capture(self._ctx.device, self._ctx.engine) if self._has_rng else None
        parts = map(torch_internals.BUFFERS.of, self._modules)
        found = {id(b): b for buffers in parts for b in buffers.values() if b is not None}  # each once
        values = [*found.values(), *map(local, self._apart)]
        if len(values) != len(self._kept) or any(a is not b for a, (b, _) in zip(values, self._kept)):  # noqa: B905
            self._kept = [(value, value.clone()) for value in values]
        elif values:
            torch_internals.foreach_copy([kept for _, kept in self._kept], values)
        self._weights, self._is_taken = None, True

    @torch.no_grad()
    def keep_weights(self) -> None:
        """The step that was begun has failed: its optimizer will do nothing, so the weights are to stay as they are."""
        if self._is_taken and self._weights is None:
            found = [local(p) for group in self._optimizers[0].param_groups for p in group["params"]]
            self._weights = [(p, p.clone() if p.device.type == "cpu" else p.cpu()) for p in found]

    @torch.no_grad()
    def put_back(self) -> None:
        """Go back to what was noted: the step that followed has not been."""
        for optimizer, groups in zip(self._optimizers, self._options, strict=True):
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.update(options)
            optimizer.zero_grad()
        for obj, value in zip(self._others, self._values, strict=True):
            _put_back(obj, value)
        for tensor, kept in (*self._kept, *(self._weights or ())):
            tensor.copy_(kept)
        self._weights, self._is_taken = None, False
        if self._random is not None:
            self._random.apply(self._ctx.device, self._ctx.engine)

    def _check_frozen(self) -> None:
        before = self._frozen
        self.begin()  # some may be trained since
        changed = [self._names[id(p)] for p, marks in self._frozen.items() if before[p] != marks]
        if changed:
            raise ContractError(
                "resilient: this step could not be repeated: it changed weights that no optimizer updates",
                found=listed(changed),
                expected="weights that the loop changes by itself in a module of their own, which is not averaged",
                fix='weft.checkpointable({"model": model, "teacher": teacher, ...}, ctx)  # not a part of the model',
            )


def _change_marks(parameter: nn.Parameter) -> tuple[int, int]:
    """What changes with the values of a parameter."""
    return local(parameter).data_ptr(), torch_internals.VERSION.of(parameter)


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {n: v if _is_plain(v) else copy.deepcopy(v) for n, v in group.items() if n != "params"}


def _is_plain(value: Any) -> bool:
    """Whether a value cannot change by itself; a copy costs more than to see that."""
    kind = type(value)
    return kind in _PLAIN or (kind is tuple and all(type(item) in _PLAIN for item in value))


def _value_of(obj: Any) -> Any:
    return generator_state(obj) if is_generator(obj) else copy.deepcopy(obj.state_dict())


def _put_back(obj: Any, value: Any) -> None:
    if is_generator(obj):
        prepare_generator(obj, value)()
    else:
        obj.load_state_dict(value)
