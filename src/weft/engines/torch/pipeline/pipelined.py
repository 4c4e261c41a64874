"""A module whose layers lie on the ranks of a pipeline; the loop around it stays what it is.

[Note: the loop stays] `loss = model(x, y)` runs the forwards and backwards of a schedule, in which the backward pass of
the first micro-batch comes before the forward of a later one. So gradients are computed inside the call, with 1 for
the gradient of the loss, and kept aside; `(loss * share).backward()` multiplies them by what arrives. They are linear
in it, so that this is exact. The loss is one node over the parameters of this rank: reducers, hooks and windows see
gradients in the backward pass that the user calls, and never those of a micro-batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from weft.engines.options import PipelineOptions
from weft.engines.torch.hooks.function_transforms import check_torch_func
from weft.engines.torch.hooks.method_hooks import Removable, attach
from weft.engines.torch.parts.part_gradients import PartGradients
from weft.engines.torch.parts.refuse_pickle import refuse_states
from weft.engines.torch.pipeline.batch_parts import NOTHING, Inputs, MicroBatches, check_flags, inputs_of, num_items
from weft.engines.torch.pipeline.losses import (
    FORMS,
    MicroBatchLoss,
    Result,
    batch_loss,
    check_mean_is_batch_loss,
    loss_of,
    share_result,
    with_gradients,
)
from weft.engines.torch.pipeline.outputs import as_output, batch_output, form_of, join_rows, sendable, with_cache
from weft.engines.torch.pipeline.row_probe import RowProbe, check_rows
from weft.engines.torch.pipeline.schedules import make_schedule, owners
from weft.engines.torch.pipeline.stage_borders import Borders
from weft.engines.torch.pipeline.stage_cache import StageCache, asks_for_cache
from weft.engines.torch.pipeline.stage_forward import StageForward
from weft.engines.torch.pipeline.stage_parameters import (
    Aliases,
    LentLayers,
    TiedGradients,
    gather_units_once,
)
from weft.engines.torch.probes.no_trace import measured, no_trace, random_kept
from weft.engines.torch.probes.observed import WithoutDropout
from weft.engines.torch.probes.same_draws import SameDraws
from weft.engines.torch.probes.whole_unit import is_in
from weft.errors import ContractError
from weft.peers.ledger import Ledger
from weft.tensors.nested import map_tensors, tensors

# What forward raises where the loss needs more than the output of the last layer.
_NEEDS_MORE = (ContractError, RuntimeError, ValueError, TypeError, IndexError, AttributeError)
_KEPT_BYTES = 1 << 28  # of outputs, to compute their loss together


@dataclass(eq=False, repr=False)
class PipelinedModule:
    """The stages of this rank, and the calls of the module.

    Attributes:
        here: Numbers of the stages of this rank.
        owners: The rank of each stage.
    """

    _module: nn.Module
    _group: dist.ProcessGroup
    _device: torch.device
    _options: PipelineOptions
    _peers: Ledger
    _guard: Callable[[], AbstractContextManager[None]]
    _share: Callable[[Any, int], Any]
    copies: InitVar[Mapping[str, Sequence[int]]]
    _loss_scale: Any  # its `value`, of fp16; or None

    def __post_init__(self, copies: Mapping[str, Sequence[int]]) -> None:
        module, group, device, options = self._module, self._group, self._device, self._options
        self.owners = owners(options.schedule, dist.get_world_size(group), len(options.stages))
        self.here = tuple(n for n, rank in enumerate(self.owners) if rank == dist.get_rank(group))
        self._last = len(options.stages) - 1
        self._removable = Removable()
        self._forward = StageForward(module, options.stages, self.here, device, self._removable)
        self._borders = Borders(group, self.owners, device, self._forward.returned_until)
        self._aliases = Aliases()
        self._tied = TiedGradients(copies, group)
        self._schedules: dict[Any, Any] = {}
        wide = self._loss_scale is not None
        self._rows = RowProbe(options.probes, module, self._borders, self.here, len(options.stages), wide=wide)
        self.schedule = self._rows.schedule
        self._lent = LentLayers(module, options.stages, self.owners, group, device)
        self._stage_modules = {number: _StageModule(self, number) for number in self.here}
        self._call: _PipelineCall | None = None  # that runs
        self._broke_off = ""  # the error with which a call ended in between
        self._calls = 0
        self._part_gradients = PartGradients("pipeline", module)
        refuse_states("pipeline", module, self._removable)
        around: Any = torch.compiler.disable(self._around)
        attach(module, self._removable, around=around, methods=["forward"])

    def undo(self) -> None:
        """Route the calls of the module as before; the parameters of other stages are not brought back here."""
        self._removable.remove()
        self.release()

    def release(self) -> None:
        """Let the process group go."""
        self._schedules.clear()
        self._aliases.forget()
        self._part_gradients.release()
        self._tied.release()

    # -- calls -----------------------------------------------------------------------------------

    def _around(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_torch_func("pipeline", type(self._module).__name__)
        check_flags(self._module, kwargs, keeps_cache=not torch.is_grad_enabled())
        if self._broke_off:
            raise ContractError(
                "pipeline: the model is called after a call that has raised between its stages",
                found=self._broke_off,
                expected="the error to end this rank: others wait for what it has not sent, or have sent what it left",
                fix="no `except` around the call: start the ranks again, with weft.restore",
            )
        inputs = inputs_of(call, args, kwargs, has_loss=self._options.loss is not None)
        if torch.is_grad_enabled():
            return self._train(call, inputs)
        return self._infer(call, inputs)

    def _train(self, call: Callable[..., Any], inputs: Inputs) -> Any:
        """Run the schedule; see [Note: the loop stays]."""
        count = num_items(self._module, call, inputs) if self._options.loss is None else None
        if count is not None:
            inputs.kwargs["num_items_in_batch"] = count
        batches = MicroBatches(inputs, self._options.micro_batches, exactly=True)
        is_sum = "num_items_in_batch" in inputs.kwargs
        try:
            with self._guard(), gather_units_once(self._module), self._aliases.in_place(self._module) as aliases:
                result, mixed = self._run(call, batches, is_sum=is_sum)
                self._tied.add_up(self._module)
                gradients = {p: alias.grad for p, alias in aliases.items() if alias.grad is not None}
                for alias in aliases.values():
                    alias.grad = None
        except Exception as error:
            self._schedules.clear()
            self._break_off(error)
            raise
        check_mean_is_batch_loss(result)
        check_rows(mixed)
        loss = with_gradients(result, list(gradients), list(gradients.values()))
        self._part_gradients.follow(loss)
        return form_of(loss, FORMS[result.form])

    def _run(self, call: Callable[..., Any], batches: MicroBatches, *, is_sum: bool) -> tuple[Result, Sequence[float]]:
        running = self._call = _PipelineCall(call, batches)
        if self._loss_scale is not None:
            running.factor = self._loss_scale.value.clone()
        self._calls += 1
        self._rows.begin()
        try:
            if batches.key not in self._schedules:
                self._make_schedule(batches)
            for stage in self._stage_modules.values():
                stage.begin(self._module)
            target = {"target": torch.arange(len(batches.parts))} if self._last in self.here else {}
            self._schedules[batches.key].step(**target)
            self._forward.seeds = True
            mixed = self._rows.measure(
                batches, self._measured, self._measured_whole, self._group, self._device, is_sum=is_sum
            )
            self._forward.seeds = False
            found = self._found(is_sum=is_sum) if self._last in self.here else None
        except RuntimeError as error:  # torch wraps what forward raises
            raise (running.error or error) from None
        finally:
            self._call = None
            self._forward.seeds = False
            self._rows.end()
        return share_result(found, self._device, self._group, self.owners[self._last]), mixed

    def _make_schedule(self, batches: MicroBatches) -> None:
        """Let each stage see once what it receives, in a forward of the first micro-batch; make torch's schedule."""
        with torch.no_grad(), measured():
            for stage in self.here:
                received = self._borders.receive(batches.key, stage)
                output = self._compute(batches.key, stage, batches.parts[0], received)
                if stage == self._last:
                    output = self._loss_of(output, batches.parts[0]).value.reshape(1)
                self._borders.send(batches.key, stage, output)
        number, examples = len(batches.parts), partial(self._borders.examples, batches.key)
        self._schedules[batches.key] = make_schedule(
            self._options.schedule, self._stage_modules, self._last + 1, self._group, self._device, number, examples
        )

    @property
    def _running(self) -> _PipelineCall:
        assert self._call is not None
        return self._call

    def _compute(self, key: Hashable, stage: int, part: Inputs, received: Any) -> Any:
        return self._forward.run(stage, received, self._borders.earlier(key, stage), self._running.forward(part))

    def compute(self, stage: int, index: int, received: tuple[torch.Tensor, ...]) -> Any:
        """What torch's schedule asks for: a stage, for one micro-batch."""
        running = self._running
        part, key = running.batches.parts[index], running.batches.key
        try:
            output = self._compute(key, stage, part, self._borders.rebuilt(key, stage - 1, received))
            if stage < self._last:
                return self._borders.flat(key, stage, output)
            if self._options.probes != "off":
                running.ends_with_layer = output is self._forward.returned
                running.keep(index, self._forward.returned, self._calls)
            loss = self._loss_of(output, part)
            running.losses.append(loss._replace(value=loss.value.detach()))
            return running.scaled(loss, is_sum="num_items_in_batch" in part.kwargs).reshape(1)
        except Exception as error:
            running.error = error
            raise

    # -- the loss --------------------------------------------------------------------------------

    def _loss_of(self, output: Any, part: Inputs) -> MicroBatchLoss:
        return loss_of(output, part, self._options.loss, self._device)

    @torch.no_grad()
    def _found(self, *, is_sum: bool) -> Result:
        """What the last stage tells the others, with the loss of the whole batch at once, or of what fits of it."""
        running = self._running
        losses, whole, returned = running.losses, None, [*running.returned.values()]
        if returned and self._rows.dims is not None and all(one is not None for one in returned):
            losses = [losses[index] for index in running.window]
            pairs = [(running.batches.parts[index], running.returned[index]) for index in running.window]
            rows = join_rows(returned, self._rows.dims, [1.0] * len(returned))
            all_rows = running.batches.together(running.window), rows
            try:
                with measured(), no_trace(self._module), WithoutDropout() as observed:
                    with SameDraws() as draws:
                        whole = self._loss_at_end(*all_rows).mean()
                    if observed.dropped or draws.has_drawn:  # other numbers for the micro-batches
                        losses, whole = self._losses_of_same_draws(pairs, all_rows)
            except _NEEDS_MORE:
                self._rows.dims = None
                losses = running.losses
        result = batch_loss(running.losses, whole, is_sum=is_sum)
        scale = result.scale if running.factor is None else result.scale / running.factor.double()
        return result._replace(checked=batch_loss(losses, None, is_sum=is_sum).loss, scale=scale)

    def _losses_of_same_draws(self, parts: Sequence[Any], whole: Any) -> tuple[list[MicroBatchLoss], torch.Tensor]:
        """The losses of the micro-batches and that of the batch, with the same random numbers."""
        losses = []
        with SameDraws() as draws:
            for part in parts:
                draws.begin(together=False)
                with random_kept():
                    losses.append(self._loss_at_end(*part))
            draws.begin(together=True)
            return losses, self._loss_at_end(*whole).mean()

    def _loss_at_end(self, part: Inputs, returned: Any) -> MicroBatchLoss:
        """The loss, from what the last layer has returned."""
        if self._running.ends_with_layer:
            return self._loss_of(returned, part)
        output = self._forward.run(self._last + 1, returned, (), self._running.forward(part))
        return self._loss_of(output, part)

    def _measured(self, stage: int, part: Inputs, received: Any) -> tuple[Any, Any]:
        """What a stage gives, the last one its loss; and what the last layer has returned."""
        output = self._compute(None, stage, part, received)
        return (output, None) if stage < self._last else (self._loss_of(output, part), self._forward.returned)

    def _measured_whole(self, part: Inputs) -> MicroBatchLoss | None:
        """The loss, with all layers on all ranks; None if they cannot be lent."""
        if not self._lent.can_lend():
            return None
        output = self._forward.run_whole(self._running.forward(part), self._lent.lend)
        return self._loss_of(output, part)

    # -- without gradients -----------------------------------------------------------------------

    def _infer(self, call: Callable[..., Any], inputs: Inputs) -> Any:
        """The forwards of all micro-batches, or of a batch with a cache; every rank gets what the last stage gives."""
        num_layers = sum(map(len, self._options.stages))
        cache = StageCache(self._module, inputs, num_layers) if asks_for_cache(inputs) else None
        batches = MicroBatches(inputs, self._options.micro_batches if cache is None else 1, exactly=False)
        count = num_items(self._module, call, inputs) if self._options.loss is None else None
        if count is not None:
            for part in (batches.whole, *batches.parts):
                part.kwargs["num_items_in_batch"] = count
        has_loss = self._options.loss is not None and inputs.target is not NOTHING
        outputs: list[Any] = []
        self._call = _PipelineCall(call, batches)
        try:
            with self._guard(), gather_units_once(self._module):
                for part in [batches.together(range(2)), *batches.parts[2:]]:  # see `joined`
                    for stage in self.here:
                        received = self._borders.receive(None, stage)
                        with contextlib.nullcontext() if cache is None else cache.in_stage():
                            output = self._compute(None, stage, part, received)
                        if stage == self._last:
                            loss = self._loss_of(output, part) if has_loss else None
                            outputs.append(sendable(output, loss, is_sum=count is not None))
                        else:
                            self._borders.send(None, stage, output)
                self._borders.wait()
                found = as_output(self._share(batch_output(outputs) if outputs else None, self.owners[self._last]))
                if cache is not None:
                    cache.end(self._group, self._device)
                    found = with_cache(found, cache.cache)
                return found
        except Exception as error:
            self._break_off(error)
            raise
        finally:
            self._call = None

    def _break_off(self, error: Exception) -> None:
        self._broke_off = str(error).partition("\n")[0] or type(error).__name__
        self._peers.report(error)


class _PipelineCall:
    """One call: its micro-batches, and what the last stage found so far."""

    def __init__(self, call: Callable[..., Any], batches: MicroBatches) -> None:
        self._call = call
        self.batches = batches
        self.window = range(0)  # of micro-batches whose loss is computed together
        self.returned: dict[int, Any] = {}  # by the last layer
        self.ends_with_layer = False  # whether forward returns that
        self.losses: list[MicroBatchLoss] = []
        self.factor: torch.Tensor | None = None  # of the losses in backward, see `scaled`
        self.error: Exception | None = None

    def forward(self, part: Inputs) -> Callable[[], Any]:
        """The forward of the module for some rows."""
        return partial(self._call, *part.args, **part.kwargs)

    def scaled(self, loss: MicroBatchLoss, *, is_sum: bool) -> torch.Tensor:
        """What backward begins with: with the loss scale of fp16, about the part of a micro-batch in the batch's loss.

        It is a power of two for all micro-batches, so that dividing by it later is exact.
        """
        if self.factor is None:
            return loss.value
        if len(self.losses) == 1 and not is_sum:
            terms = torch.ones_like(self.factor) if loss.terms is None else loss.terms.to(self.factor).clamp(min=1)
            self.factor = self.factor * torch.exp2(-torch.ceil(torch.log2(terms * len(self.batches.parts))))
        return loss.value * self.factor.to(loss.value.dtype)

    def keep(self, index: int, returned: Any, number: int) -> None:
        """Keep what the last layer has returned, of all micro-batches or, in turn, of as many as fit into memory."""
        if not self.window:
            parts, size = len(self.batches.parts), sum(t.numel() * t.element_size() for t in tensors(returned))
            count = min(parts, max(2, _KEPT_BYTES // max(size, 1)))
            first = number % (parts - count + 1)
            self.window = range(first, first + count)
        if index in self.window:
            self.returned[index] = map_tensors(torch.Tensor.detach, returned)


class _StageModule(nn.Module):
    """What torch's schedules take for a stage. They call it for one micro-batch after the other."""

    def __init__(self, owner: PipelinedModule, number: int) -> None:
        super().__init__()
        self._compute = owner.compute
        self._number = number
        self._index = 0
        self._layers = owner._options.stages[number]

    def begin(self, module: nn.Module) -> None:
        """A pass begins, with these parameters."""
        self._index = 0
        self._parameters.clear()
        mine = {
            id(p): p
            for name, p in module.named_parameters(remove_duplicate=False)
            if any(is_in(name, one) for one in self._layers)
        }
        for index, parameter in enumerate(mine.values()):
            self._parameters[str(index)] = parameter

    @override
    def forward(self, *received: torch.Tensor) -> Any:
        """The stage, for the next micro-batch."""
        index, self._index = self._index, self._index + 1
        return self._compute(self._number, index, received)
