"""The `weft` command, one file per subcommand.

launch.py       start a script on several processes
config.py       write a configuration file
foreign/        those of other libraries
doctor.py       is this machine fit?
rank_checks.py  what its ranks do
explain.py      which layer sets what
export.py       write the weights of a checkpoint for others
estimate.py     sizes of a model, and the memory of training it
rehearse.py     a script as one rank of many, without memory
report.py       a run as one page of HTML
ledger.py       the first step that differs between two runs
migrate.py      rewrite a script of Accelerate or Fabric

Tested by: tests/cli, tests/launching/test_launch.py, tests/context/test_config.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import MappingProxyType

from weft.cli import config, doctor, estimate, explain, export, launch, ledger, migrate, rehearse, report
from weft.errors import ContextError, MissingExtra

__all__ = ["main", "parser"]

_COMMANDS = MappingProxyType(
    {
        module.__name__.rpartition(".")[2]: module
        for module in (launch, config, explain, doctor, estimate, rehearse, export, report, ledger, migrate)
    }
)


def parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    top = argparse.ArgumentParser(prog="weft", description="Distributed PyTorch training by composing functions.")
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    for module in _COMMANDS.values():
        module.add_parser(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Without the program's name; default: those of this process.

    Returns:
        The exit code; 2, after saying why, if options or settings cannot be used.
    """
    options = parser().parse_args(arguments)
    try:
        code: int = _COMMANDS[options.command].run(options)
    except (ContextError, MissingExtra) as error:
        print(f"weft {error}", file=sys.stderr)  # noqa: T201
        return 2
    return code
