"""`weft rehearse`: a script as one rank of many would run it, in one process and without memory."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

from weft.context.settings import parse_mesh
from weft.errors import WeftError, value_error
from weft.peers.liveness import exception_text
from weft.peers.pretended import Mail
from weft.rehearsal.changes import Change, first_that_fits, recomputing_strategies
from weft.rehearsal.distinct_ranks import distinct_ranks
from weft.rehearsal.messages import Links
from weft.rehearsal.result import Rehearsal
from weft.rehearsal.script import rehearse_script
from weft.rehearsal.search import Candidate, candidates, table, try_candidate
from weft.rehearsal.simulation.pretended_tensors import Assumed
from weft.rehearsal.table import size_text

_TELL_S = 8.0
_UNITS = MappingProxyType(
    {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
)


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    sub = commands.add_parser(
        "rehearse",
        help="run a script as one rank of many, without memory: what it would hold and send",
        allow_abbrev=False,
        description="Run an unmodified script as one rank of a pretended job, in this process, on tensors without "
        "memory; print what that rank holds and sends. The script is left after some steps of its optimizer, and runs "
        "again with other numbers if it reads any. What it prints goes to stderr; files that it writes are written, "
        "but for checkpoints and logs of weft and torch.save.",
        epilog="With --search or --vary, {NAME}, {AXIS} and {mesh} among the arguments stand for each value: "
        "weft rehearse --ranks 64 --search replica,shard --vary batch=8,16 train.py --batch {batch} --mesh {mesh}",
    )
    sub.add_argument("--ranks", type=int, required=True, metavar="N", help="of the job")
    sub.add_argument("--mesh", metavar="AXIS=N,...", help="if the script names none: replica=128,shard=8")
    sub.add_argument(
        "--search", metavar="AXIS,...", help="every mesh of these axes, in one table: replica,shard; see {mesh} below"
    )
    sub.add_argument(
        "--vary", action="append", default=[], metavar="NAME=A,B,...", help="every value for {NAME} in the arguments"
    )
    sub.add_argument("--rank", default="0", help='which one to be (default 0), or "all": one of each kind')
    sub.add_argument("--steps", type=int, default=2, help="of the optimizer (default 2)")
    sub.add_argument("--per-node", type=int, default=8, metavar="N", help="ranks of a node (default 8)")
    reads = "a number that decides what runs, train.py:41=0.5, or values=0.5 for all lines; choices=balanced of routers"
    sub.add_argument("--assume", action="append", default=[], metavar="LINE=NUMBER", help=reads)
    sub.add_argument("--limit", metavar="SIZE", help="memory of a rank, 80GB: exit with 1 if a step needs more")
    sub.add_argument(
        "--json", type=Path, metavar="FILE", help="write the result, of the largest rank, there; `weft report` shows it"
    )
    sub.add_argument("script", help="and its arguments")
    sub.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """Print; returns 0, 1 if nothing stays within the limit, 2 if the script or an option cannot be used."""
    try:
        limit = math.inf if options.limit is None else _size(options.limit)
        with _told_now_and_then(options):
            return (_search if options.search or options.vary else _rehearse)(options, limit)
    except (WeftError, OSError, ValueError) as error:
        print(f"weft rehearse: {exception_text(error)}", file=sys.stderr)  # noqa: T201
        return 2


@contextlib.contextmanager
def _told_now_and_then(options: argparse.Namespace) -> Iterator[None]:
    """Say what is rehearsed, `options.now`, if it takes long; in a thread: the script may be what does."""
    begin, over = time.monotonic(), threading.Event()
    options.now = options.script

    def tell() -> None:
        while not over.wait(_TELL_S):
            print(f"weft rehearse: {options.now}, after {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)  # noqa: T201

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _rehearse(options: argparse.Namespace, limit: float) -> int:
    """One mesh, and over the limit what would fit."""
    mesh = None if options.mesh is None else parse_mesh(options.mesh)
    every = _ranks(options, Candidate(tuple(options.arguments), mesh, ""))
    print("\n\n".join(map(str, every)))  # noqa: T201
    found = _largest(every)
    if options.json is not None:
        options.json.write_text(found.to_json(), encoding="utf-8")
    if found.step_peak.total <= limit:
        return 0

    def changed(change: Change) -> Rehearsal:
        with recomputing_strategies(change):
            meant = Candidate(tuple(options.arguments), change.mesh or dict(found.mesh), f"with {change}")
            return _one(options, meant, found.rank)

    fits = first_that_fits(limit, dict(found.mesh) if mesh else None, changed)
    print(f"\n{_over(found, limit, fits)}")  # noqa: T201
    return 1


def _search(options: argparse.Namespace, limit: float) -> int:
    """Every choice in one table."""
    axes = [] if options.search is None else [name.strip() for name in options.search.split(",")]
    varied = {name: values.split(",") for name, _, values in (each.partition("=") for each in options.vary)}
    every = candidates(options.arguments, options.ranks, axes, varied)
    given = None if options.mesh is None else parse_mesh(options.mesh)
    trials = []
    for number, choice in enumerate(every, 1):
        print(f"weft rehearse: {number} of {len(every)}, {choice.label}", file=sys.stderr)  # noqa: T201
        meant = dataclasses.replace(choice, mesh=choice.mesh or given)
        trials.append(try_candidate(meant, lambda choice: _largest(_ranks(options, choice))))
    print(table(trials, limit))  # noqa: T201
    found = [each.found for each in trials if each.found is not None]
    if options.json is not None:
        options.json.write_text(f"[{', '.join(each.to_json() for each in found)}]", encoding="utf-8")
    if any(each.step_peak.total <= limit for each in found):
        return 0
    if found:
        print(f"\nnothing stays within {options.limit}; without --search, the smallest change is looked for")  # noqa: T201
    return 1 if found else 2


def _ranks(options: argparse.Namespace, choice: Candidate) -> tuple[Rehearsal, ...]:
    """The rank that was asked for, or one of each kind."""
    if options.rank == "all":
        mail = Mail()
        return distinct_ranks(lambda rank: _one(options, choice, rank, mail))
    return (_one(options, choice, int(options.rank)),)


def _one(options: argparse.Namespace, choice: Candidate, rank: int, mail: Mail | None = None) -> Rehearsal:
    options.now = ", ".join(filter(None, (f"rank {rank} of {options.ranks}", choice.label)))
    given = (each.rpartition("=") for each in options.assume)
    assume: Assumed = {line: "balanced" if text == "balanced" else float(text) for line, _, text in given}
    return rehearse_script(
        options.script,
        choice.arguments,
        ranks=options.ranks,
        mesh=choice.mesh,
        rank=rank,
        steps=options.steps,
        links=Links(per_node=options.per_node),
        assume=assume,
        mail=mail,
    )


def _largest(every: tuple[Rehearsal, ...]) -> Rehearsal:
    return max(every, key=lambda one: one.step_peak.total)


def _over(found: Rehearsal, limit: float, fits: tuple[Change, Rehearsal] | None) -> str:
    peak = found.step_peak
    holders = ", ".join(f"{each.kind} of {each.where} {size_text(each.bytes)}" for each in peak.holders[:3])
    lines = [f"over the limit: a step needs {size_text(peak.total)}, more than {size_text(limit)}; most are {holders}"]
    if fits is None:
        lines.append("no change that was rehearsed fits: more ranks on the shard axis, recompute, offload")
    else:
        lines.append(f"fits with {size_text(fits[1].step_peak.total)}, rehearsed: {fits[0]}")
    return "\n".join(lines)


def _size(text: str) -> float:
    """Bytes of "80GB", "80GiB" or a number."""
    parsed = re.fullmatch(r"([\d.]+)\s*([KMGT]I?)?B?", text.strip().upper())
    if parsed is None:
        raise value_error(
            f"rehearse: --limit {text} is not a size", found=text, expected="a number and a unit", fix="--limit 80GB"
        )
    return float(parsed[1]) * _UNITS[parsed[2] or ""]
