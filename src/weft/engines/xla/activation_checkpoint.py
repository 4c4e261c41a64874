"""Compute what a block computes twice on XLA.

The work is that of `torch_xla.utils.checkpoint`: it puts a barrier between both runs, without which the compiler
would find that they are the same and keep the activations after all. It is of the reentrant kind, which sees
tensors only that are arguments or results themselves.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from weft.engines.options import RecomputeOptions
from weft.engines.probes import Schedule
from weft.engines.torch.compute.activation_checkpoint import RecomputedBlock, no_cached_casts
from weft.engines.torch.hooks.method_hooks import Attached, attach
from weft.errors import ContractError, value_error
from weft.tensors.nested import tensors


class RecomputedOnXla(Attached):
    """Blocks that keep their inputs only, and compute the rest again in backward."""

    def __init__(self, blocks: Mapping[str, nn.Module], options: RecomputeOptions) -> None:
        if options.save:
            raise value_error(
                "recompute: save cannot be used on xla",
                found="operations whose results are to be kept",
                expected="whole blocks that are computed again: torch-xla knows no other way",
                fix="save=()  # and smaller blocks, which keep more",
            )
        if options.offload:
            raise value_error(
                "recompute: offload cannot be used on xla",
                found="offload=True",
                expected="inputs that stay on the device: a copy to the host would end the traced step",
                fix="offload=False",
            )
        super().__init__()
        never = Schedule("off", list(blocks))  # what is compared is read, which would end the traced step
        for name, block in blocks.items():
            around = _CheckpointOnXla(name, block, {"preserve_rng_state": options.keep_rng}, never, offload=False)
            attach(block, self._removable, around=around, methods=["forward"])


class _CheckpointOnXla(RecomputedBlock):
    """What is done around the forward of one block."""

    @override
    def __call__(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        block = self._block()
        assert block is not None
        given = (*args, *kwargs.values())
        trained = [p for p in block.parameters() if p.requires_grad]
        wanted = trained or any(t.requires_grad for value in given for t in tensors(value))
        if not (torch.is_grad_enabled() and wanted):
            return call(*args, **kwargs)
        self._check_flat("takes", [v for v in given if not isinstance(v, torch.Tensor)], only_with_gradient=True)
        once, count, names = self._watched(call), len(args), tuple(kwargs)

        def run(_: torch.Tensor, *flat: Any) -> Any:
            output = once(*flat[:count], **dict(zip(names, flat[count:], strict=True)))
            parts = output if isinstance(output, tuple) else (output,)
            self._check_flat("returns", [part for part in parts if not isinstance(part, torch.Tensor)])
            return output

        # The graph goes through the block only if one of its arguments wants a gradient.
        device = trained[0].device if trained else next(t for value in given for t in tensors(value)).device
        entry = torch.zeros((), device=device, requires_grad=True)
        checkpoint: Any = importlib.import_module("torch_xla.utils.checkpoint").checkpoint
        # A cast of a weight that the first run, without gradients, has cached would be used outside the block too.
        with no_cached_casts():
            return checkpoint(run, entry, *given, **self._settings)

    def _check_flat(self, verb: str, others: list[Any], *, only_with_gradient: bool = False) -> None:
        """Raise if tensors are hidden in other values: they would get no gradient, in silence."""
        hidden = [v for v in others if any(t.requires_grad or not only_with_gradient for t in tensors(v))]
        if hidden:
            raise ContractError(
                f"recompute: block {self._name!r} {verb} tensors inside other values",
                found=type(hidden[0]).__name__,
                expected="tensors as arguments, and a tensor or a tuple of tensors as the result, on xla",
                fix=f'weft.recompute(model, ctx, blocks=lambda name, part: ... and name != "{self._name}")',
            )
