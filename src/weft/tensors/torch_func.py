"""Whether a function of `torch.func` is being computed."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["in_torch_func"]

_innermost: Any = torch._C._functorch.peek_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]


def in_torch_func() -> bool:
    """Whether `grad`, `vmap`, `jvp` or the like is running: it returns gradients, and adds nothing up in `.grad`."""
    return not torch.compiler.is_compiling() and _innermost() is not None
