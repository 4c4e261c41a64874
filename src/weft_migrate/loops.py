"""`with accelerator.accumulate(model)` in a loop: a loop over windows, and in it one over micro-batches."""

from __future__ import annotations

import libcst as cst

from weft_migrate.draft import ScriptDraft
from weft_migrate.script import AccumulateLoop, code, dotted, inside, is_part


def split_loop(draft: ScriptDraft, found: AccumulateLoop, updated: cst.For) -> cst.For:
    """Make two loops of one; what belongs to the step of the optimizer goes to the outer one."""
    place, block = _place(found), found.block
    outer, old = found.loop.body.body, block.body.body
    target, source = updated.target, updated.iter
    numbered = isinstance(source, cst.Call) and dotted(source.func) == "enumerate" and isinstance(target, cst.Tuple)
    batch = target.elements[1].value if numbered and isinstance(target, cst.Tuple) else target
    at = _first_of_step(draft, found)
    cleared = [each for each in old[:at] if _is_step(draft, each)]  # zero_grad at the beginning
    head = f"for {code(batch)} in {draft.window}:"
    for each in [*old[at:], *outer[place + 1 :]]:
        if _counts(draft, each):
            draft.check(each, f"runs once per optimizer step; for each micro-batch, move it into `{head}`")
    before, lines = draft.results(outer[:place])
    kept, rest = draft.results([each for each in old[:at] if each not in cleared], [*lines, *block.leading_lines])
    after, footer = draft.results([*old[at:], *cleared, *outer[place + 1 :]], rest)
    loop = cst.ensure_type(cst.parse_statement(head + " pass"), cst.For)
    body = [loop.with_changes(body=cst.IndentedBlock([*before, *kept])), *after]
    updated = _header(draft, found, updated)
    block_of = cst.ensure_type(updated.body, cst.IndentedBlock)
    return updated.with_changes(body=block_of.with_changes(body=body, footer=[*footer, *block_of.footer]))


def _place(found: AccumulateLoop) -> int:
    return list(found.loop.body.body).index(found.block)


def _header(draft: ScriptDraft, found: AccumulateLoop, updated: cst.For) -> cst.For:
    """`for step, batch in enumerate(loader)` becomes `for window in windows`."""
    loop, windows, window = found.loop, cst.parse_expression(draft.windows[found.loader]), cst.Name(draft.window)
    inner: cst.CSTNode = loop.iter
    while isinstance(inner, cst.Call) and not draft.script.method(inner.func):
        inner = inner.args[0].value
    numbered = isinstance(loop.iter, cst.Call) and dotted(loop.iter.func) == "enumerate"
    source = loop.iter
    target: cst.BaseExpression = window
    if isinstance(loop.target, cst.Tuple) and numbered:
        index, batch = loop.target.elements
        names = [n for n in inside(*loop.body.body) if dotted(n) == dotted(index.value)]
        if any(not is_part(n, draft.script.parents[n]) for n in names):
            draft.check(loop.target, f"{dotted(index.value)} counts optimizer steps, no longer micro-batches")
            target = loop.target.with_changes(elements=[index, batch.with_changes(value=window)])
        else:
            source = cst.ensure_type(loop.iter, cst.Call).args[0].value
    return updated.with_changes(target=target, iter=_exchanged(source, inner, windows, draft))


def _exchanged(
    source: cst.BaseExpression, old: cst.CSTNode, new: cst.BaseExpression, draft: ScriptDraft
) -> cst.CSTNode:
    """What a loop iterates over, with the windows in the place of the loader."""
    if source is old:
        return new
    call = cst.ensure_type(source, cst.Call)
    first = call.args[0]
    changed = first.with_changes(value=_exchanged(first.value, old, new, draft))
    rest = [each.with_changes(value=cst.parse_expression(draft.text(each.value))) for each in call.args[1:]]
    return call.with_changes(args=[changed, *rest])


def _first_of_step(draft: ScriptDraft, found: AccumulateLoop) -> int:
    body = found.block.body.body
    backward = max(n for n, node in enumerate(body) if draft.script.has(node, "backward"))
    return next((n for n in range(backward + 1, len(body)) if _is_step(draft, body[n])), len(body))


def _is_step(draft: ScriptDraft, node: cst.CSTNode) -> bool:
    """`optimizer.step()`, `scheduler.step()`, `zero_grad()`, clipping, and what is under `sync_gradients`."""
    if isinstance(node, cst.If):
        return draft.script.method(node.test) == "sync_gradients"
    for call in inside(node):
        if isinstance(call, cst.Call) and isinstance(call.func, cst.Attribute):
            owner = draft.prepared.get(dotted(call.func.value))
            named = call.func.attr.value in ("step", "zero_grad") and owner in ("optimizer", "scheduler", "model")
            if named or (draft.script.method(call.func) or "").startswith("clip_grad"):
                return True
    return False


def _counts(draft: ScriptDraft, node: cst.CSTNode) -> bool:
    if isinstance(node, cst.If) and draft.script.has(node.test, "sync_gradients"):
        return False
    calls = [n.func for n in inside(node) if isinstance(n, cst.Call) and isinstance(n.func, cst.Attribute)]
    adds = any(isinstance(each, cst.Attribute) and each.attr.value in ("append", "update") for each in calls)
    return adds or any(isinstance(n, cst.AugAssign) for n in inside(node))


def is_after_backward(draft: ScriptDraft, node: cst.CSTNode) -> bool:
    """Whether a node of a translated loop is in its outer part, where gradients are synchronized."""
    found = draft.loop_of(node)
    if found is None:
        return not any(draft.script.calls("accumulate"))
    around = {node, *draft.script.above(node)}
    steps = [*found.block.body.body[_first_of_step(draft, found) :], *found.loop.body.body[_place(found) + 1 :]]
    return any(each in around for each in steps)
