"""`Accelerator(...)` and `prepare`: the context, a line per transform, windows, and the state."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import libcst as cst

from weft_migrate.checkpoints import is_place_of_state, state_line
from weft_migrate.draft import Left, ScriptDraft, literal
from weft_migrate.script import Expression, code, dotted, elements, given, inside, named
from weft_migrate.strategies import MODEL_MAKERS, always, lost, model_lines


def construct(draft: ScriptDraft, call: cst.Call) -> str:
    """`Accelerator(...)` becomes `weft.start(...)`; its other settings are arguments of transforms."""
    if isinstance(draft.script.parents[call], cst.Attribute):
        raise Left(otherwise="ctx = weft.start(), once; then ctx.rank, ctx.is_main, ctx.is_last, ctx.device")
    arguments = given(call)
    options = [each for name, value in arguments.keywords.items() if (each := _option(draft, call, name, value))]
    if arguments.spread:
        draft.check(call, "these arguments: not taken over")
    for name in ("split_batches", "dispatch_batches"):
        setting = draft.setting(name)
        if setting is not None and literal(setting) not in (True, False, None):
            mode = name.partition("_")[0]
            draft.check(call, f'{name}: not a literal, so not taken over; weft.shard_data(loader, ctx, mode="{mode}")')
    limits = draft.handler("InitProcessGroupKwargs")
    options += [f"timeout_s=({code(limits['timeout'])}).total_seconds()"] if set(limits) == {"timeout"} else []
    options += [each.options for each in always(draft) if each.name == "start"]
    return f"weft.start({', '.join(options)})"


def _option(draft: ScriptDraft, call: cst.Call, name: str, value: Expression) -> str:
    """The argument of `weft.start` for a setting; a remark about those that mean something else."""
    script = draft.script
    hint = script.library.settings.get(name, "not taken over")
    if name == "cpu" and code(value) != "False":
        return 'device="cpu"' + (f" if {code(value)} else None" if code(value) != "True" else "")
    if name == "accelerator":
        text = code(value)
        known = isinstance(value, cst.SimpleString)
        return (
            ('device="cpu"' if literal(value) == "cpu" else "")
            if known
            else f'device="cpu" if {text} == "cpu" else None'
        )
    parts = list(map(script.value, elements(script.value(value))))
    makers = [each for each in script.choices(value) if script.made(each)[0] in script.library.makers]
    for kind, made in map(script.made, parts):
        if kind not in MODEL_MAKERS:
            lost(draft, call, kind, made)
    if name in script.uncertain and name not in _OF_MODELS | {"log_with", "project_dir", "cpu"}:
        draft.check(call, f"{name}: not the same in every {script.library.classes[0]}(...); the last one was taken")
    elif (makers and not script.taken.intersection(makers) and name not in _OF_MODELS) or dotted(
        value
    ) in script.changed:
        draft.check(call, f"{name}: {code(value)} is made under a condition, or changed later, so not taken over")
    elif hint and dotted(value) != "None" and not any(each in script.taken for each in parts) and not makers:
        draft.check(call, f"{name}: {hint}")
    return ""


def tracker_lines(draft: ScriptDraft, call: cst.Call) -> list[str]:
    """The loggers of Fabric as a list of trackers; none if one of them is of another kind."""
    script, texts = draft.script, list[str]()
    given_value = script.settings.get("loggers")
    for each in elements(given_value and script.value(given_value)):
        kind, arguments = script.made(each)
        found = dict(zip(("root_dir", "name"), arguments.args, strict=False)) | arguments.keywords
        if kind not in _TRACKERS or "root_dir" not in found:
            return []
        place = ", ".join([code(found["root_dir"]), *([code(found["name"])] if "name" in found else [])])
        file = f", {_TRACKERS[kind][1]}" if _TRACKERS[kind][1] else ""
        joined = f"os.path.join({place}{file})" if "name" in found or file else place
        texts.append(f"weft.monitoring.{_TRACKERS[kind][0]}({joined})")
        draft.check(call, f"{kind}: no folders version_0, version_1, ...; in one that is used, rows are added")
    return [f"{draft.trackers} = [{', '.join(texts)}]"] if texts else []


def policy_line(draft: ScriptDraft) -> str:
    """A precision of Fabric that is known when the program runs, as a policy; empty if it is a literal."""
    value = draft.script.settings.get("precision")
    if not draft.script.is_fabric or value is None or isinstance(value, _LITERAL) or dotted(value) == "None":
        return ""
    names = [f'"{name}": "{policy}"' for name, policy in draft.script.library.precisions.items() if "-" in name]
    return f"{{{', '.join(names)}}}[{code(value)}]"


_LITERAL = (cst.SimpleString, cst.Integer)
_OF_MODELS = frozenset({"strategy", "fsdp_plugin", "deepspeed_plugin"})
_TRACKERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"TensorBoardLogger": ("tensorboard", ""), "CSVLogger": ("csv", '"metrics.csv"')}
)


def prepare(draft: ScriptDraft, node: cst.Assign, call: cst.Call) -> list[str]:
    """Precision and strategy of models, the parts of loaders, then windows and the state."""
    script = draft.script
    [target] = node.targets if len(node.targets) == 1 else [node.targets[-1]]
    names, (args, keywords, spread) = elements(target.target), given(call)
    roles = script.roles(call)
    is_plain = len(names) == len(roles) and not keywords and not spread and all(map(named, names))
    unknown = [code(each) for each, role in zip(args, roles, strict=True) if role is None]
    holder = call.func.value if isinstance(call.func, cst.Attribute) else call.func
    if unknown or not is_plain or not _has_context(draft, node, holder):
        what = f"what is {', '.join(unknown)}: model, optimizer, loader or scheduler? " if unknown else ""
        raise Left(what, draft.hint("prepare"))
    ctx = draft.context(holder)
    found = {named(name): role or "" for name, role in zip(names, roles, strict=True)}
    texts = {named(name): draft.text(each) for name, each in zip(names, args, strict=True)}
    of = {kind: {name: texts[name] for name in texts if found[name] == kind} for kind in set(found.values())}
    lines = model_lines(draft, call, of.get("model", {}), of.get("optimizer", {}), ctx)
    lines += [_loader(draft, name, value, ctx) for name, value in of.get("loader", {}).items()]
    lines += [f"{name} = {value}" for name, value in of.get("scheduler", {}).items() if name != value]
    draft.prepared |= found
    lines += _lengths(draft, node, list(of.get("loader", {})))
    lines += _windows(draft, node, set(found), ctx)
    if is_place_of_state(draft, node):
        lines.append(state_line(draft, node, ctx))
    return lines


def _has_context(draft: ScriptDraft, node: cst.CSTNode, holder: Expression) -> bool:
    """Whether the context may be assigned where a statement stands."""
    script, owner = draft.script, draft.script.scope(node)
    names = {each.name.value for each in inside(owner.params) if isinstance(each, cst.Param)} if owner else set()
    for each in script.parents:
        if isinstance(each, (cst.Global, cst.Nonlocal)) and script.scope(each) is owner:
            names |= {item.name.value for item in each.names}
    made_here = any(script.scope(each) is owner for each in script.constructors)
    return made_here or "." in dotted(holder) or dotted(holder) in names


def _loader(draft: ScriptDraft, name: str, text: str, ctx: str) -> str:
    options = ', mode="dispatch"' if draft.is_set("dispatch_batches") else ""
    options = ', mode="split"' if draft.is_set("split_batches") else options
    if name in draft.script.evaluated:
        options += ', uneven="empty"'
    return f"{name}, {ctx} = weft.shard_data({text}, {ctx}{options})"


def _lengths(draft: ScriptDraft, node: cst.CSTNode, loaders: list[str]) -> list[str]:
    """Lengths that are asked for after `load_state`: a restored loader has those of the rest of its epoch."""
    script, here = draft.script, draft.script.scope(node)
    restores = [n for n in script.calls("load_state") if script.scope(n) is here]
    calls = [n for n in script.parents if isinstance(n, cst.Call) and script.scope(n) is here and n.args]
    later = {dotted(n.args[0].value) for n in calls if dotted(n.func) == "len" and script.line(n) > script.line(node)}
    asked = [name for name in loaders if restores and name in later]
    for name in asked:
        draft.lengths[name] = script.fresh(f"len_{name.rpartition('.')[2]}")
    return [f"{draft.lengths[name]} = len({name})" for name in asked]


def _windows(draft: ScriptDraft, node: cst.CSTNode, found: set[str], ctx: str) -> list[str]:
    """The lines for the loops over what was prepared last."""
    lines: list[str] = []
    script = draft.script
    for loop in script.loops:
        needs = {loop.loader, *loop.models}
        if script.scope(loop.loop) is not script.scope(node) or not needs <= set(draft.prepared) or not needs & found:
            continue
        if loop.loader not in draft.windows:
            windows = script.fresh(f"{loop.loader}_windows" if draft.windows else "windows")
            draft.windows[loop.loader] = windows
            script.used.add(windows)
        draft.looped += [loop] if loop not in draft.looped else []
        models, steps = ", ".join(loop.models), draft.setting("gradient_accumulation_steps")
        models = f"({models})" if "," in models else models
        call = f"weft.accumulate_grads({models}, {loop.loader}, {ctx}, steps={'1' if steps is None else code(steps)})"
        line = f"{models}, {draft.windows[loop.loader]}, {ctx} = {call}"
        lines += [line] if line not in lines else []
        item = loop.block.items[0].item
        draft.check(item, "weights the micro-batches of a shorter window exactly, not by 1 / steps")
    return lines
