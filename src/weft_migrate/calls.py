"""Calls of methods that take more than a row: backward, autocast, seeds, profiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import libcst as cst

from weft_migrate.checkpoints import lines_for_state, load_state, save_state
from weft_migrate.draft import Left, ScriptDraft, literal
from weft_migrate.script import code, dotted, given
from weft_migrate.strategies import precision

_DTYPES = MappingProxyType({"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp8": "torch.bfloat16"})


def _backward(draft: ScriptDraft, node: cst.Call, updated: cst.Call) -> str:
    args, keywords, _ = given(updated)
    loss, steps = code(args[0]), draft.setting("gradient_accumulation_steps")
    simple = isinstance(args[0], (cst.Name, cst.Attribute, cst.Call, cst.Subscript))
    text = loss if simple else f"({loss})"
    if draft.loop_of(node):
        text = f"({text} * {draft.window}.share)"
    elif steps is not None and code(steps) != "1":
        text = f"({text} / {code(steps)})"
    options = ", ".join(f"{name}={code(value)}" for name, value in keywords.items() if name != "model")
    return f"{text}.backward({options})"


def _autocast(draft: ScriptDraft, node: cst.Call, updated: cst.Call) -> str:
    ctx = draft.context_of(node)
    if node.args or (draft.policy and not draft.reaches(draft.policy, node)):
        raise Left
    if draft.policy:
        return f"weft.precision.autocast({draft.policy}, {ctx})"
    setting = draft.setting("mixed_precision")
    if setting is not None and not isinstance(setting, cst.SimpleString) and dotted(setting) != "None":
        wish = code(setting)
        dtype = f'torch.float16 if {wish} == "fp16" else torch.bfloat16'
        return f'torch.autocast({ctx}.device.type, {dtype}, enabled={wish} in ("fp16", "bf16"))'
    policy = str(literal(cst.parse_expression(precision(draft)[0] or '""')) if setting is None else literal(setting))
    kind = _DTYPES.get(policy.removesuffix("-true"))
    return f"torch.autocast({ctx}.device.type, {kind})" if kind else "contextlib.nullcontext()"


def _all_gather(draft: ScriptDraft, node: cst.Call, updated: cst.Call) -> str:
    args, keywords, spread = given(updated)
    data = args[0] if args else keywords.get("data")
    if data is None or spread or len(args) + len(keywords) > 1:
        raise Left
    draft.check(node, "a new first dimension, of ranks; for rows of a batch: weft.gather(x, ctx)")
    return f"weft.gather({_stacked(draft, data, node.args[0].value)}, {draft.context_of(node)})"


def _stacked(draft: ScriptDraft, data: cst.BaseExpression, original: cst.CSTNode) -> str:
    """Values with a new first dimension, also those in a tuple, list or dict."""
    kind = draft.script.value(original)
    if isinstance(data, (cst.Tuple, cst.List)):
        parts = ", ".join(_stacked(draft, each.value, each.value) for each in data.elements)
        return (
            f"[{parts}]" if isinstance(data, cst.List) else f"({parts},)" if len(data.elements) == 1 else f"({parts})"
        )
    if isinstance(data, cst.Dict):
        pairs = [each for each in data.elements if isinstance(each, cst.DictElement)]
        return f"{{{', '.join(f'{code(each.key)}: {_stacked(draft, each.value, each.value)}' for each in pairs)}}}"
    if isinstance(kind, cst.Dict):
        return f"{{name: value[None] for name, value in {code(data)}.items()}}"
    if isinstance(kind, (cst.Tuple, cst.List)):
        return f"[value[None] for value in {code(data)}]"
    simple = isinstance(data, (cst.Name, cst.Attribute, cst.Call, cst.Subscript))
    return f"{code(data)}[None]" if simple else f"({code(data)})[None]"


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
    options = []
    for name, value in draft.handler("ProfileKwargs").items():
        text = draft.text(value)
        if name == "output_trace_dir":
            written = f'torch.profiler.tensorboard_trace_handler({text}, f"rank{{{draft.context_of(node)}.rank}}")'
            known = isinstance(value, cst.SimpleString)
            options.append(f"on_trace_ready={written}" + ("" if known else f" if {text} else None"))
        elif name == "schedule_option":
            options.append(f"schedule=torch.profiler.schedule(**{text})")
        elif name == "activities":
            kinds = [f"torch.profiler.ProfilerActivity.{str(each).upper()}" for each in literal(value) or []]
            options += [f"activities=[{', '.join(kinds)}]"] if isinstance(literal(value), list) else []
        else:
            options.append(f"{name}={text}")
    draft.check(node, "weft.monitoring.profile(ctx, folder) writes a trace per rank, which `weft report` reads")
    return f"torch.profiler.profile({', '.join(options)})"


CALLS: Mapping[str, Callable[[ScriptDraft, cst.Call, cst.Call], str]] = MappingProxyType(
    {
        "backward": _backward,
        "autocast": _autocast,
        "init_module": _init_module,
        "all_gather": _all_gather,
        "load": _load,
        "save_state": save_state,
        "load_state": load_state,
        "skip_first_batches": _skip,
        "set_seed": _set_seed,
        "profile": _profile,
        "seed_everything": _set_seed,
    }
)
