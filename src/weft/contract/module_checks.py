"""Modules that a strategy cannot take, and ranks whose modules differ."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from weft.checks import check_module, check_not_lazy
from weft.context import DistContext
from weft.contract.layout import apart_axes, axes_of_dims, gradient_axes
from weft.contract.marks import marks_of, offered
from weft.contract.protocols import KeepsParameters, Layout, ReducesIn, StreamsParts
from weft.engines.results import GradSync
from weft.engines.torch.reducing.trained import is_reduced
from weft.errors import AlreadyApplied, ContextError, ContractError, OrderError, listed, value_error
from weft.peers.agreement import compare, differing_facts, exchange
from weft.tensors.dtensor import is_fsdp, is_sharded
from weft.tensors.quantized import quantized_parts


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
    entries = differing_facts(world, what, {"call": what, **facts, "layout of the module": digest})
    if entries is None:
        return
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


def check_not_streamed(what: str, module: object) -> None:
    """Raise if parts of a module have no values between their calls.

    Raises:
        ContractError: The module was placed, and parts are streamed.
    """
    streamed = [name for offer in offered(module, StreamsParts) for name in offer.streamed]
    if streamed:
        raise ContractError(
            f"{what}: parts of this {type(module).__name__} are streamed",
            found=f"{listed(streamed)}: on meta between calls",
            expected="a module that has its values",
            fix="model, ctx = weft.undo(model, ctx)  # and if it was on meta: weft.load_weights(model, path, ctx)",
        )


def check_methods(what: str, module: nn.Module, methods: Sequence[str]) -> None:
    """Raise if one of `methods` is not a method of `module` besides forward.

    Raises:
        ValueError: An unknown name, `forward` itself, or one name twice.
    """
    wrong = [name for name in methods if name == "forward" or not callable(getattr(module, name, None))]
    twice = sorted({name for name in methods if list(methods).count(name) > 1})
    if wrong or twice:
        raise value_error(
            f"{what}: methods = {list(methods)} cannot be used",
            found=listed(repr(name) for name in [*wrong, *twice]),
            expected=f"methods of {type(module).__name__} other than forward, each once",
            fix=f"weft.{what}(..., methods=())",
        )


def wrapper_of_torch(module: nn.Module) -> str | None:
    """The name of torch's wrapper that `module` is, if it reduces gradients by itself."""
    names = {cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith("torch.")}
    found = names & {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
    return next(iter(found), None)


def trained_alone(module: nn.Module, ctx: DistContext) -> list[str]:
    """Names of trained parameters whose gradients no strategy averages, though ranks have different ones."""
    names = _without_strategy(module, ctx, ((name, p) for name, p in module.named_parameters() if p.requires_grad))
    return [name for name in names if not is_reduced(module.get_parameter(name))]


def buffers_alone(module: nn.Module, ctx: DistContext) -> list[str]:
    """Names of buffers that no strategy keeps equal, though ranks have different batches."""
    whole = ((name, buffer) for name, buffer in module.named_buffers() if not is_sharded(buffer))
    return _without_strategy(module, ctx, whole)


def _without_strategy(module: nn.Module, ctx: DistContext, named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    axes = gradient_axes(module, ctx)
    if math.prod(map(ctx.axis_size, axes)) == 1:
        return []
    strategies = [part for part in module.modules() if offered(part, GradSync) or wrapper_of_torch(part)]
    covered = {id(t) for part in strategies for t in (*part.parameters(), *part.buffers())}
    return [name for name, t in named if id(t) not in covered and not _spans(t, axes, ctx)]


def _spans(parameter: torch.Tensor, axes: Sequence[str], ctx: DistContext) -> bool:
    """Whether it is a DTensor over one of some axes, whose gradients are its own affair."""
    return is_sharded(parameter) and any(set(axes) & set(dims) for dims in axes_of_dims(parameter.device_mesh, ctx))


def _check_not_wrapped(what: str, module: nn.Module) -> None:
    """Raise if torch reduces the gradients of `module`, or of a part of it, already.

    Raises:
        AlreadyApplied: The text names the wrapper.
    """
    for name, part in module.named_modules():
        wrapper = wrapper_of_torch(part)
        if wrapper not in (None, "FSDPModule"):  # that is no wrapper: its parameters tell that they are sharded
            raise AlreadyApplied(
                f"{what}: torch's {wrapper} already reduces these gradients",
                found=f"{name or 'the module itself'} is a {wrapper}",
                expected=f"the plain module: {what} takes the place of {wrapper}",
                fix=f"leave {wrapper}(...) out",
            )


def check_not_elsewhere(what: str, module: nn.Module, why: str) -> None:
    """Raise if a part of `module` has no values of its parameters between steps; see `KeepsParameters`.

    Raises:
        OrderError: One has none; the text names the transform that made it so.
    """
    for part in module.modules():
        for mark in marks_of(part):
            if any(isinstance(offer, KeepsParameters) and offer.elsewhere for offer in mark.offers):
                raise OrderError(
                    f"{what}: cannot be combined with {mark.record.name} on one {type(part).__name__}",
                    found=str(mark.record),
                    expected=f"{what} on parameters that exist between steps: {why}",
                    fix='model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=3)  # engine="torch"',
                )


def check_data_axes(what: str, module: nn.Module, ctx: DistContext, names: Sequence[str]) -> None:
    """Raise if a strategy over these axes would leave gradients of different batches, or of their parts, unaveraged.

    Args:
        what: Name of the transform, for the error text.
        module: What it is applied to.
        ctx: The current context.
        names: The axes over which it averages gradients.

    Raises:
        ContextError: It leaves a data axis out, or one along which batches are in parts.
        OrderError: The ranks along one of them step apart; see `StepsApart`.
    """
    sizes = dict(ctx.axes)
    apart = [name for name in apart_axes(module) if sizes[name] > 1]
    if apart and (not names or not set(apart).isdisjoint(names)):
        raise OrderError(
            f"{what}: local_steps averages parameters along {' and '.join(map(repr, apart))}, and gradients are not",
            found=f"axis={', '.join(map(repr, names)) or None}; mesh {sizes}",
            expected=f"{what} over other axes, or local_steps without a strategy",
            fix='ctx = weft.start(mesh={"replica": 2, "shard": -1})  # '
            f'local_steps(axis="replica"), then {what}(axis="shard")',
        )
    left_out = [name for name in gradient_axes(module, ctx) if name not in names and sizes[name] > 1]
    if left_out:
        given, missing = ", ".join(map(repr, names)), " and ".join(map(repr, left_out))
        needed = ", ".join(repr(name) for name, _ in ctx.axes if name in names or name in left_out)
        are_data = all(name in ctx.data_axes for name in left_out)
        raise ContextError(
            f"{what}: batches differ along {missing}, where gradients would not be averaged"
            if are_data
            else f"{what}: the ranks along {missing} see different parts, where gradients would not be averaged",
            found=f"axis={given}; data axes {', '.join(map(repr, ctx.data_axes))}",
            expected="a strategy over all data axes: one copy of the model, and every batch counts; or "
            f"weft.local_steps before it, to average parameters along {missing}"
            if are_data
            else "a strategy over the data axes and those along which batches are in parts",
            fix=f"weft.{what}(..., axis=({needed})), or weft.start(..., data_axes=({given},)) for equal batches"
            if are_data
            else f"weft.{what}(...) without axis: by default over all of them",
        )


def check_plain_module(what: str, module: nn.Module) -> None:
    """Check that this is a module of plain parameters that no strategy has.

    Raises:
        AlreadyApplied: One is sharded or replicated, or torch reduces the gradients.
        ContractError: One is a DTensor, cut over another axis, as by torch's `parallelize_module`.
        TypeError: Not a module.
        ValueError: A parameter has no shape yet.
    """
    _check_free(what, module)
    cut = [name for name, p in module.named_parameters() if is_sharded(p)]
    if cut:
        raise ContractError(
            f"{what}: parameters of {type(module).__name__} are DTensors sharded over another axis",
            found=listed(cut),
            expected="plain parameters: this engine knows no others",
            fix=f'weft.{what}(..., engine="torch")',
        )


def check_strategy_module(what: str, module: nn.Module, found: Mapping[str, Layout], names: Sequence[str]) -> None:
    """Check that no parameter of a module lies along the axes of a strategy already.

    Parameters may be DTensors over other axes, as `parallelize_module` makes them; and over one of `names`, if their
    gradients are not summed over it, as those of experts.

    Args:
        what: Name of the strategy.
        module: What it is applied to.
        found: Where its parameters lie: `layouts(module, ctx)`.
        names: Its axes.

    Raises:
        AlreadyApplied: One is sharded over an axis of the strategy, or replicated; or torch reduces the gradients.
        TypeError: Not a module.
        ValueError: A parameter has no shape yet, or weights are quantized in a way that the strategy cannot take.
    """
    _check_free(what, module)
    check_quantized_weights(
        what, module, {"torchao": "numbers in tensors of its own, which cannot be sent or compared"}
    )
    taken = {
        name: " and ".join(map(repr, axes))
        for name, one in found.items()
        for axes in one.mesh
        if any(axis in names and axis in one.reduce_over for axis in axes)
    }
    if taken:
        raise AlreadyApplied(
            f"{what}: parameters of {type(module).__name__} are DTensors over {listed(dict.fromkeys(taken.values()))}",
            found=listed(taken),
            expected=f"parameters that lie along no axis of {what}: {', '.join(map(repr, names))}",
            fix='ctx = weft.start(mesh={"data": -1, "tensor": 2}); parallelize_module(model, ctx.mesh["tensor"], plan)',
        )


def check_quantized_weights(what: str, module: nn.Module, refused: Mapping[str, str]) -> None:
    """Raise if quantized weights are trained, or are of a kind that cannot be taken.

    Args:
        what: Name of the strategy.
        module: What it is applied to.
        refused: Kinds of `quantized_parts`, and the reason for each.

    Raises:
        ValueError: There are some; the text names them.
    """
    parts = quantized_parts(module)
    trained = [name for name in parts if getattr(module.get_submodule(name).weight, "requires_grad", False)]
    wrong = [name for name, kind in parts.items() if kind in refused]
    if wrong:
        kinds = sorted({kind for kind in parts.values() if kind in refused})
        none = "4 bits" in refused
        raise value_error(
            f"{what}: quantized weights of {type(module).__name__} cannot be taken",
            found=f"{listed(wrong)}: " + "; ".join(f"{kind}: {refused[kind]}" for kind in kinds),
            expected="weights that are not quantized, or a strategy that takes 4 bits" if none else "4 bits",
            fix='model, ctx = weft.quantized(model, ctx, "nf4")' + "; model, ctx = weft.fully_shard(model, ctx)" * none,
        )
    if trained:
        raise value_error(
            f"{what}: quantized weights of {type(module).__name__} cannot be trained",
            found=f"{listed(trained)}: requires_grad",
            expected="quantized weights that are frozen, with adapters that are trained",
            fix='model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))',
        )


def _check_free(what: str, module: nn.Module) -> None:
    """Raise if a strategy has this module already, or cannot have it."""
    check_module(what, module)
    _check_not_wrapped(what, module)
    sharded = [name for name, p in module.named_parameters() if is_sharded(p)] if is_fsdp(module) else []
    taken = [name for name, p in module.named_parameters() if is_reduced(p)]
    if sharded or taken:
        raise AlreadyApplied(
            f"{what}: parameters of {type(module).__name__} are {'sharded' if sharded else 'replicated'} already",
            found=listed(sharded or taken),
            expected="each parameter in one sharded or replicated module: the outermost",
            fix=f"call weft.{what} once, on the whole model" + (", which nobody has sharded" if sharded else ""),
        )
    check_not_lazy(what, module)


def reduce_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype in which gradients travel, as `with_precision` chose it; None: their own."""
    dtypes = [offer.reduce_dtype for offer in offered(module, ReducesIn)]
    return dtypes[-1] if dtypes else None
