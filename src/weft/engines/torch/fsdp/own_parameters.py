"""Are the parameters in a module those that FSDP2 shards?

`torch.func.functional_call` puts others there for one call. FSDP2 would put its own in their place when it gathers a
unit; or, in the first call of all, shard the given ones from then on.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft import torch_internals
from weft.engines.torch.fsdp.units import Units
from weft.engines.torch.hooks.function_transforms import in_torch_func
from weft.engines.torch.hooks.method_hooks import Removable
from weft.engines.torch.hooks.program_lines import strategy_line
from weft.engines.torch.parts.assigned_data import AssignedData
from weft.errors import ContractError, listed
from weft.tensors.dtensor import groups_of, state_of

_Place = tuple[dict[str, Any], str, Any]  # a module's parameters, the name there, and what FSDP2 keeps of it


class OwnParameters:
    """The places of the parameters that FSDP2 shards, looked at before each call of the module and of its units."""

    def __init__(self, what: str, module: nn.Module, units: Units, removable: Removable) -> None:
        self._what = what
        self._class_name = type(module).__name__.removeprefix("FSDP")
        self._units = units
        self._parameters = list(units.parameters())
        self._places = _places(self._parameters)
        self._assigned = AssignedData(what, self._class_name)
        self._look_at_data()
        parts: list[Any] = list(units)
        for unit in parts:
            if unit is not module:
                own = _places([one for group in groups_of(unit) for one in group.fsdp_params])
                removable.add(unit.register_forward_pre_hook(self._before_unit(own), prepend=True).remove)

    def check(self, module: Any) -> None:
        """Raise before a call of the module whose parameters are others.

        Raises:
            ContractError: Parameters are not the module's own, one has a hook, or `.data` of one was assigned.
        """
        strangers = self._strangers(self._places)
        state = state_of(module)
        is_first = torch_internals.STATE_IS_ROOT.of(state) is None
        if strangers and not (is_first and _were_loaded(strangers)):
            self._raise(strangers)
        self._check_hooks()
        self._look_at_data()
        if is_first:
            torch_internals.STATE_INIT.of(state)()  # may pad parts, which are other ones then
            self._look_at_data()

    def _check_hooks(self) -> None:
        """Raise for hooks on what torch computes no gradient of, or on what is freed: one of a part would see none."""
        hooks, whole = torch_internals.TENSOR_HOOKS.get, torch_internals.PARAM_WHOLE.get
        hooked = [
            torch_internals.PARAM_NAME.of(one)
            for one in self._parameters
            if hooks(one.sharded_param) or hooks(whole(one))
        ]
        if hooked:
            raise ContractError(
                f"{self._what}: hooks on sharded parameters of {self._class_name} would not be called",
                found=f"p.register_hook on {listed(hooked)}",
                expected="gradients are read and changed after backward, when they are averaged over the ranks",
                fix="loss.backward(); p.grad.clamp_(-1, 1)  # in place of p.register_hook(...)",
            )

    def _look_at_data(self) -> None:
        self._assigned.look((torch_internals.PARAM_NAME.of(one), one.sharded_param) for one in self._parameters)

    def _before_unit(self, own: Sequence[_Place]) -> Callable[..., None]:
        def before(unit: Any, args: Any) -> None:
            if torch_internals.graph_task_id() != -1:
                return  # computed again
            strangers = self._strangers(own)
            # In a pipeline all units are whole, and FSDP2 leaves what the stage has put there.
            if strangers and torch_internals.STATE_TRAINING.of(state_of(unit)) != torch_internals.BEFORE_BACKWARD.found:
                self._raise(strangers)

        untraced: Callable[..., None] = torch_internals.untraced(before)
        return untraced

    def _strangers(self, places: Sequence[_Place]) -> list[tuple[str, Any]]:
        """The other parameters, with the names of those in whose place they are."""
        found = [(slots.get(name), one) for slots, name, one in places if slots.get(name) is not one.sharded_param]
        strangers = [
            (torch_internals.PARAM_NAME.of(one), here)
            for here, one in found
            if here is not None
            and here is not torch_internals.PARAM_WHOLE.get(one)
            and here is not torch_internals.PARAM_LEFT.get(one)
        ]
        if self._units.alone:  # nothing is gathered, and what is given is used
            return [(name, here) for name, here in strangers if isinstance(here, DTensor)]
        return strangers

    def _raise(self, strangers: Sequence[tuple[str, Any]]) -> None:
        if in_torch_func():
            fix = "model, ctx = weft.replicate(model, ctx)  # instead of sharding"
        elif not _in_functional_call():
            fix = f"{strategy_line(self._what)}  # after parameters are replaced, with an optimizer over the new ones"
        elif torch.is_grad_enabled():
            fix = "model, ctx = weft.replicate(Adapted(model), ctx)  # a module whose forward calls functional_call"
        else:
            fix = "with weft.full_params(model, ctx, forward=True), torch.no_grad(): functional_call(model, whole, x)  "
            fix += "# whole: by name, plain tensors (p.full_tensor()); or weft.average_weights"
        raise ContractError(
            f"{self._what}: {self._class_name} is called with other parameters than its own, which are sharded",
            found=f"{listed([name for name, _ in strangers])} in functional_call, by load_state_dict(assign=True), or "
            "as new attributes",
            expected="calls with the module's own parameters: FSDP2, also without weft, gathers no others",
            fix=fix,
        )


def _places(parameters: Sequence[Any]) -> list[_Place]:
    found = []
    for one in parameters:
        info = torch_internals.PARAM_HOME.of(one)
        parts = zip((info.module, *info.shared_modules), (info.param_name, *info.shared_param_names), strict=True)
        found += [(torch_internals.PARAMETERS.of(part), name, one) for part, name in parts]
    return found


def _were_loaded(strangers: Sequence[tuple[str, Any]]) -> bool:
    """Whether they were put there to stay, which FSDP2 allows until the first call, and not for this call alone."""
    stay = all(isinstance(here, nn.Parameter) and isinstance(here, DTensor) for _, here in strangers)
    return stay and not _in_functional_call()


def _in_functional_call() -> bool:
    code = torch_internals.call_functional.found.__code__
    return any(frame.f_code is code for frame, _ in traceback.walk_stack(None))
