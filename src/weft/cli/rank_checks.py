"""What every rank does under `weft doctor`: a script for `weft launch`, whose argument is a folder."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn

import weft

STARTED = "started."  # with the process, the name of a file


def _all_reduce(ctx: weft.DistContext, folder: Path) -> str:
    total = weft.reduce(torch.full((1000,), ctx.rank + 1.0, device=ctx.device), ctx)
    expected = ctx.world_size * (ctx.world_size + 1) / 2
    if not torch.equal(total.cpu(), torch.full((1000,), expected)):
        raise ArithmeticError(f"the sum over the ranks is {total[0].item()} and should be {expected}")
    begin = time.perf_counter()
    big = torch.ones(2**22, device=ctx.device)
    weft.reduce(big, ctx)
    return f"{ctx.world_size} ranks on {ctx.device.type}, 16 MiB in {time.perf_counter() - begin:.2f} s"


def _clocks(ctx: weft.DistContext, folder: Path) -> str:
    weft.barrier(ctx)
    times: list[float] = weft.collectives.gather_objects(time.time(), ctx)
    spread = max(times) - min(times)
    if spread > 5.0:
        raise ArithmeticError(f"the clocks of the ranks differ by {spread:.1f} s")
    return f"within {spread:.2f} s"


def _fully_shard_step(ctx: weft.DistContext, folder: Path) -> str:
    def build() -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), torch.randn(4 * ctx.world_size, 8)

    losses: list[list[float]] = []
    for share in (False, True):
        model, batch = build()
        if share:
            model, _ = weft.fully_shard(model, ctx)
            batch = batch.chunk(ctx.world_size)[ctx.rank]
        model = weft.to_device(model, ctx)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(3):
            loss = model(batch.to(ctx.device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(weft.reduce(loss.detach(), ctx, "mean").item())
        losses.append(found)
    if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(*losses, strict=True)):
        raise ArithmeticError(f"losses {losses[1]} differ from those of one process, {losses[0]}")
    return f"3 steps, loss {losses[1][0]:.4f} to {losses[1][-1]:.4f}, as in one process"


def _checkpoint(ctx: weft.DistContext, folder: Path) -> str:
    model = nn.Linear(4, 4)
    state, here = weft.checkpointable({"model": model}, ctx, rng=False)
    expected = model.weight.detach().clone()
    weft.save(state, folder / "checkpoints", 1, here)
    with torch.no_grad():
        model.weight.zero_()
    weft.restore(state, folder / "checkpoints", here)
    expected = weft.broadcast(expected, ctx)
    if not torch.equal(model.weight.detach(), expected):
        raise ArithmeticError("other weights were restored than were saved")
    return "saved, verified and restored"


# By name what is done, and what to do next if it fails.
CHECKS: Mapping[str, tuple[Callable[[weft.DistContext, Path], str], str]] = MappingProxyType(
    {
        "all-reduce": (
            _all_reduce, "weft doctor -n 1 leaves the network out; GLOO_SOCKET_IFNAME=lo chooses the interface"
        ),
        "clocks": (_clocks, "let the nodes take their time from one server (NTP)"),
        "fully_shard step": (_fully_shard_step, "report it with the output of weft doctor"),
        "checkpoint": (_checkpoint, "weft doctor --folder DIRECTORY, on a file system that all ranks share"),
    }
)  # fmt: skip


def main(folder: Path) -> None:
    """Do the checks one after the other; the main rank writes down how each ended."""
    (folder / f"{STARTED}{os.getpid()}").touch()
    results: dict[str, str] = {}
    with weft.start(timeout_s=15) as ctx:
        for name, (check, _) in CHECKS.items():
            with weft.collectives.all_or_none(ctx):
                results[name] = check(ctx, folder)
            if ctx.is_main:
                (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
