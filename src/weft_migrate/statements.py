"""Calls that take a statement: preparation, trackers, files, steps of schedulers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import libcst as cst

from weft_migrate.calls import from_template
from weft_migrate.checkpoints import lines_for_state, register
from weft_migrate.draft import Left, ScriptDraft, literal
from weft_migrate.prepare import prepare, setting_lines
from weft_migrate.script import code, dotted, elements, given, joined


def statement(draft: ScriptDraft, node: cst.Expr | cst.Assign, updated: cst.Expr | cst.Assign) -> list[str] | None:
    """The new lines for a statement on a line of its own; None if it stays as its expressions are translated."""
    call, script, library = node.value, draft.script, draft.script.library
    if not isinstance(call, cst.Call):
        if isinstance(node, cst.Assign) and dotted(call) in script.imported:
            draft.check(node, f"{script.imported[dotted(call)]}: not taken over, weft has no function of this name")
            return []
        return [] if node in script.late else None
    name, now = script.method(call.func) or "", updated.value if isinstance(updated.value, cst.Call) else call
    if isinstance(node, cst.Assign):
        if name in library.prepares:
            return prepare(draft, node, call)
        if script.is_fabric and script.original(call.func) in library.classes:
            return [code(updated), *setting_lines(draft, call)]
        if name in ("free_memory", "clear") and len(node.targets) == 1:
            return [f"{' = '.join(map(code, elements(node.targets[0].target)))} = None", "gc.collect()"]
        return [] if call in script.taken else None
    gone, owner, attribute = script.of_wrapped(call.func), *dotted(call.func).rpartition(".")[::2]
    if gone and not gone[1]:
        if attribute in library.remarks:
            draft.check(call, library.remarks[attribute])
        return []
    if name in library.statements:
        return from_template(draft, library.statements[name], call, now).splitlines()
    if name in STATEMENTS:
        return STATEMENTS[name](draft, call, now)
    if attribute == "step" and draft.prepared.get(owner) == "scheduler" and not _steps_once(draft):
        draft.check(
            call, "as many steps as ranks, as Accelerate does; one is enough if the schedule counts global steps"
        )
        return [f"for _ in range({draft.ctx}.world_size):", f"    {code(updated)}"]
    return None


def _steps_once(draft: ScriptDraft) -> bool:
    """Whether a scheduler takes one step at a time; a prepared one of Accelerate takes as many as there are ranks."""
    chosen = draft.is_set("split_batches") or draft.setting("step_scheduler_with_optimizer") is not None
    return chosen or draft.script.is_fabric


def is_whole(draft: ScriptDraft, node: cst.CSTNode, name: str) -> bool:
    """Whether a method is translated, or left, with the statement around its call."""
    whole = draft.script.parents[node]
    line = draft.script.parents[whole]
    known = isinstance(whole, cst.Assign if name in draft.script.library.prepares else cst.Expr)
    return known and isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1


def _log(draft: ScriptDraft, call: cst.Call, updated: cst.Call) -> list[str]:
    """Values and a step; `log` of Fabric has one name and one value."""
    is_single = draft.script.is_fabric and draft.script.method(call.func) == "log"
    names = ("name", "value", "step") if is_single else ("values", "step")
    arguments = given(updated)
    found = {name: code(value) for name, value in arguments.named(*names).items()}
    if set(found) != set(names) or arguments.spread or not draft.reaches(draft.trackers, call):
        raise Left
    values, step = f"{{{found['name']}: {found['value']}}}" if is_single else found["values"], found["step"]
    if draft.guarded(call):
        return [f"for tracker in {draft.trackers}:", f"    tracker({values}, step={step})"]
    draft.check(call, "numbers are means over the ranks, no longer those of the main rank")
    return [f"weft.log({values}, {step}, {draft.context_of(call)}, {draft.trackers})"]


def _save(draft: ScriptDraft, call: cst.Call, updated: cst.Call) -> list[str]:
    """`fabric.save` of one `state_dict()`; a dict of objects is one state."""
    found = given(updated).named("path", "state")
    state = found.get("state")
    if len(found) != 2 or not (isinstance(state, cst.Call) and code(state.func).endswith(".state_dict")):
        raise Left(otherwise=lines_for_state(draft, call))
    return [f"if {draft.context_of(call)}.is_main:", f"    torch.save({code(state)}, {code(found['path'])})"]


def _launch(draft: ScriptDraft, call: cst.Call, updated: cst.Call) -> list[str]:
    """`fabric.launch()` is the work of `weft launch`; `fabric.launch(main, 1)` also calls `main(fabric, 1)`."""
    if not call.args:
        return []
    function, *rest = updated.args
    arguments = [draft.context_of(call), *(code(each.with_changes(comma=cst.MaybeSentinel.DEFAULT)) for each in rest)]
    return [f"{code(function.value)}({', '.join(arguments)})"]


def _start_trackers(draft: ScriptDraft, call: cst.Call, updated: cst.Call) -> list[str]:
    """`init_trackers(name, config=)` becomes a list of trackers."""
    found = given(updated).named("project_name", "config", "init_kwargs")
    name, config, more = (found.get(each) for each in ("project_name", "config", "init_kwargs"))
    log_with = draft.setting("log_with")
    kinds = elements(log_with)
    kind = literal(kinds[0]) if len(kinds) == 1 and isinstance(kinds[0], cst.SimpleString) else None
    passed = ""
    match more, kind:
        case cst.Dict([cst.DictElement(cst.SimpleString() as key, options)]), "wandb" if literal(key) == "wandb":
            passed = f"**{code(options)}"
        case cst.CSTNode(), _:
            raise Left
    if name is None:
        raise Left
    run, folder, ctx = code(name), draft.setting("logging_dir") or draft.setting("project_dir"), draft.context_of(call)
    draft.make(draft.trackers, call)
    if kind == "wandb":
        configs = "" if config is None else f"config={code(config)}"
        made = f"wandb.init({joined(f'project={run}', configs, passed)})"
        return [f"{draft.trackers} = [weft.monitoring.trackers.libraries.wandb({made})] if {ctx}.is_main else []"]
    if folder is not None and not draft.script.sees(folder, call):
        raise Left(otherwise=f"trackers = [weft.monitoring.tensorboard(folder)]: {code(folder)} is not known here")
    place = f"os.path.join({draft.text(folder)}, {run})" if folder is not None else run
    lines = [f"{draft.trackers} = [weft.monitoring.tensorboard({place})]"]
    if config is not None:
        hparams = f"weft.monitoring.HParams({code(config)})"
        lines.append(f'weft.log({{"config": {hparams}}}, 0, {ctx}, {draft.trackers})')
    if kind != "tensorboard":
        draft.check(call, "TensorBoard; others: weft.monitoring.trackers.libraries")
    return lines


STATEMENTS: Mapping[str, Callable[[ScriptDraft, cst.Call, cst.Call], list[str]]] = MappingProxyType(
    {
        "register_for_checkpointing": register,
        "init_trackers": _start_trackers,
        "log": _log,
        "log_dict": _log,
        "launch": _launch,
        "save": _save,
    }
)
