"""Run a module in a chosen precision: casts at its borders, autocast inside, fp16 with a scale.

The scale itself is `loss_scale.py`.

[Note: calls within calls] A listed method may call forward, forward a listed method, and a recursive
module itself. Gradients are scaled at the borders of the outermost call only. torch does not run
forward hooks after a KeyboardInterrupt, so a depth > 0 is believed only if such a call is really on
the stack; otherwise the call was interrupted, and what it left switched on is switched off.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from weft import torch_internals
from weft.engines.options import CastOptions
from weft.engines.torch.amp.fp8_linear import multiply_in_fp8
from weft.engines.torch.amp.loss_scale import LossScale
from weft.engines.torch.amp.recast_saved_weights import has_large_parameters, recast_in_backward
from weft.engines.torch.hooks.method_hooks import Attached, attach
from weft.tensors.dtensor import is_fsdp_unit
from weft.tensors.nested import map_tensors


class PreciseModule(Attached):
    """The hooks that give a module its precision.

    Attributes:
        scale: The fp16 scale; None in other precisions.
        products: The layers that multiply in 8 bits.
    """

    def __init__(self, module: nn.Module, device: torch.device, options: CastOptions) -> None:
        self._device_type = device.type
        self._options = options
        self._module = weakref.ref(module)
        self._entered: list[contextlib.ExitStack] = []
        self._calls = _Calls()
        super().__init__()
        self.scale = LossScale(module, options.scale, device) if options.scale is not None else None
        # A compiler has to stop here: it makes graphs of their own of a module's hooks, and what such
        # a graph switches on (autocast) is off again when it ends.
        self._before = torch.compiler.disable(self._before)  # type: ignore[method-assign]
        self._after = torch.compiler.disable(self._after)  # type: ignore[method-assign]
        before, after, methods = self._before, self._after, options.methods
        attach(module, self._removable, before=before, after=after, around=self._around, methods=methods, always=True)
        self.products = options.products
        for layer in options.products:
            multiply_in_fp8(layer, self._removable)

    def _before(self, module: nn.Module | None, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Cast and mark the inputs, switch autocast on or off."""
        options = self._options
        if options.inputs is not None:
            args = tuple(_cast(value, options.inputs) for value in args)
            kwargs = {name: _cast(value, options.inputs) for name, value in kwargs.items()}
        if self.scale is not None:
            self._forget_interrupted()
            self._calls.depth += 1
            if self._calls.depth == 1:
                args, kwargs = self.scale.at_inputs((args, kwargs))
        if options.autocast is not None:
            self._enter(options.autocast)
        elif options.inputs is not None:
            # A part that computes in its own dtype, in a module that computes in a lower one.
            outer = torch.is_autocast_enabled(self._device_type)
            self._enter(torch.get_autocast_dtype(self._device_type), enabled=False) if outer else self._enter(None)
        return args, kwargs

    def _around(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        args, kwargs = self._before(None, args, kwargs)
        try:
            output = call(*args, **kwargs)
        except BaseException:
            self._leave()
            raise
        return self._after(None, args, output)

    def _after(self, module: nn.Module | None, args: Any, output: Any) -> Any:
        """Switch autocast back, cast and mark the outputs; None if forward raised: then only autocast is left."""
        outermost = self._calls.depth == 1
        self._leave()
        options = self._options
        if self.scale is not None and outermost:
            return self.scale.at_outputs(output, options.outputs)
        return output if options.outputs is None else _cast(output, options.outputs)

    def _leave(self) -> None:
        """Switch autocast back to what it was before the call."""
        if self._entered:
            self._entered.pop().close()
        if self.scale is not None and self._calls.depth:
            self._calls.depth -= 1

    def _enter(self, dtype: torch.dtype | None, *, enabled: bool = True) -> None:
        modes = contextlib.ExitStack()
        if dtype is not None:
            # Autocast keeps what it has cast until the outermost module has computed, and autograd until backward: of
            # all units, which are gathered for a moment only, and freed one after the other for good reason.
            module = self._module()
            is_sharded = module is not None and is_fsdp_unit(module)
            cache = torch.is_autocast_cache_enabled() and not is_sharded
            modes.enter_context(torch.autocast(self._device_type, dtype, enabled, cache))
            if is_sharded and enabled and torch.is_grad_enabled() and self._casts_again:
                modes.enter_context(recast_in_backward())
        self._entered.append(modes)

    @functools.cached_property
    def _casts_again(self) -> bool:
        """Whether backward is to cast parameters again, once they are sharded; from then on they stay the same."""
        module = self._module()
        return module is not None and has_large_parameters(module)

    def _forget_interrupted(self) -> None:
        while self._calls.depth and not self._is_running():
            self._leave()

    def _is_running(self) -> bool:
        """Whether a call of the module, besides the one that begins, is on the stack; see the note."""
        module, found = self._module(), 0
        frame: FrameType | None = sys._getframe()
        forward = torch_internals.CALL.of(nn.Module).__code__
        while frame is not None:
            code = frame.f_code
            if code.co_name == "compile_wrapper":
                return True  # torch.compile: what runs in it does not show on the stack
            if code is forward:
                found += frame.f_locals.get("self") is module
            elif code is _METHOD:
                found += frame.f_locals["self"] is self
            frame = frame.f_back
        return found > 1


class _Calls(threading.local):
    """How many calls of one module the running thread is in."""

    depth = 0


_METHOD = PreciseModule._around.__code__


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors of a nested value; integers and complex numbers stay."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value)
