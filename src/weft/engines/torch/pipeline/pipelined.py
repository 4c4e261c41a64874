"""A module whose layers lie on the ranks of a pipeline; the loop around it stays what it is.

[Note: the loop stays] `loss = model(x, y)` runs the forwards and backwards of a schedule, in which the backward pass of
the first micro-batch comes before the forward of a later one. So gradients are computed inside of the call, with 1 for
the gradient of the loss, and kept aside; `(loss * share).backward()` multiplies them by what arrives. They are linear
in it, so that this is exact. The loss is one node over the parameters of this rank: reducers, hooks and windows see
gradients in the backward pass that the user calls, and never those of a micro-batch.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from weft.engines.options import PipelineOptions
from weft.engines.peers import Peers
from weft.engines.torch.hooks.method_hooks import Removable, attach
from weft.engines.torch.pipeline.batch_parts import NOTHING, Inputs, MicroBatches, check_flags, inputs_of, num_items
from weft.engines.torch.pipeline.schedules import make_schedule, owners
from weft.engines.torch.pipeline.stage_borders import Borders
from weft.engines.torch.pipeline.stage_forward import StageForward
from weft.engines.torch.pipeline.stage_parameters import Aliases, Kept, units_whole
from weft.errors import ContractError, type_error
from weft.tensors.dtensor import local
from weft.tensors.nested import map_tensors, tensors

__all__ = ["PipelinedModule"]

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_FORMS = ("tensor", "output", "dict")


class Result(NamedTuple):
    """What the ranks are told of a pass.

    Attributes:
        loss: Of the batch, 0-d.
        scale: What gradients are multiplied by.
        form: Index into `_FORMS`: what the call returns.
        is_mean: Whether it is the mean over the micro-batches.
        whole: The loss that the last stage computed of the whole batch at once; the same as `loss` if it did not.
    """

    loss: torch.Tensor
    scale: torch.Tensor
    form: int
    is_mean: bool
    whole: torch.Tensor


class PipelinedModule:
    """The stages of this rank, and the calls of the module.

    Attributes:
        here: Numbers of the stages of this rank.
        owners: The rank of each stage.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        device: torch.device,
        options: PipelineOptions,
        peers: Peers,
        guard: Callable[[], AbstractContextManager[None]],
        share: Callable[[Any, int], Any],
    ) -> None:
        self._options = options
        self._group = group
        self._device = device
        self._peers = peers
        self._guard = guard
        self._share = share
        self.owners = owners(options.schedule, dist.get_world_size(group), len(options.stages))
        self.here = tuple(n for n, rank in enumerate(self.owners) if rank == dist.get_rank(group))
        self._last = len(options.stages) - 1
        self._removable = Removable()
        self._module = module
        self._forward = StageForward(module, options.stages, self.here, self._removable)
        self._borders = Borders(group, self.owners, device)
        self._aliases = Aliases()
        self._schedules: dict[Any, Any] = {}
        self._stage_modules = {number: _StageModule(self, number) for number in self.here}
        self._pass: _Pass | None = None
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

    # -- calls -----------------------------------------------------------------------------------

    def _around(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_flags(self._module, kwargs)
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
            with self._guard(), units_whole(self._module), self._aliases.in_place(self._module) as pairs:
                result = self._run(call, batches, is_sum=is_sum)
                with_gradient = [(p, alias.grad) for p, alias in pairs if alias.grad is not None]
                for _, alias in pairs:
                    alias.grad = None
        except Exception as error:
            self._schedules.clear()
            self._peers.report(error)
            raise
        if result.is_mean:
            batches.check_mean()
        self._check_whole(result)
        kept = Kept([gradient for _, gradient in with_gradient], result.scale)
        anchor = torch.zeros((), device=self._device, requires_grad=True)
        loss: torch.Tensor = _Loss.apply(result.loss, kept, anchor, *(p for p, _ in with_gradient))  # type: ignore[no-untyped-call]
        return _formed(loss, _FORMS[result.form])

    def _run(self, call: Callable[..., Any], batches: MicroBatches, *, is_sum: bool) -> Result:
        number = len(batches.parts)
        is_new = batches.key not in self._schedules
        self._pass = _Pass(call, batches, keeps=is_new and self._last in self.here)
        try:
            if is_new:
                self._probe(batches)
                examples = {
                    n: self._borders.examples(batches.key, n) for n in {*self.here, *(n - 1 for n in self.here)}
                }
                self._schedules[batches.key] = make_schedule(
                    self._options.schedule,
                    self._stage_modules,
                    self._last + 1,
                    self._group,
                    self._device,
                    number,
                    examples,
                )
            for stage in self._stage_modules.values():
                stage.begin(self._module)
            target = {"target": torch.arange(number)} if self._last in self.here else {}
            self._schedules[batches.key].step(**target)
            found = self._combined(is_sum=is_sum) if self._last in self.here else None
        except RuntimeError as error:  # torch wraps what forward raises
            raise (self._pass.error or error) from None
        finally:
            self._pass = None
        return self._told(found)

    def _probe(self, batches: MicroBatches) -> None:
        """Let each stage see once what it receives: the forward of the first micro-batch."""
        with torch.no_grad():
            for stage in self.here:
                received = self._borders.receive(batches.key, stage)
                output = self._compute(stage, batches.parts[0], received)
                if stage == self._last:
                    output = self._loss_of(output, batches.parts[0])[0].reshape(1)
                self._borders.send(batches.key, stage, output)

    def _compute(self, stage: int, part: Inputs, received: Any) -> Any:
        running = self._pass
        assert running is not None
        return self._forward.run(stage, received, lambda: running.call(*part.args, **part.kwargs))

    def compute(self, stage: int, index: int, received: tuple[torch.Tensor, ...]) -> Any:
        """What torch's schedule asks for: a stage, for one micro-batch."""
        running = self._pass
        assert running is not None
        part, key = running.batches.parts[index], running.batches.key
        try:
            if running.keeps and stage == self._last:
                running.received.append([tensor.detach() for tensor in received])
            output = self._compute(stage, part, self._borders.rebuilt(key, stage - 1, received))
            if stage < self._last:
                return self._borders.flat(key, stage, output)
            total, count, running.form = self._loss_of(output, part)
            running.losses.append(total.detach())
            running.counts.append(count)
            return total.reshape(1)
        except Exception as error:
            running.error = error
            raise

    # -- the loss --------------------------------------------------------------------------------

    def _loss_of(self, output: Any, part: Inputs) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        """The loss of a micro-batch; its number of terms, if it tells that; and the form in which it came."""
        form, value = 0, output
        if self._options.loss is not None:
            # As after the call of a module with a precision: in float32, and without autocast.
            output = _wide(output) if torch.is_autocast_enabled(self._device.type) else output
            with torch.autocast(self._device.type, enabled=False):
                value = self._options.loss(output, part.target)
        elif isinstance(output, Mapping):
            form, value = (1 if hasattr(output, "loss") else 2), output.get("loss")
        elif hasattr(output, "loss"):
            form, value = 1, output.loss
        count = None
        if isinstance(value, (tuple, list)) and len(value) == 2 and self._options.loss is not None:
            value, terms = value
            wide = torch.float64 if isinstance(terms, float) else None  # torch would round it to 32 bits
            count = torch.as_tensor(terms, dtype=wide, device=self._device)
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.is_floating_point():
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise type_error(
                "pipeline: the call gives no loss",
                found=type(value).__name__ + shape,
                expected="a forward that returns the loss (for transformers: labels=...), or loss=fn(output, target), "
                "which returns one number, or a sum and the number of its terms",
                fix="weft.pipeline(model, ctx, loss=torch.nn.functional.cross_entropy); model(x, y)",
            )
        return value, count, form

    def _combined(self, *, is_sum: bool) -> Result:
        running = self._pass
        assert running is not None
        total, counts = torch.stack([loss.reshape(()) for loss in running.losses]), running.counts
        if is_sum:
            scale = torch.ones((), device=total.device, dtype=torch.float64)
        elif counts[0] is not None:
            scale = (
                1 / torch.stack([count.reshape(()).to(torch.float64) for count in counts if count is not None]).sum()
            )
        else:
            scale = torch.full((), 1 / len(total), device=total.device, dtype=torch.float64)
        loss = (total.sum() * scale).to(total.dtype)
        is_mean = not is_sum and counts[0] is None
        return Result(loss, scale, running.form, is_mean, self._of_whole(loss) if running.keeps else loss)

    @torch.no_grad()
    def _of_whole(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of the whole batch, as the last stage computes it at once."""
        running = self._pass
        assert running is not None
        parts = zip(*running.received, strict=True)
        received = self._borders.rebuilt(running.batches.key, self._last - 1, tuple(torch.cat(part) for part in parts))
        total, count, _ = self._loss_of(
            self._compute(self._last, running.batches.whole, received), running.batches.whole
        )
        return total.reshape(()) if count is None else (total.reshape(()) / count).to(loss.dtype)

    def _told(self, found: Result | None) -> Result:
        """Tell all ranks what the last stage found: one message."""
        wide = torch.float32 if self._device.type == "mps" else torch.float64
        words = torch.zeros(6, dtype=wide, device=self._device)
        if found is not None:
            words[0], words[1], words[2], words[3] = found.loss, found.scale, found.form, found.whole
            words[4], words[5] = _DTYPES.index(found.loss.dtype), found.is_mean
        dist.broadcast(words, group=self._group, group_src=self.owners[self._last])
        _, _, form, _, dtype, is_mean = words.tolist()
        loss, whole = (words[n].to(_DTYPES[int(dtype)]) for n in (0, 3))
        return Result(loss, words[1], int(form), bool(is_mean), whole)

    def _check_whole(self, result: Result) -> None:
        loss, whole = float(result.loss), float(result.whole)
        low = result.loss.dtype in _DTYPES[2:]
        if abs(loss - whole) > (0.05 if low else 1e-3) * max(abs(loss), abs(whole)):
            self._schedules.clear()
            raise ContractError(
                "pipeline: the mean over the micro-batches is not the loss of the batch",
                found=f"{loss:.6g} over the micro-batches, {whole:.6g} of the whole batch",
                expected="a loss that is a mean over rows, or one that tells its number of terms",
                fix="weft.pipeline(..., loss=lambda out, y: (cross_entropy(out, y, reduction='sum'), y.numel()))",
            )

    # -- without gradients -----------------------------------------------------------------------

    def _infer(self, call: Callable[..., Any], inputs: Inputs) -> Any:
        """The forwards of all micro-batches; every rank gets what the last stage gives."""
        batches = MicroBatches(inputs, self._options.micro_batches, exactly=False)
        count = num_items(self._module, call, inputs) if self._options.loss is None else None
        if count is not None:
            for part in (batches.whole, *batches.parts):
                part.kwargs["num_items_in_batch"] = count
        outputs: list[Any] = []
        self._pass = _Pass(call, batches, keeps=False)
        try:
            with self._guard(), units_whole(self._module):
                for part in batches.parts:
                    for stage in self.here:
                        received = self._borders.receive(None, stage)
                        output = self._compute(stage, part, received)
                        if stage == self._last:
                            outputs.append(self._plain(output, part, is_sum=count is not None))
                        else:
                            self._borders.send(None, stage, output)
                self._borders.wait()
                return _as_output(self._share(_joined(outputs) if outputs else None, self.owners[self._last]))
        except Exception as error:
            self._peers.report(error)
            raise
        finally:
            self._pass = None

    def _plain(self, output: Any, part: Inputs, *, is_sum: bool) -> Any:
        """The output of a micro-batch, in containers that can be sent."""
        if self._options.loss is not None and part.target is not NOTHING:
            total, count, _ = self._loss_of(output, part)
            return [total.reshape(()), torch.ones((), device=total.device) if count is None else count]
        if isinstance(output, Mapping):
            found = {key: value for key, value in output.items() if any(True for _ in tensors(value))}
            kind = "output" if hasattr(output, "to_tuple") else "dict"
            return {"form": kind, "is_sum": is_sum, "values": found}
        return output


class _Pass:
    """One call: its micro-batches, and what the last stage found so far."""

    def __init__(self, call: Callable[..., Any], batches: MicroBatches, *, keeps: bool) -> None:
        self.call = call
        self.batches = batches
        self.keeps = keeps
        self.received: list[list[torch.Tensor]] = []
        self.losses: list[torch.Tensor] = []
        self.counts: list[torch.Tensor | None] = []
        self.form = 0
        self.error: Exception | None = None


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
        mine = [
            p
            for name, p in module.named_parameters()
            if any(name == one or name.startswith(f"{one}.") for one in self._layers)
        ]
        for index, parameter in enumerate(mine):
            self._parameters[str(index)] = parameter

    def forward(self, *received: torch.Tensor) -> Any:
        """The stage, for the next micro-batch."""
        index, self._index = self._index, self._index + 1
        return self._compute(self._number, index, received)


class _Loss(torch.autograd.Function):
    """The loss as a function of the parameters of this rank, whose gradients are known."""

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, kept: Kept, anchor: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        del anchor, parameters  # that the loss depends on them is all
        ctx.kept = kept
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, arrived: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradients, scale = ctx.kept.gradients, ctx.kept.scale
        if torch.is_grad_enabled() or gradients is None:
            raise ContractError(
                "pipeline: a loss has one backward pass, without a graph of its own",
                found="a second backward pass of one loss" if gradients is None else "create_graph=True",
                expected="one backward pass per call: the call computes the gradients, and this one uses them up",
                fix="loss = model(x, y); loss.backward()",
            )
        ctx.kept.gradients = None
        factor = arrived * scale.to(arrived.dtype)
        with torch.no_grad():
            for gradient in gradients:
                local(gradient).mul_(factor)
        return None, None, None, *gradients


def _wide(output: Any) -> Any:
    return map_tensors(lambda t: t.float() if t.dtype in _DTYPES[2:] else t, output)


def _formed(loss: torch.Tensor, form: str) -> Any:
    """The loss as the module returns it."""
    return loss if form == "tensor" else _output({"loss": loss}, form)


def _output(values: dict[str, Any], form: str) -> Any:
    if form == "dict":
        return values
    kind: Any = getattr(sys.modules.get("transformers.utils"), "ModelOutput", None)
    return types.SimpleNamespace(**values) if kind is None else kind(**values)


def _joined(outputs: list[Any]) -> Any:
    """The output of the batch, from those of its micro-batches."""
    first = outputs[0]
    if isinstance(first, dict) and set(first) == {"form", "is_sum", "values"}:
        names = list(first["values"])
        values = {
            name: _joined_tensors([one["values"][name] for one in outputs], is_sum=first["is_sum"]) for name in names
        }
        return {**first, "values": values}
    if isinstance(first, list) and len(first) == 2 and all(isinstance(t, torch.Tensor) and not t.dim() for t in first):
        totals, counts = zip(*outputs, strict=True)
        return torch.stack(totals).sum() / torch.stack(counts).sum().to(totals[0].dtype)
    return _joined_tensors(outputs, is_sum=False)


def _joined_tensors(parts: list[Any], *, is_sum: bool) -> Any:
    first = parts[0]
    if isinstance(first, torch.Tensor):
        if first.dim():
            return torch.cat(parts)
        stacked = torch.stack(parts)
        return stacked.sum() if is_sum else stacked.mean()
    if isinstance(first, Mapping):
        return {key: _joined_tensors([part[key] for part in parts], is_sum=is_sum) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(_joined_tensors(list(one), is_sum=is_sum) for one in zip(*parts, strict=True))
    return first


def _as_output(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"form", "is_sum", "values"}:
        return _output(value["values"], value["form"])
    return value
