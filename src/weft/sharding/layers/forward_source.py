"""Where the argument of a part goes, read from the code of its `forward`: to save messages, not to check anything.

If only column layers take it, it is gathered once for all of them. What reading does not see, a probe measures.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection, Iterator

from torch import nn

_FACTS = ("shape", "size", "device", "dtype", "dim", "ndim")


def only_feeds(module: nn.Module, layers: Collection[str]) -> bool:
    """Whether the first argument goes into these layers and nowhere else, but for questions about its shape."""
    code = _parsed(module)
    if code is None:
        return False
    own, given = [*(arg.arg for arg in code.args.args), "", ""][:2]
    parents = {id(child): node for node in ast.walk(code) for child in ast.iter_child_nodes(node)}
    names = [node for each in _until_assigned(code.body, given) for node in ast.walk(each)]
    uses = [parents[id(node)] for node in names if isinstance(node, ast.Name) and node.id == given]
    return bool(uses) and all(
        (isinstance(use, ast.Attribute) and use.attr in _FACTS)
        or (isinstance(use, ast.Call) and _attribute_of(own, use.func) in layers)
        for use in uses
    )


def _until_assigned(body: list[ast.stmt], name: str) -> Iterator[ast.AST]:
    """The statements of a function up to the one that gives a name another value, without the name there."""
    for each in body:
        if isinstance(each, ast.Assign) and any(isinstance(one, ast.Name) and one.id == name for one in each.targets):
            yield each.value
            return
        yield each


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


def splits_output(module: nn.Module, layer: str, count: int) -> bool:
    """Whether what a layer returns is taken apart first of all: by a split or an index, or a view as `count` parts.

    A view whose last sizes are `count` and the width of a head has the parts of each head side by side instead.
    """
    code = _parsed(module)
    if code is None:
        return False
    own = code.args.args[0].arg
    named = {
        target.id
        for node in ast.walk(code)
        if isinstance(node, ast.Assign) and _calls(own, layer, node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def is_output(node: ast.expr) -> bool:
        return _calls(own, layer, node) or (isinstance(node, ast.Name) and node.id in named)

    for node in ast.walk(code):
        if isinstance(node, ast.Subscript) and is_output(node.value):
            return True
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        is_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch" and bool(node.args)
        if not is_output(node.args[0] if is_torch else node.func.value):
            continue
        if node.func.attr in ("split", "chunk", "tensor_split"):
            return True
        third = node.args[-3] if node.func.attr in ("view", "reshape") and len(node.args) > 3 else None
        if isinstance(third, ast.Constant) and third.value == count:
            return True
    return False


def _calls(own: str, layer: str, node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _attribute_of(own, node.func) == layer


def fixes_heads(module: nn.Module, names: Collection[str]) -> bool:
    """Whether a forward gives one of these attributes as a size to `view`, `reshape` or `unflatten`; or is not known.

    Args:
        module: An attention.
        names: Under which it may have the number of heads.
    """
    code = _parsed(module)
    if code is None:
        return True
    calls = [node for node in ast.walk(code) if isinstance(node, ast.Call)]
    methods = [(call.func.attr, call.args) for call in calls if isinstance(call.func, ast.Attribute)]
    sizes = [one for name, args in methods if name in ("view", "reshape", "unflatten") for one in args]
    return any(isinstance(node, ast.Attribute) and node.attr in names for one in sizes for node in ast.walk(one))
