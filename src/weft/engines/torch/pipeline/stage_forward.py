"""The forward of a whole module, of which this rank computes one stage.

[Note: one forward for all stages] Every rank runs the forward that the user wrote, with its own inputs: all ranks of a
pipeline have the same batch. Layers of this stage compute. The last layer of the stage before returns what was
received from there. Other layers of earlier stages return a tensor without values (`RemoteOutput`); when a layer of a
later stage is called, the work of this stage is done, and forward is left. So what lies between the layers (masks,
positions, rotary embeddings) needs no description, and an order of layers that is not that of the stages is found:
a layer would be given a tensor without values.

A call is routed outside of all hooks of a layer, which belong to the stage that has the layer.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.engines.torch.hooks.method_hooks import Removable, route_calls
from weft.engines.torch.pipeline.remote_output import RemoteOutput, has_remote
from weft.engines.torch.pipeline.stage_borders import Earlier
from weft.engines.torch.probes.no_trace import is_measured, random_kept
from weft.errors import ContractError
from weft.private_names import replaced
from weft.tensors.nested import map_tensors, tensors
from weft.tensors.rng_state import seed_torch

_IN_ORDER = "weft.pipeline(model, ctx, stages=[[names of layers], ...]) in the order of forward"
_OF_ITS_STAGE = "stages=[...] with the name of the parameter in the stage that uses it, or in the forward of a layer"
_THROUGH = "x, kept = layer(x, kept)  # what a later layer needs goes through those before it, which return a tuple"


class _StageLeft(BaseException):
    """Forward is left: a layer of a later stage was called. Not an Exception, which a forward may catch."""


class _StageCall:
    """One forward of one stage."""

    def __init__(self, stage: int, received: Any) -> None:
        self.stage = stage
        self.received = received
        self.has_received = False
        self.calls = 0
        self.output: Any = None
        self.is_done = False
        self.is_measured = is_measured()


@dataclass(eq=False, repr=False)
class StageForward:
    """Runs the stages of one module.

    Attributes:
        stages: Names of the layers of each stage.
        here: The stages of this rank.
        returned: What the last layer of all has returned in the call that ran last, if it was called once.
        seeds: Whether each layer draws random numbers of its own, whatever was drawn before it.
    """

    module: InitVar[nn.Module]
    stages: Sequence[Sequence[str]]
    here: Sequence[int]
    _device: torch.device
    removable: InitVar[Removable]

    def __post_init__(self, module: nn.Module, removable: Removable) -> None:
        self.returned: Any = None
        self.seeds = False
        self._kind = type(module).__name__
        self._layers: set[str] = set()  # of the stages, which may also have parameters between them
        self._running: _StageCall | None = None
        self._given: dict[str, Any] = {}  # like what layers have returned, as far as known
        self._lend: Callable[[int, str], AbstractContextManager[None]] | None = None
        self._numbers = {name: number for number, name in enumerate(name for names in self.stages for name in names)}
        for number, names in enumerate(self.stages):
            parts = [(name, module.get_submodule(name)) for name in names if not _is_parameter(module, name)]
            self._layers |= {name for name, _ in parts}
            for name, part in parts:
                is_last = name == parts[-1][0]
                route_calls(part, removable, partial(_route, weakref.ref(self), number, name, is_last=is_last))

    def returned_until(self, stage: int) -> Iterator[tuple[int, Any]]:
        """What the layers up to the end of a stage have returned last, without values, by number."""
        names = [name for names in self.stages[: stage + 1] for name in names]
        return ((number, self._given[name]) for number, name in enumerate(names) if name in self._given)

    def run(self, stage: int, received: Any, earlier: Earlier, forward: Callable[[], Any]) -> Any:
        """Compute one stage: what its last layer gives, and for the last stage what `forward` gives.

        After the last stage comes what forward does with the output of the last layer: one more stage, without layers.

        Args:
            stage: Its number.
            received: What the last layer before it has returned.
            earlier: What all layers before it have returned, without values.
            forward: Of the module.

        Raises:
            ContractError: The layers are called in another order than that of the stages.
        """
        call = _StageCall(stage, received)
        ends = [number for number, _ in earlier[1:]] + [sum(map(len, self.stages[:stage]))]
        for (start, output), end in zip(earlier, ends, strict=False):
            like = output.filled(self._like)
            for name in list(self._numbers)[start:end]:
                self._given[name] = like
        before, self._running = self._running, call
        try:
            output = forward()
        except _StageLeft:
            return call.output
        except RuntimeError as error:
            if "meta" not in str(error):
                raise
            raise self._parameter_error(f": {error}") from error
        finally:
            self._running = before
        self.returned = call.output if call.calls == 1 else None
        if stage < len(self.stages) - 1 or (stage and not call.has_received):
            missing = self.stages[stage + 1][0] if not stage or call.has_received else self.stages[stage - 1][-1]
            raise self._order_error(f"forward ended without a call of {missing}")
        if has_remote(output):
            raise self._order_error("the output of the module depends on a layer of an earlier stage", fix=_THROUGH)
        self._check_real(output)
        return output

    def run_whole(self, forward: Callable[[], Any], lend: Callable[[int, str], AbstractContextManager[None]]) -> Any:
        """Compute all stages, on all ranks at once: what `forward` gives.

        Args:
            forward: Of the module.
            lend: A context in which a layer of a stage, by name, has its parameters on all ranks.
        """
        with contextlib.ExitStack() as stack:
            for number, names in enumerate(self.stages):
                for name in names:
                    if name not in self._layers:
                        stack.enter_context(lend(number, name))
            stack.enter_context(replaced(self, _lend=lend))
            return forward()

    def route(self, number: int, name: str, run: Callable[..., Any], args: Any, kwargs: Any, *, is_last: bool) -> Any:
        """What a call of a layer does; see [Note: one forward for all stages]."""
        call = self._running
        if self._lend is not None:
            with self._lend(number, name):
                return self._run(name, run, args, kwargs)
        if call is None:
            if number not in self.here:
                raise ContractError(
                    f"pipeline: {name} is a layer of another stage",
                    found=f"a call of it past the module, on a rank with stage {', '.join(map(str, self.here))}",
                    expected=f"calls of the {self._kind} itself, on all ranks; {name} is in stage {number}",
                    fix="model(...)  # or weft.undo(model, ctx) to have all layers on every rank",
                )
            return run(*args, **kwargs)
        if is_measured() != call.is_measured:  # a probe computes a part again, of which this layer is one of several
            return run(*args, **kwargs)
        if number > call.stage:
            if not call.is_done:
                raise self._order_error(
                    f"{name} of stage {number} is called before the last layer of stage {call.stage}"
                )
            raise _StageLeft
        if number < call.stage:
            return self._of_earlier(call, number, name, is_last=is_last)
        if has_remote((args, kwargs)):
            raise self._order_error(f"{name} of stage {number} is given what another stage computes", fix=_THROUGH)
        self._check_real((args, kwargs))
        output = self._run(name, run, args, kwargs)
        if not is_last:
            return output
        if number == len(self.stages) - 1:
            call.output, call.calls = output, call.calls + 1
            return output
        if call.is_done:
            raise self._order_error(f"{name}, the last layer of stage {number}, is called twice")
        call.output, call.is_done = output, True
        return map_tensors(RemoteOutput.like, output)

    def _run(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a layer, and note what it returns, without values."""
        with random_kept() if self.seeds else contextlib.nullcontext():
            if self.seeds:
                seed_torch((1 + self._numbers[name]) << 32)
            output = run(*args, **kwargs)
        self._given[name] = map_tensors(lambda tensor: RemoteOutput.like(tensor, any_shape=True), output)
        return output

    def _like(self, shape: tuple[int, ...], dtype: torch.dtype) -> RemoteOutput:
        return RemoteOutput.like(torch.empty(shape, dtype=dtype, device="meta"), self._device)

    def _of_earlier(self, call: _StageCall, number: int, name: str, *, is_last: bool) -> Any:
        if call.has_received:
            raise self._order_error(
                f"{name} of stage {number} is called after the last layer of stage {call.stage - 1}"
            )
        if is_last and number == call.stage - 1:
            call.has_received = True
            return call.received
        after = call.stage == len(self.stages)  # all layers: of what is between them, the shapes are not known
        like = self._given.get(name, call.received)
        return map_tensors(lambda tensor: RemoteOutput.like(tensor, any_shape=after), like)

    def _check_real(self, value: Any) -> None:
        """Raise if a tensor is on meta, as what torch computes from one that is there."""
        if any(tensor.is_meta for tensor in tensors(value)):
            raise self._parameter_error()

    def _parameter_error(self, why: str = "") -> ContractError:
        found = f"between the layers, a parameter of another stage is used{why}"
        return self._order_error(found, fix=_OF_ITS_STAGE)

    def _order_error(self, found: str, *, fix: str = _IN_ORDER) -> ContractError:
        chain = " | ".join(
            " ".join((names[0], "...", names[-1])[: 3 if len(names) > 1 else 1]) for names in self.stages
        )
        return ContractError(
            f"pipeline: {self._kind} does not call its layers in the order of the stages",
            found=found,
            expected=f"each layer called once, with what the layers before it gave: {chain}",
            fix=fix,
        )


def _route(
    owner: weakref.ref[StageForward], number: int, name: str, run: Any, args: Any, kwargs: Any, *, is_last: bool
) -> Any:
    """A call of one layer, whose hook does not hold the owner."""
    alive = owner()
    if alive is None:
        return run(*args, **kwargs)
    return alive.route(number, name, run, args, kwargs, is_last=is_last)


def _is_parameter(module: nn.Module, name: str) -> bool:
    return isinstance(getattr(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]), torch.Tensor)
