"""What weft costs on an accelerator, beside plain torch by an expert, DDP and FSDP2 by hand, Accelerate and Fabric.

One part per call, so that one that fails costs only itself; `.ci/gpu` calls them all. Each row is a line of JSON on
standard output as soon as it is measured. `--dry` is the same in miniature, on a simulated device or the CPU, where the
figures mean nothing.

    python benchmarks/gpu.py PART [--seconds 180] [--gigabytes 5] [--dry]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_bench import MINIATURE, Bench, Block, Size, Transformer
from gpu_reducers import measure_reducers
from gpu_steps import CASES, COMPILED, measure_steps
from safetensors.torch import save_model
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import weft
from weft.engines.torch.device.devices import TorchDevices
from weft.testing import run_ranks
from weft.weights import plan_placement

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
            where = {"device": str(bench.device), "backend": TorchDevices().backend(bench.device)}
            found = run_ranks(held_on_rank, ranks, strategy, size, **where, timeout_s=60)
        except Exception as error:  # noqa: BLE001  (one strategy costs only itself)
            bench.refused(f"{strategy}, {ranks} ranks", error)
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


def pinned_copy(bench: Bench) -> float:
    """GB/s from pinned memory to the device: the ceiling for restore, streaming and prefetch."""
    count = 2**12 if bench.dry else 2**28
    source = torch.empty(count, dtype=torch.uint8, pin_memory=bench.device.type == "cuda")
    target = torch.empty_like(source, device=bench.device)
    seconds = [bench.seconds(lambda: target.copy_(source, non_blocking=True))[0] for _ in range(5)]
    rate = count / min(seconds) / 1e9
    bench.row(what="a copy from pinned memory to the device", gb_per_s=round(rate, 2))
    return rate


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
    with bench.device:
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)
    size = 12 * layers * width * width
    ceiling = pinned_copy(bench)
    running: list[Any] = []

    def save_async(step: int) -> Any:
        return weft.save_async(state, folder / "weft", step, ctx, keep=1)

    def row(what: str, seconds: float, **more: Any) -> None:
        rate = size / seconds / 1e9
        bench.row(what=what, seconds=round(seconds, 3), bytes=size, gb_per_s=round(rate, 2),
                  to_pinned=round(rate / ceiling, 4), **more)  # fmt: skip

    for number, which in enumerate(("first", "later"), 1):
        stall = bench.seconds(lambda step=number: running.append(save_async(step)))[0]
        total = stall + bench.seconds(running[-1].wait)[0]
        row(f"save_async, {which}: stands still", stall)
        row(f"save_async, {which}: until complete", total)
    row("restore", ours := bench.seconds(lambda: weft.restore(state, folder / "weft", ctx))[0])
    if bench.left() < 3 * total:
        bench.note("torch.save and torch.load: no time was left for them")
        return

    def save() -> None:
        torch.save([model.state_dict(), optimizer.state_dict()], folder / "torch.pt")

    def load() -> None:
        values = torch.load(folder / "torch.pt", map_location=bench.device, weights_only=True)
        model.load_state_dict(values[0])
        optimizer.load_state_dict(values[1])

    row("torch.save", theirs := bench.seconds(save)[0])
    row("torch.load", loaded := bench.seconds(load)[0])
    (folder / "torch.pt").unlink()
    bench.row(what="restore", ratio=round(ours / loaded, 4), ratio_to="torch.load")
    if bench.left() > 1.5 * total:
        row("save", saved := bench.seconds(lambda: weft.save(state, folder / "weft", 3, ctx, keep=1))[0])
        bench.row(what="save", ratio=round(saved / theirs, 4), ratio_to="torch.save")


# -- streaming: a model larger than the memory it may take -----------------------------------------------------------


def measure_streaming(bench: Bench) -> None:
    """Forward passes of a model whose blocks come from the memory of the CPU, or the disk, when they are needed."""
    size = replace(MINIATURE, layers=6) if bench.dry else Size(12, 2048, 16, tokens=64, batch=1)
    ceiling = pinned_copy(bench)
    tokens = torch.randint(size.vocabulary, (size.batch, size.tokens), device=bench.device)
    for place in ("cpu", "disk") if bench.device.type != "cpu" else ("disk",):
        with tempfile.TemporaryDirectory(prefix="weft-gpu-") as folder, torch.no_grad():
            with torch.device("meta"):  # what an initialization takes is more than what is measured
                model = Transformer(size).eval()
            model.to_empty(device="cpu")
            model.head.weight = model.embed.weight
            for parameter in model.parameters():
                parameter.uniform_(-0.02, 0.02)
            block = sum(p.numel() * p.element_size() for p in model.blocks[0].parameters())
            whole = sum(p.numel() * p.element_size() for p in model.parameters())
            held = whole - (size.layers - 2) * block  # room for two at a time
            try:
                ctx = weft.local(device=str(bench.device))
                plan = plan_placement(model, {str(bench.device): held, place: None}, units=Block)
                if place == "disk":
                    save_model(model, str(Path(folder, "model.safetensors")))
                model, ctx = weft.place(model, ctx, plan, weights=folder if place == "disk" else None)
                model(tokens)
                times = [bench.seconds(lambda model=model: model(tokens))[0] for _ in range(2 if bench.dry else 4)]
            except Exception as error:  # noqa: BLE001  (one place costs only itself)
                bench.refused(f"streaming from the {place}", error)
                continue
            moved = sum(unit.num_bytes for unit in plan.streamed)
            rate = moved / min(times) / 1e9
            bench.row(
                what=f"streaming from the {place}",
                seconds=round(min(times), 4),
                bytes=moved,
                gb_per_s=round(rate, 2),
                to_pinned=round(rate / ceiling, 4),
            )
        bench.free()


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
    name = torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else bench.device.type
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
    "reducers": measure_reducers,
    "step": lambda bench: measure_steps(bench, CASES),
    "checkpoint": measure_checkpoints,
    "streaming": measure_streaming,
    "data": measure_data,
    "compiled": lambda bench: measure_steps(bench, COMPILED),
    "memory": measure_memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--gigabytes", type=float, default=5)
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if not options.dry and not torch.accelerator.is_available():
        parser.error("there is no accelerator; --dry runs in miniature without one")
    if options.dry:
        torch.set_num_threads(1)
    PARTS[options.part](Bench(seconds=options.seconds, gigabytes=options.gigabytes, dry=options.dry))


if __name__ == "__main__":
    main()
