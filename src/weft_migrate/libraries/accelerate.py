"""Accelerate: one row per call; hints for those that stay."""

from __future__ import annotations

from types import MappingProxyType

from weft_migrate.libraries.rows import LibraryRows, Template

_METHODS = {
    "clip_grad_norm_": Template(
        "torch.nn.utils.clip_grad_norm_({parameters}, {max_norm}, {norm_type})",
        {"parameters": None, "max_norm": None, "norm_type": "2"},
        "torch",
    ),
    "clip_grad_value_": Template(
        "torch.nn.utils.clip_grad_value_({parameters}, {clip_value})", {"parameters": None, "clip_value": None}, "torch"
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
    "no_sync": Template("weft.contract.no_sync({model}, {ctx})", {"model": None}),
    "free_memory": Template("gc.collect()", {}, "gc"),
    "clear": Template("gc.collect()", {}, "gc"),
}

_PLUGINS = ("fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin")
_TAKEN = (
    *("device_placement", "project_dir", "log_with", "project_config", "cpu", "mixed_precision", "dataloader_config"),
    *("gradient_accumulation_steps", "gradient_accumulation_plugin", "kwargs_handlers", "split_batches"),
    *("dispatch_batches", "even_batches", "step_scheduler_with_optimizer", *_PLUGINS),
)

ACCELERATE = LibraryRows(
    name="Accelerate",
    modules=("accelerate",),
    names=frozenset(),
    variable="accelerator",
    classes=frozenset({"Accelerator", "PartialState"}),
    positional=("device_placement",),
    prepares=MappingProxyType(
        {
            "prepare": ("",),
            "prepare_model": ("model",),
            "prepare_optimizer": ("optimizer",),
            "prepare_data_loader": ("loader",),
            "prepare_scheduler": ("scheduler",),
        }
    ),
    methods=MappingProxyType(_METHODS),
    attributes=MappingProxyType(
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
    ),
    functions=MappingProxyType(
        {
            **{name: _METHODS[name] for name in ("gather", "reduce", "pad_across_processes")},
            "gather_object": Template(
                "[each for part in weft.collectives.gather_objects({object}, {ctx}) for each in part]", {"object": None}
            ),
            "broadcast": Template("weft.broadcast({tensor}, {ctx})", {"tensor": None}),
            "get_logger": Template("logging.getLogger({name})", {"name": None}, "logging"),
            "is_cuda_available": Template("torch.cuda.is_available()", {}, "torch"),
            "is_mps_available": Template("torch.backends.mps.is_available()", {}, "torch"),
            "is_xpu_available": Template("torch.xpu.is_available()", {}, "torch"),
            "is_npu_available": Template('hasattr(torch, "npu")', {"check_device": ""}, "torch"),
            **{
                f"is_{name}_available": Template(
                    f'importlib.util.find_spec("{name}") is not None', {"check_is_tpu": ""}, "importlib.util"
                )
                for name in ("torch_xla", "schedulefree", "transformers", "datasets", "tensorboard", "wandb")
            },
            "notebook_launcher": Template(
                "weft.launch_function({function}, {num_processes}, *{args})",
                {"function": None, "args": "()", "num_processes": None},
            ),
            "init_empty_weights": Template('torch.device("meta")', {}, "torch"),
        }
    ),
    settings=MappingProxyType(
        {
            **dict.fromkeys(_TAKEN, ""),
            "parallelism_config": 'weft.start(mesh={"replica": 2, "shard": -1}) and a transform per axis',
            "dynamo_backend": "model, ctx = weft.compile(model, ctx), after weft.replicate",
            "dynamo_plugin": "model, ctx = weft.compile(model, ctx), after weft.replicate",
            "rng_types": "not needed: the order of the data is a function of (seed, epoch)",
        }
    ),
    makers=frozenset(
        {
            *("ProjectConfiguration", "DataLoaderConfiguration", "GradientAccumulationPlugin", "ProfileKwargs"),
            *("DistributedDataParallelKwargs", "InitProcessGroupKwargs", "DDPCommunicationHookType"),
            *("FullyShardedDataParallelPlugin", "DeepSpeedPlugin", "GradScalerKwargs"),
        }
    ),
    hints=MappingProxyType(
        {
            "join_uneven_inputs": 'loader, ctx = weft.shard_data(loader, ctx, uneven="join")',
            "on_main_process": 'weft.collectives.on_rank(function, ctx, "main")',
            "on_local_main_process": 'weft.collectives.on_rank(function, ctx, "local_main")',
            "on_last_process": 'weft.collectives.on_rank(function, ctx, "last")',
            "on_process": "weft.collectives.on_rank(function, ctx, 0)",
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
            "trigger_sync_in_backward": "windows of weft.accumulate_grads: the last micro-batch of a window "
            "synchronizes",
            "lomo_backward": "loss.backward(), after optimizer, ctx = weft.step_in_backward(optimizer, ctx)",
            "profile": "weft.monitoring.profile(ctx, folder): the settings stand there",
            "save_model": "weft.export(weft.save(state, folder, step, ctx), out)",
            "find_executable_batch_size": "weft.data.find_batch_size(trial, ctx, start=128): it only tries; "
            "train with what it returns",
            "LocalSGD": "model, optimizer, ctx = weft.local_steps(model, optimizer, ctx, every=8), "
            "instead of weft.replicate",
            "ProfileKwargs": "weft.monitoring.profile(ctx, folder, wait=1, warmup=1, active=3)",
            "AutocastKwargs": "weft.with_precision(model, ctx, weft.Precision(...))",
            "FP8RecipeKwargs": 'weft.with_precision(model, ctx, "fp8")',
            "AORecipeKwargs": 'weft.with_precision(model, ctx, "fp8")',
            "broadcast_object_list": "value = weft.broadcast(value, ctx)",
            "init_on_device": "with torch.device(...)",
            "DummyOptim": "an optimizer of torch: settings of DeepSpeed are arguments of weft.zero_partition",
            "DummyScheduler": "a scheduler of torch: settings of DeepSpeed are arguments of weft.zero_partition",
            "MegatronLMDummyScheduler": "a scheduler of torch",
            "load_checkpoint_and_dispatch": "model, ctx = weft.place(model, ctx, plan, weights=folder)",
            "load_checkpoint_in_model": "weft.load_weights(model, folder, ctx)",
            "dispatch_model": "model, ctx = weft.place(model, ctx, plan)",
            "cpu_offload": "model, ctx = weft.place(model, ctx, plan)",
            "infer_auto_device_map": 'plan = weft.weights.plan_placement(model, {0: "20GB", "cpu": "100GB"})',
        }
    ),
    remarks=MappingProxyType(
        {
            "gather": "rows of unequal batches are neither padded nor repeated; what requires grad is detached first",
            "gather_for_metrics": "every sample once; detach what requires grad; "
            "weft.metrics.gather_metrics keeps the order",
            "no_sync": "weft.accumulate_grads does this per window, and weights unequal micro-batches exactly",
            "gather_object": "takes numbers, texts, dates, arrays, tensors and containers of them; refuses pictures",
            "get_state_dict": "under fully_shard: with weft.full_params(model, ctx)",
            "get_logger": "prints on all ranks; where there is a context: weft.monitoring.logger(__name__, ctx)",
            "init_empty_weights": "weft.fully_shard(model, ctx, weights=folder) fills it, or weft.load_weights after "
            "the transforms",
        }
    ),
)
