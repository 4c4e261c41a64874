"""Calls that take a statement: preparation, trackers, files, steps of schedulers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import libcst as cst

from weft_migrate.checkpoints import lines_for_state, register
from weft_migrate.draft import Left, ScriptDraft, literal
from weft_migrate.prepare import policy_line, prepare, tracker_lines
from weft_migrate.script import code, dotted, elements, given


def statement(draft: ScriptDraft, node: cst.Expr | cst.Assign, updated: cst.Expr | cst.Assign) -> list[str] | None:
    """The new lines for a statement on a line of its own; None if it stays as its expressions are translated."""
    call, script = node.value, draft.script
    if not isinstance(call, cst.Call):
        if isinstance(node, cst.Assign) and dotted(call) in script.imported:
            draft.check(node, f"{script.imported[dotted(call)]}: not taken over, weft has no function of this name")
            return []
        return [] if node in script.late else None
    name = script.method(call.func) or ""
    if name in script.library.prepares and isinstance(node, cst.Assign):
        return prepare(draft, node, call)
    if isinstance(node, cst.Expr) and _is_gone(draft, call):
        return []
    if name in STATEMENTS and isinstance(node, cst.Expr):
        return STATEMENTS[name](draft, call, cst.ensure_type(updated.value, cst.Call))
    made = script.original(call.func) in script.library.classes and isinstance(node, cst.Assign)
    if made and draft.script.is_fabric:
        trackers, policy = tracker_lines(draft, call), policy_line(draft)
        draft.policy = script.fresh("policy") if policy else ""
        for name in [draft.policy] * bool(policy) + [draft.trackers] * bool(trackers):
            draft.make(name, node)
        more = [f"{draft.policy} = {policy}"] * bool(policy) + trackers
        return [code(updated), *more] if more else None
    if name in ("free_memory", "clear") and isinstance(node, cst.Assign) and len(node.targets) == 1:
        return [f"{' = '.join(map(code, elements(node.targets[0].target)))} = None", "gc.collect()"]
    if call in script.taken and isinstance(node, cst.Assign):
        return []
    if isinstance(call.func, cst.Attribute) and draft.prepared.get(dotted(call.func.value)) == "scheduler":
        return _step_scheduler(draft, call, cst.ensure_type(updated.value, cst.Call))
    return None


def _is_gone(draft: ScriptDraft, call: cst.Call) -> bool:
    """Whether a call is one of an object of the library that is not needed."""
    found, name = draft.script.of_wrapped(call.func), dotted(call.func).rpartition(".")[2]
    if found and not found[1] and name in draft.script.library.remarks:
        draft.check(call, draft.script.library.remarks[name])
    return bool(found and not found[1])


def is_whole(draft: ScriptDraft, node: cst.CSTNode, name: str) -> bool:
    """Whether a method is translated, or left, with the statement around its call."""
    whole = draft.script.parents[node]
    line = draft.script.parents[whole]
    known = isinstance(whole, cst.Assign) if name in draft.script.library.prepares else isinstance(whole, cst.Expr)
    return known and isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1


def _log(draft: ScriptDraft, call: cst.Call, updated: cst.Call) -> list[str]:
    args, keywords, spread = given(updated)
    if draft.script.is_fabric and draft.script.method(call.func) == "log":
        args = [cst.parse_expression(f"{{{code(args[0])}: {code(args[1])}}}"), *args[2:]] if len(args) > 1 else []
    values, step = (args[0] if args else None), (args[1] if len(args) > 1 else keywords.get("step"))
    if values is None or step is None or not draft.reaches(draft.trackers, call) or spread or "log_kwargs" in keywords:
        raise Left
    if draft.guarded(call):
        return [f"for tracker in {draft.trackers}:", f"    tracker({code(values)}, step={code(step)})"]
    draft.check(call, "numbers are means over the ranks, no longer those of the main rank")
    return [f"weft.log({code(values)}, {code(step)}, {draft.context_of(call)}, {draft.trackers})"]


def _save(draft: ScriptDraft, call: cst.Call, updated: cst.Call) -> list[str]:
    args, keywords, _ = given(updated)
    if draft.script.is_fabric:  # the path comes first there
        args = [*args, *(keywords[each] for each in ("path", "state") if each in keywords)][::-1]
        if len(args) != 2 or not (isinstance(args[0], cst.Call) and code(args[0].func).endswith(".state_dict")):
            raise Left(otherwise=lines_for_state(draft, call))
    arguments = ", ".join(map(code, args))
    return [f"if {draft.context_of(call)}.is_main:", f"    torch.save({arguments})"]


def _save_model(draft: ScriptDraft, call: cst.Call, updated: cst.Call) -> list[str]:
    args, keywords, _ = given(updated)
    if len(args) != 2 or keywords:
        raise Left
    model, folder = map(code, args)
    draft.check(call, "whole tensors only; under fully_shard: weft.export(weft.save(state, folder, step, ctx), out)")
    return [
        f"if {draft.context_of(call)}.is_main:",
        f"    os.makedirs({folder}, exist_ok=True)",
        f'    safetensors.torch.save_model({model}, os.path.join({folder}, "model.safetensors"))',
    ]


def _unscale(draft: ScriptDraft, call: cst.Call, _updated: cst.Call) -> list[str]:
    draft.check(call, "not needed: gradients are in true units")
    return []


def _launch(draft: ScriptDraft, call: cst.Call, updated: cst.Call) -> list[str]:
    """`fabric.launch()` is the work of `weft launch`; `fabric.launch(main, 1)` also calls `main(fabric, 1)`."""
    if not call.args:
        return []
    function, *rest = updated.args
    arguments = [draft.context_of(call), *(code(each.with_changes(comma=cst.MaybeSentinel.DEFAULT)) for each in rest)]
    return [f"{code(function.value)}({', '.join(arguments)})"]


def _start_trackers(draft: ScriptDraft, call: cst.Call, updated: cst.Call) -> list[str]:
    """`init_trackers(name, config=)` becomes a list of trackers."""
    args, keywords, _ = given(updated)
    found = dict(zip(("project_name", "config", "init_kwargs"), args, strict=False)) | keywords
    name, config, more = (found.get(each) for each in ("project_name", "config", "init_kwargs"))
    log_with = draft.setting("log_with")
    kinds = elements(log_with)
    kind = literal(kinds[0]) if len(kinds) == 1 and isinstance(kinds[0], cst.SimpleString) else None
    passed = _options_of(more, kind)
    if name is None:
        raise Left
    run, folder, ctx = code(name), draft.setting("logging_dir") or draft.setting("project_dir"), draft.context_of(call)
    draft.make(draft.trackers, call)
    if kind == "wandb":
        configs = "" if config is None else f"config={code(config)}"
        made = f"wandb.init({', '.join(each for each in (f'project={run}', configs, passed) if each)})"
        return [f"{draft.trackers} = [weft.monitoring.trackers.libraries.wandb({made})] if {ctx}.is_main else []"]
    place = f"os.path.join({draft.text(folder)}, {run})" if folder is not None else run
    lines = [f"{draft.trackers} = [weft.monitoring.tensorboard({place})]"]
    if config is not None:
        hparams = f"weft.monitoring.HParams({code(config)})"
        lines.append(f'weft.log({{"config": {hparams}}}, 0, {ctx}, {draft.trackers})')
    if kind != "tensorboard":
        draft.check(call, "TensorBoard; others: weft.monitoring.trackers.libraries")
    return lines


def _options_of(more: cst.BaseExpression | None, kind: object) -> str:
    """`init_kwargs={"wandb": {...}}` as arguments of `wandb.init`."""
    if more is None:
        return ""
    [element] = more.elements if isinstance(more, cst.Dict) and len(more.elements) == 1 else [None]
    if kind != "wandb" or not isinstance(element, cst.DictElement) or literal(element.key) != "wandb":
        raise Left
    return f"**{code(element.value)}"


def _step_scheduler(draft: ScriptDraft, call: cst.Call, updated: cst.Call) -> list[str] | None:
    """A prepared scheduler of Accelerate takes as many steps at once as there are ranks."""
    once = draft.is_set("split_batches") or draft.setting("step_scheduler_with_optimizer") is not None
    once |= draft.script.is_fabric
    if cst.ensure_type(call.func, cst.Attribute).attr.value != "step" or once:
        return None
    draft.check(call, "as many steps as ranks, as Accelerate does; one is enough if the schedule counts global steps")
    return [f"for _ in range({draft.ctx}.world_size):", f"    {code(updated)}"]


STATEMENTS: Mapping[str, Callable[[ScriptDraft, cst.Call, cst.Call], list[str]]] = MappingProxyType(
    {
        "register_for_checkpointing": register,
        "init_trackers": _start_trackers,
        "log": _log,
        "log_dict": _log,
        "save": _save,
        "save_model": _save_model,
        "unscale_gradients": _unscale,
        "launch": _launch,
    }
)
