"""Compile the forward of modules in place, inside of all their hooks.

[Note: inside of hooks] `nn.Module.compile` compiles a call together with the module's hooks. Those of
precision, reduction and FSDP2 do what a compiler cannot look at: the graph would break at each. So
here `forward` is compiled, and hooks run as they always do, around it. The gradient that a hook sees
is the same, and one graph is enough under any of them.

[Note: one code per class] The compiler remembers what it compiled per code object, up to a limit
(8 by default). Each class gets a code object of its own here: its instances share what was compiled,
and other classes, or other calls of `compiled`, do not use up the limit.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from weft.engines.options import CompileOptions
from weft.engines.torch.compute.activation_checkpoint import (
    already_recomputed,
    moves_statistics_twice,
    no_cached_casts,
    offloaded,
)
from weft.engines.torch.hooks.method_hooks import CompiledCall, Removable, attach
from weft.errors import listed, value_error


class Compiled:
    """Modules whose forward is compiled when it is called first."""

    def __init__(self, parts: Mapping[str, nn.Module], options: CompileOptions) -> None:
        if names := [name for part in parts.values() for name in offloaded(part)]:
            raise value_error(
                "compile: blocks inside keep their inputs on the CPU, which no graph does",
                found=f"recompute(..., offload=True) of {listed(names)}",
                expected="blocks that are compiled, or that are offloaded",
                fix="weft.recompute(model, ctx, blocks=...) without offload=True",
            )
        self._removable = Removable()
        codes: dict[type[nn.Module], types.CodeType] = {}  # see [Note: one code per class]
        settings: dict[str, Any] = {**options._asdict(), "options": options.options and dict(options.options)}
        for part in parts.values():
            settings["backend"] = _backend(part, options.backend)
            forward, name = _calling(part.forward), f"forward_of_{type(part).__name__}"
            forward.__code__ = codes.setdefault(type(part), forward.__code__.replace(co_name=name))
            compiled = torch.compile(forward, **settings)
            around = CompiledCall(_steady(compiled) if already_recomputed(part) else compiled)
            attach(part, self._removable, around=around, methods=["forward"])

    def undo(self) -> None:
        """Let the modules run uncompiled."""
        self._removable.remove()


def _backend(part: nn.Module, wanted: str | Callable[..., Any]) -> str | Callable[..., Any]:
    """The wanted backend; or, for "eager" if running statistics are in a graph that runs twice, "aot_eager".

    "eager" runs the second time with all its side effects, and statistics are arguments of the graph there.
    """
    return "aot_eager" if wanted == "eager" and moves_statistics_twice(part) else wanted


def _steady(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """For a part that is computed twice: a weight that autocast has cast for an earlier call is cast again."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        with no_cached_casts():
            return compiled(*args, **kwargs)

    return forward


def _calling(call: Callable[..., Any]) -> types.FunctionType:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    assert isinstance(forward, types.FunctionType)
    return forward


def check_backend(backend: str) -> None:
    """Raise if there is no compiler of this name.

    Raises:
        ValueError: There is none.
    """
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise value_error(
            f"compiled: backend = {backend!r} is unknown",
            found=repr(backend),
            expected=f"one of {listed(known)}, or a function",
            fix='weft.compile(model, ctx, backend="inductor")',
        )
