"""The trained parameters of a module: which of them got a gradient, and which gradients were not reduced."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from weft import torch_internals
from weft.engines.torch.hooks.every_optimizer import parameters_of
from weft.engines.torch.hooks.method_hooks import Removable
from weft.engines.torch.hooks.parameter_watch import ParameterWatch
from weft.engines.torch.hooks.program_lines import strategy_line
from weft.engines.torch.steps.watch import check_same_gradients
from weft.errors import ContractError, listed
from weft.peers.ledger import Ledger

if TYPE_CHECKING:  # asking whether a parameter is reduced needs none of it
    from weft.engines.options import ReduceOptions

_RARELY = 16  # calls of a module
Arrive = weakref.WeakMethod[Callable[[int], None]]


class TrainedParameters:
    """The trained parameters of one module.

    Attributes:
        by_name: Those that are guarded.
        parameters: The same ones, in their order.
        got: Byte i is 1 when parameter i got a gradient.
        pending: Whether `.grad` holds gradients of a window that were not reduced; see [Note: pending gradients].
        watch: What the module's parameters were when they were last looked at.
    """

    def __init__(self, what: str, module: nn.Module, options: ReduceOptions) -> None:
        self.watch = ParameterWatch(what, module)
        self._apart = options.apart
        self._flat = options.flat
        self.by_name: dict[str, nn.Parameter] = {}
        self._agreed: set[str] = set()  # the same, and those that other ranks have
        self.parameters: list[nn.Parameter] = []
        self.got = bytearray()
        self.pending = False
        self._nothing = b""
        self._guards = Removable()
        self._unreduced_versions: int | None = None
        self._left_versions: int | None = None
        self._node: Any = None  # that adds up the gradient of the first one; torch's reducer waits at these
        self._address = self._calls = 0

    def take(self, named: Mapping[str, nn.Parameter], flag: bytearray, arrive: Arrive) -> None:
        """Guard these parameters from now on; `arrive` learns that the first gradient has reached parameter i."""
        self.release()
        self.by_name, self.parameters = dict(named), list(named.values())
        self._agreed = {*named, *self.watch.there}
        self.got, self._nothing = bytearray(len(named)), bytes(len(named))
        for index, parameter in enumerate(self.parameters):
            guard = _guard(flag, self.got, arrive, index)
            self._guards.add(parameter.register_post_accumulate_grad_hook(guard).remove)
        self._calls = 0
        if self.parameters:
            self._node, self._address = _gradient_node(self.parameters[0]), self.parameters[0].data_ptr()

    def agreed_anew(self, module: nn.Module, peers: Ledger) -> list[bool]:
        """Notice that others are trained now, and agree about them. Collectives: then, two meetings.

        Returns:
            Which ranks have pending gradients of those before; nothing if these are still the ones.
        """
        if not self.pending:  # once per window: this runs in each forward pass, and layers are rarely added
            self.watch.check_same(module)
        if not self.watch.changed_flags():
            return []
        self.watch.look(module)
        every = {*self.watch.trained, *self.watch.there}
        if not every or every == self._agreed:
            return []  # frozen as a whole: nothing reaches its parameters until it is unfrozen
        entries = self.watch.agree(peers, pending=self.has_pending())
        return [entry["pending"] for entry in entries]

    def checked(self, what: str, class_name: str) -> nn.Parameter | None:
        """The first of them, if none was converted or moved, and be it back again: the reducer would miss gradients.

        To look at the node takes longer than to look at the address, which may be what it was.

        Raises:
            ContractError: They were.
        """
        if self._flat or not self.parameters:
            return self.first()  # that the buffer is left is seen before it is sent
        first, calls, self._calls = self.parameters[0], self._calls, self._calls + 1
        if (
            (first.data_ptr() != self._address or calls % _RARELY == 0)
            and first.requires_grad
            and None not in (self._node, node := _gradient_node(first))
            and node is not self._node
        ):
            raise ContractError(
                f"{what}: {class_name} was moved or converted after {what}",
                found=f"parameters in {first.dtype} on {first.device}, which are not where they were",
                expected=f"model.to(...), .double(), .half(), .cpu() before {what}; gradients would not be averaged",
                fix=f"model.to(...); {strategy_line(what)}  # in this order; or weft.undo before it",
            )
        return first

    def release(self) -> None:
        """Take the guards off."""
        self._guards.remove()

    def first(self) -> nn.Parameter | None:
        """The first of them, which a backward pass reaches last as a rule."""
        return self.parameters[0] if self.parameters else None

    def same_on_all(self) -> dict[str, nn.Parameter]:
        """Those of which each rank holds the same, by name: where fewer ranks add up, the others have other parts."""
        apart = self._apart
        return {name: p for name, p in self.by_name.items() if name not in apart or apart[name].scale == 1}

    def together(self) -> dict[str, nn.Parameter]:
        """Those whose gradients are not reduced apart from the others, by name."""
        return {name: p for name, p in self.by_name.items() if name not in self._apart}

    def forget(self) -> None:
        """Begin to note anew which parameters get gradients."""
        self.got[:] = self._nothing

    def missing(self) -> list[str]:
        """Names of those that got no gradient."""
        return [] if all(self.got) else [name for name, got in zip(self.by_name, self.got, strict=True) if not got]

    def reached(self) -> list[str]:
        """Names of those that got one."""
        return [name for name, got in zip(self.by_name, self.got, strict=True) if got]

    def drop_frozen(self) -> None:
        """Those that were frozen since forward have no gradient, as in one process, and not the one of zeros sent."""
        if all(map(operator.attrgetter("requires_grad"), self.parameters)):  # as nearly always
            return
        for p in self.parameters:
            if not p.requires_grad and p.grad is not None and not p.grad.any():
                p.grad = None

    @contextlib.contextmanager
    def unfrozen(self) -> Iterator[None]:
        """Let all of them take gradients, also those that were frozen since."""
        flags = [p.requires_grad for p in self.parameters]
        for p in self.parameters:
            p.requires_grad_(True)  # noqa: FBT003  (torch's signature)
        yield
        for p, flag in zip(self.parameters, flags, strict=True):
            p.requires_grad_(flag)

    # -- gradients that were not reduced ---------------------------------------------------------

    def has_pending(self) -> bool:
        """Whether there are gradients that were not reduced."""
        return self.pending and any(p.grad is not None for p in self.parameters)

    def note_pending(self) -> None:
        """A backward pass has ended without a reduction."""
        self.pending = True
        self._unreduced_versions = self._versions()

    def note_reduced(self) -> None:
        """One has ended with it."""
        self.forget()
        self.pending = False
        self._unreduced_versions = None

    def note_left(self) -> None:
        """A window is left early."""
        self._left_versions = self._gradient_versions() if self.pending else None

    def are_as_left(self) -> bool:
        """Whether gradients are what they were when the window was left."""
        return self._left_versions == self._gradient_versions()

    def were_stepped(self) -> bool:
        """Whether parameters were changed while their gradients had not been reduced."""
        if self._unreduced_versions is None:
            return False
        stepped = self._versions() != self._unreduced_versions and self.has_pending()
        if stepped:
            self._unreduced_versions = None
        return stepped

    def check_same_gradients(self, what: str, optimizer: torch.optim.Optimizer, peers: Ledger) -> None:
        """Raise if gradients that `optimizer` is about to use differ between the ranks; a meeting.

        Args:
            what: Name of the strategy.
            optimizer: About to step.
            peers: The same strategy on the other ranks.
        """
        held = set(map(id, parameters_of(optimizer)))
        ours = [(name, p) for name, p in self.same_on_all().items() if id(p) in held]
        if ours:  # also where none has a gradient: the other ranks may have some
            check_same_gradients(what, ours, peers)
        if any(p.grad is not None for _, p in ours):
            self.pending = False

    def _versions(self) -> int:
        return sum(map(operator.attrgetter(torch_internals.VERSION.name), self.parameters))

    def _gradient_versions(self) -> int:
        return sum(torch_internals.VERSION.of(p.grad) + 1 for p in self.parameters if p.grad is not None)


def _guard(flag: bytearray, got: bytearray, arrive: Arrive, index: int) -> Callable[[torch.Tensor], None]:
    """The hook of one parameter; it must not hold the reducer, which holds the parameter in C++."""

    def guard(parameter: torch.Tensor) -> None:
        if not flag[0]:
            call = arrive()
            if call is not None:
                call(index)
        got[index] = 1

    return guard


def _gradient_node(parameter: nn.Parameter) -> Any:
    """The node of the graph that adds up the gradient of a parameter; a parameter that is moved gets another one.

    None where nothing is added up: it is frozen, or a function of `torch.func` is computed.
    """
    with torch.enable_grad():
        grad_fn: Any = parameter.view_as(parameter).grad_fn
        return None if grad_fn is None else grad_fn.next_functions[0][0]


def is_reduced(parameter: nn.Parameter) -> bool:
    """Whether a reducer watches this parameter already."""
    hooks = torch_internals.ACCUMULATE_HOOKS.of(parameter) or {}
    return any(getattr(hook, "__qualname__", "") == "_guard.<locals>.guard" for hook in hooks.values())


def check_hooks(what: str, class_name: str, named: Iterable[tuple[str, nn.Parameter]], *, own: int = 0) -> None:
    """Raise if a hook waits for gradients that it would see before they are averaged over the ranks.

    Args:
        what: Name of the strategy, for errors.
        class_name: Of the module.
        named: Its parameters.
        own: Hooks that are ours, per parameter.

    Raises:
        ContractError: There is one.
    """
    hooked = [name for name, p in named if len(torch_internals.ACCUMULATE_HOOKS.of(p) or ()) > own]
    if hooked:
        raise ContractError(
            f"{what}: hooks on parameters of {class_name} would see the gradients of one rank",
            found=f"register_post_accumulate_grad_hook on {listed(hooked)}",
            expected="gradients are read and parameters are updated after backward, when gradients are averaged",
            fix="loss.backward(); optimizer.step()  # p.register_hook(...) to look at gradients of one rank",
        )
