"""What saving and restoring a training state costs beside the disk itself; see docs/benchmarks.md.

The state is a model with AdamW moments of about 1 GB, replicated. Every contestant writes it into a new
folder and everything is brought to the disk (fsync) before the clock stops, whether the contestant does
that itself or not; before a load the files are dropped from the page cache. "disk" writes and reads the same
number of bytes in one file, one after the other, in the same run. Contestants take turns.

    python benchmarks/bench_checkpoint.py [--ranks 1 2] [--rounds 3] [--megabytes 1000] [--quick] [--check]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # noqa: F401  (every optimizer does; here once, before ranks are forked)
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import weft

WIDTH = 1024
BLOCK = 2**24


class Job:
    """What every contestant has to save: a module and an optimizer with moments."""

    def __init__(self, megabytes: int) -> None:
        layers = max(round(megabytes * 1e6 / (12 * WIDTH * (WIDTH + 1))), 1)  # weights and two moments in fp32
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for p in self.model.parameters():
            p.grad = torch.full_like(p, 1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.nbytes = 3 * 4 * sum(p.numel() for p in self.model.parameters())

    def spoil(self) -> None:
        """Change all values, so that a load has something to do."""
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(1.0)

    def fingerprint(self) -> float:
        return float(sum(p.double().sum() for p in self.model.parameters()))


# -- contestants: (save, load); a save may return the seconds for which training stood still -------------

Save = Callable[[Path], float | None]
Load = Callable[[Path], None]


def torch_save(job: Job, ranks: int) -> tuple[Save, Load]:
    def save(folder: Path) -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            torch.save({"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}, folder / "state.pt")

    def load(folder: Path) -> None:
        state = torch.load(folder / "state.pt", weights_only=True)
        job.model.load_state_dict(state["model"])
        job.optimizer.load_state_dict(state["optimizer"])

    return save, load


def _dcp_state(job: Job, model: nn.Module) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, job.optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _dcp_load(job: Job, model: nn.Module, folder: Path) -> None:
    state = _dcp_state(job, model)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, job.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def torch_dcp(job: Job, ranks: int) -> tuple[Save, Load]:
    model = DistributedDataParallel(job.model) if ranks > 1 else job.model

    def save(folder: Path) -> None:
        dcp.save(_dcp_state(job, model), checkpoint_id=folder)

    return save, lambda folder: _dcp_load(job, model, folder)


def torch_dcp_async(job: Job, ranks: int) -> tuple[Save, Load]:
    model = DistributedDataParallel(job.model) if ranks > 1 else job.model

    def save(folder: Path) -> float:
        begin = time.perf_counter()
        future: Any = dcp.async_save(_dcp_state(job, model), checkpoint_id=folder)
        stall = time.perf_counter() - begin
        future.result()
        return stall

    return save, lambda folder: _dcp_load(job, model, folder)


def accelerate(job: Job, ranks: int) -> tuple[Save, Load]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(job.model, job.optimizer)
    return lambda folder: accelerator.save_state(str(folder)) and None, lambda folder: accelerator.load_state(
        str(folder)
    )


def fabric(job: Job, ranks: int) -> tuple[Save, Load]:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy

    lightning = Fabric(
        accelerator="cpu", devices=ranks, strategy=DDPStrategy() if ranks > 1 else SingleDeviceStrategy()
    )
    lightning.launch()
    model, optimizer = lightning.setup(job.model, job.optimizer)
    state = {"model": model, "optimizer": optimizer}
    return (
        lambda folder: lightning.save(folder / "state.ckpt", state),
        lambda folder: lightning.load(folder / "state.ckpt", state) and None,
    )


def _weft_state(job: Job, ranks: int) -> tuple[weft.Checkpoint, weft.DistContext]:
    ctx = weft.adopt() if ranks > 1 else weft.local()
    model, ctx = weft.replicate(job.model, ctx)
    return weft.checkpointable({"model": model, "optimizer": job.optimizer}, ctx)


def weft_save(job: Job, ranks: int) -> tuple[Save, Load]:
    state, ctx = _weft_state(job, ranks)
    return (
        lambda folder: weft.save(state, folder, 1, ctx) and None,
        lambda folder: weft.restore(state, folder, ctx) and None,
    )


def weft_save_async(job: Job, ranks: int) -> tuple[Save, Load]:
    state, ctx = _weft_state(job, ranks)

    def save(folder: Path) -> float:
        begin = time.perf_counter()
        handle = weft.save_async(state, folder, 1, ctx)
        stall = time.perf_counter() - begin
        handle.wait()
        return stall

    return save, lambda folder: weft.restore(state, folder, ctx) and None


CONTESTANTS: dict[str, Callable[[Job, int], tuple[Save, Load]]] = {
    "torch.save": torch_save,
    "dcp": torch_dcp,
    "dcp async": torch_dcp_async,
    "accelerate": accelerate,
    "fabric": fabric,
    "weft": weft_save,
    "weft async": weft_save_async,
}
NEEDS = {"accelerate": "accelerate", "fabric": "lightning"}


# -- one rank --------------------------------------------------------------------------------------------


def bring_to_disk(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)


def drop_from_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def timed(ranks: int, call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds until all ranks are done."""
    if ranks > 1:
        dist.barrier()
    begin = time.perf_counter()
    result = call()
    if ranks > 1:
        dist.barrier()
    return time.perf_counter() - begin, result


def worker(rank: int, ranks: int, name: str, megabytes: int, store: str, pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    if ranks > 1:
        os.environ.update({key: str(value) for key, value in places.items()}, MASTER_ADDR="127.0.0.1")
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    job = Job(megabytes)
    save, load = CONTESTANTS[name](job, ranks)
    expected = job.fingerprint()
    copies = [torch.empty_like(p) for p in job.model.parameters()]
    while True:
        folder = pipe.recv()
        if folder is None:
            break
        begin = time.perf_counter()
        for _ in range(3):  # weights and two moments
            for copy, p in zip(copies, job.model.parameters(), strict=True):
                copy.copy_(p.detach())
        memcpy = time.perf_counter() - begin

        def saved(folder: Path = folder) -> float | None:
            stall = save(folder)
            if rank == 0:
                bring_to_disk(folder)
            return stall

        save_s, stall_s = timed(ranks, saved)
        if rank == 0:
            drop_from_cache(folder)
        job.spoil()
        load_s, _ = timed(ranks, lambda folder=folder: load(folder))
        assert job.fingerprint() == expected, f"{name} did not restore what it saved"
        pipe.send({"save": save_s, "load": load_s, "stall": stall_s, "memcpy": memcpy})
    if dist.is_initialized():
        dist.destroy_process_group()


# -- all contestants -------------------------------------------------------------------------------------


class Contestant:
    """Its ranks, which wait for a folder."""

    def __init__(self, name: str, ranks: int, megabytes: int, scratch: Path) -> None:
        server = multiprocessing.get_context("forkserver")  # torch is imported once
        pairs = [server.Pipe() for _ in range(ranks)]
        self._pipes = [ours for ours, _ in pairs]
        arguments = (ranks, name, megabytes, str(scratch / f"{name}.store"))
        self._processes = [
            server.Process(target=worker, args=(rank, *arguments, pairs[rank][1])) for rank in range(ranks)
        ]
        for process, (_, theirs) in zip(self._processes, pairs, strict=True):
            process.start()
            theirs.close()  # so that a rank that dies ends `recv`

    def run(self, folder: Path) -> dict[str, Any]:
        folder.mkdir()
        for pipe in self._pipes:
            pipe.send(folder)
        answers = [pipe.recv() for pipe in self._pipes]
        shutil.rmtree(folder)
        found = {key: max(answer[key] for answer in answers) for key in ("save", "load", "memcpy")}
        stalls = [answer["stall"] for answer in answers if answer["stall"] is not None]
        return {**found, "stall": max(stalls, default=None)}

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


def disk(folder: Path, nbytes: int) -> dict[str, Any]:
    """Write and read one file as fast as it goes."""
    folder.mkdir()
    path, block = folder / "bytes", os.urandom(BLOCK)
    begin = time.perf_counter()
    handle = os.open(path, os.O_CREAT | os.O_WRONLY)
    for _ in range(nbytes // BLOCK):
        os.write(handle, block)
    os.fsync(handle)
    os.close(handle)
    save_s = time.perf_counter() - begin
    drop_from_cache(folder)
    begin = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(BLOCK)
        while file.readinto(buffer):
            pass
    load_s = time.perf_counter() - begin
    shutil.rmtree(folder)
    return {"save": save_s, "load": load_s, "stall": None, "memcpy": 0.0}


def measure(ranks: int, rounds: int, megabytes: int, scratch: Path) -> dict[str, dict[str, Any]]:
    """The best of the rounds of each contestant; one is in memory at a time."""
    nbytes = Job(megabytes).nbytes
    found: dict[str, list[dict[str, Any]]] = {}
    for number in range(rounds):
        found.setdefault("disk", []).append(disk(scratch / "disk", nbytes))
        for name in (n for n in CONTESTANTS if n not in NEEDS or importlib.util.find_spec(NEEDS[n])):
            contestant = Contestant(name, ranks, megabytes, scratch)
            found.setdefault(name, []).append(contestant.run(scratch / f"{name}-{number}"))
            contestant.end()
            (scratch / f"{name}.store").unlink(missing_ok=True)
    best: dict[str, dict[str, Any]] = {}
    for name, results in found.items():
        stalls = [r["stall"] / r["memcpy"] for r in results if r["stall"] is not None]
        best[name] = {
            "save": min(r["save"] for r in results),
            "load": min(r["load"] for r in results),
            "stall": min((r["stall"] for r in results if r["stall"] is not None), default=None),
            "stall per memcpy": min(stalls, default=None),
        }
    print(f"\n{ranks} rank(s), {nbytes / 1e6:.0f} MB: best of {rounds}")
    titles = ("save s", "MB/s", "of disk", "load s", "MB/s", "of disk", "stall s", "/memcpy")
    print(f"  {'':12}" + "".join(f"{title:>9}" for title in titles))
    for name, result in best.items():
        cells = ""
        for kind in ("save", "load"):
            cells += f"{result[kind]:9.2f}{nbytes / 1e6 / result[kind]:9.0f}{best['disk'][kind] / result[kind]:9.2f}"
        if result["stall"] is not None:
            cells += f"{result['stall']:9.3f}{result['stall per memcpy']:9.2f}"
        print(f"  {name:12}{cells}", flush=True)
    return best


def verdicts(ranks: int, best: dict[str, dict[str, Any]]) -> list[tuple[bool, str]]:
    """Check the promises: one line each, and whether it is kept."""
    lines = []
    for kind in ("save", "load"):
        mine, raw = best["weft"][kind], best["disk"][kind]
        peer = min(result[kind] for name, result in best.items() if name not in ("disk", "weft", "weft async"))
        text = (
            f"{ranks} rank(s): {kind} at {raw / mine:.2f} >= 0.9 of the disk, or {mine:.2f} s <= {peer:.2f} s of a peer"
        )
        lines.append((raw / mine >= 0.9 or mine <= 1.02 * peer, text))
    stall = best["weft async"]["stall per memcpy"]
    lines.append((stall <= 1.1, f"{ranks} rank(s): async stall {stall:.2f} <= 1.1 of a memcpy of the state"))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--quick", action="store_true", help="a small state, once: the figures mean little")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a promise is broken")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rounds, megabytes = (1, 50) if options.quick else (options.rounds, options.megabytes)
    tables: dict[int, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        for ranks in options.ranks:
            tables[ranks] = measure(ranks, rounds, megabytes, Path(scratch))
    print()
    lines = [line for ranks, best in tables.items() for line in verdicts(ranks, best)]
    for kept, text in lines:
        print(f"{'kept  ' if kept else 'BROKEN'} {text}")
    if options.json:
        options.json.write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")
    return 1 if options.check and not all(kept for kept, _ in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
