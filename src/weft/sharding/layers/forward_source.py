"""What the source code of a `forward` tells: views with fixed sizes, outputs that are taken apart."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

__all__ = ["ForwardSource"]

_VIEWS = ("view", "reshape", "unflatten")
_SPLITS = ("chunk", "split", "tensor_split", "unbind", "glu")
_FACTS = ("shape", "size", "device", "dtype", "dim", "ndim")


class ForwardSource:
    """The `forward` of a module, as far as its source can be read; else it tells nothing."""

    def __init__(self, module: nn.Module, columns: Sequence[str]) -> None:
        """Read it.

        Args:
            module: Holds the layers.
            columns: Names of those of its children whose outputs are divided.
        """
        self._module = module
        self._columns = set(columns)
        self._code = _parsed(module)
        self._assigned: dict[str, ast.expr] = {}
        self._widths: dict[str, int] = {}  # names of the size of the last dimension of the input
        names = [] if self._code is None else [arg.arg for arg in self._code.args.args]
        self._self, self._input = [*names, "", ""][:2]
        self._read_assignments()

    @property
    def only_feeds_columns(self) -> bool:
        """Whether the first argument goes into the columns and nowhere else, but for questions about its shape."""
        if self._code is None:
            return False
        parents = {id(child): node for node in ast.walk(self._code) for child in ast.iter_child_nodes(node)}
        uses = [
            parents[id(node)] for node in ast.walk(self._code) if isinstance(node, ast.Name) and node.id == self._input
        ]
        return bool(uses) and all(
            (isinstance(use, ast.Attribute) and use.attr in _FACTS)
            or (isinstance(use, ast.Call) and self._is_column(use.func))
            for use in uses
        )

    @property
    def is_known(self) -> bool:
        """Whether the source could be read."""
        return self._code is not None

    @property
    def asks_for_shapes(self) -> bool:
        """Whether something asks for a shape or gives one, which may be that of the input."""
        asked = [] if self._code is None else [node for node in ast.walk(self._code) if isinstance(node, ast.Attribute)]
        return any(node.attr in (*_VIEWS, "shape", "size", "expand", "repeat", "new_zeros") for node in asked)

    def head_sizes(self) -> Iterator[int]:
        """The fixed last size of views in which the number before it is left open."""
        for sizes, _, _ in self._views():
            if len(sizes) > 1 and self._value(sizes[-2]) == -1:
                size = self._value(sizes[-1])
                if size is not None and size > 1:
                    yield size

    def fixed_views(self, outputs: Sequence[int], inputs: Sequence[int]) -> list[str]:
        """The views that hold only with all features: of outputs of columns, or of inputs of rows."""
        found = []
        for sizes, text, receiver in self._views():
            if len(sizes) < 2 or (isinstance(receiver, ast.Name) and receiver.id == self._input):
                continue
            heads, last = self._value(sizes[-2]), self._value(sizes[-1])
            of_heads = (
                heads is not None
                and heads > 1
                and any(width % heads == 0 and (last in (None, -1) or last * heads == width) for width in outputs)
            )
            of_features = heads is None and last is not None and last > 1 and last in inputs
            if of_heads or of_features:
                found.append(text)
        return found

    def splits(self) -> list[str]:
        """The calls that take the output of a column apart."""
        if self._code is None:
            return []
        found = []
        for node in ast.walk(self._code):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SPLITS:
                subjects = [node.func.value, *node.args[:1]]
                if any(self._comes_from_column(subject) for subject in subjects):
                    found.append(ast.unparse(node))
        return found

    # -- reading ---------------------------------------------------------------------------------

    def _read_assignments(self) -> None:
        for node in [] if self._code is None else ast.walk(self._code):
            if not isinstance(node, ast.Assign) or len(node.targets) != 1:
                continue
            target, value = node.targets[0], node.value
            if isinstance(target, ast.Name):
                self._assigned[target.id] = value
            elif isinstance(target, (ast.Tuple, ast.List)):
                if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
                    pairs = zip(target.elts, value.elts, strict=True)
                    self._assigned |= {one.id: other for one, other in pairs if isinstance(one, ast.Name)}
                elif self._is_shape_of_input(value) and isinstance(target.elts[-1], ast.Name):
                    for name in self._columns:
                        self._widths[target.elts[-1].id] = getattr(self._module, name).in_features

    def _is_shape_of_input(self, value: ast.expr) -> bool:
        value = value.func if isinstance(value, ast.Call) else value
        return (
            isinstance(value, ast.Attribute)
            and value.attr in ("shape", "size")
            and isinstance(value.value, ast.Name)
            and value.value.id == self._input
        )

    def _views(self) -> Iterator[tuple[list[ast.expr], str, ast.expr]]:
        for node in [] if self._code is None else ast.walk(self._code):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _VIEWS:
                of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
                receiver = node.args[0] if of_torch and node.args else node.func.value
                given = node.args[1:] if of_torch or node.func.attr == "unflatten" else node.args
                yield self._flat(given), ast.unparse(node), receiver

    def _flat(self, given: Sequence[ast.expr]) -> list[ast.expr]:
        """The sizes in a call: one by one, as a tuple, or as a name for a tuple."""
        if len(given) == 1:
            only = given[0].value if isinstance(given[0], ast.Starred) else given[0]
            only = self._assigned.get(only.id, only) if isinstance(only, ast.Name) else only
            if isinstance(only, (ast.Tuple, ast.List)):
                return list(only.elts)
            return [only]
        return list(given)

    def _value(self, size: ast.expr) -> int | None:
        """The number that a size is, where that is certain."""
        if isinstance(size, ast.Name):
            known = self._assigned.get(size.id)
            return self._widths.get(size.id) if known is None else self._value(known)
        if isinstance(size, ast.UnaryOp) and isinstance(size.op, ast.USub):
            inner = self._value(size.operand)
            return None if inner is None else -inner
        if isinstance(size, ast.Constant):
            return size.value if isinstance(size.value, int) else None
        if isinstance(size, ast.BinOp) and isinstance(size.op, (ast.FloorDiv, ast.Mult)):
            left, right = self._value(size.left), self._value(size.right)
            if left is None or not right:
                return None
            return left // right if isinstance(size.op, ast.FloorDiv) else left * right
        path = self._path(size)
        value: Any = self._module
        for name in path or ():
            value = getattr(value, name, None)
        return value if path and isinstance(value, int) and not isinstance(value, bool) else None

    def _path(self, value: ast.expr) -> list[str] | None:
        """The names in `self.a.b`."""
        path: list[str] = []
        while isinstance(value, ast.Attribute):
            path.insert(0, value.attr)
            value = value.value
        return path if path and isinstance(value, ast.Name) and value.id == self._self else None

    def _is_column(self, called: ast.expr) -> bool:
        path = self._path(called)
        return path is not None and len(path) == 1 and path[0] in self._columns

    def _comes_from_column(self, value: ast.expr) -> bool:
        if isinstance(value, ast.Name):
            known = self._assigned.get(value.id)
            return known is not None and isinstance(known, ast.Call) and self._is_column(known.func)
        return isinstance(value, ast.Call) and self._is_column(value.func)


def _parsed(module: nn.Module) -> ast.FunctionDef | None:
    try:
        text = textwrap.dedent(inspect.getsource(inspect.unwrap(type(module).forward)))
        code = ast.parse(text).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    return code if isinstance(code, ast.FunctionDef) else None
