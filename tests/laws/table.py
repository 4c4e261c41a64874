"""The table transforms x laws: one row per transform and important option."""

from __future__ import annotations

import importlib.util
import itertools
import pathlib
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.torch_version import TorchVersion

import weft
from weft.testing.law_job import Model
from weft.testing.laws import Job, Parts, Row


def _custom_transform():
    """The transform of the docs page, loaded from its file."""
    path = pathlib.Path(__file__).parents[2] / "docs" / "custom_transform.py"
    spec = importlib.util.spec_from_file_location("custom_transform", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


custom_transform = _custom_transform()


def shard(parts: Parts, ctx, **options):
    parts.loader, ctx = weft.shard_data(parts.loader, ctx, **{"uneven": "empty", **options})
    return ctx


def copy_weights(parts: Parts, ctx, **options):
    parts.module, ctx = weft.replicate(parts.module, ctx, **options)
    return ctx


def precise(parts: Parts, ctx, policy):
    parts.module, ctx = weft.with_precision(parts.module, ctx, policy)
    return ctx


def precise_optimizer(parts: Parts, ctx):
    parts.optimizer, ctx = weft.skip_nonfinite(parts.optimizer, ctx)
    return ctx


def accumulate(parts: Parts, ctx, **options):
    parts.module, parts.loader, ctx = weft.accumulate_grads(parts.module, parts.loader, ctx, **options)
    return ctx


def norms(parts: Parts, ctx, **options):
    parts.module, ctx = weft.sync_batch_norm(parts.module, ctx, **options)
    return ctx


def fuse(parts: Parts, ctx):
    parts.optimizer, ctx = weft.fuse_step(parts.optimizer, ctx)
    return ctx


def fuse_wrong(parts: Parts, ctx):
    parts.optimizer = torch.optim.Adagrad.__new__(torch.optim.LBFGS)
    return fuse(parts, ctx)


def cut_layers(parts: Parts, ctx, **options):
    plan = {"first": "gather", "second": "gather", "third": "gather"}  # of which two are tied
    parts.module, ctx = weft.tensor_parallel(parts.module, ctx, **{"plan": plan, **options})
    return ctx


def stages(parts: Parts, ctx, **options):
    chosen = {
        "stages": [["first", "second", "third"], ["scale", "head"]],  # of which two are tied
        "loss": lambda output, y: (torch.nn.functional.cross_entropy(output, y, reduction="sum"), 1),
        "schedule": "gpipe",
        "micro_batches": 1,  # the last batch is of any size
    }
    parts.module, ctx = weft.pipeline(parts.module, ctx, **{**chosen, **options})
    if dict(ctx.axes).get("data", 1) > 1:
        parts.module, ctx = weft.replicate(parts.module, ctx)
    return ctx


def shard_fully(parts: Parts, ctx, **options):
    parts.module, ctx = weft.fully_shard(parts.module, ctx, **options)
    return ctx


class Mixture(Model):
    """The laws' model with a layer of experts."""

    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(8, 4)
        self.stacked = Stacked()

    def features(self, x):
        hidden = super().features(x)
        weights, chosen = self.router(hidden).softmax(-1).topk(4)
        return hidden + self.stacked(hidden, chosen, weights)


class Stacked(torch.nn.Module):
    """Experts as transformers has them."""

    def __init__(self):
        super().__init__()
        self.num_experts = 4
        self.weight = torch.nn.Parameter(torch.randn(4, 8, 8) / 8)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        chosen = torch.einsum("th,tkoh->tko", hidden_states, self.weight[top_k_index])
        return (torch.tanh(chosen) * top_k_weights[..., None]).sum(1)


class MixtureJob(Job):
    """The laws' job with experts."""

    def model(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return Mixture().to(self.dtype)


def divide_experts(parts: Parts, ctx, **options):
    parts.module, ctx = weft.expert_parallel(parts.module, ctx, **options)
    return ctx


def partition(parts: Parts, ctx, **options):
    parts.module, parts.optimizer, ctx = weft.zero_partition(parts.module, parts.optimizer, ctx, **options)
    return ctx


def gather(parts: Parts, ctx):
    parts.optimizer, ctx = weft.gather_step(parts.optimizer, ctx)
    return ctx


def step_inside(parts: Parts, ctx):
    parts.optimizer, ctx = weft.step_in_backward(parts.optimizer, ctx)
    return ctx


def step_inside_wrong(parts: Parts, ctx):
    parts.optimizer = torch.optim.Adafactor(parts.module.parameters())
    return step_inside(parts, ctx)


def gather_wrong(parts: Parts, ctx):
    parts.optimizer = torch.optim.Adagrad.__new__(torch.optim.LBFGS)
    return gather(parts, ctx)


def compute_again(parts: Parts, ctx, blocks):
    parts.module, ctx = weft.recompute(parts.module, ctx, blocks=blocks)
    return ctx


def hook(parts: Parts, ctx, **options):
    parts.module, ctx = weft.hooked(
        parts.module, ctx, blocks=["first", "head"], **{"before": leave, "after": leave, **options}
    )
    return ctx


def put_in_place(parts: Parts, ctx, **options):
    parts.module, ctx = weft.place(parts.module, ctx, **{"plan": {str(ctx.device): None}, **options})
    return ctx


def leave(block, args, kwargs, *output):
    """Changes nothing."""
    return output[0] if output else (args, kwargs)


def compile_it(parts: Parts, ctx, **options):
    parts.module, ctx = weft.compile(parts.module, ctx, **{"backend": "eager", **options})
    return ctx


def split_sequences(parts: Parts, ctx, **options):
    parts.module, ctx = weft.context_parallel(parts.module, ctx, **options)
    return ctx


class Attentive(Model):
    """The model of the laws with a causal attention between its layers."""

    def features(self, x):
        """[batch, places, 6] to [batch, places, 8]."""
        heads = super().features(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return (
            torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )


class Sequences(Job):
    """The same job with four places per sample."""

    def dataset(self):
        """Features [samples, 4, 6] and classes [samples, 4]."""
        draw = torch.Generator().manual_seed(self.seed + 1)
        x = torch.randn(self.samples, 4, 6, generator=draw, dtype=torch.float64).to(self.dtype)
        return torch.utils.data.TensorDataset(x, torch.randint(0, 3, (self.samples, 4), generator=draw))

    def model(self):
        """The same model wherever it is called."""
        model = super().model()
        model.__class__ = Attentive
        return model


class Linear(Job):
    """The same job with a step that is linear in the gradient: the mean of steps is the step on the mean."""

    def optimizer(self, module):
        return torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.1)


def step_apart(parts: Parts, ctx, **options):
    chosen = {"every": 1, **options}
    parts.module, parts.optimizer, ctx = weft.local_steps(parts.module, parts.optimizer, ctx, **chosen)
    return ctx


def average(parts: Parts, ctx, **options):
    parts.module, ctx = weft.average_weights(parts.module, ctx, **options)
    return ctx


def sum_all(parts: Parts, ctx):
    parts.module, ctx = custom_transform.sum_gradients(parts.module, ctx)
    return ctx


def sum_other_model(parts: Parts, ctx):
    other = replace(parts, module=torch.nn.Linear(1, 1))
    return sum_all(other, None if ctx is None else ctx.only(0))


SHARD = Row(name="shard_data", apply=shard, break_input=partial(shard, uneven="nonsense"))
SPLIT = Row(
    name="shard_data[join,keyed]", apply=partial(shard, uneven="join", keyed=True), break_input=partial(shard, mode="x")
)
REPLICATE = Row(
    name="replicate", apply=copy_weights, synchronizes=True, break_input=partial(copy_weights, bucket_bytes=-1)
)
FLAT = Row(
    name="replicate[flat]",
    apply=partial(copy_weights, flat=True),
    synchronizes=True,
    break_input=partial(copy_weights, axis="nowhere"),
)
UNUSED = Row(
    name="replicate[unused]",
    apply=partial(copy_weights, unused="zero"),
    synchronizes=True,
    break_input=partial(copy_weights, unused="sometimes"),
)
TINY_BUCKETS = Row(name="replicate[buckets]", apply=partial(copy_weights, bucket_bytes=64), synchronizes=True)
FP32 = Row(
    name="with_precision[fp32]",
    apply=partial(precise, policy="fp32"),
    dtype=torch.float32,
    tolerance=2e-6,
    break_input=partial(precise, policy="fp31"),
)
# Tolerances of 16-bit rows: AdamW moves each weight by about lr=0.01 a step whatever the size of the
# gradient, so a gradient near zero that rounds to the other sign costs 0.02 per step, of 10 steps.
BF16 = Row(
    name="with_precision[bf16]",
    apply=partial(precise, policy="bf16"),
    dtype=torch.float32,
    tolerance=0.05,
    one_rank_tolerance=0.05,
    break_input=partial(precise, policy=weft.Precision(compute=torch.bfloat16)),
)
FP16_MODULE = Row(
    name="with_precision[fp16]",
    apply=partial(precise, policy="fp16"),
    then=precise_optimizer,
    dtype=torch.float32,
    tolerance=0.05,
    one_rank_tolerance=0.05,
)
FP16 = Row(
    name="skip_nonfinite",
    apply=precise_optimizer,
    on_optimizer=True,
    needs=(FP16_MODULE,),
    dtype=torch.float32,
    tolerance=0.05,
    one_rank_tolerance=0.05,
)
ACCUMULATE = Row(
    name="accumulate_grads[3]", apply=partial(accumulate, steps=3), break_input=partial(accumulate, steps=0)
)
EVERY = Row(
    name="accumulate_grads[2,every]",
    apply=partial(accumulate, steps=2, reduce="every"),
    break_input=partial(accumulate, steps=3, reduce="never"),
)
NORMS = Row(name="sync_batch_norm", apply=norms, break_input=partial(norms, axis="nowhere"))
FUSE = Row(name="fuse_step", apply=fuse, on_optimizer=True, needs=(FLAT,), break_input=fuse_wrong)
CUSTOM = Row(name="sum_gradients", apply=sum_all, synchronizes=True, break_input=sum_other_model)

FULLY = Row(
    name="fully_shard",
    apply=partial(shard_fully, units=torch.nn.Linear),
    synchronizes=True,
    break_input=partial(shard_fully, units="nowhere"),
)
HYBRID = Row(
    name="fully_shard[hybrid]",
    apply=partial(shard_fully, reshard_after_forward=False),
    synchronizes=True,
    mesh={"replica": -1, "shard": 2},
    break_input=partial(shard_fully, axis=("replica", "shards")),
)
TENSOR = Row(
    name="tensor_parallel",
    apply=cut_layers,
    synchronizes=True,
    mesh={"tensor": -1},
    break_input=partial(cut_layers, plan={"nowhere": "column"}),
)
EXPERTS = Row(
    name="expert_parallel",
    apply=divide_experts,
    mesh={"expert": -1},
    job=MixtureJob,
    break_input=partial(divide_experts, axis="nowhere"),
)
STAGES = Row(
    name="pipeline",
    apply=stages,
    synchronizes=True,
    mesh={"data": -1, "pipeline": 2},
    break_input=partial(stages, schedule="2f2b"),
)
ZERO1 = Row(
    name="zero_partition[1]",
    apply=partial(partition, stage=1),
    on_both=True,
    synchronizes=True,
    break_input=partial(partition, stage=1, unused="sometimes"),
)
ZERO2 = Row(
    name="zero_partition[2]",
    apply=partial(partition, stage=2),
    on_both=True,
    synchronizes=True,
    break_input=partial(partition, stage=2, units="nowhere"),
)
ZERO3 = Row(
    name="zero_partition[3]",
    apply=partial(partition, stage=3),
    on_both=True,
    synchronizes=True,
    break_input=partial(partition, stage=3, engine="nothing"),
)
# DeepSpeed steps in float32. `bucket_bytes` small: several messages per backward pass.
DEEPSPEED = [
    Row(
        name=f"zero_partition[deepspeed{kind}]",
        apply=partial(partition, engine="deepspeed", **options),
        on_both=True,
        synchronizes=True,
        dtype=torch.float32,
        tolerance=2e-6,
        break_input=partial(partition, engine="deepspeed", **{**options, **wrong}),
    )
    for kind, options, wrong in (
        ("", {"stage": 3}, {"units": torch.nn.Linear}),
        (" 1", {"stage": 1}, {"offload": "nvme"}),
        (" 2", {"stage": 2, "bucket_bytes": 256}, {"config": {"zero_optimization": {"stage": 3}}}),
        (" 3, small", {"stage": 3, "bucket_bytes": 256}, {"config": {"no such key": 1, "gradient_clipping": "much"}}),
    )
]
LOCAL = Row(
    name="local_steps",
    apply=step_apart,
    on_both=True,
    synchronizes=True,
    job=partial(Linear, clip=1e9),
    break_input=partial(step_apart, every=0),
)
GATHER = Row(name="gather_step", apply=gather, on_optimizer=True, needs=(FULLY,), break_input=gather_wrong)
INSIDE = Row(
    name="step_in_backward",
    apply=step_inside,
    on_optimizer=True,
    needs=(FULLY,),
    job=partial(Linear, clip=float("inf")),
    break_input=step_inside_wrong,
)
RECOMPUTE = Row(
    name="recompute",
    apply=partial(compute_again, blocks=["first", "head"]),
    break_input=partial(compute_again, blocks="nowhere"),
)
HOOKED = Row(name="hooked", apply=hook, break_input=partial(hook, before="nothing"))
PLACED = Row(name="place", apply=put_in_place, break_input=partial(put_in_place, plan={"cpu": 3}))
COMPILED = Row(name="compile", apply=compile_it, break_input=partial(compile_it, backend="nothing"))
CONTEXT = Row(
    name="context_parallel",
    apply=split_sequences,
    mesh={"data": -1, "context": 2},
    job=Sequences,
    break_input=partial(split_sequences, method="nothing"),
)
AVERAGE = Row(name="average_weights", apply=average, break_input=partial(average, decay=2.0))

TABLE = [
    SHARD, SPLIT, REPLICATE, FLAT, UNUSED, TINY_BUCKETS, FP32, BF16, FP16, ACCUMULATE, EVERY, NORMS, FUSE, CUSTOM,
    FULLY, HYBRID, EXPERTS, TENSOR, STAGES, ZERO1, ZERO2, ZERO3, GATHER, RECOMPUTE, HOOKED, COMPILED, CONTEXT, AVERAGE,
    LOCAL, INSIDE, PLACED,
]  # fmt: skip
# The oldest torch with which a row runs on several ranks.
LEAST_TORCH = {INSIDE.name: "2.13"}


def needs_torch(row):
    """Skip the test, with the reason, if torch is too old for a row on several ranks."""
    least = LEAST_TORCH.get(row.name, "0")
    if TorchVersion(torch.__version__) < least:
        pytest.skip(f"{row.name} needs torch {least} or newer, and this is {torch.__version__}")


# Pairs: the options of the first transforms with each other, and one of each of those with the others.
OPTIONS = [SHARD, REPLICATE, FLAT, FP32, BF16, FP16_MODULE, ACCUMULATE, NORMS, CUSTOM]
ONE_OF_EACH = [SHARD, REPLICATE, FP16_MODULE, ACCUMULATE, NORMS, CUSTOM]
OTHERS = [FULLY, ZERO1, RECOMPUTE, COMPILED, CONTEXT, AVERAGE]
# CUSTOM knows whole parameters only, CONTEXT has a job and a mesh of its own.
WITH_EXPERTS = [row for row in [*ONE_OF_EACH, *OTHERS] if row is not CUSTOM and row is not CONTEXT]
PAIRS = [
    *itertools.permutations(OPTIONS, 2),
    *itertools.product(ONE_OF_EACH, OTHERS),
    *itertools.product(OTHERS, ONE_OF_EACH),
    *itertools.permutations(OTHERS, 2),
    # CUSTOM sums over all ranks; CONTEXT wants an axis of its own.
    *((one, TENSOR) for one in [*ONE_OF_EACH, *OTHERS] if one is not CUSTOM and one is not CONTEXT),
    *((TENSOR, other) for other in [*ONE_OF_EACH, *OTHERS] if other is not CUSTOM and other is not CONTEXT),
    *((one, LOCAL) for one in [*ONE_OF_EACH, *OTHERS] if one is not CUSTOM and one is not CONTEXT),
    *((LOCAL, other) for other in [*ONE_OF_EACH, *OTHERS] if other is not CUSTOM and other is not CONTEXT),
    *((one, EXPERTS) for one in WITH_EXPERTS),
    *((EXPERTS, other) for other in WITH_EXPERTS),
]
