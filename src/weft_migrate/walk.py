"""The walk over a script: every use of a library is translated, or stays and is listed."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import libcst as cst
from typing_extensions import override

from weft_migrate.calls import CALLS, from_template
from weft_migrate.draft import Left, ScriptDraft, literal
from weft_migrate.loops import is_after_backward, split_loop
from weft_migrate.prepare import construct
from weft_migrate.script import code, dotted, given, inside, is_part
from weft_migrate.statements import STATEMENTS, is_whole, statement
from weft_migrate.strategies import MODEL_MAKERS, always, labels, strategies

_DEFAULTS = MappingProxyType({"mixed_precision": '"no"', "gradient_accumulation_steps": "1"})
_NEEDS = MappingProxyType(
    {**{name: name for name in _DEFAULTS}, "autocast": "mixed_precision", "backward": "gradient_accumulation_steps"}
)
_SUMMED = ("none", "sum")
_UNREADABLE = "the new text would be no Python; "
_PLUGINS = frozenset({"deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin", "parallelism_config"})
_KINDS = MappingProxyType({"FSDP": "fully_shard", "DEEPSPEED": "zero_partition"})


def _of_maker(draft: ScriptDraft, name: str) -> str:
    """What to do about a call that may or may not make a setting, in a function or under a condition."""
    models = [call for call in draft.script.prepares() if "model" in draft.script.roles(call)]
    if name in MODEL_MAKERS:
        return f"its lines are listed for line {draft.script.line(models[0])}" if models else "see the strategy"
    return "made under a condition, or changed later: write what it sets into the call of weft"


class Walk(cst.CSTTransformer):
    """One pass, from the inside to the outside; what is original tells what something is, what is updated its text."""

    def __init__(self, draft: ScriptDraft) -> None:
        super().__init__()
        self.draft, self.script = draft, draft.script
        draft.walk = self
        draft.labels |= labels(draft)

    def find_parameters(self) -> None:
        """Find the functions that need a setting as an argument, before any of their calls is left."""
        script, blocks = self.script, {loop.block for loop in self.script.loops}
        for node in script.every(cst.Attribute):
            name, call = script.method(node) or "", script.parents[node]
            if name in script.library.prepares and isinstance(call, cst.Call):
                self.draft.seen("mixed_precision", node) if "model" in script.roles(call) else None
                if any(script.scope(loop.loop) is script.scope(call) for loop in script.loops):
                    self.draft.seen("gradient_accumulation_steps", node)
            elif name in _NEEDS and (name != "backward" or blocks.isdisjoint(script.above(node))):
                self.draft.seen(_NEEDS[name], node)

    @override
    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        if isinstance(original_node, (cst.IndentedBlock, cst.Module)):
            body, lines = self.draft.results(original_node.body)
            return updated_node.with_changes(body=body, footer=[*lines, *updated_node.footer])
        if original_node in self.draft.labels:
            return cst.parse_expression(self.draft.labels[original_node])
        try:
            new = super().on_leave(original_node, updated_node)
        except (Left, cst.ParserSyntaxError) as error:
            new = self._leave(original_node, error if isinstance(error, Left) else Left(_UNREADABLE))
        if isinstance(original_node, (cst.SimpleStatementLine, cst.BaseCompoundStatement)):
            single = [new] if isinstance(new, cst.CSTNode) else []
            self.draft.became[original_node] = list(new) if isinstance(new, cst.FlattenSentinel) else single
        return new

    def _leave(self, node: cst.CSTNode, left: Left) -> cst.CSTNode:
        """Leave a statement or an expression as it is, and list it."""
        what = node.body[0] if isinstance(node, cst.SimpleStatementLine) else node
        call = what.value if isinstance(what, (cst.Assign, cst.Expr)) else what
        func = call.func if isinstance(call, cst.Call) else what
        name = self.script.method(func) or self.script.original(func)
        self.draft.left(what, left.before + self.draft.hint(name, left.otherwise))
        return node

    # -- names and attributes ------------------------------------------------------------------------

    @override
    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> Any:
        parent = self.script.parents[original_node]
        if original_node.value in self.script.holders:
            own = isinstance(parent, cst.Arg) and parent.keyword is original_node and self._is_own(parent)
            if own or not is_part(original_node, parent):
                return updated_node.with_changes(value=self.draft.ctx)
        return self._annotation(original_node, updated_node)

    def _annotation(self, node: cst.CSTNode, updated: cst.BaseExpression) -> cst.BaseExpression:
        annotated = isinstance(self.script.parents[node], cst.Annotation)
        if annotated and self.script.original(node) in self.script.library.classes:
            return cst.parse_expression("weft.DistContext")
        return updated

    def _is_own(self, argument: cst.CSTNode) -> bool:
        """Whether an argument is one of a function of the script."""
        call = cst.ensure_type(self.script.parents[argument], cst.Call)
        return any(each.name.value == dotted(call.func) for each in self.script.every(cst.FunctionDef, cst.ClassDef))

    @override
    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> Any:
        new = self._attribute(original_node)
        if new is None:
            return self._annotation(original_node, updated_node)
        return self.draft.expression(new, original_node) if isinstance(new, str) else new

    def _attribute(self, node: cst.Attribute) -> str | cst.CSTNode | None:
        """The text of an attribute that is not called; the node itself if it is left; None if it is no use."""
        draft, script = self.draft, self.script
        name, parent, text = script.method(node), script.parents[node], dotted(node)
        if text in script.holders:
            return draft.context(node)
        if (found := script.of_wrapped(node)) and found[1]:
            return found[1].format(found[0])
        if node.attr.value == "no_sync" and draft.prepared.get(dotted(node.value)) == "model":
            return f"functools.partial(weft.contract.no_sync, {dotted(node.value)}, {draft.ctx})"
        if name is None or self._is_part(node, name):
            return None  # it is translated as a whole
        if isinstance(parent, cst.AssignTarget):
            if script.parents[parent] in script.late:
                return None  # its statement is removed
            draft.left(node, draft.hint(name, "the settings are arguments of weft.start and of the transforms"))
            return node
        if name in script.library.attributes:
            return script.library.attributes[name].format(ctx=draft.context(node.value))
        if name == "sync_gradients" and is_after_backward(draft, node):
            return "True"
        if name in _DEFAULTS and (setting := draft.setting_at(name, node, _DEFAULTS[name])):
            return setting
        if self._is_no_plugin(node):
            return "None"
        optimizers = self._optimizers() if name == "optimizer_step_was_skipped" else set()
        if len(optimizers) == 1:
            return f"weft.was_skipped({optimizers.pop()})"
        known_as = "state" if dotted(node.value) in script.states else name
        draft.left(node, draft.hint(known_as, "weft has no attribute of this name"))
        return node

    def _is_part(self, node: cst.Attribute, name: str) -> bool:
        """Whether the call, the test, the comparison or the attribute around it is translated."""
        parent = self.script.parents[node]
        if isinstance(parent, cst.Call) and parent.func is node:
            return name not in self.script.library.attributes
        if name == "sync_gradients":
            return isinstance(parent, cst.If)
        if name == "distributed_type":
            return isinstance(parent, cst.Comparison) and parent.left is node
        is_inner = dotted(node) in self.script.states and isinstance(parent, cst.Attribute)
        return is_inner or self._is_never_read(node)

    def _optimizers(self) -> set[str]:
        """The names of the optimizers that are prepared."""
        script = self.script
        pairs = [pair for call in script.prepares() for pair in zip(given(call).args, script.roles(call), strict=True)]
        return {dotted(each) for each, role in pairs if role == "optimizer"} - {""}

    def _is_never_read(self, node: cst.CSTNode) -> bool:
        """Whether a part of a test is not evaluated, as its first part decides."""
        tests = (each for each in self.script.above(node) if isinstance(each, cst.BooleanOperation))
        return any(self._is_decided(each.left) is isinstance(each.operator, cst.Or) for each in tests)

    def _is_no_plugin(self, node: cst.CSTNode) -> bool:
        """Whether a node asks for a plugin that neither the script nor the configuration file makes."""
        script, name = self.script, self.script.method(node) or ""
        known = script.are_known and name not in script.settings
        asked = not isinstance(script.parents[node], cst.Attribute)
        return name in _PLUGINS and known and asked and not self.draft.config.get(name.replace("_plugin", "_config"))

    # -- tests -----------------------------------------------------------------------------------------

    def _is_decided(self, node: cst.CSTNode) -> bool | None:
        """The value of `accelerator.state.deepspeed_plugin is None`, where the script makes no such plugin."""
        match node:
            case cst.Comparison(left, [cst.ComparisonTarget(cst.Is() | cst.IsNot() as kind, cst.Name("None"))]):
                return isinstance(kind, cst.Is) if self._is_no_plugin(left) else None
            case _:
                return None

    @override
    def leave_BooleanOperation(self, original_node: cst.BooleanOperation, updated_node: cst.BooleanOperation) -> Any:
        both = isinstance(original_node.operator, cst.Or)
        if self._is_decided(original_node.left) is both:
            return cst.Name(str(both))
        if not both and is_after_backward(self.draft, original_node):
            sides = (original_node.left, updated_node.right), (original_node.right, updated_node.left)
            for side, other in sides:
                if self.script.method(side) == "sync_gradients":
                    return other
        return updated_node

    @override
    def leave_Comparison(self, original_node: cst.Comparison, updated_node: cst.Comparison) -> Any:
        """`accelerator.distributed_type == DistributedType.XLA`, also with `accelerator.state`; `plugin is None`."""
        left, script = original_node.left, self.script
        if (decided := self._is_decided(original_node)) is not None:
            return cst.Name(str(decided))
        if script.method(left) != "distributed_type":
            return updated_node
        [first, *others] = original_node.comparisons
        ctx = self.draft.context(cst.ensure_type(left, cst.Attribute).value)
        kind = dotted(first.comparator).rpartition(".")[2]
        texts = {"XLA": f'{ctx}.device.type == "xla"', "TPU": f'{ctx}.device.type == "xla"'}
        texts["NO"] = f"{ctx}.world_size == 1"
        known = strategies(self.draft)
        if script.are_known and known and len(known) == 1 and kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
            texts[kind] = str(any(call.name == _KINDS.get(kind) for call in always(self.draft)))
        equal = isinstance(first.operator, (cst.Equal, cst.Is))
        if kind not in texts or others or not (equal or isinstance(first.operator, (cst.NotEqual, cst.IsNot))):
            self.draft.left(left, self.draft.hint("distributed_type"))
            return updated_node.with_changes(left=left)
        opposite = {"True": "False", "False": "True"}.get(texts[kind], texts[kind].replace("==", "!="))
        return cst.parse_expression(texts[kind] if equal else opposite)

    # -- calls -----------------------------------------------------------------------------------------

    @override
    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> Any:
        node, updated = original_node, self._with_arguments(original_node, updated_node)
        draft, script, library = self.draft, self.script, self.script.library
        method, imported = script.method(node.func), script.original(node.func)
        if method is None and imported is None:
            return self._other_call(node, updated)
        if self._is_part_of_more(node, method, imported):
            return updated
        name = method or imported or ""
        if imported in library.classes:
            text = construct(draft, node)
        elif imported in library.makers:
            raise Left(otherwise=_of_maker(draft, name))
        elif name in CALLS and (node.args or name in ("autocast", "profile")):
            text = CALLS[name](draft, node, updated)
        else:
            rows = (library.methods if method else library.functions).get(name)
            text = from_template(draft, rows, node, updated)
        return draft.expression(text, node)

    def _is_part_of_more(self, node: cst.Call, method: str | None, imported: str | None) -> bool:
        """Whether a call is translated as an attribute, with its statement, or with the settings it belongs to."""
        script = self.script
        if method in script.library.attributes:
            return True
        if method in {*STATEMENTS, *script.library.statements, *script.library.prepares}:
            return is_whole(self.draft, node, method or "")
        if method in ("free_memory", "clear"):
            return isinstance(script.parents[node], cst.Assign)
        if method == "accumulate":
            return any(loop.block in script.above(node) for loop in self.draft.looped)
        return node in {*script.taken, *script.local_sgd} or any(
            node in inside(call) and node is not call for call in script.constructors
        )

    def _with_arguments(self, node: cst.Call, updated: cst.Call) -> cst.Call:
        """A call with the settings that a function needs now."""
        more = ", ".join(f"{name}={text}" for name, text in self.draft.arguments.get(node, {}).items())
        added = cst.ensure_type(cst.parse_expression(f"f({more})"), cst.Call).args
        return updated.with_changes(args=[*updated.args, *added])

    @override
    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> Any:
        names = self.draft.parameters.get(original_node, {})
        if not names:
            return updated_node
        more = [cst.Param(cst.Name(name)) for name in names]
        params = updated_node.params.with_changes(kwonly_params=more, star_arg=cst.ParamStar())
        return updated_node.with_changes(params=params)

    def _other_call(self, node: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        """`len` of a loader that is restored; messages of Accelerate's logger."""
        draft = self.draft
        if "ignore_index" in (options := given(node).keywords) and literal(options.get("reduction")) not in _SUMMED:
            draft.check(node, self.script.library.remarks["ignore_index"])
        counted = dotted(node.args[0].value) if dotted(node.func) == "len" and node.args else ""
        if counted in draft.lengths and draft.made.get(draft.state) in (None, self.script.scope(node)):
            return cst.Name(draft.lengths[counted])
        if isinstance(node.func, cst.Attribute) and "get_logger" in self.script.imported.values():
            gone = ("main_process_only", "in_order")
            args = [each for each in updated.args if not (each.keyword and each.keyword.value in gone)]
            if args and len(args) < len(updated.args):
                return updated.with_changes(args=[*args[:-1], args[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)])
        return updated

    # -- statements ------------------------------------------------------------------------------------

    @override
    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        if len(original_node.body) != 1:
            return updated_node
        [old], [new] = original_node.body, updated_node.body
        if not isinstance(old, (cst.Expr, cst.Assign)) or not isinstance(new, (cst.Expr, cst.Assign)):
            return updated_node
        lines = statement(self.draft, old, new)
        if lines is None:
            return updated_node
        if not lines:
            return cst.RemoveFromParent()
        text = "\n".join(lines) + code(updated_node.trailing_whitespace)
        first, *rest = self.draft.importing(cst.parse_module(text)).body
        return cst.FlattenSentinel([first.with_changes(leading_lines=updated_node.leading_lines), *rest])

    @override
    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> Any:
        """`if accelerator.sync_gradients:` is gone where that is always true."""
        draft, body = self.draft, original_node.body
        gone = isinstance(body, cst.IndentedBlock) and not any(draft.became[each] for each in body.body)
        calls = [n for n in inside(original_node.test) if isinstance(n, cst.Call) and dotted(n.func) != "hasattr"]
        if gone and not calls and not original_node.orelse:
            return cst.RemoveFromParent()
        match original_node.test:
            case cst.UnaryOperation(cst.Not(), inner) if self.script.method(inner) == "sync_gradients":
                gone = not original_node.orelse and is_after_backward(draft, original_node)
                return cst.RemoveFromParent() if gone else updated_node
        if self.script.method(original_node.test) != "sync_gradients":
            return updated_node
        known = isinstance(body, cst.IndentedBlock) and not original_node.orelse
        if not known or not is_after_backward(draft, original_node):
            draft.left(original_node.test, draft.hint("sync_gradients"))
            return updated_node.with_changes(test=original_node.test)
        found, _ = draft.results(body.body, updated_node.leading_lines)
        return cst.FlattenSentinel(found)

    @override
    def leave_With(self, original_node: cst.With, updated_node: cst.With) -> Any:
        """Of `with LocalSGD(...) as local_sgd:`, the body stays."""
        call, body = original_node.items[0].item, cst.ensure_type(original_node.body, cst.BaseSuite)
        if call not in self.script.local_sgd:
            return updated_node
        self.draft.check(call, self.script.library.remarks["LocalSGD"])
        return cst.FlattenSentinel(self.draft.results(body.body, updated_node.leading_lines)[0])

    @override
    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> Any:
        found = next((each for each in self.draft.looped if each.loop is original_node), None)
        return split_loop(self.draft, found, updated_node) if found else updated_node
