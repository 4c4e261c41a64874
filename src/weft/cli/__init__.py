"""The `weft` command, one file per subcommand.

launch.py             start a script on several processes
config.py             write a configuration file
config_accelerate.py  from one of Accelerate
doctor.py             is this machine fit?
rank_checks.py        what its ranks do
explain.py            which layer sets what
export.py             write the weights of a checkpoint for others
report.py             a run as one page of HTML
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from weft.cli import config, doctor, explain, export, launch, report

__all__ = ["main", "parser"]


def parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    top = argparse.ArgumentParser(prog="weft", description="Distributed PyTorch training by composing functions.")
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    launch.add_parser(commands)
    config.add_parser(commands)
    explain.add_parser(commands)
    doctor.add_parser(commands)
    export.add_parser(commands)
    report.add_parser(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Without the program's name; default: those of this process.

    Returns:
        The exit code.
    """
    options = parser().parse_args(arguments)
    code: int = options.run(options)
    return code
