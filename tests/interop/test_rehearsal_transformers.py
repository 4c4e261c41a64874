"""Models of transformers are rehearsed as they then run."""

import pytest
import torch

import weft
from weft.testing import assert_rehearsed

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, **SMALL),
    "llama": lambda: transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **SMALL,
    ),
}


def language_model(ctx, name):
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    blocks = next(type(part[0]) for part in model.modules() if isinstance(part, torch.nn.ModuleList))
    model, ctx = weft.with_precision(model, ctx, "bf16")
    model, ctx = weft.recompute(model, ctx, blocks=blocks)
    model, ctx = weft.fully_shard(model, ctx, units=[blocks])
    optimizer = torch.optim.AdamW(model.parameters())
    draw = torch.Generator().manual_seed(ctx.rank)

    def step():
        x = torch.randint(0, 256, (4, 32), generator=draw)
        model(input_ids=x, labels=x, use_cache=False).loss.backward()
        weft.clip_grads(model, ctx, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def residual_net(ctx):
    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic")
    model = transformers.ResNetForImageClassification(config)
    model, ctx = weft.with_precision(model, ctx, "fp16")
    model, ctx = weft.replicate(model, ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer, ctx = weft.skip_nonfinite(optimizer, ctx)

    def step():
        model(torch.zeros(4, 3, 32, 32), labels=torch.zeros(4, dtype=torch.int64)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_language_models_are_rehearsed_as_they_run(name):
    assert_rehearsed(language_model, 2, name, only=[1])


@pytest.mark.slow
def test_a_residual_net_in_fp16_is_rehearsed_as_it_runs():
    assert_rehearsed(residual_net, 2, only=[1])
