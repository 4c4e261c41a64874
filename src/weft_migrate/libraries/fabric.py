"""Lightning Fabric: one row per call; hints for those that stay."""

from __future__ import annotations

from types import MappingProxyType

from weft_migrate.libraries.rows import LibraryRows, Template

FABRIC = LibraryRows(
    name="Fabric",
    modules=("lightning.fabric", "lightning_fabric"),
    names=frozenset({"lightning.", "lightning.Fabric", "lightning.seed_everything"}),
    variable="fabric",
    classes=frozenset({"Fabric"}),
    positional=("accelerator",),
    prepares=MappingProxyType(
        {
            "setup": ("model", "optimizer"),
            "setup_module": ("model",),
            "setup_optimizers": ("optimizer",),
            "setup_dataloaders": ("loader",),
        }
    ),
    methods=MappingProxyType(
        {
            "all_gather": Template("weft.gather({data}[None], {ctx})", {"data": None}),
            "all_reduce": Template(
                "weft.reduce({data}, {ctx}, {reduce_op})", {"data": None, "group": "", "reduce_op": '"mean"'}
            ),
            "broadcast": Template("weft.broadcast({obj}, {ctx})", {"obj": None}),
            "barrier": Template("weft.barrier({ctx})", {"name": ""}),
            "rank_zero_first": Template("weft.main_first({ctx}, local={local})", {"local": "False"}),
            "to_device": Template("weft.to_device({obj}, {ctx})", {"obj": None}),
            "no_backward_sync": Template(
                "weft.contract.no_sync({module}, {ctx}, enabled={enabled})", {"module": None, "enabled": "True"}
            ),
            "init_module": Template("torch.device({ctx}.device)", {}, "torch"),
            "init_tensor": Template("torch.device({ctx}.device)", {}, "torch"),
        }
    ),
    attributes=MappingProxyType(
        {
            "is_global_zero": "{ctx}.is_main",
            "global_rank": "{ctx}.rank",
            "local_rank": "{ctx}.local_rank",
            "node_rank": "{ctx}.node_rank",
            "world_size": "{ctx}.world_size",
            "device": "{ctx}.device",
            "print": "{ctx}.print",
        }
    ),
    functions=MappingProxyType({}),
    settings=MappingProxyType(
        {
            **dict.fromkeys(("accelerator", "num_nodes", "strategy", "precision"), ""),
            "devices": "weft launch -n DEVICES train.py, or weft.launch_function",
            "plugins": "precision and launchers are arguments of transforms and of weft launch",
            "callbacks": "call your own functions",
            "loggers": "trackers = [weft.monitoring.tensorboard(folder)]; weft.log(values, step, ctx, trackers)",
        }
    ),
    makers=frozenset({"FSDPStrategy", "DDPStrategy", "DeepSpeedStrategy", "TensorBoardLogger"}),
    hints=MappingProxyType(
        {
            "setup": "model, ctx = weft.replicate(model, ctx)",
            "setup_module": "model, ctx = weft.replicate(model, ctx)",
            "setup_dataloaders": "loader, ctx = weft.shard_data(loader, ctx)",
            "save": "state, ctx = weft.checkpointable({...}, ctx), after transforms; "
            "weft.save(state, folder, step, ctx)",
            "load": "state, ctx = weft.checkpointable({...}, ctx), after transforms; weft.restore(state, folder, ctx)",
            "load_raw": "weft.load_weights(model, folder, ctx)",
            "log": "weft.log({name: value}, step, ctx, trackers)",
            "log_dict": "weft.log(values, step, ctx, trackers)",
            "logger": "the list that you pass to weft.log",
            "loggers": "the list that you pass to weft.log",
            "call": "call your own functions",
            "launch": "weft.launch_function(function, 2)",
            "init_module": 'with torch.device("meta"), then weft.fully_shard(model, ctx, weights=folder)',
            "clip_gradients": "weft.clip_grads(model, ctx, max_norm=1.0)",
            "strategy": "the transforms that you apply; see weft.explain(ctx)",
            "autocast": 'weft.precision.autocast("bf16", ctx)',
            "ModelParallelStrategy": "weft.tensor_parallel(model, ctx), in weft.start(mesh={...}) with a tensor axis",
            "XLAStrategy": "weft.start()",
        }
    ),
    remarks=MappingProxyType(
        {
            "all_gather": "a new first dimension, of ranks; for rows of a batch: weft.gather(x, ctx)",
            "no_backward_sync": "weft.accumulate_grads does this per window, and weights unequal micro-batches exactly",
        }
    ),
)
