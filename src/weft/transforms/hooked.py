"""`hooked`: your functions before and after the forward of chosen blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from torch import nn

from weft.context import DistContext
from weft.contract import transform
from weft.contract.select_modules import Selection, select
from weft.engines.torch.hooks.method_hooks import Attached, attach
from weft.errors import type_error, value_error

M = TypeVar("M", bound=nn.Module)
Before: TypeAlias = Callable[
    [nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None
]
After: TypeAlias = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]


@transform(collective=True)
def hooked(
    module: M,
    ctx: DistContext,
    *,
    blocks: Selection,
    before: Before | Sequence[Before] = (),
    after: After | Sequence[After] = (),
) -> tuple[M, DistContext]:
    """Call functions of yours around the forward of chosen blocks, until `weft.undo`.

    For what a strategy does not do: moving or casting what a block receives, measuring it, comparing it. One torch hook
    per block and side, however many functions there are. Parameters are complete and in place where a function runs,
    whether `fully_shard` comes before or after; with `recompute` each function runs once per call of the block.

    Source: the arguments are those of `torch.nn.Module.register_forward_pre_hook` and `register_forward_hook` with
    `with_kwargs=True`.

    Changes: hooks on the blocks; a copy or a pickle of `module` has none.
    Collectives: none; the ranks agree on the blocks through the store.

    Args:
        module: Contains the blocks.
        ctx: The current context.
        blocks: As for `weft.recompute`; blocks may lie inside each other.
        before: Functions (block, args, kwargs), called in this order before forward. One that returns (args, kwargs)
            replaces them; None leaves them.
        after: Functions (block, args, kwargs, output), called in this order after forward, with the arguments that
            forward was given. One that returns something replaces the output; None leaves it.

    Returns:
        `module` itself, and `ctx` with this transform in `applied`.

    Raises:
        AlreadyApplied: It was applied before; give it several functions instead.
        TypeError: Something given is no function or chooses no blocks; in forward, if a function of `before` returns
            something else than a pair.
        ValueError: No such block, or no function.
        ContextError: The ranks hook different blocks.
        PeerError: Another rank failed.

    Example:
        >>> import torch, weft
        >>> seen = []
        >>> model, ctx = weft.hooked(
        ...     nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)),
        ...     weft.local(),
        ...     blocks=nn.Linear,
        ...     after=lambda block, args, kwargs, output: seen.append(tuple(output.shape)),
        ... )
        >>> _ = model(torch.ones(4, 2))
        >>> seen
        [(4, 3), (4, 1)]
    """
    first, last = _functions("before", before), _functions("after", after)
    if not first and not last:
        raise value_error(
            "hooked: no function to call",
            found="neither before= nor after=",
            expected="one or several functions",
            fix="weft.hooked(model, ctx, blocks=..., before=lambda block, args, kwargs: print(args[0].shape))",
        )
    chosen = select("hooked", module, blocks)
    # A function may communicate, and a block that one rank alone hooks would wait for the others.
    ctx.agree("hooked", {"blocks": list(chosen), "functions": (len(first), len(last))})
    return module, ctx.offering(_Hooked(chosen, first, last))


class _Hooked(Attached):
    """The hooks of one call of `hooked`."""

    def __init__(self, blocks: dict[str, nn.Module], before: tuple[Before, ...], after: tuple[After, ...]) -> None:
        super().__init__()
        self._before, self._after = before, after
        for block in blocks.values():
            # Innermost: `fully_shard` gathers in the first hook and frees in the last one.
            if before:
                attach(block, self._removable, before=self._enter)
            if after:
                attach(block, self._removable, after=self._leave, after_first=True, after_kwargs=True)

    def _enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for function in self._before:
            result = function(block, args, kwargs)
            if result is None:
                continue
            if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
                raise type_error(
                    f"hooked: a function of before= returned {type(result).__name__} for {type(block).__name__}",
                    found=repr(result)[:80],
                    expected="None, or a pair of the arguments by position and those by name",
                    fix="return args, kwargs",
                )
            args, kwargs = result
        return args, kwargs

    def _leave(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        for function in self._after:
            result = function(block, args, kwargs, output)
            output = output if result is None else result
        return output


def _functions(name: str, given: Any) -> tuple[Any, ...]:
    functions = (given,) if callable(given) else tuple(given) if isinstance(given, Sequence) else None
    if functions is None or not all(callable(one) for one in functions):
        raise type_error(
            f"hooked: {name} is no function",
            found=repr(given)[:80],
            expected="a function, or several in a list",
            fix=f"weft.hooked(model, ctx, blocks=..., {name}=[first, second])",
        )
    return functions
