"""Inside `torch.func`: whether one of its functions runs, and layers that communicate, for which it has no rules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from weft import torch_internals
from weft.engines.torch.hooks.method_hooks import Removable, attach
from weft.errors import ContractError


def in_torch_func() -> bool:
    """Whether `grad`, `vmap`, `jvp` or the like is running: it returns gradients, and adds nothing up in `.grad`."""
    return not torch.compiler.is_compiling() and torch_internals.interpreter() is not None


def check_torch_func(what: str, class_name: str) -> None:
    """Raise for a call inside a function of `torch.func`.

    Raises:
        ContractError: One is being computed.
    """
    if in_torch_func():
        raise ContractError(
            f"{what}: {class_name} is called inside torch.func, and its layers communicate",
            found="torch.func.grad, vmap, jvp, jacrev or hessian",
            expected="calls of the module, and backward; torch.func with replicate, or zero_partition in stage 1",
            fix="for row in batch: model(row[None]).sum().backward()  # gradients of single samples",
        )


def refuse_torch_func(what: str, module: nn.Module, removable: Removable) -> None:
    """Let calls of a module raise inside `torch.func`, as `check_torch_func` does; before all that is attached to it.

    Args:
        what: Name of the transform.
        module: Has layers that communicate.
        removable: Ends it.
    """
    class_name = type(module).__name__

    def before(part: nn.Module, args: Any, kwargs: Any) -> None:
        check_torch_func(what, class_name)

    attach(module, removable, before=before, first=True)
