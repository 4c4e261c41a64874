"""Average gradients over ranks during backward, without a wrapper around the module.

Communication starts when the first gradient of a backward pass reaches a parameter ([Note:
backward session]), not when forward runs as in DDP. So whether a backward pass communicates is
decided when it happens, and a module may be called several times before one backward, or have
several backwards follow.

[Note: guard] The one thing done per parameter is a hook that sees the first gradient. It also sees
a gradient that comes although forward or a listed method was never called: precision and other
things that are hung on these calls were left out then, and that is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import nn

from weft.engines.options import ReduceOptions
from weft.engines.torch.backward import BackwardSession
from weft.engines.torch.buckets import Buckets
from weft.engines.torch.calls import Hook, Removable, around_methods
from weft.engines.torch.flat import FlatBuffer
from weft.errors import NotSynchronized, UnusedParameters, listed, message
from weft.nested import map_tensors, tensors

__all__ = ["GradientReducer", "is_reduced"]


class Channel(Protocol):
    """What moves the gradients: `Buckets` or `FlatBuffer`."""

    def prepare(self) -> None:
        """Forward was called: a backward pass is to be expected."""

    def begin(self, outputs: list[torch.Tensor]) -> None:
        """A backward pass that communicates has begun."""

    def end(self, got: bytearray) -> None:
        """It has ended; `got[i]` tells whether parameter i got a gradient."""

    def undo(self) -> None:
        """Leave the parameters as they were found."""


class GradientReducer:
    """Keeps the gradients of a module equal on all ranks of a group.

    Attributes:
        enabled: Whether the next backward pass communicates; see `set`.
        mean_over: Number of ranks the gradients are averaged over.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, options: ReduceOptions) -> None:
        self.enabled = True
        self.mean_over = dist.get_world_size(group)
        self._module = weakref.ref(module)
        self._class_name = type(module).__name__
        self._group: dist.ProcessGroup | None = group
        self._options = options
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._names = [name for name, _ in named]
        self._parameters = [p for _, p in named]
        self._outputs: list[weakref.ref[torch.Tensor]] = []
        self._armed = False
        self._called_at = -1
        self._got = bytearray(len(named))
        self._nothing = bytes(len(named))
        self._buffers = options.buffers == "broadcast" and any(True for _ in module.buffers())
        self._other_methods = _other_methods(module, options.methods)
        self._unreduced_versions: int | None = None
        # Buckets finish in a callback of their own, which has to be over before ours.
        self.session = BackwardSession(self._begin, self._end, rounds=0 if options.flat else 1)
        self.channel: Channel | None = self._make_channel(module) if named else None
        self._removable = Removable()
        self._hang_on(module)

    # -- what other rooms may ask ----------------------------------------------------------------

    def set(self, enabled: bool) -> None:
        """Decide whether backward passes from now on communicate."""
        self.enabled = enabled

    @property
    def finds_unused(self) -> bool:
        """Whether parameters may be without gradient."""
        return self._options.unused == "zero"

    def release(self) -> None:
        """Let the process group go; backward raises from now on."""
        self._group = None
        self.channel = None

    def undo(self) -> None:
        """Take everything off the module again."""
        self._removable.remove()
        if self.channel is not None:
            self.channel.undo()
        self.release()

    # -- set-up ----------------------------------------------------------------------------------

    def _make_channel(self, module: nn.Module) -> Channel:
        assert self._group is not None
        options = self._options
        if options.flat:
            return FlatBuffer(self._parameters, self._group, find_unused=self.finds_unused, dtype=options.dtype)
        return Buckets(
            module,
            self._names,
            self._parameters,
            self._group,
            bucket_bytes=options.bucket_bytes,
            find_unused=self.finds_unused,
            dtype=options.dtype,
        )

    def _hang_on(self, module: nn.Module) -> None:
        if not self._parameters:
            return
        forward = module.register_forward_hook(_AfterForward(self))
        self._removable.add(forward.remove)
        around_methods(module, self._options.methods, _AroundMethod(self), self._removable)
        for index, parameter in enumerate(self._parameters):
            guard = _guard(self.session.flag, self._got, weakref.ref(self), index)
            self._removable.add(parameter.register_post_accumulate_grad_hook(guard).remove)

    # -- one step --------------------------------------------------------------------------------

    def watch(self, output: Any) -> Any:
        """Note that forward or a listed method was called."""
        if self.session.flag[0] and self.session.was_torn():
            self._start_anew()
        if self._unreduced_versions is not None:
            self._check_not_stepped()
        if self.finds_unused and all(p.grad is None for p in self._parameters):
            self._got[:] = self._nothing  # zero_grad: what a window that was left early used is gone
        if torch.is_grad_enabled():
            self._called_at = self._parameters[0]._version
            if self.channel is not None:
                self.channel.prepare()
        return self._watch_unused(output) if self.finds_unused else output

    def arrive(self, index: int) -> None:
        """The first gradient of a backward pass has reached parameter `index`."""
        # Steps change the version: a call before the last step is no excuse for this backward.
        if self._called_at != self._parameters[0]._version:
            _raise_past_forward(self._names[index], self._class_name, self._other_methods)
        self.session.enter()

    def _watch_unused(self, output: Any) -> Any:
        """Find out already now which parameters the outputs do not depend on."""
        if self._armed and not self.enabled:
            self._renew_channel()  # a forward pass had no backward; this one shall not communicate
        output = _through_one_node(output)
        # Several calls may come before one backward: all their outputs count.
        self._outputs = [ref for ref in self._outputs if ref() is not None]
        self._outputs += [weakref.ref(t) for t in tensors(output) if t.requires_grad]
        if self.enabled and self._outputs:
            self._arm([t for t in (ref() for ref in self._outputs) if t is not None])
        return output

    def _arm(self, outputs: list[torch.Tensor]) -> None:
        if self.channel is None:
            raise NotSynchronized(
                message(
                    f"replicate: backward through {self._class_name} after its context was closed",
                    found="no process group",
                    expected="backward inside of `with weft.start() as ctx:`",
                    fix="model, ctx = weft.plain(model, ctx)  # before the context is closed",
                )
            )
        self.channel.begin(outputs)
        self._armed = True

    def _begin(self) -> None:
        if self._armed or not self.enabled:
            return
        if self.finds_unused:
            raise NotSynchronized(
                message(
                    f'replicate: a second backward through {self._class_name} with unused="zero"',
                    found="the outputs of the forward pass are gone, so unused parameters cannot be found",
                    expected="one backward pass for the forward passes before it",
                    fix="add the losses up and call backward once",
                )
            )
        self._arm([])

    def _end(self) -> None:
        if not self.enabled:
            self._outputs.clear()  # their graph is done: the backward that communicates has its own
            if not self.finds_unused:
                self._got[:] = self._nothing  # else a parameter used so far is used in the window
            self._unreduced_versions = self._versions()
            return
        self._armed = False
        if self._outputs:
            self._outputs.clear()
        if not self.finds_unused and not all(self._got):
            self._raise_unused()
        assert self.channel is not None
        self.channel.end(self._got)
        self._got[:] = self._nothing
        self._unreduced_versions = None
        if self._buffers:
            self._broadcast_buffers()

    def _broadcast_buffers(self) -> None:
        module = self._module()
        if module is not None and self._group is not None:
            dist._broadcast_coalesced(self._group, [b.detach() for b in module.buffers()], 250 * 2**20, 0)

    # -- what can go wrong -----------------------------------------------------------------------

    def _start_anew(self) -> None:
        """A backward pass broke off half-way: its communication cannot be continued."""
        self._outputs.clear()
        self._got[:] = self._nothing
        self._renew_channel()

    def _renew_channel(self) -> None:
        module = self._module()
        self._armed = False
        if module is not None and not isinstance(self.channel, FlatBuffer) and self._group is not None:
            self.channel = self._make_channel(module)

    def _raise_unused(self) -> NoReturn:
        names = [name for name, got in zip(self._names, self._got, strict=True) if not got]
        self._start_anew()
        raise UnusedParameters(
            message(
                f"replicate: {len(names)} parameter(s) of {self._class_name} got no gradient in this backward pass",
                found=listed(names),
                expected="every parameter that requires a gradient takes part in the loss, on every rank",
                fix='weft.replicate(model, ctx, unused="zero"), or requires_grad_(False) on them before it',
            )
        )

    def _versions(self) -> int:
        return sum(p._version for p in self._parameters)

    def _check_not_stepped(self) -> None:
        """Raise if the parameters were changed while their gradients had not been reduced."""
        if self._versions() == self._unreduced_versions:
            return
        self._unreduced_versions = None
        raise NotSynchronized(
            message(
                f"replicate: the parameters of {self._class_name} were changed before their gradients were reduced",
                found="an optimizer step in the middle of a window (after a `break`, or for each micro-batch)",
                expected="one optimizer step after the last micro-batch of a window",
                fix="step after the inner loop; after a `break`, zero_grad() and go on with the next window",
            )
        )


class _AfterForward(Hook):
    def __init__(self, reducer: GradientReducer) -> None:
        self._watch = reducer.watch

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return self._watch(output)


class _AroundMethod(Hook):
    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer

    def __call__(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._reducer.watch(call(*args, **kwargs))


def _guard(
    flag: bytearray, got: bytearray, reducer: weakref.ref[GradientReducer], index: int
) -> Callable[[torch.Tensor], None]:
    """The hook of one parameter; it must not hold the reducer, which holds the parameter in C++."""

    def guard(parameter: torch.Tensor) -> None:
        if not flag[0]:
            alive = reducer()
            if alive is not None:
                alive.arrive(index)
        got[index] = 1

    return guard


def is_reduced(parameter: nn.Parameter) -> bool:
    """Whether a reducer watches this parameter already."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(getattr(hook, "__qualname__", "") == "_guard.<locals>.guard" for hook in hooks.values())


def _raise_past_forward(name: str, class_name: str, others: Sequence[str]) -> NoReturn:
    example = repr(others[0]) if others else '"method"'
    raise NotSynchronized(
        message(
            f"replicate: a gradient reached {name!r} of {class_name} past forward, and would not be reduced",
            found=f"a call of a method that is not listed ({listed(others) or 'there are none'}), or of a submodule",
            expected="calls of the module itself, or of a method in methods=(...)",
            fix=f"weft.replicate(model, ctx, methods=({example},))",
        )
    )


def _other_methods(module: nn.Module, named: Sequence[str]) -> list[str]:
    """Public methods that the user's classes define besides forward."""
    own = [cls for cls in type(module).__mro__ if cls.__module__.partition(".")[0] not in ("torch", "builtins")]
    names = dict.fromkeys(name for cls in own for name, value in vars(cls).items() if callable(value))
    return [n for n in names if not n.startswith("_") and n != "forward" and n not in named]


def _through_one_node(output: Any) -> Any:
    """Route all outputs through one autograd node, so that those the loss ignores get a gradient too.

    Otherwise a parameter that only feeds an ignored output would look used and never be ready.
    """
    needing = [t for t in tensors(output) if t.requires_grad]
    if not needing:
        return output
    passed = dict(zip(map(id, needing), _Pass.apply(*needing), strict=True))  # type: ignore[no-untyped-call]
    return map_tensors(lambda tensor: passed.get(id(tensor), tensor), output)


class _Pass(torch.autograd.Function):
    """The identity, as one node for many tensors."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(t.view_as(t) for t in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        del ctx  # nothing was saved
        return gradients
