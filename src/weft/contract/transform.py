"""`@transform`: a function that keeps the rules of the package; and `compose`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, ParamSpec, TypeVar, cast, overload

import torch
from torch import nn

from weft.context import Applied, DistContext
from weft.contract.marks import MARKS, Mark, Marks, check_known, marks_of
from weft.contract.protocols import Chooses
from weft.contract.rules import Part, Phase, Rules
from weft.engines.probes import Probe
from weft.errors import AlreadyApplied, NameChanged, OrderError, listed, type_error
from weft.peers.agreement import disagree
from weft.peers.ledger import Ledger
from weft.peers.world import GroupHolder
from weft.tensors.nested import leaves

P = ParamSpec("P")


R = TypeVar("R")
T = TypeVar("T")
_SHORT = 40  # characters of an option that is written out in a line to paste


def transform(
    *,
    phase: Phase | None = None,
    changes: Part = Part.ALL,
    before: AbstractSet[str] | None = None,
    after: AbstractSet[str] | None = None,
    excludes: AbstractSet[str | Phase] | None = None,
    collective: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function `f(obj, ..., ctx, *, options) -> (obj, ..., ctx')` a transform.

    The function itself checks its arguments, calls `ctx.agree(...)` if it is collective, does its
    work, and returns the objects and `ctx`, or `ctx.offering(...)`. The record in `ctx.applied`
    is added here.

    Changes: nothing but what the function changes, plus a mark on each object. Collectives: none.

    Args:
        phase: When it is applied to an object, among the transforms that change the same parts of it.
        changes: What it changes of an object. Of two transforms that change different parts, either may come first.
        before: Names of transforms that, on the same object, may only come later, whatever their phase.
        after: Names of transforms that, on the same object, may only come earlier, whatever their phase.
        excludes: Transforms that cannot be applied to the same object: names, or a phase for those of it that change
            the same parts.
        collective: The function calls `ctx.agree`; a failure before that is reported to the peers.

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
        rules = Rules(
            name=fn.__name__,
            phase=phase,
            changes=changes,
            before=frozenset(before or ()),
            after=frozenset(after or ()),
            excludes=frozenset(excludes or ()),
        )
        signature = inspect.signature(fn)
        given = _objects_before_ctx(fn.__name__, signature)
        call = ("weft." if fn.__module__.startswith("weft.") else "") + fn.__name__

        @functools.wraps(fn)
        def applied(*args: P.args, **kwargs: P.kwargs) -> R:
            bound = _bound(call, signature, args, kwargs)
            line = _line(call, signature, given, bound.arguments)
            ctx, objects, options = _split(rules.name, line, given, bound.arguments)
            if collective:
                ctx.check_unrestricted(rules.name)  # the peers are not here: nothing is reported to them
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
                if collective and ctx.world.meetings == meetings:
                    disagree(ctx.world, error)
                raise
            return cast("R", (*returned, _record(rules, line, options, objects, returned, next_ctx)))

        return applied

    return decorate


def _bound(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.BoundArguments:
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        unknown = [n for n in kwargs if n not in signature.parameters]
        problem = f"got an unexpected keyword argument {unknown[0]!r}" if unknown else str(error)
        needed = [p.name for p in signature.parameters.values() if p.default is p.empty]
        call = ", ".join(
            n if signature.parameters[n].kind is not inspect.Parameter.KEYWORD_ONLY else f"{n}=..." for n in needed
        )
        raise type_error(
            f"{name}: {problem}",
            found=f"{len(args)} arguments by position, and by name: {listed(kwargs) or 'none'}",
            expected=f"{name}{signature.replace(return_annotation=signature.empty)}",
            fix=f"{name}({call})",
        ) from None
    bound.apply_defaults()
    return bound


def _objects_before_ctx(name: str, signature: inspect.Signature) -> list[str]:
    """The parameters before `ctx`: what the transform is applied to, and returns."""
    names = list(signature.parameters)
    if "ctx" not in names[1:]:
        raise type_error(
            f"transform: {name} takes no context after its objects",
            found=f"{name}({', '.join(names)})",
            expected="the objects, then `ctx`, then options",
            fix=f"def {name}(module, ctx, *, option=1): ...",
        )
    return names[: names.index("ctx")]


def _line(call: str, signature: inspect.Signature, given: Sequence[str], arguments: Mapping[str, Any]) -> str:
    """A call as a line of a program, with the options that have no default."""
    options = []
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            options.append(f"*{name}")
        elif parameter.default is parameter.empty and name not in (*given, "ctx"):
            text = _text(arguments[name])
            options.append(f"{name}={text if len(text) < _SHORT else name}")
    return f"{', '.join(given)}, ctx = {call}({', '.join([*given, 'ctx', *options])})"


def _split(
    name: str, line: str, given: Sequence[str], arguments: Mapping[str, Any]
) -> tuple[DistContext, list[object], dict[str, Any]]:
    """Sort a call's arguments into the context, the objects before it and the options after it."""
    ctx = arguments["ctx"]
    for key in (*given, "ctx"):
        _check_unpacked(name, arguments[key])
    check_context(name, ctx, fix=f"{line}  # with the ctx of weft.start()")
    options = {key: value for key, value in arguments.items() if key != "ctx" and key not in given}
    return ctx, _objects([arguments[key] for key in given]), options


def check_context(what: str, ctx: object, *, fix: str) -> None:
    """Raise a `TypeError` if this is not a context; `fix` is a line to write instead."""
    if not isinstance(ctx, DistContext):
        raise type_error(
            f"{what}: ctx = {ctx!r} is not a context",
            found=type(ctx).__name__,
            expected="the DistContext that weft.start() or the transform before returned",
            fix=fix,
        )


def _check_unpacked(name: str, value: Any) -> None:
    """Raise if a value is all that another transform returned."""
    whole = isinstance(value, tuple) and value and isinstance(value[-1], DistContext)
    made = [mark for obj in _objects(list(value[:-1])) for mark in marks_of(obj)] if whole else []
    if made:
        raise type_error(
            f"{name}: the result of {made[-1].rules.name} was not unpacked",
            found=f"a tuple ({', '.join(type(part).__name__ for part in value)})",
            expected="the objects and the next context",
            fix=f"{made[-1].line}  # unpack what it returns",
        )


def _objects(arguments: list[Any]) -> list[object]:
    """Flatten the objects a transform is applied to; several modules may come as one argument."""
    return [obj for _, obj in leaves(arguments, whole=dataclasses.is_dataclass)]


def _check(rules: Rules, obj: object, ctx: DistContext) -> None:
    """Raise if `rules.name` may not be applied to `obj` now."""
    kind = type(obj).__name__
    marks = marks_of(obj)
    done = [mark.rules.name for mark in marks]
    for mark in marks:
        other = mark.rules
        if other.name == rules.name:
            raise AlreadyApplied(
                f"{rules.name}: this {kind} already has this transform",
                found=str(mark.record),
                expected="each transform at most once per object",
                fix=f"leave one of the two calls of {rules.name} out",
            )
        if rules.cannot_meet(other):
            raise OrderError(
                f"{rules.name}: cannot be combined with {other.name} on one {kind}",
                found=f"applied so far: {listed(done)}",
                expected=f"either {rules.name} or {other.name}",
                fix=f"leave {other.name} or {rules.name} out",
            )
        if rules.must_precede(other):
            raise OrderError(
                f"{rules.name}: comes too late, after {other.name}",
                found=f"applied so far: {listed(done)}",
                expected=f"{rules.name}, then {other.name}",
                fix=f"move the call of {rules.name} before that of {other.name}",
            )
    check_known(obj, ctx, what=rules.name)


def _results(name: str, given: Sequence[str], result: object) -> tuple[Any, ...]:
    """The objects and the context that a transform returned."""
    if isinstance(result, tuple) and len(result) == len(given) + 1 and isinstance(result[-1], DistContext):
        return result
    kinds = [type(part).__name__ for part in result] if isinstance(result, tuple) else [type(result).__name__]
    raise type_error(
        f"{name}: a transform returns its objects and the next context",
        found=", ".join(kinds),
        expected=f"a tuple of {len(given)} and a DistContext",
        fix=f"return {', '.join(given)}, ctx",
    )


def _record(
    rules: Rules, line: str, options: dict[str, Any], given: list[object], returned: list[Any], ctx: DistContext
) -> DistContext:
    """Write the application into the context and onto the returned objects."""
    objects = [obj for obj in _objects(returned) if hasattr(obj, "__dict__")]
    record = Applied(
        name=rules.name,
        options=tuple((key, _text(value)) for key, value in options.items()),
        targets=tuple(type(obj).__name__ for obj in objects),
        refs=tuple(weakref.ref(obj) for obj in objects),
        chosen="; ".join(offer.chosen for offer in ctx.handed_over if isinstance(offer, Chooses) and offer.chosen),
    )
    mark = Mark(record, rules, line, (*ctx.handed_over, *_probers(rules.name, objects, ctx)))
    for offer in ctx.handed_over:
        if isinstance(offer, GroupHolder):
            ctx.world.root.holders.add(offer)
    histories = {id(old): marks_of(old) for old in given}
    for index, obj in enumerate(objects):
        # A loader comes back as a new object, which keeps the history of the old one.
        before = histories.get(id(obj)) or (marks_of(given[index]) if len(given) == len(objects) else ())
        obj.__dict__[MARKS] = Marks((*before, mark))
    return dataclasses.replace(ctx, applied=(*ctx.applied, record), handed_over=())


def _probers(name: str, objects: Sequence[object], ctx: DistContext) -> list[object]:
    """Attach the probes that a transform offers to its module."""
    probes = [offer for offer in ctx.handed_over if isinstance(offer, Probe)]
    modules = [obj for obj in objects if isinstance(obj, nn.Module)]
    if not probes or ctx.world.group is None:
        return []
    from weft.engines.torch.probes.runner import Prober  # noqa: PLC0415  (numpy and functorch are there)

    peers = Ledger(ctx.world, name)
    return [Prober(name, module, probe, ctx.probes, peers, ctx.device) for probe in probes for module in modules]


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
        f"{name}: changed the {what} of the module",
        found=changes,
        expected="a transform leaves class, names, their order and state_dict keys alone",
        fix=f"return the same module from {name}, with hooks instead of wrappers",
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
