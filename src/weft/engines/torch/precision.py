"""Run a module in a chosen precision: casts at its borders, autocast inside, fp16 with a scale.

The scale itself is `loss_scale.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weft.engines.options import CastOptions
from weft.engines.torch.calls import Hook, Removable, around_methods
from weft.engines.torch.loss_scale import LossScale
from weft.nested import map_tensors

__all__ = ["PreciseModule"]


class PreciseModule:
    """The hooks that give a module its precision.

    Attributes:
        scale: The fp16 scale; None in other precisions.
    """

    def __init__(self, module: nn.Module, device_type: str, options: CastOptions) -> None:
        self._device_type = device_type
        self._options = options
        self._entered: list[Any] = []
        self._removable = Removable()
        self.scale = LossScale(module, options.scale) if options.scale is not None else None
        if self.scale is not None:
            # The borders are autograd functions with Python inside: a compiler has to stop there,
            # and must not find autocast switched on in one graph and off in another.
            self.before = torch.compiler.disable(self.before)  # type: ignore[method-assign]
            self.after = torch.compiler.disable(self.after)  # type: ignore[method-assign]
        before = module.register_forward_pre_hook(_Before(self), with_kwargs=True)
        after = module.register_forward_hook(_After(self), always_call=True)
        self._removable.add(before.remove)
        self._removable.add(after.remove)
        around_methods(module, options.methods, _Around(self), self._removable)

    def undo(self) -> None:
        """Take the hooks off; parameters keep their dtype."""
        self._removable.remove()

    def before(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Cast and mark the inputs, switch autocast on."""
        options = self._options
        if options.inputs is not None:
            args, kwargs = _cast((args, kwargs), options.inputs)
        if self.scale is not None:
            args, kwargs = self.scale.at_inputs((args, kwargs))
        if options.autocast is not None:
            mode = torch.amp.autocast_mode._enter_autocast(
                self._device_type,
                options.autocast,
                True,  # noqa: FBT003  (torch takes these by position)
                torch.is_autocast_cache_enabled(),
            )
            self._entered.append(mode)
        return args, kwargs

    def after(self, output: Any) -> Any:
        """Switch autocast off, cast and mark the outputs."""
        self.leave()
        options = self._options
        if options.outputs is not None:
            output = _cast(output, options.outputs)
        if self.scale is not None:
            output = self.scale.at_outputs(output)
        return output

    def leave(self) -> None:
        """Switch autocast off."""
        if self._options.autocast is not None and self._entered:
            torch.amp.autocast_mode._exit_autocast(self._entered.pop())


class _Before(Hook):
    def __init__(self, precise: PreciseModule) -> None:
        self._precise = precise

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self._precise.before(args, kwargs)


class _After(Hook):
    def __init__(self, precise: PreciseModule) -> None:
        self._precise = precise

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        # Called with None too when forward raised: then only autocast has to be left.
        return self._precise.after(output)


class _Around(Hook):
    def __init__(self, precise: PreciseModule) -> None:
        self._precise = precise

    def __call__(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        args, kwargs = self._precise.before(args, kwargs)
        try:
            output = call(*args, **kwargs)
        except BaseException:
            self._precise.leave()
            raise
        return self._precise.after(output)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors of a nested value; integers and complex numbers stay."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value)
