"""What single calls and attributes of Accelerate are in weft: one row each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

__all__ = ["ATTRIBUTES", "FUNCTIONS", "HINTS", "KEYWORDS", "METHODS", "REMARKS", "Template"]


class Template(NamedTuple):
    """A call in weft: `{name}` is the text of an argument; parameters without a default have to be there.

    Attributes:
        text: `{ctx}` is the context.
        parameters: In the order of Accelerate, with the text that stands for one that is not given.
        needs: Module to import.
    """

    text: str
    parameters: Mapping[str, str | None] = MappingProxyType({})
    needs: str = ""


METHODS = MappingProxyType(
    {
        "clip_grad_norm_": Template(
            "torch.nn.utils.clip_grad_norm_({parameters}, {max_norm}, {norm_type})",
            {"parameters": None, "max_norm": None, "norm_type": "2"},
            "torch",
        ),
        "clip_grad_value_": Template(
            "torch.nn.utils.clip_grad_value_({parameters}, {clip_value})",
            {"parameters": None, "clip_value": None},
            "torch",
        ),
        "gather": Template("weft.gather({tensor}, {ctx})", {"tensor": None}),
        "gather_for_metrics": Template("weft.gather({input_data}, {ctx})", {"input_data": None}),
        "reduce": Template("weft.reduce({tensor}, {ctx}, {reduction})", {"tensor": None, "reduction": '"sum"'}),
        "pad_across_processes": Template(
            "weft.collectives.pad_across({tensor}, {ctx}, dim={dim}, fill={pad_index})",
            {"tensor": None, "dim": "0", "pad_index": "0"},
        ),
        "wait_for_everyone": Template("weft.barrier({ctx})"),
        "unwrap_model": Template("{model}", {"model": None, "keep_fp32_wrapper": "", "keep_torch_compile": ""}),
        "get_state_dict": Template("{model}.state_dict()", {"model": None}),
        "end_training": Template("{ctx}.close()"),
        "destroy_process_group": Template("{ctx}.close()"),
        "main_process_first": Template("weft.main_first({ctx})"),
        "local_main_process_first": Template("weft.main_first({ctx}, local=True)"),
        "split_between_processes": Template(
            "contextlib.nullcontext(weft.data.split_between({inputs}, {ctx}, pad={apply_padding}))",
            {"inputs": None, "apply_padding": "False"},
            "contextlib",
        ),
        "no_sync": Template("contextlib.nullcontext()", {"model": None}, "contextlib"),
        "optimizer_step_was_skipped": Template("weft.was_skipped({ctx})"),
        "free_memory": Template("gc.collect()", {}, "gc"),
        "clear": Template("gc.collect()", {}, "gc"),
    }
)

ATTRIBUTES = MappingProxyType(
    {
        "is_main_process": "{ctx}.is_main",
        "is_local_main_process": "{ctx}.is_local_main",
        "is_last_process": "{ctx}.is_last",
        "process_index": "{ctx}.rank",
        "local_process_index": "{ctx}.local_rank",
        "num_processes": "{ctx}.world_size",
        "use_distributed": "{ctx}.world_size > 1",
        "device": "{ctx}.device",
        "print": "{ctx}.print",
        "save": "torch.save",
    }
)

FUNCTIONS = MappingProxyType(
    {
        "gather": METHODS["gather"],
        "reduce": METHODS["reduce"],
        "pad_across_processes": METHODS["pad_across_processes"],
        "gather_object": Template(
            "[each for part in weft.collectives.gather_objects({object}, {ctx}) for each in part]", {"object": None}
        ),
        "broadcast": Template("weft.broadcast({tensor}, {ctx})", {"tensor": None}),
        "get_logger": Template("logging.getLogger({name})", {"name": None}, "logging"),
        "is_cuda_available": Template("torch.cuda.is_available()", {}, "torch"),
        "is_mps_available": Template("torch.backends.mps.is_available()", {}, "torch"),
        "is_xpu_available": Template("torch.xpu.is_available()", {}, "torch"),
        "is_torch_xla_available": Template(
            'importlib.util.find_spec("torch_xla") is not None', {"check_is_tpu": ""}, "importlib.util"
        ),
        "notebook_launcher": Template(
            "weft.launch_function({function}, {num_processes}, *{args})",
            {"function": None, "args": "()", "num_processes": None},
        ),
    }
)

# Translated, but worth a look.
REMARKS = MappingProxyType(
    {
        "gather": "rows of unequal batches are neither padded nor repeated; what requires grad is detached first",
        "gather_for_metrics": "every sample once; detach what requires grad; "
        "weft.metrics.gather_metrics keeps the order",
        "no_sync": "gradients travel in every backward; weft.accumulate_grads sends them once per window",
        "gather_object": "takes numbers, texts, dates, arrays, tensors and containers of them; refuses pictures",
        "get_state_dict": "under fully_shard: with weft.full_params(model, ctx)",
        "get_logger": "prints on all ranks; where there is a context: weft.monitoring.logger(__name__, ctx)",
    }
)

KEYWORDS = MappingProxyType(
    {
        "device_placement": "",
        "project_dir": "",
        "log_with": "",
        "project_config": "",
        "cpu": "",
        "mixed_precision": "",
        "gradient_accumulation_steps": "",
        "gradient_accumulation_plugin": "",
        "dataloader_config": "",
        "kwargs_handlers": "",
        "split_batches": "",
        "dispatch_batches": "",
        "even_batches": "",
        "step_scheduler_with_optimizer": "",
        "fsdp_plugin": "model, ctx = weft.fully_shard(model, ctx, units=[Block]) instead of weft.replicate",
        "deepspeed_plugin": "model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=2)",
        "megatron_lm_plugin": "weft.tensor_parallel, weft.pipeline; `weft config import` reads its settings",
        "parallelism_config": 'weft.start(mesh={"replica": 2, "shard": -1}) and a transform per axis',
        "dynamo_backend": "model, ctx = weft.compile(model, ctx), after weft.replicate",
        "dynamo_plugin": "model, ctx = weft.compile(model, ctx), after weft.replicate",
        "rng_types": "not needed: the order of the data is a function of (seed, epoch)",
    }
)

# Why something stays, and what to write.
HINTS = MappingProxyType(
    {
        "join_uneven_inputs": 'loader, ctx = weft.shard_data(loader, ctx, uneven="join")',
        "on_main_process": 'weft.collectives.on_rank(function, ctx, "main")',
        "on_local_main_process": 'weft.collectives.on_rank(function, ctx, "local_main")',
        "on_last_process": 'weft.collectives.on_rank(function, ctx, "last")',
        "on_process": "weft.collectives.on_rank(function, ctx, rank)",
        "set_trigger": "a variable of your own, and weft.collectives.any_rank(flag, ctx)",
        "check_trigger": "weft.collectives.any_rank(flag, ctx)",
        "get_tracker": "the run that you made with the library itself",
        "trackers": "the list that you pass to weft.log",
        "mixed_precision": "pass it to this function as an argument",
        "gradient_accumulation_steps": "pass it to this function as an argument",
        "state": "the settings are arguments of weft.start and of the transforms; see weft.explain(ctx)",
        "gradient_state": "a window is a value: `for window in windows: for batch in window`",
        "sync_gradients": "the code after `for batch in window` runs once per optimizer step",
        "distributed_type": "ctx.device.type, and the transforms that you apply",
        "save_state": "state, ctx = weft.checkpointable({...}, ctx), after transforms; "
        "weft.save(state, folder, step, ctx)",
        "load_state": "state, ctx = weft.checkpointable({...}, ctx), after transforms; "
        "weft.restore(state, folder, ctx)",
        "skip_first_batches": "weft.restore puts a loader of the state where it was; otherwise itertools.islice",
        "accumulate": "model, windows, ctx = weft.accumulate_grads(model, loader, ctx, steps=4); "
        "for window in windows: for batch in window",
        "prepare": "model, ctx = weft.replicate(model, ctx); loader, ctx = weft.shard_data(loader, ctx)",
        "autocast": "torch.autocast(ctx.device.type, torch.bfloat16)",
        "log": "weft.log(values, step, ctx, trackers): the step has to be given",
        "init_trackers": "trackers = [weft.monitoring.tensorboard(folder)]",
        "trigger_sync_in_backward": "windows of weft.accumulate_grads: the last micro-batch of a window synchronizes",
        "lomo_backward": "optimizers of torch; see docs/zero.md",
        "find_executable_batch_size": "weft.data.find_batch_size(trial, ctx, start=128)",
        "LocalSGD": "model, optimizer, ctx = weft.local_steps(model, optimizer, ctx, every=8)",
        "DistributedDataParallelKwargs": "arguments of weft.replicate: unused, buffers, bucket_bytes",
        "GradScalerKwargs": "weft.with_precision(model, ctx, weft.Precision(scaling=weft.precision.LossScaling(...)))",
        "InitProcessGroupKwargs": "weft.start(timeout_s=...)",
        "broadcast_object_list": "value = weft.broadcast(value, ctx)",
        "init_empty_weights": 'with torch.device("meta"), then weft.fully_shard and weft.load_weights',
        "load_checkpoint_and_dispatch": "weft.load_weights(model, files, ctx)",
    }
)
