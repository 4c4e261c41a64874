"""A translation in progress: what its parts share, and what is to be reported."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import libcst as cst

from weft_migrate.script import AccumulateLoop, Expression, Script, code, dotted, elements, operand, variables

N = TypeVar("N", bound=cst.CSTNode)

# Around these, any expression may stand as it is.
_FREE = (
    *(cst.Arg, cst.Assign, cst.AnnAssign, cst.AugAssign, cst.Expr, cst.Return, cst.WithItem, cst.If, cst.For),
    *(cst.Index, cst.Element, cst.DictElement, cst.Decorator, cst.While, cst.Assert),
)
# What new code may use besides weft.
_MODULES = frozenset(
    {"contextlib", "dataclasses", "functools", "gc", "importlib.util", "logging", "os", "safetensors.torch", "torch"}
    | {"wandb"}
)


class Left(Exception):
    """A call stays as it is.

    Attributes:
        before: A text before the hint for its name.
        otherwise: The hint for a name without one.
    """

    def __init__(self, before: str = "", otherwise: str = "weft has no function of this name") -> None:
        super().__init__(before)
        self.before, self.otherwise = before, otherwise


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
class ScriptDraft:
    """What the parts of the translation share."""

    script: Script
    config: Mapping[str, Any]  # settings of a configuration file
    ctx: str
    state: str
    trackers: str
    window: str
    findings: list[Finding] = field(default_factory=list)
    imports: set[str] = field(default_factory=set)
    windows: dict[str, str] = field(default_factory=dict)  # of loaders
    policy: str = ""  # the variable of a precision that is known when the program runs
    labels: dict[cst.CSTNode, str] = field(default_factory=dict)  # what strategies, and loaders of loops, become
    stayed: list[cst.CSTNode] = field(default_factory=list)  # the code that was left
    looped: list[AccumulateLoop] = field(default_factory=list)  # the loops that are translated
    prepared: dict[str, str] = field(default_factory=dict)  # names and their roles
    lengths: dict[str, str] = field(default_factory=dict)  # loaders, and the names of their lengths
    parameters: dict[cst.CSTNode, dict[str, None]] = field(default_factory=dict)  # new ones, of functions
    arguments: dict[cst.CSTNode, dict[str, str]] = field(default_factory=dict)  # and of their calls
    made: dict[str, cst.CSTNode | None] = field(default_factory=dict)  # new variables, and the functions they are in
    became: dict[cst.CSTNode, list[cst.CSTNode]] = field(default_factory=dict)  # of statements
    walk: cst.CSTTransformer | None = None

    def left(self, node: cst.CSTNode, hint: str) -> None:
        """Say that a piece of code was left alone."""
        self.stayed.append(node)
        self._say(node, hint, left=True)

    def check(self, node: cst.CSTNode, hint: str) -> None:
        """Say something about a piece of code that was translated."""
        self._say(node, hint, left=False)

    def _say(self, node: cst.CSTNode, hint: str, *, left: bool) -> None:
        what, hint = " ".join(code(node).split()), re.sub(r"\bctx\b", self.ctx, hint)
        found = Finding(self.script.line(node), what if len(what) <= 80 else what[:77] + "...", hint, left)
        if found not in self.findings:
            self.findings.append(found)

    def importing(self, new: N) -> N:
        """New code, for which modules are imported."""
        used = variables(new)
        self.imports |= {module for module in _MODULES if module.partition(".")[0] in used}
        return new

    def expression(self, text: str, node: cst.CSTNode) -> Expression:
        """A new expression in the place of a node, in parentheses where what is around it would take it apart."""
        around = self.script.parents[node]
        for outer in self.script.above(node):
            if isinstance(outer, cst.FormattedString):  # before Python 3.12, on one line and with other quotes
                text = " ".join(text.split()).translate(str.maketrans("\"'", "''" if '"' in outer.quote else '""'))
        new = cst.parse_expression(text)
        free = isinstance(around, _FREE) and getattr(around, "func", None) is not node
        return self.importing(new if free else cst.parse_expression(operand(new)))

    def text(self, node: cst.CSTNode) -> str:
        """The text of a node, translated."""
        return code(cst.ensure_type(node.visit(self.walk), cst.CSTNode)) if self.walk else code(node)

    def results(
        self, nodes: Sequence[cst.CSTNode], above: Sequence[cst.EmptyLine] = ()
    ) -> tuple[list[Any], list[cst.EmptyLine]]:
        """What statements became; comments above those that are gone go to the next one, or are returned."""
        found: list[Any] = []
        lines = list(above)
        for node in nodes:
            new = self.became[node]
            if new and lines:
                first: Any = new[0]
                new = [first.with_changes(leading_lines=[*lines, *first.leading_lines]), *new[1:]]
            lines = [] if new else [*lines, *getattr(node, "leading_lines", ())]
            found += new
        return found, lines

    def hint(self, name: str | None, otherwise: str = "weft has no function of this name") -> str:
        """What to write instead of something of the library."""
        steps = self.setting("gradient_accumulation_steps")
        hint = self.script.library.hints.get(name or "", otherwise)
        return hint.replace("steps=4", f"steps={code(steps)}") if steps else hint

    def context(self, holder: cst.CSTNode) -> str:
        """The context in the place of an accelerator."""
        text = dotted(holder)
        before, dot, _ = self.script.states.get(text, text).rpartition(".")
        return f"{before}{dot}{self.ctx}"

    def context_of(self, call: cst.Call) -> str:
        """The context in the place of the accelerator that a method is called of."""
        return self.context(cst.ensure_type(call.func, cst.Attribute).value)

    def loop_of(self, node: cst.CSTNode) -> AccumulateLoop | None:
        """The translated loop around a node."""
        around = set(self.script.above(node))
        return next((loop for loop in reversed(self.looped) if loop.loop in around), None)

    def make(self, name: str, node: cst.CSTNode) -> None:
        """Note that a new variable is made where a node stands."""
        self.made[name] = self.script.scope(node)

    def reaches(self, name: str, node: cst.CSTNode) -> bool:
        """Whether a new variable is known where a node stands."""
        return name in self.made and self.made[name] in (None, self.script.scope(node))

    def guarded(self, node: cst.CSTNode) -> bool:
        """Whether only some ranks come here."""
        tests = [each.test for each in self.script.above(node) if isinstance(each, cst.If)]
        kinds = ("is_main_process", "is_local_main_process", "is_last_process", "is_global_zero")
        return any(self.script.has(test, *kinds) for test in tests)

    def setting(self, name: str) -> Expression | None:
        """An argument of the accelerator, of the object that holds it, or of the configuration file."""
        found = self.script.settings.get(name)
        for place, setting in self.script.library.held.items():
            holder, _, inner = place.partition(".")
            if found is None and setting == name:
                found = self.script.made(self.script.settings.get(holder))[1].keywords.get(inner)
        configured = self.config.get(name, dict(self.config.get("deepspeed_config") or {}).get(name))
        if found is None and isinstance(configured, (str, int)):
            found = cst.parse_expression(f'"{configured}"' if isinstance(configured, str) else f"{configured}")
        return found

    def is_set(self, name: str) -> bool:
        """Whether a setting is the literal True."""
        return dotted(self.setting(name)) == "True"

    def handler(self, kind: str, node: cst.CSTNode) -> dict[str, Expression]:
        """The arguments that a node sees of the object of one kind in `kwargs_handlers`; none if there is no such."""
        handlers = self.script.settings.get("kwargs_handlers")
        found = dict(map(self.script.made, elements(handlers and self.script.value(handlers))))
        keywords = found[kind].keywords if kind in found else {}
        for name, value in keywords.items():
            if not self.script.sees(value, node):
                self.check(node, f"{kind}: {name}={code(value)} is not known here, so not taken over")
        return {name: value for name, value in keywords.items() if self.script.sees(value, node)}

    def setting_at(self, name: str, node: cst.CSTNode, default: str) -> str | None:
        """The text of a setting where a node stands: its value, or a new parameter of the function around.

        Args:
            name: Of the setting.
            node: Where it is read.
            default: Its value if the script does not give it.

        Returns:
            None if it cannot be decided.
        """
        if self.setting(name) is None:
            return default if self.script.are_known else None
        value = self.seen(name, node)
        if value is None or name != "mixed_precision" or value is not self.setting(name):
            return None if value is None else code(value)
        own = all(isinstance(literal(each), str) and not dotted(each) for each in self.script.choices(value))
        return '"no"' if dotted(value) == "None" else code(value) if own else f'{operand(value)} or "no"'

    def seen(self, name: str, node: cst.CSTNode) -> Expression | None:
        """The value of a setting where a node stands, or the new parameter that has it; None if there is no such."""
        value = self.setting(name)
        if value is None or self.script.sees(value, node):
            return value
        around = [each for each in self.script.above(node) if isinstance(each, cst.FunctionDef)]
        return cst.Name(name) if around and self._add_parameter(around[-1], name) else None

    def _add_parameter(self, function: cst.FunctionDef, name: str) -> bool:
        """Give a function a parameter by keyword, and every call of it the value; False if a call does not see it."""
        script, has = self.script, function.params
        if name in self.parameters.get(function, {}):
            return True
        calls = script.calls_of(function)
        plain = has.params and not (has.star_kwarg or has.kwonly_params or name in script.used)
        if not plain or not isinstance(has.star_arg, cst.MaybeSentinel) or not calls:
            return False
        self.parameters.setdefault(function, {})[name] = None
        texts = {call: self.setting_at(name, call, "") for call in calls if call and call.args}
        if len(texts) < len(calls) or not all(texts.values()):
            del self.parameters[function][name]
            return False
        for call, text in texts.items():
            self.arguments.setdefault(call, {})[name] = text or ""
        return True


def literal(node: cst.CSTNode | None) -> Any:
    """The value of a literal, or the last part of a name as `ShardingStrategy.FULL_SHARD`; else None."""
    if isinstance(node, (cst.SimpleString, cst.Integer, cst.Float)):
        return node.evaluated_value
    if isinstance(node, (cst.List, cst.Tuple, cst.Set)):
        return [literal(each) for each in elements(node)]
    text = dotted(node)
    return {"True": True, "False": False, "": None}.get(text, text.rpartition(".")[2])
