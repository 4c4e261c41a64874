"""Which modules are compiled, by weft or by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from weft import torch_internals
from weft.engines.torch.hooks.method_hooks import Routed, arounds


class CompiledCall:
    """A compiled function around the forward of a module."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self._compiled = compiled

    def __call__(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what was compiled, in place of `call`."""
        return self._compiled(*args, **kwargs)


def already_compiled(module: nn.Module) -> list[str]:
    """Name the parts of `module` that are compiled, by us or by torch."""
    return [name or "the module itself" for name, part in module.named_modules() if _is_compiled(part)]


def _is_compiled(part: nn.Module) -> bool:
    return (
        any(isinstance(around, CompiledCall) for around in arounds(part, "forward"))
        or not isinstance(torch_internals.COMPILED_CALL.of(part), (Routed, type(None)))
        or torch_internals.compiled_module.holds(part)
    )
