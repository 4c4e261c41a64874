"""`save_state`, `load_state` and what is registered for them: one state of `weft.checkpointable`."""

from __future__ import annotations

import re
from collections.abc import Mapping

import libcst as cst

from weft_migrate.draft import Left, ScriptDraft
from weft_migrate.script import Script, code, dotted, elements, given, inside, named, targets


def is_place_of_state(draft: ScriptDraft, node: cst.CSTNode) -> bool:
    """Whether a statement is the last that prepares or registers something, before states are saved or loaded."""
    script = draft.script
    if not any(script.calls("save_state", "load_state")):
        return False
    here = script.scope(node)
    others = script.calls(*script.library.prepares, "register_for_checkpointing")
    lines = [script.line(each) for each in others if script.scope(each) is here]
    branch = next((each for each in script.above(node) if isinstance(each, cst.If)), node)
    last = max(lines, default=script.line(node))
    return script.line(branch) <= last <= script.where[branch].end.line


def state_line(draft: ScriptDraft, node: cst.CSTNode, ctx: str) -> str:
    """`state, ctx = weft.checkpointable(...)` with all that was prepared and registered."""
    objects = {}
    for name, role in draft.prepared.items():
        if role != "loader" or is_trained(name):
            objects[name.rpartition(".")[2]] = draft.windows.get(name, name)
    for call in draft.script.calls("register_for_checkpointing"):
        objects |= {dotted(each).rpartition(".")[2]: dotted(each) for each in given(call).args if dotted(each)}
    pairs = [f'"{key}": {value}' for key, value in objects.items()]
    draft.make(draft.state, node)
    arguments = f"{{{', '.join(pairs)}}}, {ctx}"
    if len(pairs) > 2:
        arguments = "\n    {\n" + "".join(f"        {pair},\n" for pair in pairs) + f"    }},\n    {ctx},\n"
    return f"{draft.state}, {ctx} = weft.checkpointable({arguments})"


def lines_for_state(draft: ScriptDraft, call: cst.Call) -> str:
    """What to write for `fabric.save` and `fabric.load`: objects and numbers apart, under the names of the script."""
    script, ctx, is_load = draft.script, draft.context_of(call), draft.script.method(call.func) == "load"
    calls = sorted(script.calls("save", "load"), key=script.line)
    states = [state for each in calls if (state := given(each).named("path", "state").get("state"))]
    path = given(call).named("path").get("path")
    folder = code(path) if path else "folder"
    objects, numbers = dict[str, str](), dict[str, str]()
    for made in map(script.value, states):
        for pair in made.elements if isinstance(made, cst.Dict) else ():
            is_object = named(pair.value) and (named(pair.value) in script.wrapped or script.role(pair.value))
            if isinstance(pair, cst.DictElement):
                (objects if is_object else numbers)[code(pair.key)] = code(pair.value)
    if not objects:
        line = "state, ctx = weft.checkpointable({...}, ctx), after transforms"
        return f"{line}; weft.{'restore' if is_load else 'save'}(state, {folder}, {ctx})"
    kept = {dotted(each.value) for each in script.every(cst.Subscript)}
    names = [dotted(state) for state in states if dotted(state) and dotted(state) in kept]
    progress = names[0] if names else script.fresh("progress")
    loaders = {f'"{name}"': name for name, role in draft.prepared.items() if role == "loader" and is_trained(name)}
    objects |= {name: value for name, value in loaders.items() if value not in objects.values()}
    moved = {name: value for name, value in numbers.items() if value.isidentifier()}
    if call is calls[0]:
        texts = {name: f"dict({text})" if text.startswith("vars(") else text for name, text in numbers.items()}
        texts |= dict.fromkeys(moved, "0")  # filled
        lines = [f"after the transforms, in place of {names[0]}:" if names else "after the transforms:"]
        lines += [f"    {progress} = {_display(texts)}"] if numbers else []
        objects |= {'"progress"': progress} if numbers else {}
        lines += [f"    {draft.state}, {ctx} = weft.checkpointable({_display(objects)}, {ctx})", "here:"]
    else:
        lines = [f"with {draft.state} of line {script.line(calls[0])}:"]
    if is_load:
        lines += [f"    weft.restore({draft.state}, {folder}, {ctx})"]
        lines += [f"    {value} = {progress}[{name}]" for name, value in moved.items()]
        if not isinstance(script.parents[call], cst.Expr):
            lines.append(f"fabric.load returned what its dict has not; here, that is in {progress}")
        return "\n".join(lines)
    lines += [f"    {progress}[{name}] = {value}" for name, value in moved.items()]
    step = next(filter(_is_count, numbers), "")
    number = moved.get(step, f"{progress}[{step}]" if step else "step")
    lines += [f"    weft.save({draft.state}, {folder}, {number}, {ctx})  # the number grows; fresh=True begins anew"]
    return "\n".join(lines)


def _display(pairs: Mapping[str, str]) -> str:
    """The text of a dict."""
    return f"{{{', '.join(f'{name}: {value}' for name, value in pairs.items())}}}"


def is_trained(loader: str) -> bool:
    """Whether the place in a loader belongs to the state."""
    return not any(word in loader for word in ("eval", "val", "test"))


def register(draft: ScriptDraft, call: cst.Call, _updated: cst.Call) -> list[str]:
    """What is registered belongs to the state, which is made by the last of these statements."""
    args, keywords, spread = given(call)
    if not all(map(dotted, args)) or keywords or spread:
        raise Left
    is_last = is_place_of_state(draft, call) and draft.prepared
    return [state_line(draft, call, draft.context_of(call))] if is_last else []


def save_state(draft: ScriptDraft, call: cst.Call, updated: cst.Call) -> str:
    """`weft.save`: the step is that in the name of the folder, or that of the loop around."""
    if draft.guarded(call):
        raise Left("every rank has to call it, so move it out of the `if`; ")
    _check_state(draft, call)
    if not (step := _number(draft, call)):
        raise Left("step has to grow from save to save: count the steps of the optimizer; ")
    draft.check(call, f"{step} is the number of the checkpoint: it has to grow from save to save; one folder per run")
    return f"weft.save({draft.state}, {code(updated.args[0].value)}, {step}, {draft.context_of(call)})"


def _number(draft: ScriptDraft, call: cst.Call) -> str:
    """The number of a checkpoint: in the name of its folder, a counter of the loops around, or their only index."""
    script, loops, folder = draft.script, _loops(draft.script, call), call.args[0].value
    indices = [name for each in loops if (name := _index(each))]
    within = list(inside(*loops[-1:]))
    kept = {dotted(one) for n in within if isinstance(n, cst.Assign) for each in targets(n) for one in elements(each)}
    counters = [dotted(n.target) for n in within if isinstance(n, cst.AugAssign) and _grows_with(script, n, call)]
    before = [each for each in script.values.get(script.place(folder), []) if script.line(each) < script.line(call)]
    values = [folder, *reversed(before)]
    parts = [each for value in values for each in inside(value) if isinstance(each, cst.FormattedStringExpression)]
    names = [dotted(each.expression) for each in reversed(parts)]  # as in f"{folder}/step_{step}"
    chosen = [name for name in names if name and (name in {*counters, *indices} or _is_count(name))]
    chosen += sorted({*counters} - kept, key=_is_count, reverse=True) + (indices if len(loops) == 1 else [])
    function = script.scope(call)
    calls = script.calls_of(function) if function else []
    again = loops or any(each is None or _loops(script, each) for each in calls)
    return next(iter(chosen), "" if again else "0")


def _is_count(name: str) -> bool:
    return any(word in name.rpartition(".")[2] for word in ("step", "iter", "epoch"))


def _loops(script: Script, node: cst.CSTNode) -> list[cst.For | cst.While]:
    return [each for each in script.above(node) if isinstance(each, (cst.For, cst.While))]


_COUNTED = re.compile(r"([\w.]*tqdm\()?([\w.]*\.)?(t?range|count|enumerate)\(")


def _index(loop: cst.For | cst.While) -> str:
    """The variable of a loop over numbers."""
    is_counted = isinstance(loop, cst.For) and _COUNTED.match(code(loop.iter))
    return dotted(elements(loop.target)[0]) if isinstance(loop, cst.For) and is_counted else ""


def _grows_with(script: Script, add: cst.AugAssign, call: cst.Call) -> bool:
    """Whether a counter grows by a number in each round in which a call is reached."""
    blocks = [each for each in script.above(add) if isinstance(each, cst.BaseSuite)]
    opened = [each for each in blocks if not isinstance(script.parents[each], cst.With) and not _syncs(script, each)]
    is_counter = isinstance(add.operator, cst.AddAssign) and isinstance(add.value, cst.Integer)
    return is_counter and opened[0] in script.above(call)


def _syncs(script: Script, block: cst.CSTNode) -> bool:
    around = script.parents[block]
    return isinstance(around, cst.If) and script.method(around.test) == "sync_gradients"


def load_state(draft: ScriptDraft, call: cst.Call, updated: cst.Call) -> str:
    """`weft.restore`, which also puts the loaders back in the middle of an epoch."""
    _check_state(draft, call)
    draft.check(call, "reads checkpoints of weft; loaders continue where they were, so skip nothing by hand")
    return f"weft.restore({draft.state}, {code(updated.args[0].value)}, {draft.context_of(call)})"


def _check_state(draft: ScriptDraft, call: cst.Call) -> None:
    """Leave a call without a state, or with more than a folder."""
    if not draft.reaches(draft.state, call) or len(call.args) != 1 or call.args[0].star:
        raise Left
