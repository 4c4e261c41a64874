"""Where the package has a `fix:` line: each call that is given one, and the lines that it may be given."""

import ast
import dataclasses
import functools
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
SOURCE = ROOT / "src" / "weft"


@dataclasses.dataclass(frozen=True)
class Site:
    """A call with a `fix:` line.

    Attributes:
        file: Relative to the package, such as "data/shuffle.py".
        first: Its first line.
        last: Its last line.
        text: Its source, on one line.
        ways: How many lines it may print: 2 for `fix=a if b else c`.
        pattern: What its lines look like.
    """

    file: str
    first: int
    last: int
    text: str
    ways: int
    pattern: re.Pattern


def sites():
    """All sites of the package."""
    return tuple(
        site for path in sorted(SOURCE.rglob("*.py")) for site in sites_of(path.relative_to(SOURCE).as_posix())
    )


@functools.cache
def sites_of(file):
    """The sites in a file."""
    tree, found = _tree(file), []
    for call, around in _calls(tree, []):
        value = _given(call, file, _positions())
        leaves = [] if value is None else _leaves(value, around, tree)
        if leaves:
            pattern = "|".join(dict.fromkeys(_pattern(one) for one in leaves))
            text = " ".join(ast.unparse(call).split())
            pattern = re.compile(pattern, re.DOTALL)
            found.append(Site(file, call.lineno, call.end_lineno, text, len(leaves), pattern))
    return tuple(found)


@functools.cache
def _positions():
    """Which argument of a function is its `fix`: by name, and by file if it is private."""
    positions = {}
    for path in SOURCE.rglob("*.py"):
        if "fix: " in path.read_text():  # to parse all files takes seconds
            file = path.relative_to(SOURCE).as_posix()
            for function in _functions(_tree(file)):
                names = [a.arg for a in function.args.args if a.arg not in ("self", "cls")]
                if "fix" in names:
                    positions[file if function.name.startswith("_") else "", function.name] = names.index("fix")
    return positions


@functools.cache
def _tree(file):
    return ast.parse((SOURCE / file).read_text())


def _functions(tree):
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def _calls(node, around):
    """Calls below a node, each with the functions around it, innermost first."""
    if isinstance(node, ast.Call):
        yield node, around
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        around = [node, *around]
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, around)


def _given(call, file, positions):
    """The expression that a call gives as `fix`, if it does."""
    for keyword in call.keywords:
        if keyword.arg == "fix":
            return keyword.value
    name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    at = positions.get((file, name), positions.get(("", name)))
    return call.args[at] if at is not None and at < len(call.args) else None


def _leaves(value, around, tree):
    """The expressions that may become the line: without what a caller gives, which is that caller's site."""
    if isinstance(value, ast.IfExp):
        return _leaves(value.body, around, tree) + _leaves(value.orelse, around, tree)
    if isinstance(value, ast.BoolOp):
        return [leaf for one in value.values for leaf in _leaves(one, around, tree)]
    if isinstance(value, ast.Constant):
        return [value] if value.value else []
    if not isinstance(value, ast.Name):
        return [] if isinstance(value, ast.Attribute) else [value]
    for function in around:
        assigned = [
            leaf
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == value.id for t in node.targets)
            for leaf in _leaves(node.value, around, tree)
            if not (isinstance(node.value, ast.Name) and node.value.id == value.id)
        ]
        if assigned:
            return assigned
        arguments = function.args
        if value.id in {a.arg for a in (*arguments.args, *arguments.kwonlyargs)}:
            return [one for one in _defaults(arguments, value.id) if _leaves(one, [], tree)]
    return [value]  # a constant of the module, or a name that is set by unpacking


def _defaults(arguments, name):
    positional = dict(zip([a.arg for a in arguments.args][::-1], arguments.defaults[::-1], strict=False))
    named = dict(zip([a.arg for a in arguments.kwonlyargs], arguments.kw_defaults, strict=True))
    default = (positional | named).get(name)
    return [] if default is None or (isinstance(default, ast.Constant) and not default.value) else [default]


def _pattern(value):
    if isinstance(value, ast.Constant):
        return re.escape(str(value.value))
    if isinstance(value, ast.JoinedStr):
        return "".join(_pattern(one) if isinstance(one, ast.Constant) else ".+?" for one in value.values)
    return ".+?"
