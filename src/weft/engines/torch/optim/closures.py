"""The closure that an optimizer's step may be given, as pre-hooks of the step see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from weft.errors import ContractError


def replace_closure(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], wrap: Callable[[Callable[[], Any]], Callable[[], Any]]
) -> Any:
    """What a pre-hook returns to let `step` have `wrap(closure)` in place of its closure; None without one."""
    positional = len(args) > 1  # args[0] is the optimizer itself
    closure = args[1] if positional else kwargs.get("closure")
    if not callable(closure):
        return None
    new = wrap(closure)
    return ((args[0], new, *args[2:]), kwargs) if positional else (args, {**kwargs, "closure": new})


def after_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[[], None]) -> Any:
    """Run a function when all gradients are there: after the closure if there is one, else at once."""

    def wrap(closure: Callable[[], Any]) -> Callable[[], Any]:
        def with_run() -> Any:
            loss = closure()
            run()
            return loss

        return with_run

    changed = replace_closure(args, kwargs, wrap)
    if changed is None:
        run()
    return changed


def check_no_closure(what: str, arguments: Iterable[object]) -> None:
    """Raise if `step` was called with a closure: it would see parts of the parameters.

    Raises:
        ContractError: It was.
    """
    if any(argument is not None for argument in arguments):
        raise ContractError(
            f"{what}: step() was called with a closure",
            found="optimizer.step(closure)",
            expected="backward first, then optimizer.step()",
            fix="loss = closure(); optimizer.step()",
        )
