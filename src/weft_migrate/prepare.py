"""`Accelerator(...)` and `prepare`: the context, a line per transform, windows, and the state."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import libcst as cst

from weft_migrate.checkpoints import is_place_of_state, state_line
from weft_migrate.draft import Left, ScriptDraft, literal
from weft_migrate.script import Expression, Script, code, dotted, elements, given, joined, named, operand, parameters
from weft_migrate.strategies import MODEL_MAKERS, SETTINGS, Prepared, always, lost, model_lines


def construct(draft: ScriptDraft, call: cst.Call) -> str:
    """`Accelerator(...)` becomes `weft.start(...)`; its other settings are arguments of transforms."""
    if isinstance(draft.script.parents[call], cst.Attribute):
        raise Left(otherwise="ctx = weft.start(), once; then ctx.rank, ctx.is_main, ctx.is_last, ctx.device")
    arguments = given(call)
    options = [_option(draft, call, name, value) for name, value in arguments.keywords.items()]
    if arguments.spread:
        draft.check(call, "these arguments: not taken over")
    for mode in ("split", "dispatch"):
        setting = draft.setting(f"{mode}_batches")
        if setting is not None and literal(setting) not in (True, False, None):
            hint = f'not a literal, so not taken over; weft.shard_data(loader, ctx, mode="{mode}")'
            draft.check(call, f"{mode}_batches: {hint}")
    limits = draft.handler("InitProcessGroupKwargs", call)
    options += [f"timeout_s={operand(limits['timeout'])}.total_seconds()"] if set(limits) == {"timeout"} else []
    options += [each.options for each in always(draft) if each.name == "start"]
    return f"weft.start({joined(*options)})"


def _option(draft: ScriptDraft, call: cst.Call, name: str, value: Expression) -> str:
    """The argument of `weft.start` for a setting; a remark about those that mean something else."""
    script, text = draft.script, code(value)
    if name == "cpu" and text != "False":
        return 'device="cpu"' + (f" if {operand(value)} else None" if text != "True" else "")
    if name == "accelerator" and isinstance(value, cst.SimpleString):
        return 'device="cpu"' if literal(value) == "cpu" else ""
    if name == "accelerator":
        return f'device="cpu" if {operand(value)} == "cpu" else None'
    for kind, made in map(script.made, elements(script.value(value))):
        if kind not in MODEL_MAKERS:
            lost(draft, call, kind, made)
    parts = list(map(script.value, elements(script.value(value))))
    makers = {each for each in script.choices(value) if script.made(each)[0] in script.library.makers}
    hint = script.library.settings.get(name, "not taken over")
    if name in script.uncertain and name not in {*SETTINGS, "log_with", "project_dir", "cpu"}:
        hint = f"not the same in every {script.library.classes[0]}(...); the last one was taken"
    elif (makers and not script.taken & makers and name not in SETTINGS) or dotted(value) in script.changed:
        hint = f"{text} is made under a condition, or changed later, so not taken over"
    elif dotted(value) == "None" or script.taken.intersection(parts) or makers:
        hint = ""
    if hint:
        draft.check(call, f"{name}: {hint}")
    return ""


def setting_lines(draft: ScriptDraft, call: cst.Call) -> list[str]:
    """The policy and the trackers that are made with the context, for the settings of Fabric."""
    lines: list[str] = []
    if policy := _policy(draft):
        draft.policy = draft.script.fresh("policy")
        draft.make(draft.policy, call)
        lines.append(f"{draft.policy} = {policy}")
    if trackers := _trackers(draft, call):
        draft.make(draft.trackers, call)
        lines.append(f"{draft.trackers} = [{', '.join(trackers)}]")
    return lines


def _trackers(draft: ScriptDraft, call: cst.Call) -> list[str]:
    """The loggers of Fabric as trackers; none if one of them is of another kind."""
    script, texts = draft.script, list[str]()
    loggers = script.settings.get("loggers")
    for kind, arguments in map(script.made, elements(loggers and script.value(loggers))):
        found = arguments.named("root_dir", "name")
        if kind not in _TRACKERS or "root_dir" not in found:
            return []
        function, file = _TRACKERS[kind]
        places = [*(code(found[each]) for each in ("root_dir", "name") if each in found), *file]
        place = f"os.path.join({', '.join(places)})" if len(places) > 1 else places[0]
        texts.append(f"weft.monitoring.{function}({place})")
        draft.check(call, f"{kind}: no folders version_0, version_1, ...; in one that is used, rows are added")
    return texts


def _policy(draft: ScriptDraft) -> str:
    """A precision of Fabric that is known when the program runs, as a policy; empty if it is a literal."""
    value = draft.script.settings.get("precision")
    if value is None or isinstance(value, _LITERAL) or dotted(value) == "None":
        return ""
    names = [f'"{name}": "{policy}"' for name, policy in draft.script.library.precisions.items() if "-" in name]
    return f"{{{', '.join(names)}}}[{code(value)}]"


_LITERAL = (cst.SimpleString, cst.Integer)
_TRACKERS: Mapping[str, tuple[str, list[str]]] = MappingProxyType(
    {"TensorBoardLogger": ("tensorboard", []), "CSVLogger": ("csv", ['"metrics.csv"'])}
)


def prepare(draft: ScriptDraft, node: cst.Assign, call: cst.Call) -> list[str]:
    """Precision and strategy of models, the parts of loaders, then windows and the state."""
    script = draft.script
    names, (args, keywords, spread) = elements(node.targets[-1].target), given(call)
    roles = script.roles(call)
    is_plain = len(names) == len(roles) and not keywords and not spread and all(map(named, names))
    unknown = [code(each) for each, role in zip(args, roles, strict=True) if role is None]
    holder = cst.ensure_type(call.func, cst.Attribute).value
    if unknown or not is_plain or not _has_context(draft, node, holder):
        what = f"what is {', '.join(unknown)}: model, optimizer, loader or scheduler? " if unknown else ""
        raise Left(what, draft.hint("prepare"))
    ctx = draft.context(holder)
    found = {named(name): role or "" for name, role in zip(names, roles, strict=True)}
    texts = {named(name): draft.text(each) for name, each in zip(names, args, strict=True)}
    models, optimizers, loaders, schedulers = (
        {name: texts[name] for name, role in found.items() if role == kind}
        for kind in ("model", "optimizer", "loader", "scheduler")
    )
    lines = model_lines(draft, Prepared(call, models, optimizers, ctx))
    nodes = dict(zip(map(named, names), args, strict=True))
    evaluated = {named(name) for name in names if script.place(name) in script.evaluated}
    mode = next((each for each in ("split", "dispatch") if draft.is_set(f"{each}_batches")), "")
    for name, value in loaders.items():
        uneven = "empty" if name in evaluated else "balance" if _is_stream(script, nodes[name]) else ""
        options = joined(mode and f'mode="{mode}"', uneven and f'uneven="{uneven}"')
        lines.append(f"{name}, {ctx} = weft.shard_data({joined(value, ctx, options)})")
    lines += [f"{name} = {value}" for name, value in schedulers.items() if name != value]
    draft.prepared |= found
    lines += _lengths(draft, node, list(loaders))
    lines += _windows(draft, node, set(found), ctx)
    if is_place_of_state(draft, node):
        lines.append(state_line(draft, node, ctx))
    return lines


def _has_context(draft: ScriptDraft, node: cst.CSTNode, holder: Expression) -> bool:
    """Whether the context may be assigned where a statement stands."""
    script, owner = draft.script, draft.script.scope(node)
    names = parameters(owner) if owner else set[str]()
    for each in script.every(cst.Global, cst.Nonlocal):
        names |= {item.name.value for item in each.names if script.scope(each) is owner}
    made_here = any(script.scope(each) is owner for each in script.constructors)
    return made_here or "." in dotted(holder) or dotted(holder) in names


def _is_stream(script: Script, node: cst.CSTNode) -> bool:
    """Whether something is, or may be, an `IterableDataset` of a class of the script, or a loader of one."""
    classes = {each.name.value: each.bases for each in script.every(cst.ClassDef)}
    for made in script.choices(node):
        name = dotted(made.func if isinstance(made, cst.Call) else made).rpartition(".")[2]
        parts = [each.value for each in classes.get(name, ())]
        parts += [each for each in (given(made).named("dataset").get("dataset"),) if each and name == "DataLoader"]
        if name == "IterableDataset" or any(_is_stream(script, each) for each in parts):
            return True
    return False


def _lengths(draft: ScriptDraft, node: cst.CSTNode, loaders: list[str]) -> list[str]:
    """Lengths that are asked for after `load_state`: a restored loader has those of the rest of its epoch."""
    script, here = draft.script, draft.script.scope(node)
    restores = any(script.scope(n) is here for n in script.calls("load_state"))
    calls = [n for n in script.every(cst.Call) if script.scope(n) is here and n.args]
    later = {dotted(n.args[0].value) for n in calls if dotted(n.func) == "len" and script.line(n) > script.line(node)}
    asked = [name for name in loaders if restores and name in later]
    for name in asked:
        draft.lengths[name] = script.fresh(f"len_{name.rpartition('.')[2]}")
    return [f"{draft.lengths[name]} = len({name})" for name in asked]


def _windows(draft: ScriptDraft, node: cst.CSTNode, found: set[str], ctx: str) -> list[str]:
    """The lines for the loops over what was prepared last."""
    lines: list[str] = []
    script, steps = draft.script, draft.seen("gradient_accumulation_steps", node)
    for loop in script.loops:
        needs = {loop.loader, *loop.models}
        if script.scope(loop.loop) is not script.scope(node) or not needs <= set(draft.prepared) or not needs & found:
            continue
        if loop.loader not in draft.windows:
            windows = script.fresh(f"{loop.loader}_windows" if draft.windows else "windows")
            draft.windows[loop.loader] = windows
            script.used.add(windows)
        draft.looped += [loop] if loop not in draft.looped else []
        draft.labels[loop.source] = draft.windows[loop.loader]
        models = joined(*loop.models)
        models = f"({models})" if len(loop.models) > 1 else models
        call = f"weft.accumulate_grads({models}, {loop.loader}, {ctx}, steps={code(steps) if steps else '1'})"
        line = f"{models}, {draft.windows[loop.loader]}, {ctx} = {call}"
        lines += [line] if line not in lines else []
        item = loop.block.items[0].item
        draft.check(item, "weights the micro-batches of a shorter window exactly, not by 1 / steps")
    return lines
