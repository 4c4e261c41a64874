"""Tensor parallelism, measured: a part of a module with its layers on several ranks, and whole on each.

Of a column layer each rank has some of the outputs, which only what treats each of them alike may change before a row
layer adds up. Whether that is so is measured around both: the smallest module that holds them is called once more, as
it is and with whole parameters, and outputs and gradients are compared.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from typing_extensions import override

from weft.engines.options import TensorOptions
from weft.engines.probes import Args, Compared, Kwargs
from weft.engines.torch.probes.compare import LIMIT, LOW_LIMIT, difference, is_low, largest_over, returned_tensors
from weft.engines.torch.probes.no_trace import as_made, attributes_of, copied, no_trace
from weft.engines.torch.probes.part_uses import watched
from weft.engines.torch.probes.repeated_hooks import hooks_off
from weft.tensors.blocks import chunk, cut_as, full_tensor
from weft.tensors.dtensor import is_fsdp_unit, local
from weft.tensors.messages import gathered
from weft.tensors.nested import map_tensors, tensors

# Parts of these styles give what they give by themselves.
_ALONE = ("gather", "vocab", "sequence", "replicate", "whole")
_COLUMNS, _ROWS = ("column", "ColwiseParallel"), ("row", "RowwiseParallel")
_OF_FSDP = ("torch.distributed.fsdp", "weft.engines.torch.fsdp.own_parameters")
BETWEEN_BLOCKS = "model, ctx = weft.tensor_parallel(..., sequence=False)"
_FEW = 2  # rows of a batch: one alone would be broadcast
_Cut = Callable[[torch.Tensor], torch.Tensor]


def _first_rows(call: Any, ranks: int) -> Any:
    """Of all tensors in a call: one of `ranks` parts, but at least two rows."""
    rows = next((t.shape[0] for t in tensors(call) if t.ndim > 1), 0)
    few = max(_FEW, -(-rows // ranks))
    return map_tensors(lambda t: t[:few] if t.ndim and t.shape[0] == rows else t, call) if few < rows else call


def units_around(module: nn.Module, styles: Mapping[str, Any]) -> dict[str, nn.Module]:
    """The smallest parts that hold a column layer and the row layer after it; none of them inside another one."""
    words = {name: _word(style) for name, style in styles.items()}
    columns = [name for name, word in words.items() if word in _COLUMNS]
    found = set()
    for name, word in words.items():
        if word in _ALONE:
            found.add(name)
        elif word not in _COLUMNS:
            found.add(_up(name, lambda at: any(is_in(column, at) for column in columns)))
    found |= {name.rpartition(".")[0] for name in columns if not any(is_in(name, one) for one in found)}
    found = {called_around(module, name) for name in found}
    outermost = sorted(one for one in found if not any(one != other and is_in(one, other) for other in found))
    return {name: module.get_submodule(name) for name in outermost}


def _word(style: Any) -> str:
    return style if isinstance(style, str) else type(style).__name__


def _up(name: str, fits: Any) -> str:
    while name and not fits(name):
        name = name.rpartition(".")[0]
    return name


def called_around(module: nn.Module, name: str) -> str:
    """The name of the part itself, or of the next one around it that has a forward."""
    return _up(name, lambda at: type(module.get_submodule(at)).forward is not nn.Module.forward)


def is_in(name: str, outer: str) -> bool:
    """Whether a part is another one, or in it."""
    return not outer or name == outer or name.startswith(f"{outer}.")


def plan_line(module: nn.Module, names: Collection[str], cut: Collection[str]) -> str:
    """The line to write for whole parameters of whose gradients each rank has a part.

    Args:
        module: Has the parameters.
        names: Of them.
        cut: Names of layers that are cut: a part that holds one cannot stay whole.
    """
    parts = {name.rpartition(".")[0] for name in names}
    if any(is_in(one, part) for one in cut for part in parts):
        return TensorUnits.fix
    patterns = set()
    for part in parts:
        pattern = re.sub(r"\b\d+\.", "*.", part)
        fits = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        patterns.add(pattern if {n for n, _ in module.named_modules() if fits.fullmatch(n)} <= parts else part)
    return "plan={..., " + ", ".join(f'"{one}": "replicate"' for one in sorted(patterns)) + "}"


class WholeUnits:
    """Units that are called as they are and with whole parameters: what these probes have in common.

    Attributes:
        units: See `weft.contract.Probe`.
        group: The ranks that compute them together.
    """

    spare: nn.Module | None = None
    outside = False
    cause = fix = ""

    def __init__(self, units: Mapping[str, nn.Module], group: dist.ProcessGroup) -> None:
        self.units = units
        self.group: dist.ProcessGroup | None = group
        self._made = {name: attributes_of(unit) for name, unit in units.items()}

    def _unit(self, name: str) -> nn.Module:
        unit = self.units.get(name, self.spare)
        assert unit is not None
        return unit

    def equal_inputs(self, name: str, args: Args, kwargs: Kwargs) -> Any:
        """All arguments."""
        return args, kwargs

    def alone(self, name: str, args: Args, kwargs: Kwargs) -> Any:
        """The unit, called with whole parameters. Collectives: those that make them whole."""
        given = map_tensors(lambda t: self._joined(t, name, (args, kwargs)), (args, kwargs))
        return self._call_whole(name, self._whole(name), *given)

    def _whole(self, name: str) -> dict[str, torch.Tensor]:
        """The parameters of a unit, whole."""
        return {own: full_tensor(p.detach()) for own, p in self._unit(name).named_parameters()}

    def _undivided(self, name: str) -> AbstractContextManager[None]:
        """A context in which a unit computes alone, without the hooks and methods that divide it."""
        raise NotImplementedError

    def _call_whole(self, name: str, parameters: Mapping[str, torch.Tensor], args: Any, kwargs: Any) -> Any:
        unit = self._unit(name)
        buffers = {own: full_tensor(b).clone() for own, b in unit.named_buffers()}
        with self._undivided(name), hooks_off(unit, lambda _, hook: gathers(hook)):
            return functional_call(unit, {**parameters, **buffers}, tuple(args), dict(kwargs))

    def _is_summed(self, name: str, own: str) -> bool:
        """Whether each rank has a part of the gradient of a parameter that is not cut."""
        return False

    def _is_elsewhere(self, name: str, own: str) -> bool:
        """Whether the gradient of a parameter is that of the rows of all ranks."""
        return False

    def _joined(self, tensor: torch.Tensor, name: str, call: Any) -> torch.Tensor:
        """What one process is called with, in place of an argument."""
        return full_tensor(tensor).clone()

    def _comes_split(self, name: str) -> bool:
        """Whether the first argument is this rank's part of a sequence."""
        return False

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a sequence."""
        return whole

    def _as_found(self, name: str, number: int, found: torch.Tensor, expected: torch.Tensor) -> _Cut:
        """What makes this rank's part of an output of one process, where it is one."""
        return same

    def measure(self, name: str, args: Args, kwargs: Kwargs, *, gradients: bool) -> Iterator[Compared]:
        """Compare in 32 bits where the unit computes in 16, whose rounding is larger than some mistakes.

        Yields:
            Outputs; and gradients of arguments and parameters, for one random gradient.
        """
        unit = self._unit(name)
        # Where parts of the unit are gathered by themselves, a backward pass here would end theirs.
        nested = any(part is not unit and is_fsdp_unit(part) for part in unit.modules())
        gradients = gradients and not nested
        device_type = next((t.device.type for t in tensors((args, kwargs))), "cpu")
        low = is_low(device_type, (*unit.parameters(), *tensors((args, kwargs))))
        limit = LOW_LIMIT if low and nested else LIMIT  # what is gathered by itself stays as it is
        low = low and not nested

        def wide(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.float() if low and tensor.is_floating_point() else tensor

        def leaf(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
            return wide(tensor.detach()).requires_grad_(gradients and like.requires_grad)

        held = dict(unit.named_parameters())
        mine = {} if nested else {n: leaf(p, p) for n, p in held.items()}
        whole = {n: leaf(p, held[n]) for n, p in self._whole(name).items()}
        caches = copied((args, kwargs))  # objects that both fill
        given_whole = map_tensors(lambda t: leaf(self._joined(t, name, caches), t), caches)
        given = map_tensors(lambda t: leaf(t.clone(), t), (args, kwargs))
        with contextlib.ExitStack() as stack:
            # The hooks of activation checkpointing, which count what is saved, do not see this.
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(same, same))
            stack.enter_context(torch.set_grad_enabled(gradients))
            if low:
                stack.enter_context(torch.autocast(device_type, enabled=False))
            buffers = {n: wide(b).clone() for n, b in unit.named_buffers()}
            together, alone = self._from_one_state(
                name,
                lambda: returned_tensors(functional_call(unit, {**mine, **buffers}, given[0], dict(given[1]))),
                lambda: returned_tensors(self._call_whole(name, whole, *given_whole)),
            )
            yield Compared("the number of outputs", torch.tensor(len(together)), torch.tensor(len(alone)))
            outputs = enumerate(zip(together, alone, strict=False))
            pairs = [(full_tensor(a), b, self._as_found(name, number, a, b)) for number, (a, b) in outputs]
            for number, (found, expected, cut) in enumerate(pairs):
                what = f"output {number}" if len(pairs) > 1 else "the output"
                fix = self._fix_of_output(name, found, expected)
                yield Compared(what, found, cut(expected), 0.0, limit, fix)
            if gradients and all(found.shape == cut(expected).shape for found, expected, cut in pairs):
                yield from self._gradients(name, pairs, (given, mine), (given_whole, whole))

    def _from_one_state(self, name: str, run: Callable[[], Any], run_alone: Callable[[], Any]) -> tuple[Any, Any]:
        """What both return, with the same random states and attributes.

        Attributes that forward has left may have the shapes of a part. Then both begin with those that were there at
        first, and compute twice.
        """
        unit = self._unit(name)
        with no_trace(unit):
            together = run()
        with no_trace(unit):
            alone, error = self._tried(name, run_alone)
        if error is not None and name in self._made:
            with as_made(unit, self._made[name]):
                run()
                together = run()
            with as_made(unit, self._made[name]):
                alone, error = self._tried(name, lambda: (run_alone(), run_alone())[1])
        if error is not None:
            raise error
        return together, alone

    def _tried(self, name: str, run: Callable[[], Any]) -> tuple[Any, Exception | None]:
        """What a call returns, or an error on all ranks: what comes next has collectives, which need all of them.

        Collectives: one all-reduce of a number.
        """
        result, error = None, None
        try:
            result = run()
        except (RuntimeError, ValueError, TypeError, IndexError) as found:
            error = found
        device = next(iter(self._unit(name).parameters())).device
        (failed,) = largest_over(self.group, [float(error is not None)], device)
        return result, error or (RuntimeError("it cannot be computed by another rank alone") if failed else None)

    def _gradients(self, name: str, outputs: list[Any], side: Any, other: Any) -> Iterator[Compared]:
        """Compare gradients of arguments and of parameters.

        Yields:
            One gradient after the other.
        """
        pairs = [(a, b, cut) for a, b, cut in outputs if a.requires_grad]
        arguments = [(a, b) for a, b in zip(tensors(side[0]), tensors(other[0]), strict=True) if a.requires_grad]
        trained = [n for n, p in side[1].items() if p.requires_grad and not self._is_elsewhere(name, n)]
        # What gradients are compared of: here, alone, and the name of a parameter.
        inputs = [*((a, b, "") for a, b in arguments), *((side[1][n], other[1][n], n) for n in trained)]
        if not pairs or not inputs:
            return
        ours, theirs = [a for a, _, _ in inputs], [b for _, b, _ in inputs]
        drawn = torch.Generator().manual_seed(0)
        arriving = [torch.randn(b.shape, generator=drawn).to(b) for _, b, _ in pairs]
        here = [cut(g) for (_, _, cut), g in zip(pairs, arriving, strict=True)]
        alone = [(b, g) for (_, b, _), g in zip(pairs, arriving, strict=True) if b.requires_grad]
        with torch.autocast(pairs[0][0].device.type, enabled=False):  # as in a backward pass, which is outside of it
            ends = [a for a, _, _ in pairs]
            # What is used here and was computed before belongs to the graph of the step, which is to stay.
            options: dict[str, Any] = {"allow_unused": True, "retain_graph": True}
            found = torch.autograd.grad(ends, [*ours, *self._other_leaves(ends, ours)], here, **options)
            expected: Sequence[torch.Tensor | None] = [None] * len(theirs)
            if alone:
                expected = torch.autograd.grad([b for b, _ in alone], theirs, [g for _, g in alone], **options)
        # Some gradients are zero but for rounding, as those of the biases of keys.
        norms = [0.0 if g is None else float(g.norm()) for g in expected]
        floor = 1e-2 * max(norms)
        for place, ((here_one, whole, own), a, b) in enumerate(zip(inputs, found[: len(ours)], expected, strict=True)):
            wanted = torch.zeros_like(whole) if b is None else b
            is_cut = isinstance(here_one, DTensor)
            if own and is_cut and (a is None or (isinstance(a, DTensor) and a.placements == here_one.placements)):
                # This rank's part is enough: the other ranks compare theirs.
                wanted = local(cut_as(wanted, here_one))
                here_part = torch.zeros_like(wanted) if a is None else local(a)
                yield Compared(
                    f"this rank's part of the gradient of {own}", here_part, wanted, max(floor, norms[place])
                )
                continue
            ours_whole = torch.zeros_like(whole) if a is None else full_tensor(a)
            if own and self._is_summed(name, own):
                ours_whole = ours_whole.clone()
                dist.all_reduce(ours_whole, group=self.group)
            if place == 0 and not own and self._comes_split(name) and not is_cut:
                wanted = self._part(wanted)
            fix = self._fix_of(name, own) if own and not is_cut else ""
            yield Compared(f"the gradient of {own or f'argument {place}'}", ours_whole, wanted, floor, LIMIT, fix)

    def _other_leaves(self, ends: Sequence[torch.Tensor], known: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Leaves besides those that are known, down to which a backward pass has to run on all ranks."""
        return []

    def _fix_of(self, name: str, own: str) -> str:
        """The line to write if the gradient of a parameter differs."""
        return ""

    def _fix_of_output(self, name: str, found: torch.Tensor, expected: torch.Tensor) -> str:
        """The line to write if an output differs."""
        return ""


class TensorUnits(WholeUnits):
    """The probe of `tensor_parallel`; its units are those of `units_around`."""

    cause = "features of different ranks are mixed between a column layer and a row layer"
    fix = (
        "leave the layers around it out of the plan: they stay whole on every rank\n"
        "            model, loader, ctx = weft.keyed_dropout(model, loader, ctx)  # first, for dropout"
    )

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        group: dist.ProcessGroup,
        options: TensorOptions,
        own_hooks: Collection[int],
    ) -> None:
        """Find the units.

        Args:
            module: With its layers cut.
            mesh: Of one axis.
            group: Its ranks.
            options: As the layers were cut.
            own_hooks: What tensor parallelism has attached, by id.
        """
        # Between the blocks each rank has a part of the sequence, and whatever a block does is done to a part.
        apart = {name: style for name, style in options.styles.items() if name not in options.inside}
        units = units_around(module, apart) | {name: module.get_submodule(name) for name in options.blocks}
        super().__init__(units, group)
        self.spare: nn.Module | None = module
        self._mesh = mesh
        self._options = options
        self._own_hooks = frozenset(own_hooks)

    @override
    def equal_inputs(self, name: str, args: Args, kwargs: Kwargs) -> Any:
        """All arguments, but for the part of the sequence that each rank holds."""
        found = list(tensors((args, kwargs)))
        at = _first_float(found) if self._comes_split(name) and name != self._options.blocks[0] else None
        return [tensor for place, tensor in enumerate(found) if place != at]

    def watching(self, refuse: Callable[[str], None]) -> AbstractContextManager[None]:
        """Around a call in whose backward pass what lies between column and row layers gets gradients from them alone.

        See `part_uses.py`.
        """
        styles = {name: _word(style) for name, style in self._options.styles.items()}
        module = self._unit("")
        columns = [module.get_submodule(name) for name, word in styles.items() if word in _COLUMNS]
        rows = [module.get_submodule(name) for name, word in styles.items() if word in _ROWS]
        return watched(columns, rows, refuse)

    @override
    def measure(self, name: str, args: Args, kwargs: Kwargs, *, gradients: bool) -> Iterator[Compared]:
        """Compare as the base class does: a few rows, and all of them if these differ or cannot be computed.

        Yields:
            One pair after the other.
        """
        try:  # as many rows as come to each rank, which computes them with all features
            found = super().measure(name, *_first_rows((args, kwargs), self._mesh.size()), gradients=gradients)
            pairs = list(found)
            worst = max((difference(one) / one.limit for one in pairs), default=0.0)
        except (RuntimeError, ValueError, TypeError, IndexError):
            pairs, worst = [], 2.0
        # A program that says how many rows there are computes something else for others.
        device = next(p.device for p in self._unit("").parameters() if not p.is_meta)
        if largest_over(self.group, [worst], device)[0] > 1:
            pairs = list(super().measure(name, args, kwargs, gradients=gradients))
        yield from pairs

    @override
    def _undivided(self, name: str) -> AbstractContextManager[None]:
        return hooks_off(self._unit(name), lambda _, hook: id(hook) in self._own_hooks)

    @override
    def _is_summed(self, name: str, own: str) -> bool:
        return f"{name}.{own}".lstrip(".") in self._options.summed

    # A sequence of which each rank holds a part.

    @override
    def _comes_split(self, name: str) -> bool:
        return name in self._options.blocks

    @override
    def _part(self, whole: torch.Tensor, dim: int = 1) -> torch.Tensor:
        return whole.narrow(dim, *chunk(whole.shape[dim], self._mesh.size(), self._mesh.get_local_rank()))

    @override
    def _as_found(self, name: str, number: int, found: torch.Tensor, expected: torch.Tensor) -> _Cut:
        """The part of a sequence that a block leaves; of the heads of a rank, as in a cache, besides the first output.

        To the program goes no part, which it would take for the whole.
        """
        if isinstance(found, DTensor) or found.dim() != expected.dim():
            return same
        if number == 0 and name in self._options.blocks:
            return self._part
        if number == 0 or not name:
            return same
        dims = [dim for dim in range(found.dim()) if found.shape[dim] != expected.shape[dim]]
        return partial(self._part, dim=dims[0]) if len(dims) == 1 else same

    @override
    def _fix_of_output(self, name: str, found: torch.Tensor, expected: torch.Tensor) -> str:
        columns = [one for one, style in self._options.styles.items() if style == "column" and is_in(one, name)]
        if found.shape == expected.shape or not columns:
            return ""
        return f'plan={{..., "{columns[-1]}": "gather"}}  # or "vocab": logits for weft.collectives.vocab_cross_entropy'

    @override
    def _fix_of(self, name: str, own: str) -> str:
        assert self.spare is not None
        if self._is_summed(name, own):
            return (
                f'leave "{f"{name}.{own}".strip(".").rpartition(".")[0]}" out of the plan: it stays whole on every rank'
            )
        kind = type(self._unit(name))
        alike = {name, *(n for n, unit in self.units.items() if type(unit) is kind and not self._is_summed(n, own))}
        return plan_line(self.spare, [f"{one}.{own}".lstrip(".") for one in alike], self._options.styles)

    def line_for(self, names: Collection[str]) -> str:
        """The line to write if gradients of whole parameters differ between the ranks."""
        assert self.spare is not None
        if all(any(is_in(name, unit) for unit in self.units) for name in names):
            return plan_line(self.spare, names, self._options.styles)
        return BETWEEN_BLOCKS if self._options.blocks else self.fix

    @override
    def _joined(self, tensor: torch.Tensor, name: str, call: Any) -> torch.Tensor:
        """A copy of an argument; the first one is joined over the ranks, if each has a part of the sequence."""
        given = list(tensors(call))
        at = _first_float(given) if self._comes_split(name) else None
        if at is None or given[at] is not tensor or isinstance(tensor, DTensor):
            return full_tensor(tensor).clone()
        return torch.cat(gathered(tensor.detach().contiguous(), self.group), 1)


def same(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself."""
    return tensor


def _first_float(given: list[torch.Tensor]) -> int | None:
    return next((place for place, tensor in enumerate(given) if tensor.is_floating_point()), None)


def gathers(hook: Any) -> bool:
    """Whether a hook gathers parameters for FSDP2, which are there already, or looks whether they are its own."""
    return str(getattr(hook, "__module__", "")).startswith(_OF_FSDP)
