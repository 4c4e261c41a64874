"""How much memory a parameter takes on each rank, by strategy; see docs/benchmarks.md.

"held" sums the storages of parameters, gradients and optimizer state (local parts) after a step whose
gradients are still there. "peak" is the highest resident memory of the process during three steps,
gradients freed between them, beyond what it had before the model was made (Linux); it has activations
and communication buffers in it. A strategy gets processes of its own, warmed up on a tiny model.

    python benchmarks/bench_memory.py [--quick] [--check] [--only zero1 fully_shard] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # noqa: F401  (every optimizer does; here once, before ranks are forked)
import torch.distributed as dist
from contestants import NEEDS, Case, Transformer, installed, make_optimizer
from sharded_contestants import (
    DeepSpeedStep,
    accelerate_prepared,
    by_hand,
    deepspeed_prepared,
    fabric_prepared,
    torch_zero1_prepared,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import weft

# vocabulary, width, layers
Size = tuple[int, int, int]
HELD_SIZE: Size = (15700, 576, 8)  # 50 million parameters
PEAK_SIZE: Size = (11200, 480, 7)  # 30 million, 36 % of them in embedding and head
QUICK_SIZE: Size = (2240, 480, 1)
TINY_SIZE: Size = (64, 48, 1)
STEPS = 3
RESOLUTION = 1.02  # two runs of one strategy differ by less in the peak
Setup = Callable[[nn.Module, int], tuple[nn.Module, Any]]


# -- strategies: a module on every rank becomes what is called, and its optimizer --------------------


def torch_ddp(model: nn.Module, ranks: int) -> tuple[nn.Module, Any]:
    return DistributedDataParallel(model, gradient_as_bucket_view=True), make_optimizer(model)


def torch_zero1(model: nn.Module, ranks: int) -> tuple[nn.Module, Any]:
    return torch_zero1_prepared(model)


def torch_fsdp2(model: nn.Module, ranks: int) -> tuple[nn.Module, Any]:
    assert isinstance(model, Transformer)
    by_hand(model, init_device_mesh("cpu", (ranks,)), units=list(model.blocks))
    return model, make_optimizer(model)


def torch_fsdp2_split(model: nn.Module, ranks: int) -> tuple[nn.Module, Any]:
    by_hand(model, init_device_mesh("cpu", (ranks,)))
    return model, make_optimizer(model)


def accelerate(model: nn.Module, ranks: int) -> tuple[nn.Module, Any]:
    _, wrapped, optimizer = accelerate_prepared(model, Case("shard", ranks))
    return wrapped, optimizer


def fabric(model: nn.Module, ranks: int) -> tuple[nn.Module, Any]:
    _, wrapped, optimizer = fabric_prepared(model, Case("shard", ranks))
    return wrapped, optimizer


def weft_replicate(model: nn.Module, ranks: int) -> tuple[nn.Module, Any]:
    model, _ = weft.replicate(model, weft.adopt())
    return model, make_optimizer(model)


def weft_zero(stage: Any) -> Setup:
    def setup(model: nn.Module, ranks: int) -> tuple[nn.Module, Any]:
        model, optimizer, _ = weft.zero_partition(model, make_optimizer(model), weft.adopt(), stage=stage)
        return model, optimizer

    return setup


def weft_fully_shard(model: nn.Module, ranks: int) -> tuple[nn.Module, Any]:
    model, _ = weft.fully_shard(model, weft.adopt())
    return model, make_optimizer(model)


def deepspeed(stage: int) -> Setup:
    def setup(model: nn.Module, ranks: int) -> tuple[nn.Module, Any]:
        return deepspeed_prepared(model, stage)

    return setup


def weft_deepspeed(stage: Any, **options: Any) -> Setup:
    def setup(model: nn.Module, ranks: int) -> tuple[nn.Module, Any]:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        optimizer = make_optimizer(model)
        model, optimizer, _ = weft.zero_partition(
            model, optimizer, weft.adopt(), stage=stage, engine="deepspeed", **options
        )
        (engine,) = [
            offer.engine for offer in weft.contract.offered(model, weft.contract.Undoable) if hasattr(offer, "engine")
        ]
        return model, WeftDeepSpeedStep(engine, model, optimizer)

    return setup


class WeftDeepSpeedStep(DeepSpeedStep):
    """The user's optimizer, and what DeepSpeed's engine under it holds."""

    def __init__(self, engine: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(engine, model)
        self.step, self.zero_grad = optimizer.step, optimizer.zero_grad


STRATEGIES: dict[str, Setup] = {
    "torch ddp": torch_ddp,
    "replicate": weft_replicate,
    "torch zero1": torch_zero1,
    "zero1": weft_zero(1),
    "zero2": weft_zero(2),
    "zero3": weft_zero(3),
    "torch fsdp2": torch_fsdp2,
    "torch fsdp2 split": torch_fsdp2_split,
    "accelerate": accelerate,
    "fabric": fabric,
    "fully_shard": weft_fully_shard,
    **{f"deepspeed {stage}": deepspeed(stage) for stage in (1, 2, 3)},
    **{f"zero{stage} deepspeed": weft_deepspeed(stage) for stage in (1, 2, 3)},
    "zero3 ds offload": weft_deepspeed(3, offload="cpu"),
}
PEERS = {  # whose peak weft's is compared with
    "replicate": ["torch ddp"],
    "zero1": ["torch zero1", "deepspeed 1"],
    "zero2": ["deepspeed 2"],
    "zero3": ["deepspeed 3", "torch fsdp2", "torch fsdp2 split", "accelerate", "fabric"],
    "fully_shard": ["deepspeed 3", "torch fsdp2", "torch fsdp2 split", "accelerate", "fabric"],
}


def theory(name: str, ranks: int) -> float:
    """Bytes per parameter of parameters, gradients and two moments."""
    if name in ("torch ddp", "replicate"):
        return 16
    name = name.removesuffix(" ds offload").removesuffix(" deepspeed")
    if name in ("torch zero1", "zero1", "deepspeed 1"):
        return 8 + 8 / ranks
    return 4 + 12 / ranks if name in ("zero2", "deepspeed 2") else 16 / ranks


# -- one rank --------------------------------------------------------------------------------------------


def local(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.detach()
    return values.to_local() if isinstance(values, DTensor) else values


def held_bytes(model: nn.Module, optimizer: Any) -> dict[str, int]:
    """Bytes of the storages this rank keeps, each counted once."""
    if isinstance(optimizer, DeepSpeedStep):
        kinds = optimizer.tensors()
        return _bytes_of(kinds)
    while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer  # a wrapper's
    optimizer = getattr(optimizer, "optim", optimizer)  # the one inside of ZeroRedundancyOptimizer
    parameters: list[torch.Tensor] = list(model.parameters())
    kinds: dict[str, list[torch.Tensor]] = {
        "parameters": parameters,
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "state": [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)],
    }
    return _bytes_of(kinds)


def _bytes_of(kinds: dict[str, list[torch.Tensor]]) -> dict[str, int]:
    seen: set[int] = set()
    found = dict.fromkeys(kinds, 0)
    for kind, tensors in kinds.items():
        for storage in (local(tensor).untyped_storage() for tensor in tensors):
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                found[kind] += storage.nbytes()
    return found


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


def train(model: nn.Module, setup: Setup, ranks: int, vocabulary: int) -> dict[str, int]:
    called, optimizer = setup(model, ranks)
    forget_peak()
    found: dict[str, int] = {}
    for number in range(STEPS):
        tokens = torch.randint(vocabulary, (1, 17))
        cross_entropy(called(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()
        if number == STEPS - 1:
            found = held_bytes(model, optimizer)
        optimizer.zero_grad()
    return {**found, "peak": resident("VmHWM"), "steady": forget_peak()}


def worker(rank: int, ranks: int, name: str, size: Size, store: str, answers: Connection) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({key: str(value) for key, value in places.items()}, MASTER_ADDR="127.0.0.1")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    train(Transformer(*TINY_SIZE), STRATEGIES[name], ranks, TINY_SIZE[0])
    before = forget_peak()
    model = Transformer(*size)
    count = sum(p.numel() for p in model.parameters())
    unit = max(sum(p.numel() for p in part.parameters()) for part in (model.embed, model.head, *model.blocks))
    dist.barrier()
    figures = train(model, STRATEGIES[name], ranks, size[0])
    dist.barrier()
    figures["peak"] -= before
    figures["steady"] -= before
    answers.send({key: value / count for key, value in figures.items()} | {"unit": 4 * unit / count, "count": count})
    dist.destroy_process_group()


# -- all ranks -------------------------------------------------------------------------------------------


def measure(name: str, ranks: int, size: Size) -> dict[str, Any]:
    """Bytes per parameter, of the rank that has most."""
    server = multiprocessing.get_context("forkserver")  # torch is imported once
    with tempfile.TemporaryDirectory() as folder:
        pipes = [server.Pipe(duplex=False) for _ in range(ranks)]
        arguments = (ranks, name, size, str(Path(folder) / "store"))
        processes = [server.Process(target=worker, args=(rank, *arguments, pipes[rank][1])) for rank in range(ranks)]
        for process, (_, sending) in zip(processes, pipes, strict=True):
            process.start()
            sending.close()  # so that a rank that dies ends `recv`
        answers = [receiving.recv() for receiving, _ in pipes]
        for process in processes:
            process.join()
    figures = {key: max(answer[key] for answer in answers) for key in answers[0]}
    held = max(sum(answer[kind] for kind in ("parameters", "gradients", "state")) for answer in answers)
    return {"strategy": name, "ranks": ranks, "held": held, "theory": theory(name, ranks), **figures}


def table(title: str, names: list[str], size: Size, worlds: tuple[int, ...]) -> list[dict[str, Any]]:
    """Measure and print line by line."""
    columns = ("theory", "held", "parameters", "gradients", "state", "peak", "steady")
    results: list[dict[str, Any]] = []
    for ranks, name in ((ranks, name) for ranks in worlds for name in names):
        results.append(result := measure(name, ranks, size))
        if len(results) == 1:
            print(f"\n{title}: bytes per parameter and rank, {result['count'] / 1e6:.1f} million parameters")
            print(f"  {'':18}{'ranks':>6}" + "".join(f"{column:>11}" for column in columns))
        values = "".join(f"{result[column]:11.2f}" for column in columns)
        print(f"  {name:18}{ranks:6}{values}", flush=True)
    return results


def verdicts(held: list[dict[str, Any]], peak: list[dict[str, Any]]) -> list[tuple[bool, str]]:
    """Check the promises: one line each, and whether it is kept."""
    lines = []
    for result in held:
        if result["strategy"] in ("zero1", "zero2", "zero3", "fully_shard"):
            limit = result["theory"] + result["unit"]
            title = f"{result['strategy']}, {result['ranks']} ranks: held {result['held']:.2f}"
            lines.append(
                (result["held"] <= limit, f"{title} <= {result['theory']:.2f} + one unit of {result['unit']:.2f}")
            )
    by_name = {result["strategy"]: result for result in peak}
    for name, peers in PEERS.items():
        best = min((by_name[peer]["peak"] for peer in peers if peer in by_name), default=None)
        if best is not None and name in by_name:
            mine = by_name[name]["peak"]
            lines.append((mine <= RESOLUTION * best, f"{name}: peak {mine:.2f} <= {best:.2f} of the best peer"))
    for name in ("zero3", "fully_shard"):
        if name in by_name:
            mine, whole, unit = (by_name[name][key] for key in ("peak", "theory", "unit"))
            units = (mine - whole) / unit
            lines.append((units <= 1, f"{name}: peak {mine:.2f} <= {whole:.2f} + one unit; it is {units:.1f} units"))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--quick", action="store_true", help="a small model: the peaks mean little")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a promise is broken")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # what is freed goes back to the system at once
    for name in [name for name in NEEDS if not installed(name)]:
        print(f"{name} is left out: {NEEDS[name]} is not installed")
    names = [name for name in options.only if installed(name)]
    held_size, peak_size = (QUICK_SIZE, QUICK_SIZE) if options.quick else (HELD_SIZE, PEAK_SIZE)
    tables = {
        "held": table("held", names, held_size, (2, 4)),
        "peak": table("peak", names, peak_size, (2,)),
    }
    print()
    lines = verdicts(**tables)
    for kept, text in lines:
        print(f"{'kept  ' if kept else 'BROKEN'} {text}")
    if options.json:
        options.json.write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")
    return 1 if options.check and not all(kept for kept, _ in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
