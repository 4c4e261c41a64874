"""How long many ranks take to meet through the store of a job, and what they ask of it; see docs/machines.md.

No rank here computes anything: each is a thread with connections of its own to one store, in a few processes. They do
what a rank of that many does at the store when it starts (announce itself, and meet), and then meet again and again.

    python benchmarks/bench_meetings.py [--ranks 32 256 1024] [--processes 4] [--check] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import resource
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from weft.peers.agreement import agree
from weft.peers.connect import listen_at
from weft.peers.liveness import announce
from weft.peers.store import RankStore
from weft.peers.world import World

PROMISE_S = 5.0  # a start of 1,024 ranks
MEETINGS = 5
NODE = 8  # ranks that look after each other
FACTS = {"mesh": {"replica": 128, "shard": 8}, "data_axes": ["replica", "shard"], "seed": 0, "version": "0.0.0"}


def size(value: Any) -> int:
    """Bytes of what is sent or comes, about."""
    if isinstance(value, (list, tuple)):
        return sum(map(size, value))
    return len(value) if isinstance(value, (str, bytes)) else 8


def some_ranks(port: int, ranks: range, n: int, ready: Any, results: Any) -> None:
    """Be these ranks, and tell when each part began and ended, what was asked, and how many bytes moved."""
    moved: list[int] = []  # appending is atomic, adding is not
    real = RankStore._request

    def request(board: RankStore, call: Any, *arguments: object) -> Any:
        found = real(board, call, *arguments)
        moved.append(size(arguments) + size(found))
        return found

    RankStore._request = request  # type: ignore[method-assign]
    names = range(n)
    stores = [dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False) for _ in ranks]
    boards = [RankStore(store, limit_s=600.0).below(f"run/{n}") for store in stores]
    for store, board in zip(stores, boards, strict=True):
        # Connecting is not measured: torch looks up a name for each connection, at a server of names that may be slow.
        board._connection.spare.append(store.clone())  # type: ignore[attr-defined]
    worlds = [
        World(
            ranks=tuple(names),
            rank=rank,
            store=board,
            notes=[],
            near=range(rank // NODE * NODE, rank // NODE * NODE + NODE),
        )
        for rank, board in zip(ranks, boards, strict=True)
    ]
    parts: list[tuple[float, float, int, int]] = []

    def part(work: Any) -> None:
        ready.wait()
        before, begin = len(moved), time.monotonic()
        threads = [threading.Thread(target=work, args=(world,)) for world in worlds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        parts.append((begin, time.monotonic(), len(moved) - before, sum(moved[before:])))

    def start(world: World) -> None:
        announce(world)
        agree(world, "start", FACTS)

    def meet(world: World) -> None:
        for _ in range(MEETINGS):
            agree(world, "a meeting", FACTS)

    part(start)
    part(meet)
    results.put(parts)


def measured(n: int, processes: int) -> dict[str, float]:
    """A start of `n` ranks, and a meeting of them."""
    fd = listen_at("127.0.0.1", 0)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, master_listen_fd=fd)
    spawn = multiprocessing.get_context("spawn")
    ready, results = spawn.Barrier(processes), spawn.Queue()
    bounds = [n * each // processes for each in range(processes + 1)]
    running = [
        spawn.Process(target=some_ranks, args=(server.port, range(first, last), n, ready, results))
        for first, last in itertools.pairwise(bounds)
    ]
    for each in running:
        each.start()
    found = [results.get() for _ in running]
    for each in running:
        each.join()
    line: dict[str, float] = {"ranks": n}
    for name, times, parts in zip(("start", "meeting"), (1, MEETINGS), zip(*found, strict=True), strict=True):
        begins, ends, requests, sizes = zip(*parts, strict=True)
        line[f"{name}: s"] = (max(ends) - min(begins)) / times
        line[f"{name}: requests"] = sum(requests) / times
        line[f"{name}: bytes"] = sum(sizes) / times
    return line


def main() -> None:
    """Measure, print, and say whether the promise holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[32, 256, 1024])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--check", action="store_true", help="fail if a start of 1,024 ranks takes 5 s or more")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    # The store has two connections for each rank: one for requests, one for waiting.
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    lines = []
    for n in options.ranks:
        lines.append(measured(n, options.processes))
        texts = [f"{name} {value:,.{3 if name.endswith(': s') else 0}f}" for name, value in lines[-1].items()]
        print("; ".join(texts), flush=True)
    if options.json:
        options.json.write_text(json.dumps(lines))
    late = [line for line in lines if line["ranks"] <= 1024 and line["start: s"] >= PROMISE_S]
    if options.check and late:
        raise SystemExit(f"a start takes longer than {PROMISE_S:g} s: {late}")


if __name__ == "__main__":
    main()
