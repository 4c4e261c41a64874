"""`weft config import` of a configuration of Megatron-LM."""

import tomllib

import pytest

import weft.cli
from weft.cli.foreign.accelerate import from_accelerate
from weft.cli.foreign.megatron import arguments_of, from_megatron

SCRIPT = """
#!/bin/sh
# A run of 64 GPUs.
torchrun --nproc-per-node 8 --nnodes 8 pretrain_gpt.py \\
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size=4 --sequence-parallel \\
    --num-layers 24 --micro-batch-size 2 --global-batch-size 512 --bf16 --clip-grad 1.0 \\
    --lr 3e-4 --adam-beta2 0.95 --use-distributed-optimizer --load "check points"
"""


def test_a_script_becomes_a_file_and_calls_and_what_is_left_over_is_listed(tmp_path, capsys):
    (tmp_path / "run.sh").write_text(SCRIPT)
    out = tmp_path / "run.toml"
    assert weft.cli.main(["config", "import", str(tmp_path / "run.sh"), "--out", str(out)]) == 0
    assert tomllib.loads(out.read_text()) == {
        "launch": {"nproc": 8, "nnodes": 8},
        "start": {"mesh": {"pipeline": 4, "data": -1, "tensor": 2}},
    }
    assert capsys.readouterr().out.splitlines()[:-1] == [
        "in the program:",
        "model, ctx = weft.with_precision(model, ctx, 'bf16')",
        "model, ctx = weft.tensor_parallel(model, ctx, sequence=True)",
        "model, ctx = weft.pipeline(model, ctx, micro_batches=512 // (2 * ctx.data_size))",
        "optimizer = torch.optim.AdamW(model.parameters(), lr=0.0003, betas=(0.9, 0.95))",
        "model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=1)",
        "loader = DataLoader(dataset, batch_size=512 // ctx.data_size)",
        "loader, ctx = weft.shard_data(loader, ctx)",
        "weft.clip_grads(model, ctx, max_norm=1.0)",
        "weft.restore(state, 'check points', ctx)",
        "not taken over: num_layers = 24",
    ]


@pytest.mark.parametrize(
    ("values", "mesh", "calls"),
    [
        ({"tensor_model_parallel_size": 1}, {"data": -1}, ["weft.replicate(model, ctx)"]),
        (
            {"model": {"context-parallel-size": 4, "cp_comm_type": "a2a"}, "fp16": True},
            {"data": -1, "context": 4},
            [
                "weft.with_precision(model, ctx, 'fp16')",
                "weft.context_parallel(model, ctx, method='heads')  # batches: weft.data.split_sequence(batch, ctx)",
                "weft.replicate(model, ctx)",
            ],
        ),
        (
            {"expert_model_parallel_size": 8, "use_megatron_fsdp": True, "recompute_granularity": "full"},
            {"data": -1, "expert": 8},
            ["weft.recompute(model, ctx)", "weft.expert_parallel(model, ctx)", "weft.fully_shard(model, ctx)"],
        ),
        (
            {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 3, "bf16": True,
             "accumulate_allreduce_grads_in_fp32": True, "data_parallel_sharding_strategy": "optim_grads"},
            {"pipeline": 2, "data": -1},
            [
                "weft.with_precision(model, ctx, weft.Precision(compute=torch.bfloat16, reduce=torch.float32))",
                'weft.pipeline(model, ctx, micro_batches=8, schedule="interleaved_1f1b")',
                "weft.zero_partition(model, optimizer, ctx, stage=2)",
            ],
        ),
        (
            {"tensor_model_parallel_size": 1, "micro_batch_size": 4, "global_batch_size": 64},
            {"data": -1},
            [
                "weft.replicate(model, ctx)",
                "DataLoader(dataset, batch_size=4)",
                "weft.shard_data(loader, ctx)",
                "weft.accumulate_grads(model, loader, ctx, steps=64 // (4 * ctx.data_size))",
            ],
        ),
    ],
)  # fmt: skip
def test_arguments_become_a_mesh_and_calls(values, mesh, calls):
    tables, found, left = from_megatron(values)
    assert (tables["start"]["mesh"], found, left) == (mesh, calls, [])


def test_every_argument_is_used_or_listed():
    values = arguments_of("--tensor-model-parallel-size 2 --hidden-size 64 --swiglu --rotary-base=1e4 --seed 3")
    tables, _, left = from_megatron(values)
    assert tables["start"]["seed"] == 3
    assert left == ["hidden_size = 64", "swiglu = True", "rotary_base = 10000.0"]


def test_the_parallelism_of_accelerate_becomes_a_mesh_and_calls():
    values = {"parallelism_config_dp_shard_size": 2, "parallelism_config_tp_size": 4}
    assert "; ".join(from_accelerate({"parallelism_config": values})[1]) == (
        "weft.start(mesh={'shard': 2, 'tensor': 4}); weft.tensor_parallel(model, ctx); weft.fully_shard(model, ctx)"
    )
    values = {"dp_replicate_size": 2, "sp_size": 2}
    assert "; ".join(from_accelerate({"parallelism_config": values})[1]) == (
        "weft.start(mesh={'replica': 2, 'context': 2}); weft.context_parallel(model, ctx, method='heads'); "
        "weft.replicate(model, ctx)"
    )
    values = {"megatron_lm_tp_degree": 2, "megatron_lm_pp_degree": 1, "megatron_lm_sequence_parallelism": "true"}
    assert "; ".join(from_accelerate({"megatron_lm_config": values})[1]) == (
        "weft.start(mesh={'data': -1, 'tensor': 2}); weft.tensor_parallel(model, ctx, sequence=True); "
        "weft.replicate(model, ctx)"
    )
