"""context_parallel: models of transformers train as in one process, also by the loss that they compute themselves."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader

import weft
from weft.errors import ContractError
from weft.testing import run_ranks

transformers = pytest.importorskip("transformers")

WORDS, LENGTH, ROWS = 61, 16, 22


def _model(kind, **options):
    transformers.logging.set_verbosity_error()
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "sdpa", **options}
    torch.manual_seed(0)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).double()
    sizes |= {"num_local_experts": 4, "experts_implementation": "eager"}  # the others know no float64
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes)).double()


def _rows():
    words = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = words.clone()
    labels[::3, :5] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(words, labels, strict=True)]


def _loss(model, part):
    """The sum over the labels of a part: the loss inside of these models is computed in float32."""
    logits = model(input_ids=part["input_ids"], position_ids=part["position_ids"]).logits
    return F.cross_entropy(logits.flatten(0, 1), part["shift_labels"].flatten(), reduction="sum")


def _count(batch):
    return (batch["labels"][:, 1:] != -100).sum()


def _reference(kind, steps):
    model = _model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms = [], []
    for _ in range(2 if steps == 1 else 5):
        batches = list(DataLoader(_rows(), batch_size=4))
        for start in range(0, len(batches), steps):
            window = batches[start : start + steps]
            count, total = sum(_count(batch) for batch in window), 0.0
            for batch in window:
                loss = _loss(model, weft.data.split_sequence(batch, weft.local())) / count
                loss.backward()
                total += loss.item()
            losses.append(total)
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms, [p.detach() for p in model.parameters()]


def _train(ctx, kind, strategy, method, steps):
    model = _model(kind)
    loader, ctx = weft.shard_data(DataLoader(_rows(), batch_size=4 // ctx.data_size), ctx, uneven="empty")
    model, ctx = weft.context_parallel(model, ctx, method=method)
    model, ctx = getattr(weft, strategy)(model, ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, loader, ctx = weft.accumulate_grads(model, loader, ctx, steps=steps)
    losses, norms = [], []
    for _ in range(2 if steps == 1 else 5):
        for window in loader:
            count, total = window.denominator(_count), 0.0
            for batch in window:
                loss = _loss(model, weft.data.split_sequence(batch, ctx)) / count
                loss.backward()
                total += weft.reduce(loss.detach(), ctx, "mean").item()
            losses.append(total)
            norms.append(float(weft.clip_grads(model, ctx, max_norm=0.5)))
            optimizer.step()
            optimizer.zero_grad()
    with weft.full_params(model, ctx):
        return losses, norms, [p.detach().clone() for p in model.parameters()]


TWO, FOUR, BOTH = {"context": 2}, {"context": 4}, {"data": 2, "context": 2}


@pytest.mark.parametrize(
    ("kind", "mesh", "strategy", "method", "steps"),
    [
        ("llama", TWO, "replicate", "heads", 3),
        ("mixtral", TWO, "fully_shard", "gather", 1),
        *(
            pytest.param(kind, mesh, strategy, method, steps, marks=pytest.mark.variant)
            for kind, mesh, strategy, method, steps in (
                ("llama", FOUR, "replicate", "heads", 1),  # fewer heads of keys than ranks
                ("mixtral", FOUR, "fully_shard", "gather", 3),
                ("llama", BOTH, "replicate", "gather", 3),
                ("mixtral", BOTH, "fully_shard", "heads", 1),
            )
        ),
    ],
)
def test_training_is_that_of_one_process(kind, mesh, strategy, method, steps):
    losses, norms, parameters = _reference(kind, steps)
    ranks = 4 if sum(mesh.values()) == 4 else 2
    for found in run_ranks(_train, ranks, kind, strategy, method, steps, mesh=mesh, probes="auto"):
        assert found[0] == pytest.approx(losses, abs=1e-12, rel=0)
        assert found[1] == pytest.approx(norms, abs=1e-12, rel=0)
        assert max((a - b).abs().max().item() for a, b in zip(found[2], parameters, strict=True)) < 1e-12


def _own_loss(ctx, order, documents):
    """The loss that the model computes, and its gradients, of the whole and of parts."""
    batch = next(iter(DataLoader(_rows(), batch_size=4)))
    if documents:  # whose ends have labels, too: the first words of the next ones
        batch |= {"position_ids": torch.arange(LENGTH).remainder(5).expand(4, -1), "use_cache": False}
    else:
        batch["attention_mask"] = torch.ones(4, LENGTH)
    whole = _model("llama")
    expected = whole(**batch).loss
    expected.backward()
    model, inner = weft.context_parallel(_model("llama"), ctx, order=order)
    model, inner = weft.replicate(model, inner)
    loss = model(**weft.data.split_sequence(batch, inner, order=order)).loss
    loss.backward()
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    gradients = max((a.grad - b.grad).abs().max().item() for a, b in pairs)
    return abs(weft.reduce(loss.detach(), ctx, "mean").item() - expected.item()), gradients


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_the_loss_of_the_model_is_that_of_the_whole_batch(order, documents):
    for loss, gradients in run_ranks(_own_loss, 2, order, documents, mesh={"context": 2}):
        assert loss < 1e-6  # float32, inside of the model
        assert gradients < 1e-7


def _refused(ctx):
    texts = []
    batch = next(iter(DataLoader(_rows(), batch_size=4)))
    part = weft.data.split_sequence(batch, ctx)
    ids, at = part["input_ids"], part["position_ids"]

    def parallel(kind="llama", **options):
        return weft.context_parallel(_model(kind, **options), ctx)[0]

    calls = [
        lambda: parallel(attn_implementation="eager")(input_ids=ids, position_ids=at),
        lambda: parallel(attention_dropout=0.25).train()(input_ids=ids, position_ids=at),
        lambda: parallel(num_attention_heads=1, num_key_value_heads=1)(input_ids=ids, position_ids=at),
        lambda: parallel()(input_ids=ids),
        lambda: parallel()(input_ids=ids, position_ids=at, labels=part["labels"]),
        lambda: parallel()(input_ids=ids, position_ids=at, attention_mask=torch.ones(1, 1, 8, 8).bool().triu()),
        lambda: parallel("mixtral", output_router_logits=True)(input_ids=ids, position_ids=at),
    ]
    for call in calls:
        try:
            call()
        except ContractError as error:
            texts.append(str(error))
        else:
            texts.append("accepted")
    return texts


def test_what_would_be_silently_wrong_is_refused():
    expected = [
        'fix:      attn_implementation="sdpa"',
        "drops weights with probability 0.25",
        "1 heads of 'model.layers.0.self_attn' cannot be shared by 2 ranks",
        "the positions of this rank's tokens",
        "with all that it returns, as the positions of this rank's tokens and shifted labels",
        "a mask [1, 1, 8, 8] of torch.bool for 8 of 16 places",
        "MixtralForCausalLM is for one process",
    ]
    for texts in run_ranks(_refused, 2, mesh={"context": 2}):
        for text, part in zip(texts, expected, strict=True):
            assert part in text, text


def _in_graphs(ctx):
    """A decoder layer compiled in one graph, and recomputed, less neither."""
    found = []
    layer = transformers.models.llama.modeling_llama.LlamaDecoderLayer
    for options in ((), ("compile",), ("recompute",)):
        model, inner = _model("llama"), ctx
        if "recompute" in options:
            model, inner = weft.recompute(model, inner, blocks=layer)
        model, inner = weft.context_parallel(model, inner)
        if "compile" in options:
            model, inner = weft.compile(model, inner, blocks=layer, backend="aot_eager", fullgraph=True)
        part = weft.data.split_sequence(next(iter(DataLoader(_rows(), batch_size=4))), inner)
        loss = _loss(model, part)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    return [max((a - b).abs().max().item() for a, b in zip(found[0], one, strict=True)) for one in found[1:]]


def test_layers_are_compiled_in_one_graph_and_recomputed():
    for differences in run_ranks(_in_graphs, 2, mesh={"context": 2}):
        assert max(differences) < 1e-11


def _routed(ctx):
    """What a model returns of its routers, and what hooks keep of it."""
    model, kept = _model("mixtral").model, []
    model.layers[0].mlp.gate.register_forward_hook(lambda part, args, output: kept.append(output[0]))
    batch = next(iter(DataLoader(_rows(), batch_size=4)))
    whole = model(input_ids=batch["input_ids"], output_router_logits=True).router_logits
    model, ctx = weft.context_parallel(_model("mixtral").model, ctx)
    part = weft.data.split_sequence(batch, ctx)
    at = part["position_ids"]
    found = model(input_ids=part["input_ids"], position_ids=at, output_router_logits=True).router_logits
    expected = [one.view(4, LENGTH, -1)[:, at[0]].flatten(0, 1) for one in whole]
    return [(one - other).abs().max().item() for one, other in zip(found, expected, strict=True)], len(kept)


def test_outputs_that_transformers_collects_by_hooks_are_there_once():
    assert run_ranks(_routed, 2, mesh={"context": 2}) == [([0.0, 0.0], 1)] * 2
