"""`weft config`: write a configuration file, from answers, from key=value, or from one of Accelerate or Megatron-LM.

`weft config update` changes keys of a file in place, and takes out those that this version does not know.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from weft.cli.foreign.accelerate import from_accelerate, program, yaml_of
from weft.cli.foreign.megatron import arguments_of, from_megatron, is_megatron
from weft.context.config import LAUNCH, Config, checked, read_config
from weft.context.settings import SETTINGS
from weft.errors import ContextError

_TABLES: Mapping[str, Mapping[str, Any]] = MappingProxyType({"launch": LAUNCH, "start": SETTINGS})


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    sub = commands.add_parser(
        "config",
        help="write a configuration file",
        usage="weft config [--out FILE] [--force] [table.key=value ...]\n       weft config import FILE [--out FILE]\n"
        "       weft config update FILE [table.key=value ...]",
        description="Write a TOML file for weft launch --config and weft.start(config=...). In a terminal it asks for "
        "what is not given; elsewhere it never asks. `import FILE` converts a YAML file of Accelerate, or the "
        "arguments of Megatron-LM in a YAML file or a script. `update FILE` changes keys in place and takes out what "
        "means nothing; other lines and comments stay.",
    )
    sub.add_argument("--out", type=Path, default=Path("run.toml"), metavar="FILE", help="default: run.toml")
    sub.add_argument("--force", action="store_true", help="replace a file that is there")
    sub.add_argument("words", nargs="*", metavar="table.key=value", help="for example launch.nproc=2 start.seed=1")


def run(options: argparse.Namespace) -> int:
    """Write the file; returns 0."""
    words: list[str] = options.words
    calls: list[str] = []
    left: list[str] = []
    if words[:1] == ["update"] and len(words) > 1:
        return _update(Path(words[1]), words[2:])
    if options.out.exists() and not options.force:
        raise ContextError(
            f"config: {options.out} already exists",
            found=str(options.out.resolve()),
            expected="a new file",
            fix=shlex.join(["weft", "config", "--force", "--out", str(options.out), *words]),
        )
    if words[:1] == ["import"] and len(words) == 2:
        data, calls, left = _imported(Path(words[1]))
    else:
        data = _given(words)
        if sys.stdin.isatty():
            data = answered(data, input)
    options.out.write_text(toml(checked(data, str(options.out))), encoding="utf-8")
    read_config(options.out)
    lines = ["in the program:", *program(calls)] if calls else []
    lines += [f"not taken over: {each}" for each in left]
    print("\n".join([*lines, f"weft launch --config {options.out} train.py"]))  # noqa: T201
    return 0


def _update(path: Path, words: Sequence[str]) -> int:
    """Change a file in place; returns 0."""
    text = path.read_text(encoding="utf-8")
    changes = _given(words)
    gone: list[str] = []
    kept: dict[str, dict[str, Any]] = {}
    for table, values in tomllib.loads(text).items():
        if table in _TABLES and isinstance(values, dict):
            kept[table] = {key: value for key, value in values.items() if key in _TABLES[table]}
            gone += [f"{table}.{key}" for key in values if key not in _TABLES[table]]
        else:
            gone.append(table)
    wanted = {table: values for table in _TABLES if (values := kept.get(table, {}) | changes.get(table, {}))}
    config = checked(wanted, str(path))
    new = updated(text, changes)
    if _tables(new) != wanted:
        new = toml(config)  # a value over several lines: written anew, without comments
    beside = path.with_name(path.name + ".new")
    beside.write_text(new, encoding="utf-8")
    read_config(beside)
    beside.replace(path)
    for name in gone:
        print(f"taken out, as it means nothing: {name}")  # noqa: T201
    return 0


def _tables(text: str) -> dict[str, Any] | None:
    try:
        return {table: values for table, values in tomllib.loads(text).items() if values}
    except tomllib.TOMLDecodeError:
        return None


def updated(text: str, changes: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of a file with other values; lines of keys and tables that mean nothing are left out.

    Args:
        text: Of a TOML file with one key per line.
        changes: New values, by table and key.
    """
    left = {table: dict(values) for table, values in changes.items()}
    lines: list[str] = []
    table = ""

    def end() -> None:
        new = [f"{key} = {_literal(value)}" for key, value in left.pop(table, {}).items()]
        blank = next((n for n, line in enumerate(reversed(lines)) if line.strip()), len(lines))
        lines[len(lines) - blank : len(lines) - blank] = new

    for line in text.splitlines():
        head, key = re.match(r"\s*\[([\w.-]+)\]", line), re.match(r"\s*([\w-]+)\s*=", line)
        if head:
            end()
            table = head[1]
        if key and key[1] in left.get(table, {}):
            lines.append(f"{key[1]} = {_literal(left[table].pop(key[1]))}{_comment_of(line)}")
        elif (not head and not key) or (table in _TABLES and (head or (key and key[1] in _TABLES[table]))):
            lines.append(line)
    end()
    for table in list(left):
        while lines and not lines[-1].strip():
            lines.pop()
        lines += ["", f"[{table}]"]
        end()
    return "\n".join(lines).strip("\n") + "\n"


def _comment_of(line: str) -> str:
    """The comment behind the value in a line, with the spaces before it."""
    for found in re.finditer(r"\s*#", line):
        if _tables(f"[values]\n{line[: found.start()]}"):  # before it is a whole value, so it is in no string
            return line[found.start() :]
    return ""


def _imported(path: Path) -> tuple[dict[str, dict[str, Any]], list[str], list[str]]:
    """The tables, the calls, and what is left over, of a file of Accelerate or Megatron-LM."""
    if path.suffix in (".yaml", ".yml") or not path.exists():
        values = yaml_of(path)
    else:
        values = arguments_of(path.read_text(encoding="utf-8")) or yaml_of(path)
    return from_megatron(values) if is_megatron(values) else from_accelerate(values)


def _given(words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The values of `table.key=value`."""
    data: dict[str, dict[str, Any]] = {}
    for word in words:
        name, equals, text = word.partition("=")
        table, _, key = name.partition(".")
        if not equals or key not in _TABLES.get(table, {}):
            raise ContextError(
                f"config: {word!r} means nothing",
                found=word,
                expected="table.key=value with one of " + ", ".join(f"{t}.{k}" for t in _TABLES for k in _TABLES[t]),
                fix="weft config launch.nproc=2 start.seed=1",
            )
        data.setdefault(table, {})[key] = _value(table, key, text)
    return data


def _value(table: str, key: str, text: str) -> Any:
    """A value from its text: as the environment has it, or as JSON where that fits, or the text itself."""
    parse: Callable[[str], Any] = SETTINGS[key].parse if table == "start" else json.loads
    try:
        value = parse(text)
    except ValueError:
        return text  # is refused with what is expected
    if table == "launch" and not LAUNCH[key].fits(value):
        return text
    return list(value) if isinstance(value, tuple) else value


def answered(data: Mapping[str, Mapping[str, Any]], ask: Callable[[str], str]) -> dict[str, dict[str, Any]]:
    """Ask for every key that is not given; an empty answer leaves it out, one that does not fit is asked for again.

    Args:
        data: What is given, by table and key.
        ask: Such as `input`.

    Returns:
        What was given and what was answered.
    """
    found = {table: dict(values) for table, values in data.items()}
    for table, keys in _TABLES.items():
        for key, about in keys.items():
            if key in found.get(table, {}):
                continue
            shown = "not set" if about.default is None else about.default
            while text := ask(f"{about.question} [{shown}]: ").strip():
                value = _value(table, key, text)
                if about.fits(value):
                    found.setdefault(table, {})[key] = value
                    break
                print(f"  {text!r} is not {about.expected}")  # noqa: T201
    return found


def toml(config: Config) -> str:
    """A configuration as TOML."""
    lines: list[str] = []
    for table, values in (("launch", config.launch), ("start", config.start)):
        if values:
            lines += [f"[{table}]", *(f"{key} = {_literal(value)}" for key, value in values.items()), ""]
    return "\n".join(lines)


def _literal(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_literal(item)}" for key, item in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
