"""A configuration file: TOML with the tables [start] and [launch]. It is read only if somebody names it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from weft.context.settings import SETTINGS, Setting, is_flag, is_text
from weft.errors import ContextError, listed


class Config(NamedTuple):
    """A file that was read and checked.

    Attributes:
        path: Where it lies.
        start: Settings of `weft.start`, by name.
        launch: Options of `weft launch`, by name.
    """

    path: str
    start: Mapping[str, Any]
    launch: Mapping[str, Any]


def _is_count(value: Any, least: int = 1) -> bool:
    return type(value) is int and value >= least


def is_nodes(value: Any) -> bool:
    """Whether this is a number of nodes, or "least:most"."""
    if isinstance(value, str):
        least, colon, most = value.partition(":")
        return least.isdecimal() and (not colon or most.isdecimal()) and 1 <= int(least) <= int(most or least)
    return _is_count(value)


LAUNCH = MappingProxyType(
    {
        "nproc": Setting(_is_count, "a whole number >= 1", 1, "processes per node"),
        "nnodes": Setting(is_nodes, 'a whole number >= 1, or "least:most"', 1, "nodes"),
        "node_rank": Setting(lambda v: _is_count(v, 0), "a whole number >= 0", None, "rank of this node"),
        "rdzv": Setting(lambda v: isinstance(v, str) and ":" in v, '"host:port"', None, "where the nodes meet"),
        "max_restarts": Setting(lambda v: _is_count(v, 0), "a whole number >= 0", 0, "restarts after a failure"),
        "min_replicas": Setting(_is_count, "a whole number >= 1", None, "replicas without which an elastic job waits"),
        "replica_ranks": Setting(_is_count, "a whole number >= 1", 1, "ranks of each replica of an elastic job"),
        "events": Setting(is_text, "a path", None, "file for the losses of an elastic job"),
        "threads": Setting(_is_count, "a whole number >= 1", None, "CPU threads per process"),
        "affinity": Setting(is_flag, "true or false", default=False, question="keep each process on cores of its own"),
    }
)


def read_config(path: str | Path) -> Config:
    """Read a configuration file.

    Args:
        path: A TOML file.

    Returns:
        Its two tables.

    Raises:
        ContextError: It cannot be read, has a key that means nothing, or a value of the wrong type.
    """
    import tomllib  # noqa: PLC0415  (few programs have a file)

    try:
        text = Path(path).read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ContextError(
            f"the configuration {path} cannot be read",
            found=f"{type(error).__name__}: {error}",
            expected="a TOML file with the tables [start] and [launch]",
            fix=f"weft config --out {path}"
            if isinstance(error, FileNotFoundError)
            else f"correct it, or write another one: weft config --force --out {path}",
        ) from error
    return checked(data, str(path))


def checked(data: Mapping[str, Any], path: str) -> Config:
    """Check what was read; see `read_config`."""
    known: dict[str, Mapping[str, Any]] = {"start": SETTINGS, "launch": LAUNCH}
    unknown = [f"[{name}]" if isinstance(value, dict) else name for name, value in data.items() if name not in known]
    wrong: list[str] = []
    for table, keys in known.items():
        found = data.get(table, {})
        if not isinstance(found, dict):
            wrong.append(f"{table} = {found!r:.60}, not a table")
            continue
        unknown += [f"{table}.{key}" for key in found if key not in keys]
        for key, value in found.items():
            if key in keys and not keys[key].fits(value):
                wrong.append(f"{table}.{key} = {value!r:.60}, not {keys[key].expected}")
    if unknown or wrong:
        names = [f"{table}.{key}" for table, keys in known.items() for key in keys]
        raise ContextError(
            f"the configuration {path} has {'unknown keys' if unknown else 'values that do not fit'}",
            found=listed([*unknown, *wrong]),
            expected="some of " + ", ".join(names),
            fix="take them out, or correct them" if wrong else f"weft config update {path}",
        )
    return Config(path, dict(data.get("start", {})), dict(data.get("launch", {})))
