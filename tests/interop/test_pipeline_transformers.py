"""pipeline with models of transformers: Llama and Mixtral, their own loss and another, on several meshes."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import weft
from tests.fix_lines.told import told
from weft.testing import fake, run_ranks

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 67,
}


def _model(kind, **more):
    torch.manual_seed(0)
    name, _, tied = kind.partition(" ")
    if tied:
        return _model(name, tie_word_embeddings=True, **more)
    if kind == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 4, "n_head": 4, "vocab_size": 67, "n_positions": 32}
        sizes |= {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0, "bos_token_id": 66, "eos_token_id": 66}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | more)).double()
    if kind == "mistral":  # whose layers see a window
        return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=4, **more)).double()
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **more)).double()
    if kind == "qwen":  # norms of queries and keys, whose gradients are sums over the ranks of a tensor axis
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=4, **more)).double()
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, **more)
    config._experts_implementation = "eager"  # the other one has no float64
    return transformers.MixtralForCausalLM(config).double()


def _loss(output, target):
    return cross_entropy(output.logits.flatten(0, 1), target.flatten())


def _batch(step):
    tokens = torch.randint(0, 67, (4, 9), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def _fit(model, call, ctx, steps=10):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    numbers = []
    for step in range(steps):
        loss = call(*_batch(step))
        loss.backward()
        numbers.append((loss.item(), weft.clip_grads(model, ctx, max_norm=0.5).item()))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        logits = model(input_ids=_batch(99)[0]).logits
    named = {name: p for name, p in model.named_parameters() if not p.is_meta}
    return (
        numbers,
        {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in named.items()},
        logits,
    )


def _trained(ctx, kind, strategy, sequence=False):
    model = _model(kind)
    if "tensor" in dict(ctx.axes):
        model, ctx = weft.tensor_parallel(model, ctx, sequence=sequence)
    model, ctx = weft.pipeline(model, ctx, loss=_loss, micro_batches=ctx.axis_size("pipeline"))
    if strategy:
        model, ctx = weft.fully_shard(model, ctx, units=["model.layers.*", "model.embed_tokens", "lm_head"])

    def call(x, y):
        rows = slice(2 * ctx.coordinates["data"], 2 * ctx.coordinates["data"] + 2) if strategy else slice(None)
        return model(x[rows], y[rows])

    return _fit(model, call, ctx, steps=4 if sequence else 10)


@pytest.mark.parametrize(
    ("mesh", "kind"),
    [
        ({"pipeline": 2}, "llama tied"),
        ({"pipeline": 2}, "gpt2 tied"),
        pytest.param({"pipeline": 2}, "llama", marks=pytest.mark.variant),
        ({"pipeline": 2}, "mixtral"),
        pytest.param({"pipeline": 4}, "qwen tied", marks=pytest.mark.variant),
        pytest.param({"data": 2, "pipeline": 2}, "qwen tied", marks=pytest.mark.variant),
        pytest.param({"pipeline": 2, "tensor": 2}, "qwen tied", marks=pytest.mark.variant),
        pytest.param({"data": 2, "pipeline": 2}, "mixtral", marks=pytest.mark.variant),
        pytest.param({"pipeline": 2, "tensor": 2}, "mixtral", marks=pytest.mark.variant),
        ({"pipeline": 2, "tensor": 2}, "qwen"),
    ],
    ids=str,
)
def test_ten_steps_are_those_of_one_process(mesh, kind):
    model = _model(kind)
    numbers, parameters, logits = _fit(model, lambda x, y: _loss(model(x), y), weft.local())
    ranks = 4 if len(mesh) == 2 or mesh["pipeline"] == 4 else 2
    found = run_ranks(_trained, ranks, kind, "data" in mesh, mesh=mesh, probes="auto")
    assert {name for _, own, _ in found for name in own} == set(parameters)
    assert all((value - parameters[n]).abs().max() < 1e-12 for _, own, _ in found for n, value in own.items())
    for steps, _, given in found:
        assert (given - logits).abs().max() < 1e-12
        assert max(abs(norm - expected) for (_, norm), (_, expected) in zip(steps, numbers, strict=True)) < 1e-12
    for step, (loss, _) in enumerate(numbers):
        assert abs(sum(steps[step][0] for steps, _, _ in found) / len(found) - loss) < 1e-12


@pytest.mark.parametrize("kind", ["qwen tied", pytest.param("llama", marks=pytest.mark.variant)])
def test_parts_of_sequences_go_from_stage_to_stage(kind):
    model = _model(kind)
    numbers, parameters, logits = _fit(model, lambda x, y: _loss(model(x), y), weft.local(), steps=4)
    mesh = {"pipeline": 2, "tensor": 2}
    for steps, own, given in run_ranks(_trained, 4, kind, None, True, mesh=mesh, probes="auto"):
        assert all((value - parameters[name]).abs().max() < 1e-12 for name, value in own.items())
        assert (given - logits).abs().max() < 1e-12
        for (loss, norm), (expected, wanted) in zip(steps, numbers, strict=False):
            assert abs(loss - expected) < 1e-12
            assert abs(norm - wanted) < 1e-12


def _divided_head(ctx):
    model = _model("llama tied")
    plan = {**weft.tensor_plan(model), "lm_head": "vocab"}
    model, ctx = weft.tensor_parallel(model, ctx, plan=plan, sequence=True)

    def loss(output, target):
        return weft.collectives.vocab_cross_entropy(output.logits, target, ctx)

    model, ctx = weft.pipeline(model, ctx, loss=loss, micro_batches=2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(4):
        model(*_batch(step)).backward()
        weft.clip_grads(model, ctx, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
    weight = model.lm_head.weight
    return None if weight.is_meta else (weight.to_local().shape, weight.full_tensor().detach())


@pytest.mark.slow
def test_both_copies_of_a_divided_vocabulary_are_trained_as_in_one_process():
    model = _model("llama tied")
    _fit(model, lambda x, y: _loss(model(x), y), weft.local(), steps=4)
    for shape, weight in run_ranks(_divided_head, 4, mesh={"pipeline": 2, "tensor": 2}):
        assert shape in ((34, 16), (33, 16))
        assert (weight - model.lm_head.weight).abs().max() < 1e-12


def _labelled(ctx):
    model, ctx = weft.pipeline(_model("llama"), ctx, micro_batches=4)
    tokens, labels = _ignoring()
    output = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=labels)
    output.loss.backward()
    with torch.no_grad():
        evaluated = model(input_ids=tokens, labels=labels)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and not p.is_meta}
    return output.loss.item(), gradients, evaluated.loss.item(), evaluated["logits"]


def _ignoring():
    tokens = _batch(0)[0]
    labels = tokens.clone()
    labels[0, :5] = -100
    labels[2, 3:] = -100
    return tokens, labels


def test_its_own_loss_is_the_mean_over_the_labels_that_count():
    model = _model("llama")
    tokens, labels = _ignoring()
    expected = model(input_ids=tokens, labels=labels)
    expected.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for loss, found, evaluated, logits in run_ranks(_labelled, 2, mesh={"pipeline": 2}):
        assert abs(loss - expected.loss.item()) < 1e-6  # transformers computes it in float32
        assert abs(evaluated - expected.loss.item()) < 1e-6
        assert (logits - expected.logits).abs().max() < 1e-12
        assert max((gradient - gradients[name]).abs().max().item() for name, gradient in found.items()) < 1e-7


def _texts(model, tokens):
    """What is generated in several ways, and the logits of calls that continue one cache."""
    options = {"max_new_tokens": 5, "do_sample": False}
    ways = ({"use_cache": False}, {}, {"num_beams": 3}, {"attention_mask": _padded(tokens)})
    texts = [model.generate(tokens, **options | more) for more in (*ways, ways[0] | ways[2])]
    with torch.no_grad():
        first = model(input_ids=tokens[:, :5], use_cache=True)
        second = model(input_ids=tokens[:, 5:6], past_key_values=first.past_key_values)
        third = model(input_ids=tokens[:, 6:], past_key_values=second.past_key_values)
        logits = [one.logits for one in (first, second, third, model(input_ids=tokens))]
    return texts, logits, third.past_key_values.get_seq_length()


def _padded(tokens):
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    return mask


def _generated(ctx, kind, options, tokens):
    model = _model(kind, pad_token_id=0, eos_token_id=66)
    model, ctx = weft.pipeline(model, ctx, loss=_loss, **options)
    with told("engines/torch/pipeline/stage_cache.py", "cannot be spread over the stages") as it, torch.no_grad():
        model(input_ids=tokens, past_key_values=transformers.StaticCache(model.config, 20))
    assert 'cache_implementation="dynamic"' in it.fix
    model.generate(tokens, max_new_tokens=1, cache_implementation="dynamic")
    with torch.no_grad():
        return _texts(model, tokens)


LAYERS = [f"model.layers.{i}" for i in range(4)]
UNEVEN = {"stages": [["model.embed_tokens"], LAYERS[:3], [LAYERS[3], "model.norm", "lm_head"]]}


@pytest.mark.parametrize(
    ("ranks", "kind", "options"),
    [
        (3, "llama", UNEVEN),
        pytest.param(2, "mistral", {"schedule": "zbv_zero_bubble"}, marks=pytest.mark.variant),
        pytest.param(2, "gpt2 tied", {}, marks=pytest.mark.variant),
    ],
)
def test_every_rank_generates_what_one_process_does(ranks, kind, options):
    model, tokens = _model(kind, pad_token_id=0, eos_token_id=66), _batch(0)[0]
    with torch.no_grad():
        texts, logits, length = _texts(model, tokens)
    for found, given, seen in run_ranks(_generated, ranks, kind, options, tokens, mesh={"pipeline": ranks}):
        assert all(torch.equal(one, other) for one, other in zip(found, texts, strict=True))
        assert all((one - other).abs().max() < 1e-12 for one, other in zip(given, logits, strict=True))
        assert seen == length


def test_router_losses_are_refused():
    with pytest.raises(ValueError, match="output_router_logits"):
        weft.pipeline(_model("mixtral", output_router_logits=True), fake(0, 2, mesh={"pipeline": 2}))
