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
    more = {"num_local_experts": 4, "num_experts_per_tok": 2} if kind == "Mixtral" else {}
    if kind == "Qwen3Moe":
        more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 4}
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
    ],
    ids=["Llama", "tied", "Mixtral", "Qwen3Moe"],
)
def test_a_model_trains_as_in_one_process(kind, options, sequence):
    losses, norms, expected = reference(kind, 10, **options)
    for found in run_ranks(train, 2, kind, 10, sequence, None, options, mesh={"tensor": 2}):
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
    ],
    ids=["tensor", "data", "shard"],
)
def test_on_four_ranks(mesh, strategy, kind):
    _, norms, expected = reference(kind, 10, tie_word_embeddings=kind == "Llama")
    options = {"tie_word_embeddings": kind == "Llama"}
    for sequence in (False, True):
        for found in run_ranks(train, 4, kind, 10, sequence, strategy, options, mesh=mesh):
            assert max(abs(a - b) for a, b in zip(norms, found[1], strict=True)) < 1e-12
            assert difference(expected, found[2]) < 1e-12


def test_the_plan_prints_what_is_left_out():
    plan = weft.tensor_plan(model("Mixtral"))
    assert plan["model.layers.*.self_attn.q_proj"] == "column" and plan["lm_head"] == "gather"
    assert plan["model.layers.*.mlp"] == plan["model.layers.*.input_layernorm"] == "sequence"
    assert set(plan.left_out.values()) == {"packed_colwise", "rowwise", "moe_tp_experts"}
    assert "model.layers.*.mlp.experts               left out: moe_tp_experts" in str(plan)
    assert not weft.tensor_plan(model("Llama")).left_out


def test_a_model_without_a_plan_is_given_a_proposal():
    config = transformers.GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=9, bos_token_id=0, eos_token_id=0)
    with pytest.raises(ValueError, match="has no plan for") as error:
        weft.tensor_plan(transformers.GPT2LMHeadModel(config))
    assert "{'lm_head': 'gather', 'transformer.wte': 'vocab'}" in str(error.value)


def heads(ctx, count):
    try:
        weft.tensor_parallel(model("Llama", num_attention_heads=count, num_key_value_heads=count // 2), ctx)
    except weft.errors.ContextError as error:
        return str(error)


def test_heads_are_counted():
    texts = run_ranks(heads, 2, 2, mesh={"tensor": 2})
    assert all("num_key_value_heads" in text and "1 heads, 2 ranks" in text for text in texts)
