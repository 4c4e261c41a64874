"""What the reducers of weft cost on an accelerator in a world of one, beside DDP and FSDP2 by hand.

Nothing is sent, but all else runs: hooks, buckets, gathers and reductions of the device's own backend. The transforms
leave all this out on one rank, so the engine is called as they call it, with `Alone` for the other ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from gpu_bench import MINIATURE, SIZES, Bench, Size, Transformer, make_batches
from tests.gpu.one_rank import Alone
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.engines.options import ReduceOptions, ShardOptions
from weft.sharding import step_in_parts

__all__ = ["measure_reducers"]

Options = dict[str, bool]
Made = tuple[nn.Module, Any]


@contextmanager
def group_of_one(bench: Bench) -> Iterator[None]:
    """A process group of this process."""
    accelerated = bench.device.type != "cpu"
    if accelerated:
        torch.accelerator.set_device_index(0)
    backend = dist.get_default_backend_for_device(bench.device.type)
    device_id = bench.device if bench.device.type == "cuda" else None
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device_id)
    try:
        yield
    finally:
        dist.destroy_process_group()


def ddp(model: Transformer, options: Options, _: weft.DistContext) -> Made:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, torch.optim.AdamW(model.parameters(), lr=1e-4, **options)


def replicate(model: Transformer, options: Options, ctx: weft.DistContext) -> Made:
    ctx.engine.reduce_gradients(model, dist.group.WORLD, ReduceOptions(), Alone())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, **options)


def fsdp2(model: Transformer, options: Options, _: weft.DistContext) -> Made:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, **options)


def sharded(model: Transformer, options: Options, ctx: weft.DistContext) -> Made:
    mesh = dist.init_device_mesh(ctx.device.type, (1,), mesh_dim_names=("data",))
    units = tuple((block,) for block in model.blocks)
    ctx.engine.shard(model, mesh, dist.group.WORLD, ShardOptions(units=units), Alone())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, **options)


def zero_redundancy(model: Transformer, options: Options, _: weft.DistContext) -> Made:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, **options)


def zero1(model: Transformer, options: Options, ctx: weft.DistContext) -> Made:
    mesh = dist.init_device_mesh(ctx.device.type, (1,), mesh_dim_names=("data",))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **options)
    ctx.engine.reduce_gradients(model, dist.group.WORLD, ReduceOptions(strategy="zero_partition"), Alone())
    step_in_parts(optimizer, ctx, "all", mesh)
    return model, optimizer


PAIRS: dict[str, tuple[Callable[..., Made], Callable[..., Made]]] = {
    "replicate": (ddp, replicate),
    "fully_shard": (fsdp2, sharded),
    "zero_partition 1": (zero_redundancy, zero1),
}


def measure_reducers(bench: Bench) -> None:
    size = MINIATURE if bench.dry else SIZES["124M"]
    with group_of_one(bench):
        for strategy, (theirs, ours) in PAIRS.items():
            for form in ("fused", "foreach"):
                first: float | None = None
                for name, build in (("torch", theirs), ("weft", ours), ("control", theirs)):
                    if bench.left() < 2:
                        bench.note(f"{strategy}, {form}, {name}: no time was left for it")
                        continue
                    try:
                        first = measure_one(bench, size, strategy, form, name, build, first)
                    except Exception as error:  # noqa: BLE001  (one contestant costs only itself)
                        bench.refused(f"{strategy}, {form}, {name}", error)
                    bench.free()


def measure_one(
    bench: Bench,
    size: Size,
    strategy: str,
    form: str,
    name: str,
    build: Callable[..., Made],
    first: float | None,
) -> float:
    torch.manual_seed(0)
    with bench.device:
        model = Transformer(size)
    module, optimizer = build(model, {form: True}, weft.local(device=str(bench.device)))
    ((x, y),) = make_batches(bench, size, 1)

    def run() -> None:
        with torch.autocast(bench.device.type, torch.bfloat16):
            loss = cross_entropy(module(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(1 if bench.dry else 4):
        run()
    pairs = [bench.seconds(run) for _ in range(1 if bench.dry else 16)]
    step = statistics.median(wall for wall, _ in pairs)
    count, idle = bench.kernels(run)
    bench.row(
        strategy=strategy,
        optimizer=form,
        contestant=name,
        ratio=1.0 if first is None else round(step / first, 4),
        step_ms=round(1e3 * step, 3),
        host_ms=round(1e3 * statistics.median(host for _, host in pairs), 3),
        kernels=count,
        idle_share=idle,
        waits=bench.waits(run),
        peak_bytes=bench.peak_bytes(run),
    )
    return step if first is None else first
