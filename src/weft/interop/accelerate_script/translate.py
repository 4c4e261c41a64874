"""The walk over a script: every use of Accelerate is translated, or listed."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from weft.interop.accelerate_script.edits import Edits
from weft.interop.accelerate_script.expressions import (
    leave_argument,
    leave_attribute,
    leave_bool,
    leave_call,
    leave_compare,
    leave_keyword,
    leave_name,
    leave_scope,
)
from weft.interop.accelerate_script.names import dotted, find_names
from weft.interop.accelerate_script.setup import alone
from weft.interop.accelerate_script.statements import leave_for, leave_if, leave_with, statement
from weft.interop.accelerate_script.translation import Draft, Finding

__all__ = ["Translation", "translate"]


class Translation(NamedTuple):
    """A script of Accelerate, rewritten.

    Attributes:
        text: The new script.
        findings: What was left, and what needs a look, by line.
        uses: How many uses of Accelerate the script has.
        left: How many of them are still there.
    """

    text: str
    findings: list[Finding]
    uses: int
    left: int


def translate(source: str) -> Translation:
    r"""Rewrite a script of Accelerate; whatever is not known stays as it is, and is listed.

    Args:
        source: Text of the script.

    Returns:
        The new text, and what to look at.

    Raises:
        SyntaxError: It is no Python.

    Example:
        >>> found = translate("from accelerate import Accelerator\naccelerator = Accelerator()\n")
        >>> print(found.text)
        import weft
        ctx = weft.start()
        <BLANKLINE>
    """
    tree = ast.parse(source)
    names = find_names(tree)
    ctx, state, trackers, window = map(names.fresh, ("ctx", "state", "trackers", "window"))
    draft = Draft(names, Edits(source, tree), ctx, state, trackers, window)
    _walk(draft, tree)
    uses = sum(map(bool, (_use(draft, node) for node in names.parents)))
    _imports(draft, tree)
    findings = sorted(set(draft.findings))
    text = draft.edits.result()
    left = sum(each.left for each in findings)
    return Translation(text if uses else source, findings, uses, left)


def _use(draft: Draft, node: ast.AST) -> str | None:
    """The name of what is used of Accelerate, if this node does."""
    if isinstance(node, ast.Call) and draft.names.original(node.func):
        return draft.names.original(node.func)
    if isinstance(node, ast.Assign) and dotted(node.value) in draft.names.imported:
        return draft.names.imported[dotted(node.value)]
    return draft.names.method(node)


def _walk(draft: Draft, node: ast.AST) -> None:
    for child in ast.iter_child_nodes(node):
        _walk(draft, child)
    for kind, leave in _LEAVE.items():
        if isinstance(node, kind):
            leave(draft, node)


_LEAVE: Mapping[Any, Callable[[Draft, Any], None]] = MappingProxyType(
    {
        ast.Name: leave_name,
        ast.arg: leave_argument,
        ast.keyword: leave_keyword,
        ast.Global: leave_scope,
        ast.Nonlocal: leave_scope,
        ast.Attribute: leave_attribute,
        ast.Compare: leave_compare,
        ast.Call: leave_call,
        ast.Expr: statement,
        ast.Assign: statement,
        ast.If: leave_if,
        ast.BoolOp: leave_bool,
        ast.For: leave_for,
        ast.With: leave_with,
    }
)


def _imports(draft: Draft, tree: ast.Module) -> None:
    """Remove what is no longer used of Accelerate, and add what is."""
    ours: list[ast.Import | ast.ImportFrom] = [
        n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").split(".")[0] == "accelerate"
    ]
    ours += [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.Import) and any(a.name.split(".")[0] == "accelerate" for a in n.names)
    ]
    if not ours:
        return
    rest = ast.parse(draft.edits.result())
    used = {n.id for n in ast.walk(rest) if isinstance(n, ast.Name)}
    for node in ours:
        kept = [
            a
            for a in node.names
            if (a.asname or a.name).split(".")[0] in used or a.name.split(".")[0] not in _roots(node)
        ]
        if len(kept) < len(node.names):
            names = ", ".join(a.name + (f" as {a.asname}" if a.asname else "") for a in kept)
            before = f"from {node.module} import " if isinstance(node, ast.ImportFrom) else "import "
            draft.edits.statement(node, [before + names] if kept else [], alone=alone(draft, node))
    first = min(ours, key=lambda node: node.lineno)
    have = {a.asname or a.name for n in tree.body if isinstance(n, ast.Import) for a in n.names}
    for module in [*sorted(draft.imports - have), "weft"]:
        draft.edits.above(first.lineno, f"{draft.edits.indent(first)}import {module}")


def _roots(node: ast.Import | ast.ImportFrom) -> set[str]:
    """First parts of the names of an import that come from Accelerate."""
    names = {alias.name.split(".")[0] for alias in node.names}
    return names if isinstance(node, ast.ImportFrom) else names & {"accelerate"}
