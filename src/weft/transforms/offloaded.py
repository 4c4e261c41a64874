"""`offloaded`: the state of a training leaves the device for a phase, and comes back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from weft import torch_internals
from weft.checkpoint.state.collect import extra_state_of
from weft.checks import check_module
from weft.context import DistContext
from weft.contract import KeepsParameters, Stateful, StepsApart, check_not_streamed, offered
from weft.engines.torch.device.emptied import emptied
from weft.engines.torch.hooks.method_hooks import Removable, attach
from weft.engines.torch.parts.left_gathered import drop_gathered
from weft.errors import ContractError
from weft.sharding.shard_checks import optimizers_in
from weft.tensors.nested import tensors
from weft.tensors.quantized import quantization_state


def offloaded(
    module: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], ctx: DistContext
) -> contextlib.AbstractContextManager[None]:
    """Give the memory of a device to something else inside the body: parameters, gradients, optimizer state wait.

    For phases of another program on the same devices, such as a rollout engine, an evaluation of another model, or a
    compilation. Inside, parameters, their gradients, buffers, the state of optimizers and of transforms (averages,
    anchors of `local_steps`) have no memory on the device; their values are in memory of the CPU, pinned where the
    device reads from there. Afterwards, also after an exception, all is where it was, bit for bit, in the same tensors:
    whoever has one of them, or a view of it, has its values again.

        with weft.offloaded(model, optimizer, ctx):
            samples = engine.generate(prompts)

    Enter it between steps, outside of a window of micro-batches. Buckets of `replicate` in which there are no gradients
    at that moment stay: enter it before `zero_grad()`. A graph that was recorded with the addresses of these tensors
    (CUDA graphs) has to be recorded anew. On a CPU nothing is gained: the values wait in other memory of the same
    machine, so that a program can be tested there.

    Changes: memory under the tensors; nothing of them afterwards. Collectives: none.

    Args:
        module: With or without transforms, without a backward pass that is still to come.
        optimizer: Over its parameters; several; or none: `()`.
        ctx: The current context.

    Returns:
        A context manager, for a `with` statement. Inside it, calls of the module and steps of the optimizers raise
        `ContractError`, and so does saving them.

    Raises:
        TypeError: `module` is not a module, or an optimizer is none.
        ContractError: Parts of the module are streamed, or another engine keeps the state (DeepSpeed).

    Example:
        >>> import torch, weft
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with weft.offloaded(model, optimizer, weft.local()):
        ...     model.weight.untyped_storage().nbytes()
        0
        >>> model.weight.untyped_storage().nbytes()
        8
    """
    check_module("offloaded", module, fix="with weft.offloaded(model, optimizer, ctx): ...")
    check_not_streamed("offloaded", module)
    optimizers = optimizers_in("offloaded", optimizer)
    keepers = [part for part in module.modules() if offered(part, KeepsParameters)]
    if keepers:
        raise ContractError(
            f"offloaded: the state of this {type(module).__name__} is another engine's",
            found="parameters and state that DeepSpeed keeps",
            expected="a strategy of torch's engine",
            fix='weft.zero_partition(model, optimizer, ctx, stage=3, engine="torch")',
        )
    return _offloaded(module, optimizers, ctx)


@contextlib.contextmanager
def _offloaded(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], ctx: DistContext) -> Iterator[None]:
    drop_gathered(module)
    held = [*_tensors_of(module), *(one for optimizer in optimizers for one in tensors(dict(optimizer.state)))]
    hooks = Removable()
    with contextlib.ExitStack() as stack:
        stack.enter_context(emptied(held, ctx.device))
        stack.callback(hooks.remove)
        for part in module.modules():
            attach(part, hooks, before=_refuse_call, first=True)
        for optimizer in optimizers:
            handle = optimizer.register_step_pre_hook(_refuse_step)
            torch_internals.STEP_PRE_HOOKS.of(optimizer).move_to_end(handle.id, last=False)
            hooks.add(handle.remove)
        yield


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """All that a module and its transforms have on the device between steps."""
    found: list[torch.Tensor] = [*module.parameters(), *module.buffers(), *quantization_state(module).values()]
    found += [p.grad for p in module.parameters() if p.grad is not None]
    for kept in extra_state_of(module, Stateful).values():
        found += tensors(dict(kept.state_dict()))
    for part in module.modules():
        for apart in offered(part, StepsApart):
            found += apart.common().values()
    return found


def _refuse_call(part: nn.Module, *_: Any) -> NoReturn:
    _refuse(f"a {type(part).__name__} was called inside", "output = model(x)")


def _refuse_step(optimizer: torch.optim.Optimizer, *_: Any) -> NoReturn:
    _refuse(f"{type(optimizer).__name__} was to step inside", "optimizer.step()")


def _refuse(what: str, line: str) -> NoReturn:
    raise ContractError(
        f"offloaded: {what}",
        found="parameters and state that wait in the memory of the CPU",
        expected="calls and steps before or after it",
        fix=f"with weft.offloaded(model, optimizer, ctx): ...  # something else; {line} after it",
    )
