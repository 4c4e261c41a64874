"""The rows of a library: what its calls, attributes and settings are in weft, read from a file of this folder."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple


class Template(NamedTuple):
    """A call in weft: `{name}` is the text of an argument; parameters without a default have to be there.

    Attributes:
        text: `{ctx}` is the context; an argument without text is left out, with the comma before it.
        parameters: In the order of the library, with the text that stands for one that is not given.
    """

    text: str
    parameters: Mapping[str, str | None]


class LibraryRows(NamedTuple):
    """What is known of a library.

    Attributes:
        name: As people say it.
        modules: Its packages: all that is imported from them belongs to it.
        names: What else belongs to it, by full name.
        variable: What a parameter is called that is its object.
        classes: Of its object.
        positional: Arguments of these classes by position.
        prepares: Methods that prepare objects, and the roles of their arguments: "" for "by its name"; the last one is
            that of all others.
        methods: Rows for the methods of its object.
        statements: Rows for methods that are called in a statement of their own; "" for one that is removed.
        attributes: Texts for the attributes.
        functions: Rows for functions.
        settings: Keywords of its object and what to write; "" for what is taken over, as is what `makers` make.
        makers: Calls that make a setting, and are removed.
        hints: What to write instead of what is left.
        remarks: What is different about what was translated.
        plugins: Arguments of plugins and strategies, and their names in a configuration file; "" for those that are
            about memory, speed or files of the library alone.
        replicate: Arguments for DDP, as "name=value" or "name=" for any value, and those of `weft.replicate`.
        wrapped: What only objects of the library have, as "role.attribute", and the text for `{}`, the object; "" for
            a call that is removed.
        passed: The arguments that are taken over of calls that make settings, for those that are not strategies.
        held: Settings that are an argument of another one, as "setting.argument".
        precisions: Names of a precision, and the policies of weft.
    """

    name: str
    modules: Sequence[str]
    names: Sequence[str]
    variable: str
    classes: Sequence[str]
    positional: Sequence[str]
    prepares: Mapping[str, Sequence[str]]
    methods: Mapping[str, list[Template]]
    statements: Mapping[str, list[Template]]
    attributes: Mapping[str, str]
    functions: Mapping[str, list[Template]]
    settings: Mapping[str, str]
    makers: Sequence[str]
    hints: Mapping[str, str]
    remarks: Mapping[str, str]
    plugins: Mapping[str, str]
    wrapped: Mapping[str, str]
    passed: Mapping[str, Sequence[str]]
    held: Mapping[str, str] = MappingProxyType({})
    precisions: Mapping[str, str] = MappingProxyType({})
    replicate: Mapping[str, str] = MappingProxyType({})

    def has(self, module: str, name: str = "") -> bool:
        """Whether an import is from this library."""
        return any(f"{module}.".startswith(f"{each}.") for each in self.modules) or f"{module}.{name}" in self.names


def read_library(name: str) -> LibraryRows:
    """The library of a file, `name.toml`."""
    table: dict[str, Any] = tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))
    for kind in ("methods", "statements", "functions"):
        table[kind] = templates(table[kind])
    return LibraryRows(**table)


def templates(table: Mapping[str, str]) -> Mapping[str, list[Template]]:
    """The rows of a table by the name of the call; of several, the first that fits.

    Example:
        >>> templates({"gather(tensor, dim=0)": "weft.gather({tensor}, {ctx})"})["gather"][0].parameters
        {'tensor': None, 'dim': '0'}
    """
    found: dict[str, list[Template]] = {}
    for call, text in table.items():
        name, _, parameters = call.removesuffix(")").partition("(")
        parts = [each.partition("=") for each in parameters.split(", ") if each]
        row = Template(text, {each: default if equals else None for each, equals, default in parts})
        found.setdefault(name, []).append(row)
    return found
