"""shard_data(balance="tokens") and pack_collate: equal costs on all ranks, each sample once, exact means."""

import math
import statistics

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import weft
from weft.data.equal_cost import Costs, alike_together, equal_shares
from weft.errors import ContextError
from weft.testing import fake, largest_difference, run_ranks

COUNT = 1500


def _lengths(sigma=0.8, count=COUNT):
    draw = torch.Generator().manual_seed(3)
    return torch.randn(count, generator=draw).mul(sigma).add(5.0).exp().int().clamp(min=1).tolist()


def _batches(rank, ranks, *, batch_size=8, state=None, epoch=0, balance="tokens", lengths=None, **options):
    lengths = lengths or _lengths()
    cost = {"cost": lengths, "balance": balance} if balance == "tokens" else {}
    loader = DataLoader(range(len(lengths)), batch_size=batch_size, shuffle=True)
    loader, _ = weft.shard_data(loader, fake(rank, ranks), **cost, **options)
    loader.set_epoch(epoch)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def _tokens(ranks, lengths, **options):
    """Tokens of every rank in every step."""
    everyone = [_batches(rank, ranks, lengths=lengths, **options) for rank in range(ranks)]
    return [[sum(lengths[i] for i in batch.tolist()) for batch in loader] for loader in everyone]


def _spread(values):
    return (max(values) - min(values)) / statistics.mean(values)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("sigma", [0.5, 0.8, 1.0])
def test_all_ranks_have_the_same_number_of_tokens_in_a_step(ranks, sigma):
    lengths = _lengths(sigma)
    balanced = _tokens(ranks, lengths)
    plain = _tokens(ranks, lengths, balance="samples")
    assert statistics.mean(map(_spread, zip(*balanced, strict=True))) <= 0.05
    assert _spread([sum(tokens) for tokens in balanced]) <= 0.05
    assert statistics.mean(map(_spread, zip(*plain, strict=True))) > (0.15 if ranks == 2 else 0.35)


@pytest.mark.parametrize("mode", ["batches", "split"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_sample_is_read_once_per_epoch(ranks, mode):
    for epoch in (0, 1):
        loaders = [_batches(rank, ranks, mode=mode, epoch=epoch, uneven="empty") for rank in range(ranks)]
        read = [i for loader in loaders for batch in loader for i in batch.tolist()]
        assert sorted(read) == list(range(COUNT))
    assert len({len(loader) for loader in loaders}) == 1


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("same_global_batch", [True, False])
def test_resumed_at_another_world_size_each_sample_is_read_once(before, after, same_global_batch):
    read, states = [], []
    for rank in range(before):
        loader = _batches(rank, before, batch_size=8)
        for _, batch in zip(range(20), loader, strict=False):
            read += batch.tolist()
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states)
    size = 8 * before // after if same_global_batch else 8
    for rank in range(after):
        read += [i for b in _batches(rank, after, batch_size=size, state=states[0], uneven="empty") for i in b.tolist()]
    assert sorted(read) == list(range(COUNT))


def test_a_run_that_is_resumed_reads_what_it_would_have_read():
    loader = _batches(1, 2)
    steps = iter(loader)
    for _ in range(7):
        next(steps)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in steps]
    assert [batch.tolist() for batch in _batches(1, 2, state=state)] == rest


@pytest.mark.parametrize("shares", [1, 2, 3, 5])
def test_shares_are_a_partition_and_none_is_empty(shares):
    for count in (shares, shares + 1, 4 * shares):
        for costs in ([1.0] * count, [float(i + 1) ** 3 for i in range(count)], [1e9, *[1e-9] * (count - 1)]):
            found = equal_shares(costs, shares)
            assert len(found) == shares and all(found)
            assert sorted(place for places in found for place in places) == list(range(count))
    assert equal_shares([3.0], 2) == [[0], []]


@pytest.mark.parametrize("count", [0, 1, 2, 5, 1024, 1025, 3000])
def test_an_order_by_groups_holds_the_same_samples(count):
    units = list(range(count))
    assert sorted(alike_together(units, Costs(lambda i: 1 + i % 7))) == units


# -- packing ------------------------------------------------------------------------------------------


def test_packed_samples_know_their_positions_and_segments():
    collate = weft.data.pack_collate(multiple_of=4, fill={"labels": -100}, first={"labels": -100})
    samples = [
        {"input_ids": torch.tensor(ids), "labels": torch.tensor(ids), "id": n}
        for n, ids in enumerate([[1, 2, 3], [4, 5]])
    ]
    batch = collate(samples)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 0, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, 5, -100, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch["segment_ids"].tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]]
    assert batch["id"].tolist() == [0, 1]
    pairs = [(torch.ones(2, 3), torch.zeros(2)), (torch.ones(1, 3), torch.ones(1))]
    x, y, positions, segments = weft.data.pack_collate()(pairs)
    assert x.shape == (1, 3, 3) and y.tolist() == [[0.0, 0.0, 1.0]]
    assert positions.tolist() == [[0, 1, 0]] and segments.tolist() == [[0, 0, 1]]


def test_samples_that_cannot_be_packed_are_refused():
    with pytest.raises(ValueError, match="has no length"):
        weft.data.pack_collate()([{"x": 1}])
    with pytest.raises(ValueError, match="two lengths"):
        weft.data.pack_collate()([{"x": torch.ones(2), "y": torch.ones(3)}])
    with pytest.raises(ValueError, match="multiple_of"):
        weft.data.pack_collate(multiple_of=0)


class _Texts(Dataset):
    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        return torch.randint(0, 11, (self.lengths[index],), generator=draw)


class _Reader(nn.Module):
    """One causal attention inside of segments, over embeddings of tokens and positions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places, self.head = nn.Embedding(11, 8), nn.Embedding(64, 8), nn.Linear(8, 11)
        self.double()

    def forward(self, x, positions, segments):
        hidden = self.tokens(x) + self.places(positions)
        allowed = (segments[:, :, None] == segments[:, None, :]).tril()
        return self.head(nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=allowed))


def _train(ctx, lengths, *, pack):
    texts = _Texts(lengths)
    collate = weft.data.pack_collate() if pack else None
    loader = DataLoader(texts, batch_size=4 if pack else 1, collate_fn=collate, shuffle=True)
    loader, ctx = weft.shard_data(loader, ctx, mode="split" if pack else "batches", cost=lengths, balance="tokens")
    model, ctx = weft.replicate(_Reader(), ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, windows, ctx = weft.accumulate_grads(model, loader, ctx, steps=2 if pack else 8)
    for window in windows:
        tokens = window.denominator(lambda batch: int((batch[0] >= 0).sum()) if pack else batch.numel())
        for batch in window:
            packed = batch if pack else weft.data.pack_collate()(list(batch))
            loss = nn.functional.cross_entropy(model(*packed)[0], packed[0][0], reduction="sum")
            (loss / tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def test_means_over_tokens_are_exact_with_packed_and_balanced_batches():
    lengths = [length % 20 + 1 for length in _lengths(count=32)]
    (expected,) = run_ranks(_train, 1, lengths, pack=False)
    for ranks in (1, 2):
        for found in run_ranks(_train, ranks, lengths, pack=True):
            assert largest_difference(found, expected) < 1e-12


# -- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"balance": "tokens"}, ValueError, "needs costs"),
        ({"cost": [1] * 8}, ValueError, "reads no costs"),
        ({"cost": [1] * 8, "balance": "bytes"}, ValueError, "balance"),
        ({"cost": [1] * 7, "balance": "tokens"}, TypeError, "does not return the cost"),
        ({"cost": len, "balance": "tokens"}, TypeError, "does not return the cost"),
        ({"cost": [0] * 8, "balance": "tokens"}, ValueError, "0.0 for 0"),
        ({"cost": [math.nan] * 8, "balance": "tokens"}, ValueError, "nan for 0"),
        ({"cost": [1] * 8, "balance": "tokens", "uneven": "pad"}, ValueError, "each used once"),
        ({"cost": [1] * 8, "balance": "tokens", "mode": "dispatch"}, ValueError, "each used once"),
    ],
)
def test_bad_options(options, kind, text):
    with pytest.raises(kind, match=text):
        weft.shard_data(DataLoader(range(8), batch_size=2), weft.local(), **options)


def test_a_batch_sampler_and_a_stream_are_refused():
    sampler = weft.data.length_batches([1] * 8, batch_size=2)
    for loader in (DataLoader(range(8), batch_sampler=sampler), DataLoader(range(8), batch_size=None)):
        with pytest.raises(ValueError, match="a dataset with an index and a batch_size"):
            weft.shard_data(loader, weft.local(), cost=[1] * 8, balance="tokens")


def _other_costs(ctx):
    with pytest.raises(ContextError, match="costs"):
        weft.shard_data(DataLoader(range(8), batch_size=2), ctx, cost=[1 + ctx.rank] * 8, balance="tokens")


def test_ranks_with_other_costs_raise():
    run_ranks(_other_costs, 2)
