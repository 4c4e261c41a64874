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
from weft.monitoring.run_ledger.compare import Comparison, compare_ledgers, compare_recorded
from weft.monitoring.run_ledger.file import read_ledger
from weft.monitoring.run_ledger.record import replaying
from weft.peers.liveness import exception_text


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    sub = commands.add_parser(
        "ledger",
        help="find the first step that differs between two runs, or run recorded steps again",
        allow_abbrev=False,
        description="Read what weft.monitoring.ledger recorded. The exit code is 0 without a difference, 1 with one, "
        "and 2 if there is nothing to compare.",
    )
    what = sub.add_subparsers(dest="what", required=True, metavar="compare|check")
    rounding = "let results differ by rounding even if both programs are the same"
    compare = what.add_parser(
        "compare",
        help="name the first step, and the first thing in it, that differs between two runs",
        allow_abbrev=False,
        description="Of runs on other numbers of ranks, strategies, devices or versions, results may differ by "
        "rounding; samples, sizes and learning rates may not.",
    )
    compare.add_argument("one", help="folder of a run")
    compare.add_argument("two", help="folder of another run")
    compare.add_argument("--rounding", action="store_true", help=rounding)
    compare.set_defaults(run=_compare)
    check = what.add_parser(
        "check",
        help="run recorded steps again, and compare",
        allow_abbrev=False,
        description="Start the script as it would resume: from the checkpoint that its own arguments name, or from the "
        "beginning. Its ledger is written to a temporary folder, and it is left after some steps. What else the script "
        "writes is written.",
    )
    check.add_argument("-n", "--ranks", type=int, metavar="N", help="default: as many as recorded")
    check.add_argument("--steps", type=int, default=1, metavar="N", help="recorded steps to run (default 1)")
    check.add_argument("--rounding", action="store_true", help=rounding)
    check.add_argument("folder", help="of the run")
    check.add_argument("script", help="and its arguments")
    check.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)
    check.set_defaults(run=_check)


def _compare(options: argparse.Namespace) -> int:
    """Print; returns 0, 1 if the runs differ, 2 if they cannot be compared."""
    try:
        found = compare_ledgers(options.one, options.two, rounding=options.rounding)
    except (OSError, ValueError) as error:
        print(f"weft ledger: {exception_text(error)}", file=sys.stderr)  # noqa: T201
        return 2
    return _say(found)


def _check(options: argparse.Namespace) -> int:
    """Print; returns 0, 1 if a step comes out in another way, 2 if it cannot be run again."""
    with tempfile.TemporaryDirectory(prefix="weft-") as name:
        try:
            recorded = read_ledger(options.folder)
            ranks = next((start.get("ranks") for start in reversed(recorded.starts.values())), 1)
            launch_function(
                _run_again, options.ranks or ranks, options.script, options.arguments, name, max(options.steps, 1)
            )
            again = read_ledger(name)
            again.folder = Path("this run")
            found = compare_recorded(recorded, again, rounding=options.rounding)
        except Exception as error:
            print(f"weft ledger: {exception_text(error)}", file=sys.stderr)  # noqa: T201
            return 2
    return _say(found)


def _say(found: Comparison) -> int:
    print(found)  # noqa: T201
    return 0 if found.first is None else 1


def _run_again(script: str, arguments: Sequence[str], folder: str, steps: int) -> None:
    """On a rank: the script, until it has recorded so many steps."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        with replaying(Path(folder), steps):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
