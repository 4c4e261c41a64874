"""Where the argument of a part goes, read from the code of its `forward`: to save messages, not to check anything.

If only column layers take it, it is gathered once for all of them. What reading does not see, a probe measures.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection

from torch import nn

_FACTS = ("shape", "size", "device", "dtype", "dim", "ndim")


def only_feeds(module: nn.Module, layers: Collection[str]) -> bool:
    """Whether the first argument goes into these layers and nowhere else, but for questions about its shape."""
    code = _parsed(module)
    if code is None:
        return False
    own, given = [*(arg.arg for arg in code.args.args), "", ""][:2]
    parents = {id(child): node for node in ast.walk(code) for child in ast.iter_child_nodes(node)}
    uses = [parents[id(node)] for node in ast.walk(code) if isinstance(node, ast.Name) and node.id == given]
    return bool(uses) and all(
        (isinstance(use, ast.Attribute) and use.attr in _FACTS)
        or (isinstance(use, ast.Call) and _attribute_of(own, use.func) in layers)
        for use in uses
    )


def _attribute_of(own: str, called: ast.expr) -> str | None:
    """The name in `self.name`."""
    is_own = isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == own
    return called.attr if is_own and isinstance(called, ast.Attribute) else None


def _parsed(module: nn.Module) -> ast.FunctionDef | None:
    try:
        text = textwrap.dedent(inspect.getsource(inspect.unwrap(type(module).forward)))
        code = ast.parse(text).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    return code if isinstance(code, ast.FunctionDef) else None
