"""A model larger than its budget: `weft.place` against Accelerate's disk offload, the same parts on the disk.

Each contestant is a process of its own; they take turns, so that what else the machine does meets all of them. A cold
forward begins with none of its files in the page cache (`posix_fadvise`, Linux), a warm one with all that fits there.
With many tokens a forward is mostly computation, with one token, as in `generate`, it is mostly reading.
"extra" is the anonymous memory of the process (RssAnon) at most, beyond what it had with the model on meta.
"limited" is the first forward under `RLIMIT_DATA`: what the process had, the budget, and 50 MB.

    python benchmarks/bench_place.py [--quick] [--budget 150] [--tokens 64] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import weft
from weft.weights import on_meta, plan_placement

SLACK = 50_000_000  # bytes under the limit, for activations and libraries


class Block(nn.Module):
    """A block of a transformer without its attention."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, dim] to the same."""
        hidden: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + hidden


class Net(nn.Module):
    """Blocks, with an embedding that is tied to the head."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, 1000, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[tokens] to [tokens, 1000]."""
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def memory(key: str) -> int:
    """Bytes of this process."""
    with Path("/proc/self/status").open() as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))


def drop_cache(folder: Path) -> None:
    """Let no file of a folder be in the page cache."""
    for path in (one for one in folder.rglob("*") if one.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def loaded(who: str, model: nn.Module, folder: Path, budget: int) -> nn.Module:
    """The model of a contestant, from one on meta."""
    path = folder / "model.safetensors"
    if who == "in memory":
        weft.load_weights(model, path, weft.local())
        return model
    plan = plan_placement(model, {"cpu": budget, "disk": None}, units=Block)
    if who == "weft":
        model, _ = weft.place(model, weft.local(), plan, weights=path)
        return model
    from accelerate import load_checkpoint_and_dispatch

    places = {name: unit.place for unit in plan.units for name in unit.names if name}
    vars(model)["tie_weights"] = lambda: setattr(model.head, "weight", model.embed.weight)
    return load_checkpoint_and_dispatch(model, str(path), device_map=places, offload_folder=str(folder / "offload"))


def serve(who: str, folder: Path, dim: int, layers: int, budget: int, num_tokens: int, *, limited: bool) -> None:
    """One contestant: a line from stdin is a forward, its report a line to stdout."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokens, most = torch.arange(num_tokens), 0
    # Threads and buffers of torch, and what it imports for the first normal_ on meta, are none of the extra memory.
    with on_meta():
        model: Any = Net(dim, layers)
    with torch.no_grad():
        Block(dim)(torch.ones(len(tokens), dim))
    if who == "accelerate":
        import accelerate  # noqa: F401  (its libraries are none of its extra memory)
    wanted = torch.load(folder / "logits")
    base = memory("RssAnon")
    if limited:
        most_bytes = memory("VmData") + budget + SLACK
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    model = loaded(who, model, folder, budget)

    def watch(*_: object) -> None:
        nonlocal most
        most = max(most, memory("RssAnon"))

    for part in model.layers:
        part.down.register_forward_hook(watch)
    for line in sys.stdin:
        if line.strip() == "cold":
            drop_cache(folder)
        began, cpu = time.perf_counter(), time.process_time()
        with torch.no_grad():
            found = model(tokens)
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        result = {"seconds": took, "cpu": cpu, "extra": most - base, "equal": torch.equal(found, wanted)}
        print(json.dumps(result), flush=True)


class Contestant:
    """A process that serves."""

    def __init__(self, who: str, folder: Path, *sizes: int, limited: bool = False) -> None:
        command = [sys.executable, __file__, "--serve", who, str(folder), *map(str, sizes), str(int(limited))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def forward(self, how: str) -> dict[str, Any]:
        """Ask for a forward."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.process.stdin.write(how + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            return {"failed": self.process.stderr.read().strip().splitlines()[-1][:90]}
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def measure(folder: Path, sizes: tuple[int, int, int, int], rounds: int) -> Iterator[dict[str, Any]]:
    """Rows of the table."""
    names = ["in memory", "weft", "accelerate"]
    contestants = {name: Contestant(name, folder, *sizes) for name in names}
    for who in names:
        contestants[who].forward("warm")
    for how in ("warm", "cold"):
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for _ in range(rounds):
            for who in names:
                found[who].append(contestants[who].forward(how))
        for who in names:
            assert all(one["equal"] for one in found[who]), who
            medians = {key: statistics.median(one[key] for one in found[who]) for key in ("seconds", "cpu")}
            yield {"who": who, "pages": how, **medians, "extra": max(one["extra"] for one in found[who])}
    for one in contestants.values():
        one.close()
    for who in ("weft", "in memory"):
        limited = Contestant(who, folder, *sizes, limited=True)
        yield {"who": who, "pages": "limited", **limited.forward("warm")}
        limited.close()


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--budget", type=int, default=150, help="MB in memory")
    parser.add_argument("--tokens", type=int, default=64, help="that a forward has")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=7, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        who, folder, *sizes, limited = options.serve
        dim, layers, budget, num_tokens = map(int, sizes)
        serve(who, Path(folder), dim, layers, budget, num_tokens, limited=bool(int(limited)))
        return
    dim, layers, budget = (256, 6, 8_000_000) if options.quick else (1024, 24, options.budget * 1_000_000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        model = Net(dim, layers)
        save_file({n: p.detach() for n, p in model.named_parameters()}, folder / "model.safetensors")
        with torch.no_grad():
            torch.save(model(torch.arange(options.tokens)), folder / "logits")
        size = sum(p.nbytes for p in model.parameters())
        del model
        print(f"{size / 1e6:.0f} MB of weights, {budget / 1e6:.0f} MB of budget")
        rows = []
        for row in measure(folder, (dim, layers, budget, options.tokens), options.rounds):
            rows.append(row)
            took = "" if "failed" in row else f"{row['seconds']:8.3f} s, {row['cpu']:8.3f} s of CPU"
            said = row.get("failed") or f"{took}   {row['extra'] / 1e6:8.0f} MB extra"
            print(f"{row['pages']:8} {row['who']:12} {said}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
