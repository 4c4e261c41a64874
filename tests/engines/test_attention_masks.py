"""context_parallel: documents that share a row, padding on either side and windows are as in one process."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader

import weft
from tests.variants import variant_cases
from weft.testing import run_ranks

WORDS, LENGTH, WIDTH, WINDOW, STEPS = 31, 16, 16, 4, 4
LENGTHS = [(5, 8, 3), (1, 9, 6), (16,), (2, 2, 12)]  # of the documents in each row


class Attention(nn.Module):
    """Attention with a mask, and fewer heads of keys."""

    def __init__(self):
        super().__init__()
        # Keys have no bias: its gradient is zero but for rounding, which AdamW would make steps of.
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // 2)
        self.key, self.out = nn.Linear(WIDTH, WIDTH // 2, bias=False), nn.Linear(WIDTH, WIDTH)
        self.dropout = 0.0

    def forward(self, x, mask):
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=p, is_causal=mask is None, enable_gqa=True
        )
        return self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A language model; the mask is its argument, or made of the places or numbers of documents that are."""

    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList([Attention() for _ in range(2)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids, position_ids, segment_ids=None, mask=None, places=None):
        if segment_ids is not None:
            mask = documents(segment_ids)
        if places is not None:  # rows of this rank
            mask = windows(position_ids[:1], places)
        x = self.words(input_ids) + self.positions(position_ids)
        for layer in self.layers:
            x = x + layer(x, mask)
        return self.head(x)


class Encoder(nn.Module):
    """Torch's own layers, which are told what is padding."""

    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, dropout=0.0, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids, position_ids, padding):
        x = self.words(input_ids) + self.positions(position_ids)
        return self.head(self.layers(x, src_key_padding_mask=padding))


def causal(at):
    """Whether each place sees each other one."""
    return at[:, None, :, None] >= at[:, None, None, :]


def documents(segments):
    """Causal attention in each document."""
    places = torch.arange(segments.shape[1], device=segments.device)[None]
    return causal(places) & (segments[:, None, :, None] == segments[:, None, None, :])


def windows(at, places):
    """Causal attention to the latest places."""
    back = at[:, None, :, None] - places[:, None, None, :]
    return (back >= 0) & (back < WINDOW)


def made(kind):
    torch.manual_seed(0)
    return kind().double()


def words(step):
    draw = torch.Generator().manual_seed(step)
    return [[torch.randint(1, WORDS, (length,), generator=draw) for length in row] for row in LENGTHS]


def trained(model, losses):
    """Parameters after a few steps, on losses by their number."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        losses(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def summed(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def next_words(document):
    return torch.cat([document[1:], torch.tensor([-100])])


def one_by_one(model, step):
    """The mean loss of documents, each of them alone."""
    every = [document[None] for row in words(step) for document in row]
    count = sum(document.numel() - 1 for document in every)
    parts = (summed(model(x, torch.arange(x.shape[1])[None]), next_words(x[0])) for x in every)
    return sum(parts) / count


def packed(step):
    """As `pack_collate` packs them, in rows."""
    pack = weft.data.pack_collate()
    rows = [pack([{"input_ids": x, "labels": next_words(x)} for x in row]) for row in words(step)]
    return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}


def loss_of_parts(model, ctx, batch, call, **options):
    part = weft.data.split_sequence(batch, ctx, **options)
    count = (batch["labels"] != -100).sum() / ctx.axis_size("context")
    return summed(call(model, part), part["labels"]) / count


def in_documents(model, part):
    return model(part["input_ids"], part["position_ids"], part["segment_ids"])


def parallel(ctx, model, method, order):
    model, ctx = weft.context_parallel(model, ctx, method=method, order=order)
    return weft.replicate(model, ctx)


def train_packed(ctx, method, order):
    model, ctx = parallel(ctx, made(Model), method, order)
    options = {"order": order, "whole": "segment_ids"}
    return trained(model, lambda step: loss_of_parts(model, ctx, packed(step), in_documents, **options))


def differences(found, expected):
    return max((a - b).abs().max().item() for one in found for a, b in zip(one, expected, strict=True))


CASES = [
    (2, "heads", "zigzag"),
    (4, "gather", "contiguous"),
    *variant_cases(
        (2, "gather", "zigzag"), (2, "heads", "contiguous"), (4, "heads", "zigzag"), (4, "gather", "zigzag")
    ),
]


@pytest.mark.parametrize(("ranks", "method", "order"), CASES)
def test_documents_in_one_row_are_as_one_by_one(ranks, method, order):
    model = made(Model)
    expected = trained(model, lambda step: one_by_one(model, step))
    assert differences(run_ranks(train_packed, ranks, method, order, mesh={"context": ranks}), expected) < 1e-10


def padded(step, side):
    """Documents in rows of their own, and which places are padding."""
    every = [document for row in words(step) for document in row]
    batch = {"input_ids": every, "labels": [next_words(x) for x in every]}
    batch |= {"position_ids": [torch.arange(len(x)) for x in every]}
    filled = {key: nn.utils.rnn.pad_sequence(rows, True, -100 * (key == "labels"), side) for key, rows in batch.items()}
    return {**filled, "padding": filled["input_ids"] == 0}


def with_mask(model, part):
    return model(part["input_ids"], part["position_ids"], mask=part["mask"])


def train_padded(ctx, method, order, side):
    model, ctx = parallel(ctx, made(Model), method, order)

    def loss(step):
        batch = padded(step, side)
        sees = causal(torch.arange(LENGTH)[None]) & ~batch.pop("padding")[:, None, None]
        return loss_of_parts(model, ctx, {**batch, "mask": sees}, with_mask, order=order, whole=["mask"])

    return trained(model, loss)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("ranks", "method", "order"), CASES)
def test_padded_documents_are_as_one_by_one(ranks, method, order, side):
    model = made(Model)
    expected = trained(model, lambda step: one_by_one(model, step))
    found = run_ranks(train_padded, ranks, method, order, side, mesh={"context": ranks})
    assert differences(found, expected) < 1e-10


def train_windows(ctx, method, order, kind):
    model = made(Model)
    if "context" in dict(ctx.axes):
        model, ctx = parallel(ctx, model, method, order)

    def loss(step):
        x = torch.stack([torch.cat(row) for row in words(step)])
        batch = {"input_ids": x, "labels": x.roll(-1, 1), "position_ids": torch.arange(LENGTH).expand(len(x), -1)}
        places = torch.arange(LENGTH)[None]
        part = weft.data.split_sequence(batch, ctx, order=order)
        sees = windows(places, places)
        if kind == "biases":  # that learn, as in T5
            near = (places[:, :, None] - places[:, None, :]).abs()[:, None]
            sees = model.head.bias[:4, None, None] * near + torch.zeros(()).masked_fill(~sees, float("-inf"))
        given = {"places": places} if kind == "rows" else {"mask": sees}
        logits = model(part["input_ids"], part["position_ids"], **given)
        return summed(logits, part["labels"]) / part["labels"].numel()

    return trained(model, loss)


@pytest.mark.parametrize("kind", ["mask", "biases", "rows"])
@pytest.mark.parametrize(("ranks", "method", "order"), CASES)
def test_windows_over_slices_are_those_of_one_process(ranks, method, order, kind):
    expected = train_windows(weft.local(), method, order, kind)
    found = run_ranks(train_windows, ranks, method, order, kind, mesh={"context": ranks})
    assert differences(found, expected) < 1e-10


def train_dropping(ctx, method):
    """Packed documents, with dropout of attention weights."""
    model = made(Model)
    for layer in model.layers:
        layer.dropout = 0.3
    every = [{key: values[row] for key, values in packed(step).items()} for step in range(2) for row in range(4)]
    loader, ctx = weft.shard_data(DataLoader(every, batch_size=4), ctx)
    model, loader, ctx = weft.keyed_dropout(model, loader, ctx)
    model, ctx = parallel(ctx, model, method, "zigzag")
    batches = list(loader)
    return trained(model, lambda step: loss_of_parts(model, ctx, batches[step % 2], in_documents, whole="segment_ids"))


@pytest.mark.parametrize("method", ["heads", "gather"])
def test_documents_with_dropout_are_as_in_one_process(method):
    (expected,) = run_ranks(train_dropping, 1, method, mesh={"context": 1})
    (other,) = run_ranks(train_packed, 1, method, "zigzag", mesh={"context": 1})
    assert differences([other], expected) > 1e-3
    assert differences(run_ranks(train_dropping, 2, method, mesh={"context": 2}), expected) < 1e-10


class OfEnds(nn.Module):
    """Attention in documents of which it is given the ends, their numbers or a mask."""

    def __init__(self):
        super().__init__()
        self.layer = Attention()

    def forward(self, x, ends=None, ids=None, mask=None):
        if ends is not None:
            ids = torch.bucketize(torch.arange(int(ends[-1])), ends, right=True)[None]
        return self.layer(x, documents(ids) if mask is None else mask)


def long_sequences(ctx, method):
    """What differs from one process in sequences of which a probe computes a part."""
    length, found = 4608, []
    ends = torch.tensor([700, 3000, 3001, length])
    ids = torch.bucketize(torch.arange(length), ends, right=True)[None]
    x = torch.randn(1, length, WIDTH, generator=torch.Generator().manual_seed(0))
    for given in ({"ends": ends}, {"ids": ids}, {"mask": documents(ids)}):
        model = made(OfEnds).float()
        expected = weft.data.split_sequence(model(x, **given), ctx)
        model, inner = weft.context_parallel(model, ctx, method=method)
        output = model(weft.data.split_sequence(x, inner), **given)
        found.append((output - expected).abs().max().item())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", ["heads", "gather"])
def test_parts_of_long_sequences_are_measured_with_their_masks(method):
    for found in run_ranks(long_sequences, 2, method, mesh={"context": 2}):
        assert max(found) < 1e-5


def train_encoder(ctx, method, order):
    model = made(Encoder)
    if "context" in dict(ctx.axes):
        model, ctx = parallel(ctx, model, method, order)

    def loss(step):
        batch = padded(step, "left")
        part = weft.data.split_sequence(batch, ctx, order=order)
        logits = model(part["input_ids"], part["position_ids"], part["padding"])
        count = (batch["labels"] != -100).sum() / dict(ctx.axes).get("context", 1)
        return summed(logits, part["labels"]) / count

    return trained(model, loss)


@pytest.mark.parametrize(("ranks", "method", "order"), CASES)
def test_layers_of_torch_are_told_what_is_padding(ranks, method, order):
    expected = train_encoder(weft.local(), method, order)
    found = run_ranks(train_encoder, ranks, method, order, mesh={"context": ranks})
    assert differences(found, expected) < 1e-10
