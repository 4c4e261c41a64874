"""Time of a step under `zero_partition`, by stage and engine; see docs/zero.md.

Both engines run the same loop on the same model, in turn, in one world of two ranks (gloo, CPU).

    python benchmarks/bench_zero.py [--rounds 5] [--steps 8]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

import torch
from contestants import Transformer
from torch import nn
from torch.nn.functional import cross_entropy

import weft
from weft.testing import run_ranks

SIZE = (8192, 384, 6)  # vocabulary, width, layers: 17 million parameters
CASES: dict[str, dict[str, Any]] = {
    **{f"{name} {stage}": {"engine": name, "stage": stage} for stage in (1, 2, 3) for name in ("torch", "deepspeed")},
    "deepspeed 3, optimizer on cpu": {"engine": "deepspeed", "stage": 3, "offload": "cpu"},
}  # fmt: skip


def job(ctx: weft.DistContext, case: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model: nn.Module = Transformer(*SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, **case)

    def step() -> None:
        tokens = torch.randint(SIZE[0], (4, 65))
        cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(ctx: weft.DistContext, rounds: int, steps: int) -> dict[str, list[float]]:
    jobs = {name: job(ctx, case) for name, case in CASES.items()}
    for step in jobs.values():
        step()
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, step in jobs.items():
            weft.barrier(ctx)
            begin = time.perf_counter()
            for _ in range(steps):
                step()
            found[name].append((time.perf_counter() - begin) / steps)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    found = run_ranks(measure, 2, options.rounds, options.steps, timeout_s=1500)[0]
    print(f"{'':32}{'ms per step':>12}{'spread':>10}")
    for name, times in found.items():
        spread = (max(times) - min(times)) / statistics.median(times)
        print(f"{name:32}{1000 * statistics.median(times):12.1f}{spread:10.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
