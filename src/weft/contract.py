"""What a transform is. This file is the whole extension guide.

A transform is a function `f(obj, ..., ctx, *, options) -> (obj, ..., ctx')` that takes plain torch
objects and returns plain torch objects. `@transform` makes it keep the rules:

1.  Once: a second application to the same object raises `AlreadyApplied`.
2.  In order: `before` and `after` name transforms it must precede or follow, `excludes` those it
    cannot be combined with; anything else raises `OrderError` and names the right order.
3.  With the right context: the one that the transform before returned, or `StaleContext`.
4.  Names stay: parameter names and order, state_dict keys and the class of a module.
5.  On all ranks: if one rank refuses, all raise (`collective=True`; see `DistContext.agree`).

[Note: how rooms meet] What was applied is written in two places: a record in `ctx.applied`, which
is a value, and a mark on the object, which holds what the transform offers to later ones. Offers
are small protocols: `accumulate_grads` asks for every `GradSync` on a module and does not know
who offered it. There is nothing to register.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar, cast, overload, runtime_checkable

import torch
from torch import nn

from weft.context import Applied, DistContext
from weft.context.world import compare, disagree, exchange
from weft.errors import (
    AlreadyApplied,
    ContextError,
    ContractError,
    NameChanged,
    OrderError,
    StaleContext,
    listed,
    message,
)

__all__ = [
    "ComputesAlone",
    "GradSync",
    "KeepsParameters",
    "ReducesIn",
    "Stateful",
    "Undoable",
    "agree_on_parameters",
    "applied_to",
    "check_data_axes",
    "check_known",
    "check_methods",
    "check_not_elsewhere",
    "check_not_wrapped",
    "check_whole",
    "compose",
    "forget",
    "offered",
    "transform",
    "wrapper_of_torch",
]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


# -- the protocols by which rooms meet ---------------------------------------------------------------


@runtime_checkable
class GradSync(Protocol):
    """Offered by transforms that reduce gradients over ranks in backward.

    Outside of a window every backward pass reduces the gradients. A window of micro-batches is three events,
    the same ones on every rank.

    What may also have an attribute `owes`, whether no backward pass has reduced the gradients of the running window,
    is safe in a window of several modules: all ranks then have to owe the same.

    Attributes:
        mean_over: Number of ranks over which gradients are averaged; 1 if they are summed.
    """

    mean_over: int

    def begin_window(self) -> None:
        """A window begins: until the next event, backward passes keep their gradients on this rank."""

    def last_backward(self) -> None:
        """The next backward pass is the last one of the window: it reduces the gradients of all of them."""

    def end_window(self, *, left: bool = False) -> None:
        """The window is over, and backward passes reduce again.

        Args:
            left: It was left early, by `break` or an exception, perhaps on this rank alone: nothing may be sent now.
                Otherwise gradients that no backward pass has reduced are reduced now, by the messages of a
                backward pass, so that a rank that skipped its last micro-batch meets one that did not.
        """


@runtime_checkable
class ReducesIn(Protocol):
    """Offered by transforms that choose the dtype in which gradients travel.

    Attributes:
        reduce_dtype: The dtype; None: that of the gradient.
    """

    reduce_dtype: torch.dtype | None


@runtime_checkable
class Stateful(Protocol):
    """Anything with `state_dict` and `load_state_dict`: schedulers, loaders, averages, your own."""

    def state_dict(self) -> Mapping[str, Any]:
        """What has to survive: nested dicts, lists and tuples of tensors, numbers, strings, None."""
        ...

    def load_state_dict(self, state: Any, /) -> object:
        """Go on from it."""


@runtime_checkable
class Undoable(Protocol):
    """Offered by transforms that can be taken back."""

    def undo(self) -> None:
        """Leave the object as it was before the transform."""


@runtime_checkable
class KeepsParameters(Protocol):
    """Offered by transforms that keep parameters or their state elsewhere than in module and optimizer.

    Attributes:
        elsewhere: Whether the module has no values of its parameters between steps.
    """

    elsewhere: bool

    def parameter_shards(self) -> dict[str, torch.Tensor]:
        """Values of the parameters that the module itself has none of, by name, cut over the ranks; a collective."""
        ...

    def parameters_changed(self, shards: Mapping[str, torch.Tensor]) -> None:
        """Take new values: from `shards` for the parameters named there, else from the module; a collective."""

    def state_layout(self, name: str) -> torch.Tensor | None:
        """A tensor without values, cut up as the optimizer's state of this parameter is to be given."""

    def gathered(self, *, write: bool) -> AbstractContextManager[None]:
        """A context in which the module has all parameters whole."""
        ...

    def full_gradient(self, name: str) -> torch.Tensor | None:
        """The whole gradient of a parameter, None if it has none; a collective."""


@runtime_checkable
class ComputesAlone(Protocol):
    """Offered by transforms under which calling a module takes all ranks, but need not while parameters are whole."""

    def alone(self) -> AbstractContextManager[None]:
        """A context in which calls without gradients make no collectives."""
        ...


@runtime_checkable
class _Holder(Protocol):
    def release(self) -> None: ...


# -- marks on objects --------------------------------------------------------------------------------

_MARKS = "_weft_marks"


class _Mark(NamedTuple):
    record: Applied
    rules: _Rules
    offers: tuple[object, ...]


class _Marks:
    """What was applied to one object; a copy or a pickle of the object starts with none."""

    def __init__(self, marks: tuple[_Mark, ...] = ()) -> None:
        self.marks = marks

    def __deepcopy__(self, memo: dict[int, Any]) -> _Marks:
        return _Marks()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Marks, ()


def _marks_of(obj: object) -> tuple[_Mark, ...]:
    held = getattr(obj, "__dict__", {}).get(_MARKS)
    return held.marks if isinstance(held, _Marks) else ()


def applied_to(obj: object) -> tuple[Applied, ...]:
    """The records of the transforms that were applied to an object, in order, as they are written on it."""
    return tuple(mark.record for mark in _marks_of(obj))


def offered(obj: object, kind: Callable[..., T]) -> list[T]:
    """Find what the transforms applied to `obj` offer, by protocol.

    Changes: nothing. Collectives: none.

    Args:
        obj: A module, an optimizer, a loader.
        kind: A protocol such as `GradSync`, or any class.

    Returns:
        The offers that fulfil it, in the order of application.

    Example:
        >>> offered(nn.Linear(2, 2), GradSync)
        []
    """
    # `type[T]` in the signature would be truer, but mypy takes no protocol for one.
    wanted = cast("type[T]", kind)
    return [offer for mark in _marks_of(obj) for offer in mark.offers if isinstance(offer, wanted)]


# -- the decorator -----------------------------------------------------------------------------------


class _Rules(NamedTuple):
    name: str
    before: frozenset[str]
    after: frozenset[str]
    excludes: frozenset[str]
    collective: bool


def transform(
    *,
    before: set[str] | None = None,
    after: set[str] | None = None,
    excludes: set[str] | None = None,
    collective: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function `f(obj, ..., ctx, *, options) -> (obj, ..., ctx')` a transform.

    The function itself checks its arguments, calls `ctx.agree(...)` if it is collective, does its
    work, and returns the objects and `ctx`, or `ctx.offering(...)`. The record in `ctx.applied`
    is added here.

    Changes: nothing but what the function changes, plus a mark on each object. Collectives: none.

    Args:
        before: Names of transforms that, on the same object, may only come later.
        after: Names of transforms that, on the same object, may only come earlier.
        excludes: Names of transforms that cannot be applied to the same object.
        collective: The function calls `ctx.agree`; a failure before that is told to the peers.

    Returns:
        A decorator that keeps the signature.

    Raises:
        TypeError: The decorated function has no `ctx` after its objects; when it is called, its
            result is not the objects and a context.

    Example:
        >>> import weft
        >>> @transform(before={"replicate"})
        ... def freeze_bias(module: nn.Module, ctx: DistContext) -> tuple[nn.Module, DistContext]:
        ...     for name, parameter in module.named_parameters():
        ...         parameter.requires_grad_("bias" not in name)
        ...     return module, ctx
        >>> model, ctx = freeze_bias(nn.Linear(2, 2), weft.local())
        >>> [record.name for record in ctx.applied]
        ['freeze_bias']
    """

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        rules = _Rules(
            name=fn.__name__,
            before=frozenset(before or ()),
            after=frozenset(after or ()),
            excludes=frozenset(excludes or ()),
            collective=collective,
        )
        signature = inspect.signature(fn)
        given = _objects_before_ctx(fn.__name__, signature)
        call = ("weft." if fn.__module__.startswith("weft.") else "") + fn.__name__

        @functools.wraps(fn)
        def applied(*args: P.args, **kwargs: P.kwargs) -> R:
            bound = _bound(call, signature, args, kwargs)
            ctx, objects, options = _split(rules.name, given, bound.arguments)
            if rules.collective:
                ctx.check_unrestricted(rules.name)  # the peers are not here: they need not be told
            meetings = ctx.world.meetings
            try:
                for obj in objects:
                    _check(rules, obj, ctx)
                names = [_names(obj) for obj in objects]
                *returned, next_ctx = _results(rules.name, given, fn(*args, **kwargs))
                for old, new in zip(names, _objects(returned), strict=False):
                    _check_names(rules.name, old, new)
            except Exception as error:
                # The peers are waiting in `agree`, unless this rank came that far.
                if rules.collective and ctx.world.meetings == meetings:
                    disagree(ctx.world, error)
                raise
            ctx = _record(rules, options, objects, returned, next_ctx)
            result = Transformed((*returned, ctx))
            result.made_by = rules.name
            result.fix = f"{', '.join(given)}, ctx = {call}({', '.join(given)}, ctx)"
            return cast("R", result)

        return applied

    return decorate


class Transformed(tuple[Any, ...]):  # noqa: SLOT001  (a tuple has none)
    """What a transform returns: a plain tuple, but for an error that says so where it is taken for the object."""

    made_by = fix = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Refuse.

        Raises:
            TypeError: Always.
        """
        raise self.error(TypeError, "was called")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self.error(AttributeError, f"has no {name!r}")

    def error(self, kind: type[Exception], what: str) -> Exception:
        """The error for one that was taken for something else."""
        return kind(
            message(
                f"the result of {self.made_by} {what}",
                found=f"a tuple ({', '.join(type(part).__name__ for part in self)})",
                expected="the objects and the next context, unpacked",
                fix=self.fix,
            )
        )


def _bound(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.BoundArguments:
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        needed = [p.name for p in signature.parameters.values() if p.default is p.empty]
        call = ", ".join(
            n if signature.parameters[n].kind is not inspect.Parameter.KEYWORD_ONLY else f"{n}=..." for n in needed
        )
        raise TypeError(
            message(
                f"{name}: {error}",
                found=f"{len(args)} arguments by position, and by name: {listed(kwargs) or 'none'}",
                expected=f"{name}{signature.replace(return_annotation=signature.empty)}",
                fix=f"{name}({call})",
            )
        ) from None
    bound.apply_defaults()
    return bound


def _objects_before_ctx(name: str, signature: inspect.Signature) -> list[str]:
    """The parameters before `ctx`: what the transform is applied to, and returns."""
    names = list(signature.parameters)
    if "ctx" not in names[1:]:
        raise TypeError(
            message(
                f"transform: {name} takes no context after its objects",
                found=f"{name}({', '.join(names)})",
                expected="the objects, then `ctx`, then options",
                fix=f"def {name}(module, ctx, *, option=1): ...",
            )
        )
    return names[: names.index("ctx")]


def _split(
    name: str, given: Sequence[str], arguments: Mapping[str, Any]
) -> tuple[DistContext, list[object], dict[str, Any]]:
    """Sort a call's arguments into the context, the objects before it and the options after it."""
    ctx = arguments["ctx"]
    if isinstance(ctx, Transformed):
        raise ctx.error(TypeError, f"was given to {name}")
    if not isinstance(ctx, DistContext):
        raise TypeError(
            message(
                f"{name}: ctx = {ctx!r} is not a context",
                found=type(ctx).__name__,
                expected="the DistContext that weft.start() or the transform before returned",
                fix=f"{name}(..., ctx)",
            )
        )
    whole = [arguments[key] for key in given if isinstance(arguments[key], Transformed)]
    if whole:
        raise whole[0].error(TypeError, f"was given to {name}")
    options = {key: value for key, value in arguments.items() if key != "ctx" and key not in given}
    return ctx, _objects([arguments[key] for key in given]), options


def _objects(arguments: list[Any]) -> list[object]:
    """Flatten the objects a transform is applied to; several modules may come as one argument."""
    found: list[object] = []
    for argument in arguments:
        if isinstance(argument, Mapping):
            found += _objects(list(argument.values()))
        elif isinstance(argument, (list, tuple)):
            found += _objects(list(argument))
        else:
            found.append(argument)
    return found


def _check(rules: _Rules, obj: object, ctx: DistContext) -> None:
    """Raise if `rules.name` may not be applied to `obj` now."""
    kind = type(obj).__name__
    marks = _marks_of(obj)
    done = [mark.rules.name for mark in marks]
    for mark in marks:
        other = mark.rules
        if other.name == rules.name:
            raise AlreadyApplied(
                message(
                    f"{rules.name}: this {kind} has it already",
                    found=str(mark.record),
                    expected="each transform at most once per object",
                    fix=f"leave one of the two calls of {rules.name} out",
                )
            )
        if other.name in rules.excludes or rules.name in other.excludes:
            raise OrderError(
                message(
                    f"{rules.name}: cannot be combined with {other.name} on one {kind}",
                    found=f"applied so far: {listed(done)}",
                    expected=f"either {rules.name} or {other.name}",
                    fix=f"leave {other.name} or {rules.name} out",
                )
            )
        if other.name in rules.before or rules.name in other.after:
            raise OrderError(
                message(
                    f"{rules.name}: comes too late, after {other.name}",
                    found=f"applied so far: {listed(done)}",
                    expected=f"{rules.name}, then {other.name}",
                    fix=f"move the call of {rules.name} before that of {other.name}",
                )
            )
    missing = [mark.record for mark in marks if not any(known is mark.record for known in ctx.applied)]
    if missing:
        raise StaleContext(
            message(
                f"{rules.name}: the context does not know what was done to this {kind}",
                found=f"applied to the object: {listed(done)}; not in ctx.applied: {listed(r.name for r in missing)}",
                expected="the context that the last transform returned",
                fix=f"obj, ctx = {missing[-1].name}(obj, ctx); obj, ctx = {rules.name}(obj, ctx)",
            )
        )


def _results(name: str, given: Sequence[str], result: object) -> tuple[Any, ...]:
    """The objects and the context that a transform returned."""
    if isinstance(result, tuple) and len(result) == len(given) + 1 and isinstance(result[-1], DistContext):
        return result
    kinds = [type(part).__name__ for part in result] if isinstance(result, tuple) else [type(result).__name__]
    raise TypeError(
        message(
            f"{name}: a transform returns its objects and the next context",
            found=", ".join(kinds),
            expected=f"a tuple of {len(given)} and a DistContext",
            fix=f"return {', '.join(given)}, ctx",
        )
    )


def _record(
    rules: _Rules, options: dict[str, Any], given: list[object], returned: list[Any], ctx: DistContext
) -> DistContext:
    """Write the application into the context and onto the returned objects."""
    objects = [obj for obj in _objects(returned) if hasattr(obj, "__dict__")]
    record = Applied(
        name=rules.name,
        options=tuple((key, _text(value)) for key, value in options.items()),
        targets=tuple(type(obj).__name__ for obj in objects),
        refs=tuple(weakref.ref(obj) for obj in objects),
    )
    mark = _Mark(record, rules, ctx.handed_over)
    for offer in ctx.handed_over:
        if isinstance(offer, _Holder):
            ctx.world.root.holders.add(offer)
    histories = {id(old): _marks_of(old) for old in given}
    for index, obj in enumerate(objects):
        # A loader comes back as a new object, which goes on with the history of the old one.
        before = histories.get(id(obj)) or (_marks_of(given[index]) if len(given) == len(objects) else ())
        obj.__dict__[_MARKS] = _Marks((*before, mark))
    return replace(ctx, applied=(*ctx.applied, record), handed_over=())


def _text(value: object) -> str:
    """An option as text that is the same in every process."""
    if isinstance(value, type) or inspect.isfunction(value):
        return value.__qualname__
    if isinstance(value, (nn.Module, torch.optim.Optimizer)):
        return type(value).__name__
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(key)}: {_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(map(_text, value)) + ")"
    if isinstance(value, (set, frozenset)):
        return "(" + ", ".join(sorted(map(_text, value))) + ")"
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text


# -- names stay --------------------------------------------------------------------------------------


def _names(obj: object) -> dict[str, Any] | None:
    if not isinstance(obj, nn.Module):
        return None
    return {
        "class": type(obj),
        "parameters": [name for name, _ in obj.named_parameters()],
        "buffers": [name for name, _ in obj.named_buffers()],
        "state_dict keys": list(obj.state_dict(keep_vars=True)),
    }


def _check_names(name: str, old: dict[str, Any] | None, obj: object) -> None:
    new = _names(obj)
    if old is None or new is None:
        return
    if not issubclass(new["class"], old["class"]):
        _raise_changed(name, "class", [old["class"].__name__], [new["class"].__name__])
    for what in ("parameters", "buffers", "state_dict keys"):
        if old[what] != new[what]:
            _raise_changed(name, what, old[what], new[what])


def _raise_changed(name: str, what: str, old: list[str], new: list[str]) -> None:
    lost, added = [n for n in old if n not in new], [n for n in new if n not in old]
    changes = f"gone: {listed(lost) or 'none'}; new: {listed(added) or 'none'}" if lost or added else "another order"
    raise NameChanged(
        message(
            f"{name}: changed the {what} of the module",
            found=changes,
            expected="a transform leaves class, names, their order and state_dict keys alone",
            fix=f"return the same module from {name}, with hooks instead of wrappers",
        )
    )


def forget(obj: object, ctx: DistContext, names: Collection[str] | None = None) -> DistContext:
    """Take the marks of transforms off an object and give the context without their records.

    For transforms that take others back. A record that also concerns another module stays in the
    context, for that one; else the marks it left on optimizers and loaders go.

    Changes: marks on `obj` and on what was transformed together with it. Collectives: none.

    Args:
        obj: What is to be as if the transforms had not been applied.
        ctx: The context that knows them.
        names: Only these transforms; default: all.

    Returns:
        `ctx` with fewer records.

    Raises:
        StaleContext: `ctx` does not know one of them.

    Example:
        >>> import weft
        >>> model, ctx = weft.replicate(nn.Linear(2, 2), weft.local())
        >>> forget(model, ctx).applied
        ()
    """
    check_known(obj, ctx, names)
    gone = [mark.record for mark in _marks_of(obj) if names is None or mark.record.name in names]
    dropped = []
    for record in gone:
        others = [one for one in (ref() for ref in record.refs) if one is not None and one is not obj]
        shared = any(isinstance(one, nn.Module) for one in others)
        for one in [obj] if shared else [obj, *others]:
            left = tuple(mark for mark in _marks_of(one) if mark.record is not record)
            one.__dict__[_MARKS] = _Marks(left)
            if not left:
                del one.__dict__[_MARKS]
        if not shared:
            dropped.append(record)
    return replace(ctx, applied=tuple(r for r in ctx.applied if not any(r is one for one in dropped)))


def check_known(obj: object, ctx: DistContext, names: Collection[str] | None = None) -> None:
    """Check that a context knows what was done to an object; see `forget`.

    Changes: nothing. Collectives: none.

    Args:
        obj: What transforms were applied to.
        ctx: The context that should know them.
        names: Only these transforms; default: all.

    Raises:
        StaleContext: It does not know one of them.

    Example:
        >>> import weft
        >>> check_known(nn.Linear(2, 2), weft.local())
    """
    records = [mark.record for mark in _marks_of(obj) if names is None or mark.record.name in names]
    missing = [record.name for record in records if not any(known is record for known in ctx.applied)]
    if missing:
        raise StaleContext(
            message(
                f"the context does not know what was done to this {type(obj).__name__}",
                found=f"missing in ctx.applied: {listed(missing)}",
                expected="the context that the last transform returned",
                fix="pass that context on",
            )
        )


# -- help for transforms -----------------------------------------------------------------------------


def agree_on_parameters(what: str, module: nn.Module, ctx: DistContext, facts: Mapping[str, object]) -> None:
    """As `ctx.agree`, and every rank has the same parameters and buffers.

    Changes: nothing. Collectives: none; meetings through the store.

    Raises:
        ContextError: Names, shapes, dtypes or requires_grad differ; the text names the first.
        PeerError: Another rank failed, died, or did not come.
    """
    if ctx.world_size == 1 or ctx.world.store is None:
        return
    layout = dict(_layout(module))
    digest = hashlib.sha256(repr(layout).encode()).hexdigest()[:16]
    world = ctx.require_collective(what)
    entries = exchange(world, what, {"call": what, **facts, "layout of the module": digest})
    if any(entry["layout of the module"] != digest for entry in entries):
        # Only now, when something is wrong, send the long form around.
        compare(f"{what} of {type(module).__name__}", exchange(world, what, layout))
    compare(what, entries)


def _layout(module: nn.Module) -> Iterator[tuple[str, str]]:
    for name, parameter in module.named_parameters():
        kind = "trained" if parameter.requires_grad else "frozen"
        yield name, f"{tuple(parameter.shape)} {parameter.dtype} {kind}"
    for name, buffer in module.named_buffers():
        yield name, f"{tuple(buffer.shape)} {buffer.dtype} buffer"


def check_methods(what: str, module: nn.Module, methods: Sequence[str]) -> None:
    """Raise if one of `methods` is not a method of `module` besides forward.

    Raises:
        ValueError: An unknown name, `forward` itself, or one name twice.
    """
    wrong = [name for name in methods if name == "forward" or not callable(getattr(module, name, None))]
    twice = sorted({name for name in methods if list(methods).count(name) > 1})
    if wrong or twice:
        raise ValueError(
            message(
                f"{what}: methods = {list(methods)} cannot be used",
                found=listed(repr(name) for name in [*wrong, *twice]),
                expected=f"methods of {type(module).__name__} other than forward, each once",
                fix=f"weft.{what}(module, ctx, methods=())",
            )
        )


def wrapper_of_torch(module: nn.Module) -> str | None:
    """The name of torch's wrapper that `module` is, if it reduces gradients by itself."""
    names = {cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith("torch.")}
    found = names & {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
    return next(iter(found), None)


def check_not_wrapped(what: str, module: nn.Module) -> None:
    """Raise if torch reduces the gradients of `module`, or of a part of it, already.

    Raises:
        AlreadyApplied: The text names the wrapper.
    """
    for name, part in module.named_modules():
        wrapper = wrapper_of_torch(part)
        if wrapper not in (None, "FSDPModule"):  # that is no wrapper: its parameters tell that they are sharded
            raise AlreadyApplied(
                message(
                    f"{what}: torch's {wrapper} reduces these gradients already",
                    found=f"{name or 'the module itself'} is a {wrapper}",
                    expected=f"the plain module: {what} takes the place of {wrapper}",
                    fix=f"model, ctx = weft.{what}(model{'.' + name if name else ''}.module, ctx)",
                )
            )


def check_not_elsewhere(what: str, module: nn.Module, why: str) -> None:
    """Raise if a part of `module` has no values of its parameters between steps; see `KeepsParameters`.

    Raises:
        OrderError: One has none; the text names the transform that made it so.
    """
    for part in module.modules():
        for mark in _marks_of(part):
            if any(isinstance(offer, KeepsParameters) and offer.elsewhere for offer in mark.offers):
                raise OrderError(
                    message(
                        f"{what}: cannot be combined with {mark.record.name} on one {type(part).__name__}",
                        found=str(mark.record),
                        expected=f"{what} on parameters that are there between steps: {why}",
                        fix='weft.zero_partition(model, optimizer, ctx, stage=3, engine="torch")',
                    )
                )


def check_data_axes(what: str, ctx: DistContext, names: Sequence[str]) -> None:
    """Raise if a strategy over these axes would leave gradients of different batches unaveraged.

    Args:
        what: Name of the transform, for the error text.
        ctx: Where we run.
        names: The axes over which it averages gradients.

    Raises:
        ContextError: It leaves a data axis out.
    """
    sizes = dict(ctx.axes)
    left_out = [name for name in ctx.data_axes if name not in names and sizes.get(name, 1) > 1]
    if left_out:
        given, missing = ", ".join(map(repr, names)), " and ".join(map(repr, left_out))
        needed = ", ".join(repr(name) for name, _ in ctx.axes if name in names or name in left_out)
        raise ContextError(
            message(
                f"{what}: batches differ along {missing}, where gradients would not be averaged",
                found=f"axis={given}; data axes {', '.join(map(repr, ctx.data_axes))}",
                expected="a strategy over all data axes: one copy of the model, and every batch counts",
                fix=f"weft.{what}(..., axis=({needed})), or weft.start(mesh=..., data_axes=({given},)) if the batches "
                f"along {missing} are the same",
            )
        )


def check_whole(what: str, module: nn.Module, ctx: DistContext) -> None:
    """Raise if parameters of `module` are cut over ranks already.

    Raises:
        AlreadyApplied: By FSDP2, which keeps all of them.
        ContractError: By something else, such as torch's `parallelize_module`.
    """
    cut = {name: p for name, p in module.named_parameters() if ctx.engine.is_sharded(p)}
    if not cut:
        return
    kind = type(module).__name__
    if ctx.engine.is_fsdp(module):
        raise AlreadyApplied(
            message(
                f"{what}: parameters of {kind} are sharded already",
                found=listed(cut),
                expected="each parameter in one sharded or replicated module: the outermost",
                fix=f"call weft.{what} once, on the whole model, which nobody has sharded",
            )
        )
    axes = dict.fromkeys(ctx.engine.axes_of(p) for p in cut.values())
    raise ContractError(
        message(
            f"{what}: parameters of {kind} are DTensors already, cut over {listed(axes)}",
            found=f"{listed(cut)}; by torch's parallelize_module or distribute_tensor, say",
            expected="plain parameters: weft does not yet combine its strategies with parameters cut over another axis",
            fix="torch.distributed.fsdp.fully_shard(model, mesh=ctx.mesh['data']), which does",
        )
    )


@overload
def compose() -> Callable[[T, DistContext], tuple[T, DistContext]]: ...
@overload
def compose(
    *transforms: Callable[[T, DistContext], tuple[T, DistContext]],
) -> Callable[[T, DistContext], tuple[T, DistContext]]: ...
@overload
def compose(*transforms: Callable[..., tuple[Any, Any, Any, *tuple[Any, ...]]]) -> Callable[..., tuple[Any, ...]]: ...
def compose(*transforms: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Chain transforms into one; the first one given is applied first.

    Changes: nothing by itself. Collectives: those of the parts.

    Args:
        transforms: Functions `(obj, ..., ctx) -> (obj, ..., ctx')`; fix options with
            `functools.partial`.

    Returns:
        One function of the same form; it raises what the parts raise.

    Example:
        >>> import weft
        >>> from functools import partial
        >>> prepare = compose(partial(weft.with_precision, policy="bf16"), weft.replicate)
        >>> model, ctx = prepare(nn.Linear(2, 2), weft.local())
        >>> [record.name for record in ctx.applied]
        ['with_precision', 'replicate']
    """

    def composed(*arguments: Any) -> tuple[Any, ...]:
        result: tuple[Any, ...] = arguments
        for one in transforms:
            result = one(*result)
        return result

    return composed
