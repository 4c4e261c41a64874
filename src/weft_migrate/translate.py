"""`translate`: a whole script, and its imports."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import libcst as cst
from typing_extensions import override

from weft_migrate.draft import Finding, ScriptDraft
from weft_migrate.library import read_library
from weft_migrate.script import Script, aliases_of, bound, code, dotted, find, inside, is_part, targets, variables
from weft_migrate.walk import Walk

LIBRARIES = tuple(map(read_library, ("accelerate", "fabric")))


class Translation(NamedTuple):
    """A script, rewritten.

    Attributes:
        text: The new script.
        findings: What was left, and what needs a look, by line.
        uses: How many uses of the library the script has.
        left: How many of them are still there.
        library: Its name.
    """

    text: str
    findings: list[Finding]
    uses: int
    left: int
    library: str


def translate(source: str, config: Mapping[str, Any] = MappingProxyType({})) -> Translation:
    r"""Rewrite a script of Accelerate or of Fabric; whatever is not known stays as it is, and is listed.

    Args:
        source: Text of the script.
        config: The content of Accelerate's configuration file: what the script does not set itself.

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
    compile(source, "script", "exec", dont_inherit=True)
    try:
        tree = cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        raise SyntaxError(f"LibCST cannot read line {error.raw_line}: {error.message}") from error
    found_uses = [(script, _uses(script)) for script in (find(tree, library) for library in LIBRARIES)]
    script, uses = max(found_uses, key=lambda pair: len(pair[1]))
    if not uses:
        return Translation(source, [], 0, 0, script.library.name)
    ctx, state, trackers, window = map(script.fresh, ("ctx", "state", "trackers", "window"))
    draft = ScriptDraft(script, config, ctx, state, trackers, window)
    walk = Walk(draft)
    walk.find_parameters()
    new = tree.visit(walk)
    _list_rest(draft, new)
    rest = {each for each in draft.stayed if uses.isdisjoint([*inside(each), *script.above(each)])}
    new = new.visit(_Imports(script, variables(new), draft.imports - _imported(tree)))
    findings = sorted(set(draft.findings))
    return Translation(new.code, findings, len(uses | rest), sum(each.left for each in findings), script.library.name)


def _uses(script: Script) -> set[cst.CSTNode]:
    """Where a script uses the library."""
    return {node for node in script.parents if _is_use(script, node)}


def _is_use(script: Script, node: cst.CSTNode) -> bool:
    if isinstance(node, cst.Call) and script.original(node.func):
        return True
    if isinstance(node, cst.Assign) and dotted(node.value) in script.imported:
        return True
    if dotted(node) in script.states and isinstance(script.parents[node], cst.Attribute):
        return False  # what is asked of it is the use
    return script.method(node) is not None or script.of_wrapped(node) is not None


def _list_rest(draft: ScriptDraft, new: cst.Module) -> None:
    """List what still has names of the library, or of variables that are gone, and arguments that nothing reads."""
    script = draft.script
    made = {name for n in inside(new) if isinstance(n, (cst.Assign, cst.AnnAssign)) for name in map(dotted, targets(n))}
    made |= {n.name.value for n in inside(new) if isinstance(n, (cst.FunctionDef, cst.ClassDef))}
    assigned = {name for name, _ in script.values}
    names = {*script.imported, *script.modules, *(assigned - made)}
    stayed = set(inside(*draft.stayed))
    for line, became in draft.became.items():
        now = {name for each in became for part in _head(each) for name in variables(part)}
        nodes = [n for part in _head(line) for n in inside(part) if isinstance(n, cst.Name)]
        now -= {n.value for n in nodes if n in stayed}
        for node in nodes:
            parent = script.parents[node]
            binds = is_part(node, parent) or isinstance(parent, (cst.AssignTarget, cst.Param))
            if node.value in names & now and node not in stayed and not binds:
                whole, last = _whole(script, node)
                name = script.imported.get(last, last)
                draft.left(whole, draft.hint(name, f"{name} is not there without {script.library.name}"))
    read = {dotted(n) for n in inside(new) if isinstance(n, cst.Attribute)}
    roots = assigned | {each.name.value for each in script.every(cst.Param)}
    roots -= script.holders | set(script.wrapped)
    for argument in [each.value for each in script.every(cst.Arg) if isinstance(each.value, cst.Attribute)]:
        if dotted(argument.value) in roots and dotted(argument) not in read:
            draft.check(argument, "nothing reads it any more")


def _head(line: cst.CSTNode) -> list[cst.CSTNode]:
    """A statement without the statements in it."""
    if isinstance(line, cst.SimpleStatementLine):
        return [each for each in line.body if not isinstance(each, (cst.Import, cst.ImportFrom))]
    inner = (cst.IndentedBlock, cst.If, cst.Else, cst.Finally, cst.ExceptHandler)
    return [each for each in line.children if not isinstance(each, inner)]


def _whole(script: Script, node: cst.CSTNode) -> tuple[cst.CSTNode, str]:
    """The attributes and the call that a name begins, and the last of the names."""
    last = code(node)
    while isinstance(parent := script.parents[node], (cst.Attribute, cst.Call)) and parent.children[0] is node:
        last = parent.attr.value if isinstance(parent, cst.Attribute) else last
        node = parent
    return node, last


def _imported(tree: cst.Module) -> set[str]:
    """Modules that a script imports already."""
    lines = [line.body for line in tree.body if isinstance(line, cst.SimpleStatementLine)]
    found = [each for body in lines for each in body if isinstance(each, cst.Import)]
    return {dotted(alias.name) for each in found for alias in each.names if alias.asname is None}


class _Imports(cst.CSTTransformer):
    """Takes out what is no longer used of the library, and puts what is used now in its place."""

    def __init__(self, script: Script, used: set[str], needed: set[str]) -> None:
        super().__init__()
        self.library, self.used = script.library, used
        self.new = [*sorted(needed), "weft"]

    @override
    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        if not any(aliases_of(self.library, each) for each in updated_node.body):
            return updated_node
        kept = [each for node in updated_node.body if (each := self._kept(node)) is not None]
        lines = [cst.parse_statement(f"import {name}") for name in self.new]
        self.new = []
        lines += [updated_node.with_changes(body=kept, leading_lines=[])] if kept else []
        if not lines:
            return cst.RemoveFromParent()
        first: Any = lines[0]
        return cst.FlattenSentinel([first.with_changes(leading_lines=updated_node.leading_lines), *lines[1:]])

    def _kept(self, node: cst.BaseSmallStatement) -> cst.BaseSmallStatement | None:
        gone = [alias for alias in aliases_of(self.library, node) if bound(alias) not in self.used]
        if not gone or not isinstance(node, (cst.Import, cst.ImportFrom)) or isinstance(node.names, cst.ImportStar):
            return node
        names = [alias for alias in node.names if alias not in gone]
        if not names:
            return None
        names[-1] = names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return node.with_changes(names=names)
