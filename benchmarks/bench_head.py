"""What the logits of a language model's loss take on each rank, and what a step costs; see docs/benchmarks.md.

The head of a language model and its loss, with `F.cross_entropy` of all logits and with `F.linear_cross_entropy` in
chunks of rows. "peak" is the highest resident memory of a step, gradients of hidden states and head included, beyond
what the process had before it (Linux); "seconds" is the median of the steps after that. Rows are those of one rank.

    python benchmarks/bench_head.py [--quick] [--check]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import weft
from weft.testing import run_ranks

# rows, width, vocabulary
SIZE, QUICK_SIZE = (4096, 512, 32_000), (512, 128, 8_000)
STEPS = 3
CASES: dict[str, tuple[int, dict[str, int] | None]] = {  # ranks and mesh
    "one process": (1, None),
    "fully_shard": (2, None),
    "tensor": (2, {"tensor": 2}),
}


class Head(nn.Module):
    """Returns the loss of hidden states [rows, width]."""

    def __init__(self, width: int, vocabulary: int, *, chunked: bool) -> None:
        super().__init__()
        self.head, self.chunked = nn.Linear(width, vocabulary, bias=False), chunked

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.chunked:
            options = nn.LinearCrossEntropyOptions()
            return functional.linear_cross_entropy(hidden, self.head.weight, labels, options=options)
        logits = self.head(hidden)
        if hasattr(logits, "full_tensor"):  # as without `weft.collectives.vocab_cross_entropy`
            logits = logits.full_tensor()
        return functional.cross_entropy(logits, labels)


def resident(what: str) -> int:
    """VmRSS or VmHWM, its highest value, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what + ":"))


def forget_peak() -> int:
    """Let VmHWM begin anew; returns what is resident now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return resident("VmRSS")


def measure(ctx: weft.DistContext, size: tuple[int, int, int], chunked: bool) -> tuple[int, float]:
    """Bytes at the peak of a step, and seconds of one."""
    torch.set_num_threads(1)
    rows, width, vocabulary = size
    torch.manual_seed(0)
    module = Head(width, vocabulary, chunked=chunked)
    if "tensor" in dict(ctx.axes):
        module, ctx = weft.tensor_parallel(module, ctx, plan={"head": "vocab"})
    elif ctx.world_size > 1:
        module, ctx = weft.fully_shard(module, ctx, units=["head"])
    hidden, labels = torch.randn(rows, width).requires_grad_(), torch.randint(vocabulary, (rows,))
    few = slice(0, 64)
    module(hidden[few], labels[few]).backward()  # what is made once
    taken, seconds = 0, []
    for _ in range(STEPS):
        hidden.grad = None
        module.zero_grad()
        before, begun = forget_peak(), time.perf_counter()
        module(hidden, labels).backward()
        seconds.append(time.perf_counter() - begun)
        taken = max(taken, resident("VmHWM") - before)
    return taken, statistics.median(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a small head: the figures mean little")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the chunks take as much as all logits")
    options = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # what is freed goes back to the system at once
    size = QUICK_SIZE if options.quick else SIZE
    logits = 4 * size[0] * size[2] / 2**20
    print(f"{size[0]} rows, width {size[1]}, vocabulary {size[2]}: {logits:.0f} MiB of logits")
    print(f"  {'':12}{'ranks':>6}{'peak, all logits':>18}{'chunks':>9}{'seconds, all logits':>21}{'chunks':>9}")
    kept = True
    for name, (ranks, mesh) in CASES.items():
        (whole, slow), (chunked, quick) = (
            max(run_ranks(measure, ranks, size, flag, mesh=mesh, probes="off", timeout_s=600)) for flag in (False, True)
        )
        print(f"  {name:12}{ranks:6}{whole / 2**20:18.0f}{chunked / 2**20:9.0f}{slow:21.2f}{quick:9.2f}", flush=True)
        kept = kept and chunked < whole / 2
    return int(options.check and not kept)


if __name__ == "__main__":
    sys.exit(main())
