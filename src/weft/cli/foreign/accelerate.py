"""What `weft config import` takes over of a configuration of Accelerate, and the lines for the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from weft.checks import import_extra
from weft.cli.foreign.megatron import from_megatron
from weft.errors import ContextError

_PRECISIONS = frozenset({"bf16", "fp16", "fp8"})
_MEANINGLESS = frozenset({"compute_environment", "main_training_function", "use_cpu", "same_network", "rdzv_backend"})
_TAKEN = frozenset(
    {"num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "max_restarts", "debug"}
)
# The order in which calls stand in a program, and what each assigns.
_ASSIGNED = MappingProxyType(
    {"start": "ctx = "}
    | dict.fromkeys(("with_precision", "recompute", "tensor_parallel", "context_parallel"), "model, ctx = ")
    | dict.fromkeys(("expert_parallel", "pipeline", "replicate", "fully_shard"), "model, ctx = ")
    | {"AdamW": "optimizer = ", "skip_nonfinite": "optimizer, ctx = "}
    | {"zero_partition": "model, optimizer, ctx = ", "compile": "model, ctx = "}
    | {"DataLoader": "loader = ", "shard_data": "loader, ctx = ", "accumulate_grads": "model, windows, ctx = "}
    | dict.fromkeys(("clip_grads", "restore", "save"), "")
)


def from_accelerate(values: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], list[str], list[str]]:
    """Take over what configuration of Accelerate means the same here.

    Args:
        values: The content of its YAML file.

    Returns:
        The two tables; the calls in the program; and what is left.

    Example:
        >>> from_accelerate({"num_processes": 8, "num_machines": 2, "machine_rank": 0, "mixed_precision": "bf16"})
        ({'launch': {'nproc': 4, 'nnodes': 2, 'node_rank': 0}, 'start': {}}, \
["weft.with_precision(model, ctx, 'bf16')"], [])
    """
    launch: dict[str, Any] = {}
    start: dict[str, Any] = {}
    machines = values.get("num_machines") or 1
    processes = values.get("num_processes")
    if type(processes) is int and type(machines) is int and machines >= 1:
        launch["nproc"] = max(processes // machines, 1)
        launch["nnodes"] = machines
    if machines != 1 and values.get("machine_rank") is not None:
        launch["node_rank"] = values["machine_rank"]
    if machines != 1 and values.get("main_process_ip"):
        launch["rdzv"] = f"{values['main_process_ip']}:{values.get('main_process_port') or 29500}"
    if values.get("max_restarts") is not None:
        launch["max_restarts"] = values["max_restarts"]
    if _is_true(values.get("use_cpu")):
        start["device"] = "cpu"
    if _is_true(values.get("debug")):
        start["debug"] = True
    known = (
        _TAKEN | _MEANINGLESS | set(_TABLES) | {"mixed_precision", "gradient_accumulation_steps", "distributed_type"}
    )
    left = [f"{key} = {value}" for key, value in values.items() if key not in known and value not in _EMPTY]
    calls = calls_of(values)
    if 'engine="deepspeed"' in " ".join(calls) and values.get("mixed_precision") == "fp16":
        left.append("mixed_precision = fp16: DeepSpeed cannot scale a loss that is not its own, so it is bf16 here")
    return {"launch": launch, "start": start}, calls, left


_EMPTY: Sequence[object] = (None, "NO", "no", {}, [], False)


def calls_of(values: Mapping[str, Any]) -> list[str]:
    """The calls that a configuration means, in their order.

    Args:
        values: The content of a YAML file of Accelerate, or some keys of it.

    Returns:
        Calls on `model`, `optimizer`, `loader` and `ctx`; `program` makes lines of them.
    """
    calls: dict[str, str] = {}
    for key, (prefix, table) in _TABLES.items():
        given = values.get(key)
        if isinstance(given, Mapping):
            for call in table({str(name).removeprefix(prefix): value for name, value in given.items()}):
                calls.setdefault(_name_of(call), call)
    steps, precision = values.get("gradient_accumulation_steps"), values.get("mixed_precision")
    if type(steps) is int and steps > 1:
        calls["accumulate_grads"] = f"weft.accumulate_grads(model, loader, ctx, steps={steps})"
    if precision in _PRECISIONS:
        scaled = precision == "fp16" and "deepspeed" not in calls.get("zero_partition", "")
        policy = "bf16" if precision == "fp16" and not scaled else precision
        calls["with_precision"] = f"weft.with_precision(model, ctx, {policy!r})"
        if scaled:
            calls["skip_nonfinite"] = "weft.skip_nonfinite(optimizer, ctx)"
    several = values.get("distributed_type") in ("MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU")
    if several and not calls.keys() & {"replicate", "fully_shard", "zero_partition"}:
        calls["replicate"] = "weft.replicate(model, ctx)"
    return sorted(calls.values(), key=_place)


def program(calls: Iterable[str]) -> list[str]:
    """Lines of a program: calls in their order, each with what it returns.

    Example:
        >>> program(["weft.fully_shard(model, ctx)", "weft.with_precision(model, ctx, 'bf16')"])
        ["model, ctx = weft.with_precision(model, ctx, 'bf16')", 'model, ctx = weft.fully_shard(model, ctx)']
    """
    return [_ASSIGNED[_name_of(call)] + call for call in sorted(calls, key=_place)]


def _place(call: str) -> int:
    """Where a call stands among others."""
    return list(_ASSIGNED).index(_name_of(call))


def _name_of(call: str) -> str:
    return call.partition("(")[0].rpartition(".")[2]


def _fsdp(found: Mapping[str, Any]) -> list[str]:
    """The calls for the configuration of FSDP, version 1 or 2."""
    strategy = str(found.get("sharding_strategy", found.get("reshard_after_forward", "")))
    if strategy in ("NO_SHARD", "4"):
        return ["weft.replicate(model, ctx)"]
    options: list[str] = []
    policy = str(found.get("auto_wrap_policy") or "").upper()
    classes = found.get("transformer_layer_cls_to_wrap") or ()
    names = [name.strip() for name in (classes.split(",") if isinstance(classes, str) else classes)]
    least = found.get("min_num_params")
    if names and policy in ("", "TRANSFORMER_BASED_WRAP"):
        options.append(f"units={json.dumps(names if len(names) > 1 else names[0])}")
    elif least and policy in ("", "SIZE_BASED_WRAP"):
        options.append(f"units={int(float(least))}")
    if strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2", "2", "5") or strategy.lower() == "false":
        options.append("reshard_after_forward=False")
    if _is_true(found.get("offload_params")):
        options.append("offload=True")
    lines = [f"weft.fully_shard({', '.join(['model', 'ctx', *options])})"]
    if strategy.startswith("HYBRID"):
        lines.insert(0, 'weft.start(mesh={"replica": -1, "shard": torch.accelerator.device_count()})')
    if _is_true(found.get("activation_checkpointing")):
        blocks = [f", blocks={each.partition('=')[2]}" for each in options if each.startswith("units=")]
        lines.insert(-1, f"weft.recompute(model, ctx{''.join(blocks)})")
    return lines


def _deepspeed(values: Mapping[str, Any]) -> list[str]:
    """The calls for the configuration of DeepSpeed."""
    file, stage = values.get("deepspeed_config_file"), values.get("zero_stage", 2)
    if stage == 0:
        return ["weft.replicate(model, ctx)"]
    given = f"stage={stage}"
    if file:
        given = f'stage={_stage_in(Path(str(file)), stage)}, engine="deepspeed", config={str(file)!r}'
    else:
        places = {str(values.get(f"offload_{what}_device") or "none") for what in ("optimizer", "param")} - {"none"}
        if places:
            disk = values.get("offload_optimizer_nvme_path") or values.get("offload_param_nvme_path") or "/nvme"
            given += f', engine="deepspeed", offload={str(disk) if "nvme" in places else "cpu"!r}'
    lines = [f"weft.zero_partition(model, optimizer, ctx, {given})"]
    steps, norm = values.get("gradient_accumulation_steps"), values.get("gradient_clipping")
    lines += [] if steps in (None, 1, "auto") else [f"weft.accumulate_grads(model, loader, ctx, steps={steps})"]
    lines += [] if norm in (None, "auto") else [f"weft.clip_grads(model, ctx, max_norm={norm})"]
    return lines


def _stage_in(file: Path, otherwise: object) -> object:
    """The stage in a configuration of DeepSpeed itself."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))["zero_optimization"]["stage"]
    except (OSError, ValueError, LookupError, TypeError):
        return otherwise


def _dynamo(found: Mapping[str, Any]) -> list[str]:
    """The call for the configuration of torch.compile."""
    options = [] if not found.get("backend") else [f"backend={str(found['backend']).lower()!r}"]
    options += [f"mode={found['mode']!r}"] if found.get("mode") not in (None, "default") else []
    options += [f"{name}=True" for name in ("fullgraph", "dynamic") if _is_true(found.get(f"use_{name}"))]
    off = str(found.get("backend", "no")).upper() == "NO"
    return [] if off else [f"weft.compile({', '.join(['model', 'ctx', *options])})"]


def _parallelism(found: Mapping[str, Any]) -> list[str]:
    """The mesh and the calls for the axes of a `ParallelismConfig`."""
    axes = {"replica": "dp_replicate", "shard": "dp_shard", "context": "cp", "sequence": "sp", "tensor": "tp"}
    sizes = {ours: int(found.get(f"{theirs}_size") or 1) for ours, theirs in axes.items()}
    heads = sizes.pop("sequence")  # Ulysses is context parallelism by heads
    sizes["context"] *= heads
    lines = [f"weft.start(mesh={ {axis: size for axis, size in sizes.items() if size > 1} or {'data': -1} })"]
    lines += ["weft.tensor_parallel(model, ctx)"] if sizes["tensor"] > 1 else []
    method = "heads" if heads > 1 else "gather"
    lines += [f"weft.context_parallel(model, ctx, method={method!r})"] if sizes["context"] > 1 else []
    return [*lines, f"weft.{'fully_shard' if sizes['shard'] > 1 else 'replicate'}(model, ctx)"]


_MEGATRON = MappingProxyType(
    {
        "tp_degree": "tensor_model_parallel_size",
        "pp_degree": "pipeline_model_parallel_size",
        "sequence_parallelism": "sequence_parallel",
        "gradient_clipping": "clip_grad",
    }
)


def _megatron(found: Mapping[str, Any]) -> list[str]:
    """The mesh and the calls for the configuration of Megatron-LM."""
    given = {_MEGATRON.get(key, key): True if _is_true(value) else value for key, value in found.items()}
    tables, calls, _ = from_megatron(given)
    return [f"weft.start(mesh={tables['start']['mesh']})", *calls]


def _is_true(value: object) -> bool:
    return str(value).lower() in ("true", "1", "yes")


# What the names of a table may begin with, and the calls for the table.
_TABLES: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], list[str]]]] = MappingProxyType(
    {
        "fsdp_config": ("fsdp_", _fsdp),
        "deepspeed_config": ("", _deepspeed),
        "dynamo_config": ("dynamo_", _dynamo),
        "parallelism_config": ("parallelism_config_", _parallelism),
        "megatron_lm_config": ("megatron_lm_", _megatron),
    }
)


def yaml_of(path: Path) -> Mapping[str, Any]:
    """The content of a YAML file.

    Raises:
        MissingExtra: PyYAML is not installed.
        ContextError: It cannot be read, or is something else.
    """
    problem = "config: YAML files are read with PyYAML, which is not installed"
    yaml = import_extra("yaml", problem, expected="the package pyyaml", extra="config")
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        found = error
    if not isinstance(found, dict):
        raise ContextError(
            f"config: {path} cannot be converted",
            found=f"{type(found).__name__}: {found!s:.200}",
            expected="a YAML file of Accelerate or of Megatron-LM, or a script with its arguments",
            fix="weft config import ~/.cache/huggingface/accelerate/default_config.yaml",
        )
    return found
