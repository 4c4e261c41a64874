"""`weft report`: the folder of a run as one page of HTML."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from weft.monitoring.report import write_report

__all__ = ["add_parser", "run"]


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    sub = commands.add_parser(
        "report",
        help="render the logs and profiles of a run as one page of HTML",
        allow_abbrev=False,
        description="Read JSON lines, CSV, event files of TensorBoard, profiles and names of checkpoints in a folder "
        "and below, and write one page of HTML with plots of loss, throughput, the time of a step, and memory per "
        "rank. The page loads nothing.",
    )
    sub.add_argument("folder", help="of a run, where its trackers write")
    sub.add_argument("--out", metavar="FILE", help="what to write; default: report.html in the folder")
    sub.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the page; returns 0, 1 if there is nothing to show or no place for it."""
    out = Path(options.out) if options.out else Path(options.folder) / "report.html"
    try:
        found = write_report(options.folder, out=out)
        if not (found.series or found.traces):
            told = "; ".join(found.problems) or "no JSON lines, CSV or event files of trackers, and no profiles"
            print(f"weft report: nothing to show in {options.folder}: {told}", file=sys.stderr)  # noqa: T201
            return 1
    except OSError as error:
        print(f"weft report: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print(f"{out}: {len(found.series)} series, {len(found.traces)} profiles")  # noqa: T201
    return 0
