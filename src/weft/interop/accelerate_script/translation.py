"""A translation in progress: names, edits, and what is to be reported about it."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.interop.accelerate_script.edits import Edits
from weft.interop.accelerate_script.names import Loop, Names, dotted

__all__ = ["Draft", "Finding"]


class Finding(NamedTuple):
    """A line of the script that needs a look.

    Attributes:
        line: In the original.
        what: The code it is about.
        hint: What to write, or what is different.
        left: Whether it was left as it is.
    """

    line: int
    what: str
    hint: str
    left: bool


@dataclass
class Draft:
    """What the parts of the translation share."""

    names: Names
    edits: Edits
    ctx: str
    state: str
    trackers: str
    window: str
    findings: list[Finding] = field(default_factory=list)
    imports: set[str] = field(default_factory=set)
    windows: dict[str, str] = field(default_factory=dict)  # of loaders
    looped: list[Loop] = field(default_factory=list)  # the loops that are translated
    prepared: dict[str, str] = field(default_factory=dict)  # names and their roles
    lengths: dict[str, str] = field(default_factory=dict)  # loaders, and the names of their lengths
    state_in: ast.AST | None = None  # the function in which `state` is
    trackers_in: ast.AST | None = None
    has_state: bool = False
    has_trackers: bool = False

    def left(self, node: ast.AST, hint: str) -> None:
        """Leave a piece of code alone, and say so."""
        self.edits.keep(node)
        self._say(node, hint, left=True)

    def check(self, node: ast.AST, hint: str) -> None:
        """Say something about a piece of code that was translated."""
        self._say(node, hint, left=False)

    def _say(self, node: ast.AST, hint: str, *, left: bool) -> None:
        node = node.context_expr if isinstance(node, ast.withitem) else node
        start, end = self.edits.span(node)
        what = " ".join(self.edits.source[start:end].split())
        found = Finding(node.lineno, what if len(what) <= 80 else what[:77] + "...", hint, left)  # type: ignore[attr-defined]
        if found not in self.findings:
            self.findings.append(found)

    def context(self, accelerator: ast.AST) -> str:
        """The context in the place of an accelerator."""
        before, dot, _ = dotted(accelerator).rpartition(".")
        return f"{before}{dot}{self.ctx}"

    def loop_of(self, node: ast.AST) -> tuple[Loop | None, ast.AST]:
        """The translated loop around a node, and the statement of its body (or of `with`) that the node is in."""
        inside = node
        for each in self.names.above(node):
            for loop in self.looped:
                if each is loop.loop:
                    return loop, inside
                if each is loop.block:
                    return loop, inside
            inside = each
        return None, inside

    def guarded(self, node: ast.AST) -> bool:
        """Whether only some ranks come here."""
        tests = [each.test for each in self.names.above(node) if isinstance(each, ast.If)]
        kinds = ("is_main_process", "is_local_main_process", "is_last_process")
        return any(self.names.method(part) in kinds for test in tests for part in ast.walk(test))

    def setting(self, name: str) -> ast.expr | None:
        """An argument of the accelerator, or of the settings object that holds it."""
        holders = {
            "gradient_accumulation_steps": ("gradient_accumulation_plugin", "num_steps"),
            "split_batches": ("dataloader_config", "split_batches"),
            "dispatch_batches": ("dataloader_config", "dispatch_batches"),
            "even_batches": ("dataloader_config", "even_batches"),
            "project_dir": ("project_config", "project_dir"),
        }
        if name in self.names.settings or name not in holders:
            return self.names.settings.get(name)
        holder, inner = holders[name]
        return self.keyword(self.names.settings.get(holder), inner)

    def keyword(self, made: ast.expr | None, name: str) -> ast.expr | None:
        """A keyword of the call that a value, or the variable that is given, comes from."""
        call = self.names.values.get(dotted(made), made)
        found = [each.value for each in call.keywords if each.arg == name] if isinstance(call, ast.Call) else []
        return found[0] if found else None

    def is_set(self, name: str) -> bool:
        """Whether a setting is the literal True."""
        value = self.setting(name)
        return isinstance(value, ast.Constant) and value.value is True

    def handlers(self) -> list[ast.Call]:
        """The objects of `kwargs_handlers`."""
        given = self.names.settings.get("kwargs_handlers")
        given = self.names.values.get(dotted(given), given)
        elements = given.elts if isinstance(given, (ast.List, ast.Tuple)) else []
        values = [self.names.values.get(dotted(each), each) for each in elements]
        return [each for each in values if isinstance(each, ast.Call)]
