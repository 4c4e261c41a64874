"""`with accelerator.accumulate(model)` in a loop: a loop over windows, and in it one over micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst
import libcst.matchers as m

from weft_migrate.draft import ScriptDraft
from weft_migrate.script import AccumulateLoop, code, dotted, inside, is_part


def split_loop(draft: ScriptDraft, found: AccumulateLoop, updated: cst.For) -> cst.For:
    """Make two loops of one; what belongs to the step of the optimizer goes to the outer one."""
    above, micro, step, below = _parts(draft, found)
    cleared = [each for each in micro if _is_step(draft, each)]  # zero_grad at the beginning
    window = cst.Name(draft.window)
    target: cst.BaseAssignTargetExpression = window
    source = updated.iter
    batch: cst.BaseExpression = updated.target
    match found.loop:  # `for step, batch in enumerate(loader)`
        case cst.For(cst.Tuple([index, second]) as pair, cst.Call(cst.Name("enumerate"))):
            batch, name = second.value, dotted(index.value)
            names = [n for n in inside(*found.loop.body.body) if dotted(n) == name]
            if any(not is_part(n, draft.script.parents[n]) for n in names):
                draft.check(pair, f"{name} counts optimizer steps, no longer micro-batches")
                target = pair.with_changes(elements=[index, second.with_changes(value=window)])
            else:
                source = cst.ensure_type(updated.iter, cst.Call).args[0].value
    head = f"for {code(batch)} in {draft.window}:"
    for each in [*step, *below]:
        if _counts(draft, each):
            draft.check(each, f"runs once per optimizer step; for each micro-batch, move it into `{head}`")
    before, lines = draft.results(above)
    kept, rest = draft.results([each for each in micro if each not in cleared], [*lines, *found.block.leading_lines])
    after, footer = draft.results([*step, *cleared, *below], rest)
    inner = cst.ensure_type(cst.parse_statement(head + " pass"), cst.For)
    body = [inner.with_changes(body=cst.IndentedBlock([*before, *kept])), *after]
    block = cst.ensure_type(updated.body, cst.IndentedBlock)
    block = block.with_changes(body=body, footer=[*footer, *block.footer])
    return updated.with_changes(target=target, iter=source, body=block)


def _parts(draft: ScriptDraft, found: AccumulateLoop) -> list[Sequence[cst.CSTNode]]:
    """What is above the block, in it up to `backward`, in it from the step on, and below it."""
    outer, body = list(found.loop.body.body), list(found.block.body.body)
    place = outer.index(found.block)
    backward = max(n for n, node in enumerate(body) if draft.script.has(node, "backward"))
    at = next((n for n in range(backward + 1, len(body)) if _is_step(draft, body[n])), len(body))
    return [outer[:place], body[:at], body[at:], outer[place + 1 :]]


def _is_step(draft: ScriptDraft, node: cst.CSTNode) -> bool:
    """`optimizer.step()`, `scheduler.step()`, `zero_grad()`, clipping, and what is under `sync_gradients`."""
    if isinstance(node, cst.If):
        return draft.script.method(node.test) == "sync_gradients"
    for each in inside(node):
        match each:
            case cst.Call(cst.Attribute(owner, cst.Name("step" | "zero_grad"))):
                if draft.prepared.get(dotted(owner)) in ("optimizer", "scheduler", "model"):
                    return True
            case cst.Call(func) if (draft.script.method(func) or "").startswith("clip_grad"):
                return True
    return False


def _counts(draft: ScriptDraft, node: cst.CSTNode) -> bool:
    """Whether a statement adds to something, so that it matters how often it runs."""
    if isinstance(node, cst.If) and draft.script.has(node.test, "sync_gradients"):
        return False
    adds = m.AugAssign() | m.Call(m.Attribute(attr=m.Name("append") | m.Name("update")))
    return bool(m.findall(node, adds))


def is_after_backward(draft: ScriptDraft, node: cst.CSTNode) -> bool:
    """Whether a node of a translated loop is in its outer part, where gradients are synchronized."""
    found = draft.loop_of(node)
    if found is None:
        return not any(draft.script.calls("accumulate"))
    *_, step, below = _parts(draft, found)
    return not {node, *draft.script.above(node)}.isdisjoint([*step, *below])
