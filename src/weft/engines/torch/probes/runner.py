"""Run the probe of one transform: when a unit is called, compare what goes in, and measure what it computes.

[Note: where a probe runs] Inputs are compared before all else, so that nothing is sent that does not fit. What a unit
computes is measured at once after its forward, inside of its hooks: strategies that come later have gathered its
parameters, and no hooks on it are called again. Of the hooks in it, those run again that returned something. From
outside it is measured before its forward, without hooks that never returned anything, and once more after it if now
they do.

[Note: units that are not seen] What is compiled calls no hook: before it, the whole module runs once more, uncompiled.
If the layers of a unit are called past its forward, the whole module is measured in place of it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from weft import torch_internals
from weft.engines.probes import Compared, OnlyInParts, Probe, ProbeMode, Schedule, StagesProbe, WatchingProbe
from weft.engines.torch.hooks.function_transforms import in_torch_func
from weft.engines.torch.hooks.method_hooks import Attached, already_compiled, attach, route_calls
from weft.engines.torch.probes.compare import (
    OF_PARTS,
    difference,
    differing_ranks,
    is_of_parts,
    largest_over,
    returned_tensors,
)
from weft.engines.torch.probes.no_trace import copied, is_measured, measured, no_trace, zeros_filled
from weft.engines.torch.probes.repeated_hooks import hooks_of_user, hooks_off, quiet_hooks
from weft.engines.torch_errors import mixed_kinds_error
from weft.errors import ProbeFailed, listed
from weft.peers.ledger import Ledger
from weft.private_names import replaced
from weft.tensors.dtensor import is_fsdp_unit
from weft.tensors.nested import leaves, tensors
from weft.tensors.remote_parameter import is_elsewhere

_Call = tuple[tuple[Any, ...], dict[str, Any]]
_Found = tuple[float, Compared]  # how many times the limit it differs
_TIED = 0.999  # of the largest difference


class Prober(Attached):
    """The probe of one transform on a module."""

    def __init__(
        self, what: str, module: nn.Module, probe: Probe, mode: ProbeMode, peers: Ledger, device: torch.device
    ) -> None:
        """Attach it to the units.

        Args:
            what: Name of the transform.
            module: Its object.
            probe: What it offers.
            mode: As for `weft.start`.
            peers: To tell the ranks outside of the group of the probe.
            device: Of this rank.
        """
        self._what = what
        self._class_name = type(module).__name__
        self._probe = probe
        self._peers = peers
        self._device = device
        self.schedule = Schedule(mode, list(probe.units))
        self._due: dict[str, int] = {}
        self._called: set[str] = set()
        self._loud: list[Any] = []  # hooks of the user that return something
        self._rehearses: bool | None = None  # a call before that of a compiled module; with gradients or without
        self._calls = Schedule(mode, [""])
        self._all_due = 0
        self._module = weakref.ref(module)
        super().__init__()
        if mode == "off" or peers.pretended:
            return
        for name, unit in probe.units.items():
            if probe.outside:
                route_calls(unit, self._removable, partial(self._from_outside, name))
                continue
            attach(unit, self._removable, before=partial(self._before, name), first=True)
            attach(unit, self._removable, around=partial(self._around, name), methods=["forward"])
        if probe.spare is not None:
            route_calls(module, self._removable, self._told)
            attach(module, self._removable, around=self._around_forward, methods=["forward"])

    # -- the calls of a unit; see [Note: where a probe runs] ---------------------------------------

    def _from_outside(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        unit = self._probe.units[name]
        # A call of a pipeline with gradients computes those of its whole batch.
        in_stages = isinstance(self._probe, StagesProbe) or not any(map(is_elsewhere, unit.parameters()))
        skips = torch.compiler.is_compiling() or not in_stages
        number = 0 if skips else self._is_due(name, args, kwargs)
        if not number:
            return call(*args, **kwargs)
        # Hooks that have not returned anything yet may be those that are not called again.
        quiet = {id(hook) for hook in hooks_of_user(unit) if not any(hook is one for one in self._loud)}
        given = copied((args, kwargs))
        try:
            later = self._measure(name, copied(given), number, quiet)
        except OF_PARTS as error:
            if not is_of_parts(error):
                raise
            likely = f"; likely, {self._probe.cause}" if isinstance(error, OnlyInParts) else ""
            if not likely:
                call(*args, **kwargs)  # which may be what is wrong
            raise self._error(
                name,
                found=f"{_line(error)}, for a part of this batch",
                expected=f"a part can be computed as well{likely}",
            ) from error
        with quiet_hooks(unit) as still_quiet:
            output = call(*args, **kwargs)
        new = [hook for hook in hooks_of_user(unit) if id(hook) in quiet and id(hook) not in still_quiet]
        if new:
            self._loud += new
            if not any(map(is_fsdp_unit, unit.modules())):  # whose parameters are on their way to a backward pass
                later = self._measure(name, given, number, still_quiet)
        if later:
            needs = [n for n, one in enumerate(returned_tensors(output, numbers=False)) if one.requires_grad]
            self._judge(name, [(times, one) for times, one in later if one.trained in needs])
        return output

    def _told(self, call: Any, args: Any, kwargs: Any) -> Any:
        try:
            return self._around_all(call, args, kwargs)
        except RuntimeError as error:
            mixed = mixed_kinds_error(error, in_forward=True)
            if mixed is None:
                raise
            raise mixed from error

    def _around_all(self, call: Any, args: Any, kwargs: Any) -> Any:
        """Let a module with compiled parts run once before its call; see [Note: units that are not seen]."""
        module = self._module()
        skips = torch.compiler.is_compiling() or is_measured() or self._rehearses is not None
        if module is None or skips or _is_simulated(args, kwargs):
            return call(*args, **kwargs)
        number = self._all_due = self._calls.is_due("", _kind(module, args, kwargs))
        self._called.clear()  # before the hooks of the module, which may be a unit itself
        if number and already_compiled(module):
            self._rehearse(module, args, kwargs)
            self._all_due = 0
        elif number and isinstance(self._probe, WatchingProbe) and torch.is_grad_enabled():
            refuse = weakref.WeakMethod(self._refuse_use)  # the graph, which has it, may outlive the module
            with self._probe.watching(lambda found: None if (alive := refuse()) is None else alive(found)):
                return call(*args, **kwargs)
        return call(*args, **kwargs)

    def _refuse_use(self, found: str) -> None:
        raise self._error("", found=found, expected=f"what one process computes; likely, {self._probe.cause}")

    def _around_forward(self, call: Any, args: Any, kwargs: Any) -> Any:
        """Measure the whole module if the layers of a unit were called past its forward."""
        number, self._all_due = self._all_due, 0
        module = self._module()
        if not number or module is None or any(map(is_elsewhere, module.parameters())):
            return call(*args, **kwargs)
        given = copied((args, kwargs))
        output = call(*args, **kwargs)
        if self._probe.units.keys() - self._called:
            self._measure("", given, number)
        return output

    def _rehearse(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        rehearses = replaced(self, _rehearses=torch.is_grad_enabled())
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        with rehearses, no_trace(module), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            functional_call(module, buffers, *copied((args, kwargs)))

    def _before(self, name: str, unit: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._called.add(name)
            number = self._is_due(name, args, kwargs)
            elsewhere = set(map(is_elsewhere, unit.parameters())) if number and self._probe.spare is not None else ()
            self._due[name] = 0 if elsewhere == {True} else number
            if len(elsewhere) > 1:
                raise self._error(
                    name,
                    found="layers that belong together, in no smaller module; a pipeline calls them in its stages",
                    expected="a module around them, which is inside of one stage",
                    fix="block = nn.Sequential(up, nn.ReLU(), down)  # one for each of them, before the transforms",
                )

    def _is_due(self, name: str, args: Any, kwargs: Any) -> int:
        """Count a call, and compare what goes in with that of the others if it is measured; its number, or 0."""
        # In a backward pass it is a block that is computed again.
        if is_measured() or torch_internals.graph_task_id() != -1 or _is_simulated(args, kwargs) or in_torch_func():
            return 0
        number = self.schedule.is_due(name, _kind(self._probe.units[name], args, kwargs))
        if number:
            self._check_inputs(name, self._probe.equal_inputs(name, args, kwargs))
        return number

    def _around(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        number = 0 if torch.compiler.is_compiling() else self._due.pop(name, 0)
        if not number:
            return call(*args, **kwargs)
        given = copied((args, kwargs))
        with quiet_hooks(self._probe.units[name]) as quiet:
            try:
                output = call(*args, **kwargs)
            except OF_PARTS as error:
                if not is_of_parts(error) or not self._works_alone(name, given):
                    raise
                raise self._error(
                    name, found=_line(error), expected="what one process returns: there the same call works"
                ) from error
        try:
            self._measure(name, given, number, quiet)
        except OF_PARTS as error:
            if not is_of_parts(error):
                raise
            if not _holds_tensors(args, kwargs):  # as a cache of earlier calls does, filled with this rank's part
                raise self._error(
                    name, found=_line(error), expected="a call that one process can make as well, and twice"
                ) from error
        return output

    def _works_alone(self, name: str, given: _Call) -> bool:
        try:
            with self._isolated(name), torch.no_grad():
                self._probe.alone(name, *given)
        except OF_PARTS:
            return False
        return True

    def _measure(self, name: str, given: _Call, number: int, quiet: Collection[int] = ()) -> list[_Found]:
        """Compare; what matters only for outputs that need gradients is returned."""
        gradients = number == 1 and (self._rehearses or torch.is_grad_enabled())
        with self._isolated(name, quiet):
            pairs = self._probe.measure(name, *given, gradients=gradients)
            found = [(difference(one) / one.limit, one) for one in pairs]
            self.schedule.note(name, ((one.what, times) for times, one in found if one.trained is None))
            self._judge(name, [one for one in found if one[1].trained is None])
        return [one for one in found if one[1].trained is not None]

    @contextlib.contextmanager
    def _isolated(self, name: str, quiet: Collection[int] = ()) -> Iterator[None]:
        """Around what a probe runs."""
        unit, outside = self._probe.units.get(name, self._probe.spare), self._probe.outside
        assert unit is not None
        eager = torch.compiler.set_stance("force_eager") if already_compiled(unit) else contextlib.nullcontext()
        own = None if outside else unit
        with (
            measured(),
            eager,
            no_trace(unit),
            zeros_filled(unit),
            hooks_off(unit, lambda part, hook: part is own or id(hook) in quiet),
        ):
            if own is not None:
                torch_internals.COMPILED_CALL.set(own, None)  # and what is around its calls, outside of its hooks
            yield

    # -- what is wrong ------------------------------------------------------------------------------

    def _judge(self, name: str, found: list[_Found]) -> None:
        """Raise on all ranks if something differs on one of them, by more than its limit."""
        here = max((times for times, _ in found), default=0.0)
        (everywhere,) = largest_over(self._probe.group, [here], self._device)
        if everywhere <= 1:
            return
        text, limit, fix = f"a difference on another rank, {everywhere:.2g} times the limit", "the limit", ""
        if here > 1:
            # A weight and its bias may differ by the same: rounding does not decide which of them is named.
            times, worst = next(pair for pair in found if pair[0] >= _TIED * here)
            limit, fix = f"{worst.limit:g}", worst.fix
            text = _difference(worst, times * worst.limit)
        raise self._error(name, found=text, expected=f"at most {limit}; likely, {self._probe.cause}", fix=fix)

    def _check_inputs(self, name: str, value: Any) -> None:
        group = self._probe.group
        if group is None:
            return
        ranks = differing_ranks(value, group, self._device)
        if ranks:
            others = [dist.get_global_rank(group, rank) for rank in ranks]
            here = ", ".join(f"{tuple(t.shape)} {str(t.dtype)[6:]}" for t in tensors(value))
            raise self._error(
                name,
                found=f"other values or shapes on rank {listed(others)} than on {dist.get_global_rank(group, 0)}; "
                f"on this rank: {here}",
                expected="equal inputs on all ranks that compute it together",
                fix="loader, ctx = weft.shard_data(loader, ctx)  # the same batches; "
                "for dropout, model, loader, ctx = weft.keyed_dropout(model, loader, ctx)",
            )

    def _error(self, name: str, *, found: str, expected: str, fix: str = "") -> ProbeFailed:
        part = f"{name} of {self._class_name}" if name else self._class_name
        error = ProbeFailed(
            f"{self._what}: the ranks do not compute together what {part} is for one process",
            found=found,
            expected=expected,
            fix=fix or self._probe.fix,
        )
        self._peers.report(error)
        return error


def _kind(unit: nn.Module, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Calls of another kind may take another way through forward."""
    first = next((t.dtype for t in tensors((args, kwargs)) if t.is_floating_point()), None)
    return unit.training, torch.is_grad_enabled(), first, torch.is_autocast_enabled()


def _is_simulated(args: Any, kwargs: Any) -> bool:
    return any(torch_internals.fake_tensor.holds(t) or t.is_meta for t in tensors((args, kwargs)))


def _holds_tensors(args: Any, kwargs: Any) -> bool:
    """Whether an object among the arguments holds some."""
    objects = [leaf for _, leaf in leaves((args, kwargs)) if not isinstance(leaf, torch.Tensor)]
    return bool(returned_tensors(objects, numbers=False))


def _line(error: Exception) -> str:
    raised = error.__cause__ if isinstance(error, OnlyInParts) else error
    return f"{type(raised).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _difference(one: Compared, relative: float) -> str:
    found, expected = one.found.detach().double(), one.expected.detach().double()
    if found.shape != expected.shape:
        return f"{one.what} has shape {tuple(found.shape)} together, {tuple(expected.shape)} in one process"
    is_one = found.numel() == 1
    here, alone = (float(value if is_one else value.norm()) for value in (found, expected))
    shape, unit = ("", "itself") if is_one else (f" {tuple(found.shape)}", "its norm")
    return f"{one.what}{shape} differs by {relative:.2g} of {unit}: {here:.6g} together, {alone:.6g} in one process"
