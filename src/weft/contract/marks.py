"""What was applied to an object, and what it offers: the mark on the object."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

from torch import nn

from weft.context import Applied, DistContext
from weft.contract.rules import Rules
from weft.errors import StaleContext, listed

T = TypeVar("T")
MARKS = "_weft_marks"


class Mark(NamedTuple):
    """One transform on an object."""

    record: Applied
    rules: Rules
    line: str  # the call, in a program
    offers: tuple[object, ...]


class Marks:
    """What was applied to one object; a copy or a pickle of the object starts with none."""

    def __init__(self, marks: tuple[Mark, ...] = ()) -> None:
        self.marks = marks

    def __reduce__(self) -> tuple[Any, ...]:
        return Marks, ()


def marks_of(obj: object) -> tuple[Mark, ...]:
    """The transforms on an object, in order."""
    held = getattr(obj, "__dict__", {}).get(MARKS)
    return held.marks if isinstance(held, Marks) else ()


def applied_to(obj: object) -> tuple[Applied, ...]:
    """The records of the transforms that were applied to an object, in order, as they are written on it."""
    return tuple(mark.record for mark in marks_of(obj))


def offered(obj: object, kind: Callable[..., T]) -> list[T]:
    """Find what the transforms applied to `obj` offer, by protocol.

    Changes: nothing. Collectives: none.

    Args:
        obj: A module, an optimizer, a loader.
        kind: A protocol such as `GradSync`, or any class.

    Returns:
        The offers that fulfil it, in the order of application.

    Example:
        >>> import weft
        >>> offered(weft.local(), weft.contract.GradSync)
        []
    """
    # `type[T]` in the signature would be truer, but mypy takes no protocol for one.
    wanted = cast("type[T]", kind)
    return [offer for mark in marks_of(obj) for offer in mark.offers if isinstance(offer, wanted)]


def known_objects(ctx: DistContext) -> list[Any]:
    """What transforms that a context knows were applied to, as far as it lives; each once."""
    return list({id(obj): obj for record in ctx.applied for ref in record.refs if (obj := ref()) is not None}.values())


def known_modules(ctx: DistContext) -> list[nn.Module]:
    """The modules among them."""
    return [obj for obj in known_objects(ctx) if isinstance(obj, nn.Module)]


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
    gone = [mark.record for mark in marks_of(obj) if names is None or mark.record.name in names]
    dropped = []
    for record in gone:
        others = [one for one in (ref() for ref in record.refs) if one is not None and one is not obj]
        shared = any(isinstance(one, nn.Module) for one in others)
        for one in [obj] if shared else [obj, *others]:
            left = tuple(mark for mark in marks_of(one) if mark.record is not record)
            one.__dict__[MARKS] = Marks(left)
            if not left:
                del one.__dict__[MARKS]
        if not shared:
            dropped.append(record)
    return replace(ctx, applied=tuple(r for r in ctx.applied if not any(r is one for one in dropped)))


def check_known(obj: object, ctx: DistContext, names: Collection[str] | None = None, *, what: str = "") -> None:
    """Check that a context knows what was done to an object; see `forget`.

    Changes: nothing. Collectives: none.

    Args:
        obj: What transforms were applied to.
        ctx: The context that should know them.
        names: Only these transforms; default: all.
        what: Name of the function that asks, for the text.

    Raises:
        StaleContext: It does not know one of them.

    Example:
        >>> import weft
        >>> check_known(nn.Linear(2, 2), weft.local())
    """
    marks = [mark for mark in marks_of(obj) if names is None or mark.record.name in names]
    missing = [mark for mark in marks if not any(known is mark.record for known in ctx.applied)]
    if missing:
        raise StaleContext(
            f"{what}{': ' * bool(what)}the context does not know what was done to this {type(obj).__name__}",
            found=f"applied to the object: {listed(mark.rules.name for mark in marks)}; not in ctx.applied: "
            f"{listed(mark.rules.name for mark in missing)}",
            expected="the context that the last transform returned",
            fix=f"{missing[-1].line}  # pass this ctx on",
        )
