"""See every operation of a program: what it allocates and sends. In simulations, and in real runs."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import SourceFileLoader
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from weft import torch_internals
from weft.engines.torch.steps.local import LocalSteps
from weft.private_names import replaced
from weft.rehearsal.memory import Moment
from weft.rehearsal.messages import Message
from weft.rehearsal.simulation.allocations import Allocations
from weft.rehearsal.simulation.messages import Traffic, functional_spaces, summed

Call = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]


class _Part(NamedTuple):
    label: str
    event: int  # the first one of the memory
    message: int


class ProgramObserver:
    """What is known of a program.

    Attributes:
        allocations: Its memory.
        traffic: Its messages.
    """

    def __init__(self) -> None:
        self.allocations = Allocations()
        self.traffic = Traffic()
        self._parts: list[_Part] = []
        self._end = self._stepped = self._next_part("")
        self._ends_in_step = False
        self._apart: weakref.WeakSet[LocalSteps] = weakref.WeakSet()

    def begin(self, label: str) -> None:
        """The next part of the program: "build", "step 1", ..., "exchange"."""
        self._settle()
        self._parts.append(self._next_part(label))
        self.allocations.computes = label.startswith("step")

    def _next_part(self, label: str) -> _Part:
        return _Part(label, len(self.allocations.events), len(self.traffic.noted))

    def _settle(self) -> None:
        self.allocations.look_at_modules()
        gc.collect()  # what only a cycle keeps is freed at some time, which is not the program's

    def look_at_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer steps: what it keeps, and whether `local_steps` follows its steps."""
        self.allocations.look_at_optimizer(optimizer)
        owners = (getattr(hook, "__self__", None) for hook in torch_internals.STEP_POST_HOOKS.of(optimizer).values())
        self._apart.update(each for each in owners if isinstance(each, LocalSteps) and each.ranks_apart > 1)

    def exchange(self) -> None:
        """What ranks that step apart exchange now and then, also if the steps that were made did not come to it."""
        if self._apart:
            self.begin("exchange")
        for each in self._apart:
            each.exchange()

    def stepped(self) -> None:
        """The optimizer has stepped."""
        self._stepped = self._next_part("")

    def end(self) -> None:
        """The program is over; what happens from now on does not count."""
        self._settle()
        self._end = self._next_part("")

    def end_in_step(self, *, is_open: bool) -> None:
        """The program is over, and has let everything go: its last step ended when the optimizer had stepped.

        Args:
            is_open: It has begun another one.
        """
        del self._parts[len(self._parts) - is_open :]
        self._end, self._ends_in_step = self._stepped, True

    def moments(self) -> tuple[Moment, ...]:
        """The memory of each part."""
        bounds = [part.event for part in (*self._parts, self._end)]
        labels = [part.label for part in self._parts]
        return self.allocations.moments(labels, bounds, ends_in_step=self._ends_in_step)

    def messages(self, axes: dict[str, int], per_node: int) -> tuple[tuple[Message, ...], ...]:
        """Those before the last step, those of the last step, and those of the exchange, if there was one."""
        begins = {part.label: part.message for part in self._parts}
        exchange = begins.pop("exchange", self._end.message)
        step = max(begins.values())
        noted = self.traffic.noted
        parts = noted[:step], noted[step:exchange], noted[exchange : self._end.message]
        return tuple(summed(part, axes, per_node) for part in parts)


class Observer(torch_internals.dispatch_mode.base):  # type: ignore[misc, name-defined]
    """Passes every operation to `call`, and notes what comes of it."""

    def __init__(self, found: ProgramObserver, call: Call) -> None:
        super().__init__()
        self._found = found
        self._call = call
        self._fake, self._leaves = torch_internals.fake_tensor.found, torch_internals.tree.found.tree_leaves
        self._messages = ("c10d", *functional_spaces())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is not self._fake and hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # its parts come by themselves
        if func.namespace in self._messages:
            self._found.traffic.see(func, args)
        out = self._call(func, args, kwargs or {})
        for leaf in (out,) if isinstance(out, torch.Tensor) else self._leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._found.allocations.see(leaf)
        if func is torch.ops.aten.add_.Tensor and _is_accumulating():
            self._found.allocations.name("gradients", out)  # perhaps of a parameter that no module has at a step's end
        return out


def _is_accumulating() -> bool:
    """Whether autograd adds to a gradient, which may be of parameters that a strategy has gathered."""
    node: Any = torch_internals.current_node()
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


@contextlib.contextmanager
def _unseen_parts() -> Iterator[None]:
    """Let code that is no part of the program have tensors as ever, without anybody looking."""
    with _nobody_looks():  # it imports modules: torch's own of DTensor take half a second
        places = (
            torch_internals.propagate.home,  # DTensor finds out the shapes of results, of tensors in whole
            (SourceFileLoader, "exec_module"),  # modules that are imported meanwhile stay when this is over
            torch_internals.worker_loop.home,  # workers of loaders are copies of this process,
            torch_internals.try_get.home,  # which receives what they make
        )
    with contextlib.ExitStack() as stack:
        for owner, name in places:
            stack.enter_context(replaced(owner, **{name: _unseen(getattr(owner, name))}))
        yield


def _unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # pickled by its name, if workers are spawned
    def call(*args: Any, **kwargs: Any) -> Any:
        with _nobody_looks():
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def _nobody_looks() -> Iterator[None]:
    with torch_internals.without_modes(), torch_internals.without_functions():
        yield


@contextlib.contextmanager
def _nothing_freed_by_chance() -> Iterator[None]:
    """Free what cycles keep when a part of the program ends, and not at some time; look at new objects alone."""
    was_enabled, is_frozen = gc.isenabled(), bool(gc.get_freeze_count())
    gc.disable()
    if not is_frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not is_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def observing(found: ProgramObserver, call: Call = lambda func, args, kwargs: func(*args, **kwargs)) -> Iterator[None]:
    """Note what the program does that runs inside."""

    def look(optimizer: Any, *_: Any) -> None:
        found.look_at_optimizer(optimizer)

    resize: Any = torch.UntypedStorage.resize_

    def resize_(self: Any, size: int) -> Any:
        result = resize(self, size)
        found.allocations.resized(self)
        return result

    with (
        register_optimizer_step_pre_hook(look),
        register_optimizer_step_post_hook(look),
        replaced(torch.UntypedStorage, resize_=resize_),
        _nothing_freed_by_chance(),
        _unseen_parts(),
        Observer(found, call),
    ):
        yield
