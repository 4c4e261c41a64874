"""`weft report`: the folder of a run, or of several, as one page of HTML."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from weft.errors import MissingExtra
from weft.monitoring.report import write_report


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    sub = commands.add_parser(
        "report",
        help="render the logs and profiles of a run as one page of HTML, or compare several runs",
        allow_abbrev=False,
        description="Read JSON lines, CSV, event files of TensorBoard, profiles, rehearsals and names of checkpoints "
        "in a folder and below, and write one page of HTML with charts of loss, throughput, the time of a step, and "
        "memory per rank. Of several folders, each chart shows all runs. The page loads nothing.",
    )
    sub.add_argument("folder", nargs="+", help="of a run, where its trackers write")
    sub.add_argument(
        "--out", metavar="FILE", help="what to write; default: report.html in the folder, of several runs here"
    )


def run(options: argparse.Namespace) -> int:
    """Write the page; returns 0, 1 if there is nothing to show, no place for it, or no plotly."""
    alone = len(options.folder) == 1
    out = Path(options.out) if options.out else (Path(options.folder[0]) if alone else Path()) / "report.html"
    try:
        runs = write_report(options.folder, out=out)
    except (OSError, MissingExtra) as error:
        print(f"weft report: {error}", file=sys.stderr)  # noqa: T201
        return 1
    empty = [each for each in runs if not (each.series or each.traces or each.rehearsals)]
    for found in empty:
        writes = (
            f'weft.log({{"loss": loss}}, step, ctx, weft.monitoring.jsonl("{found.folder / "log.jsonl"}")) writes one'
        )
        none = f"no JSON lines, CSV or event files of trackers, no profiles and no rehearsals; {writes}"
        reasons = "; ".join(found.problems) or none
        print(f"weft report: nothing to show in {found.folder}: {reasons}", file=sys.stderr)  # noqa: T201
    if len(empty) == len(runs):
        return 1
    kinds = ("series", "traces", "rehearsals")
    numbers = {name: sum(len(getattr(each, name)) for each in runs) for name in kinds}
    rehearsed = f", {numbers['rehearsals']} rehearsals" if numbers["rehearsals"] else ""
    print(f"{out}: {numbers['series']} series, {numbers['traces']} profiles{rehearsed}")  # noqa: T201
    return 0
