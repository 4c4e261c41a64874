"""What loading, resuming and gathering cost: weft beside torch's own loader, Accelerate and Fabric.

Contestants take turns, epoch by epoch, in the same two processes. CPU is that of the main process of each
rank: workers work for all contestants alike. Ratios are to "torch": DataLoader + DistributedSampler, or a
stream that every rank and worker reads its own part of.

    python benchmarks/bench_data.py             # everything; add --quick for a smoke run
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

import weft

SIZES = {"small": (16, 32, 12800), "large": (37500, 8, 1024)}  # floats per sample, batch size, samples
CASES = [(kind, size, workers) for kind in ("map", "stream") for size in SIZES for workers in (0, 2)]
SPEED_LIMIT, CPU_LIMIT, RESUME_LIMIT, GATHER_LIMIT, SEEK_LIMIT_MS = 0.98, 1.02, 1.1, 1.05, 10
PEERS = ("accelerate", "accelerate, no dispatch", "fabric")
Run = Callable[[], Iterable[Any]]


class Samples(Dataset[torch.Tensor]):
    def __init__(self, floats: int, count: int) -> None:
        self.floats, self.count, self.source = floats, count, torch.arange(floats, dtype=torch.float32)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.source + index


class Stream(IterableDataset[torch.Tensor]):
    """The same samples one after the other; `split` lets ranks and workers read their own part."""

    def __init__(self, floats: int, count: int, *, split: bool) -> None:
        self.floats, self.count, self.split, self.source = floats, count, split, torch.arange(floats).float()
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if split else (0, 1)
        if split:
            self.place = (self.rank, self.ranks)
            del self.rank, self.ranks

    def __iter__(self) -> Iterator[torch.Tensor]:
        first, step = self.place if self.split else (0, 1)
        info = get_worker_info()
        if self.split and info is not None:
            first, step = first + step * info.id, step * info.num_workers
        for index in range(first, self.count, step):
            yield self.source + index


class Seekable(Stream):
    def __len__(self) -> int:
        return self.count

    def iter_from(self, start: int) -> Iterator[torch.Tensor]:
        source = self.source
        for index in range(start, self.count):
            yield source + index


def contestants(kind: str, size: str, workers: int, ctx: weft.DistContext) -> dict[str, Run]:
    floats, batch_size, count = SIZES[size]
    options = {"batch_size": batch_size, "num_workers": workers, "drop_last": True}
    if workers:
        options |= {"persistent_workers": True}  # else starting them is all that is measured

    def torchs() -> DataLoader[Any]:
        if kind == "stream":
            return DataLoader(Stream(floats, count, split=True), **options)
        data = Samples(floats, count)
        return DataLoader(data, sampler=DistributedSampler(data, shuffle=True), **options)

    def plain() -> DataLoader[Any]:
        data: Any = Stream(floats, count, split=False) if kind == "stream" else Samples(floats, count)
        return DataLoader(data, **options) if kind == "stream" else DataLoader(data, shuffle=True, **options)

    found: dict[str, Run] = {"torch": _epochs(torchs()), "control": _epochs(torchs())}
    if kind == "stream":
        data = Seekable(floats, count, split=False)
        found["weft"] = _iterated(weft.shard_data(DataLoader(data, **options), ctx)[0])
        found["weft, read by all"] = _iterated(weft.shard_data(plain(), ctx, uneven="drop")[0])
    else:
        found["weft"] = _iterated(weft.shard_data(plain(), ctx)[0])
    try:
        from accelerate import Accelerator, DataLoaderConfiguration
        from accelerate.state import AcceleratorState, PartialState

        for name, dispatch in (("accelerate", None), ("accelerate, no dispatch", False)):
            if kind == "map" and dispatch is False:
                continue
            AcceleratorState._reset_state()
            PartialState._reset_state()
            made = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
            found[name] = _iterated(made.prepare(plain()))
    except ImportError:
        pass
    try:
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=2, num_nodes=1, strategy="ddp")
        fabric._launched = True  # the processes are there already
        fabric._strategy._set_world_ranks()
        mine = torchs() if kind == "stream" else plain()
        found["fabric"] = _iterated(fabric.setup_dataloaders(mine, use_distributed_sampler=kind == "map"))
    except ImportError:
        pass
    return found


def _epochs(loader: DataLoader[Any]) -> Run:
    numbers = itertools.count()

    def run() -> Iterable[Any]:
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(next(numbers))
        return loader

    return run


def _iterated(loader: Iterable[Any]) -> Run:
    return lambda: loader


def measure_loading(case: tuple[str, str, int], rounds: int, ctx: weft.DistContext) -> dict[str, Any]:
    runs = contestants(*case, ctx)
    spent: dict[str, list[tuple[int, int]]] = {name: [] for name in runs}
    batches = dict.fromkeys(runs, 0)
    order = random.Random(0)
    gc.collect()
    gc.freeze()
    for number in range(rounds + 1):
        for name in order.sample(list(runs), len(runs)):
            loader = runs[name]()
            dist.barrier()
            cpu, wall, count = time.process_time_ns(), time.perf_counter_ns(), 0
            for batch in loader:
                count += len(batch)
            took = time.process_time_ns() - cpu, time.perf_counter_ns() - wall
            batches[name] = count
            if number:
                spent[name].append(took)
    gc.unfreeze()
    return {"spent": spent, "samples": batches}


def measure_resuming(rounds: int, ctx: weft.DistContext) -> dict[str, list[float]]:
    """Time until the first batch after going on at batch 10,000 of 8 per rank; milliseconds of CPU."""
    count, batch_size, done = 400_000, 8, 10_000
    found: dict[str, list[float]] = {name: [] for name in ("offset sampler", "weft", "weft, seekable stream", "islice")}
    for _ in range(rounds):
        for name, times in found.items():
            gc.collect()
            samples, position = Samples(4, count), {"seed": 0, "epoch": 0, "samples": done * batch_size * 2}
            # Set up beforehand, as at the start of a job; what is timed is going on.
            data: Any = samples if name == "weft" else Seekable(4, count, split=False)
            made, _ = weft.shard_data(
                DataLoader(data, batch_size=batch_size, shuffle=True if name == "weft" else None), ctx, seed=0
            )
            begin = time.process_time()
            if name == "offset sampler":
                order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
                mine = order[position["samples"] + dist.get_rank() :: 2]
                loader: Any = DataLoader(samples, batch_size=batch_size, sampler=mine)
                next(iter(loader))
            elif name == "weft":
                made.load_state_dict(position)  # type: ignore[attr-defined]
                next(iter(made))
            elif name == "islice":
                loader = DataLoader(Stream(4, count, split=True), batch_size=batch_size)
                next(itertools.islice(loader, done, None))
            else:
                made.load_state_dict(position)  # type: ignore[attr-defined]
                next(iter(made))
            times.append(1000 * (time.process_time() - begin))
    return found


GATHERED = {"32 scalars": (32,), "32 x 1000 logits": (32, 1000), "256 x 4096 logits": (256, 4096)}


def measure_gathering(shape: tuple[int, ...], rounds: int, ctx: weft.DistContext) -> dict[str, list[tuple[int, int]]]:
    """Predictions and labels of a batch, gathered by all ranks."""
    predictions, labels = torch.randn(shape), torch.arange(shape[0])
    ids = torch.arange(shape[0]) + shape[0] * ctx.rank
    rows = weft.metrics.SampleIds(ids=ids, valid=torch.ones(shape[0], dtype=torch.bool))

    def packed() -> Any:
        parts = [t.reshape(-1).view(torch.uint8) for t in (predictions, labels)]
        mine = torch.cat(parts)
        whole = mine.new_empty(2 * mine.numel())
        dist.all_gather_into_tensor(whole, mine)
        cut = [whole.view(2, -1)[r].split([p.numel() for p in parts]) for r in range(2)]
        every = [torch.cat([c[i] for c in cut]) for i in range(2)]
        return every[0].view(torch.float32).view(-1, *shape[1:]), every[1].view(torch.int64)

    runs: dict[str, Callable[[], Any]] = {"torch": packed, "control": packed}
    runs["weft"] = lambda: weft.metrics.gather_metrics((predictions, labels), ctx, ids=rows)
    try:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        runs["accelerate"] = lambda: accelerator.gather_for_metrics((predictions, labels))
    except ImportError:
        pass
    spent: dict[str, list[tuple[int, int]]] = {name: [] for name in runs}
    order, steps = random.Random(0), max(2, 20_000 // max(1, predictions.numel() // 32))
    steps = min(steps, 100)
    for number in range(rounds + 1):
        for name in order.sample(list(runs), len(runs)):
            dist.barrier()
            cpu, wall = time.process_time_ns(), time.perf_counter_ns()
            for _ in range(steps):
                runs[name]()
            took = (time.process_time_ns() - cpu) // steps, (time.perf_counter_ns() - wall) // steps
            if number:
                spent[name].append(took)
    return spent


def worker(rank: int, rounds: int, cases: list[tuple[str, str, int]], store: str, answers: Connection) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    ctx = weft.adopt(device="cpu")
    for case in cases:
        answers.send(measure_loading(case, rounds, ctx))
        gc.collect()
    answers.send(measure_resuming(max(rounds, 3), ctx))
    for shape in GATHERED.values():
        answers.send(measure_gathering(shape, 3 * rounds, ctx))
    dist.barrier()
    dist.destroy_process_group()


def ratios(per_rank: list[dict[str, list[tuple[int, int]]]], samples: dict[str, int] | None = None) -> dict[str, Any]:
    """CPU of both ranks, and wall time, of each contestant; per sample, relative to torch."""
    found = {}
    for name in per_rank[0]:
        cpu = [sum(each[0] for each in blocks) for blocks in zip(*[spent[name] for spent in per_rank], strict=True)]
        base = [sum(each[0] for each in blocks) for blocks in zip(*[spent["torch"] for spent in per_rank], strict=True)]
        wall = [max(each[1] for each in blocks) for blocks in zip(*[spent[name] for spent in per_rank], strict=True)]
        base_wall = [max(e[1] for e in blocks) for blocks in zip(*[spent["torch"] for spent in per_rank], strict=True)]
        scale = 1.0 if samples is None else samples["torch"] / max(samples[name], 1)
        found[name] = {
            "cpu_us": min(cpu) / 1000,
            "cpu": scale * min(cpu) / min(base),
            "paired": scale * statistics.median(a / b for a, b in zip(cpu, base, strict=True)),
            "speed": min(base_wall) / min(wall) / scale,
            "paired_speed": statistics.median(b / a for a, b in zip(wall, base_wall, strict=True)) / scale,
        }
    return found


def show(title: str, figures: dict[str, Any]) -> None:
    print(f"\n{title}")
    for name, f in figures.items():
        line = f"  {name:24} {f['cpu_us']:12.0f} us  cpu {f['cpu']:6.3f} ({f['paired']:.3f})"
        print(f"{line}  speed {f['speed']:6.3f} ({f['paired_speed']:.3f})", flush=True)


def verdicts(results: dict[str, Any]) -> list[tuple[bool, str]]:
    lines = []
    for title, figures in results["loading"].items():
        mine, control = figures["weft"], figures["control"]
        noise = max(control["paired"], 1 / control["paired"], control["paired_speed"], 1 / control["paired_speed"], 1.0)
        speed, cpu = mine["paired_speed"], mine["paired"]
        text = f"{title}: weft speed {speed:.3f}, cpu {cpu:.3f} (noise {noise:.3f})"
        lines.append((speed >= SPEED_LIMIT / noise and cpu <= CPU_LIMIT * noise, text))
        for peer in PEERS:
            if peer in figures:
                theirs = figures[peer]["paired"]
                lines.append((cpu <= theirs * noise, f"{title}: weft cpu {cpu:.3f}, {peer} {theirs:.3f}"))
    times = {name: min(found) for name, found in results["resuming"].items()}
    ratio = times["weft"] / times["offset sampler"]
    lines.append((ratio <= RESUME_LIMIT, f"resuming at batch 10,000: {ratio:.3f} of an offset sampler"))
    seek = times["weft, seekable stream"]
    lines.append((seek <= SEEK_LIMIT_MS, f"resuming a seekable stream: {seek:.2f} ms; islice {times['islice']:.0f} ms"))
    for title, figures in results["gathering"].items():
        control = figures["control"]["paired"]
        ratio, noise = figures["weft"]["paired"], max(control, 1 / control)
        lines.append((ratio <= GATHER_LIMIT * noise, f"gathering {title}: {ratio:.3f} (control {control:.3f})"))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=12, help="epochs per contestant")
    parser.add_argument("--cases", nargs="*", help="such as map/small/0; default: all")
    parser.add_argument("--quick", action="store_true", help="a smoke run: the figures mean little")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a promise is broken")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the ranks when they import torch
    names = {"/".join(map(str, case)): case for case in CASES}
    cases = [names[name] for name in (names if options.cases is None else options.cases)]
    rounds = 2 if options.quick else options.rounds
    spawn = multiprocessing.get_context("spawn")
    results: dict[str, Any] = {"loading": {}, "gathering": {}}
    with tempfile.TemporaryDirectory() as folder:
        pipes = [spawn.Pipe(duplex=False) for _ in range(2)]
        processes = [
            spawn.Process(target=worker, args=(rank, rounds, cases, str(Path(folder) / "store"), pipes[rank][1]))
            for rank in range(2)
        ]
        for process, (_, sending) in zip(processes, pipes, strict=True):
            process.start()
            sending.close()  # so that a rank that dies ends `recv`
        for case in cases:
            answers = [receiving.recv() for receiving, _ in pipes]
            title = f"{case[0]}, {case[1]}, {case[2]} workers"
            results["loading"][title] = ratios([a["spent"] for a in answers], answers[0]["samples"])
            show(title, results["loading"][title])
        answers = [receiving.recv() for receiving, _ in pipes]
        results["resuming"] = answers[0]
        for title in GATHERED:
            results["gathering"][title] = ratios([receiving.recv() for receiving, _ in pipes])
            show(f"gathering {title}", results["gathering"][title])
        for process in processes:
            process.join()
    print()
    lines = verdicts(results)
    for kept, text in lines:
        print(f"{'kept  ' if kept else 'BROKEN'} {text}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 1 if options.check and not all(kept for kept, _ in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
