"""What the package says about objects of other libraries is followed, as `tests/fix_lines` follows the rest."""

import pytest
import torch
from torch import nn

import weft
from tests.fix_lines.test_checkpoint import _state
from tests.fix_lines.test_sharding import trains
from tests.fix_lines.test_sharding_layers import planned
from tests.fix_lines.told import told
from weft.testing import fake, run_ranks

bitsandbytes = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
tensordict = pytest.importorskip("tensordict")
torchao = pytest.importorskip("torchao.optim")
transformers = pytest.importorskip("transformers")


def _qwen(**options):
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "sdpa", **options}
    torch.manual_seed(0)
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))


def _transformers_mistakes(ctx):
    ids = torch.arange(32).view(2, 16)
    batch = {"input_ids": ids, "labels": ids}

    class Around(transformers.Qwen2Model):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model = _qwen(attention_dropout=0.0)
    model.model.__class__ = Around
    with told("engines/torch/parallel/sequence_code.py", "makes masks where") as it:
        weft.context_parallel(model, ctx)
    it.run(Around=Around)
    model, ctx = weft.context_parallel(model, ctx)
    part = weft.data.split_sequence(batch, ctx)
    expected = _qwen()(**batch).loss
    assert weft.reduce(model(**part).loss.detach(), ctx, "mean").item() == pytest.approx(expected.item(), rel=1e-6)

    model, _ = weft.context_parallel(_qwen(attn_implementation="flex_attention", attention_dropout=0.0), ctx)
    with told("engines/torch/parallel/sequence_inputs.py", "masks that are no tensors") as it, torch.no_grad():
        model(**part)
    it.run(model=model)
    model(**part)

    with told("engines/torch/parallel/split_attention.py", "computed without") as it:
        weft.context_parallel(_qwen(attn_implementation="eager"), ctx)[0](**part)
    with told("engines/torch/parallel/split_attention.py", "drops weights") as dropping:
        weft.context_parallel(_qwen(attention_dropout=0.1), ctx)[0](**part)
    assert it.fix.startswith('attn_implementation="sdpa", or ')
    assert dropping.fix.partition("; or ")[2].startswith("attention_dropout=0.0 in the config, or")
    weft.context_parallel(_qwen(attn_implementation="sdpa", attention_dropout=0.0), ctx)[0](**part)


@torch.compiler.set_stance("force_eager")  # torchao compiles its step, which takes a minute
def states_cannot_be_divided(ctx):
    def made():
        model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
        return model, torchao.AdamW8bit(model.parameters(), lr=0.01)

    model, optimizer = made()
    with told("sharding/owner_step.py", "cannot be divided among ranks") as it:
        weft.gather_step(optimizer, ctx)
    trains(model, it.run(optimizer=optimizer, ctx=ctx)["optimizer"], x=torch.ones(2, 64))
    model, optimizer = made()
    with told("sharding/owner_step.py", "cannot be divided among ranks") as it:
        weft.zero_partition(model, optimizer, ctx, stage=2)
    trains(model, it.run(model=model, optimizer=optimizer, ctx=ctx)["optimizer"], x=torch.ones(2, 64))


def eight_bits(ctx, kind="int8", **options):
    return weft.quantized(nn.Sequential(nn.Linear(64, 64)), ctx, kind, **options)


def quantized_weights(ctx):
    model, ctx = eight_bits(weft.local(), engine="torchao")
    with told("contract/module_checks.py", "quantized weights of {type(module).__name__} cannot be taken") as it:
        weft.replicate(model, ctx)
    found = it.run(model=nn.Sequential(nn.Linear(64, 64)), ctx=ctx)
    weft.replicate(found["model"], found["ctx"])[0](torch.ones(2, 64))
    with told("contract/module_checks.py", "quantized weights of {type(module).__name__} cannot be taken") as it:
        weft.tensor_parallel(*eight_bits(ctx, "nf4"), plan={"0": "column"})
    it.run(model=nn.Sequential(nn.Linear(64, 64)), ctx=ctx)["model"](torch.ones(2, 64))
    model = nn.Sequential(bitsandbytes.nn.Linear8bitLt(64, 64))
    with told("contract/module_checks.py", "cannot be trained") as it:
        weft.replicate(model, ctx)
    model = it.run(model=model, peft=peft)["model"]
    weft.replicate(model, ctx)


def test_weights_are_quantized():
    run_ranks(quantized_weights, 1)


def test_what_torchao_has_quantized(tmp_path):
    model = nn.Linear(64, 64)
    with told("checkpoint/state/collect.py", "of torchao, whose state") as it:
        _state(model=model, optimizer=torchao.AdamW8bit(model.parameters()))
    it.run(model=model, bitsandbytes=bitsandbytes)
    plain = nn.Sequential(nn.Linear(64, 64))
    model, ctx = weft.quantized(nn.Sequential(nn.Linear(64, 64)), weft.local(), "int8", engine="torchao")
    state, ctx = _state(ctx, model=model)
    with told("checkpoint/format/tensor_blocks.py", "of torchao, whose numbers") as it:
        weft.save(state, tmp_path, 1, ctx)
    model, ctx = eval(it.fix, {"weft": weft, "model": plain, "ctx": weft.local()})
    state, ctx = _state(ctx, model=model)
    weft.save(state, tmp_path, 1, ctx)


def test_an_adapter_cannot_be_cut():
    model = peft.get_peft_model(planned(), peft.LoraConfig(r=2, target_modules=["0"], use_dora=True))
    with told("sharding/layers/adapter_layers.py", "an adapter in {name} cannot be cut") as it:
        weft.tensor_parallel(model, weft.local())
    trains(it.run(model=model, ctx=weft.local())["model"])


def test_sequences_of_transformers():
    run_ranks(_transformers_mistakes, 2, mesh={"context": 2})


def test_states_cannot_be_divided():
    run_ranks(states_cannot_be_divided, 2)


def test_tables_of_tensors_are_not_split():
    ctx, batch = fake(0, 2, mesh={"context": 2}), torch.arange(16).view(2, 8)
    table = tensordict.TensorDict({"x": batch}, batch_size=[2])
    with told("data/split_sequence.py", "cannot be split along a sequence") as it:
        weft.data.split_sequence(table, ctx)
    it.run(batch=table, ctx=ctx)
