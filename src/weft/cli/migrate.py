"""`weft migrate`: a script of Accelerate or of Lightning Fabric as one of weft."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.checks import import_extra
from weft.cli.foreign.accelerate import yaml_of
from weft.errors import ContextError


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    sub = commands.add_parser(
        "migrate",
        help="rewrite a script of Accelerate or Fabric",
        allow_abbrev=False,
        description="Print a script that uses Accelerate or Lightning Fabric as a diff to one that uses weft, and list "
        "what was not translated, with the line and a hint. Calls that are not known stay as they are. Nothing is "
        "changed without --write, and nothing is run.",
    )
    sub.add_argument("script", help="a Python file that uses Accelerate or Lightning Fabric")
    sub.add_argument("--config", metavar="FILE", help="the configuration file of Accelerate that the script runs with")
    sub.add_argument("--write", action="store_true", help="change the file")


def run(options: argparse.Namespace) -> int:
    """Print the diff to the output and the list to the error output.

    Returns:
        0; 1 if something was left.

    Raises:
        MissingExtra: LibCST is not installed.
        ContextError: The script cannot be read or parsed, or uses neither library.
    """
    problem = "migrate: scripts are read with LibCST, which is not installed"
    weft_migrate = import_extra("weft_migrate", problem, expected="the package libcst", extra="migrate")
    path = Path(options.script)
    config: Mapping[str, Any] = yaml_of(Path(options.config)) if options.config else {}
    try:
        source = path.read_bytes().decode("utf-8")
        found = weft_migrate.translate(source, config)
    except (OSError, ValueError, SyntaxError) as error:
        raise _refused(path, f"{type(error).__name__}: {error}") from error
    if not found.uses:
        by_hand = "model, ctx = weft.replicate(model, ctx)  # https://torchweft.github.io/weft/first_steps.html"
        raise _refused(path, "no use of Accelerate or of Fabric", fix=by_hand)
    if options.write:  # first: who reads what is printed may stop, as `head` does
        path.write_bytes(found.text.encode("utf-8"))
    lines = source.splitlines(keepends=True), found.text.splitlines(keepends=True)
    sys.stdout.writelines(difflib.unified_diff(*lines, f"a/{path.name}", f"b/{path.name}"))
    print(_report(found), file=sys.stderr)  # noqa: T201
    return 1 if found.left else 0


def _report(found: Any) -> str:
    lines = [f"{found.uses - found.left} of {found.uses} uses of {found.library} translated"]
    for title, left in (("Not translated:", True), ("Look at:", False)):
        chosen = [each for each in found.findings if each.left == left]
        lines += [title] if chosen else []
        hints = [each.hint.replace("\n", "\n      ") for each in chosen]
        lines += [f"  line {each.line}: {each.what}\n      {hint}" for each, hint in zip(chosen, hints, strict=True)]
    return "\n".join(lines)


def _refused(path: Path, why: str, fix: str = "weft migrate train.py") -> ContextError:
    return ContextError(
        f"migrate: {path} cannot be translated",
        found=why,
        expected="a Python script that uses Accelerate or Lightning Fabric; a plain loop is changed by hand",
        fix=fix,
    )
