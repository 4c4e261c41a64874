"""What a training step costs beyond the one an expert writes in plain torch; see docs/benchmarks.md.

All contestants live in the same processes and take turns in short blocks of steps, in a new order
each round. The expert's code runs twice, as "torch" and as "control": what these two differ by is
what the run cannot resolve. Compared is the CPU time of all threads, which other jobs disturb least.

    python benchmarks/bench_step.py [--quick] [--check] [--models mlp] [--cases plain replicate] [--json FILE]
"""

from __future__ import annotations

import argparse
import copy
import gc
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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contestants import CASES, MODELS, NEEDS, Batch, Case, installed
from sharded_contestants import OTHER_NUMBERS, available, builders_of
from torch.distributed.tensor import DTensor

WARM_UP = 2  # rounds; DDP lays its buckets out anew in the first steps
ROUNDS = {"mlp": 80, "transformer": 8}
STEPS = {"mlp": 20, "transformer": 2}
QUICK_ROUNDS = {"mlp": 4, "transformer": 1}
SHARD_BLOCKS = {"mlp": (40, 4), "transformer": (24, 1)}  # rounds and steps; ten units cost the MLP as much as 20 steps
WEFT_LIMIT = 1.01  # beyond the control
FLAT_LIMIT = 0.85
# [cpu ns, wall ns] per block
Blocks = dict[str, list[tuple[int, int]]]


def measure(model_name: str, case: Case, rounds: int, steps: int) -> tuple[Blocks, dict[str, float]]:
    """Let the contestants take turns.

    Returns:
        CPU and wall time of each block, and how far the parameters ended from the expert's.
    """
    make_model, make_batch = MODELS[model_name]
    torch.manual_seed(0)
    original = make_model()
    names = available(case, original)
    models = {name: copy.deepcopy(original) for name in names}
    runs = {name: builders_of(case)[name](models[name], case) for name in names}
    torch.manual_seed(1 + (dist.get_rank() if case.ranks > 1 else 0))
    blocks: Blocks = {name: [] for name in names}
    order = random.Random(0)  # the same on all ranks
    gc.collect()
    gc.freeze()
    for number in range(WARM_UP + rounds):
        batches: list[Batch] = [make_batch() for _ in range(steps * case.micro)]
        for name in order.sample(names, len(names)):
            if case.ranks > 1:
                dist.barrier()
            cpu, wall = time.process_time_ns(), time.perf_counter_ns()
            runs[name](batches)
            spent = time.process_time_ns() - cpu, time.perf_counter_ns() - wall
            if number >= WARM_UP:
                blocks[name].append(spent)
    gc.unfreeze()
    return blocks, {name: distance(models[name], models["torch"]) for name in names}


def distance(model: torch.nn.Module, reference: torch.nn.Module) -> float:
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((whole(p) - whole(q)).abs().max()) for p, q in pairs)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The values, also of a parameter that is cut into shards. Collective."""
    values = tensor.detach()
    return values.full_tensor() if isinstance(values, DTensor) else values


def worker(rank: int, ranks: int, jobs: list[tuple[str, str, int, int]], store: str, answers: Connection) -> None:
    """Run all jobs of one world size; one process per rank."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if ranks > 1:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1")
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for model_name, case_name, rounds, steps in jobs:
        answers.send(measure(model_name, CASES[case_name], rounds, steps))
        gc.collect()
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def collect(ranks: int, jobs: list[tuple[str, str, int, int]]) -> list[dict[str, Any]]:
    """Start the ranks and put their answers together."""
    spawn = multiprocessing.get_context("spawn")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        pipes = [spawn.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            spawn.Process(target=worker, args=(rank, ranks, jobs, str(Path(folder) / "store"), pipes[rank][1]))
            for rank in range(ranks)
        ]
        for process, (_, sending) in zip(processes, pipes, strict=True):
            process.start()
            sending.close()  # so that a rank that dies ends `recv`
        for model_name, case_name, _, steps in jobs:
            answers = [receiving.recv() for receiving, _ in pipes]
            results.append(summary(model_name, case_name, steps, answers))
            print_result(results[-1])
        for process in processes:
            process.join()
    return results


def summary(model: str, case: str, steps: int, answers: list[tuple[Blocks, dict[str, float]]]) -> dict[str, Any]:
    """Figures per contestant: times in microseconds per step, summed over ranks."""
    contestants = {}
    expert = [sum(cpu) for cpu in zip(*[[b[0] for b in blocks["torch"]] for blocks, _ in answers], strict=True)]
    for name in answers[0][0]:
        per_rank = [blocks[name] for blocks, _ in answers]
        cpu = [sum(block[0] for block in ranks) for ranks in zip(*per_rank, strict=True)]
        contestants[name] = {
            "cpu_us": sum(min(block[0] for block in blocks) for blocks in per_rank) / steps / 1000,
            "wall_us": min(block[1] for block in per_rank[0]) / steps / 1000,
            "paired": statistics.median(a / b for a, b in zip(cpu, expert, strict=True)),
            "distance": max(distances[name] for _, distances in answers),
        }
    for figures in contestants.values():
        figures["cpu"] = figures["cpu_us"] / contestants["torch"]["cpu_us"]
        figures["wall"] = figures["wall_us"] / contestants["torch"]["wall_us"]
    return {"model": model, "case": case, "contestants": contestants}


def print_result(result: dict[str, Any]) -> None:
    print(f"\n{result['model']}, {result['case']}")
    print(f"  {'':11}{'CPU us/step':>12}{'ratio':>8}{'paired':>8}{'wall us':>10}{'ratio':>8}{'distance':>10}")
    for name, f in result["contestants"].items():
        times = f"{f['cpu_us']:12.0f}{f['cpu']:8.3f}{f['paired']:8.3f}{f['wall_us']:10.0f}{f['wall']:8.3f}"
        print(f"  {name:11}{times}{f['distance']:10.1e}", flush=True)


def verdicts(results: list[dict[str, Any]]) -> list[tuple[bool, str]]:
    """Check the promises: one line each, and whether it is kept."""
    lines = []
    for result in results:
        figures, title = result["contestants"], f"{result['model']}, {result['case']}"
        control = figures["control"]["cpu"]
        limit = WEFT_LIMIT * max(control, 1 / control)
        ratio = figures["weft"]["cpu"]
        lines.append((ratio <= limit, f"{title}: weft {ratio:.3f} <= {limit:.3f} of torch (control {control:.3f})"))
        if "weft flat" in figures and result["model"] == "mlp":
            ratio = figures["weft flat"]["cpu"]
            lines.append((ratio <= FLAT_LIMIT, f"{title}: weft flat {ratio:.3f} <= {FLAT_LIMIT} of torch"))
            paired = figures["weft flat"]["paired"]  # the minimum alone would hide blocks that go wrong
            lines.append((paired <= 1, f"{title}: weft flat, median of paired ratios {paired:.3f} <= 1 of torch"))
        tolerance = 1e-3 if CASES[result["case"]].bf16 else 1e-5
        alike = [name for name in figures if name not in OTHER_NUMBERS.get(result["case"], ())]
        worst = max(alike, key=lambda name: figures[name]["distance"])
        far = figures[worst]["distance"]
        lines.append((far <= tolerance, f"{title}: same parameters within {tolerance}: {far:.1e} ({worst})"))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), help="default: all, or mlp with --quick")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, help=f"blocks per contestant; default {ROUNDS}")
    parser.add_argument("--steps", type=int, help=f"steps per block; default {STEPS}")
    parser.add_argument("--quick", action="store_true", help="a smoke run: the figures mean little")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a promise is broken")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the ranks when they import torch
    for name in [name for name in NEEDS if not installed(name)]:
        print(f"{name} is left out: {NEEDS[name]} is not installed")
    jobs = []
    for model in options.models or (["mlp"] if options.quick else MODELS):
        for case in options.cases:
            sharded = CASES[case].strategy == "shard"
            rounds, steps = SHARD_BLOCKS[model] if sharded else (ROUNDS[model], STEPS[model])
            rounds = QUICK_ROUNDS[model] if options.quick else rounds
            jobs.append((model, case, options.rounds or rounds, options.steps or steps))
    results = []
    for ranks in (1, 2):
        mine = [job for job in jobs if CASES[job[1]].ranks == ranks]
        results += collect(ranks, mine) if mine else []
    print()
    lines = verdicts(results)
    for kept, text in lines:
        print(f"{'kept  ' if kept else 'BROKEN'} {text}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 1 if options.check and not all(kept for kept, _ in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
