"""`assemble`: the usual transforms in their order, in one call that shows the lines it stands for.

Nothing happens here that the lines do not say: each is one call of a public transform.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, Literal, TypedDict, Unpack, cast, overload

import torch
from torch import nn
from typing_extensions import TypeVar

from weft.context import DistContext
from weft.contract import offered
from weft.contract.select_modules import Selection
from weft.errors import type_error, value_error
from weft.precision import PolicyName, Precision, PrecisionOffer
from weft.transforms.accumulate_grads import accumulate_grads
from weft.transforms.compile import compile as compile_module
from weft.transforms.fully_shard import fully_shard
from weft.transforms.recompute import recompute as recompute_blocks
from weft.transforms.replicate import replicate
from weft.transforms.shard_data import shard_data
from weft.transforms.skip_nonfinite import skip_nonfinite
from weft.transforms.with_precision import with_precision

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", default=None)  # noqa: E741  (as in the transforms)
Strategy = Literal["replicate", "fully_shard"] | Callable[..., Any]

_NAMED: Mapping[str, Callable[..., Any]] = MappingProxyType({"replicate": replicate, "fully_shard": fully_shard})


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Assembled(Generic[M, O]):
    """What `assemble` returns: plain objects, and the lines that make them. `print` shows the lines.

    Attributes:
        model: The module itself.
        optimizer: What the function of the model returned, or None.
        loader: The sharded loader; its windows if gradients are accumulated; None if there was none.
        lines: The calls that were made, in order, as one would write them.
    """

    model: M
    optimizer: O
    loader: Any
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)


class _AssembleOptions(TypedDict, total=False):
    loader: Any
    precision: PolicyName | Precision | Mapping[str, PolicyName | Precision] | partial[Any] | None
    recompute: Selection | Mapping[str, Any] | partial[Any] | None
    strategy: Strategy | Sequence[Strategy]
    compile: bool | partial[Any]
    accumulate: int | partial[Any] | None


@overload
def assemble(
    ctx: DistContext, *, model: M, optimizer: None = None, **settings: Unpack[_AssembleOptions]
) -> tuple[Assembled[M], DistContext]: ...
@overload
def assemble(
    ctx: DistContext, *, model: M, optimizer: Callable[[M], O], **settings: Unpack[_AssembleOptions]
) -> tuple[Assembled[M, O], DistContext]: ...
def assemble(
    ctx: DistContext,
    *,
    model: Any,
    optimizer: Any = None,
    loader: Any = None,
    precision: PolicyName | Precision | Mapping[str, PolicyName | Precision] | partial[Any] | None = None,
    recompute: Selection | Mapping[str, Any] | partial[Any] | None = None,
    strategy: Strategy | Sequence[Strategy] = "replicate",
    compile: bool | partial[Any] = False,
    accumulate: int | partial[Any] | None = None,
) -> tuple[Any, DistContext]:
    """Apply the usual transforms in their order, and show the lines this stands for.

    For a first program, and for seeing the order: `print` of what is returned shows the lines that do the same by
    hand. A setting is the value most programs give, or a `functools.partial` of the transform with any of its
    options. What is not here (averages, checkpoints, pipelines) takes the objects and the context afterwards.

    Changes: `model` in place, as the transforms say. Collectives: those of the transforms.

    Args:
        ctx: The current context.
        model: Any module.
        optimizer: A function that makes the optimizer from the model; called when the parameters are final.
        loader: A `DataLoader` of the whole dataset, for `shard_data`.
        precision: Policy of `with_precision`, or a table of them by name. With a policy that scales losses,
            `skip_nonfinite` is applied too.
        recompute: Blocks of `recompute`.
        strategy: "replicate", "fully_shard", or a transform, such as `weft.fully_shard` or
            `partial(weft.zero_partition, stage=2)`; or several of them, in order.
        compile: Whether to `compile` the model.
        accumulate: Micro-batches per window, for `accumulate_grads`.

    Returns:
        The objects and the lines; and the context that the last transform returned.

    Raises:
        ValueError: A strategy is unknown, or something that it needs is not given.
        TypeError: `optimizer` is no function, or a setting is something else.

    Example:
        >>> import weft
        >>> make = lambda model: torch.optim.SGD(model.parameters())
        >>> parts, ctx = weft.assemble(weft.local(), model=nn.Linear(2, 1), optimizer=make, precision="bf16")
        >>> print(parts)
        model, ctx = weft.with_precision(model, ctx, "bf16")
        model, ctx = weft.replicate(model, ctx)
        optimizer = make_optimizer(model)  # SGD
    """
    given = [strategy] if isinstance(strategy, str) or callable(strategy) else list(strategy)
    strategies = [_strategy(each) for each in given]
    _check(strategies, optimizer, loader, accumulate)
    bench = _Bench({"model": model, "optimizer": None, "loader": loader}, ctx)
    if loader is not None:
        bench.apply(shard_data, ("loader",))
    if precision is not None:
        bench.apply(_stage(precision, with_precision, "policy"), ("model",))
    if recompute is not None:
        bench.apply(_stage(recompute, recompute_blocks, "blocks"), ("model",))
    for each in strategies:
        if not _takes_optimizer(each):
            bench.apply(each, ("model",))
    if optimizer is not None:
        bench.make(optimizer)
        if any(offer.precision.scaling for part in model.modules() for offer in offered(part, PrecisionOffer)):
            bench.apply(skip_nonfinite, ("optimizer",))
    for each in strategies:
        if _takes_optimizer(each):
            bench.apply(each, ("model", "optimizer"))
    if compile:
        bench.apply(compile if isinstance(compile, partial) else compile_module, ("model",))
    if accumulate is not None:
        bench.apply(_stage(accumulate, accumulate_grads, "steps"), ("model", "loader"))
    return Assembled(**bench.objects, lines=tuple(bench.lines)), bench.ctx


class _Bench:
    """The objects on their way, and the lines so far."""

    def __init__(self, objects: dict[str, Any], ctx: DistContext) -> None:
        self.objects, self.ctx = objects, ctx
        self.lines: list[str] = []

    def apply(self, transform: Callable[..., Any], names: tuple[str, ...]) -> None:
        """Call one transform on some objects."""
        *objects, self.ctx = transform(*(self.objects[name] for name in names), self.ctx)
        self.objects |= zip(names, objects, strict=True)
        fn, options = (transform.func, transform.keywords) if isinstance(transform, partial) else (transform, {})
        places = ", ".join([*names, "ctx"])
        texts = [_text(value) if name == "policy" else f"{name}={_text(value)}" for name, value in options.items()]
        self.lines.append(f"{places} = weft.{fn.__name__}({', '.join([places, *texts])})")

    def make(self, optimizer: Callable[[Any], Any]) -> None:
        """Let the function of the user make the optimizer."""
        self.objects["optimizer"] = made = optimizer(self.objects["model"])
        name = getattr(optimizer, "__name__", "make_optimizer")
        name = name if name.isidentifier() else "make_optimizer"  # of a lambda
        self.lines.append(f"optimizer = {name}(model)  # {type(made).__name__}")


def _stage(value: Any, transform: Callable[..., Any], option: str) -> partial[Any]:
    return value if isinstance(value, partial) else partial(transform, **{option: value})


def _strategy(value: Any) -> Callable[..., Any]:
    if callable(value):
        return cast("Callable[..., Any]", value)
    if value in _NAMED:
        return _NAMED[value]
    raise value_error(
        f"assemble: strategy = {value!r} is unknown",
        found=repr(value),
        expected='"replicate", "fully_shard", a transform, or a partial of one',
        fix="weft.assemble(ctx, model=model, strategy=partial(weft.zero_partition, stage=2), ...)",
    )


def _takes_optimizer(transform: Callable[..., Any]) -> bool:
    return "optimizer" in inspect.signature(transform).parameters


def _check(strategies: Sequence[Callable[..., Any]], optimizer: Any, loader: Any, accumulate: Any) -> None:
    if optimizer is not None and (not callable(optimizer) or isinstance(optimizer, torch.optim.Optimizer)):
        raise type_error(
            "assemble: the optimizer is made when the parameters are final",
            found=f"optimizer = a {type(optimizer).__name__}",
            expected="a function of the model",
            fix="weft.assemble(ctx, model=model, optimizer=lambda m: torch.optim.AdamW(m.parameters()))",
        )
    if optimizer is None and any(map(_takes_optimizer, strategies)):
        raise value_error(
            "assemble: this strategy needs the optimizer",
            found="optimizer = None",
            expected="a function of the model",
            fix="weft.assemble(ctx, model=model, optimizer=lambda m: torch.optim.AdamW(m.parameters()), ...)",
        )
    if accumulate is not None and loader is None:
        raise value_error(
            "assemble: windows are made of a loader",
            found="accumulate is given, loader = None",
            expected="both",
            fix="weft.assemble(ctx, model=model, loader=loader, accumulate=4, ...)",
        )


def _text(value: Any) -> str:
    """A value as one writes it."""
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(_text, value)) + ("," if isinstance(value, tuple) and len(value) == 1 else "")
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(name)}: {_text(each)}" for name, each in value.items()) + "}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field for field in dataclasses.fields(value) if getattr(value, field.name) != field.default]
        inside = ", ".join(f"{field.name}={_text(getattr(value, field.name))}" for field in fields)
        return f"{'weft.' if isinstance(value, Precision) else ''}{type(value).__name__}({inside})"
    return getattr(value, "__name__", None) or repr(value)
