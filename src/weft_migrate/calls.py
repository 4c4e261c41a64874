"""Calls that a row says, and those of methods that take more: backward, autocast, seeds, profiles."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import libcst as cst
import libcst.matchers as m

from weft_migrate.checkpoints import lines_for_state, load_state, save_state
from weft_migrate.draft import Left, ScriptDraft, literal
from weft_migrate.library import Template
from weft_migrate.script import code, dotted, elements, given, joined, operand
from weft_migrate.strategies import precision

_DTYPES = MappingProxyType({"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp8": "torch.bfloat16"})


def from_template(draft: ScriptDraft, rows: Sequence[Template] | None, node: cst.Call, updated: cst.Call) -> str:
    """The text of the first row that fits."""
    if not rows:
        raise Left
    arguments, script = given(updated), draft.script
    name = script.method(node.func) or script.original(node.func) or ""
    ctx = draft.context_of(node) if script.method(node.func) else draft.ctx
    releases = name in ("free_memory", "clear") and isinstance(script.parents[node], cst.Expr)
    for text, parameters in rows:
        found = arguments.named(*parameters)
        needed = {each for each, default in parameters.items() if default is None}
        fits = needed <= set(found) <= set(parameters) and len(arguments.args) <= len(parameters)
        if (fits and not arguments.spread) or releases:
            if name in script.library.remarks:
                draft.check(node, script.library.remarks[name])
            parts = {each for each in found if f"{{{each}}}." in text or isinstance(found[each], cst.GeneratorExp)}
            texts = {**parameters, **{each: (operand if each in parts else code)(found[each]) for each in found}}
            absent = "|".join(each for each, given_text in texts.items() if not given_text)
            return re.sub(rf", (\w+=)?{{({absent})}}", "", text).format(ctx=ctx, **texts)
    text, parameters = rows[0]
    raise Left(otherwise=text.format(ctx=draft.ctx, **dict.fromkeys(parameters, "...")))


def _backward(draft: ScriptDraft, node: cst.Call, updated: cst.Call) -> str:
    (loss, *_), keywords, _ = given(updated)
    text, name = operand(loss), "gradient_accumulation_steps"
    if draft.loop_of(node):
        text = f"({text} * {draft.window}.share)"
    elif (steps := draft.setting(name)) is not None and code(steps) != "1":
        if (here := draft.seen(name, node)) is None:
            raise Left(otherwise=f"({text} / {name}).backward(): {draft.hint(name)}")
        text = f"({text} / {operand(here)})"
    options = (f"{name}={code(value)}" for name, value in keywords.items() if name != "model")
    return f"{text}.backward({joined(*options)})"


def _autocast(draft: ScriptDraft, node: cst.Call, updated: cst.Call) -> str:
    ctx = draft.context_of(node)
    if node.args or (draft.policy and not draft.reaches(draft.policy, node)):
        raise Left
    if draft.policy:
        return f"weft.precision.autocast({draft.policy}, {ctx})"
    wish = precision(draft, node)
    dtype = _DTYPES.get(wish.name.removesuffix("-true"), "") if wish else ""
    if wish is None or (wish.name and not dtype):
        return "contextlib.nullcontext()"
    dtype = dtype or ("torch.bfloat16" if wish.scales is None else "torch.float16")
    if wish.scales and wish.scales != wish.test:
        dtype += f" if {wish.scales} else torch.bfloat16"
    enabled = wish.test and f"enabled={wish.test}"
    return f"torch.autocast({joined(f'{ctx}.device.type', dtype, enabled)})"


def _gather_for_metrics(draft: ScriptDraft, node: cst.Call, updated: cst.Call) -> str:
    """Each sample once; a mean for each row, `loss.repeat(size)`, as often as this rank has rows."""
    script = draft.script
    means = m.findall(updated, m.Call(m.Attribute(attr=m.Name("repeat")), args=[m.Arg()]))
    loop, loaders = script.loop_around(node), script.read_by(node)
    loader = max(name for name, _ in loaders) or "loader"
    if not loaders <= script.returned:
        draft.check(node, f'for its loader: {loader}, ctx = weft.shard_data({loader}, ctx, uneven="empty")')
    batch: cst.CSTNode = loop.target if loop else cst.Name("batch")
    source = code(loop.iter) if loop else loader
    is_pair = source.startswith("enumerate(") and len(elements(batch)) == 2
    index, batch = elements(batch) if is_pair else (None, batch)
    (first, *others), pair = elements(batch), f"{operand(batch)}, ids"
    head = f"for {f'{code(index)}, ({pair})' if index else pair} in {source}:"
    hint, values = script.library.remarks["of_batches"], code(node.args[0].value)
    draft.check(node, hint.format(loader=loader, head=head, values=values))
    for mean in means:
        name = code(first)
        if not loop or not (others or re.search(rf"\*\*{name}\b|\b{name}\[[\"']", code(loop.body))):
            raise Left(otherwise="weft.gather(loss.repeat(rows), ctx), with the rows that this rank has in the batch")
        rows = f"len({name if others else f'next(iter({name}.values()))'})"
        loss = operand(cst.ensure_type(cst.ensure_type(mean, cst.Call).func, cst.Attribute).value)
        new = cst.parse_expression(f"{loss.removesuffix('.detach()')}.detach().repeat({rows})")
        updated = cst.ensure_type(updated.deep_replace(mean, new), cst.Call)
    return from_template(draft, script.library.methods["gather_for_metrics"], node, updated)


def _all_gather(draft: ScriptDraft, node: cst.Call, updated: cst.Call) -> str:
    arguments = given(updated)
    found = arguments.named("data")
    if set(found) != {"data"} or arguments.spread or len(arguments.args) > 1:
        raise Left
    draft.check(node, draft.script.library.remarks["all_gather"])
    return f"weft.gather({_stacked(draft, found['data'], node.args[0].value)}, {draft.context_of(node)})"


def _stacked(draft: ScriptDraft, data: cst.BaseExpression, original: cst.CSTNode) -> str:
    """Values with a new first dimension, also those in a tuple, list or dict."""
    match data, draft.script.value(original):
        case ((cst.Tuple() | cst.List()), _):
            parts = [cst.parse_expression(_stacked(draft, each.value, each.value)) for each in data.elements]
            new = [each.with_changes(value=part) for each, part in zip(data.elements, parts, strict=True)]
            return code(data.with_changes(elements=new))
        case cst.Dict(elements), _:
            pairs = [(each.key, each.value) for each in elements if isinstance(each, cst.DictElement)]
            return f"{{{joined(*(f'{code(key)}: {_stacked(draft, value, value)}' for key, value in pairs))}}}"
        case _, cst.Dict():
            return f"{{name: value[None] for name, value in {code(data)}.items()}}"
        case _, (cst.Tuple() | cst.List()):
            return f"[value[None] for value in {code(data)}]"
        case _:
            return f"{operand(data)}[None]"


def _load(draft: ScriptDraft, node: cst.Call, updated: cst.Call) -> str:
    raise Left(otherwise=lines_for_state(draft, node))


def _init_module(draft: ScriptDraft, node: cst.Call, updated: cst.Call) -> str:
    """Values are made as usual, on the device; with `empty_init=True`, they come from a checkpoint."""
    if len(node.args) > 1 or dotted(node.args[0].value) not in ("False", "None"):
        raise Left
    return f"torch.device({draft.context_of(node)}.device)"


def _skip(draft: ScriptDraft, node: cst.Call, updated: cst.Call) -> str:
    if len(node.args) != 2 or draft.state not in draft.made or not any(draft.script.calls("load_state")):
        raise Left
    draft.check(node, "not needed: the restored loader continues where it was")
    return code(updated.args[0].value)


def _set_seed(draft: ScriptDraft, node: cst.Call, updated: cst.Call) -> str:
    script = draft.script
    made = [call for call in script.constructors if script.scope(call) is script.scope(node)]
    inside_of = script.method(node.func) or any(script.line(call) < script.line(node) for call in made)
    ctx = draft.ctx if inside_of else "weft.local()"
    ranks = ', ranks="distinct"' if "device_specific" in given(node).keywords else ""
    return f"weft.rng.set_seed({code(updated.args[0].value)}, {ctx}{ranks})"


def _profile(draft: ScriptDraft, node: cst.Call, updated: cst.Call) -> str:
    """The profiler of torch, with what `ProfileKwargs` says."""
    if node.args:
        raise Left
    options: list[str] = []
    for name, value in draft.handler("ProfileKwargs", node).items():
        text, known = draft.text(value), literal(value)
        if name == "output_trace_dir":
            written = f'torch.profiler.tensorboard_trace_handler({text}, f"rank{{{draft.context_of(node)}.rank}}")'
            is_given = "" if isinstance(value, cst.SimpleString) else f" if {text} else None"
            options.append(f"on_trace_ready={written}{is_given}")
        elif name == "schedule_option":
            options.append(f"schedule=torch.profiler.schedule(**{text})")
        elif name != "activities":
            options.append(f"{name}={text}")
        elif isinstance(known, list):
            kinds = joined(*(f"torch.profiler.ProfilerActivity.{str(each).upper()}" for each in known))
            options.append(f"activities=[{kinds}]")
    draft.check(node, "weft.monitoring.profile(ctx, folder) writes a trace per rank, which `weft report` reads")
    return f"torch.profiler.profile({', '.join(options)})"


CALLS: Mapping[str, Callable[[ScriptDraft, cst.Call, cst.Call], str]] = MappingProxyType(
    {
        "backward": _backward,
        "autocast": _autocast,
        "init_module": _init_module,
        "all_gather": _all_gather,
        "gather_for_metrics": _gather_for_metrics,
        "load": _load,
        "save_state": save_state,
        "load_state": load_state,
        "skip_first_batches": _skip,
        "set_seed": _set_seed,
        "profile": _profile,
        "seed_everything": _set_seed,
    }
)
