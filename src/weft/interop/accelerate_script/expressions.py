"""Names, attributes and calls, where they stand."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from types import MappingProxyType

from weft.interop.accelerate_script.calls import ATTRIBUTES, FUNCTIONS, HINTS, METHODS, REMARKS, Template
from weft.interop.accelerate_script.loops import is_after_backward
from weft.interop.accelerate_script.names import dotted
from weft.interop.accelerate_script.reach import setting_at
from weft.interop.accelerate_script.setup import SETTINGS, construct, load_state, save_state
from weft.interop.accelerate_script.statements import STATEMENTS, leave_and
from weft.interop.accelerate_script.translation import Draft

__all__ = [
    "leave_argument",
    "leave_attribute",
    "leave_bool",
    "leave_call",
    "leave_compare",
    "leave_keyword",
    "leave_name",
    "leave_scope",
]

_DEFAULTS = MappingProxyType({"mixed_precision": '"no"', "gradient_accumulation_steps": "1"})


def leave_name(draft: Draft, node: ast.Name) -> None:
    """The accelerator itself, or its class in an annotation."""
    if node.id in draft.names.accelerators:
        draft.edits.replace(node, draft.ctx)
    elif draft.names.imported.get(node.id) == "Accelerator" and isinstance(draft.names.parents[node], ast.arg):
        draft.edits.replace(node, "weft.DistContext")


def leave_argument(draft: Draft, node: ast.arg) -> None:
    """A parameter that is the accelerator."""
    if node.arg in draft.names.accelerators:
        draft.edits.replace_part(node, len(node.arg), draft.ctx)


def leave_scope(draft: Draft, node: ast.Global | ast.Nonlocal) -> None:
    """`nonlocal accelerator`."""
    if set(node.names) & draft.names.accelerators:
        names = [draft.ctx if each in draft.names.accelerators else each for each in node.names]
        draft.edits.replace(node, f"{type(node).__name__.lower()} {', '.join(names)}")


def leave_keyword(draft: Draft, node: ast.keyword) -> None:
    """The accelerator, given by name to a function of the script."""
    call = draft.names.parents[node]
    if node.arg in draft.names.accelerators and dotted(getattr(call, "func", None)) in draft.names.functions:
        draft.edits.replace_part(node, len(node.arg or ""), draft.ctx)


def leave_attribute(draft: Draft, node: ast.Attribute) -> None:
    """An attribute that is not called."""
    name, parent = draft.names.method(node), draft.names.parents[node]
    if dotted(node) in draft.names.accelerators:
        draft.edits.replace(node, draft.context(node))
    elif parent in draft.names.late:
        return  # its statement is removed
    elif name and not isinstance(node.ctx, ast.Load):
        draft.left(node, HINTS.get(name, "the settings are arguments of weft.start and of the transforms"))
    elif node.attr == "no_sync" and draft.prepared.get(dotted(node.value)) == "model":
        draft.imports.add("contextlib")
        draft.edits.replace(node, "contextlib.nullcontext")
        draft.check(node, REMARKS["no_sync"])
    elif draft.names.method(node.value) == "state" and (text := _state_of(draft, node)):
        draft.edits.replace(node, text)
    elif name is None or _is_part(draft, node, name):
        return  # it is translated as a whole
    elif name in ATTRIBUTES:
        draft.imports |= {"torch"} if name == "save" else set()
        text = ATTRIBUTES[name].format(ctx=draft.context(node.value))
        draft.edits.replace(
            node, f"({text})" if " " in text and isinstance(parent, (ast.UnaryOp, ast.Compare)) else text
        )
    elif name == "sync_gradients":
        if is_after_backward(draft, node):
            draft.edits.replace(node, "True")
        else:
            draft.left(node, HINTS[name])
    elif name in _DEFAULTS and (text := setting_at(draft, name, node, _DEFAULTS[name])):
        draft.edits.replace(node, text)
    elif name == "optimizer_step_was_skipped" and len(draft.names.optimizers) == 1:
        draft.edits.replace(node, f"weft.was_skipped({next(iter(draft.names.optimizers))})")
    else:
        draft.left(node, HINTS.get(name, "weft has no attribute of this name"))


def _is_part(draft: Draft, node: ast.Attribute, name: str) -> bool:
    """Whether the call, the test, the comparison or the attribute around it is translated."""
    parent = draft.names.parents[node]
    if isinstance(parent, ast.Call) and parent.func is node:
        return name not in ATTRIBUTES
    if isinstance(parent, ast.Attribute):
        compared = parent.attr == "distributed_type" and isinstance(draft.names.parents[parent], ast.Compare)
        return name == "state" and (compared or _state_of(draft, parent) is not None or _is_never_read(draft, node))
    return {"sync_gradients": ast.If, "distributed_type": ast.Compare}.get(name) is type(parent)


def _is_never_read(draft: Draft, node: ast.Attribute) -> bool:
    """Whether a part of a test is not evaluated, as its first part decides."""
    tests = (each for each in draft.names.above(node) if isinstance(each, ast.BoolOp))
    return any(_is_decided(draft, each.values[0]) is isinstance(each.op, ast.Or) for each in tests)


def _state_of(draft: Draft, node: ast.Attribute) -> str | None:
    """What an attribute of `accelerator.state` is: facts of the rank, and None for plugins the script does not make."""
    if node.attr == "mixed_precision":
        return setting_at(draft, node.attr, node, _DEFAULTS[node.attr])
    if node.attr in ATTRIBUTES and node.attr not in ("print", "save"):
        return ATTRIBUTES[node.attr].format(ctx=draft.context(node.value.value))  # type: ignore[attr-defined]
    plugins = ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin", "parallelism_config")
    known = draft.names.are_known and node.attr not in draft.names.settings
    asked = not isinstance(draft.names.parents[node], ast.Attribute)
    return "None" if node.attr in plugins and known and asked else None


def leave_bool(draft: Draft, node: ast.BoolOp) -> None:
    """`plugin is None or ...plugin.config`, of which only the first part is evaluated; `... and sync_gradients`."""
    if _is_decided(draft, node.values[0]) is isinstance(node.op, ast.Or):
        draft.edits.replace(node, str(isinstance(node.op, ast.Or)))
    else:
        leave_and(draft, node)


def _is_decided(draft: Draft, node: ast.expr) -> bool | None:
    """The value of `accelerator.state.deepspeed_plugin is None`, where the script makes no such plugin."""
    if not isinstance(node, ast.Compare) or not isinstance(node.left, ast.Attribute):
        return None
    [kind, *more], [right, *_] = node.ops, node.comparators
    none = isinstance(right, ast.Constant) and right.value is None and isinstance(kind, (ast.Is, ast.IsNot))
    known = none and not more and draft.names.method(node.left.value) == "state"
    return isinstance(kind, ast.Is) if known and _state_of(draft, node.left) == "None" else None


def leave_compare(draft: Draft, node: ast.Compare) -> None:
    """`accelerator.distributed_type == DistributedType.XLA`, also with `accelerator.state`; `plugin is None`."""
    left = node.left
    if (decided := _is_decided(draft, node)) is not None:
        draft.edits.replace(node, str(decided))
    if not isinstance(left, ast.Attribute) or left.attr != "distributed_type":
        return
    holder = left.value
    if isinstance(holder, ast.Attribute) and draft.names.method(holder) == "state":
        holder = holder.value
    if dotted(holder) not in draft.names.accelerators:
        return
    [right, *others], ctx = node.comparators, draft.context(holder)
    texts = {"XLA": f'{ctx}.device.type == "xla"', "TPU": f'{ctx}.device.type == "xla"', "NO": f"{ctx}.world_size == 1"}
    text = texts.get(dotted(right).rpartition(".")[2])
    if text is None or others or not isinstance(node.ops[0], (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)):
        draft.left(node.left, HINTS["distributed_type"])
        return
    equal = isinstance(node.ops[0], (ast.Eq, ast.Is))
    draft.edits.replace(node, text if equal else text.replace("==", "!="))


def leave_call(draft: Draft, node: ast.Call) -> None:
    """A call of a method, or of a function that was imported."""
    method, imported = draft.names.method(node.func), draft.names.original(node.func)
    if method is None and imported is None:
        _other_call(draft, node)
    elif _is_part_of_more(draft, node, method, imported):
        return
    elif imported in ("Accelerator", "PartialState") and isinstance(draft.names.parents[node], ast.Attribute):
        draft.left(node, "ctx = weft.start(), once; then ctx.rank, ctx.is_main, ctx.is_last, ctx.device")
    elif imported in ("Accelerator", "PartialState"):
        construct(draft, node)
    elif imported == "set_seed" and node.args:
        _set_seed(draft, node)
    elif imported in FUNCTIONS or method in METHODS:
        _from_template(draft, node, method or imported or "")
    elif method == "autocast" or (method in _CALLS and node.args):
        _CALLS[method or ""](draft, node)
    else:
        draft.left(node, HINTS.get(method or imported or "", "weft has no function of this name"))


def _is_part_of_more(draft: Draft, node: ast.Call, method: str | None, imported: str | None) -> bool:
    """Whether a call is translated as an attribute, with its statement, or with the settings it belongs to."""
    if method in ("print", "save"):
        return True
    if method in STATEMENTS:
        return isinstance(draft.names.parents[node], (ast.Expr, ast.Assign))
    if method == "accumulate":
        return any(loop.block in draft.names.above(node) for loop in draft.looped)
    inside = any(node in ast.walk(call) and node is not call for call in draft.names.constructors)
    given = {dotted(each.value) for call in draft.names.constructors for each in call.keywords}
    parent = draft.names.parents[node]
    assigned = isinstance(parent, ast.Assign) and all(dotted(each) in given for each in parent.targets)
    assigned |= any(node is value for value in draft.names.values.values())
    return imported in SETTINGS and (inside or assigned)


def _other_call(draft: Draft, node: ast.Call) -> None:
    """`len` of a loader that is restored; messages of Accelerate's logger."""
    if dotted(node.func) == "len" and node.args and dotted(node.args[0]) in draft.lengths:
        if draft.names.scope(node) is draft.state_in or draft.state_in is None:
            draft.edits.replace(node, draft.lengths[dotted(node.args[0])])
    elif isinstance(node.func, ast.Attribute) and "get_logger" in draft.names.imported.values():
        for each in node.keywords:
            if each.arg in ("main_process_only", "in_order"):
                start, end = draft.edits.span(each)
                comma = len(draft.edits.source[:start].rstrip().rstrip(",").rstrip())
                draft.edits.replace_span(comma, end, "")


def _skip(draft: Draft, node: ast.Call) -> None:
    if len(node.args) == 2 and draft.has_state and any(draft.names.calls("load_state")):
        draft.edits.replace(node, draft.edits.text(node.args[0]))
        draft.check(node, "not needed: the restored loader continues where it was")
    else:
        draft.left(node, HINTS["skip_first_batches"])


def _set_seed(draft: Draft, node: ast.Call) -> None:
    made = [call for call in draft.names.constructors if draft.names.scope(call) is draft.names.scope(node)]
    ctx = draft.ctx if any(call.lineno < node.lineno for call in made) else "weft.local()"
    ranks = ', ranks="distinct"' if draft.keyword(node, "device_specific") is not None else ""
    draft.edits.replace(node, f"weft.rng.set_seed({draft.edits.text(node.args[0])}, {ctx}{ranks})")


def _from_template(draft: Draft, node: ast.Call, name: str) -> None:
    method = draft.names.method(node.func)
    template: Template = METHODS[name] if method else FUNCTIONS[name]
    given = dict(zip(template.parameters, node.args, strict=False))
    given |= {each.arg: each.value for each in node.keywords if each.arg}
    starred = any(isinstance(each, ast.Starred) for each in node.args) or any(e.arg is None for e in node.keywords)
    missing = [each for each, default in template.parameters.items() if default is None and each not in given]
    known = not starred and set(given) <= set(template.parameters) and len(given) >= len(node.args)
    releases = name in ("free_memory", "clear") and isinstance(draft.names.parents[node], ast.Expr)
    if (missing or not known) and not releases:
        example = template.text.format(ctx=draft.ctx, **dict.fromkeys(template.parameters, "..."))
        draft.left(node, HINTS.get(name, example))
        return
    texts = {
        each: draft.edits.text(given[each]) if each in given else default
        for each, default in template.parameters.items()
    }
    ctx = draft.context(node.func.value) if method else draft.ctx  # type: ignore[attr-defined]
    text = template.text.format(ctx=ctx, **texts).replace(", norm_type=2)", ")")
    if name == "clip_grad_norm_":
        text = text.removesuffix(", 2)") + ")" if text.endswith(", 2)") else text
    draft.imports |= {template.needs} - {""}
    draft.edits.replace(node, text)
    if name in REMARKS:
        draft.check(node, REMARKS[name])


def _backward(draft: Draft, node: ast.Call) -> None:
    loss, steps = draft.edits.text(node.args[0]), draft.setting("gradient_accumulation_steps")
    options = ", ".join(draft.edits.text(each) for each in node.keywords)
    found, _ = draft.loop_of(node)
    simple = isinstance(node.args[0], (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
    inner = loss if simple else f"({loss})"
    if found:
        text = f"({inner} * {draft.window}.share)"
    elif steps is None or draft.edits.text(steps) == "1":
        text = inner
    else:
        text = f"({inner} / {draft.edits.text(steps)})"
    draft.edits.replace(node, f"{text}.backward({options})")


def _autocast(draft: Draft, node: ast.Call) -> None:
    value = draft.setting("mixed_precision")
    kinds = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
    kind = kinds.get(str(getattr(value, "value", ""))) if isinstance(value, ast.Constant) else None
    ctx = draft.context(node.func.value)  # type: ignore[attr-defined]
    if node.args or node.keywords:
        draft.left(node, HINTS["autocast"])
    elif value is not None and not isinstance(value, ast.Constant):
        draft.imports.add("torch")
        wish = draft.edits.text(value)
        dtype = f'torch.float16 if {wish} == "fp16" else torch.bfloat16'
        draft.edits.replace(node, f'torch.autocast({ctx}.device.type, {dtype}, enabled={wish} in ("fp16", "bf16"))')
    elif kind is None:
        draft.imports.add("contextlib")
        draft.edits.replace(node, "contextlib.nullcontext()")
    else:
        draft.imports.add("torch")
        draft.edits.replace(node, f"torch.autocast({ctx}.device.type, {kind})")


_CALLS: Mapping[str, Callable[[Draft, ast.Call], None]] = MappingProxyType(
    {
        "backward": _backward,
        "autocast": _autocast,
        "save_state": save_state,
        "load_state": load_state,
        "skip_first_batches": _skip,
    }
)
