"""What weft costs on an accelerator, beside plain torch by an expert, DDP and FSDP2 by hand, Accelerate and Fabric.

One part per call, so that one that fails costs only itself; `.ci/gpu` calls them all. What was measured is written
after each row, ratios first. `--dry` is the same in miniature on a CPU, where the figures mean nothing.

    python benchmarks/gpu.py PART --out FILE.json [--seconds 180] [--gigabytes 10] [--dry]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import itertools
import json
import math
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contestants import (
    Batch,
    Run,
    accelerate_loop,
    fabric_loop,
    forget_accelerate,
    installed,
    weft_loop,
)
from contestants import Case as LoopCase
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import weft
from weft.monitoring import peak_flops
from weft.testing import run_ranks

# -- the models ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """A causal transformer as GPT-2 has them."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 50304
    tokens: int = 1024
    batch: int = 16

    @property
    def flops(self) -> float:
        """Of a step on one batch, forward and backward: 6 per weight and token, and attention, not halved.

        Source: Chowdhery et al., "PaLM", 2022, appendix B.
        """
        weights = self.layers * 12 * self.width**2 + self.vocabulary * self.width
        per_token = 6 * weights + 12 * self.layers * self.width * self.tokens
        return float(per_token * self.tokens * self.batch)


SIZES = {
    "124M": Size(12, 768, 12),
    "350M": Size(24, 1024, 16, batch=8),
    "1.3B": Size(24, 2048, 16, batch=4),
}
MINIATURE = Size(2, 32, 2, vocabulary=64, tokens=16, batch=2)


class Block(nn.Module):
    """Attention and two linear layers."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.proj = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width] to the same."""
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, w))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Transformer(nn.Module):
    """The head shares the weight of the embedding. `recompute`: as an expert writes it, in forward."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.recompute = False
        self.embed, self.place = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.tokens, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.embed.weight
        for part in self.modules():
            if isinstance(part, (nn.Linear, nn.Embedding)):
                nn.init.normal_(part.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, tokens] to logits [batch * tokens, vocabulary]."""
        hidden = self.embed(tokens) + self.place.weight
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.recompute else block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits.flatten(0, 1)


@dataclass(frozen=True)
class Case:
    """A row: which model is trained how. bf16 by autocast, AdamW(fused=True) on float32 weights."""

    size: str
    compile: bool = False
    recompute: bool = False
    micro: int = 1
    names: tuple[str, ...] = ("torch", "control", "weft", "ddp", "fsdp2", "accelerate", "fabric")

    @property
    def title(self) -> str:
        """For the table."""
        options = [word for word, on in (("compiled", self.compile), ("recompute", self.recompute)) if on]
        return ", ".join([self.size, *options, *([f"window of {self.micro}"] if self.micro > 1 else [])])


FEW = ("torch", "control", "weft", "accelerate", "fabric")
CASES = [  # the most telling first: the rest falls to the limit of time
    Case("124M"),
    Case("350M"),
    Case("124M", micro=4),
    Case("1.3B", recompute=True, names=FEW),
    Case("124M", recompute=True, names=FEW),
    Case("1.3B", names=FEW),
    Case("350M", recompute=True, micro=4, names=FEW),
    Case("1.3B", micro=4, names=FEW),
]
COMPILED = [
    Case("124M", compile=True, names=FEW),
    Case("124M", compile=True, recompute=True, names=("torch", "control", "weft")),
    Case("350M", compile=True, names=FEW),
    Case("1.3B", compile=True, recompute=True, names=("torch", "control", "weft")),
]


class Bench:
    """Where it runs and for how long, and what was found so far."""

    def __init__(self, out: Path, *, seconds: float, gigabytes: float, dry: bool) -> None:
        self.dry, self.gigabytes = dry, gigabytes
        kind = None if dry else torch.accelerator.current_accelerator()
        self.device = torch.device("cpu") if kind is None else torch.device(kind.type, 0)
        self.compiler = "aot_eager" if dry else "inductor"
        self._out, self._end = out, time.monotonic() + seconds
        self._found: dict[str, Any] = {"rows": [], "notes": []}
        self._columns: list[str] = []
        self.write()

    def left(self) -> float:
        """Seconds until the limit."""
        return self._end - time.monotonic()

    def row(self, **values: Any) -> None:
        """Note a row and write everything."""
        self._found["rows"].append(values)
        print(json.dumps(values), flush=True)
        self.write()

    def note(self, text: str) -> None:
        """Note what a reader has to know."""
        self._found["notes"].append(text)
        print(text, flush=True)
        self.write()

    def write(self) -> None:
        """Bring what was found to the disk."""
        self._out.write_text(json.dumps(self._found, indent=1), encoding="utf-8")

    def wait(self) -> None:
        """For the device."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def free(self) -> None:
        """Give memory back between rows."""
        gc.collect()
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()
        torch._dynamo.reset()


# -- step: who needs how long for a training step --------------------------------------------------------------------


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def expert_loop(model: Any, optimizer: torch.optim.Optimizer, case: Case, device: torch.device) -> Run:
    """Autocast, and a loss divided by the number of micro-batches; no_sync where there is one."""

    def run(batches: list[Batch]) -> None:
        for index, (x, y) in enumerate(batches, 1):
            last = index % case.micro == 0
            with contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
                with torch.autocast(device.type, torch.bfloat16):
                    loss = cross_entropy(model(x), y) / case.micro
                loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()

    return run


def compile_blocks(model: Transformer, bench: Bench, case: Case) -> None:
    if case.compile:
        for block in model.blocks:
            block.compile(backend=bench.compiler)


def torch_expert(model: Transformer, case: Case, bench: Bench) -> Run:
    model.recompute = case.recompute
    compile_blocks(model, bench, case)
    return expert_loop(model, make_optimizer(model), case, bench.device)


def ddp(model: Transformer, case: Case, bench: Bench) -> Run:
    model.recompute = case.recompute
    compile_blocks(model, bench, case)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return expert_loop(wrapped, make_optimizer(model), case, bench.device)


def fsdp2(model: Transformer, case: Case, bench: Bench) -> Run:
    model.recompute = case.recompute
    compile_blocks(model, bench, case)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return expert_loop(model, make_optimizer(model), case, bench.device)


def with_weft(model: Transformer, case: Case, bench: Bench) -> Run:
    ctx = weft.adopt(device=str(bench.device))
    module, ctx = weft.with_precision(model, ctx, "bf16")
    if case.recompute:
        module, ctx = weft.recompute(module, ctx, blocks=Block)
    module, ctx = weft.replicate(module, ctx)
    if case.compile:
        module, ctx = weft.compile(module, ctx, blocks=Block, backend=bench.compiler)
    return weft_loop(module, make_optimizer(module), ctx, LoopCase(micro=case.micro))


def accelerate(model: Transformer, case: Case, bench: Bench) -> Run:
    from accelerate import Accelerator

    forget_accelerate()
    model.recompute = case.recompute
    compile_blocks(model, bench, case)
    accelerator = Accelerator(
        cpu=bench.device.type == "cpu", mixed_precision="bf16", gradient_accumulation_steps=case.micro
    )
    wrapped, optimizer = accelerator.prepare(model, make_optimizer(model))
    return accelerate_loop(accelerator, wrapped, optimizer, LoopCase(micro=case.micro))


def fabric(model: Transformer, case: Case, bench: Bench) -> Run:
    from lightning.fabric import Fabric

    model.recompute = case.recompute
    compile_blocks(model, bench, case)
    lightning = Fabric(accelerator=bench.device.type, devices=1, precision="bf16-mixed")
    wrapped, optimizer = lightning.setup(model, make_optimizer(model))
    return fabric_loop(lightning, wrapped, optimizer, LoopCase(micro=case.micro))


BUILDERS: dict[str, Callable[[Transformer, Case, Bench], Run]] = {
    "torch": torch_expert,
    "control": torch_expert,
    "weft": with_weft,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "accelerate": accelerate,
    "fabric": fabric,
}


@contextlib.contextmanager
def group_of_one(bench: Bench) -> Iterator[None]:
    """A process group of this process, for DDP and FSDP2 by hand."""
    accelerated = bench.device.type != "cpu"
    if accelerated:
        torch.accelerator.set_device_index(0)
    backend = dist.get_default_backend_for_device(bench.device.type)
    device_id = bench.device if accelerated else None
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device_id)
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure_steps(bench: Bench, cases: Sequence[Case]) -> None:
    torch.set_float32_matmul_precision("high")
    if bench.dry:
        SIZES.update(dict.fromkeys(SIZES, MINIATURE))
        cases = [cases[0]] if cases is CASES else [replace(cases[0], micro=2, recompute=True, names=("torch", "weft"))]
    with group_of_one(bench):
        longest = 0.0
        for case in cases:
            if bench.left() < max(longest, 1.0):
                bench.note(f"{case.title}: no time was left for it")
                continue
            begin = time.monotonic()
            measure_case(bench, case)
            longest = max(longest, time.monotonic() - begin)
            bench.free()


def build_all(bench: Bench, case: Case) -> dict[str, Run]:
    """Contestants with equal models; one that cannot be built or does not fit is left out, with a note."""
    size = SIZES[case.size]
    torch.manual_seed(0)
    with bench.device:
        original = Transformer(size)
    runs: dict[str, Run] = {}
    for name in case.names:
        if not installed(name):
            bench.note(f"{name}: not installed here")
            continue
        try:
            runs[name] = BUILDERS[name](copy.deepcopy(original), case, bench)
            runs[name](make_batches(bench, size, case.micro))
        except Exception as error:  # noqa: BLE001  (one contestant costs only itself)
            runs.pop(name, None)
            bench.note(f"{case.title}, {name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            bench.free()
    return runs


def make_batches(bench: Bench, size: Size, count: int) -> list[Batch]:
    drawn = torch.randint(size.vocabulary, (count, size.batch, size.tokens + 1), device=bench.device)
    return [(tokens[:, :-1], tokens[:, 1:].flatten()) for tokens in drawn]


def measure_case(bench: Bench, case: Case) -> None:
    size = SIZES[case.size]
    runs = build_all(bench, case)
    steps, rounds, warm_up = (1, 1, 0) if bench.dry else (max(4 // case.micro, 1), 10, 2)
    blocks: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    order = random.Random(0)
    gc.collect()
    for number in range(warm_up + rounds):
        batches = make_batches(bench, size, steps * case.micro)
        for name in order.sample(list(runs), len(runs)):
            bench.wait()
            begin = time.perf_counter()
            runs[name](batches)
            issued = time.perf_counter() - begin
            bench.wait()
            if number >= warm_up:
                blocks[name].append(((time.perf_counter() - begin) / steps, issued / steps))
    peaks = {name: peak_of_step(bench, run, make_batches(bench, size, case.micro)) for name, run in runs.items()}
    idle = {name: idle_share(bench, runs[name], make_batches(bench, size, 2 * case.micro)) for name in runs}
    best = peak_flops(bench.device) if bench.device.type != "cpu" else None
    for name, pairs in blocks.items():
        step = statistics.median(wall for wall, _ in pairs)
        to_torch = [mine[0] / theirs[0] for mine, theirs in zip(pairs, blocks.get("torch", pairs), strict=True)]
        bench.row(
            case=case.title,
            contestant=name,
            ratio=round(statistics.median(to_torch), 4),
            step_ms=round(1e3 * step, 3),
            tokens_per_s=round(size.batch * size.tokens * case.micro / step),
            mfu=None if best is None else round(size.flops * case.micro / step / best, 4),
            host_ms=round(1e3 * statistics.median(host for _, host in pairs), 3),
            idle_share=idle[name],
            peak_over_held_bytes=peaks[name],
        )


def peak_of_step(bench: Bench, run: Run, batches: list[Batch]) -> int | None:
    """Memory that a step needs beyond what all contestants hold between steps."""
    if bench.device.type == "cpu":
        return None
    bench.wait()
    torch.accelerator.reset_peak_memory_stats()
    held = torch.accelerator.memory_allocated()
    run(batches)
    bench.wait()
    return int(torch.accelerator.max_memory_allocated() - held)


def idle_share(bench: Bench, run: Run, batches: list[Batch]) -> float | None:
    """The share of two steps in which no kernel runs, from a trace."""
    if bench.device.type == "cpu":
        return None
    bench.wait()
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        run(batches)
        bench.wait()
    spans = sorted(
        (e.start_ns(), e.end_ns())
        for e in traced.profiler.kineto_results.events()
        if e.device_type().name != "CPU" and not getattr(e, "is_user_annotation", lambda: False)()
    )
    if not spans:
        return None
    busy, end = 0, spans[0][0]
    for start, stop in spans:
        busy += max(stop - max(start, end), 0)
        end = max(end, stop)
    return round(1 - busy / max(end - spans[0][0], 1), 4)


# -- memory: what each strategy holds, against its closed form -------------------------------------------------------

# Bytes per parameter and rank: float32 weights and gradients, AdamW; n ranks share the device.
# The first number is copied on all ranks, the second one divided among them.
HELD = {
    "replicate": (16, 0),
    "zero_partition 1": (8, 8),
    "zero_partition 2": (0, 16),
    "zero_partition 3": (0, 16),
    "fully_shard": (0, 16),
}


def held_on_rank(ctx: weft.DistContext, strategy: str, size: Size) -> tuple[int, int, int]:
    """Bytes that tensors of the training hold after a step, the peak over that of the device, and parameters."""
    torch.manual_seed(0)
    model: Any = Transformer(size).to(ctx.device)
    count = sum(p.numel() for p in model.parameters())
    options = {"lr": 1e-4, "fused": True}
    if strategy.startswith("zero"):
        optimizer: Any = torch.optim.AdamW(model.parameters(), **options)
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=int(strategy[-1]))
    elif strategy == "replicate":
        model, ctx = weft.replicate(model, ctx)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
    else:
        model, ctx = weft.fully_shard(model, ctx)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
    for _ in range(2):
        optimizer.zero_grad()
        tokens = torch.randint(size.vocabulary, (size.batch, size.tokens + 1), device=ctx.device)
        cross_entropy(model(tokens[:, :-1]), tokens[:, 1:].flatten()).backward()
        with weft.monitoring.peak_memory([model, optimizer], ctx) as peak:
            optimizer.step()
    return peak.parameters + peak.gradients + peak.optimizer, peak.total, count


def measure_memory(bench: Bench) -> None:
    size = MINIATURE if bench.dry else Size(6, 512, 8, vocabulary=16384, tokens=128, batch=2)
    for strategy, ranks in itertools.product(HELD, [2] if bench.dry else [2, 4]):
        if bench.dry and strategy not in ("replicate", "fully_shard"):
            continue
        if bench.left() < 1:
            bench.note(f"{strategy}, {ranks} ranks: no time was left for it")
            continue
        try:
            found = run_ranks(held_on_rank, ranks, strategy, size, device=str(bench.device), timeout_s=60)
        except Exception as error:  # noqa: BLE001  (one strategy costs only itself)
            bench.note(f"{strategy}, {ranks} ranks: {str(error.__cause__ or error).splitlines()[0][:300]}")
            continue
        most = max(held for held, _, _ in found)
        copied, divided = HELD[strategy]
        expected = copied + divided / ranks
        bench.row(
            strategy=strategy,
            ranks=ranks,
            ratio=round(most / found[0][2] / expected, 4),
            bytes_per_parameter=round(most / found[0][2], 3),
            closed_form=expected,
            peak_bytes=max(peak for _, peak, _ in found),
        )


# -- checkpoint: how long a save stands still, and how long a load takes ---------------------------------------------


def measure_checkpoints(bench: Bench) -> None:
    gigabytes = 0.01 if bench.dry else bench.gigabytes
    width = 256 if bench.dry else 4096
    layers = max(int(gigabytes * 1e9 / (12 * width * width)), 1)  # a weight and two moments, 4 bytes each
    folder = Path(tempfile.mkdtemp(prefix="weft-gpu-"))
    try:
        _save_and_load(bench, folder, layers, width)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _save_and_load(bench: Bench, folder: Path, layers: int, width: int) -> None:
    ctx = weft.local(device=str(bench.device))

    def make() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        with bench.device:
            model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer, weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)[0]

    def timed(call: Callable[[], Any]) -> tuple[float, Any]:
        bench.wait()
        begin = time.perf_counter()
        value = call()
        bench.wait()
        return time.perf_counter() - begin, value

    model, optimizer, state = make()
    size = 12 * layers * width * width
    copied, _ = timed(lambda: [p.detach().cpu() for p in model.parameters()])
    bench.row(what="a copy of the weights to the CPU by torch", seconds=round(copied, 3), bytes=size // 3)
    for number, which in enumerate(("first", "later"), 1):
        stall, running = timed(lambda number=number: weft.save_async(state, folder / "weft", number, ctx, keep=1))
        total = stall + timed(running.wait)[0]
        bench.row(what=f"save_async, {which}: stands still", seconds=round(stall, 3), bytes=size)
        bench.row(what=f"save_async, {which}: until complete", seconds=round(total, 3), bytes=size)
    theirs = None
    if bench.left() > 3 * total:
        theirs, _ = timed(lambda: torch.save([model.state_dict(), optimizer.state_dict()], folder / "torch.pt"))
        bench.row(what="torch.save", seconds=round(theirs, 3), bytes=size)
        loaded, value = timed(lambda: torch.load(folder / "torch.pt", map_location=bench.device, weights_only=True))
        loaded += timed(lambda: (model.load_state_dict(value[0]), optimizer.load_state_dict(value[1])))[0]
        bench.row(what="torch.load", seconds=round(loaded, 3), bytes=size)
        del value
        (folder / "torch.pt").unlink()
    else:
        bench.note("torch.save: no time was left for it")
    ours, found = timed(lambda: weft.restore(state, folder / "weft", ctx))
    assert found is not None
    ratio = round(ours / loaded, 4) if theirs is not None else None
    bench.row(what="restore", seconds=round(ours, 3), bytes=size, ratio=ratio, ratio_to="torch.load")
    if bench.left() > 1.5 * total:
        saved, _ = timed(lambda: weft.save(state, folder / "weft", 3, ctx, keep=1))
        ratio = round(saved / theirs, 4) if theirs is not None else None
        bench.row(what="save", seconds=round(saved, 3), bytes=size, ratio=ratio, ratio_to="torch.save")


# -- data: batches from workers to the device -------------------------------------------------------------------------


class Images(Dataset[torch.Tensor]):
    """Pixels as a decoder leaves them."""

    def __init__(self, count: int, side: int) -> None:
        self._pixels = torch.randint(256, (64, 3, side, side), dtype=torch.uint8)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._pixels[index % 64]


class Tokens(Dataset[torch.Tensor]):
    """Rows of a long text."""

    def __init__(self, count: int, length: int) -> None:
        self._text = torch.randint(50000, (count + length,))
        self._count, self._length = count, length

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._text[index : index + self._length]


def measure_data(bench: Bench) -> None:
    if bench.dry:
        cases: list[tuple[str, Any, int]] = [("images", Images(16, 8), 4), ("tokens", Tokens(16, 9), 4)]
    else:
        cases = [("images", Images(12800, 224), 128), ("tokens", Tokens(25600, 1025), 64)]
    for name, dataset, batch in cases:
        times = passes(bench, loaders(bench, dataset, batch))
        for who, seconds in times.items():
            if seconds:
                ratios = [mine / theirs for mine, theirs in zip(seconds, times["torch"], strict=True)]
                rate = len(dataset) / statistics.median(seconds)
                bench.row(
                    data=name, contestant=who, ratio=round(statistics.median(ratios), 4), samples_per_s=round(rate)
                )


def loaders(bench: Bench, dataset: Any, batch: int) -> dict[str, Callable[[], Iterator[torch.Tensor]]]:
    """What yields batches on the device: an expert's loop, and weft, over loaders that pin, or do not."""
    ctx = weft.local(device=str(bench.device))
    options: dict[str, Any] = {"batch_size": batch, "shuffle": True}
    if not bench.dry:
        options |= {"num_workers": 6, "persistent_workers": True, "multiprocessing_context": "fork"}
    pinned = bench.device.type != "cpu"

    def expert(loader: Any) -> Callable[[], Iterator[torch.Tensor]]:
        return lambda: (values.to(bench.device, non_blocking=True) for values in loader)

    def ours(*, pin: bool) -> Callable[[], Iterator[torch.Tensor]]:
        loader, _ = weft.shard_data(DataLoader(dataset, **options, pin_memory=pin), ctx)
        return lambda: iter(loader)

    return {
        "torch": expert(DataLoader(dataset, **options, pin_memory=pinned)),
        "control": expert(DataLoader(dataset, **options, pin_memory=pinned)),
        "weft": ours(pin=pinned),
        "weft, pins itself": ours(pin=False),
    }


def passes(bench: Bench, sources: dict[str, Callable[[], Iterator[torch.Tensor]]]) -> dict[str, list[float]]:
    """Seconds of each pass over the data, with work on the device for each batch; all take turns."""
    edge = 32 if bench.dry else 4096
    matrix = torch.randn(edge, edge, device=bench.device, dtype=torch.bfloat16) / math.sqrt(edge)
    times: dict[str, list[float]] = {who: [] for who in sources}
    for number in range(2 if bench.dry else 4):
        for who, source in sources.items():
            bench.wait()
            begin = time.perf_counter()
            for values in source():
                total = values.to(torch.bfloat16).mean()
                for _ in range(1 if bench.dry else 4):
                    total = total + (matrix @ matrix)[0, 0]
            bench.wait()
            if number:  # workers start in the first pass
                times[who].append(time.perf_counter() - begin)
        if bench.left() < 2 * sum(seconds[-1] for seconds in times.values() if seconds):
            break
    return times


# -- device: what it is, and its ceilings ------------------------------------------------------------------------------


def measure_device(bench: Bench) -> None:
    versions = {"torch": torch.__version__, "weft": weft.__version__}
    for name in ("accelerate", "lightning", "triton"):
        with contextlib.suppress(Exception):
            versions[name] = __import__(name).__version__
    name = "CPU" if bench.device.type == "cpu" else torch.cuda.get_device_name(bench.device)
    bench.row(device=name, cuda=torch.version.cuda, versions=versions)
    edge = 128 if bench.dry else 8192
    a, b = (torch.randn(edge, edge, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(2**16 if bench.dry else 2**30, device=bench.device)
    target = torch.empty_like(source)
    for what, call, amount in (
        ("bf16 matrix product, TFLOP/s", lambda: a @ b, 2 * edge**3 / 1e12),
        ("copy on the device, GB/s read and written", lambda: target.copy_(source), 8 * source.numel() / 1e9),
    ):
        for _ in range(3):
            call()
        bench.wait()
        begin = time.perf_counter()
        for _ in range(10):
            call()
        bench.wait()
        bench.row(what=what, value=round(10 * amount / (time.perf_counter() - begin), 1))


PARTS: dict[str, Callable[[Bench], None]] = {
    "device": measure_device,
    "step": lambda bench: measure_steps(bench, CASES),
    "compiled": lambda bench: measure_steps(bench, COMPILED),
    "memory": measure_memory,
    "checkpoint": measure_checkpoints,
    "data": measure_data,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if not options.dry and not torch.accelerator.is_available():
        parser.error("there is no accelerator; --dry runs in miniature on the CPU")
    if options.dry:
        torch.set_num_threads(1)
    bench = Bench(options.out, seconds=options.seconds, gigabytes=options.gigabytes, dry=options.dry)
    PARTS[options.part](bench)


if __name__ == "__main__":
    main()
