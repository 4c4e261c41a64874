"""Precision and strategies: plugins, keywords and configuration files as calls of weft."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import libcst as cst

from weft.cli.foreign.accelerate import calls_of
from weft_migrate.draft import ScriptDraft, literal
from weft_migrate.script import Expression, Given, code, dotted, elements, given

_COMPRESSED = MappingProxyType({"FP16": "torch.float16", "BF16": "torch.bfloat16"})
_SCALING = MappingProxyType(
    {"init_scale": "init", "growth_factor": "growth", "backoff_factor": "backoff", "growth_interval": "growth_every"}
)
_STRATEGIES = frozenset({"replicate", "fully_shard", "zero_partition"})
_OF_MODELS = _STRATEGIES | {"start", "recompute", "tensor_parallel", "context_parallel", "expert_parallel", "compile"}
_SAID_ELSEWHERE = frozenset({"accumulate_grads", "skip_nonfinite"})
_PLUGINS = MappingProxyType(
    {
        "fsdp_plugin": ("FullyShardedDataParallelPlugin", "fsdp_config"),
        "deepspeed_plugin": ("DeepSpeedPlugin", "deepspeed_config"),
    }
)
FABRIC_STRATEGIES = frozenset({"DDPStrategy", "DeepSpeedStrategy", "FSDPStrategy"})
MODEL_MAKERS = FABRIC_STRATEGIES | {kind for kind, _ in _PLUGINS.values()}
_KNOWN = re.compile(r"auto|dp|ddp.*|single_device|fsdp.*|deepspeed.*")


class TransformCall(NamedTuple):
    """A transform of a model, or `start`.

    Attributes:
        name: Of the function.
        options: The text of its keyword arguments.
    """

    name: str
    options: str = ""


class Branch(NamedTuple):
    """The transforms of a strategy, and when they are applied.

    Attributes:
        test: The text of a condition; empty for "in every run", or for "otherwise" after others.
        calls: From `recompute` to `compile`; empty for plain `replicate`.
    """

    test: str
    calls: list[TransformCall]


def strategies(draft: ScriptDraft, node: cst.CSTNode | None = None) -> list[Branch] | None:
    """The strategies that a script chooses between, the last one without a condition; None if that is not known.

    Args:
        draft: The translation.
        node: Where something is said about what is not taken over, if it is.
    """
    script, is_fabric = draft.script, draft.script.is_fabric
    kinds = ["strategy"] if is_fabric else list(_PLUGINS)
    asked = {name: script.settings[name] for name in kinds if name in script.settings}
    branches: list[Branch] = []
    for name, value in asked.items():
        found = script.choices(value)
        calls = {each: made for each in found if (made := of_value(draft, each, node)) is not None}
        if name in script.uncertain or len(calls) < len(found):
            return None
        several = {tuple(made) for made in calls.values()}
        if several == {()}:
            continue
        if len(several) == 1:
            return [*branches, Branch("", next(iter(calls.values())))]
        shared = any(call.name == "start" for each in several for call in each)
        makers = [script.made(each)[0] for each in found if isinstance(each, cst.Call)]
        seen = all(draft.sees(value, call) for call in script.prepares())
        is_choice = isinstance(value, cst.IfExp) and len(found) == 2
        if shared or not seen or not (is_choice or (dotted(value) and len(set(makers)) == len(makers))):
            return None
        if isinstance(value, cst.IfExp):
            [first, second] = calls.values()
            branches.append(Branch(code(value.test) if first else f"not ({code(value.test)})", first or second))
            if first and second:
                return [*branches, Branch("", second)]
            continue
        for each, made in calls.items():
            label = f'"{script.made(each)[0]}"' if isinstance(each, cst.Call) else code(each)
            if made:
                branches.append(Branch(f"{dotted(value)} == {label}" if is_fabric else dotted(value), made))
    return [*branches, Branch("", [] if is_fabric else _configured(draft, {}, node))]


def labels(draft: ScriptDraft) -> dict[cst.CSTNode, str]:
    """What stands for the calls that make a strategy under a condition: the variable that has it is asked later."""
    branches, script, found = strategies(draft), draft.script, dict[cst.CSTNode, str]()
    for name in ("strategy", *_PLUGINS) if branches and len(branches) > 1 else ():
        value = script.settings.get(name)
        for each in script.choices(value) if value and dotted(value) else ():
            if isinstance(each, cst.Call):
                found[each] = f'"{script.made(each)[0]}"' if script.is_fabric else "True"
    return found


def always(draft: ScriptDraft) -> list[TransformCall]:
    """The calls of a strategy that is the same in every run; empty otherwise."""
    branches = strategies(draft) or []
    return branches[0].calls if len(branches) == 1 else []


def of_value(draft: ScriptDraft, value: cst.CSTNode, node: cst.CSTNode | None = None) -> list[TransformCall] | None:
    """The calls for one value of a setting; None if it is not known."""
    kind, made = draft.script.made(value)
    keys = dict(_PLUGINS.values())
    lost(draft, node, kind, made)
    if kind in keys:
        names = draft.script.library.plugins
        config = {names.get(each) or each: literal(value) for each, value in made.keywords.items()}
        return _configured(draft, {keys[kind]: config}, node)
    if dotted(value) == "None":
        return []
    if kind in FABRIC_STRATEGIES or isinstance(value, cst.SimpleString):
        return _of_fabric(draft, kind or str(literal(value)), made)
    return None


def _configured(
    draft: ScriptDraft, more: Mapping[str, Mapping[str, object]], node: cst.CSTNode | None
) -> list[TransformCall]:
    """The calls for a configuration file of Accelerate, and for a plugin."""
    values = {**draft.config, **more}
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


def lost(draft: ScriptDraft, node: cst.CSTNode | None, kind: str, made: Given) -> None:
    """List the arguments that are not taken over."""
    names = draft.script.library.plugins
    of_kind = draft.script.library.passed.get(kind)
    gone = sorted(
        f"{name}={code(value)}"
        for name, value in made.keywords.items()
        if (name not in of_kind if of_kind is not None else names.get(name) != "" and not _is_said(draft, name, value))
    )
    if gone and node:
        draft.check(node, f"{kind}: {', '.join(gone)} is not taken over")


def _is_said(draft: ScriptDraft, name: str, value: Expression) -> bool:
    """Whether an argument of a strategy is among the options of its transform."""
    if name in ("auto_wrap_policy", "activation_checkpointing_policy") and draft.script.is_fabric:
        return bool(_classes(draft, value))
    return name in draft.script.library.plugins and literal(value) is not None


def _of_fabric(draft: ScriptDraft, name: str, arguments: Given) -> list[TransformCall] | None:
    """The calls for `strategy=` of Fabric; None if it has another name."""
    if not (_KNOWN.fullmatch(name) or name in FABRIC_STRATEGIES):
        return None
    stage = re.search(r"(?i)deepspeed.*?_(\d)", name)
    if stage or name == "DeepSpeedStrategy":
        level = stage[1] if stage else str(literal(arguments.keywords.get("stage")) or 2)
        more = ', engine="deepspeed", offload="cpu"' if "offload" in name else ""
        return [TransformCall("zero_partition", f"stage={level}{more}")]
    if name.startswith("fsdp") or name == "FSDPStrategy":
        return _fsdp_of_fabric(draft, arguments.keywords, offload="offload" in name)
    unused = name.endswith("find_unused_parameters_true")
    unused |= literal(arguments.keywords.get("find_unused_parameters")) is True
    return [TransformCall("replicate", 'unused="zero"')] if unused else []


def _fsdp_of_fabric(draft: ScriptDraft, keywords: Mapping[str, Expression], *, offload: bool) -> list[TransformCall]:
    calls: list[TransformCall] = []
    options: list[str] = []
    sharding = str(literal(keywords.get("sharding_strategy")) or "")
    if sharding.startswith("HYBRID"):
        calls.append(TransformCall("start", 'mesh={"replica": -1, "shard": torch.accelerator.device_count()}'))
    if blocks := _classes(draft, keywords.get("activation_checkpointing_policy")):
        calls.append(TransformCall("recompute", f"blocks={blocks}"))
    if units := _classes(draft, keywords.get("auto_wrap_policy")):
        options.append(f"units={units}")
    if "GRAD_OP" in sharding or "ZERO2" in sharding:
        options.append("reshard_after_forward=False")
    if offload or literal(keywords.get("cpu_offload")) is True:
        options.append("offload=True")
    return [*calls, TransformCall("fully_shard", ", ".join(options))]


def _classes(draft: ScriptDraft, given_policy: Expression | None) -> str:
    """The classes in a policy of Fabric, or of `transformer_auto_wrap_policy`; empty if it is something else."""
    policy = given_policy and draft.script.value(given_policy)
    if isinstance(policy, cst.Call):
        return _classes(draft, given(policy).keywords.get("transformer_layer_cls"))
    texts = list(map(code, elements(policy))) if isinstance(policy, (cst.Set, cst.Name)) else []
    return f"[{', '.join(texts)}]" if len(texts) > 1 else "".join(texts)


def model_lines(
    draft: ScriptDraft, node: cst.Call, models: Mapping[str, str], optimizers: Mapping[str, str], ctx: str
) -> list[str]:
    """The lines for models and optimizers of one `prepare`: names, and what is given for them."""
    branches = strategies(draft, node)
    if draft.policy and not draft.reaches(draft.policy, node):
        branches = None
    if branches is None and models:
        names = [*models, *optimizers]
        draft.left(node, _to_paste(draft, node, models, optimizers, ctx))
        return [f"{', '.join(names)} = {code(node.func)}({', '.join([*models.values(), *optimizers.values()])})"]
    if not branches or not models or len(branches) == 1:
        return _lines_of(draft, node, branches[0].calls if branches else [], models, optimizers, ctx)
    found = [_lines_of(draft, node, branch.calls, models, optimizers, ctx) for branch in branches]
    return _chain([branch.test for branch in branches], found)


def _chain(tests: Sequence[str], bodies: Sequence[list[str]]) -> list[str]:
    """`if`, `elif` and `else` with these lines; the last test is empty."""
    heads = [f"if {tests[0]}:", *(f"elif {test}:" for test in tests[1:-1]), "else:"]
    return [
        line for head, body in zip(heads, bodies, strict=True) for line in (head, *(f"    {each}" for each in body))
    ]


def _to_paste(
    draft: ScriptDraft, node: cst.Call, models: Mapping[str, str], optimizers: Mapping[str, str], ctx: str
) -> str:
    """The lines to choose from, for a strategy that is not known before the run."""
    script, library = draft.script, draft.script.library
    made = [
        call for call in script.parents if isinstance(call, cst.Call) and script.original(call.func) in MODEL_MAKERS
    ]
    settings = [code(script.settings[name]) for name in ("strategy", *_PLUGINS) if name in script.settings]
    choices = [(f"if ...:  # {script.original(call.func)}", of_value(draft, call, node) or []) for call in made]
    choices = choices or [('if ...:  # "fsdp"', [TransformCall("fully_shard")])]
    lines = [f"{library.name} learns from {', '.join(settings)} what to do, when it runs. Write what you need:"]
    for head, calls in [*choices, ("else:", list[TransformCall]())]:
        known = [call for call in calls if call.name != "start"]
        lines += [head if head == "else:" or len(lines) == 1 else f"el{head}"]
        is_zero = any(call.name == "zero_partition" for call in known)
        mine = optimizers or ({"optimizer": "optimizer"} if is_zero else {})
        lines += [f"    {line}" for line in _lines_of(draft, node, known, models, mine, ctx)]
    return "\n".join(lines)


def _lines_of(
    draft: ScriptDraft,
    node: cst.CSTNode,
    given_calls: Sequence[TransformCall],
    models: Mapping[str, str],
    optimizers: Mapping[str, str],
    ctx: str,
) -> list[str]:
    """The lines for one strategy."""
    split, (policy, may_scale) = [], precision(draft)
    calls = [call for call in given_calls if call.name != "start"]
    if any('engine="deepspeed"' in call.options for call in calls) and policy == '"fp16"':
        policy, may_scale = '"bf16"', False
        draft.check(node, "bf16: DeepSpeed cannot scale a loss that is not its own")
    if not any(call.name in _STRATEGIES for call in calls):
        calls.append(TransformCall("replicate", _replicate_options(draft)))
        calls.sort(key=lambda call: call.name == "compile")
    lines = [f"{name} = {value}" for name, value in optimizers.items() if name != value]
    asked = any(draft.script.method(n) == "optimizer_step_was_skipped" for n in draft.script.parents)
    skips = [f"{name}, {ctx} = weft.skip_nonfinite({name}, {ctx})" for name in optimizers if may_scale or asked]
    paired = dict(zip(models, optimizers, strict=False)) if len(models) == len(optimizers) else {}
    for name, value in models.items():
        given_now = value
        if policy:
            lines.append(f"{name}, {ctx} = weft.with_precision({value}, {ctx}, {policy})")
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
        if draft.policy:
            return draft.policy, True
        policy = draft.script.library.precisions.get(str(literal(draft.script.settings.get("precision"))), "fp32")
        return None if policy == "fp32" else f'"{policy}"', policy == "fp16"
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
