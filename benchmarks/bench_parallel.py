"""What a step of `tensor_parallel` costs beyond the same layers cut by hand with torch; see docs/benchmarks.md.

Both contestants live in the same processes and take turns in short blocks of steps; the hand-written code runs twice,
as "torch" and as "control". Compared is the CPU time of all threads of all ranks.

    python benchmarks/bench_parallel.py [--check] [--rounds 40] [--steps 4]
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import gelu, mse_loss, scaled_dot_product_attention

import weft
from weft.testing import run_ranks

WIDTH, HEADS, DEPTH = 256, 8, 4
PLAN = {"*.attention.[qkv]": "column", "*.attention.out": "row", "*.mlp.up": "column", "*.mlp.down": "row"}
CASES: dict[str, dict[str, int]] = {"tensor": {"tensor": 2}, "shard-tensor": {"shard": 2, "tensor": 2}}
LIMIT = 1.02  # beyond the control


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        result: Tensor = self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return result


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(gelu(self.up(x)))
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        result: Tensor = x + self.mlp(self.norm_2(x))
        return result


def by_hand(model: nn.Module, ctx: weft.DistContext) -> nn.Module:
    """As the tutorial of torch does it."""
    assert ctx.mesh is not None
    for block in model.children():
        styles = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        plan = {
            **styles,
            "attention.out": RowwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(),
        }
        parallelize_module(block, ctx.mesh["tensor"], plan)
        if "shard" in dict(ctx.axes):
            fully_shard(block, mesh=ctx.mesh["shard"])
    if "shard" in dict(ctx.axes):
        fully_shard(model, mesh=ctx.mesh["shard"])
    return model


def by_weft(model: nn.Module, ctx: weft.DistContext) -> nn.Module:
    model, ctx = weft.tensor_parallel(model, ctx, plan=PLAN)
    if "shard" in dict(ctx.axes):
        model, ctx = weft.fully_shard(model, ctx, units=Block)
    return model


def measure(ctx: weft.DistContext, rounds: int, steps: int) -> dict[str, list[float]]:
    """CPU seconds per step and block of each contestant."""
    torch.manual_seed(0)
    original = nn.Sequential(*(Block() for _ in range(DEPTH)))
    makers: dict[str, Callable[..., nn.Module]] = {"torch": by_hand, "control": by_hand, "weft": by_weft}
    models = {name: make(copy.deepcopy(original), ctx) for name, make in makers.items()}
    optimizers = {name: torch.optim.AdamW(model.parameters(), foreach=False) for name, model in models.items()}
    x = torch.randn(8, 64, WIDTH)
    found: dict[str, list[float]] = {name: [] for name in models}
    order, names = random.Random(0), list(models)
    for turn in range(rounds + 2):
        order.shuffle(names)
        for name in names:
            dist.barrier()
            began = time.process_time()
            for _ in range(steps):
                mse_loss(models[name](x), x).backward()
                optimizers[name].step()
                optimizers[name].zero_grad()
            if turn > 1:  # the first ones lay out buffers
                found[name].append((time.process_time() - began) / steps)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--check", action="store_true", help="exit with 1 if the promise is broken")
    options = parser.parse_args()
    broken = False
    for case, mesh in CASES.items():
        ranks = 2 if len(mesh) == 1 else 4
        found: list[Any] = run_ranks(measure, ranks, options.rounds, options.steps, mesh=mesh, timeout_s=600)
        costs = {
            name: statistics.median(map(sum, zip(*(one[name] for one in found), strict=True))) for name in found[0]
        }
        control, ratio = costs["control"] / costs["torch"], costs["weft"] / costs["torch"]
        kept = ratio <= LIMIT * max(control, 1 / control)
        broken |= not kept
        print(f"{case:13} torch {1e3 * costs['torch']:.1f} ms  control {control:.3f}  weft {ratio:.3f}")
    return int(broken and options.check)


if __name__ == "__main__":
    sys.exit(main())
