"""Precision and strategies: plugins, keywords and configuration files as calls of weft."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import libcst as cst

from weft.cli.foreign.accelerate import calls_of
from weft_migrate.draft import Left, ScriptDraft, literal
from weft_migrate.script import Expression, Given, code, dotted, elements, given, joined, operand

_COMPRESSED = MappingProxyType({"FP16": "torch.float16", "BF16": "torch.bfloat16"})
_SCALING = MappingProxyType(
    {"init_scale": "init", "growth_factor": "growth", "backoff_factor": "backoff", "growth_interval": "growth_every"}
)
_STRATEGIES = frozenset({"replicate", "fully_shard", "zero_partition", "local_steps"})
_OF_MODELS = _STRATEGIES | {"start", "recompute", "tensor_parallel", "context_parallel", "expert_parallel", "compile"}
SETTINGS = ("strategy", "fsdp_plugin", "deepspeed_plugin")
_SAID_ELSEWHERE = frozenset({"accumulate_grads", "skip_nonfinite"})
_PLUGINS = MappingProxyType({"FullyShardedDataParallelPlugin": "fsdp_config", "DeepSpeedPlugin": "deepspeed_config"})
FABRIC_STRATEGIES = frozenset({"DDPStrategy", "DeepSpeedStrategy", "FSDPStrategy"})
MODEL_MAKERS = FABRIC_STRATEGIES | set(_PLUGINS)
_KNOWN = re.compile(r"auto|dp|ddp.*|single_device|fsdp.*|deepspeed.*", re.IGNORECASE)


class TransformCall(NamedTuple):
    """A transform of a model, or `start`.

    Attributes:
        name: Of the function.
        options: The text of its keyword arguments.
    """

    name: str
    options: str = ""


class Prepared(NamedTuple):
    """What one `prepare` gets.

    Attributes:
        node: The call.
        models: Their names, and what is given for them.
        optimizers: Likewise.
        ctx: The text of the context.
    """

    node: cst.Call
    models: Mapping[str, str]
    optimizers: Mapping[str, str]
    ctx: str


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
    script = draft.script
    branches: list[Branch] = []
    for name in SETTINGS:
        value = script.settings.get(name)
        found = script.choices(value) if value else []
        calls = {each: made for each in found if (made := of_value(draft, each, node)) is not None}
        if name in script.uncertain or len(calls) < len(found):
            return None
        several = {tuple(made) for made in calls.values()}
        if len(several) > 1 and value:
            tests = _tests(draft, value, found)
            if not tests or any(call.name == "start" for each in several for call in each):
                return None
            branches += [Branch(test, made) for test, made in zip(tests, calls.values(), strict=True) if made]
            if isinstance(value, cst.IfExp) and () not in several:
                return [*branches[:-1], Branch("", branches[-1].calls)]
        elif several - {()}:
            return [*branches, Branch("", calls[found[0]])]
    return [*branches, Branch("", [] if script.is_fabric else _configured(draft, {}, node))]


def _tests(draft: ScriptDraft, value: Expression, choices: Sequence[cst.CSTNode]) -> list[str]:
    """The conditions under which a setting has each of its values; none where the script cannot ask for them."""
    script = draft.script
    if not all(draft.script.sees(value, call) for call in script.prepares()):
        return []
    if isinstance(value, cst.IfExp):
        return [operand(value.test), f"not {operand(value.test)}"] if len(choices) == 2 else []
    makers = [script.made(each)[0] for each in choices if isinstance(each, cst.Call)]
    if not dotted(value) or len(set(makers)) < len(makers):
        return []
    values = [f'"{script.made(each)[0]}"' if isinstance(each, cst.Call) else code(each) for each in choices]
    return [f"{dotted(value)} == {each}" if script.is_fabric else dotted(value) for each in values]


def labels(draft: ScriptDraft) -> dict[cst.CSTNode, str]:
    """What stands for the calls that make a strategy under a condition: the variable that has it is asked later."""
    script = draft.script
    values = [script.settings[name] for name in SETTINGS if dotted(script.settings.get(name))]
    calls = [each for value in values for each in script.choices(value) if isinstance(each, cst.Call)]
    is_choice = len(strategies(draft) or []) > 1
    return {each: f'"{script.made(each)[0]}"' if script.is_fabric else "True" for each in calls if is_choice}


def always(draft: ScriptDraft) -> list[TransformCall]:
    """The calls of a strategy that is the same in every run; empty otherwise."""
    branches = strategies(draft) or []
    return branches[0].calls if len(branches) == 1 else []


def of_value(draft: ScriptDraft, value: cst.CSTNode, node: cst.CSTNode | None = None) -> list[TransformCall] | None:
    """The calls for one value of a setting; None if it is not known."""
    kind, made = draft.script.made(value)
    lost(draft, node, kind, made)
    if kind in _PLUGINS:
        names = draft.script.library.plugins
        config = {names.get(each) or each: literal(value) for each, value in made.keywords.items()}
        return _configured(draft, {_PLUGINS[kind]: config}, node)
    name = kind if kind in FABRIC_STRATEGIES else literal(value) if isinstance(value, cst.SimpleString) else ""
    if isinstance(name, str) and _KNOWN.fullmatch(name):
        return _of_fabric(draft, name, made.keywords)
    return [] if dotted(value) == "None" else None


def _configured(
    draft: ScriptDraft, more: Mapping[str, Mapping[str, object]], node: cst.CSTNode | None
) -> list[TransformCall]:
    """The calls for a configuration file of Accelerate, and for a plugin."""
    found: list[TransformCall] = []
    for call in calls_of({**draft.config, **more, "mixed_precision": None}):
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


def _of_fabric(draft: ScriptDraft, name: str, keywords: Mapping[str, Expression]) -> list[TransformCall]:
    """The calls for `strategy=` of Fabric."""
    if name.startswith(("fsdp", "FSDP")):
        return _fsdp_of_fabric(draft, keywords, offload="offload" in name)
    if name.startswith(("deepspeed", "DeepSpeed")):
        stage = re.search(r"\d", name)
        level = stage[0] if stage else literal(keywords.get("stage")) or 2
        more = ', engine="deepspeed", offload="cpu"' if "offload" in name else ""
        return [TransformCall("zero_partition", f"stage={level}{more}")]
    unused = name.endswith("find_unused_parameters_true")
    unused |= literal(keywords.get("find_unused_parameters")) is True
    return [TransformCall("replicate", 'unused="zero"')] if unused else []


def _fsdp_of_fabric(draft: ScriptDraft, keywords: Mapping[str, Expression], *, offload: bool) -> list[TransformCall]:
    units = _classes(draft, keywords.get("auto_wrap_policy"))
    blocks = _classes(draft, keywords.get("activation_checkpointing_policy"))
    sharding = str(literal(keywords.get("sharding_strategy")) or "")
    offload |= literal(keywords.get("cpu_offload")) is True
    options = joined(
        units and f"units={units}",
        "reshard_after_forward=False" if "GRAD_OP" in sharding or "ZERO2" in sharding else "",
        "offload=True" if offload else "",
    )
    mesh = 'mesh={"replica": -1, "shard": torch.accelerator.device_count()}'
    calls = [TransformCall("start", mesh)] if sharding.startswith("HYBRID") else []
    calls += [TransformCall("recompute", f"blocks={blocks}")] if blocks else []
    return [*calls, TransformCall("fully_shard", options)]


def _classes(draft: ScriptDraft, given_policy: Expression | None) -> str:
    """The classes in a policy of Fabric, or of `transformer_auto_wrap_policy`; empty if it is something else."""
    policy = given_policy and draft.script.value(given_policy)
    if isinstance(policy, cst.Call):
        return _classes(draft, given(policy).keywords.get("transformer_layer_cls"))
    texts = list(map(code, elements(policy))) if isinstance(policy, (cst.Set, cst.Name)) else []
    return f"[{', '.join(texts)}]" if len(texts) > 1 else "".join(texts)


def model_lines(draft: ScriptDraft, of: Prepared) -> list[str]:
    """The lines for the models and optimizers of one `prepare`."""
    branches = strategies(draft, of.node)
    if draft.policy and not draft.reaches(draft.policy, of.node):
        branches = None
    if branches is None and of.models:
        given_now = [*of.models.values(), *of.optimizers.values()]
        draft.left(of.node, _to_paste(draft, of))
        return [f"{', '.join([*of.models, *of.optimizers])} = {code(of.node.func)}({', '.join(given_now)})"]
    if not branches or not of.models or len(branches) == 1:
        return _lines_of(draft, of, branches[0].calls if branches else [])
    lines: list[str] = []
    for branch in branches:
        head = f"{'elif' if lines else 'if'} {branch.test}:" if branch.test else "else:"
        lines += [head, *(f"    {each}" for each in _lines_of(draft, of, branch.calls))]
    return lines


def _to_paste(draft: ScriptDraft, of: Prepared) -> str:
    """The lines to choose from, for a strategy that is not known before the run."""
    script = draft.script
    made = [call for call in script.every(cst.Call) if script.original(call.func) in MODEL_MAKERS]
    settings = [code(script.settings[name]) for name in SETTINGS if name in script.settings]
    choices = [(script.original(call.func), of_value(draft, call) or []) for call in made]
    lines = [f"{script.library.name} learns from {', '.join(settings)} what to do, when it runs. Write what you need:"]
    for kind, calls in choices or [('"fsdp"', [TransformCall("fully_shard")])]:
        is_zero = any(call.name == "zero_partition" for call in calls)
        mine = of.optimizers or ({"optimizer": "optimizer"} if is_zero else {})
        lines.append(f"{'if' if len(lines) == 1 else 'elif'} ...:  # {kind}")
        lines += [f"    {line}" for line in _lines_of(draft, of._replace(optimizers=mine), calls)]
    return "\n".join([*lines, "else:", *(f"    {line}" for line in _lines_of(draft, of, []))])


def _lines_of(draft: ScriptDraft, of: Prepared, transforms: Sequence[TransformCall]) -> list[str]:
    """The lines for one strategy."""
    ctx, wish = of.ctx, precision(draft, of.node)
    calls = [call for call in transforms if call.name != "start"]
    if any('engine="deepspeed"' in call.options for call in calls) and wish and wish.name == "fp16":
        wish = Wish('"bf16"')
        draft.check(of.node, "bf16: DeepSpeed cannot scale a loss that is not its own")
    if not any(call.name in _STRATEGIES for call in calls):
        local = [_local_steps(draft, of, each) for each in draft.script.local_sgd]
        calls += local[:1] or [TransformCall("replicate", _replicate_options(draft, of.node))]
        calls.sort(key=lambda call: call.name == "compile")
    asked = any(draft.script.method(n) == "optimizer_step_was_skipped" for n in draft.script.parents)
    scales = "" if asked else wish.scales if wish else None
    skips = [f"{name}, {ctx} = weft.skip_nonfinite({name}, {ctx})" for name in of.optimizers if scales is not None]
    skips = _under(scales or "", skips)
    lines = [f"{name} = {value}" for name, value in of.optimizers.items() if name != value]
    split: list[str] = []
    for n, (name, value) in enumerate(of.models.items()):
        given_now = value
        if wish:
            lines += [f"{name} = {value}"] if wish.test and name != value else []
            made = f"{name}, {ctx} = weft.with_precision({name if wish.test else value}, {ctx}, {{}})"
            lines += _under(wish.test, [made.replace("{}", wish.policy)])
            lines += ["else:", f"    {made.replace('{}', wish.otherwise)}"] if wish.otherwise else []
            given_now = name
        optimizers = list(of.optimizers)
        mine = [optimizers[n]] if len(of.models) == len(optimizers) else optimizers
        for call in calls:
            split.append(_line(draft, of, call, [name, *mine], given_now))
            given_now = name
    is_zero = any(call.name == "zero_partition" for call in calls)
    return [*lines, *skips, *split] if is_zero else [*lines, *split, *skips]


def _line(draft: ScriptDraft, of: Prepared, call: TransformCall, names: Sequence[str], value: str) -> str:
    """One call for one model: its name and those of its optimizers, and what is given for the model."""
    (function, options), (model, *optimizers) = call, names
    objects = [model]
    if function in ("zero_partition", "local_steps") and len(optimizers) == 1:
        objects += optimizers
    elif function == "zero_partition":
        line = f"model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, {options})"
        draft.check(of.node, f"{line}: for one model with its optimizer")
        function, options = "replicate", ""
    elif function == "fully_shard" and optimizers:  # they were made of the parameters before
        several = f"[{', '.join(optimizers)}]"
        options = joined(options, f"rebind={optimizers[0] if len(optimizers) == 1 else several}")
    return f"{', '.join(objects)}, {of.ctx} = weft.{function}({joined(value, *objects[1:], of.ctx, options)})"


def _reduce(draft: ScriptDraft, node: cst.CSTNode) -> str | None:
    """In which dtype the hook of DDP sends gradients, as text; a hook that is chosen at run time has its value."""
    hook = draft.handler("DistributedDataParallelKwargs", node).get("comm_hook")
    kind, made = draft.script.made(hook)
    if kind == "DDPCommunicationHookType" and made.args:
        return f'{{"fp16": torch.float16, "bf16": torch.bfloat16}}.get({code(made.args[0])})'
    return _COMPRESSED.get(dotted(hook).rpartition(".")[2])


class Wish(NamedTuple):
    """What a model is computed in.

    Attributes:
        policy: As text.
        test: The text of the condition under which it is; empty for "in every run".
        otherwise: The policy in other runs; empty for none.
        scales: The condition under which it is fp16; empty for "in every run", None for "never".
        name: Its name, if there is only one.
    """

    policy: str
    test: str = ""
    otherwise: str = ""
    scales: str | None = None
    name: str = ""


def precision(draft: ScriptDraft, node: cst.CSTNode) -> Wish | None:
    """What a model is computed in that is prepared at a node; None if it stays as it is."""
    script, plain = draft.script, "fp32" if draft.script.is_fabric else "no"
    value, here = draft.setting("mixed_precision"), draft.seen("mixed_precision", node)
    if script.is_fabric:
        policy = script.library.precisions.get(str(literal(script.settings.get("precision"))), plain)
        value = here = cst.Name(draft.policy) if draft.policy else cst.SimpleString(f'"{policy}"')
    if value is not None and here is None:
        raise Left(f"mixed_precision is not known here: {draft.hint('mixed_precision')}; ")
    names = set(_names(script.choices(value), plain)) if value else {plain}
    changes = f"reduce={reduce}" if (reduce := _reduce(draft, node)) else ""
    otherwise = f"weft.Precision({changes})" if changes else ""
    if here is None or names == {plain}:
        return Wish(otherwise, name=plain) if changes else None
    text, whole, is_fp16 = code(here), operand(here), f'{operand(here)} == "fp16"'
    test = f'{whole} != "{plain}"' if draft.policy or "" not in names else f'{whole} not in (None, "no")'
    kinds = _names([here.body, here.orelse], plain) if isinstance(here, cst.IfExp) else []
    if isinstance(here, cst.IfExp) and plain in kinds and "" not in kinds:  # `"bf16" if args.bf16 else "no"`
        text = code(here.orelse if kinds[0] == plain else here.body)
        test = is_fp16 = f"{'not ' if kinds[0] == plain else ''}{operand(here.test)}"
    test = test if names & {plain, ""} else ""
    scales = (is_fp16 if len(names) > 1 or "" in names else "") if names & {"fp16", ""} else None
    scaler = draft.handler("GradScalerKwargs", node).items()
    scaling = joined(*(f"{_SCALING[name]}={code(value)}" for name, value in scaler if name in _SCALING))
    if scaling and scales is not None:
        only = f" if {scales} else None" if scales else ""
        changes = joined(changes, f"scaling=weft.precision.LossScaling({scaling}){only}")
    policy = f"dataclasses.replace(weft.precision.named_policy({text}), {changes})" if changes else text
    return Wish(policy, test, otherwise if test else "", scales, max(names) if len(names) == 1 else "")


def _names(values: Sequence[cst.CSTNode], plain: str) -> list[str]:
    """What literals say; empty for anything else."""
    texts = [str(literal(each)) if isinstance(each, cst.SimpleString) else "" for each in values]
    return [plain if dotted(each) == "None" else text for each, text in zip(values, texts, strict=True)]


def _under(test: str, lines: Sequence[str]) -> list[str]:
    """Lines under a condition, if there is one."""
    return [f"if {test}:", *(f"    {each}" for each in lines)] if test and lines else list(lines)


def _local_steps(draft: ScriptDraft, of: Prepared, call: cst.Call) -> TransformCall:
    every = given(call).named("accelerator", "model", "local_sgd_steps").get("local_sgd_steps")
    if every is None or not draft.script.sees(every, of.node) or not len(of.models) == len(of.optimizers) == 1:
        raise Left(f"{draft.script.library.hints['LocalSGD']}; ")
    return TransformCall("local_steps", f"every={code(every)}")


def _replicate_options(draft: ScriptDraft, node: cst.CSTNode) -> str:
    rows, options = draft.script.library.replicate, list[str]()
    for name, value in draft.handler("DistributedDataParallelKwargs", node).items():
        last = code(value).rpartition(".")[2]
        row = rows.get(f"{name}={last}", rows.get(f"{name}="))
        if row is None:
            draft.check(value, draft.hint(name, f"{name}: not taken over"))
        else:
            options.append(row.format(code(value)))
    return joined(*options)
