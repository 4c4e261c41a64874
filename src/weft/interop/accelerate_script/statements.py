"""Calls that take a statement: preparation, trackers, files, steps of schedulers; and what stands under tests."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from types import MappingProxyType

from weft.interop.accelerate_script.calls import HINTS
from weft.interop.accelerate_script.loops import drop_sync_test, is_after_backward, split_loop
from weft.interop.accelerate_script.names import dotted
from weft.interop.accelerate_script.setup import PREPARE, SETTINGS, alone, own_lines, prepare, register
from weft.interop.accelerate_script.translation import Draft

__all__ = ["STATEMENTS", "leave_and", "leave_for", "leave_if", "leave_with", "statement"]


def statement(draft: Draft, node: ast.Expr | ast.Assign) -> None:
    """A call that is a statement, or whose value is assigned."""
    call = node.value
    if not isinstance(call, ast.Call):
        _other_statement(draft, node)
        return
    name = draft.names.method(call.func) or ""
    if name in PREPARE and isinstance(node, ast.Assign) and own_lines(draft, node):
        prepare(draft, node, call)
    elif (
        name in ("register_for_checkpointing", "init_trackers")
        and isinstance(node, ast.Expr)
        and own_lines(draft, node)
    ):
        (register if name == "register_for_checkpointing" else _start_trackers)(draft, node, call)
    elif name in _EXPRESSIONS and isinstance(node, ast.Expr) and own_lines(draft, node):
        _EXPRESSIONS[name](draft, node, call)
    elif name in STATEMENTS:
        draft.left(node, HINTS.get(name, HINTS["prepare"]))
    elif draft.names.original(call.func) in SETTINGS and isinstance(node, ast.Assign):
        draft.edits.statement(node, [], alone=alone(draft, node))
    elif draft.prepared.get(dotted(getattr(call.func, "value", None))) == "scheduler":
        _step_scheduler(draft, node, call)


def _other_statement(draft: Draft, node: ast.Expr | ast.Assign) -> None:
    """A function of Accelerate under another name, and steps of accumulation that are set late."""
    if isinstance(node, ast.Assign) and dotted(node.value) in draft.names.imported:
        draft.left(node, "weft has no function of this name")
    elif node in draft.names.late and own_lines(draft, node):
        draft.edits.statement(node, [], alone=alone(draft, node))


def _log(draft: Draft, node: ast.stmt, call: ast.Call) -> None:
    values, step = (call.args[0] if call.args else None), draft.keyword(call, "step")
    step = call.args[1] if len(call.args) > 1 else step
    reaches = draft.has_trackers and draft.trackers_in in (None, draft.names.scope(node))
    if values is None or step is None or not reaches or draft.keyword(call, "log_kwargs") is not None:
        draft.left(node, HINTS["log"])
        return
    texts = draft.edits.text(values), draft.edits.text(step), draft.context(call.func.value)  # type: ignore[attr-defined]
    if draft.guarded(node):
        lines = [f"for tracker in {draft.trackers}:", f"    tracker({texts[0]}, step={texts[1]})"]
        draft.edits.statement(node, lines)
        return
    draft.check(node, "numbers are means over the ranks, no longer those of the main rank")
    draft.edits.replace(call, f"weft.log({', '.join(texts)}, {draft.trackers})")


def _save(draft: Draft, node: ast.stmt, call: ast.Call) -> None:
    ctx = draft.context(call.func.value)  # type: ignore[attr-defined]
    arguments = ", ".join(draft.edits.text(each) for each in call.args)
    draft.edits.statement(node, [f"if {ctx}.is_main:", f"    torch.save({arguments})"])
    draft.imports.add("torch")


def _save_model(draft: Draft, node: ast.stmt, call: ast.Call) -> None:
    if len(call.args) != 2 or call.keywords:
        draft.left(node, "weft.export(weft.save(state, folder, step, ctx), out)")
        return
    ctx = draft.context(call.func.value)  # type: ignore[attr-defined]
    model, folder = map(draft.edits.text, call.args)
    lines = [
        f"if {ctx}.is_main:",
        f"    os.makedirs({folder}, exist_ok=True)",
        f'    safetensors.torch.save_model({model}, os.path.join({folder}, "model.safetensors"))',
    ]
    draft.imports |= {"os", "safetensors.torch"}
    draft.check(node, "under fully_shard: weft.export(weft.save(state, folder, step, ctx), out)")
    draft.edits.statement(node, lines)


def _unscale(draft: Draft, node: ast.stmt, call: ast.Call) -> None:
    draft.check(call, "not needed: gradients are in true units")
    draft.edits.statement(node, [], alone=alone(draft, node))


_EXPRESSIONS: Mapping[str, Callable[[Draft, ast.stmt, ast.Call], None]] = MappingProxyType(
    {
        "log": _log,
        "save": _save,
        "save_model": _save_model,
        "unscale_gradients": _unscale,
    }
)
STATEMENTS = frozenset({*PREPARE, *_EXPRESSIONS, "register_for_checkpointing", "init_trackers"}) - {"save"}


def _step_scheduler(draft: Draft, node: ast.stmt, call: ast.Call) -> None:
    """A prepared scheduler takes as many steps at once as there are ranks."""
    once = draft.is_set("split_batches") or draft.setting("step_scheduler_with_optimizer") is not None
    if call.func.attr != "step" or once or not own_lines(draft, node):  # type: ignore[attr-defined]
        return
    draft.check(call, "as many steps as ranks, as Accelerate does; one is enough if the schedule counts global steps")
    draft.edits.statement(node, [f"for _ in range({draft.ctx}.world_size):", f"    {draft.edits.text(call)}"])


def _start_trackers(draft: Draft, node: ast.stmt, call: ast.Call) -> None:
    """`init_trackers(name, config=)` becomes a list of trackers."""
    name = call.args[0] if call.args else draft.keyword(call, "project_name")
    config = call.args[1] if len(call.args) > 1 else draft.keyword(call, "config")
    given = draft.setting("log_with")
    given = given.elts[0] if isinstance(given, (ast.List, ast.Tuple)) and len(given.elts) == 1 else given
    kind = given.value if isinstance(given, ast.Constant) else None
    folder = draft.setting("project_dir")
    more = _options_of(draft, call, kind)
    if name is None or more is None:
        draft.left(node, HINTS["init_trackers"])
        return
    ctx, run, configs = draft.context(call.func.value), draft.edits.text(name), ""  # type: ignore[attr-defined]
    if config is not None:
        configs = f"config={draft.edits.text(config)}"
    if kind == "wandb":
        draft.imports.add("wandb")
        made = f"wandb.init({', '.join(each for each in (f'project={run}', configs, more) if each)})"
        lines = [f"{draft.trackers} = [weft.monitoring.trackers.libraries.wandb({made})] if {ctx}.is_main else []"]
    else:
        draft.imports.add("os")
        place = f"os.path.join({draft.edits.text(folder)}, {run})" if folder is not None else run
        lines = [f"{draft.trackers} = [weft.monitoring.tensorboard({place})]"]
        if configs:
            hparams = f"weft.monitoring.HParams({configs.removeprefix('config=')})"
            lines.append(f'weft.log({{"config": {hparams}}}, 0, {ctx}, {draft.trackers})')
        if kind != "tensorboard":
            draft.check(call, "TensorBoard; others: weft.monitoring.trackers.libraries")
    draft.has_trackers, draft.trackers_in = True, draft.names.scope(node)
    draft.edits.statement(node, lines)


def _options_of(draft: Draft, call: ast.Call, kind: object) -> str | None:
    """`init_kwargs={"wandb": {...}}` as arguments of `wandb.init`; None if that is not what there is."""
    given = call.args[2] if len(call.args) > 2 else draft.keyword(call, "init_kwargs")
    if given is None:
        return ""
    if kind != "wandb" or not isinstance(given, ast.Dict) or len(given.values) != 1:
        return None
    [key], [options] = given.keys, given.values
    return f"**{draft.edits.text(options)}" if isinstance(key, ast.Constant) and key.value == "wandb" else None


def leave_if(draft: Draft, node: ast.If) -> None:
    """`if accelerator.sync_gradients:`."""
    if draft.names.method(node.test) == "sync_gradients" and not drop_sync_test(draft, node):
        draft.left(node.test, HINTS["sync_gradients"])


def leave_and(draft: Draft, node: ast.BoolOp) -> None:
    """`... and accelerator.sync_gradients`."""
    if isinstance(node.op, ast.And) and any(draft.names.method(each) == "sync_gradients" for each in node.values):
        others = [each for each in node.values if draft.names.method(each) != "sync_gradients"]
        if is_after_backward(draft, node) and others:
            draft.edits.replace(node, " and ".join(draft.edits.text(each) for each in others))


def leave_for(draft: Draft, node: ast.For) -> None:
    """A loop with `accumulate` in it."""
    for found in draft.looped:
        if found.loop is node:
            split_loop(draft, found)


def leave_with(draft: Draft, node: ast.With) -> None:
    """`with accelerator.accumulate(...)` in a loop that is not known."""
    call = node.items[0].context_expr
    is_known = any(loop.block is node for loop in draft.looped)
    if isinstance(call, ast.Call) and draft.names.method(call.func) == "accumulate" and not is_known:
        draft.left(call, HINTS["accumulate"])
