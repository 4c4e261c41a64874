"""What a step of an elastic job costs beyond one of `replicate(flat=True)` while nobody dies; see docs/benchmarks.md.

Both live in the same processes and take turns in blocks of steps, in a new order each round. The flat one runs twice,
as "flat" and as "control": what these two differ by is what the run cannot resolve. Compared is the CPU time of all
threads, summed over the ranks.

    weft launch -n 2 --min-replicas 2 benchmarks/bench_resilient.py [--model wide] [--rounds 40] [--steps 5]
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import os
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from contestants import MODELS
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import weft

WARM_UP = 2  # rounds


def wide() -> nn.Module:
    """1.6 million parameters in 8 tensors."""
    return nn.Sequential(nn.Linear(256, 768), nn.Tanh(), nn.Linear(768, 768), nn.Tanh(), nn.Linear(768, 768), nn.Tanh(),
                         nn.Linear(768, 256))  # fmt: skip


def samples(model: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Inputs, targets, and the samples per rank and step."""
    if model == "wide":
        return torch.randn(4096, 256), torch.randint(256, (4096,)), 64
    batches = [MODELS[model][1]() for _ in range(64)]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return x, y, len(x) // 64


def flat(model: nn.Module, data: TensorDataset, size: int, group: weft.DistContext) -> Iterator[None]:
    """One step for each `next`, as `replicate(flat=True)` makes it."""
    loader, ctx = weft.shard_data(DataLoader(data, batch_size=size, shuffle=True), group)
    model, ctx = weft.replicate(model, ctx, flat=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in itertools.count():
        for x, y in loader:
            (cross_entropy(model(x), y) * loader.share).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def resilient(model: nn.Module, data: TensorDataset, size: int, one: weft.DistContext) -> Iterator[None]:
    """The same in an elastic job."""
    loader, ctx = weft.shard_data(DataLoader(data, batch_size=size, shuffle=True), one)
    model, ctx = weft.replicate(model, ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer, "loader": loader}, ctx)
    batches = weft.resilient(loader, ctx, state=state)
    for _ in itertools.count():
        for x, y in batches:
            (cross_entropy(model(x), y) * loader.share).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def main(one: weft.DistContext, rank: int, ranks: int) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--model", default="wide", choices=["wide", *MODELS])
    options = parser.parse_args()
    file = Path(f"/tmp/weft-bench-{os.environ['MASTER_PORT']}")
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    group = weft.adopt(device="cpu")
    torch.set_num_threads(1)
    name = options.model
    torch.manual_seed(0)
    original = wide() if name == "wide" else MODELS[name][0]()
    x, y, size = samples(name)
    models = {each: copy.deepcopy(original) for each in ("flat", "control", "resilient")}
    data = TensorDataset(x, y)
    runs = {each: flat(models[each], data, size, group) for each in ("flat", "control")}
    runs["resilient"] = resilient(models["resilient"], data, size, one)
    blocks = torch.zeros(3, options.rounds, dtype=torch.float64)
    order = random.Random(0)  # the same on all ranks
    gc.collect()
    gc.freeze()
    for number in range(-WARM_UP, options.rounds):
        for each in order.sample(list(runs), 3):
            dist.barrier()
            begin = time.process_time_ns()
            for _ in range(options.steps):
                next(runs[each])
            if number >= 0:
                blocks[list(runs).index(each), number] = (time.process_time_ns() - begin) / options.steps / 1000
    gc.unfreeze()
    least = blocks.min(dim=1).values
    dist.all_reduce(blocks)
    dist.all_reduce(least)
    if rank == 0:
        print(f"\n{name}: CPU us per step, of {ranks} ranks; ratio to flat: of the least, and paired median")
        for index, each in enumerate(runs):
            paired = statistics.median((blocks[index] / blocks[0]).tolist())
            print(f"  {each:10}{least[index]:10.0f}{least[index] / least[0]:8.3f}{paired:8.3f}")
        values = [[p.detach() for p in model.parameters()] for model in models.values()]
        far = max(float((a - b).abs().max()) for a, b in zip(values[0], values[2], strict=True))
        print(f"  largest difference of a parameter: {far:.1e}")
    group.close()
    dist.destroy_process_group()
    file.unlink(missing_ok=True)


if __name__ == "__main__":
    place = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with weft.start(elastic="replica", device="cpu") as ctx:
        main(ctx, *place)
