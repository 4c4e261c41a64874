"""Training steps on an accelerator: weft beside plain torch by an expert, Accelerate and Fabric, in one process.

One contestant at a time, so that its peak of memory is its own; "control" is torch once more, at the end.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from contestants import Batch, Run, accelerate_loop, fabric_loop, forget_accelerate, installed, weft_loop
from contestants import Case as LoopCase
from gpu_bench import MINIATURE, SIZES, Bench, Block, Size, Transformer, make_batches
from torch import nn
from torch.nn.functional import cross_entropy

import weft
from weft.monitoring import peak_flops

__all__ = ["CASES", "COMPILED", "measure_steps"]


@dataclass(frozen=True)
class Case:
    """A row: which model is trained how; AdamW(fused=True) on float32 weights."""

    size: str
    precision: str = "bf16"
    compile: bool = False
    recompute: bool = False
    micro: int = 1
    names: tuple[str, ...] = ("torch", "weft", "accelerate", "fabric", "control")

    @property
    def title(self) -> str:
        """For the table."""
        options = [word for word, on in (("compiled", self.compile), ("recompute", self.recompute)) if on]
        window = [f"window of {self.micro}"] if self.micro > 1 else []
        return ", ".join([self.size, self.precision, *options, *window])

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrix products."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float16


OURS = ("torch", "weft", "control")
CASES = [  # the most telling first: the rest falls to the limit of time
    Case("124M"),
    Case("350M"),
    Case("124M", precision="fp16"),
    Case("350M", precision="fp16"),
    Case("124M", micro=4),
    Case("350M", recompute=True, names=OURS),
    Case("1.3B", recompute=True, names=OURS),
]
COMPILED = [
    Case("124M", compile=True),
    Case("350M", compile=True, names=OURS),
    Case("124M", compile=True, recompute=True, names=OURS),
]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def compile_blocks(model: Transformer, bench: Bench, case: Case) -> None:
    if case.compile:
        for block in model.blocks:
            block.compile(backend=bench.compiler)


def torch_expert(model: Transformer, case: Case, bench: Bench) -> Run:
    """Autocast, a loss divided by the number of micro-batches, and a scale for fp16."""
    model.recompute = case.recompute
    compile_blocks(model, bench, case)
    optimizer = make_optimizer(model)
    scaler = torch.amp.GradScaler(bench.device.type, enabled=case.precision == "fp16")

    def run(batches: list[Batch]) -> None:
        for index, (x, y) in enumerate(batches, 1):
            with torch.autocast(bench.device.type, case.dtype):
                loss = cross_entropy(model(x), y) / case.micro
            scaler.scale(loss).backward()
            if index % case.micro == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

    return run


def with_weft(model: Transformer, case: Case, bench: Bench) -> Run:
    ctx = weft.local(device=str(bench.device))
    module, ctx = weft.with_precision(model, ctx, case.precision)
    if case.recompute:
        module, ctx = weft.recompute(module, ctx, blocks=Block)
    module, ctx = weft.replicate(module, ctx)
    if case.compile:
        module, ctx = weft.compile(module, ctx, blocks=Block, backend=bench.compiler)
    optimizer = make_optimizer(module)
    if case.precision == "fp16":
        optimizer, ctx = weft.skip_nonfinite(optimizer, ctx)
    return weft_loop(module, optimizer, ctx, LoopCase(micro=case.micro))


def accelerate(model: Transformer, case: Case, bench: Bench) -> Run:
    from accelerate import Accelerator

    forget_accelerate()
    model.recompute = case.recompute
    compile_blocks(model, bench, case)
    accelerator = Accelerator(mixed_precision=case.precision, gradient_accumulation_steps=case.micro)
    wrapped, optimizer = accelerator.prepare(model, make_optimizer(model))
    return accelerate_loop(accelerator, wrapped, optimizer, LoopCase(micro=case.micro))


def fabric(model: Transformer, case: Case, bench: Bench) -> Run:
    from lightning.fabric import Fabric

    model.recompute = case.recompute
    compile_blocks(model, bench, case)
    precision = "bf16-mixed" if case.precision == "bf16" else "16-mixed"
    lightning = Fabric(accelerator=bench.device.type, devices=1, precision=precision)
    wrapped, optimizer = lightning.setup(model, make_optimizer(model))
    return fabric_loop(lightning, wrapped, optimizer, LoopCase(micro=case.micro))


BUILDERS: dict[str, Callable[[Transformer, Case, Bench], Run]] = {
    "torch": torch_expert,
    "weft": with_weft,
    "accelerate": accelerate,
    "fabric": fabric,
    "control": torch_expert,
}


def measure_steps(bench: Bench, cases: Sequence[Case]) -> None:
    torch.set_float32_matmul_precision("high")
    if bench.dry:
        SIZES.update(dict.fromkeys(SIZES, MINIATURE))
        few = [replace(cases[0], micro=2, recompute=True, names=OURS)]
        cases = [replace(one, names=OURS) for one in cases[:3:2]] if cases is CASES else few
    longest = 0.0
    for case in cases:
        if bench.left() < max(longest, 1.0):
            bench.note(f"{case.title}: no time was left for it")
            continue
        begin = time.monotonic()
        measure_case(bench, case)
        longest = max(longest, time.monotonic() - begin)


def measure_case(bench: Bench, case: Case) -> None:
    size = SIZES[case.size]
    torch.manual_seed(0)
    with bench.device:
        original = Transformer(size)
    first: float | None = None
    for name in case.names:
        if not installed(name):
            bench.note(f"{name}: not installed here")
            continue
        try:
            first = measure_contestant(bench, case, name, copy.deepcopy(original), first)
        except Exception as error:  # noqa: BLE001  (one contestant costs only itself)
            bench.refused(f"{case.title}, {name}", error)
        bench.free()


def measure_contestant(bench: Bench, case: Case, name: str, model: Transformer, first: float | None) -> float:
    """Measure the steps of one; returns the time of the first contestant, torch."""
    size: Size = SIZES[case.size]
    run = BUILDERS[name](model, case, bench)
    batches = make_batches(bench, size, case.micro)
    for _ in range(1 if bench.dry else 4):
        run(batches)
    pairs = [bench.seconds(lambda: run(batches)) for _ in range(1 if bench.dry else max(24 // case.micro, 8))]
    step = statistics.median(wall for wall, _ in pairs)
    best = peak_flops(bench.device) if bench.device.type == "cuda" else None
    count, idle = bench.kernels(lambda: run(batches))
    bench.row(
        case=case.title,
        contestant=name,
        ratio=1.0 if first is None else round(step / first, 4),
        step_ms=round(1e3 * step, 3),
        tokens_per_s=round(size.batch * size.tokens * case.micro / step),
        mfu=None if best is None else round(size.flops * case.micro / step / best, 4),
        host_ms=round(1e3 * statistics.median(host for _, host in pairs), 3),
        kernels=count,
        idle_share=idle,
        waits=bench.waits(lambda: run(batches)),
        peak_bytes=bench.peak_bytes(lambda: run(batches)),
    )
    return step if first is None else first
