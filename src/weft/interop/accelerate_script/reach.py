"""Settings of the accelerator, read in a function that gets only the accelerator: they become a parameter of it."""

from __future__ import annotations

import ast

from weft.interop.accelerate_script.names import dotted
from weft.interop.accelerate_script.translation import Draft

__all__ = ["setting_at"]


def setting_at(draft: Draft, name: str, node: ast.AST, default: str) -> str | None:
    """The text of a setting where a node stands: its value, or a new parameter of the function around.

    Args:
        draft: The translation.
        name: Of the setting.
        node: Where it is read.
        default: Its value if the script does not give it.

    Returns:
        None if it cannot be decided.
    """
    value = draft.setting(name)
    if value is None:
        return default if draft.names.are_known else None
    if _reaches(draft, value, node):
        return draft.edits.text(value)
    inside = [each for each in draft.names.above(node) if isinstance(each, ast.FunctionDef)]
    return name if inside and _add_parameter(draft, inside[-1], name, value) else None


def _reaches(draft: Draft, value: ast.expr, node: ast.AST) -> bool:
    """Whether the names in an argument of the accelerator mean the same where a node stands."""
    names = draft.names
    here = {None, names.scope(node), *names.above(node)}
    made = [call for call in names.constructors if value in ast.walk(call)]
    return not any(isinstance(n, ast.Name) for n in ast.walk(value)) or any(names.scope(c) in here for c in made)


def _add_parameter(draft: Draft, function: ast.FunctionDef, name: str, value: ast.expr) -> bool:
    """Give a function a parameter by keyword, and every call of it the value; False if a call does not see it."""
    names, given = draft.names, function.args
    uses = [n for n in names.parents if dotted(n).rpartition(".")[2] == function.name]
    calls = [names.parents[use] for use in uses]
    plain = given.args and not (given.vararg or given.kwonlyargs or given.kwarg or name in names.used)
    if not plain or not all(isinstance(n, ast.Call) and n.func is u for n, u in zip(calls, uses, strict=True)):
        return False
    if not all(isinstance(call, ast.Call) and call.args and _reaches(draft, value, call) for call in calls):
        return False
    _, end = draft.edits.span([*given.args, *given.defaults][-1])
    draft.edits.replace_span(end, end, f", *, {name}")
    for call in calls:
        if isinstance(call, ast.Call):
            _, end = draft.edits.span([*call.args, *call.keywords][-1])
            draft.edits.replace_span(end, end, f", {name}={draft.edits.text(value)}")
    return True
