"""What `weft config import` makes of a configuration of Megatron-LM: a mesh, the calls, and what is left over."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

# Outermost first, as Megatron places its groups: ranks of one tensor group are neighbours.
_AXES = MappingProxyType(
    {
        "pipeline": "pipeline_model_parallel_size",
        "data": None,
        "expert": "expert_model_parallel_size",
        "context": "context_parallel_size",
        "tensor": "tensor_model_parallel_size",
    }
)
_SIZES = frozenset(filter(None, _AXES.values()))
_OPTIMIZER = MappingProxyType({"lr": "lr", "weight_decay": "weight_decay", "adam_eps": "eps"})


def is_megatron(values: Mapping[str, Any]) -> bool:
    """Whether a configuration is one of Megatron-LM."""
    return bool(_SIZES & dict(_flat(values)).keys())


def arguments_of(text: str) -> dict[str, Any]:
    """The command-line arguments of Megatron-LM in a text, such as a shell script; an option without a value is True.

    Example:
        >>> arguments_of("torchrun pretrain_gpt.py --tensor-model-parallel-size 2 --bf16 --lr 1e-4")
        {'tensor_model_parallel_size': 2, 'bf16': True, 'lr': 0.0001}
    """
    found: dict[str, Any] = {}
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.removeprefix("--").partition("=")
            given = value if equals else True if following.startswith("--") else following
            found[name.replace("-", "_")] = _number(given)
    return found


def from_megatron(values: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], list[str], list[str]]:
    """Take over what a configuration of Megatron-LM says about parallelism and the training step.

    Source: `megatron/training/arguments.py` of Megatron-LM.

    Args:
        values: Its arguments by name, with underscores; nested tables are read as one.

    Returns:
        The tables for `weft.start` and `weft launch`; the calls, in the order in which a program makes them;
        and a line for every argument that is not taken over.

    Example:
        >>> tables, calls, left = from_megatron({"tensor_model_parallel_size": 2, "bf16": True, "num_layers": 24})
        >>> tables["start"]["mesh"]
        {'data': -1, 'tensor': 2}
        >>> for line in (*calls, *left):
        ...     print(line)
        weft.with_precision(model, ctx, 'bf16')
        weft.tensor_parallel(model, ctx)
        weft.replicate(model, ctx)
        num_layers = 24
    """
    given = _Arguments(values)
    sizes = {axis: given.number(name) if name else -1 for axis, name in _AXES.items()}
    start: dict[str, Any] = {"mesh": {axis: size for axis, size in sizes.items() if size != 1}}
    launch: dict[str, Any] = {}
    for table, ours, theirs, factor in (
        (start, "seed", "seed", 1),
        (start, "timeout_s", "distributed_timeout_minutes", 60),
        (start, "backend", "distributed_backend", 1),
        (launch, "nproc", "nproc_per_node", 1),
        (launch, "nnodes", "nnodes", 1),
    ):
        if (value := given.take(theirs)) is not None:
            table[ours] = value * factor
    calls = [*_model(given, sizes), *_strategy(given), *_step(given, pipeline=sizes["pipeline"] > 1)]
    return {"launch": launch, "start": start}, calls, [f"{key} = {value}" for key, value in given.left.items()]


class _Arguments:
    """Arguments that are taken one after the other.

    Attributes:
        left: Those that were not taken yet.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.left = {key: value for key, value in _flat(values) if value not in (None, False, [], {}, "")}

    def take(self, name: str) -> Any:
        """The value of one; None if it is not given."""
        return self.left.pop(name, None)

    def number(self, name: str) -> int:
        """A number of ranks, 1 if it is not given."""
        return int(self.take(name) or 1)


def _model(given: _Arguments, sizes: Mapping[str, int]) -> Iterator[str]:
    """The calls that change how the model computes."""
    precisions = [name for name in ("bf16", "fp16") if given.take(name)]
    if given.take("accumulate_allreduce_grads_in_fp32") and precisions:
        dtype = "bfloat16" if precisions == ["bf16"] else "float16"
        yield f"weft.with_precision(model, ctx, weft.Precision(compute=torch.{dtype}, reduce=torch.float32))"
    elif precisions:
        yield f"weft.with_precision(model, ctx, {precisions[0]!r})"
    granularity, attention = given.take("recompute_granularity"), given.take("recompute_activations")
    if granularity == "full":
        yield "weft.recompute(model, ctx)"
    elif granularity or attention:
        yield "weft.recompute(model, ctx)  # of whole blocks; Megatron recomputes the attention alone"
    sequence = given.take("sequence_parallel")
    if sizes["tensor"] > 1:
        yield f"weft.tensor_parallel(model, ctx{', sequence=True' if sequence else ''})"
    kind = given.take("cp_comm_type")
    if sizes["context"] > 1:
        method = "heads" if kind in ("a2a", ["a2a"]) else "gather"
        yield f"weft.context_parallel(model, ctx, method={method!r})  # batches: weft.data.split_sequence(batch, ctx)"
    if sizes["expert"] > 1:
        yield "weft.expert_parallel(model, ctx)"
    virtual = given.take("num_layers_per_virtual_pipeline_stage") or given.take("virtual_pipeline_model_parallel_size")
    if sizes["pipeline"] > 1:
        schedule = ', schedule="interleaved_1f1b"' if virtual else ""
        micro, batch = given.left.get("micro_batch_size"), given.left.get("global_batch_size")
        count = f"{batch} // ({micro} * ctx.data_size)" if micro and batch else "8"
        yield f"weft.pipeline(model, ctx, micro_batches={count}{schedule})"


def _strategy(given: _Arguments) -> Iterator[str]:
    """The call that reduces the gradients."""
    fsdp = given.take("use_torch_fsdp2") or given.take("use_megatron_fsdp")
    part = given.take("data_parallel_sharding_strategy") or ("optim_grads_params" if fsdp else "no_shard")
    distributed = given.take("use_distributed_optimizer")
    stages = {"optim_grads_params": 3, "optim_grads": 2, "optim": 1}
    stage = stages.get(part, 1 if distributed else 0)
    bucket = given.take("ddp_bucket_size")
    given.take("overlap_grad_reduce")  # always
    if stage == 3:
        yield "weft.fully_shard(model, ctx)"
    elif stage:
        yield f"weft.zero_partition(model, optimizer, ctx, stage={stage})"
    else:
        size = "" if bucket is None else f", bucket_bytes=4 * {bucket}"
        yield f"weft.replicate(model, ctx{size})"


def _step(given: _Arguments, *, pipeline: bool) -> Iterator[str]:
    """The optimizer, windows and clipping."""
    options = [f"{ours}={value}" for theirs, ours in _OPTIMIZER.items() if (value := given.take(theirs)) is not None]
    betas = [given.take(f"adam_beta{number}") for number in (1, 2)]
    if any(beta is not None for beta in betas):
        first, second = betas
        options.append(f"betas=({0.9 if first is None else first}, {0.999 if second is None else second})")
    if given.left.get("optimizer", "adam") == "adam" and options:
        given.take("optimizer")
        yield f"torch.optim.AdamW(model.parameters(), {', '.join(options)})"
    micro, batch = given.take("micro_batch_size"), given.take("global_batch_size")
    if micro:
        size = f"{batch} // ctx.data_size" if pipeline and batch else f"{micro}"
        yield f"DataLoader(dataset, batch_size={size})"
        yield "weft.shard_data(loader, ctx)"
    if micro and batch and not pipeline:
        yield f"weft.accumulate_grads(model, loader, ctx, steps={batch} // ({micro} * ctx.data_size))"
    if norm := given.take("clip_grad"):
        yield f"weft.clip_grads(model, ctx, max_norm={norm})"
    if folder := given.take("load"):
        yield f"weft.restore(state, {str(folder)!r}, ctx)"
    if folder := given.take("save"):
        yield f"weft.save(state, {str(folder)!r}, step, ctx)"


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield str(key).replace("-", "_"), value


def _number(text: Any) -> Any:
    for kind in (int, float):
        if isinstance(text, str) and re.fullmatch(r"[-+.\deE]+", text):
            try:
                return kind(text)
            except ValueError:
                continue
    return text
