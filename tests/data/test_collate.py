"""Padding to the longest, and batches of like length."""

import pickle
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import weft
from weft.testing import fake


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 4))
def test_the_padding_is_the_least_possible(lengths, multiple):
    rows = [torch.arange(1, length + 1) for length in lengths]
    batch = weft.data.pad_collate(multiple_of=multiple)(rows)
    assert batch.shape == (len(rows), -(-max(lengths) // multiple) * multiple)
    assert [row[:n].tolist() for row, n in zip(batch, lengths, strict=True)] == [row.tolist() for row in rows]
    assert int((batch != 0).sum()) == sum(lengths)


def test_samples_of_dicts_and_tuples():
    collate = pickle.loads(pickle.dumps(weft.data.pad_collate(fill={"label": -100}, mask="real")))
    samples = [{"text": torch.ones(n), "label": torch.zeros(n, 2), "name": str(n), "n": n} for n in (2, 3)]
    batch = collate(samples)
    assert batch["label"].shape == (2, 3, 2) and batch["label"][0, 2].tolist() == [-100, -100]
    assert batch["real"].tolist() == [[True, True, False], [True] * 3]
    assert batch["name"] == ["2", "3"] and batch["n"].tolist() == [2, 3]
    x, y = weft.data.pad_collate(dim=1)([(torch.ones(2, 1), 0), (torch.ones(2, 3), 1)])
    assert x.shape == (2, 2, 3) and y.tolist() == [0, 1]
    with pytest.raises(ValueError, match="(?s)multiple_of = 0.*fix:"):
        weft.data.pad_collate(multiple_of=0)


@pytest.mark.filterwarnings("ignore:shard_data. an epoch has no step")
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.booleans())
def test_every_sample_is_in_one_batch_at_every_number_of_ranks(lengths, batch_size, world, shuffle, drop_last):
    def make(rank, size):
        sampler = weft.data.length_batches(lengths, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last, pool=3)
        loader, _ = weft.shard_data(
            DataLoader(lengths, batch_sampler=sampler), fake(rank, size), uneven="empty", with_ids=True
        )
        steps = [rows.ids.tolist() for _, rows in loader]
        assert len(steps) == len(loader)
        return steps

    whole = make(0, 1)
    parts = [make(rank, world) for rank in range(world)]
    joined = [batch for step in zip(*parts, strict=True) for batch in step if batch]
    assert joined == whole[: len(joined)] and len(whole) - len(joined) < (world if drop_last else 1)
    seen = sorted(i for batch in whole for i in batch)
    assert len(set(seen)) == len(seen) and len(lengths) - len(seen) < (batch_size if drop_last else 1) * max(
        1, len(lengths)
    )
    if not drop_last:
        assert seen == list(range(len(lengths)))


def test_epochs_differ_and_the_padding_is_small():
    draw = random.Random(0)
    lengths = [draw.randrange(1, 200) for _ in range(2000)]
    sampler = weft.data.length_batches(lengths, batch_size=8)
    loader, _ = weft.shard_data(DataLoader(lengths, batch_sampler=sampler), weft.local(), with_ids=True)
    first, second = [[rows.ids.tolist() for _, rows in loader] for _ in range(2)]
    assert first != second
    order = torch.randperm(2000).split(8)
    at_random = weft.data.padding_share(lengths, [batch.tolist() for batch in order])
    assert at_random > 0.4 and weft.data.padding_share(lengths, first) < 0.05
    assert weft.data.padding_share(lengths, []) == 0
    with pytest.raises(ValueError, match="(?s)found:    7.*fix:"):
        weft.data.padding_share([1], [[7]])
    with pytest.raises(ValueError, match="(?s)batch_size = 0.*fix:"):
        weft.data.length_batches([1], batch_size=0)
