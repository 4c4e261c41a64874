"""Tensor parallelism with parts of sequences, measured: what is between the blocks, of a part and of the whole.

Blocks are units of their own (`whole_unit.py`). Here each of them is called as always, but in the second call the
sequence is cut right before it and joined right after it, so that all else sees the whole sequence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call

from weft.engines.options import TensorOptions
from weft.engines.probes import Args, Compared, Kwargs
from weft.engines.torch.parallel.tensor_hooks import cut_sequence, join_sequence
from weft.engines.torch.probes.compare import LIMIT, LOW_LIMIT, is_low, returned_tensors
from weft.engines.torch.probes.no_trace import copied, no_trace
from weft.engines.torch.probes.whole_unit import BETWEEN_BLOCKS
from weft.tensors.blocks import full_tensor
from weft.tensors.nested import tensors
from weft.tensors.remote_parameter import is_elsewhere


class BetweenBlocks:
    """A probe of `tensor_parallel(sequence=True)`; its unit is the module itself."""

    spare: nn.Module | None = None
    outside = True
    in_stages = True
    cause = "something between the blocks, or in a hook on one, mixes places of the sequence, or counts them"
    fix = BETWEEN_BLOCKS

    def __init__(self, module: nn.Module, mesh: DeviceMesh, group: dist.ProcessGroup, options: TensorOptions) -> None:
        """Remember what is called.

        Args:
            module: Has the blocks.
            mesh: Of one axis.
            group: Its ranks.
            options: With the names of the blocks.
        """
        self.units: Mapping[str, nn.Module] = {"": module}
        self.group: dist.ProcessGroup | None = group
        self._mesh = mesh
        self._options = options

    def equal_inputs(self, name: str, args: Args, kwargs: Kwargs) -> Any:
        """Nothing more than is compared for the blocks."""
        return ()

    def alone(self, name: str, args: Args, kwargs: Kwargs) -> Any:
        """The module, where all but its blocks has whole sequences. Collectives: one all-gather per block."""
        return self._call(args, kwargs, self._joined_around_blocks())

    def measure(self, name: str, args: Args, kwargs: Kwargs, *, gradients: bool) -> Iterator[Compared]:
        """Compare what is returned.

        Yields:
            One output after the other.
        """
        found = returned_tensors(self._call(args, kwargs, contextlib.nullcontext()))
        expected = returned_tensors(self.alone(name, args, kwargs))
        yield Compared("the number of outputs", torch.tensor(len(found)), torch.tensor(len(expected)))
        held = (*self.units[""].parameters(), *tensors((args, kwargs)), *found)
        given = [tensor for tensor in held if not is_elsewhere(tensor)]
        limit = LOW_LIMIT if is_low(given[0].device.type, given) else LIMIT
        for one, other in zip(found, expected, strict=False):
            yield Compared("an output", full_tensor(one), full_tensor(other), limit=limit)

    def _call(self, args: Any, kwargs: Any, around: AbstractContextManager[Any]) -> Any:
        module = self.units[""]
        args, kwargs = copied((args, kwargs))
        with torch.no_grad(), no_trace(module), around:  # all calls begin with the same random states
            return functional_call(module, {n: b.clone() for n, b in module.named_buffers()}, args, kwargs)

    @contextlib.contextmanager
    def _joined_around_blocks(self) -> Iterator[None]:
        names, module = self._options.blocks, self.units[""]
        with contextlib.ExitStack() as stack:
            for name in names[1:]:
                # A layer's own hook, which gathers the part, comes after this; hooks of the user before it.
                own = name in self._options.gathers
                cut = cut_sequence(self._mesh, name)
                hook = module.get_submodule(name).register_forward_pre_hook(cut, prepend=own, with_kwargs=True)
                stack.enter_context(hook)
            for name in names[:-1]:
                hook = module.get_submodule(name).register_forward_hook(join_sequence(self._mesh), prepend=True)
                stack.enter_context(hook)
            yield
