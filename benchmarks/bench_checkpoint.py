"""What saving and restoring a training state costs beside the disk itself; see docs/benchmarks.md.

The state is a model with AdamW moments of about 1 GB, replicated. Every contestant writes it into a new
folder and everything is brought to the disk (fsync) before the clock stops, whether the contestant does
that itself or not. It is loaded twice, with the files dropped from the page cache: by the processes that saved,
and by new ones, as after a restart, whose memory is fresh and whose optimizer has not stepped yet. "disk" writes and
reads the same number of bytes in one file, one after the other, in the same run. Training stands still for the "stall"
of a save in the background: "first" takes fresh memory, a later one does not. Contestants take turns.

    python benchmarks/bench_checkpoint.py [--ranks 1 2] [--rounds 3] [--megabytes 1000] [--quick] [--check]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
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
from typing import Any, TypeAlias

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
KINDS = ("save", "load", "load again")
Sums: TypeAlias = tuple[float, ...]  # of the weights, and of their first moments


class Job:
    """What every contestant has to save: a module and an optimizer with moments."""

    def __init__(self, megabytes: int, *, has_stepped: bool = True) -> None:
        layers = max(round(megabytes * 1e6 / (12 * WIDTH * (WIDTH + 1))), 1)  # weights and two moments in fp32
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        if has_stepped:
            self.step()
        self.nbytes = 3 * 4 * sum(p.numel() for p in self.model.parameters())

    def step(self) -> None:
        for p in self.model.parameters():
            p.grad = torch.full_like(p, 1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def spoil(self) -> None:
        """Change all values, so that a load has something to do."""
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(1.0)

    def sums(self) -> Sums:
        parameters = [p.detach() for p in self.model.parameters()]
        moments = [entry["exp_avg"] for entry in self.optimizer.state.values()]
        return tuple(float(sum(one.double().sum() for one in each)) for each in (parameters, moments))


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


def _weft_state(job: Job, ranks: int) -> tuple[weft.checkpoint.Checkpoint, weft.DistContext]:
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


def memcpy_s(job: Job) -> float:
    """Seconds to copy as many bytes as the state has into memory that is not fresh."""
    copies = [torch.empty_like(p) for p in job.model.parameters()]
    best = math.inf
    for _ in range(3):
        begin = time.perf_counter()
        for copy, p in zip(copies, job.model.parameters(), strict=True):
            copy.copy_(p.detach())
        best = min(best, time.perf_counter() - begin)
    return 3 * best  # weights and two moments


def worker(
    rank: int, ranks: int, name: str, megabytes: int, expected: Sums | None, store: str, pipe: Connection
) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    if ranks > 1:
        os.environ.update({key: str(value) for key, value in places.items()}, MASTER_ADDR="127.0.0.1")
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    job = Job(megabytes, has_stepped=expected is None)
    save, load = CONTESTANTS[name](job, ranks)
    expected = expected or job.sums()

    def saved(folder: Path) -> float | None:
        stall = save(folder)
        if rank == 0:
            bring_to_disk(folder)
        return stall

    while True:
        what, folder = pipe.recv()
        if what == "end":
            break
        if what == "save":
            memcpy = memcpy_s(job)
            seconds, stall = timed(ranks, lambda folder=folder: saved(folder))
            pipe.send({"seconds": seconds, "stall": stall, "memcpy": memcpy})
        else:
            if rank == 0:
                drop_from_cache(folder)
            job.spoil()
            seconds, _ = timed(ranks, lambda folder=folder: load(folder))
            assert job.sums() == expected, f"{name} did not restore what it saved"
            pipe.send({"seconds": seconds})
    if dist.is_initialized():
        dist.destroy_process_group()


# -- all contestants -------------------------------------------------------------------------------------


class Contestant:
    """Its ranks, which wait for a folder; with `expected`, new ones that load what others have saved."""

    def __init__(self, name: str, ranks: int, megabytes: int, scratch: Path, expected: Sums | None) -> None:
        server = multiprocessing.get_context("forkserver")  # torch is imported once
        pairs = [server.Pipe() for _ in range(ranks)]
        self._pipes = [ours for ours, _ in pairs]
        arguments = (ranks, name, megabytes, expected, str(scratch / f"{name}.store"))
        self._processes = [
            server.Process(target=worker, args=(rank, *arguments, pairs[rank][1])) for rank in range(ranks)
        ]
        for process, (_, theirs) in zip(self._processes, pairs, strict=True):
            process.start()
            theirs.close()  # so that a rank that dies ends `recv`

    def do(self, what: str, folder: Path) -> dict[str, Any]:
        """Let all ranks save into a folder or load from it; the slowest counts."""
        folder.mkdir(exist_ok=True)
        for pipe in self._pipes:
            pipe.send((what, folder))
        answers = [pipe.recv() for pipe in self._pipes]
        return {key: max((a[key] for a in answers if a[key] is not None), default=None) for key in answers[0]}

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.send(("end", None))
        for process in self._processes:
            process.join()


def turn(name: str, ranks: int, megabytes: int, folder: Path, expected: Sums) -> dict[str, Any]:
    """One contestant saves twice, and loads twice: in the processes that saved, and in new ones."""
    contestant = Contestant(name, ranks, megabytes, folder.parent, None)
    first = contestant.do("save", folder)
    shutil.rmtree(folder)
    later = contestant.do("save", folder)
    again = contestant.do("load", folder)
    contestant.end()
    (folder.parent / f"{name}.store").unlink(missing_ok=True)
    contestant = Contestant(name, ranks, megabytes, folder.parent, expected)
    load = contestant.do("load", folder)
    contestant.end()
    (folder.parent / f"{name}.store").unlink(missing_ok=True)
    shutil.rmtree(folder)
    return {
        "save": min(first["seconds"], later["seconds"]),
        "load": load["seconds"],
        "load again": again["seconds"],
        "first stall": first["stall"],
        "stall": later["stall"],
        "memcpy": min(first["memcpy"], later["memcpy"]),
    }


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
    return {"save": save_s, "load": load_s, "load again": load_s, "first stall": None, "stall": None}


def measure(ranks: int, rounds: int, megabytes: int, scratch: Path) -> dict[str, dict[str, Any]]:
    """The best of the rounds of each contestant; one is in memory at a time."""
    job = Job(megabytes)
    nbytes, expected = job.nbytes, job.sums()
    del job
    found: dict[str, list[dict[str, Any]]] = {}
    names = [name for name in CONTESTANTS if name not in NEEDS or importlib.util.find_spec(NEEDS[name])]
    for _ in range(rounds):
        found.setdefault("disk", []).append(disk(scratch / "disk", nbytes))
        names = [*names[3:], *names[:3]]  # memory is quicker to come by after some contestants than after others
        for name in names:
            found.setdefault(name, []).append(turn(name, ranks, megabytes, scratch / name, expected))
    best: dict[str, dict[str, Any]] = {}
    for name in ("disk", *(name for name in CONTESTANTS if name in found)):
        results = found[name]
        best[name] = {key: min(r[key] for r in results) for key in KINDS}
        for key in ("first stall", "stall"):
            best[name][key] = min((r[key] / r["memcpy"] for r in results if r[key] is not None), default=None)
    print(f"\n{ranks} rank(s), {nbytes / 1e6:.0f} MB: best of {rounds}; stalls in copies of the state by memcpy")
    print(f"  {'':12}" + "".join(f"{title:>11}{'MB/s':>6}{'of disk':>8}" for title in KINDS) + "  first stall  later")
    for name, result in best.items():
        cells = ""
        for kind in KINDS:
            cells += f"{result[kind]:9.2f} s{nbytes / 1e6 / result[kind]:6.0f}{best['disk'][kind] / result[kind]:8.2f}"
        if result["stall"] is not None:
            cells += f"{result['first stall']:13.2f}{result['stall']:7.2f}"
        print(f"  {name:12}{cells}", flush=True)
    return best


def verdicts(ranks: int, best: dict[str, dict[str, Any]]) -> list[tuple[bool, str]]:
    """Check the promises: one line each, and whether it is kept."""
    lines = []
    for kind in KINDS:
        mine, raw = best["weft"][kind], best["disk"][kind]
        peer = min(result[kind] for name, result in best.items() if name not in ("disk", "weft", "weft async"))
        text = (
            f"{ranks} rank(s): {kind} at {raw / mine:.2f} >= 0.9 of the disk, or {mine:.2f} s <= {peer:.2f} s of a peer"
        )
        lines.append((raw / mine >= 0.9 or mine <= 1.02 * peer, text))
    stall = best["weft async"]["stall"]
    lines.append((stall <= 1.1, f"{ranks} rank(s): async stall {stall:.2f} <= 1.1 copies of the state by memcpy"))
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
    torch.set_num_threads(1)
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
