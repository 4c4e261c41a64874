"""What comes before the loop: `Accelerator(...)`, `prepare`, checkpoints, trackers."""

from __future__ import annotations

import ast
from types import MappingProxyType

from weft.interop.accelerate_script.calls import HINTS, KEYWORDS
from weft.interop.accelerate_script.names import dotted
from weft.interop.accelerate_script.translation import Draft

__all__ = ["PREPARE", "SETTINGS", "alone", "construct", "load_state", "own_lines", "prepare", "register", "save_state"]

SETTINGS = frozenset(
    {
        *("ProjectConfiguration", "DataLoaderConfiguration", "GradientAccumulationPlugin"),
        *("DistributedDataParallelKwargs", "InitProcessGroupKwargs", "DDPCommunicationHookType"),
    }
)
PREPARE = ("prepare", "prepare_model", "prepare_optimizer", "prepare_data_loader", "prepare_scheduler")
_COMPRESSED = MappingProxyType({"FP16": "torch.float16", "BF16": "torch.bfloat16"})


def construct(draft: Draft, call: ast.Call) -> None:
    """`Accelerator(...)` becomes `weft.start(...)`; its other settings are arguments of transforms."""
    options = []
    for each in call.keywords:
        if each.arg is None or each.arg not in KEYWORDS or KEYWORDS[each.arg]:
            draft.check(call, f"{each.arg or 'these arguments'}: {KEYWORDS.get(each.arg or '', 'not taken over')}")
        elif each.arg == "cpu":
            wish = draft.edits.text(each.value)
            options.append('device="cpu"' if wish == "True" else f'device="cpu" if {wish} else None')
            if wish == "False":
                options.pop()
    for name in ("split_batches", "dispatch_batches"):
        value = draft.setting(name)
        if value is not None and not isinstance(value, ast.Constant):
            mode = name.partition("_")[0]
            draft.check(call, f'{name}: not a literal, so not taken over; weft.shard_data(loader, ctx, mode="{mode}")')
    for handler in draft.handlers():
        kind = draft.names.original(handler.func)
        limit = draft.keyword(handler, "timeout")
        if kind == "InitProcessGroupKwargs" and limit is not None and len(handler.keywords) == 1:
            options.append(f"timeout_s=({draft.edits.text(limit)}).total_seconds()")
    draft.edits.replace(call, f"weft.start({', '.join(options)})")


def _reduce(draft: Draft) -> str | None:
    """In which dtype the hook of DDP sends gradients, as text; a hook that is chosen at run time has its value."""
    hook = next((found for each in draft.handlers() if (found := draft.keyword(each, "comm_hook"))), None)
    made = draft.names.values.get(dotted(hook), hook)
    if isinstance(made, ast.Call) and draft.names.original(made.func) == "DDPCommunicationHookType" and made.args:
        return f'{{"fp16": torch.float16, "bf16": torch.bfloat16}}.get({draft.edits.text(made.args[0])})'
    return _COMPRESSED.get(dotted(hook).rpartition(".")[2])


def _precision(draft: Draft) -> tuple[str | None, bool]:
    """The policy as text, if there is one, and whether it may be fp16."""
    value, reduce = draft.setting("mixed_precision"), _reduce(draft)
    if value is None or (isinstance(value, ast.Constant) and value.value in (None, "no")):
        return (f"weft.Precision(reduce={reduce})" if reduce else None), False
    text = draft.edits.text(value)
    if not isinstance(value, ast.Constant):
        text = f'"fp32" if {text} in (None, "no") else {text}'
    may_scale = getattr(value, "value", "fp16") == "fp16"
    if not reduce:
        return text, may_scale
    draft.imports.add("dataclasses")
    return f"dataclasses.replace(weft.precision.named_policy({text}), reduce={reduce})", may_scale


def prepare(draft: Draft, node: ast.Assign, call: ast.Call) -> None:
    """One line per transform: precision and strategy of models, the parts of loaders, then windows and the state."""
    [target] = node.targets
    targets = list(target.elts) if isinstance(target, (ast.Tuple, ast.List)) else [target]
    method = draft.names.method(call.func)
    fixed = {"prepare_model": "model", "prepare_optimizer": "optimizer", "prepare_data_loader": "loader"}
    fixed["prepare_scheduler"] = "scheduler"
    roles = [fixed.get(method or "") or draft.names.role(each) for each in call.args]
    is_plain = len(targets) == len(roles) and not call.keywords and all(map(dotted, targets))
    unknown = [draft.edits.text(a) for a, role in zip(call.args, roles, strict=True) if role is None]
    owner = draft.names.scope(node)
    parameters = {each.arg for each in ast.walk(owner.args) if isinstance(each, ast.arg)} if owner else set()  # type: ignore[attr-defined]
    accelerator = call.func.value  # type: ignore[attr-defined]
    declared = (n for n in draft.names.parents if isinstance(n, (ast.Global, ast.Nonlocal)))
    parameters |= {name for each in declared if draft.names.scope(each) is owner for name in each.names}
    made_here = any(draft.names.scope(each) is owner for each in draft.names.constructors)
    if unknown or not is_plain or not (made_here or "." in dotted(accelerator) or dotted(accelerator) in parameters):
        what = f"what is {', '.join(unknown)}: model, optimizer, loader or scheduler? " if unknown else ""
        draft.left(node, what + HINTS["prepare"])
        return
    ctx = draft.context(accelerator)
    named = {dotted(target): draft.edits.text(each) for target, each in zip(targets, call.args, strict=True)}
    found = dict(zip(named, [role or "" for role in roles], strict=True))
    lines = []
    for role, lines_of in (("model", _model), ("optimizer", _optimizer), ("loader", _loader), ("scheduler", _as_is)):
        for name in [name for name in named if found[name] == role]:
            lines += lines_of(draft, name, named[name], ctx)
    draft.prepared |= found
    lines += _lengths(draft, node, [name for name in named if found[name] == "loader"])
    for loop in draft.names.loops:
        needs = {loop.loader, *loop.models}
        if draft.names.scope(loop.loop) is owner and needs <= set(draft.prepared) and needs & set(found):
            if loop.loader not in draft.windows:
                draft.windows[loop.loader] = draft.names.fresh(
                    "windows" if not draft.windows else f"{loop.loader}_windows"
                )
                draft.names.used.add(draft.windows[loop.loader])
            draft.looped += [loop] if loop not in draft.looped else []
            models = ", ".join(loop.models)
            models = f"({models})" if "," in models else models
            steps = draft.setting("gradient_accumulation_steps")
            options = f"steps={'1' if steps is None else draft.edits.text(steps)}"
            windows = f"{models}, {draft.windows[loop.loader]}, {ctx}"
            line = f"{windows} = weft.accumulate_grads({models}, {loop.loader}, {ctx}, {options})"
            lines += [line] if line not in lines else []
            draft.check(loop.block.items[0], "weights the micro-batches of a shorter window exactly, not by 1 / steps")
    if _is_place_of_state(draft, node):
        lines.append(_state(draft, node, ctx))
    draft.edits.statement(node, lines, alone=alone(draft, node))


def _model(draft: Draft, name: str, given: str, ctx: str) -> list[str]:
    policy, _ = _precision(draft)
    lines = []
    if policy:
        if "torch." in policy:
            draft.imports.add("torch")
        lines.append(f"{name}, {ctx} = weft.with_precision({given}, {ctx}, {policy})")
        given = name
    options = ""
    for handler in draft.handlers():
        if draft.names.original(handler.func) == "DistributedDataParallelKwargs":
            options = _replicate_options(draft, handler)
    return [*lines, f"{name}, {ctx} = weft.replicate({given}, {ctx}{options})"]


def _replicate_options(draft: Draft, handler: ast.Call) -> str:
    options = ""
    for each in handler.keywords:
        value = draft.edits.text(each.value)
        last = value.rpartition(".")[2]
        if each.arg == "find_unused_parameters" and value == "True":
            options += ', unused="zero"'
        elif each.arg == "broadcast_buffers" and value == "False":
            options += ', buffers="local"'
        elif each.arg == "bucket_cap_mb":
            options += f", bucket_bytes={value} * 2**20"
        elif each.arg == "comm_hook" and last in ("POWER_SGD", "BATCHED_POWER_SGD"):
            options += ", compress=weft.precision.PowerSGD()"
        elif each.arg == "comm_hook" and last not in {*_COMPRESSED, "NO"}:
            draft.check(each.value, "for power_sgd: weft.replicate(model, ctx, compress=weft.precision.PowerSGD())")
        elif each.arg in ("comm_wrapper", "comm_state_option") and last not in ("NO", "{}"):
            draft.check(each.value, "not taken over")
    return options


def _optimizer(draft: Draft, name: str, given: str, ctx: str) -> list[str]:
    asked = any(draft.names.method(n) == "optimizer_step_was_skipped" for n in draft.names.parents)
    if _precision(draft)[1] or asked:
        return [f"{name}, {ctx} = weft.skip_nonfinite({given}, {ctx})"]
    return _as_is(draft, name, given, ctx)


def _loader(draft: Draft, name: str, given: str, ctx: str) -> list[str]:
    options = ', mode="dispatch"' if draft.is_set("dispatch_batches") else ""
    options = ', mode="split"' if draft.is_set("split_batches") else options
    return [f"{name}, {ctx} = weft.shard_data({given}, {ctx}{options})"]


def _lengths(draft: Draft, node: ast.stmt, loaders: list[str]) -> list[str]:
    """Lengths that are asked for after `load_state`: a restored loader has those of the rest of its epoch."""
    here = draft.names.scope(node)
    restores = [n for n in draft.names.calls("load_state") if draft.names.scope(n) is here]
    calls = [n for n in draft.names.parents if isinstance(n, ast.Call) and draft.names.scope(n) is here]
    later = [n for n in calls if dotted(n.func) == "len" and n.args and n.lineno > node.lineno]
    asked = [name for name in loaders if restores and name in {dotted(n.args[0]) for n in later}]
    for name in asked:
        draft.lengths[name] = draft.names.fresh(f"len_{name.rpartition('.')[2]}")
    return [f"{draft.lengths[name]} = len({name})" for name in asked]


def _as_is(_draft: Draft, name: str, given: str, _ctx: str) -> list[str]:
    return [] if name == given else [f"{name} = {given}"]


# -- checkpoints -------------------------------------------------------------------------------------


def _is_place_of_state(draft: Draft, node: ast.stmt) -> bool:
    names = draft.names
    if not [*names.calls("save_state"), *names.calls("load_state")]:
        return False
    others = [*names.calls("prepare"), *names.calls("register_for_checkpointing")]
    here = names.scope(node)
    lines = [each.lineno for each in others if names.scope(each) is here]
    branch = next((each for each in names.above(node) if isinstance(each, ast.If)), node)
    return branch.lineno <= max(lines, default=node.lineno) <= (branch.end_lineno or branch.lineno)


def _state(draft: Draft, node: ast.stmt, ctx: str) -> str:
    objects = {}
    for name, role in draft.prepared.items():
        if role != "loader" or not any(word in name for word in ("eval", "val", "test")):
            objects[name.rpartition(".")[2]] = draft.windows.get(name, name)
    for call in draft.names.calls("register_for_checkpointing"):
        objects |= {dotted(each).rpartition(".")[2]: dotted(each) for each in call.args if dotted(each)}
    pairs = [f'"{key}": {value}' for key, value in objects.items()]
    draft.has_state, draft.state_in = True, draft.names.scope(node)
    indent = draft.edits.indent(node)
    if len(pairs) > 2:
        inside = "".join(f"\n{indent}        {pair}," for pair in pairs)
        arguments = f"\n{indent}    {{{inside}\n{indent}    }},\n{indent}    {ctx},\n{indent}"
    else:
        arguments = f"{{{', '.join(pairs)}}}, {ctx}"
    return f"{draft.state}, {ctx} = weft.checkpointable({arguments})"


def register(draft: Draft, node: ast.stmt, call: ast.Call) -> None:
    """What is registered belongs to the state, which is made by the last of these statements."""
    if not all(map(dotted, call.args)) or call.keywords:
        draft.left(node, HINTS["save_state"])
        return
    ctx = draft.context(call.func.value)  # type: ignore[attr-defined]
    lines = [_state(draft, node, ctx)] if _is_place_of_state(draft, node) and draft.prepared else []
    draft.edits.statement(node, lines, alone=alone(draft, node))


def alone(draft: Draft, node: ast.stmt) -> bool:
    """Whether nothing else is in the block of a statement."""
    parent = draft.names.parents[node]
    blocks = [getattr(parent, name, None) for name in ("body", "orelse", "finalbody")]
    return any(isinstance(block, list) and block == [node] for block in blocks)


def save_state(draft: Draft, call: ast.Call) -> None:
    """`weft.save`: the step is that in the name of the folder, or that of the loop around."""
    if not _reaches_state(draft, call) or len(call.args) + len(call.keywords) != 1 or draft.guarded(call):
        where = "every rank has to call it, so move it out of the `if`; " if draft.guarded(call) else ""
        draft.left(call, where + HINTS["save_state"])
        return
    folder = call.args[0] if call.args else call.keywords[0].value
    values = [folder, *_assigned_before(draft, call, dotted(folder))]
    names = [[dotted(p.value) for p in ast.walk(v) if isinstance(p, ast.FormattedValue)] for v in values]
    loops = [each.target for each in draft.names.above(call) if isinstance(each, ast.For)]
    step = next((found[-1] for found in names if found), "")  # as in f"{folder}/step_{step}"
    step = step or next((dotted(target) for target in loops if dotted(target)), "") or "0"
    ctx = draft.context(call.func.value)  # type: ignore[attr-defined]
    draft.check(call, f"{step} is the number of the checkpoint: it has to grow from save to save; one folder per run")
    draft.edits.replace(call, f"weft.save({draft.state}, {draft.edits.text(folder)}, {step}, {ctx})")


def _assigned_before(draft: Draft, node: ast.expr, name: str) -> list[ast.expr]:
    """What a variable was assigned before a call, the last one first."""
    here = draft.names.scope(node)
    found = [n for n in draft.names.parents if isinstance(n, ast.Assign) and draft.names.scope(n) is here]
    found = [n for n in found if name and name in map(dotted, n.targets) and n.lineno < node.lineno]
    return [n.value for n in sorted(found, key=lambda n: -n.lineno)]


def load_state(draft: Draft, call: ast.Call) -> None:
    """`weft.restore`, which also puts the loaders back in the middle of an epoch."""
    if not _reaches_state(draft, call) or len(call.args) + len(call.keywords) != 1:
        draft.left(call, HINTS["load_state"])
        return
    folder = draft.edits.text(call.args[0] if call.args else call.keywords[0].value)
    ctx = draft.context(call.func.value)  # type: ignore[attr-defined]
    draft.edits.replace(call, f"weft.restore({draft.state}, {folder}, {ctx})")
    draft.check(call, "reads checkpoints of weft; loaders continue where they were, so skip nothing by hand")


def _reaches_state(draft: Draft, call: ast.AST) -> bool:
    return draft.has_state and draft.state_in in (None, draft.names.scope(call))


def own_lines(draft: Draft, node: ast.stmt) -> bool:
    """Whether a statement shares its lines with no other."""
    start, end = draft.edits.span(node)
    before = draft.edits.source[:start].rpartition("\n")[2]
    after = draft.edits.source[end:].partition("\n")[0].strip()
    return not before.strip() and (not after or after.startswith("#"))
