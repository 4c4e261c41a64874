"""Settings of the accelerator, read in a function that gets only the accelerator: they become a parameter of it."""

from __future__ import annotations

import ast

from weft.interop.accelerate_script.names import Names, dotted
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
        text = _text(draft, name, value)
        binding = (ast.Compare, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Attribute)
        return f"({text})" if " " in text and isinstance(draft.names.parents[node], binding) else text
    inside = [each for each in draft.names.above(node) if isinstance(each, ast.FunctionDef)]
    return name if inside and _add_parameter(draft, inside[-1], name, value) else None


def _text(draft: Draft, name: str, value: ast.expr) -> str:
    """The text of a setting; Accelerate reads None as the precision "no"."""
    if name != "mixed_precision" or (isinstance(value, ast.Constant) and value.value is not None):
        return draft.edits.text(value)
    return '"no"' if isinstance(value, ast.Constant) else f'{draft.edits.text(value)} or "no"'


def _reaches(draft: Draft, value: ast.expr, node: ast.AST) -> bool:
    """Whether the names in an argument of the accelerator mean the same where a node stands."""
    names = draft.names
    here = {None, names.scope(node), *names.above(node)}
    made = [each for each in (*names.constructors, *names.late) if value in ast.walk(each)]
    return not any(isinstance(n, ast.Name) for n in ast.walk(value)) or any(names.scope(c) in here for c in made)


def _becomes_foreign(names: Names, use: ast.AST) -> bool:
    """Whether a function is replaced by one of Accelerate there, as `get_dataloaders = mocked_dataloaders`."""
    parent = names.parents[use]
    return isinstance(parent, ast.Assign) and use in parent.targets and dotted(parent.value) in names.imported


def _add_parameter(draft: Draft, function: ast.FunctionDef, name: str, value: ast.expr) -> bool:
    """Give a function a parameter by keyword, and every call of it the value; False if a call does not see it."""
    names, given = draft.names, function.args
    uses = [n for n in names.parents if dotted(n).rpartition(".")[2] == function.name]
    uses = [use for use in uses if not _becomes_foreign(names, use)]
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
            draft.edits.replace_span(end, end, f", {name}={_text(draft, name, value)}")
    return True
