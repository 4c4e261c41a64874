"""place with models of transformers: logits and generate, with its cache, bit for bit."""

import pytest
import torch

import weft
from weft.weights import module_sizes, on_meta, plan_placement

transformers = pytest.importorskip("transformers")

VIT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES = VIT | {"num_key_value_heads": 2, "vocab_size": 90}
IDS = {"bos_token_id": 1, "eos_token_id": 89, "pad_token_id": 0}
GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 90, "n_positions": 64}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4, "vocab_size": 90}
MODELS = {
    "qwen2": lambda t: t.Qwen2ForCausalLM(t.Qwen2Config(**SIZES, **IDS, tie_word_embeddings=True)),
    "llama": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**SIZES, **IDS)),
    "mixtral": lambda t: t.MixtralForCausalLM(t.MixtralConfig(**SIZES, **IDS, num_local_experts=4)),
    "gpt2": lambda t: t.GPT2LMHeadModel(t.GPT2Config(**GPT2, **IDS)),
    "t5": lambda t: t.T5ForConditionalGeneration(t.T5Config(**T5, decoder_start_token_id=0)),
    "bert": lambda t: t.BertForMaskedLM(t.BertConfig(**VIT, vocab_size=90)),
    "vit": lambda t: t.ViTForImageClassification(t.ViTConfig(**VIT, image_size=32, patch_size=8)),
}


@pytest.mark.parametrize(
    "name", [name if name == "qwen2" else pytest.param(name, marks=pytest.mark.variant) for name in MODELS]
)
def test_a_placed_model_gives_the_logits_and_tokens_of_the_one_in_memory(name, tmp_path):
    torch.manual_seed(0)
    plain = MODELS[name](transformers).eval()
    state, ctx = weft.checkpointable({"model": plain}, weft.local())
    weft.export(weft.save(state, tmp_path / "saved", 1, ctx), tmp_path / "weights", max_shard_size="30KB")
    with on_meta():
        model = MODELS[name](transformers).eval()
    budget = module_sizes(model)[""] * (4 if name in ("t5", "vit") else 3) // 5
    plan = plan_placement(model, {"cpu": budget, "disk": None})
    assert len(plan.streamed) >= 2
    model, ctx = weft.place(model, weft.local(), plan, weights=tmp_path / "weights")
    ids = torch.arange(2, 14).view(2, 6)
    inputs = torch.ones(2, 3, 32, 32) if name == "vit" else ids
    more = {"decoder_input_ids": ids} if name == "t5" else {}
    with torch.no_grad():
        assert torch.equal(model(inputs, **more).logits, plain(inputs, **more).logits)
    if name not in ("bert", "vit"):
        for options in ({"do_sample": False}, {"num_beams": 3, "do_sample": False}):
            tokens = model.generate(ids, max_new_tokens=8, **options)
            assert torch.equal(tokens, plain.generate(ids, max_new_tokens=8, **options))
