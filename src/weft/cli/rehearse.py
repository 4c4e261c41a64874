"""`weft rehearse`: a script as one rank of many would run it, in one process and without memory."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from weft.context.settings import parse_mesh
from weft.errors import WeftError, value_error
from weft.peers.liveness import exception_text
from weft.rehearsal.changes import Change, applied, smallest
from weft.rehearsal.distinct import distinct_ranks
from weft.rehearsal.messages import Links
from weft.rehearsal.result import Rehearsal
from weft.rehearsal.script import rehearse_script
from weft.rehearsal.simulation.pretended_tensors import Assumed
from weft.rehearsal.table import size_text

__all__ = ["add_parser", "run"]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    sub = commands.add_parser(
        "rehearse",
        help="run a script as one rank of many, without memory: what it would hold and send",
        allow_abbrev=False,
        description="Run an unmodified script as one rank of a pretended job, in this process, on tensors without "
        "memory; print what that rank holds and sends. The script is left after some steps of its optimizer. What it "
        "prints goes to stderr; files that it writes are written.",
    )
    sub.add_argument("--ranks", type=int, required=True, metavar="N", help="of the job")
    sub.add_argument("--mesh", metavar="AXIS=N,...", help="if the script names none: replica=128,shard=8")
    sub.add_argument("--rank", default="0", help='which one to be (default 0), or "all": one of each kind')
    sub.add_argument("--steps", type=int, default=2, help="of the optimizer (default 2)")
    sub.add_argument("--per-node", type=int, default=8, metavar="N", help="ranks of a node (default 8)")
    reads = (
        "what the script reads of a tensor, train.py:41=0.5, or values=0.5 for all lines; choices=balanced of routers"
    )
    sub.add_argument("--assume", action="append", default=[], metavar="LINE=NUMBER", help=reads)
    sub.add_argument("--limit", metavar="SIZE", help="memory of a rank, 80GB: exit with 1 if a step needs more")
    sub.add_argument(
        "--json", type=Path, metavar="FILE", help="write the result, of the largest rank, there; `weft report` shows it"
    )
    sub.add_argument("script", help="and its arguments")
    sub.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)
    sub.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print; returns 0, 1 if a step needs more than the limit, 2 if the script or an option cannot be used."""
    try:
        limit = None if options.limit is None else _size(options.limit)
        mesh = None if options.mesh is None else parse_mesh(options.mesh)
        given = (each.rpartition("=") for each in options.assume)
        assume: Assumed = {line: "balanced" if text == "balanced" else float(text) for line, _, text in given}

        def rehearsed(change: Change, rank: int) -> Rehearsal:
            with applied(change):
                return rehearse_script(
                    options.script,
                    options.arguments,
                    ranks=options.ranks,
                    mesh=mesh if change.mesh is None else dict(change.mesh),
                    rank=rank,
                    steps=options.steps,
                    links=Links(per_node=options.per_node),
                    assume=assume,
                )

        if options.rank == "all":
            every = distinct_ranks(lambda rank: rehearsed(Change(), rank))
        else:
            every = (rehearsed(Change(), int(options.rank)),)
        print("\n\n".join(map(str, every)))  # noqa: T201
        found = max(every, key=lambda one: one.step_peak.total)
        if options.json is not None:
            options.json.write_text(found.to_json(), encoding="utf-8")
        if limit is None or found.step_peak.total <= limit:
            return 0
        fits = smallest(limit, dict(found.mesh) if mesh else None, lambda change: rehearsed(change, found.rank))
        print(f"\n{_over(found, limit, fits)}")  # noqa: T201
    except (WeftError, OSError, ValueError) as error:
        print(f"weft rehearse: {exception_text(error)}", file=sys.stderr)  # noqa: T201
        return 2
    return 1


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
            f"rehearse: --limit {text} is no size", found=text, expected="a number and a unit", fix="--limit 80GB"
        )
    return float(parsed[1]) * _UNITS[parsed[2] or ""]
