"""Compute what a block computes twice, instead of keeping it between forward and backward.

The work is that of `torch.utils.checkpoint` in its non-reentrant form. It is laid around the block's
`forward`, inside of all hooks of the block: those of `fully_shard` gather parameters once, and
precision and reduction do not see the second run. A compiler traces right through it.

[Note: twice] What forward changes besides its result, it changes twice. Running statistics are put
back after the second run. Other buffers may matter to the result, so that a change of one raises.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from weft import torch_internals
from weft.engines.options import RecomputeOptions
from weft.engines.probes import Schedule
from weft.engines.torch.hooks.method_hooks import Removable, attach, call_routes
from weft.engines.torch.probes.compare import digest
from weft.engines.torch.probes.no_trace import keeps_activations
from weft.errors import ContractError, ProbeFailed, listed, type_error, value_error

# Composite operations, by what they come down to below autograd.
_GROUPS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "matmul": ("mm", "addmm", "bmm", "baddbmm", torch_internals.SCALED_PRODUCT_OP),
        "attention": torch_internals.ATTENTION_OPS,
        "convolution": ("convolution",),
    }
)


class Recomputed:
    """Blocks that keep their inputs only, and compute the rest again in backward."""

    def __init__(self, blocks: Mapping[str, nn.Module], options: RecomputeOptions) -> None:
        self._removable = Removable()
        settings: dict[str, Any] = {
            "preserve_rng_state": options.keep_rng,
            "determinism_check": options.determinism_check,
            "early_stop": options.early_stop,
        }
        if options.save:
            policy = list(options.save) if isinstance(options.save, tuple) else options.save
            settings["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
            # What `save` keeps stays on the device; torch 2.14 wants that said, as a later one may go another way.
            if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters:
                settings["respect_saved_tensors_hooks"] = False
        self.schedule = Schedule(options.probes, list(blocks))
        for name, block in blocks.items():
            around = RecomputedBlock(name, block, settings, self.schedule, offload=options.offload)
            attach(block, self._removable, around=around, methods=["forward"])

    def undo(self) -> None:
        """Let the blocks keep their activations again."""
        self._removable.remove()


class RecomputedBlock:
    """What is done around the forward of one block."""

    def __init__(
        self, name: str, block: nn.Module, settings: dict[str, Any], schedule: Schedule, *, offload: bool
    ) -> None:
        self._name = name
        self._block = weakref.ref(block)
        self._settings = settings
        self._schedule = schedule
        self.offload = offload

    def __call__(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block, and let backward run it again."""
        # What is compiled has no side effects in its second run, and keeps no Python state.
        compiling = torch.compiler.is_compiling()
        if not torch.is_grad_enabled() or (not compiling and keeps_activations()):
            return call(*args, **kwargs)
        is_due = not compiling and self._schedule.is_due(self._name, torch.is_autocast_enabled()) > 0
        once = call if compiling else self._watched(call, is_due=is_due)
        # By position, torch looks at all of them: for their device's random state, and for changes in place.
        count, names = len(args), tuple(kwargs)

        def run(*flat: Any) -> Any:
            return once(*flat[:count], **dict(zip(names, flat[count:], strict=True)))

        if compiling:
            return checkpoint(run, *args, *kwargs.values(), use_reentrant=False, **self._settings)
        with contextlib.ExitStack() as around:
            if "context_fn" in self._settings:
                around.enter_context(no_cached_casts())
            if self.offload:  # only the inputs: what is saved within is not kept at all
                present = torch.accelerator.current_accelerator(check_available=True)
                kind: dict[str, Any] = {} if present is None else {"pin_memory": True, "device_type": present.type}
                around.enter_context(save_on_cpu(**kind))
            # With early stop, the second run ends before there is a result to compare.
            settings = {**self._settings, "early_stop": False} if is_due else self._settings
            return checkpoint(run, *args, *kwargs.values(), use_reentrant=False, **settings)

    def _watched(self, call: Callable[..., Any], *, is_due: bool = False) -> Callable[..., Any]:
        """The first call looks at which buffers change; those after it put them back; see [Note: twice].

        If the call is measured, the second run has to return what the first one did.
        """
        block = self._block()
        first = True
        returned = torch.empty(0)

        def watched(*args: Any, **kwargs: Any) -> Any:
            nonlocal first, returned
            assert block is not None
            if not first:
                with _values_restored(_statistics(block)):
                    output = call(*args, **kwargs)
                if is_due:
                    with torch_internals.without_modes():
                        self._check_equal(returned, digest(output))
                return output
            first = False
            before = _buffers(block)
            output = call(*args, **kwargs)
            self._check_unchanged(before, _buffers(block))
            if is_due:
                with torch_internals.without_modes():
                    returned = digest(output)
            return output

        return watched

    def _check_equal(self, first: torch.Tensor, second: torch.Tensor) -> None:
        is_equal = torch.equal(first, second)
        self._schedule.note(self._name, [("what it returns", 0.0 if is_equal else math.inf)])
        if not is_equal:
            raise ProbeFailed(
                f"recompute: block {self._name!r} returned something else when it was computed again in backward",
                found="other values than in forward, for the same inputs",
                expected="the same function twice: random numbers from torch alone, no counters, no state that changes",
                fix=f'weft.recompute(model, ctx, blocks=lambda name, part: ... and name != "{self._name}")',
            )

    def _check_unchanged(self, before: dict[str, _Version], after: dict[str, _Version]) -> None:
        changed = [
            n for n, (buffer, i) in before.items() if n in after and (after[n][0] is not buffer or after[n][1] != i)
        ]
        if changed:
            raise ContractError(
                f"recompute: forward of block {self._name!r} changes buffers, and would change them twice",
                found=listed(changed),
                expected="blocks whose forward changes nothing but running statistics of norms",
                fix=f'weft.recompute(model, ctx, blocks=lambda name, part: ... and name != "{self._name}")',
            )


@contextlib.contextmanager
def no_cached_casts() -> Iterator[None]:
    """Let autocast cast weights at each use: both runs must do the same operations to pair them up."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _statistics(block: nn.Module) -> list[torch.Tensor]:
    """Running statistics that a forward in training moves on, and that its result does not depend on."""
    norms = [part for part in block.modules() if isinstance(part, torch_internals.norm_base.found) and part.training]
    return [buffer for norm in norms for buffer in norm.buffers(recurse=False)]


_Version: TypeAlias = tuple[torch.Tensor, int]


def _buffers(block: nn.Module) -> dict[str, _Version]:
    """All other buffers, with the number of changes each has seen."""
    others = [
        (name, part) for name, part in block.named_modules() if not isinstance(part, torch_internals.norm_base.found)
    ]
    return {
        f"{name}.{own}".lstrip("."): (buffer, 0 if buffer.is_inference() else torch_internals.VERSION.of(buffer))
        for name, part in others
        for own, buffer in part.named_buffers(recurse=False)
    }


@contextlib.contextmanager
def _values_restored(buffers: list[torch.Tensor]) -> Iterator[None]:
    """Put values back afterwards, also if the run is stopped early."""
    if not buffers:
        yield
        return
    # Values are what they were, so autograd need not take what it saved of them for changed. What is done here is no
    # part of what a policy chooses from.
    with torch_internals.keeps_version(tuple(buffers)):
        with torch_internals.without_modes():
            values = [buffer.detach().clone() for buffer in buffers]
        try:
            yield
        finally:
            with torch.no_grad(), torch_internals.without_modes():
                for buffer, value in zip(buffers, values, strict=True):
                    buffer.copy_(value)


def already_recomputed(module: nn.Module) -> list[str]:
    """Name the parts of `module` that are checkpointed, by us or in another way that leaves a trace."""
    return [name or "the module itself" for name, part in module.named_modules() if _is_checkpointed(part)]


def offloaded(module: nn.Module) -> list[str]:
    """Name the blocks in `module` whose inputs are kept on the CPU."""
    return [
        name or "the module itself"
        for name, part in module.named_modules()
        if any(one.offload for one in _recomputed(part))
    ]


def moves_statistics_twice(module: nn.Module) -> bool:
    """Whether norms with running statistics are in blocks that are run twice by `Recomputed`."""
    blocks = [part for part in module.modules() if _recomputed(part)]
    norms = [part for block in blocks for part in block.modules() if isinstance(part, torch_internals.norm_base.found)]
    return any(True for norm in norms for _ in norm.buffers(recurse=False))


def _recomputed(part: nn.Module) -> list[RecomputedBlock]:
    """What is done around the forward of a part by `Recomputed`."""
    return [one for one in call_routes(part, "forward") if isinstance(one, RecomputedBlock)]


def _is_checkpointed(part: nn.Module) -> bool:
    return (
        bool(_recomputed(part))
        # torch's composable checkpoint and its checkpoint_wrapper, and the switch of transformers
        or "checkpoint" in (torch_internals.applied(part) or ())
        or any(cls.__name__ == "CheckpointWrapper" for cls in type(part).__mro__)
        or getattr(part, "gradient_checkpointing", False) is True
    )


def saved_ops(save: Any) -> tuple[Any, ...]:
    """Resolve operations to save to those that are seen when a block runs.

    Raises:
        ValueError: An unknown name, or an operation that torch decomposes before it runs.
        TypeError: Neither a name nor an operation.
    """
    return tuple(dict.fromkeys(found for op in save for found in _resolve(op)))


def _resolve(op: Any) -> list[Any]:
    if isinstance(op, str):
        if op in _GROUPS:
            group = [f"aten.{one}" if isinstance(one, str) else one.found for one in _GROUPS[op]]
            return [o for one in group for o in _resolve(one)]
        return _resolve(_named(op))
    if isinstance(op, torch_internals.op_packet.found):
        overloads = [getattr(op, name) for name in op.overloads()]
        overloads = [o for o in overloads if torch_internals.op_has_kernel(o.name())]  # others are for TorchScript
        # Those that write into a given tensor have no gradient.
        name_of = torch_internals.OVERLOAD.of
        usable = [o for o in overloads if "out" not in name_of(o).split("_") and not _is_composite(o)]
        return usable or _resolve(overloads[0])
    if isinstance(op, torch_internals.op_overload.found):
        if _is_composite(op):
            raise value_error(
                f"recompute: {op} cannot be saved",
                found="an operation that torch decomposes into others before it runs",
                expected=f"those others, or one of {', '.join(map(repr, _GROUPS))}",
                fix='weft.recompute(model, ctx, blocks=..., save=["matmul"])',
            )
        return [op]
    if isinstance(op, torch_internals.higher_order_op.found):
        return [op]
    raise type_error(
        f"recompute: save = {op!r} is not an operation",
        found=type(op).__name__,
        expected="names, torch.ops.<library>.<name>, or one function (ctx, op, *args, **kwargs) for all",
        fix='weft.recompute(model, ctx, blocks=..., save=["matmul", torch.ops.aten.gelu])',
    )


def _is_composite(op: Any) -> bool:
    return bool(op.has_kernel_for_dispatch_key(torch_internals.DECOMPOSED.found))


def _named(name: str) -> Any:
    value: Any = torch.ops
    for part in name.split(".") if "." in name else ("aten", name):
        value = getattr(value, part, None)
    kinds = (torch_internals.op_packet, torch_internals.op_overload, torch_internals.higher_order_op)
    if isinstance(value, tuple(kind.found for kind in kinds)):
        return value
    raise value_error(
        f"recompute: save = {name!r} is not an operation of torch",
        found=repr(name),
        expected=f"one of {', '.join(map(repr, _GROUPS))}, or a name below torch.ops such as 'aten.gelu'",
        fix='weft.recompute(model, ctx, blocks=..., save=["matmul"])',
    )
