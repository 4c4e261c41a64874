"""`translate`: a whole script, and its imports."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import libcst as cst
from typing_extensions import override

from weft_migrate.draft import Finding, ScriptDraft
from weft_migrate.libraries.accelerate import ACCELERATE
from weft_migrate.libraries.fabric import FABRIC
from weft_migrate.script import Script, dotted, find, is_part
from weft_migrate.walk import Walk

LIBRARIES = (ACCELERATE, FABRIC)


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
    tree = cst.parse_module(source)
    scripts = [find(tree, library) for library in LIBRARIES]
    script = max(scripts, key=lambda each: len([node for node in each.parents if _use(each, node)]))
    uses = len([node for node in script.parents if _use(script, node)])
    if not uses:
        return Translation(source, [], 0, 0, script.library.name)
    ctx, state, trackers, window = map(script.fresh, ("ctx", "state", "trackers", "window"))
    draft = ScriptDraft(script, config, ctx, state, trackers, window)
    walk = Walk(draft)
    walk.find_parameters()
    new = tree.visit(walk)
    used = _read(new)
    new = new.visit(_Imports(script, used, draft.imports - _imported(tree)))
    findings = sorted(set(draft.findings))
    return Translation(new.code, findings, uses, sum(each.left for each in findings), script.library.name)


def _use(script: Script, node: cst.CSTNode) -> str | None:
    """The name of what is used of the library, if this node does."""
    if isinstance(node, cst.Call) and script.original(node.func):
        return script.original(node.func)
    if isinstance(node, cst.Assign) and dotted(node.value) in script.imported:
        return script.imported[dotted(node.value)]
    return script.method(node)


def _read(node: cst.CSTNode) -> set[str]:
    """The variables in a text, without what its imports bind."""
    if isinstance(node, (cst.Import, cst.ImportFrom)):
        return set()
    if isinstance(node, cst.Name):
        return {node.value}
    return {name for child in node.children if not is_part(child, node) for name in _read(child)}


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
        body = [self._kept(each) for each in updated_node.body]
        if all(new is old for new, old in zip(body, updated_node.body, strict=True)) and not self._is_ours(
            updated_node
        ):
            return updated_node
        kept = [each for each in body if each is not None]
        lines = [cst.parse_statement(f"import {name}") for name in self.new]
        self.new = []
        lines += [updated_node.with_changes(body=kept, leading_lines=[])] if kept else []
        if not lines:
            return cst.RemoveFromParent()
        first: Any = lines[0]
        return cst.FlattenSentinel([first.with_changes(leading_lines=updated_node.leading_lines), *lines[1:]])

    def _is_ours(self, line: cst.SimpleStatementLine) -> bool:
        return any(self._names(each) for each in line.body)

    def _names(self, node: cst.CSTNode) -> list[cst.ImportAlias]:
        """What an import has of the library."""
        if not isinstance(node, (cst.Import, cst.ImportFrom)) or isinstance(node.names, cst.ImportStar):
            return []
        module = dotted(node.module) if isinstance(node, cst.ImportFrom) else None
        return [
            alias
            for alias in node.names
            if (
                self.library.has(dotted(alias.name)) if module is None else self.library.has(module, dotted(alias.name))
            )
        ]

    def _kept(self, node: cst.BaseSmallStatement) -> cst.BaseSmallStatement | None:
        ours = self._names(node)
        if not ours or not isinstance(node, (cst.Import, cst.ImportFrom)) or isinstance(node.names, cst.ImportStar):
            return node
        gone = [alias for alias in ours if _local(alias) not in self.used]
        names = [alias for alias in node.names if alias not in gone]
        if not gone:
            return node
        if not names:
            return None
        names[-1] = names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return node.with_changes(names=names)


def _local(alias: cst.ImportAlias) -> str:
    """The name that an import binds."""
    name = alias.asname.name if alias.asname else alias.name
    return dotted(name).partition(".")[0]
