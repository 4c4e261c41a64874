"""Precision and strategies: plugins, keywords and configuration files as calls of weft."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import libcst as cst

from weft.cli.foreign.accelerate import calls_of
from weft_migrate.draft import ScriptDraft, literal
from weft_migrate.script import Expression, Given, code, dotted, elements

_COMPRESSED = MappingProxyType({"FP16": "torch.float16", "BF16": "torch.bfloat16"})
_SCALING = MappingProxyType(
    {"init_scale": "init", "growth_factor": "growth", "backoff_factor": "backoff", "growth_interval": "growth_every"}
)
_STRATEGIES = frozenset({"replicate", "fully_shard", "zero_partition"})
_OF_MODELS = _STRATEGIES | {"start", "recompute", "tensor_parallel", "context_parallel", "expert_parallel", "compile"}
_SAID_ELSEWHERE = frozenset({"accumulate_grads", "skip_nonfinite"})
_PLUGINS = (
    ("fsdp_plugin", "FullyShardedDataParallelPlugin", "fsdp_config"),
    ("deepspeed_plugin", "DeepSpeedPlugin", "deepspeed_config"),
)


class TransformCall(NamedTuple):
    """A transform of a model, or `start`.

    Attributes:
        name: Of the function.
        options: The text of its keyword arguments.
    """

    name: str
    options: str = ""


def strategy(draft: ScriptDraft, node: cst.CSTNode | None = None) -> list[TransformCall]:
    """The calls for models, from `recompute` to `compile`; empty for plain `replicate`.

    Args:
        draft: The translation.
        node: Where something is said about what is not taken over, if it is.
    """
    if draft.script.is_fabric:
        return _of_fabric(draft, node)
    values = dict(draft.config)
    names = draft.script.library.plugins
    for setting, kind, key in _PLUGINS:
        name, given = draft.script.made(draft.script.settings.get(setting))
        if name == kind:
            values[key] = {names.get(each) or each: literal(value) for each, value in given.keywords.items()}
            _lost(draft, node, kind, given)
    found: list[TransformCall] = []
    for call in calls_of({key: value for key, value in values.items() if key not in ("mixed_precision", "debug")}):
        function, _, arguments = call.partition("  #")[0].removesuffix(")").partition("(")
        name = function.rpartition(".")[2]
        if name in _OF_MODELS:
            objects = ("model", "optimizer", "ctx")
            options = [each for each in arguments.split(", ") if each not in objects]
            found.append(TransformCall(name, ", ".join(options)))
        elif node and name not in _SAID_ELSEWHERE:
            draft.check(node, f"to add: {call}")
    return found


def _lost(draft: ScriptDraft, node: cst.CSTNode | None, kind: str, given: Given) -> None:
    """List the arguments that are not taken over."""
    names = draft.script.library.plugins
    lost = sorted(
        f"{name}={code(value)}"
        for name, value in given.keywords.items()
        if names.get(name) != "" and (name not in names or literal(value) is None)
    )
    if lost and node:
        draft.check(node, f"{kind}: {', '.join(lost)} is not taken over")


def _of_fabric(draft: ScriptDraft, node: cst.CSTNode | None) -> list[TransformCall]:
    """The calls for `strategy=` of Fabric."""
    given = draft.script.settings.get("strategy")
    kind, arguments = draft.script.made(given)
    _lost(draft, node, kind, arguments)
    name = kind or str(literal(given) or "")
    stage = re.search(r"(?i)deepspeed.*?_(\d)", name)
    if stage or kind == "DeepSpeedStrategy":
        level = stage[1] if stage else str(literal(arguments.keywords.get("stage")) or 2)
        more = ', engine="deepspeed", offload="cpu"' if "offload" in name else ""
        return [TransformCall("zero_partition", f"stage={level}{more}")]
    if name.startswith("fsdp") or kind == "FSDPStrategy":
        return _fsdp_of_fabric(arguments.keywords, offload="offload" in name)
    unused = name.endswith("find_unused_parameters_true")
    unused |= literal(arguments.keywords.get("find_unused_parameters")) is True
    return [TransformCall("replicate", 'unused="zero"')] if unused else []


def _fsdp_of_fabric(keywords: Mapping[str, Expression], *, offload: bool) -> list[TransformCall]:
    calls: list[TransformCall] = []
    options: list[str] = []
    sharding = str(literal(keywords.get("sharding_strategy")) or "")
    if sharding.startswith("HYBRID"):
        calls.append(TransformCall("start", 'mesh={"replica": -1, "shard": torch.accelerator.device_count()}'))
    if blocks := _classes(keywords.get("activation_checkpointing_policy")):
        calls.append(TransformCall("recompute", f"blocks={blocks}"))
    if units := _classes(keywords.get("auto_wrap_policy")):
        options.append(f"units={units}")
    if "GRAD_OP" in sharding or "ZERO2" in sharding:
        options.append("reshard_after_forward=False")
    if offload or literal(keywords.get("cpu_offload")) is True:
        options.append("offload=True")
    return [*calls, TransformCall("fully_shard", ", ".join(options))]


def _classes(policy: Expression | None) -> str:
    """The classes in a policy of Fabric; empty if it is something else."""
    texts = list(map(code, elements(policy))) if isinstance(policy, (cst.Set, cst.Name)) else []
    return f"[{', '.join(texts)}]" if len(texts) > 1 else "".join(texts)


def model_lines(
    draft: ScriptDraft, node: cst.CSTNode, models: Mapping[str, str], optimizers: Mapping[str, str], ctx: str
) -> list[str]:
    """The lines for models and optimizers of one `prepare`: names, and what is given for them."""
    split, (policy, may_scale) = [], precision(draft)
    calls = [call for call in strategy(draft, node) if call.name != "start"]
    if any('engine="deepspeed"' in call.options for call in calls) and policy == '"fp16"':
        policy, may_scale = '"bf16"', False
        draft.check(node, "bf16: DeepSpeed cannot scale a loss that is not its own")
    if not any(call.name in _STRATEGIES for call in calls):
        calls.append(TransformCall("replicate", _replicate_options(draft)))
        calls.sort(key=lambda call: call.name == "compile")
    lines = [f"{name} = {given}" for name, given in optimizers.items() if name != given]
    asked = any(draft.script.method(n) == "optimizer_step_was_skipped" for n in draft.script.parents)
    skips = [f"{name}, {ctx} = weft.skip_nonfinite({name}, {ctx})" for name in optimizers if may_scale or asked]
    paired = dict(zip(models, optimizers, strict=False)) if len(models) == len(optimizers) else {}
    for name, given in models.items():
        given_now = given
        if policy:
            lines.append(f"{name}, {ctx} = weft.with_precision({given}, {ctx}, {policy})")
            given_now = name
        mine = [paired[name]] if name in paired else list(optimizers)
        for call in calls:
            split.append(_line(draft, node, call, name, given_now, mine, ctx))
            given_now = name
    is_zero = any(call.name == "zero_partition" for call in calls)
    return [*lines, *skips, *split] if is_zero else [*lines, *split, *skips]


def _line(
    draft: ScriptDraft,
    node: cst.CSTNode,
    call: TransformCall,
    name: str,
    given: str,
    optimizers: Sequence[str],
    ctx: str,
) -> str:
    """One call for one model."""
    function, options = call
    objects = [name]
    if function == "zero_partition" and len(optimizers) == 1:
        objects += optimizers
    elif function == "zero_partition":
        line = f"model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, {options})"
        draft.check(node, f"{line}: for one model with its optimizer")
        function, options = "replicate", ""
    elif function == "fully_shard" and optimizers:  # they were made of the parameters before
        several = f"[{', '.join(optimizers)}]"
        rebind = f"rebind={optimizers[0] if len(optimizers) == 1 else several}"
        options = f"{options}, {rebind}" if options else rebind
    arguments = ", ".join(filter(None, [given, *objects[1:], ctx, options]))
    return f"{', '.join(objects)}, {ctx} = weft.{function}({arguments})"


def _reduce(draft: ScriptDraft) -> str | None:
    """In which dtype the hook of DDP sends gradients, as text; a hook that is chosen at run time has its value."""
    hook = draft.handler("DistributedDataParallelKwargs").get("comm_hook")
    kind, made = draft.script.made(hook)
    if kind == "DDPCommunicationHookType" and made.args:
        return f'{{"fp16": torch.float16, "bf16": torch.bfloat16}}.get({code(made.args[0])})'
    return _COMPRESSED.get(dotted(hook).rpartition(".")[2])


def precision(draft: ScriptDraft) -> tuple[str | None, bool]:
    """The policy as text, if there is one, and whether it may be fp16."""
    if draft.script.is_fabric:
        policy = draft.script.library.precisions.get(str(literal(draft.script.settings.get("precision"))))
        return policy and f'"{policy}"', policy == "fp16"
    setting, reduce = draft.setting("mixed_precision"), _reduce(draft)
    if setting is None or literal(setting) == "no" or dotted(setting) == "None":
        return (f"weft.Precision(reduce={reduce})" if reduce else None), False
    text, is_literal = code(setting), isinstance(setting, cst.SimpleString)
    text = text if is_literal else f'"fp32" if {text} in (None, "no") else {text}'
    may_scale = not is_literal or literal(setting) == "fp16"
    scaling = [
        f"{_SCALING[name]}={code(value)}"
        for name, value in draft.handler("GradScalerKwargs").items()
        if name in _SCALING
    ]
    changes = [f"reduce={reduce}"] if reduce else []
    if scaling and literal(setting) == "fp16":
        changes.append(f"scaling=weft.precision.LossScaling({', '.join(scaling)})")
    if not changes:
        return text, may_scale
    return f"dataclasses.replace(weft.precision.named_policy({text}), {', '.join(changes)})", may_scale


def _replicate_options(draft: ScriptDraft) -> str:
    options: list[str] = []
    for name, value in draft.handler("DistributedDataParallelKwargs").items():
        text = code(value)
        last = text.rpartition(".")[2]
        if name == "find_unused_parameters" and text == "True":
            options.append('unused="zero"')
        elif name == "broadcast_buffers" and text == "False":
            options.append('buffers="local"')
        elif name == "bucket_cap_mb":
            options.append(f"bucket_bytes={text} * 2**20")
        elif name == "comm_hook" and last in ("POWER_SGD", "BATCHED_POWER_SGD"):
            options.append("compress=weft.precision.PowerSGD()")
        elif name == "comm_hook" and last not in {*_COMPRESSED, "NO"}:
            draft.check(value, "for power_sgd: weft.replicate(model, ctx, compress=weft.precision.PowerSGD())")
        elif name in ("comm_wrapper", "comm_state_option") and last not in ("NO", "{}"):
            draft.check(value, "not taken over")
    return ", ".join(options)
