"""`weft ledger`: which step was the first that differed between two runs, or does a run come out again."""

from __future__ import annotations

import argparse
import runpy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.launching.launch_function import launch_function
from weft.monitoring.run_ledger.compare import Comparison, compare_ledgers
from weft.monitoring.run_ledger.file import read_ledger
from weft.monitoring.run_ledger.record import REPLAY
from weft.peers.liveness import exception_text


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    text = "find the first step that differs between two runs, or run recorded steps again"
    told = "The exit code is 0 without a difference, 1 with one, and 2 if there is nothing to compare."
    sub = commands.add_parser("ledger", help=text, allow_abbrev=False, description=told)
    both = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    both.add_argument("--rounding", action="store_true", help="let results differ by rounding, though programs do not")
    both.add_argument("one", metavar="folder", help="of a run")
    what = sub.add_subparsers(required=True, metavar="compare|check")
    text = "name the first step that differs between two runs, and what is different in it"
    compare = what.add_parser("compare", help=text, description=f"{text}. {told}", parents=[both])
    compare.add_argument("two", metavar="folder", help="of the other one")
    compare.set_defaults(act=_compare)
    text = "run a script for some recorded steps, from where its own arguments let it begin or resume, and compare"
    also = "Its ledger goes to a temporary folder; what else it writes is written."
    check = what.add_parser("check", help=text, description=f"{text}. {also} {told}", parents=[both])
    check.add_argument("-n", "--ranks", type=int, metavar="N", help="default: as many as recorded")
    check.add_argument("--steps", type=int, default=1, metavar="N", help="recorded steps to run (default 1)")
    check.add_argument("script", help="and its arguments")
    check.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)
    check.set_defaults(act=_check)


def run(options: argparse.Namespace) -> int:
    """Print; returns 0, 1 if the runs differ, 2 if they cannot be compared or the script cannot be run again."""
    try:
        found: Comparison = options.act(options)
    except Exception as error:  # noqa: BLE001  (of a script of any kind, or of a ledger with lines of any form)
        print(f"weft ledger: {exception_text(error)}", file=sys.stderr)  # noqa: T201
        return 2
    print("\n".join([*(f"note: {note}" for note in found.notes), found.text]))  # noqa: T201
    return 0 if found.first is None else 1


def _compare(options: argparse.Namespace) -> Comparison:
    return compare_ledgers(options.one, options.two, rounding=options.rounding)


def _check(options: argparse.Namespace) -> Comparison:
    """Run the script, and compare what it records."""
    with tempfile.TemporaryDirectory(prefix="weft-") as options.two:
        starts = read_ledger(options.one).starts
        ranks = options.ranks or starts[max(starts)]["ranks"]
        launch_function(_run_again, ranks, options.script, options.arguments, options.two, options.steps)
        return _compare(options)


def _run_again(script: str, arguments: Sequence[str], folder: str, steps: int) -> None:
    """On a rank: the script, until it has recorded so many steps."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    REPLAY.set((Path(folder), steps))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
