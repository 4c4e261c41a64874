"""Average gradients over ranks during backward, without a wrapper around the module.

Communication starts when a backward pass enters the module ([Note: backward session]), not when
forward runs as in DDP. So whether a backward pass communicates is decided when it happens, and a
module may be called several times before one backward, or have several backwards follow.

[Note: guard] A gradient that reaches a parameter although no backward pass has entered through
forward or a listed method would stay local and let the replicas drift apart. A hook on every
parameter sees that; it is the one thing done per parameter, and costs less than DDP's wrapper.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import nn

from weft.engines.options import ReduceOptions
from weft.engines.torch.backward import BackwardSession, hook_outputs
from weft.engines.torch.buckets import Buckets
from weft.engines.torch.calls import Hook, Removable, around_methods
from weft.engines.torch.flat import FlatBuffer
from weft.errors import NotSynchronized, UnusedParameters, listed, message
from weft.nested import map_tensors, tensors

__all__ = ["GradientReducer", "is_reduced"]


class Channel(Protocol):
    """What moves the gradients: `Buckets` or `FlatBuffer`."""

    def begin(self, enabled: bool, outputs: list[torch.Tensor]) -> None:
        """Backward enters."""

    def end(self, enabled: bool, got: bytearray) -> None:
        """Backward has ended; `got[i]` tells whether parameter i got a gradient."""

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
        self._got = bytearray(len(named))
        self._outputs: list[weakref.ref[torch.Tensor]] = []
        self._armed = False
        self._unreduced_versions: int | None = None
        self.session = BackwardSession(self._begin, self._end)
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
            return FlatBuffer(
                self._parameters, self._group, find_unused=self.finds_unused, dtype=options.dtype
            )
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
        others = _other_methods(module, self._options.methods)
        for index, (name, parameter) in enumerate(zip(self._names, self._parameters, strict=True)):
            guard = _guard(self.session.flag, self._got, index, name, self._class_name, others)
            self._removable.add(parameter.register_post_accumulate_grad_hook(guard).remove)

    # -- one step --------------------------------------------------------------------------------

    def watch(self, output: Any) -> Any:
        """Make backward through the `output` of a call reduce the gradients."""
        if not torch.is_grad_enabled():
            return output
        if self.session.was_torn():
            self._start_anew()
        if self._unreduced_versions is not None:
            self._check_not_stepped()
        if self._options.unused == "zero":
            return self._watch_unused(output)
        return hook_outputs(output, self.session.enter)

    def _watch_unused(self, output: Any) -> Any:
        """As `watch`, and find out already now which parameters the outputs do not depend on."""
        output = hook_outputs(_through_one_node(output), self.session.enter)
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
        self.channel.begin(self.enabled, outputs)
        self._armed = True

    def _begin(self) -> None:
        self._got[:] = bytes(len(self._got))
        if self._armed:
            return
        if self.enabled and self._options.unused == "zero":
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
        self._armed = False
        self._outputs.clear()
        if not any(self._got):
            return  # torch.autograd.grad: no parameter was touched
        if self.enabled and self._options.unused == "error" and not all(self._got):
            self._raise_unused()
        assert self.channel is not None
        self.channel.end(self.enabled, self._got)
        self._unreduced_versions = None if self.enabled else self._versions()
        if self.enabled:
            self._broadcast_buffers()

    def _broadcast_buffers(self) -> None:
        module = self._module()
        if self._options.buffers == "local" or module is None or self._group is None:
            return
        buffers = [buffer.detach() for buffer in module.buffers()]
        if buffers:
            dist._broadcast_coalesced(self._group, buffers, 250 * 2**20, 0)

    # -- what can go wrong -----------------------------------------------------------------------

    def _start_anew(self) -> None:
        """A backward pass broke off half-way: its communication cannot be continued."""
        module = self._module()
        self._armed = False
        self._outputs.clear()
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
        self._reducer = reducer

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return self._reducer.watch(output)


class _AroundMethod(Hook):
    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer

    def __call__(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._reducer.watch(call(*args, **kwargs))


def _guard(
    flag: bytearray, got: bytearray, index: int, name: str, class_name: str, others: Sequence[str]
) -> Callable[[torch.Tensor], None]:
    """The hook of one parameter; it must not hold the reducer, which holds the parameter in C++."""

    def guard(parameter: torch.Tensor) -> None:
        if not flag[0]:
            _raise_past_forward(name, class_name, others)
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
        return gradients
