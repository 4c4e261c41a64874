"""context_parallel: packed, padded and windowed batches through models of transformers are as in one process."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import weft
from tests.variants import variant_cases
from weft.engines.torch.hooks.method_hooks import Removable, attach
from weft.errors import ProbeFailed
from weft.testing import run_ranks

transformers = pytest.importorskip("transformers")

WORDS, LENGTH, STEPS = 61, 16, 4
LENGTHS = [(5, 8, 3), (1, 9, 6), (16,), (2, 2, 12)]  # of the documents in each row
SIZES = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "use_cache": False}
# Windows of 4 places over slices of 8, and layers of both kinds.
WINDOWS = {"use_sliding_window": True, "sliding_window": 4}
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**WINDOWS, "max_window_layers": 1}),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", {"local_attention": 4}),
    "opt": ("OPTForCausalLM", "OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32, **NO_DROPOUT}),
    "bert": ("BertForMaskedLM", "BertConfig", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
}


def _model(kind, implementation="sdpa"):
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    name, config, options = MODELS[kind]
    sizes = {**SIZES, **options, "attn_implementation": implementation}
    return getattr(transformers, name)(getattr(transformers, config)(**sizes)).double()


def _documents(step):
    draw = torch.Generator().manual_seed(step)
    return [[torch.randint(1, WORDS, (length,), generator=draw) for length in row] for row in LENGTHS]


def _labels(kind, document):
    """Of the next word; those that models of transformers shift have none where a document begins."""
    return document if kind == "bert" else torch.cat([torch.tensor([-100]), document[1:]])


def _batch(kind, step, layout):
    rows = _documents(step)
    if layout == "packed":
        every = {"input_ids": [torch.cat(row) for row in rows]}
        every["labels"] = [torch.cat([_labels(kind, one) for one in row]) for row in rows]
        every["position_ids"] = [torch.cat([torch.arange(len(one)) for one in row]) for row in rows]
        return {key: torch.stack(values) for key, values in every.items()}
    alone = [one for row in rows for one in row]
    every = {"input_ids": alone, "labels": [_labels(kind, one) for one in alone]}
    every |= {"attention_mask": [torch.ones_like(one) for one in alone]}
    # The embedding of a document does not depend on where it is.
    every |= {"position_ids": [torch.arange(len(one)) for one in alone]}
    pad = torch.nn.utils.rnn.pad_sequence
    return {key: pad(values, True, -100 * (key == "labels"), layout) for key, values in every.items()}


def _sum(kind, model, part):
    given = {key: part[key] for key in ("input_ids", "attention_mask", "position_ids") if key in part}
    labels = part["labels" if kind == "bert" else "shift_labels"]
    return F.cross_entropy(model(**given).logits.flatten(0, 1), labels.flatten(), reduction="sum")


def _one_by_one(kind, model, step):
    every = [{"input_ids": x[None], "labels": _labels(kind, x)[None]} for row in _documents(step) for x in row]
    count = sum((document["labels"] != -100).sum() for document in every)
    return sum(_sum(kind, model, weft.data.split_sequence(one, weft.local())) for one in every) / count


def _trained(model, loss):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def _train(ctx, kind, layout, method, order):
    model, ctx = weft.context_parallel(_model(kind), ctx, method=method, order=order)
    model, ctx = weft.replicate(model, ctx)

    def loss(step):
        batch = _batch(kind, step, layout)
        count = (batch["labels"] != -100).sum() / ctx.axis_size("context")
        return _sum(kind, model, weft.data.split_sequence(batch, ctx, order=order)) / count

    return _trained(model, loss)


def _differences(found, expected):
    return max((a - b).abs().max().item() for one in found for a, b in zip(one, expected, strict=True))


@pytest.mark.parametrize(
    ("kind", "layout", "ranks", "method", "order"),
    [
        ("llama", "packed", 2, "heads", "zigzag"),
        ("llama", "left", 4, "gather", "zigzag"),
        ("mistral", "packed", 2, "gather", "contiguous"),
        ("qwen2", "right", 4, "heads", "zigzag"),
        ("bert", "left", 2, "heads", "contiguous"),
        *variant_cases(
            *(
                (kind, layout, ranks, method, order)
                for kind, layouts in {"llama": ("packed", "left", "right"), "qwen2": ("packed", "left")}.items()
                for layout in layouts
                for ranks, method, order in (
                    (2, "gather", "contiguous"),
                    (4, "heads", "zigzag"),
                    (4, "gather", "zigzag"),
                )
            ),
            ("bert", "right", 4, "gather", "zigzag"),
            ("mistral", "left", 4, "heads", "contiguous"),
        ),
    ],
)
def test_documents_are_as_one_by_one(kind, layout, ranks, method, order):
    model = _model(kind)
    expected = _trained(model, lambda step: _one_by_one(kind, model, step))
    found = run_ranks(_train, ranks, kind, layout, method, order, mesh={"context": ranks}, probes="auto")
    assert _differences(found, expected) < 1e-10


def _attached(ctx):
    """A mask of floats, and something that was attached to the forward that makes masks."""
    model, calls = _model("mistral"), []

    def around(call, args, kwargs):
        calls.append(len(args))
        return call(*args, **kwargs)

    batch = _batch("mistral", 0, "left")
    batch["attention_mask"] = batch["attention_mask"].double()
    expected = _sum("mistral", model, weft.data.split_sequence(batch, weft.local()))
    attach(model.model, Removable(), around=around, methods=["forward"])
    model, ctx = weft.context_parallel(model, ctx)
    found = _sum("mistral", model, weft.data.split_sequence(batch, ctx))
    return len(calls) > 1, abs(weft.reduce(found.detach(), ctx, "sum") - expected).item()


def test_what_was_attached_around_a_forward_stays():
    for was_called, difference in run_ranks(_attached, 2, mesh={"context": 2}):
        assert was_called and difference < 1e-10


def _as_given(ctx, kind, batch, options):
    model = _model(kind)
    expected = model(**batch).loss
    expected.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model, ctx = weft.context_parallel(model, ctx)
    model, ctx = weft.replicate(model, ctx)
    loss = model(**weft.data.split_sequence(batch, ctx, **options)).loss
    loss.backward()
    mean = weft.reduce(loss.detach(), ctx, "mean")
    torch.testing.assert_close(mean.float(), expected.detach(), rtol=0, atol=1e-6)
    for found, wanted in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(found.grad, wanted, rtol=0, atol=1e-10)


def _added(ctx, kind):
    """Labels of a masked language model, and positions that a model counts by its mask."""
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(1, WORDS, (4, LENGTH), generator=draw)
    mask = torch.ones_like(words)
    for row, hidden in enumerate((0, 5, 7, 0)):
        mask[row, :hidden] = 0
    batch = {"input_ids": words, "labels": torch.where(mask == 1, words, -100), "attention_mask": mask}
    with pytest.raises(ProbeFailed, match=r"(?s)shifts_labels=False.*batch\[\"position_ids\"\] = positions"):
        _as_given(ctx, kind, batch, {})
    if kind == "opt":
        batch["position_ids"] = (mask.cumsum(1) * mask - 1).long()
    _as_given(ctx, kind, batch, {"shifts_labels": kind == "opt"})


@pytest.mark.parametrize("kind", ["modernbert", "opt"])
def test_what_is_added_to_a_batch_is_compared_with_what_the_model_computes_without_it(kind):
    run_ranks(_added, 2, kind, mesh={"context": 2})
