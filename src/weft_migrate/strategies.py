"""Precision and strategies: plugins, keywords and configuration files as calls of weft."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import libcst as cst

from weft.cli.foreign.accelerate import calls_of
from weft_migrate.draft import Draft, literal
from weft_migrate.script import Given, code, dotted, elements

_COMPRESSED = MappingProxyType({"FP16": "torch.float16", "BF16": "torch.bfloat16"})
_POLICIES = MappingProxyType(  # of Fabric
    {"bf16-mixed": "bf16", "16-mixed": "fp16", "bf16-true": "bf16-true", "16-true": "fp16-true", "64-true": "fp64"}
    | {"bf16": "bf16", "16": "fp16", "64": "fp64", "transformer-engine": "fp8", "32": "no", "32-true": "no"}
)
# Keywords of plugins that have another name in a configuration file.
_FILE_NAMES = MappingProxyType(
    {
        "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
        "cpu_offload": "offload_params",
        "hf_ds_config": "deepspeed_config_file",
    }
)
_SCALING = MappingProxyType(
    {"init_scale": "init", "growth_factor": "growth", "backoff_factor": "backoff", "growth_interval": "growth_every"}
)
_OF_MODELS = frozenset(
    {"start", "recompute", "tensor_parallel", "context_parallel", "expert_parallel"}
    | {"replicate", "fully_shard", "zero_partition", "compile"}
)
_PLUGINS = MappingProxyType(
    {
        "fsdp_plugin": ("FullyShardedDataParallelPlugin", "fsdp_config"),
        "deepspeed_plugin": ("DeepSpeedPlugin", "deepspeed_config"),
    }
)
# What plugins say that is about memory, speed or files of Accelerate alone.
_NO_MEANING = frozenset(
    {"state_dict_type", "state_dict_config", "optim_state_dict_config", "use_orig_params", "limit_all_gathers"}
    | {"backward_prefetch", "forward_prefetch", "sync_module_states", "cpu_ram_efficient_loading", "fsdp_version"}
    | {"zero3_init_flag", "zero3_save_16bit_model", "process_group_backend", "timeout", "gradient_as_bucket_view"}
)
_POLICIES_OF_FABRIC = frozenset({"auto_wrap_policy", "activation_checkpointing_policy"})
_TAKEN = frozenset(
    {"sharding_strategy", "reshard_after_forward", "auto_wrap_policy", "min_num_params", "activation_checkpointing"}
    | {"zero_stage", "stage", "offload_optimizer_device", "offload_param_device", "find_unused_parameters"}
    | {"offload_optimizer_nvme_path", "offload_param_nvme_path", "gradient_accumulation_steps", "gradient_clipping"}
    | _FILE_NAMES.keys()
)


def strategy(draft: Draft, node: cst.CSTNode | None = None) -> list[str]:
    """The calls for models, from `recompute` to `compile`; empty for plain `replicate`.

    Args:
        draft: The translation.
        node: Where something is said about what is not taken over, if it is.
    """
    if draft.script.is_fabric:
        return _of_fabric(draft, node)
    values = dict(draft.config)
    for setting, (kind, key) in _PLUGINS.items():
        name, given = draft.script.made(draft.script.settings.get(setting))
        if name == kind:
            values[key] = {_FILE_NAMES.get(each, each): literal(value) for each, value in given.keywords.items()}
            _lost(draft, node, kind, given)
    calls = calls_of({key: value for key, value in values.items() if key not in ("mixed_precision", "debug")})
    chosen = [call for call in calls if call.partition("(")[0].removeprefix("weft.") in _OF_MODELS]
    for call in calls:
        said = call in chosen or "accumulate_grads" in call or "skip_nonfinite" in call
        if node and not said:
            draft.check(node, f"to add: {call}")
    return [call.partition("  #")[0] for call in chosen]


def _lost(draft: Draft, node: cst.CSTNode | None, kind: str, given: Given) -> None:
    """List the arguments that are not taken over."""
    policies = {name for name, value in given.keywords.items() if isinstance(value, (cst.Set, cst.Name))}
    taken = {name for name, value in given.keywords.items() if name in _TAKEN and literal(value) is not None}
    lost = given.keywords.keys() - _NO_MEANING - taken - (policies & _POLICIES_OF_FABRIC)
    if lost and node:
        texts = (f"{name}={code(given.keywords[name])}" for name in sorted(lost))
        draft.check(node, f"{kind}: {', '.join(texts)} is not taken over")


def _of_fabric(draft: Draft, node: cst.CSTNode | None) -> list[str]:
    """The calls for `strategy=` of Fabric."""
    given = draft.script.settings.get("strategy")
    kind, arguments = draft.script.made(given)
    _lost(draft, node, kind, arguments)
    name = kind or str(literal(given) or "")
    stage = re.search(r"(?i)deepspeed.*?_(\d)", name)
    if stage or kind == "DeepSpeedStrategy":
        level = stage[1] if stage else str(literal(arguments.keywords.get("stage")) or 2)
        more = ', engine="deepspeed", offload="cpu"' if "offload" in name else ""
        return [f"weft.zero_partition(model, optimizer, ctx, stage={level}{more})"]
    if name.startswith("fsdp") or kind == "FSDPStrategy":
        return _fsdp_of_fabric(arguments, offload="offload" in name)
    unused = name.endswith("find_unused_parameters_true")
    unused |= literal(arguments.keywords.get("find_unused_parameters")) is True
    return ['weft.replicate(model, ctx, unused="zero")'] if unused else []


def _fsdp_of_fabric(arguments: Given, *, offload: bool) -> list[str]:
    keywords, calls = arguments.keywords, []
    units = {
        name: ", ".join(map(code, elements(keywords[name])))
        for name in _POLICIES_OF_FABRIC
        if name in keywords and isinstance(keywords[name], (cst.Set, cst.Name))
    }
    units = {name: f"[{each}]" if "," in each else each for name, each in units.items()}
    sharding = str(literal(keywords.get("sharding_strategy")) or "")
    if sharding.startswith("HYBRID"):
        calls.append('weft.start(mesh={"replica": -1, "shard": torch.accelerator.device_count()})')
    if "activation_checkpointing_policy" in units:
        calls.append(f"weft.recompute(model, ctx, blocks={units['activation_checkpointing_policy']})")
    options = f", units={units['auto_wrap_policy']}" if "auto_wrap_policy" in units else ""
    options += ", reshard_after_forward=False" if "GRAD_OP" in sharding or "ZERO2" in sharding else ""
    options += ", offload=True" if offload or literal(keywords.get("cpu_offload")) is True else ""
    return [*calls, f"weft.fully_shard(model, ctx{options})"]


def model_lines(
    draft: Draft, node: cst.CSTNode, models: Mapping[str, str], optimizers: Mapping[str, str], ctx: str
) -> list[str]:
    """The lines for models and optimizers of one `prepare`: names, and what is given for them."""
    split, calls, (policy, may_scale) = [], strategy(draft, node), precision(draft)
    if any('engine="deepspeed"' in call for call in calls) and policy == '"fp16"':
        policy, may_scale = '"bf16"', False
        draft.check(node, "bf16: DeepSpeed cannot scale a loss that is not its own")
    calls = [call for call in calls if not call.startswith("weft.start(")]
    if not any(f"weft.{each}(" in call for call in calls for each in ("replicate", "fully_shard", "zero_partition")):
        compiles = [call for call in calls if "weft.compile(" in call]
        rest = [call for call in calls if call not in compiles]
        calls = [*rest, f"weft.replicate(model, ctx{_replicate_options(draft)})", *compiles]
    taken = {name: given for name, given in optimizers.items() if name != given}
    lines = [f"{name} = {given}" for name, given in taken.items()]
    asked = any(draft.script.method(n) == "optimizer_step_was_skipped" for n in draft.script.parents)
    skips = [f"{name}, {ctx} = weft.skip_nonfinite({name}, {ctx})" for name in optimizers if may_scale or asked]
    is_zero = any("weft.zero_partition(" in call for call in calls)
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
    return [*lines, *skips, *split] if is_zero else [*lines, *split, *skips]


def _line(
    draft: Draft, node: cst.CSTNode, call: str, name: str, given: str, optimizers: Sequence[str], ctx: str
) -> str:
    """One call for one model."""
    function, _, options = call.removesuffix(")").partition("(model, ctx")
    if call.startswith("weft.zero_partition("):
        function, _, options = call.removesuffix(")").partition("(model, optimizer, ctx")
        if len(optimizers) == 1:
            return f"{name}, {optimizers[0]}, {ctx} = {function}({given}, {optimizers[0]}, {ctx}{options})"
        draft.check(node, f"model, optimizer, ctx = {call}: for one model with its optimizer")
        function, options = "weft.replicate", ""
    if function == "weft.fully_shard" and optimizers:  # they were made of the parameters before
        several = f"[{', '.join(optimizers)}]"
        options += f", rebind={optimizers[0] if len(optimizers) == 1 else several}"
    return f"{name}, {ctx} = {function}({given}, {ctx}{options})"


def _reduce(draft: Draft) -> str | None:
    """In which dtype the hook of DDP sends gradients, as text; a hook that is chosen at run time has its value."""
    hook = draft.handler("DistributedDataParallelKwargs").get("comm_hook")
    kind, made = draft.script.made(hook)
    if kind == "DDPCommunicationHookType" and made.args:
        return f'{{"fp16": torch.float16, "bf16": torch.bfloat16}}.get({code(made.args[0])})'
    return _COMPRESSED.get(dotted(hook).rpartition(".")[2])


def precision(draft: Draft) -> tuple[str | None, bool]:
    """The policy as text, if there is one, and whether it may be fp16."""
    if draft.script.is_fabric:
        value: Any = literal(draft.script.settings.get("precision"))
        policy = _POLICIES.get(str(value), "no")
        return (None if policy == "no" else f'"{policy}"'), policy == "fp16"
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


def _replicate_options(draft: Draft) -> str:
    options = ""
    for name, value in draft.handler("DistributedDataParallelKwargs").items():
        text = code(value)
        last = text.rpartition(".")[2]
        if name == "find_unused_parameters" and text == "True":
            options += ', unused="zero"'
        elif name == "broadcast_buffers" and text == "False":
            options += ', buffers="local"'
        elif name == "bucket_cap_mb":
            options += f", bucket_bytes={text} * 2**20"
        elif name == "comm_hook" and last in ("POWER_SGD", "BATCHED_POWER_SGD"):
            options += ", compress=weft.precision.PowerSGD()"
        elif name == "comm_hook" and last not in {*_COMPRESSED, "NO"}:
            draft.check(value, "for power_sgd: weft.replicate(model, ctx, compress=weft.precision.PowerSGD())")
        elif name in ("comm_wrapper", "comm_state_option") and last not in ("NO", "{}"):
            draft.check(value, "not taken over")
    return options
