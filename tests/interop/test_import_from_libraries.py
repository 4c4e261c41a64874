"""Runs of Accelerate and of transformers' Trainer, saved by them, and continued under weft."""

import os
import random

import numpy as np
import pytest
import torch
from torch import nn

import weft
from weft.testing import largest_difference, run_ranks

pytestmark = pytest.mark.slow

pytest.importorskip("accelerate")
pytest.importorskip("transformers")


class Groups(nn.Module):
    """Weights with and without decay; buffers, and statistics."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.second(torch.relu(self.norm(self.first(x))))


def _build(kind):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        if kind == "groups":
            return Groups().double()
        from transformers import GPT2Config, GPT2LMHeadModel

        plain = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
        config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, **plain)
        return GPT2LMHeadModel(config).double()


def _optimizer(kind, model):
    if kind == "gpt2":
        return torch.optim.AdamW(model.parameters(), 5e-3)
    decayed = [p for name, p in model.named_parameters() if name in ("first.weight", "second.weight")]
    others = [p for p in model.parameters() if not any(p is one for one in decayed)]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 2e-3}], 5e-3)


def _scheduler(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=40)


def _loss(kind, model, step, rank, world_size):
    generator = torch.Generator().manual_seed(step)
    if kind == "gpt2":
        rows = torch.randint(0, 64, (4, 8), generator=generator).chunk(world_size)[rank]
        return model(input_ids=rows, labels=rows).loss
    rows = torch.randn(4, 6, generator=generator, dtype=torch.float64)  # all ranks: BatchNorm has statistics of one
    return (model(rows) - rows.sum(1, keepdim=True)).square().mean()


def _draws():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def _values(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _their_run(ctx, kind, form, folder):
    """Three steps under Accelerate, `save_state`, three more: what they end with, and what is drawn between."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ |= {"RANK": str(ctx.rank), "LOCAL_RANK": str(ctx.rank), "WORLD_SIZE": str(ctx.world_size)}
    os.environ |= {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    plugin = None
    if form.endswith("DICT"):
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # FSDP asks for accelerators
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=form, cpu_ram_efficient_loading=False)
    accelerator = Accelerator(cpu=plugin is None, fsdp_plugin=plugin)
    torch.manual_seed(ctx.rank), random.seed(ctx.rank), np.random.seed(ctx.rank)
    model = _build(kind)
    optimizer = _optimizer(kind, model)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, _scheduler(optimizer))
    for step in range(6):
        if step == 3:
            accelerator.save_state(folder, safe_serialization=form != "bin")
            drawn = _draws()
        accelerator.backward(_loss(kind, model, step, ctx.rank, ctx.world_size))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if plugin is not None:
        return accelerator.get_state_dict(model), drawn
    return _values(accelerator.unwrap_model(model)), drawn


def _continued(ctx, kind, directory, strategy, per_step):
    model = _build(kind)
    if strategy != "local":
        model, ctx = getattr(weft, strategy)(model, ctx)
    optimizer = _optimizer(kind, model)
    scheduler = _scheduler(optimizer)
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer, "scheduler": scheduler}, ctx)
    done = weft.restore(state, directory, ctx)
    assert (done.step, done.missing, done.unexpected) == (3, (), ())
    drawn = _draws()
    for step in range(3, 6):
        _loss(kind, model, step, ctx.rank, ctx.world_size).backward()
        optimizer.step()
        for _ in range(per_step):  # as Accelerate does
            scheduler.step()
        optimizer.zero_grad()
    with weft.full_params(model, ctx):
        return _values(model), drawn


def _like(kind):
    with torch.device("meta"):
        model = _build(kind)
    return {"model": model, "optimizer": _optimizer(kind, model)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "form"),
    [("gpt2", "safetensors"), ("groups", "bin"), ("gpt2", "SHARDED_STATE_DICT"), ("groups", "FULL_STATE_DICT")],
)
def test_a_run_of_accelerate_continues(kind, form, tmp_path):
    theirs = run_ranks(_their_run, 2, kind, form, str(tmp_path / "theirs" / "3"), timeout_s=200)
    like = None if form.endswith("DICT") else _like(kind)  # FSDP names its parameters
    done = weft.interop.import_accelerate(tmp_path / "theirs" / "3", tmp_path / "run", like=like)
    assert (done.step, done.world_size, done.objects) == (3, 2, ("model", "optimizer", "scheduler"))
    expected = theirs[0][0]
    for ranks, strategy in ((1, "replicate"), (2, "replicate"), (2, "fully_shard")):
        found = run_ranks(_continued, ranks, kind, str(tmp_path / "run"), strategy, 2, timeout_s=200)
        assert found[0][0].keys() == expected.keys()
        assert largest_difference(list(found[0][0].values()), list(expected.values())) <= 1e-10, (ranks, strategy)
        assert ranks == 1 or [each[1] for each in found] == [each[1] for each in theirs]


def _trained_by_trainer(ctx, folder):
    from transformers import Trainer, TrainingArguments

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(input_ids=inputs["rows"], labels=inputs["rows"]).loss

        def _get_train_sampler(self, *_, **__):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    rows = [torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(step)) for step in range(6)]
    arguments = TrainingArguments(
        folder, max_steps=6, save_steps=3, per_device_train_batch_size=4, learning_rate=5e-3, weight_decay=0.1,
        max_grad_norm=0, lr_scheduler_type="cosine", warmup_steps=2, report_to=[], use_cpu=True, disable_tqdm=True,
        remove_unused_columns=False, logging_strategy="no",
    )  # fmt: skip
    data = [{"rows": row} for row in torch.cat(rows)]
    trainer = Own(
        model=_build("gpt2"),
        args=arguments,
        train_dataset=data,
        data_collator=lambda found: {"rows": torch.stack([each["rows"] for each in found])},
    )
    trainer.train()
    return _values(trainer.model)


def _continued_after_trainer(ctx, directory, strategy):
    from transformers import Trainer, get_cosine_schedule_with_warmup

    model, after = getattr(weft, strategy)(_build("gpt2"), ctx)
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    groups = [
        {
            "params": [p for name, p in model.named_parameters() if (name in decayed) is is_decayed],
            "weight_decay": decay,
        }
        for is_decayed, decay in ((True, 0.1), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, 5e-3)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 2, 6)
    state, after = weft.checkpointable({"model": model, "optimizer": optimizer, "scheduler": scheduler}, after)
    assert weft.restore(state, directory, after).step == 3
    for step in range(3, 6):
        _loss("gpt2", model, step, ctx.rank, ctx.world_size).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    with weft.full_params(model, after):
        return _values(model)


@pytest.mark.filterwarnings("ignore")
def test_a_run_of_the_trainer_continues(tmp_path):
    (expected,) = run_ranks(_trained_by_trainer, 1, str(tmp_path / "theirs"), timeout_s=200)
    folder = tmp_path / "theirs" / "checkpoint-3"
    done = weft.interop.import_trainer(folder, tmp_path / "run", like={"model": _like("gpt2")["model"]})
    assert (done.step, done.world_size, done.objects) == (3, 1, ("model", "optimizer", "scheduler"))
    assert any("training_args.bin" in each for each in done.left)
    for ranks, strategy in ((1, "fully_shard"), (2, "replicate"), (2, "fully_shard")):
        found = run_ranks(_continued_after_trainer, ranks, str(tmp_path / "run"), strategy, timeout_s=200)
        assert largest_difference(list(found[0].values()), list(expected.values())) <= 1e-10, (ranks, strategy)
