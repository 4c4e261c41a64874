"""Steps on a rank's own gradients, and what the ranks do now and then to their mean.

[Note: anchor] The anchor of a parameter is its value after the last exchange, the same on all ranks. In an exchange,
the mean over the ranks of `anchor - parameter` is the gradient of the anchor, on which the outer optimizer steps, and
the parameter continues from the anchor. With SGD of learning rate 1 that is the mean of the parameters.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft import torch_internals
from weft.checks import check_count, check_optimizer
from weft.engines.torch.hooks.every_optimizer import before_every_step, parameters_of
from weft.engines.torch.steps.rebind import state_as
from weft.errors import ContractError, listed, type_error
from weft.peers.ledger import Ledger
from weft.private_names import replaced
from weft.tensors.dtensor import local, resting_parameters
from weft.tensors.messages import add_up, broadcast
from weft.tensors.nested import map_tensors


@dataclass(frozen=True, kw_only=True)
class LocalStepOptions:
    """How the ranks along an axis step apart.

    Attributes:
        axis: Of the mesh.
        every: Steps between two exchanges of one parameter.
        fragments: Parts of the parameters, which are exchanged at different steps.
        outer: Makes the optimizer that steps on the mean change; None: the mean is taken as it is.

    Raises:
        TypeError: `outer` cannot be called.
        ValueError: A number is out of range.
    """

    axis: str
    every: int
    fragments: int = 1
    outer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None

    def __post_init__(self) -> None:
        call = "weft.local_steps(model, optimizer, ctx, every=16"
        check_count("local_steps", "every", self.every, fix=f"{call})")
        fix = f"{call}, fragments=4)  # at most one fragment per step"
        check_count("local_steps", "fragments", self.fragments, below=self.every + 1, fix=fix)
        if self.outer is not None and (isinstance(self.outer, torch.optim.Optimizer) or not callable(self.outer)):
            raise type_error(
                f"local_steps: outer = {type(self.outer).__name__} cannot be used",
                found=type(self.outer).__name__,
                expected="a function that makes an optimizer over the parameters it is given, which are the anchors",
                fix=f"{call}, outer=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True))",
            )

    def outer_of(self, anchors: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The outer optimizer over these parameters.

        Raises:
            TypeError: `outer` makes something else.
            ContractError: It does not hold exactly these.
        """
        made = torch.optim.SGD(anchors, lr=1.0) if self.outer is None else self.outer(anchors)
        check_optimizer("local_steps", made, fix="outer=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9)")
        held = list(map(id, parameters_of(made)))
        if sorted(held) != sorted(map(id, anchors)):
            raise ContractError(
                f"local_steps: outer made {type(made).__name__} over other parameters",
                found=f"{len(held)} parameters",
                expected=f"all {len(anchors)} that it was given",
                fix="outer=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)",
            )
        return made


class LocalSteps:
    """A module whose ranks step apart; hooks on its optimizer.

    Attributes:
        apart_over: The mesh axis along which they do.
        ranks_apart: Number of ranks along it.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup | None,
        options: LocalStepOptions,
        peers: Ledger | None,
        stacked: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.apart_over = (options.axis,)
        self.ranks_apart = 1 if group is None else dist.get_world_size(group)
        self.stacked = stacked
        self._module, self._optimizer = weakref.ref(module), weakref.ref(optimizer)
        self._group, self._peers, self._options = group, peers, options
        self._steps = 0
        self._anchors: dict[str, nn.Parameter] = {}
        self._outer: torch.optim.Optimizer | None = None
        self._restored: Mapping[str, torch.Tensor] = {}  # parameters between two exchanges, for `common_changed`
        self._is_averaged = False
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        self._every_step = before_every_step(self, LocalSteps._check_own)

    # -- steps

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_averaged:
            raise ContractError(
                "local_steps: a step while the module holds the mean over the ranks",
                found="optimizer.step() inside `with averaged(model, ctx):`",
                expected="steps after the body",
                fix="with averaged(model, ctx):\n    evaluate(model)\noptimizer.step()",
            )
        self._begin()
        self._restored = {}
        hooks = torch_internals.STEP_POST_HOOKS.of(optimizer)
        hooks.move_to_end(self._hooks[1].id)  # after those that gather what was stepped in parts

    def _check_own(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if the optimizer about to step is another one, and would train the module without an exchange."""
        module = self._module()
        if module is None or self._group is None or optimizer is self._optimizer():
            return
        own = set(map(id, resting_parameters(module)))
        if any(id(p) in own for p in parameters_of(optimizer)):
            raise ContractError(
                f"local_steps: a step of another {type(optimizer).__name__} than the one it was given",
                found="a second optimizer over parameters of the module, whose steps no exchange would follow",
                expected="one optimizer; for another one, local_steps is undone and applied again",
                fix="model, ctx = weft.undo(model, ctx); "
                f"model, optimizer, ctx = weft.local_steps(model, optimizer, ctx, every={self._options.every})",
            )

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._steps += 1
        every, fragments = self._options.every, self._options.fragments
        for number in range(fragments):
            if self._steps % every == number * every // fragments:
                self._exchange(number)

    def exchange(self) -> None:
        """Bring all parameters together again, whichever step it is: for a rehearsal, which makes few."""
        for number in range(self._options.fragments):
            self._exchange(number)

    @torch.no_grad()
    def _exchange(self, number: int) -> None:
        """Bring one fragment of the parameters together again."""
        if self._outer is None:
            return
        parameters = self._parameters()
        _check_named(parameters, self._anchors, self._options.every)
        if self._peers is not None:
            self._peers.agree("exchange", {"step": self._steps, "fragment": number})
        names = list(self._anchors)[number :: self._options.fragments]
        for name in names:
            anchor = self._anchors[name]
            anchor.grad = anchor.detach() - parameters[name].detach()
        if self._group is not None:
            add_up((local(self._anchors[name].grad) for name in names), self._group, mean=True)  # type: ignore[arg-type]
        self._outer.step()
        for name in names:
            anchor = self._anchors[name]
            parameters[name].copy_(anchor)
            anchor.grad = None
        module = self._module()
        buffers = list(module.buffers()) if module is not None and number == 0 else []
        if buffers and self._group is not None:
            broadcast(buffers, self._group)

    # -- the mean, for evaluation

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Give the parameters the mean over the ranks inside the body, and their own values again after it."""
        parameters = list(self._parameters().values())
        before = [p.detach().clone() for p in parameters]
        if self._group is not None:
            add_up((local(p.detach()) for p in parameters), self._group, mean=True)
        try:
            with replaced(self, _is_averaged=True):
                yield
        finally:
            for parameter, value in zip(parameters, before, strict=True):
                parameter.detach().copy_(value)

    # -- what checkpoints hold

    def check_savable(self) -> None:
        """Raise while the module holds the mean."""
        if self._is_averaged:
            raise ContractError(
                "save: the module currently holds the mean over the ranks",
                found="weft.save inside `with averaged(model, ctx):`",
                expected="a save after the body: the anchor and the parameters of every rank are in it",
                fix="with averaged(model, ctx):\n    evaluate(model)\nweft.save(state, directory, step, ctx)",
            )

    def common(self) -> dict[str, torch.Tensor]:
        """The anchors; see `StepsApart`."""
        self._begin()
        return {name: anchor.detach() for name, anchor in self._anchors.items()}

    @torch.no_grad()
    def common_changed(self, names: Collection[str]) -> None:
        """Continue from the anchors, or where each rank was when they were saved; see `StepsApart`."""
        parameters = self._parameters()
        for name in set(names).intersection(self._anchors):
            value = self._restored.get(name)
            local(parameters[name].detach()).copy_(local(self._anchors[name]) if value is None else value)
        self._restored = {}

    def state_dict(self) -> dict[str, Any]:
        """Steps, the outer optimizer by names of parameters, and the parameters of all ranks."""
        self._begin()
        state, groups = {}, []
        if self._outer is not None:
            held = {name: self._outer.state[anchor] for name, anchor in self._anchors.items()}
            state = {name: dict(entry) for name, entry in held.items() if entry}
            groups = [{k: v for k, v in group.items() if k != "params"} for group in self._outer.param_groups]
        stacked = {name: self.stacked(self._parameters()[name]) for name in self._anchors}
        return {"steps": self._steps, "outer": {"state": state, "groups": groups}, "parameters": stacked}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume; the parameters are those of this rank, if as many ranks were saved, and else the anchors."""
        self._begin()
        self._steps = int(state["steps"])
        self._restored = {
            name: local(value).reshape(local(self._anchors[name]).shape).clone()
            for name, value in state["parameters"].items()
            if name in self._anchors and value.shape == self.stacked(self._anchors[name]).shape
        }
        if self._outer is None:
            return
        for name, anchor in self._anchors.items():
            saved = state["outer"]["state"].get(name, {})
            self._outer.state[anchor] = map_tensors(partial(_copy_as, parameter=anchor), dict(saved))
        for group, options in zip(self._outer.param_groups, state["outer"]["groups"], strict=True):
            group.update(options)

    # -- parameters

    def _begin(self) -> None:
        """Make the anchors of the parameters as they are, once they have values and their final form."""
        if self._anchors or (self.ranks_apart == 1 and self._options.outer is None):
            return
        parameters = self._parameters()
        if any(p.is_meta for p in parameters.values()):
            return
        anchors = {name: nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
        self._outer = self._options.outer_of(list(anchors.values()))
        self._anchors = anchors

    def _parameters(self) -> dict[str, nn.Parameter]:
        """The trained parameters by name, as the optimizer holds them.

        Raises:
            ContractError: It does not hold all of them, or others; those of another rank would stay apart.
        """
        module, optimizer = self._module(), self._optimizer()
        assert module is not None
        assert optimizer is not None
        return check_same_parameters(module, optimizer)

    def release(self) -> None:
        """Let the process group go."""
        self._every_step.release()
        self._group, self._peers = None, None

    def undo(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self.release()


def check_same_parameters(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The trained parameters of a module by name, if its optimizer holds these and no others.

    Raises:
        ContractError: It holds others, or not all.
    """
    names = [name for name, _ in module.named_parameters()]
    own = dict(zip(names, resting_parameters(module), strict=True))
    held = {id(p) for p in parameters_of(optimizer) if p.requires_grad}
    trained = {name: p for name, p in own.items() if p.requires_grad}
    lost = [name for name, p in trained.items() if id(p) not in held]
    if lost or len(held) > len(trained):
        raise ContractError(
            f"local_steps: {type(optimizer).__name__} does not hold exactly the parameters that are trained",
            found=f"not held: {listed(lost)}" if lost else f"{len(held) - len(trained)} of no part of the module",
            expected="one optimizer over all trained parameters of the module: its step is followed by the exchange",
            fix="optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)",
        )
    return trained


def _check_named(parameters: Mapping[str, object], anchors: Mapping[str, object], every: int) -> None:
    changed = sorted(set(parameters) ^ set(anchors))
    if changed:
        raise ContractError(
            "local_steps: the trained parameters differ from those of the first step",
            found=f"frozen, trained or added since: {listed(changed)}",
            expected="the same parameters from the first step on, with the same values on all ranks",
            fix="model, ctx = weft.undo(model, ctx); "
            f"model, optimizer, ctx = weft.local_steps(model, optimizer, ctx, every={every})",
        )


def _copy_as(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return state_as(value, parameter).clone()
