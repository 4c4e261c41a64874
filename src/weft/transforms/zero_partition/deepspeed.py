"""The part of `zero_partition` that hands the work to the real DeepSpeed: its arguments, checked."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

import torch
from torch import nn

from weft.context import DistContext
from weft.context.placement import check_place, place_module
from weft.contract import ReducesIn, agree_on_parameters, check_methods, offered
from weft.contract.select_modules import Selection
from weft.engines.torch.amp.loss_scale import LossScale
from weft.errors import ContextError, ContractError, OrderError, listed, value_error
from weft.peers.ledger import Ledger
from weft.sharding import check_module, check_optimizers, exchange_parameters, layouts, sharding_axes
from weft.sharding.meta import Source, is_meta

__all__ = ["Offload", "Wish", "check_for_deepspeed_alone", "with_deepspeed"]

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741
Place = str | os.PathLike[str]
Offload = Place | Mapping[Literal["optimizer", "parameters"], Place] | None


class Wish(NamedTuple):
    """The arguments of `zero_partition`."""

    stage: int
    axis: str | Sequence[str] | None
    units: Selection | None
    unused: str
    buffers: str
    bucket_bytes: int
    methods: tuple[str, ...]
    offload: Offload
    config: Mapping[str, Any] | str | Path | None


def check_for_deepspeed_alone(offload: Offload, config: object) -> None:
    """Raise if what only DeepSpeed understands was given without it.

    Raises:
        ValueError: It was.
    """
    given = [f"{name} = {value!r}" for name, value in (("offload", offload), ("config", config)) if value is not None]
    if given:
        raise value_error(
            "zero_partition: engine='torch' neither offloads nor takes a configuration",
            found=listed(given),
            expected="engine='deepspeed' with them",
            fix="weft.zero_partition(model, optimizer, ctx, stage=2, engine='deepspeed', offload='cpu')",
        )


def with_deepspeed(module: M, optimizer: O, ctx: DistContext, wish: Wish) -> tuple[M, O, DistContext]:
    """Check, agree with the other ranks, then let DeepSpeed do it."""
    check_module("zero_partition", module, ctx)
    check_methods("zero_partition", module, wish.methods)
    _check_wish(wish)
    _check_trained(module, optimizer, ctx)
    places = _places(wish)
    axes = sharding_axes("zero_partition", ctx, wish.axis)
    line = ctx.on(axes)
    engine: Any = importlib.import_module("weft.engines.deepspeed")
    engine.deepspeed()
    engine.check_accelerator(ctx.device)
    reduce_dtypes = [offer.reduce_dtype for offer in offered(module, ReducesIn)]
    trained = [p for p in module.parameters() if p.requires_grad]
    facts = engine.Facts(
        stage=wish.stage,
        dtype=trained[0].dtype,
        ranks=line.world_size,
        optimizer=type(optimizer).__name__,
        options=optimizer.param_groups[0],
        bucket_bytes=wish.bucket_bytes,
        reduce_dtype=reduce_dtypes[-1] if reduce_dtypes else None,
        optimizer_place=places.get("optimizer"),
        parameter_place=places.get("parameters"),
    )
    config = engine.complete({} if wish.config is None else engine.read(wish.config), facts)
    if line.world_size == 1 and line.group is None:
        if places:
            _raise_no_group(places)
        place_module("zero_partition", module, ctx)
        return module, optimizer, ctx
    ctx.require_collective("zero_partition")
    assert line.group is not None
    engine.check_config(config, line.group, ctx.local_rank)
    check_optimizers("zero_partition", module, ctx, (optimizer,))
    if any(place != "cpu" for place in places.values()):
        _load_async_io(engine, ctx)
    on_meta = wish.stage == 3 and is_meta(module)
    if not on_meta:
        check_place("zero_partition", module, ctx)
    told: dict[str, object] = {
        "stage": wish.stage,
        "engine": "deepspeed",
        "axes": list(axes),
        "buffers": wish.buffers,
        "methods": list(wish.methods),
        "offload": sorted(places),
        "config": repr(config),
        "optimizer": layouts(module, [optimizer]),
        "meta": on_meta,
    }
    agree_on_parameters("zero_partition", module, ctx, told)
    old = dict(module.named_parameters())
    source = Source("zero_partition", module, ctx, line, None) if on_meta else None
    if source is None:
        place_module("zero_partition", module, ctx)
        ctx.engine.broadcast_state(module, line.group)
    order = engine.Order(
        stage=wish.stage,
        config=config,
        methods=wish.methods,
        buffers=wish.buffers == "broadcast",
        local_rank=ctx.local_rank,
        make_real=None if source is None else source.make_real,
        moved=lambda: exchange_parameters(module, ctx, old, (optimizer,)),
        peers=Ledger(line.world, "zero_partition"),
    )
    mesh = None if ctx.mesh is None else ctx.mesh[axes[-1]]
    return module, optimizer, ctx.offering(engine.partition(module, optimizer, line.group, mesh, order))


def _load_async_io(engine: Any, ctx: DistContext) -> None:
    """One rank per node first: it compiles what the others find."""
    if ctx.is_local_main:
        engine.load_async_io()
    ctx.agree("zero_partition: the extension for disks")
    engine.load_async_io()


def _check_wish(wish: Wish) -> None:
    for name, value, allowed in (
        ("unused", wish.unused, ("error",)),
        ("buffers", wish.buffers, ("broadcast", "local")),
        ("units", wish.units, (None,)),
    ):
        if value not in allowed:
            raise value_error(
                f"zero_partition: {name} = {value!r} cannot be used with DeepSpeed",
                found=f"{name}={value!r}, engine='deepspeed'",
                expected={
                    "unused": "'error': DeepSpeed steps on all parameters of a group together",
                    "buffers": "'broadcast' or 'local'",
                    "units": "None: DeepSpeed gathers module by module",
                }[name],
                fix="engine='torch'" if name != "buffers" else "buffers='broadcast'",
            )
    if isinstance(wish.bucket_bytes, bool) or not isinstance(wish.bucket_bytes, int) or wish.bucket_bytes <= 0:
        raise value_error(
            f"zero_partition: bucket_bytes = {wish.bucket_bytes!r} cannot be used",
            found=repr(wish.bucket_bytes),
            expected="a whole number > 0",
            fix="bucket_bytes=25 * 2**20",
        )


def _check_trained(module: nn.Module, optimizer: torch.optim.Optimizer, ctx: DistContext) -> None:
    """Raise if DeepSpeed would train the parameters otherwise than torch."""
    held = {id(p) for entry in optimizer.param_groups for p in entry["params"]}
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    left_out = [name for name, p in trained.items() if id(p) not in held]
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in trained.values()})
    kind = type(optimizer)
    known = ctx.engine.is_elementwise(optimizer) or kind.__module__.startswith("deepspeed.")
    if any(offered(part, LossScale) for part in module.modules()):
        raise OrderError(
            "zero_partition: DeepSpeed cannot be combined with with_precision in fp16",
            found="with_precision(model, ctx, 'fp16'), which scales losses, before zero_partition",
            expected="bf16, then zero_partition: DeepSpeed averages gradients before they could be scaled back",
            fix="weft.with_precision(model, ctx, 'bf16')",
        )
    for wrong, found, expected, fix in (
        (not trained, "no parameter with requires_grad", "something to train", "module.requires_grad_()"),
        (
            bool(left_out),
            f"not in the optimizer: {listed(left_out)}",
            "every trained parameter in the optimizer: DeepSpeed averages the gradients of its own only",
            "requires_grad_(False) on them before zero_partition",
        ),
        (
            bool(trained) and dtypes not in (["float32"], ["bfloat16"]),
            f"parameters of {listed(dtypes)}",
            "float32, or bfloat16: DeepSpeed steps in float32",
            "module.float(), or engine='torch'",
        ),
        (
            not known or kind is torch.optim.Adagrad,
            kind.__name__,
            "an optimizer that treats each element by itself: DeepSpeed steps on pieces of parameters"
            + (", and makes an Adagrad anew" if kind is torch.optim.Adagrad else ""),
            "torch.optim.AdamW(...), or engine='torch'",
        ),
    ):
        if wrong:
            raise ContractError(
                f"zero_partition: DeepSpeed cannot train this {type(module).__name__} with this {kind.__name__}",
                found=found,
                expected=expected,
                fix=fix,
            )


def _places(wish: Wish) -> dict[str, str]:
    """Where to offload to: "cpu" or a directory, for "optimizer" and "parameters"."""
    if wish.offload is None:
        return {}
    given: Mapping[Any, Any] = wish.offload if isinstance(wish.offload, Mapping) else {"optimizer": wish.offload}
    bad = [f"{key}: {value!r}" for key, value in given.items() if key not in ("optimizer", "parameters")]
    bad += [f"{key}: {value!r}" for key, value in given.items() if not isinstance(value, (str, os.PathLike))]
    bad += [f"{key}: 'nvme' (which directory?)" for key, value in given.items() if value == "nvme"]
    if bad or not given:
        raise value_error(
            f"zero_partition: offload = {wish.offload!r} cannot be used",
            found=listed(bad) or "nothing",
            expected="'cpu', or a directory on a fast disk, for the optimizer; or a mapping for both",
            fix="offload={'optimizer': '/local_nvme', 'parameters': 'cpu'}",
        )
    places = {key: os.fspath(value) for key, value in given.items()}
    early = [key for key, place in places.items() if key == "parameters" or place != "cpu"]
    if early and wish.stage < 3:
        raise value_error(
            f"zero_partition: stage {wish.stage} cannot offload so",
            found=listed(f"{key} to {places[key]!r}" for key in early),
            expected="stage 3 for parameters, and for a disk; the optimizer's state to 'cpu' in every stage",
            fix="weft.zero_partition(..., stage=3, engine='deepspeed', offload=...)",
        )
    return places


def _raise_no_group(places: Mapping[str, str]) -> NoReturn:
    raise ContextError(
        "zero_partition: DeepSpeed needs a process group to offload, also for one rank",
        found=f"a context without one, and offload to {listed(places.values())}",
        expected="a program started by a launcher, or a group of one rank",
        fix="torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, "
        "world_size=1); ctx = weft.adopt()",
    )
