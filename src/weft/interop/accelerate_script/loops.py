"""`with accelerator.accumulate(model)` in a loop: a loop over windows, and in it one over micro-batches."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from weft.interop.accelerate_script.names import Loop, dotted
from weft.interop.accelerate_script.translation import Draft

__all__ = ["drop_sync_test", "is_after_backward", "split_loop"]


def split_loop(draft: Draft, found: Loop) -> None:
    """Make two loops of one; what belongs to the step of the optimizer goes to the outer one."""
    loop, block, edits = found.loop, found.block, draft.edits
    unit = block.col_offset - loop.col_offset
    _heads(draft, found)
    before = loop.body[: loop.body.index(block)]
    first = loop.iter.end_lineno or loop.lineno
    head = " " * block.col_offset + f"for {_batch_of(draft, found)} in {draft.window}:"
    opens = block.items[-1].context_expr.end_lineno or block.lineno
    if before:
        edits.above(first + 1, head)
        edits.shift(range(first + 1, block.lineno), unit)
    else:
        edits.above(block.lineno, head)
    edits.remove_lines(block.lineno, opens)
    at = _first_of_step(draft, found)
    tail = block.body[at:]
    last = block.end_lineno or block.lineno
    if tail:
        begins = (block.body[at - 1].end_lineno or 0) + 1
        edits.shift(range(begins, last + 1), -unit)
    after = loop.body[loop.body.index(block) + 1 :]
    for node in [*tail, *after]:
        if _counts(draft, node):
            draft.check(node, f"runs once per optimizer step; for each micro-batch, move it into `{head.strip()}`")
    for node in [node for node in block.body[:at] if _is_step(draft, node)]:  # zero_grad at the beginning
        edits.statement(node, [])
        edits.above(last + 1, " " * block.col_offset + edits.source[slice(*edits.span(node))])


def _heads(draft: Draft, found: Loop) -> None:
    loop, source = found.loop, found.loop.iter
    windows = draft.windows[found.loader]
    inner = source
    while isinstance(inner, ast.Call) and not draft.names.method(inner.func):
        inner = inner.args[0]
    if not isinstance(loop.target, ast.Tuple) or dotted(getattr(source, "func", None)) != "enumerate":
        draft.edits.replace(loop.target, draft.window)
        draft.edits.replace(inner, windows)
        return
    index, batch = loop.target.elts
    if any(dotted(n) == dotted(index) for node in loop.body for n in ast.walk(node)):
        draft.check(loop, f"{dotted(index)} counts optimizer steps, no longer micro-batches")
        draft.edits.replace(batch, draft.window)
        draft.edits.replace(inner, windows)
    else:
        draft.edits.replace(loop.target, draft.window)
        draft.edits.replace(source, windows if inner is source.args[0] else draft.edits.text(source.args[0]))  # type: ignore[attr-defined]


def _batch_of(draft: Draft, found: Loop) -> str:
    target, source = found.loop.target, found.loop.iter
    numbered = dotted(getattr(source, "func", None)) == "enumerate"
    batch = target.elts[1] if numbered and isinstance(target, ast.Tuple) else target
    return draft.edits.source[slice(*draft.edits.span(batch))]


def _first_of_step(draft: Draft, found: Loop) -> int:
    body = found.block.body
    backward = max(i for i, node in enumerate(body) if _has(draft, [node], "backward"))
    return next((i for i in range(backward + 1, len(body)) if _is_step(draft, body[i])), len(body))


def _is_step(draft: Draft, node: ast.stmt) -> bool:
    """`optimizer.step()`, `scheduler.step()`, `zero_grad()`, clipping, and what is under `sync_gradients`."""
    if isinstance(node, ast.If):
        return draft.names.method(node.test) == "sync_gradients"
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            owner = draft.prepared.get(dotted(call.func.value))
            named = call.func.attr in ("step", "zero_grad") and owner in ("optimizer", "scheduler", "model")
            if named or (draft.names.method(call.func) or "").startswith("clip_grad"):
                return True
    return False


def _counts(draft: Draft, node: ast.stmt) -> bool:
    if isinstance(node, ast.If) and _has(draft, [node.test], "sync_gradients"):
        return False
    return any(
        isinstance(n, ast.AugAssign)
        or (isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in ("append", "update"))
        for n in ast.walk(node)
    )


def _has(draft: Draft, nodes: Iterable[ast.AST], name: str) -> bool:
    return any(draft.names.method(n) == name for node in nodes for n in ast.walk(node))


def is_after_backward(draft: Draft, node: ast.AST) -> bool:
    """Whether a node of a translated loop is in its outer part, where gradients are synchronized."""
    found, statement = draft.loop_of(node)
    if found is None:
        return not any(draft.names.calls("accumulate"))
    steps = [
        *found.block.body[_first_of_step(draft, found) :],
        *found.loop.body[found.loop.body.index(found.block) + 1 :],
    ]
    return statement in steps


def drop_sync_test(draft: Draft, node: ast.If) -> bool:
    """Take the body of `if accelerator.sync_gradients:` out, where that is always true."""
    opens = node.test.end_lineno or node.lineno
    body = node.body[0]
    if node.orelse or body.lineno <= opens or not is_after_backward(draft, node):
        return False
    draft.edits.remove_lines(node.lineno, opens)
    draft.edits.shift(range(opens + 1, (node.end_lineno or opens) + 1), node.col_offset - body.col_offset)
    return True
