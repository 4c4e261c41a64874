"""How the gradients of one module travel, and whether a backward pass that communicates is expected."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft.engines.options import ReduceOptions
from weft.engines.torch.hooks.first_steps import not_averaged_error
from weft.engines.torch.reducing.buckets import Buckets
from weft.engines.torch.reducing.flat_buffer import FlatBuffer
from weft.errors import NotSynchronized
from weft.tensors.nested import map_tensors, tensors


class Transport:
    """The channel of one module.

    Attributes:
        channel: None where there is nothing to carry, and when the context was closed.
        armed: Whether the channel expects a backward pass that communicates.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, options: ReduceOptions) -> None:
        self.channel: Buckets | FlatBuffer | None = None
        self.armed = False
        self._module = weakref.ref(module)
        self._class_name = type(module).__name__
        self._group: dist.ProcessGroup | None = group
        self._options = options
        self._named: dict[str, nn.Parameter] = {}
        self._outputs: list[weakref.ref[torch.Tensor]] = []

    def take(self, module: nn.Module, named: Mapping[str, nn.Parameter]) -> None:
        """Carry the gradients of these parameters from now on."""
        self._named = dict(named)
        if isinstance(self.channel, FlatBuffer):
            self.channel.take(list(named.values()))
        else:
            self._replace_channel(self._make_channel(module) if named else None)

    def sum_order(self) -> dict[str, Any] | None:
        """See `KeepsOrder`: the names in each bucket, and how large buckets may be."""
        if self._order is None:
            return None
        names = list(self._named)
        buckets = [[names[place] for place in bucket] for bucket in self._order]
        return {"bucket_bytes": self._options.bucket_bytes, "buckets": buckets}

    def resume_order(self, orders: Sequence[Mapping[str, Any]]) -> None:
        """See `KeepsOrder`."""
        place = {name: i for i, name in enumerate(self._named)}
        for saved in orders:
            named = [name for bucket in saved["buckets"] for name in bucket]
            if saved["bucket_bytes"] == self._options.bucket_bytes and sorted(named) == sorted(place):
                self._renew([[place[name] for name in bucket] for bucket in saved["buckets"]])
                return
        self._renew(None)

    def expect(self, output: Any, *, enabled: bool) -> Any:
        """Find the parameters that the outputs of a forward pass do not depend on."""
        if self.armed and not enabled:
            self._renew(self._order)  # a forward pass had no backward; this one shall not communicate
        output = _through_one_node(output)
        # Several calls may come before one backward: all their outputs count.
        self._outputs = [ref for ref in self._outputs if ref() is not None]
        self._outputs += [weakref.ref(t) for t in tensors(output) if t.requires_grad]
        if enabled and self._outputs:
            self.arm([t for t in (ref() for ref in self._outputs) if t is not None])
        return output

    def prepare(self) -> None:
        """Forward was called: a backward pass is to be expected."""
        if isinstance(self.channel, FlatBuffer):
            self.channel.prepare()

    def begin(self) -> None:
        """A backward pass that communicates begins.

        Raises:
            NotSynchronized: No forward pass has made the channel expect it, where unused parameters are found so.
        """
        if self.armed:
            return
        if self._options.unused == "zero":
            raise NotSynchronized(
                f'{self._options.strategy}: a second backward through {self._class_name} with unused="zero"',
                found="the outputs of the forward pass are gone, so unused parameters cannot be found",
                expected="one backward pass for the forward passes before it",
                fix="add the losses up and call backward once",
            )
        self.arm([])

    def arm(self, outputs: list[torch.Tensor]) -> None:
        """Expect a backward pass through these outputs; through anything, where none are given."""
        if self._group is None:
            what = self._options.strategy
            raise NotSynchronized(
                f"{what}: backward through {self._class_name} after its context was closed",
                found="no process group",
                expected="backward inside `with weft.start() as ctx:`",
                fix="model, ctx = weft.undo(model, ctx)  # before the context is closed",
            )
        if self.channel is not None:
            self.channel.begin(outputs)
        self.armed = True

    def end(self, got: bytearray) -> None:
        """A backward pass that communicates has ended; `got[i]` tells whether parameter i got a gradient.

        Raises:
            NotSynchronized: Torch has averaged them in another way than it was told to.
        """
        self.armed = False
        if self.channel is not None:
            self.channel.end(got)
        if isinstance(self.channel, Buckets) and not self.channel.was_called_by_torch:
            found = "gradients came, and the function that sends them was not called"
            raise not_averaged_error(self._options.strategy, self._class_name, found)

    def forget_outputs(self) -> None:
        """Their graph is done."""
        self._outputs.clear()

    def start_anew(self) -> None:
        """A backward pass broke off half-way: its communication cannot be continued."""
        self._outputs.clear()
        self._renew(self._order)

    @property
    def _order(self) -> list[list[int]] | None:
        return self.channel.order if isinstance(self.channel, Buckets) else None

    def _renew(self, order: list[list[int]] | None) -> None:
        """Expect nothing any more; add up in this order."""
        module = self._module()
        self.armed = False
        if module is not None and isinstance(self.channel, Buckets) and self._group is not None:
            self._replace_channel(self._make_channel(module, order))

    def undo(self) -> None:
        """Take the channel off the parameters."""
        if isinstance(self.channel, FlatBuffer):
            self.channel.undo()

    def release(self) -> None:
        """Let the process group go."""
        self._replace_channel(None)
        self._group = None

    def _replace_channel(self, channel: Buckets | FlatBuffer | None) -> None:
        if isinstance(self.channel, Buckets):
            self.channel.release()
        self.channel = channel

    def _make_channel(self, module: nn.Module, order: list[list[int]] | None = None) -> Buckets | FlatBuffer:
        assert self._group is not None
        if self._options.at_end:
            return FlatBuffer(list(self._named.values()), self._group, self._options)
        return Buckets(module, self._named, self._group, self._options, order)


def _through_one_node(output: Any) -> Any:
    """Route all outputs through one autograd node, so that those the loss ignores get a gradient too.

    Otherwise a parameter that only feeds an ignored output would look used and never be ready.
    """
    needing = [t for t in tensors(output) if t.requires_grad]
    if not needing:
        return output
    passed = dict(zip(map(id, needing), _OneNode.apply(*needing), strict=True))  # type: ignore[no-untyped-call]
    return map_tensors(lambda tensor: passed.get(id(tensor), tensor), output)


class _OneNode(torch.autograd.Function):
    """The identity, as one node for many tensors."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(t.view_as(t) for t in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        del ctx  # nothing was saved
        return gradients
