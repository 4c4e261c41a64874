"""Where DeepSpeed's optimizers keep things: gradients, the weights it steps on, their state.

Both of its optimizers step on flat tensors, of which each rank holds one part. `FlatRange` says which elements of
a parameter lie where in them; the two classes answer the same questions for stages 1 and 2, and for stage 3.

[Note: always add] DeepSpeed overwrites its gradient buffers in the first backward pass after a step, which
leaves the gradient of a parameter that did not take part in it as it was. Here it always adds, and the
buffers are set to zero when their gradients are used or dropped.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from weft.engines.deepspeed import internals
from weft.tensors.messages import grouped


class FlatRange(NamedTuple):
    """Which elements of a flattened parameter this rank holds, and where.

    Attributes:
        group: Number of the flat tensor.
        at: Where they begin in it.
        start: The first of them in the parameter.
        number: How many.
    """

    group: int
    at: int
    start: int
    number: int


class _Buffers:
    """What both of DeepSpeed's optimizers have in common.

    Attributes:
        places: Which elements of each parameter this rank holds, and where.
    """

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        self.places: dict[nn.Parameter, FlatRange] = {}
        for hook in internals.HOOKS.of(zero):
            hook.remove()
        internals.HOOKS.set(zero, [])

    def reduce(self, parameter: nn.Parameter) -> None:
        """Hand a gradient over, to be averaged and cut."""
        if parameter.grad is not None:
            parameter.grad = parameter.grad.contiguous()

    def groups(self) -> dict[int, list[tuple[nn.Parameter, FlatRange]]]:
        """The parameters in each flat tensor, by its number."""
        return grouped(self.places.items(), lambda one: one[1].group)

    def finish(self) -> None:
        """Average what was handed over."""
        self._zero.overlapping_partition_gradients_reduce_epilogue()


class BuffersOfStages12(_Buffers):
    """Of `DeepSpeedZeroOptimizer`."""

    def __init__(self, zero: Any) -> None:
        super().__init__(zero)
        self._row: dict[nn.Parameter, int] = {}
        for group, parameters in enumerate(zero.round_robin_bit16_groups):
            size = int(zero.partition_size[group])
            begin = size * self._rank(group)
            for parameter, offset in zip(parameters, zero.round_robin_bit16_offsets[group], strict=True):
                start = max(begin - offset, 0)
                count = max(min(offset + parameter.numel(), begin + size) - offset - start, 0)
                self.places[parameter] = FlatRange(group, max(offset - begin, 0), start, count)
            self._row.update({p: row for row, p in enumerate(zero.params_in_partition[group])})
        parts = internals.PARTS.of(zero)
        flats = internals.WEIGHTS.of(zero)
        self._shares = not zero.cpu_offload and all(
            flat.dtype == part[0].dtype for flat, part in zip(flats, parts, strict=True)
        )
        if self._shares:
            # One memory for the weights that are stepped on and those that are computed with.
            for group, flat in enumerate(flats):
                flat.data = self._own_part(group)
        internals.IS_LINKED.set(zero, True)  # noqa: FBT003  (else the first step hangs views of the state on parameters)

    def _rank(self, group: int) -> int:
        return dist.get_rank(self._zero.real_dp_process_group[group])

    def _own_part(self, group: int) -> torch.Tensor:
        part: torch.Tensor = internals.PARTS.of(self._zero)[group][self._rank(group)]
        return part.detach()

    def begin(self) -> None:
        """A backward pass begins."""
        zero = self._zero
        zero.set_gradient_accumulation_boundary(is_boundary=False)
        internals.MICRO_STEP.set(zero, 0)  # `setup_buckets` counts on: 1, see [Note: always add]
        zero.setup_buckets()

    @override
    def reduce(self, parameter: nn.Parameter) -> None:
        """Hand a gradient over, to be averaged and cut."""
        super().reduce(parameter)
        if self._zero.use_grad_accum_attribute:
            internals.ACCUMULATE.of(self._zero)(parameter)
        self._zero.reduce_independent_p_g_buckets_and_remove_grads(parameter, self.places[parameter].group)

    @override
    def finish(self) -> None:
        """Average what was handed over."""
        super().finish()
        self._forget_accumulated()

    def _forget_accumulated(self) -> None:
        name = internals.ACCUMULATED.name
        for parameter in self.places:
            setattr(parameter, name, None)

    def end(self) -> None:
        """A backward pass has ended."""
        internals.IS_READY.set(self._zero, False)  # noqa: FBT003

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        """This rank's piece of an averaged gradient."""
        zero, (group, _, start, count) = self._zero, self.places[parameter]
        if not count:
            return torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        if internals.IS_COMPACT.of(zero)(group):
            number = zero.get_param_id(parameter)
            piece: torch.Tensor = internals.COMPACT_PIECE.of(zero)(group, self._rank(group), number, count)
            return piece
        if zero.cpu_offload:
            whole = internals.GRADIENTS_ON_CPU.of(zero)[zero.get_param_id(parameter)]
        else:
            whole = internals.GRADIENTS.of(zero)[group][self._row[parameter]]
        found: torch.Tensor = whole.view(-1)[start : start + count]
        return found

    def drop(self) -> None:
        """Forget all gradients."""
        zero = self._zero
        averaged = internals.AVERAGED.of(zero)
        averaged.update(dict.fromkeys(averaged))
        internals.GRADIENTS.of(zero).clear()
        self._forget_accumulated()
        if zero.cpu_offload:
            internals.ON_CPU.set(zero, set())
            zero.reset_cpu_buffers()
            for whole in internals.GRADIENTS_ON_CPU.of(zero).values():
                whole.zero_()

    def reset(self) -> None:
        """Forget a backward pass that was torn."""
        zero = self._zero
        for bucket in internals.BUCKETS.of(zero).values():
            bucket.clear()
        internals.LARGE.of(zero).clear()
        reduced = internals.REDUCED.of(zero)
        reduced[:] = [False] * len(reduced)
        internals.RELEASE_BUCKETS.of(zero)()
        self.drop()

    def before_step(self) -> None:
        """The engine's step is about to be called."""
        zero = self._zero
        for group, parameters in enumerate(zero.round_robin_bit16_groups):
            flat = internals.WHOLE.of(zero)[group]
            offsets = zero.round_robin_bit16_offsets[group]
            for parameter, offset in zip(parameters, offsets, strict=True):
                if parameter.data_ptr() != flat.data_ptr() + offset * flat.element_size() and parameter.numel():
                    # Somebody gave it other memory, which the step would put out of use.
                    flat[offset : offset + parameter.numel()].copy_(parameter.data.reshape(-1))
                    self.take_weights(parameter)
        if not zero.partition_gradients:  # in stage 2 the engine's step does it
            zero.finalize_gradient_accumulation_boundary()

    @contextlib.contextmanager
    def opened(self, group: int, *, change: bool) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """A flat tensor of weights, and the optimizer's state of it, which are in memory."""
        flat: torch.Tensor = internals.WEIGHTS.of(self._zero)[group]
        yield flat.data, self._zero.optimizer.state[flat]

    def take_weights(self, parameter: nn.Parameter) -> None:
        """The parameter was changed: step on the new values."""
        if not self._shares:
            group, at, _, count = self.places[parameter]
            flat: torch.Tensor = internals.WEIGHTS.of(self._zero)[group]
            flat.data[at : at + count].copy_(self._own_part(group)[at : at + count])


class BuffersOfStage3(_Buffers):
    """Of `DeepSpeedZeroOptimizer_Stage3`."""

    def __init__(self, zero: Any) -> None:
        super().__init__(zero)
        self._gradient_at: dict[nn.Parameter, int] = {}
        at = 0
        for parameter in itertools.chain.from_iterable(zero.fp16_groups):
            group, offset, _ = zero.grad_position[zero.get_param_id(parameter)]
            size, numel = parameter.partition_numel(), internals.NUMEL.of(parameter)
            start = min(size * internals.RANK_OF.of(zero)(parameter), numel)
            count = min(size, numel - start)
            self.places[parameter] = FlatRange(group, offset, start, count)
            self._gradient_at[parameter] = at
            at += size

    def begin(self) -> None:
        """A backward pass begins."""
        zero = self._zero
        zero.set_gradient_accumulation_boundary(is_boundary=False)
        internals.MICRO_STEP.set(zero, 1)  # see [Note: always add]
        zero.backward_prologue()

    @override
    def reduce(self, parameter: nn.Parameter) -> None:
        """Hand a gradient over, to be averaged and cut."""
        super().reduce(parameter)
        self._zero.reduce_ready_partitions_and_remove_grads(parameter)

    def end(self) -> None:
        """A backward pass has ended."""
        self._zero.backward_epilogue()

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        """This rank's piece of an averaged gradient."""
        at = self._gradient_at[parameter]
        found: torch.Tensor = internals.FLAT_GRADIENTS.of(self._zero)[at : at + self.places[parameter].number]
        return found

    def drop(self) -> None:
        """Forget all gradients."""
        zero = self._zero
        internals.AVERAGED.set(zero, {})
        internals.AT_BOUNDARY.set(zero, set())
        internals.FLAT_GRADIENTS.of(zero).zero_()

    def reset(self) -> None:
        """Forget a backward pass that was torn."""
        zero = self._zero
        for bucket in internals.BUCKETS.of(zero).values():
            bucket.clear_params()
        reduced = internals.REDUCED.of(zero)
        reduced.update(dict.fromkeys(reduced, False))
        self.drop()

    def before_step(self) -> None:
        """The engine's step is about to be called."""
        zero = self._zero
        if not zero.swap_optimizer:
            return
        # DeepSpeed would write gradients to the disk and read them back at once, some of them wrongly: its
        # reads begin where the gradient of a parameter does, which the disk need not allow. They stay in memory.
        gradients: dict[int, list[torch.Tensor]] = {}
        offsets: dict[int, list[int]] = {}
        for parameter, at in self._gradient_at.items():
            mine: Any = parameter
            whole = internals.FLAT_GRADIENTS.of(zero)[at : at + mine.partition_numel()]
            internals.OFFLOAD.of(zero)(parameter, whole, gradients, offsets)
        for group, found in gradients.items():
            swapper = internals.SWAPPER.of(zero)
            info = swapper.swap_params_info[swapper.parameter_id(internals.FLAT_WEIGHTS.of(zero)[group])]
            info.unswapped_gradients.update(zip(offsets[group], found, strict=True))
        internals.AT_BOUNDARY.set(zero, set())  # nothing is left for the engine to do

    @contextlib.contextmanager
    def opened(self, group: int, *, change: bool) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """A flat tensor of weights, and the optimizer's state of it, in memory; with `change`, it is kept."""
        zero = self._zero
        is_swapped = internals.IS_SWAPPED.of(zero)(group)
        if is_swapped:
            internals.SWAP_IN.of(zero)(group)
        flat: torch.Tensor = internals.FLAT_WEIGHTS.of(zero)[group]
        yield flat.data, zero.optimizer.state[flat]
        if is_swapped:
            put_away = internals.SWAP_OUT if change else internals.RELEASE_SWAPPED
            put_away.of(zero)(group)

    def take_weights(self, parameter: nn.Parameter) -> None:
        """The parameter was changed: step on the new values."""
        group, at, _, count = self.places[parameter]
        with self.opened(group, change=True) as (flat, _):
            flat[at : at + count].copy_(internals.PIECE.of(parameter).data[:count])


Buffers: TypeAlias = BuffersOfStages12 | BuffersOfStage3
