"""Models of transformers, built on meta, sharded, and read from what `save_pretrained` wrote."""

import pytest
import torch

import weft
from weft.errors import CheckpointError
from weft.testing import largest_difference, run_ranks

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

KINDS = ["gpt2", "llama", "qwen2", "mixtral", "bert", "vit"]


def _build(kind):
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    rest = {"intermediate_size": 48, "num_key_value_heads": 2}
    made = {
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=96, n_embd=32, n_layer=3, n_head=4, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
            )
        ),
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **rest)),
        "qwen2": lambda: transformers.Qwen2ForCausalLM(
            transformers.Qwen2Config(**sizes, **rest, tie_word_embeddings=True)
        ),
        "mixtral": lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**sizes, **rest, num_local_experts=4, experts_implementation="eager")
        ),
        "bert": lambda: transformers.BertForMaskedLM(
            transformers.BertConfig(**sizes, **quiet, intermediate_size=48, max_position_embeddings=32)
        ),
        "vit": lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(
                hidden_size=32,
                num_hidden_layers=3,
                num_attention_heads=4,
                intermediate_size=48,
                image_size=16,
                patch_size=4,
                num_labels=5,
                **quiet,
            )
        ),
    }
    return made[kind]().double()


def _step(kind, model, share=slice(None)):
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(96, (4, 8), generator=draw)[share]
    if kind == "vit":
        pixels = torch.randn(4, 3, 16, 16, generator=draw, dtype=torch.float64)[share]
        logits, targets = model(pixel_values=pixels).logits, tokens[:, 0] % 5
    else:
        logits, targets = model(input_ids=tokens).logits.flatten(0, 1), tokens.flatten()
    torch.nn.functional.cross_entropy(logits, targets).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()


def _train(ctx, kind, folder):
    with weft.weights.on_meta():
        model = _build(kind)
    model, ctx = weft.fully_shard(model, ctx, weights="later")
    weft.load_weights(model, folder, ctx)
    _step(kind, model, slice(ctx.rank, None, ctx.world_size))
    with weft.full_params(model, ctx):
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_on_meta_sharded_and_loaded_it_takes_the_step_of_the_plain_model(kind, tmp_path):
    torch.manual_seed(0)
    plain = _build(kind)
    plain.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    _step(kind, plain)
    for parameters in run_ranks(_train, 2, kind, str(tmp_path)):
        assert largest_difference(parameters, list(plain.parameters())) < 1e-12


def test_what_is_missing_is_named(tmp_path):
    model = _build("mixtral")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor for name, tensor in load_file(file).items() if "experts.2.w3" not in name}
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match="does not fit the module(?s:.*)gate_up_proj"):
        weft.load_weights(_build("mixtral"), tmp_path, weft.local())


def _as_files_have_them(ctx, folder):
    from safetensors.torch import load_file
    from transformers.core_model_loading import revert_weight_conversion

    torch.manual_seed(0)
    model = _build("mixtral")
    if ctx.is_main:
        model.save_pretrained(folder)
    weft.barrier(ctx)
    model, ctx = weft.fully_shard(model, ctx, units="MixtralDecoderLayer")
    found = {}
    for name, tensor in weft.weights.stream(model, ctx, bucket_bytes="50KB"):
        found |= revert_weight_conversion(model, {name: tensor})
    expected = load_file(f"{folder}/model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_streamed_weights_get_the_names_of_files_from_transformers(tmp_path):
    run_ranks(_as_files_have_them, 2, str(tmp_path))
