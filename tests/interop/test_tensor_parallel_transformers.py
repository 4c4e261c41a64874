"""`tensor_parallel` by the plans that models of transformers bring along."""

import pytest
import torch

import weft
from weft.testing import run_ranks

transformers = pytest.importorskip("transformers")

LENGTH, VOCABULARY = 8, 65


def model(kind, *, layers=2, **options):
    """A small model in float64, always with the same weights."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers}
    heads = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "attn_implementation": "sdpa",
        "experts_implementation": "eager",
    }
    if kind == "GPT2":
        sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": LENGTH}
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        heads = {"attn_implementation": "sdpa", "bos_token_id": 0, "eos_token_id": 0, **drops}
    more = {"num_local_experts": 4, "num_experts_per_tok": 2} if kind == "Mixtral" else {}
    if kind == "Qwen3Moe":
        more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 4}
    if kind == "Phi3":
        more = {"pad_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **heads, **more, **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config).double()


def tokens(step, batch=8):
    draw = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (batch, LENGTH), generator=draw)


def loss_of(module, x):
    return module(input_ids=x, labels=x, use_cache=False).loss


def reference(kind, steps, **options):
    module = model(kind, **options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for step in range(steps):
        loss = loss_of(module, tokens(step))
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms, {name: p.detach().clone() for name, p in module.named_parameters()}


def train(ctx, kind, steps, sequence, strategy, options):
    module, ctx = weft.tensor_parallel(model(kind, **options), ctx, sequence=sequence)
    if strategy is not None:
        module, ctx = getattr(weft, strategy)(module, ctx)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for step in range(steps):
        loss = loss_of(module, tokens(step).chunk(ctx.data_size)[ctx.data_rank])
        loss.backward()
        norms.append(float(weft.clip_grads(module, ctx, max_norm=0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    with weft.full_params(module, ctx):
        return losses, norms, {name: whole(p) for name, p in module.named_parameters()}


def whole(p):
    p = p.detach()
    return (p.full_tensor() if hasattr(p, "full_tensor") else p).clone()


def difference(one, two):
    return max(float((one[name] - two[name]).abs().max()) for name in one)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Llama", {"tie_word_embeddings": False}),
        ("Llama", {"tie_word_embeddings": True, "attention_bias": True}),
        ("Mixtral", {"tie_word_embeddings": False}),
        ("Qwen3Moe", {"tie_word_embeddings": True}),
        ("GPT2", {}),
        ("Phi3", {"tie_word_embeddings": False}),
    ],
    ids=["Llama", "tied", "Mixtral", "Qwen3Moe", "GPT2", "Phi3"],
)
def test_a_model_trains_as_in_one_process(kind, options, sequence):
    losses, norms, expected = reference(kind, 10, **options)
    for found in run_ranks(train, 2, kind, 10, sequence, None, options, mesh={"tensor": 2}, probes="auto"):
        assert max(abs(a - b) for a, b in zip(losses, found[0], strict=True)) < 1e-12
        assert max(abs(a - b) for a, b in zip(norms, found[1], strict=True)) < 1e-12
        assert difference(expected, found[2]) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "strategy", "kind"),
    [
        ({"tensor": 4}, None, "Llama"),
        ({"data": 2, "tensor": 2}, "replicate", "Llama"),
        ({"shard": 2, "tensor": 2}, "fully_shard", "Mixtral"),
        ({"tensor": 4}, None, "GPT2"),
        ({"shard": 2, "tensor": 2}, "fully_shard", "Phi3"),
    ],
    ids=["tensor", "data", "shard", "transposed", "fused"],
)
def test_on_four_ranks(mesh, strategy, kind):
    options = {"tie_word_embeddings": kind in ("Llama", "GPT2")}
    _, norms, expected = reference(kind, 10, **options)
    for sequence in (False, True):
        for found in run_ranks(train, 4, kind, 10, sequence, strategy, options, mesh=mesh, probes="auto"):
            assert max(abs(a - b) for a, b in zip(norms, found[1], strict=True)) < 1e-12
            assert difference(expected, found[2]) < 1e-12


def test_the_plan_prints_what_is_left_out():
    plan = weft.tensor_plan(model("Mixtral"))
    assert plan["model.layers.*.self_attn.q_proj"] == "column" and plan["lm_head"] == "gather"
    assert plan["model.layers.*.mlp"] == plan["model.layers.*.input_layernorm"] == "sequence"
    assert set(plan.left_out.values()) == {"packed_colwise", "rowwise", "moe_tp_experts"}
    assert "model.layers.*.mlp.experts               left out: moe_tp_experts" in str(plan)
    assert not weft.tensor_plan(model("Llama")).left_out


def test_layers_with_several_projections_are_found():
    plan = weft.tensor_plan(model("GPT2"))
    assert plan["transformer.h.*.attn.c_attn"] == "column:3" and plan["transformer.h.*.mlp.c_proj"] == "row"
    assert plan["transformer.wte"] == "vocab" and plan["lm_head"] == "gather"
    plan = weft.tensor_plan(model("Phi3"))
    assert plan["model.layers.*.self_attn.qkv_proj"] == "column:32,16,16" and not plan.left_out
    assert plan["model.layers.*.mlp.gate_up_proj"] == "column:2"


def shared(ctx, kind, attention):
    options = {"num_key_value_heads": 2, "attn_implementation": attention}
    return train(ctx, kind, 4, False, None, options)[2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Llama", "Phi3"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_ranks_share_heads_of_keys(kind, attention):
    _, _, expected = reference(kind, 4, num_key_value_heads=2, attn_implementation=attention)
    for found in run_ranks(shared, 4, kind, attention, mesh={"tensor": 4}):
        assert difference(expected, found) < 1e-12


def generated(ctx, kind):
    module, starts = model(kind).eval(), tokens(0)[:, :3]
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = module.generate(starts, **options)
    module, _ = weft.tensor_parallel(module, ctx)
    return torch.equal(module.generate(starts, **options), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["GPT2", "Phi3"])
def test_generated_tokens_are_those_of_one_process(kind):
    assert all(run_ranks(generated, 2, kind, mesh={"tensor": 2}))


def save_pretrained(ctx, kind, folder):
    module = model(kind)
    module, ctx = weft.tensor_parallel(module, ctx)
    with weft.full_params(module, ctx):
        module.save_pretrained(folder)
    return list(dict(module.named_parameters()))


@pytest.mark.parametrize("kind", ["GPT2", "Phi3"])
def test_save_pretrained_writes_what_one_process_writes(kind, tmp_path):
    names, _ = run_ranks(save_pretrained, 2, kind, tmp_path, mesh={"tensor": 2})
    expected = model(kind)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert names == list(dict(expected.named_parameters())) == list(dict(found.named_parameters()))
    assert all(torch.equal(p, found.get_parameter(name)) for name, p in expected.named_parameters())


def test_plans_of_encoders_are_read_from_shapes_and_code():
    few = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 24}
    layer = {"attention.self.query": "column", "attention.self.key": "column", "attention.self.value": "column"}
    layer |= {"attention.output.dense": "row", "intermediate.dense": "column", "output.dense": "row"}
    layer |= {"attention.output.LayerNorm": "sequence", "output.LayerNorm": "sequence"}
    plan = weft.tensor_plan(transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=9, **few)))
    assert dict(plan) == {
        **{f"bert.encoder.layer.*.{name}": style for name, style in layer.items()},
        "bert.embeddings.word_embeddings": "vocab",
        "cls.predictions.decoder": "gather",
    }
    plan = weft.tensor_plan(transformers.ViTModel(transformers.ViTConfig(**few, image_size=8, patch_size=4)))
    assert plan["layers.*.attention.v_proj"] == "column" and plan["layers.*.mlp.fc2"] == "row"
    config = transformers.T5Config(d_model=16, d_kv=4, d_ff=24, num_heads=2, num_layers=1, vocab_size=9)
    plan = weft.tensor_plan(transformers.T5ForConditionalGeneration(config))
    assert plan["decoder.block.*.layer.*.EncDecAttention.o"] == "row"
    assert plan["shared"] == plan["encoder.embed_tokens"] == plan["decoder.embed_tokens"] == "vocab"
    assert plan["encoder.block.*.layer.*.layer_norm"] == "sequence"


def heads(ctx, count):
    try:
        weft.tensor_parallel(model("Llama", num_attention_heads=count, num_key_value_heads=count), ctx)
    except weft.errors.ContextError as error:
        return str(error)


def test_heads_are_counted():
    texts = run_ranks(heads, 2, 1, mesh={"tensor": 2})  # heads of keys alone may be shared
    assert all("num_attention_heads" in text and "1 heads, 2 ranks" in text for text in texts)
