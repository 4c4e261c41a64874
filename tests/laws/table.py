"""The table transforms x laws: one row per transform and important option."""

from __future__ import annotations

import importlib.util
import itertools
import pathlib
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import pytest
import torch
from torch.torch_version import TorchVersion

import weft
from tests.known_transforms import objects_of
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


def apply(parts: Parts, ctx, transform, options):
    """Apply a transform to the parts that its arguments name."""
    names = objects_of(transform)
    *objects, ctx = transform(*(getattr(parts, name) for name in names), ctx, **options)
    for name, value in zip(names, objects, strict=True):
        setattr(parts, name, value)
    return ctx


def row_of(transform, kind="", *, options=MappingProxyType({}), wrong=None, **facts):
    """The row of a transform.

    Args:
        transform: What it is about.
        kind: Written in brackets behind its name, where a transform has several rows.
        options: What it is given.
        wrong: Options that it must refuse, besides those.
        facts: Fields of `Row`.
    """
    given = objects_of(transform)
    derived = {
        "name": f"{transform.__name__}[{kind}]" if kind else transform.__name__,
        "apply": partial(apply, transform=transform, options={**options}),
        "on_optimizer": given == ["optimizer"],
        "on_both": given == ["module", "optimizer"],
    }
    if wrong is not None:
        derived["break_input"] = partial(apply, transform=transform, options={**options, **wrong})
    return Row(**{**derived, **facts})


def apply_to(make, transform, parts: Parts, ctx):
    """Apply a transform to another optimizer than that of the job."""
    parts.optimizer = make(parts.module)
    return apply(parts, ctx, transform, {})


def lbfgs(module):
    return torch.optim.Adagrad.__new__(torch.optim.LBFGS)


def adafactor(module):
    return torch.optim.Adafactor(module.parameters())


def skip_nonfinite(parts: Parts, ctx):
    return apply(parts, ctx, weft.skip_nonfinite, {})


def stages(parts: Parts, ctx, options):
    ctx = apply(parts, ctx, weft.pipeline, options)
    return apply(parts, ctx, weft.replicate, {}) if dict(ctx.axes).get("data", 1) > 1 else ctx


def summed_loss(output, y):
    return torch.nn.functional.cross_entropy(output, y, reduction="sum"), 1


IN_STAGES = {
    "stages": [["first", "second", "third"], ["scale", "head"]],  # of which two are tied
    "loss": summed_loss,
    "schedule": "gpipe",
    "micro_batches": 1,  # the last batch is of any size
}


def put_in_place(parts: Parts, ctx):
    return apply(parts, ctx, weft.place, {"plan": {str(ctx.device): None}})


def leave(block, args, kwargs, *output):
    """Changes nothing."""
    return output[0] if output else (args, kwargs)


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


class Projections(torch.nn.Module):
    """A layer of two projections, which are taken apart by their size in one process."""

    def __init__(self):
        super().__init__()
        self.both, self.back = torch.nn.Linear(8, 16), torch.nn.Linear(8, 8)

    def forward(self, x):
        gate, value = self.both(x).split(8, -1)
        return self.back(torch.sigmoid(gate) * value)


class Projected(Model):
    """The laws' model with such a layer."""

    def __init__(self):
        super().__init__()
        self.inner = Projections()

    def features(self, x):
        hidden = super().features(x)
        return hidden + self.inner(hidden)


class ProjectedJob(Job):
    """The laws' job with two projections in one layer."""

    def model(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return Projected().to(self.dtype)


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


def sum_all(parts: Parts, ctx):
    parts.module, ctx = custom_transform.sum_gradients(parts.module, ctx)
    return ctx


def sum_other_model(parts: Parts, ctx):
    other = replace(parts, module=torch.nn.Linear(1, 1))
    return sum_all(other, None if ctx is None else ctx.only(0))


def by_name(grads, ctx):
    """Smaller steps for weights with large gradients; the head learns later."""
    norms = grads.sums({name: grads.held(name).local.square().sum() for name in grads})
    return {
        name: gradient / (1 + norms[name].sqrt()) if name.endswith("weight") else gradient
        for name, gradient in grads.items()
        if grads.step or not name.startswith("head")
    }


def chain(parts: Parts, ctx, elements):
    parts.optimizer, ctx = weft.grad_chain(parts.optimizer, ctx, *elements)
    return ctx


def chain_row(*elements, job=Job, **facts):
    """The row of a chain, of which the reference calls the elements by hand."""
    given = {
        "apply": partial(chain, elements=elements),
        "break_input": partial(chain, elements=(*elements, None)),
        "job": partial(job, elements=elements),
    }
    return row_of(weft.grad_chain, **{**given, **facts})


EMPTY = {"uneven": "empty"}
SHARD = row_of(weft.shard_data, options=EMPTY, wrong={"uneven": "nonsense"})
REPLICATE = row_of(weft.replicate, synchronizes=True, wrong={"bucket_bytes": -1})
FLAT = row_of(weft.replicate, "flat", synchronizes=True, options={"flat": True}, wrong={"axis": "nowhere"})
FP32 = row_of(
    weft.with_precision,
    "fp32",
    options={"policy": "fp32"},
    wrong={"policy": "fp31"},
    dtype=torch.float32,
    tolerance=2e-6,
)
# Tolerances of 16-bit rows: AdamW moves each weight by about lr=0.01 a step whatever the size of the
# gradient, so a gradient near zero that rounds to the other sign costs 0.02 per step, of 10 steps.
IN_16_BITS = {"dtype": torch.float32, "tolerance": 0.05, "one_rank_tolerance": 0.05}
BF16 = row_of(
    weft.with_precision,
    "bf16",
    options={"policy": "bf16"},
    wrong={"policy": weft.Precision(compute=torch.bfloat16)},
    **IN_16_BITS,
)
FP16_MODULE = row_of(weft.with_precision, "fp16", options={"policy": "fp16"}, then=skip_nonfinite, **IN_16_BITS)
FP16 = row_of(weft.skip_nonfinite, apply=skip_nonfinite, needs=(FP16_MODULE,), **IN_16_BITS)
ACCUMULATE = row_of(weft.accumulate_grads, "3", options={"steps": 3}, wrong={"steps": 0})
DROPOUT = row_of(weft.keyed_dropout, needs=(SHARD,), wrong={"seed": -1})
NORMS = row_of(weft.sync_batch_norm, wrong={"axis": "nowhere"})
CUSTOM = Row(name="sum_gradients", apply=sum_all, synchronizes=True, break_input=sum_other_model)
FULLY = row_of(weft.fully_shard, synchronizes=True, options={"units": torch.nn.Linear}, wrong={"units": "nowhere"})
HYBRID = row_of(
    weft.fully_shard,
    "hybrid",
    synchronizes=True,
    mesh={"replica": -1, "shard": 2},
    options={"reshard_after_forward": False},
    wrong={"axis": ("replica", "shards")},
)
GATHERED = {"first": "gather", "second": "gather", "third": "gather"}  # of which two are tied
TENSOR = row_of(
    weft.tensor_parallel,
    synchronizes=True,
    mesh={"tensor": -1},
    options={"plan": GATHERED},
    wrong={"plan": {"nowhere": "column"}},
)
EXPERTS = row_of(weft.expert_parallel, mesh={"expert": -1}, job=MixtureJob, wrong={"axis": "nowhere"})
STAGES = row_of(
    weft.pipeline,
    apply=partial(stages, options=IN_STAGES),
    break_input=partial(stages, options={**IN_STAGES, "schedule": "2f2b"}),
    synchronizes=True,
    mesh={"data": -1, "pipeline": 2},
)
ZERO1 = row_of(weft.zero_partition, "1", synchronizes=True, options={"stage": 1}, wrong={"unused": "sometimes"})
ZERO2 = row_of(weft.zero_partition, "2", synchronizes=True, options={"stage": 2}, wrong={"units": "nowhere"})
ZERO3 = row_of(weft.zero_partition, "3", synchronizes=True, options={"stage": 3}, wrong={"engine": "nothing"})
# DeepSpeed steps in float32. `bucket_bytes` small: several messages per backward pass.
DEEPSPEED = [
    row_of(
        weft.zero_partition,
        f"deepspeed{kind}",
        options={"engine": "deepspeed", **options},
        wrong=wrong,
        synchronizes=True,
        dtype=torch.float32,
        tolerance=2e-6,
    )
    for kind, options, wrong in (
        ("", {"stage": 3}, {"units": torch.nn.Linear}),
        (" 1", {"stage": 1}, {"offload": "nvme"}),
        (" 2", {"stage": 2, "bucket_bytes": 256}, {"config": {"zero_optimization": {"stage": 3}}}),
        (" 3, small", {"stage": 3, "bucket_bytes": 256}, {"config": {"no such key": 1, "gradient_clipping": "much"}}),
    )
]
LOCAL = row_of(
    weft.local_steps, synchronizes=True, job=partial(Linear, clip=1e9), options={"every": 1}, wrong={"every": 0}
)
TWO_BLOCKS = {"blocks": ["first", "head"]}
RECOMPUTE = row_of(weft.recompute, options=TWO_BLOCKS, wrong={"blocks": "nowhere"})
COMPILED = row_of(weft.compile, options={"backend": "eager"}, wrong={"backend": "nothing"})
CONTEXT = row_of(weft.context_parallel, mesh={"data": -1, "context": 2}, job=Sequences, wrong={"method": "nothing"})
AVERAGE = row_of(weft.average_weights, wrong={"decay": 2.0})

CHAIN = chain_row(
    weft.grads.clip_norm(0.1), weft.grads.centralize(), weft.grads.add_noise(0.01), by_name, needs=(FULLY,)
)

# Those with a name are needed below or by other tests; a new transform needs one more row here.
TABLE = [
    SHARD, REPLICATE, FLAT, FP32, BF16, FP16, ACCUMULATE, NORMS, CUSTOM, FULLY, HYBRID, EXPERTS, TENSOR, STAGES, ZERO1,
    ZERO2, ZERO3, LOCAL, RECOMPUTE, COMPILED, CONTEXT, AVERAGE, DROPOUT, CHAIN,
    row_of(weft.shard_data, "join,keyed", options={"uneven": "join", "keyed": True}, wrong={"mode": "x"}),
    row_of(weft.replicate, "unused", synchronizes=True, options={"unused": "zero"}, wrong={"unused": "sometimes"}),
    row_of(weft.replicate, "buckets", synchronizes=True, options={"bucket_bytes": 64}),
    row_of(weft.accumulate_grads, "2,every", options={"steps": 2, "reduce": "every"}, wrong={"reduce": "never"}),
    row_of(weft.fuse_step, needs=(FLAT,), break_input=partial(apply_to, lbfgs, weft.fuse_step)),
    row_of(weft.gather_step, needs=(FULLY,), break_input=partial(apply_to, lbfgs, weft.gather_step)),
    row_of(
        weft.step_in_backward,
        needs=(FULLY,),
        job=partial(Linear, clip=float("inf")),
        break_input=partial(apply_to, adafactor, weft.step_in_backward),
    ),
    row_of(
        weft.tensor_parallel,
        "fused",
        synchronizes=True,
        mesh={"tensor": -1},
        job=ProjectedJob,
        options={"plan": {"inner.both": "column:2", "inner.back": "row"}},
        wrong={"plan": {"inner.both": "column:3", "inner.back": "row"}},
    ),
    # A moment in 16 bits is off by 2**-8 at most, and a step, of lr=0.01, by as much.
    row_of(weft.state_in_bf16, needs=(FULLY,), wrong={"seed": -1}, tolerance=1e-3, one_rank_tolerance=1e-3),
    row_of(weft.hooked, options={**TWO_BLOCKS, "before": leave, "after": leave}, wrong={"before": "nothing"}),
    row_of(weft.place, apply=put_in_place, wrong={"plan": {"cpu": 3}}),
]  # fmt: skip
# The oldest torch with which a row runs on several ranks.
LEAST_TORCH = {"step_in_backward": "2.13"}


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
