"""plan_placement against Accelerate's infer_auto_device_map, for models of transformers and plain ones."""

import warnings

import pytest
import torch
from torch import nn

from weft.weights import module_sizes, plan_placement

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 90,
}
GPT2 = {"n_embd": 32, "n_layer": 6, "n_head": 4, "vocab_size": 90, "n_positions": 64}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4, "vocab_size": 90}
VIT = {key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
MODELS = {
    "llama": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**SIZES)),
    "llama, tied": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "llama, large vocabulary": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**SIZES | {"vocab_size": 3000})),
    "qwen2, tied": lambda t: t.Qwen2ForCausalLM(t.Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda t: t.Qwen3ForCausalLM(t.Qwen3Config(**SIZES, head_dim=8)),
    "mistral": lambda t: t.MistralForCausalLM(t.MistralConfig(**SIZES)),
    "mixtral": lambda t: t.MixtralForCausalLM(t.MixtralConfig(**SIZES, num_local_experts=4)),
    "gemma": lambda t: t.GemmaForCausalLM(t.GemmaConfig(**SIZES, head_dim=8)),
    "phi": lambda t: t.PhiForCausalLM(t.PhiConfig(**SIZES)),
    "gpt2": lambda t: t.GPT2LMHeadModel(t.GPT2Config(**GPT2)),
    "gpt2, no head": lambda t: t.GPT2Model(t.GPT2Config(**GPT2)),
    "opt": lambda t: t.OPTForCausalLM(
        t.OPTConfig(
            hidden_size=32, ffn_dim=64, num_hidden_layers=6, num_attention_heads=4, vocab_size=90,
            word_embed_proj_dim=32,
        )
    ),
    "gpt_neox": lambda t: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**SIZES)),
    "bloom": lambda t: t.BloomForCausalLM(t.BloomConfig(hidden_size=32, n_layer=6, n_head=4, vocab_size=90)),
    "bert": lambda t: t.BertModel(t.BertConfig(**VIT, vocab_size=90)),
    "bert, head": lambda t: t.BertForMaskedLM(t.BertConfig(**VIT, vocab_size=90)),
    "roberta": lambda t: t.RobertaForMaskedLM(t.RobertaConfig(**VIT, vocab_size=90)),
    "vit": lambda t: t.ViTForImageClassification(t.ViTConfig(**VIT, image_size=32, patch_size=8)),
    "t5": lambda t: t.T5ForConditionalGeneration(t.T5Config(**T5)),
    "t5, encoder": lambda t: t.T5EncoderModel(t.T5Config(**T5)),
    "whisper": lambda t: t.WhisperForConditionalGeneration(
        t.WhisperConfig(
            d_model=32, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=90, pad_token_id=1, bos_token_id=1, eos_token_id=1,
            decoder_start_token_id=1,
        )
    ),
    "clip": lambda t: t.CLIPVisionModel(t.CLIPVisionConfig(**VIT, image_size=32, patch_size=8)),
    "linears": lambda t: nn.Sequential(*(nn.Linear(32, 32) for _ in range(8))),
    "sizes": lambda t: nn.Sequential(*(nn.Linear(8, 8 * size) for size in (3, 9, 1, 5, 5, 2, 8, 4, 7))),
    "encoder": lambda t: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64), 6, enable_nested_tensor=False),
}  # fmt: skip
QUICK = ("llama", "qwen2, tied", "gpt2", "t5", "linears", "sizes")
SHARES = (0.0, 0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0)  # of the model, beside the least that a plan takes


def _model(name):
    with torch.device("meta"):
        return MODELS[name](transformers)


def _least(model, **more):
    """The smallest budget of the CPU, as the error names it."""
    with pytest.raises(ValueError, match="expected: [0-9]+ bytes") as error:
        plan_placement(model, {"cpu": 0, "disk": None}, **more)
    return int(str(error.value).split("expected: ")[1].split()[0])


def _theirs(model, budgets):
    """Accelerate's map with the same budgets and the same parts that are not split; None where it fails itself."""
    limits = {int(p[-1]) if ":" in p else p: 10**12 if size is None else size for p, size in budgets.items()}
    named = getattr(model, "_no_split_modules", None) or {"TransformerEncoderLayer"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return accelerate.infer_auto_device_map(model, limits, no_split_module_classes=sorted(named))
        except IndexError:  # BERT and RoBERTa with their heads, whose biases are tied
            return None


def _is_inside(name, outer):
    return not outer or f"{name}.".startswith(f"{outer}.")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.variant) for name in MODELS]
)
@pytest.mark.parametrize(
    "places", [("cpu", "disk"), ("cuda:0", "cpu"), ("cuda:0", "cuda:1", "cpu", "disk")], ids="-".join
)
def test_never_more_units_on_slower_places_than_accelerate(name, places):
    with torch.device("meta"):
        model = MODELS[name](transformers)
    total, least = module_sizes(model)[""], _least(model)
    for share in SHARES:
        first = least + int((total - least) * share)
        budgets = dict.fromkeys(places) | {places[0]: first}
        if len(places) == 4:
            budgets |= {"cuda:0": max(first // 2, least), "cuda:1": first // 3, "cpu": total // 4}
        plan = plan_placement(model, budgets)
        plan.check(model)
        assert plan == plan_placement(model, budgets)
        assert all(size is None or plan.used()[place] <= size for place, size in budgets.items())
        theirs = _theirs(model, budgets)
        if theirs is not None:
            fast = (0, 1) if "cuda:0" in places else ("cpu",)
            slow = [key for key, place in theirs.items() if place not in fast]
            lies_slow = [
                unit
                for unit in plan.units
                if any(_is_inside(one, key) or (one and _is_inside(key, one)) for key in slow for one in unit.names)
            ]
            assert len(plan.streamed) <= len(lies_slow), share
            if len(places) == 2:
                assert sum(u.num_bytes for u in plan.streamed) <= sum(u.num_bytes for u in lies_slow), share


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "mixtral"])
def test_units_are_the_classes_that_transformers_does_not_split(name):
    with torch.device("meta"):
        model = MODELS[name](transformers)
    plan = plan_placement(model, {"cpu": None})
    blocks = [n for n, part in model.named_modules() if type(part).__name__ in model._no_split_modules]
    assert blocks and set(blocks) <= {name for unit in plan.units for name in unit.names}
