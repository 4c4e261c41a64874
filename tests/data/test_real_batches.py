"""What a loader really reads, against the plan: indices of any type, epochs in workers, samples that are not there."""

import itertools
import random
import time
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    default_collate,
)

import weft
from weft.data.order.epoch_order import EpochOrder
from weft.testing import fake, run_ranks

# -- indices -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.asarray, torch.tensor, int])
@pytest.mark.parametrize("workers", [0, 1])
def test_ids_are_numbers_for_indices_of_any_integer_type(kind, workers):
    given = []

    class Data:
        def __len__(self):
            return 8

        def __getitem__(self, index):
            given.append(index)
            return int(index)

    order = [kind(i) for i in (5, 2, 7, 0, 1, 6, 3, 4)]
    options = {"with_ids": True, "keyed": True}
    loader, _ = weft.shard_data(
        DataLoader(Data(), batch_size=2, sampler=order, num_workers=workers), fake(1, 2), **options
    )
    found = list(loader)
    assert [ids.ids.tolist() for _, ids in found] == [batch.tolist() for batch, _ in found] == [[7, 0], [3, 4]]
    assert workers or [type(each) for each in given] == [
        type(each) for each in (order[2], order[3], order[6], order[7])
    ]


def test_randomness_by_sample_is_the_same_for_indices_of_any_integer_type():
    class Noise:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.rand(())

    def drawn(kind):
        loader, _ = weft.shard_data(DataLoader(Noise(), sampler=[*map(kind, range(4))]), weft.local(), keyed=True)
        return torch.cat([*loader]).tolist()

    assert drawn(int) == drawn(np.int32) == drawn(torch.tensor)


def test_ids_that_are_numbers_in_part_are_refused():
    data = {0: 0.0, "one": 1.0}
    loader, _ = weft.shard_data(DataLoader(data, batch_size=2, sampler=[0, "one"]), weft.local(), with_ids=True)
    with pytest.raises(weft.errors.ContractError, match=r"(?s)some indices of a batch are numbers.*0, 'one'.*with_ids"):
        list(loader)
    loader, _ = weft.shard_data(DataLoader(data, sampler=["one"]), weft.local(), with_ids=True)
    assert [ids.ids.tolist() for _, ids in loader] == [[-1]]


# -- epochs ------------------------------------------------------------------------------------------


class _Told(Dataset):
    """Says in each sample the epoch that it was told, and numbers that were drawn in it."""

    epoch = -1

    def __init__(self, length=4):
        self.length = length

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor([self.epoch, index, random.random(), np.random.rand(), torch.rand(())], dtype=torch.float64)


class _Wrapper:
    """No dataset of torch, and nothing says that another is inside."""

    def __init__(self, **parts):
        self.__dict__.update(parts)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        found = self.inner
        while not isinstance(found, Dataset):
            found = next(iter(found.values() if isinstance(found, dict) else found))
        return found[index]


class _Stacked(Dataset):
    """In charge of what is inside."""

    def __init__(self, inner):
        self.inner = inner

    def set_epoch(self, epoch):
        self.inner.set_epoch(10 * epoch)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.inner[index]


NESTED = {
    "alone": _Told,
    "subset": lambda: Subset(Subset(_Told(), range(4)), range(4)),
    "joined": lambda: ConcatDataset([_Told(2), _Told(2)]),
    "in a list": lambda: _Wrapper(inner=[_Told()]),
    "in a dict": lambda: _Wrapper(inner={"a": (_Told(),)}, other=list(range(100))),
    "in itself": lambda: _Wrapper(inner=[one := Subset(_Told(), range(4)), one.__dict__.update(one=one)]),
}


@pytest.mark.parametrize(
    ("kind", "persistent"),
    [*((kind, None) for kind in NESTED), *itertools.product(["joined", "in a dict"], [False, True])],
)
def test_datasets_inside_of_others_are_told_the_epoch(kind, persistent):
    workers = {} if persistent is None else {"num_workers": 1, "persistent_workers": persistent}
    loader, _ = weft.shard_data(DataLoader(NESTED[kind](), batch_size=4, **workers), weft.local())
    assert [batch[:, 0].tolist() for _ in range(3) for batch in loader] == [[epoch] * 4 for epoch in range(3)]


def test_a_dataset_with_set_epoch_is_in_charge_of_what_is_inside():
    loader, _ = weft.shard_data(DataLoader(Subset(_Stacked(_Told()), range(4)), batch_size=4), weft.local())
    assert [batch[0, 0].item() for _ in range(3) for batch in loader] == [0, 10, 20]


def test_streams_and_samplers_inside_of_others_are_told_the_epoch():
    class Stream(IterableDataset):
        set_epoch = _Told.set_epoch

        def __iter__(self):
            yield self.epoch

    class Order:
        epoch = -1
        set_epoch = _Told.set_epoch

        def __len__(self):
            return 1

        def __iter__(self):
            return iter([self.epoch % 4])

    loader, _ = weft.shard_data(DataLoader(ChainDataset([Stream(), Stream()]), batch_size=2), weft.local())
    assert [batch.tolist() for _ in range(2) for batch in loader] == [[0, 0], [1, 1]]
    order = Order()
    order.data_source = data = _Told()  # which the loader tells, and not the sampler
    inner = BatchSampler(BatchSampler(order, 1, drop_last=False), 1, drop_last=False)
    EpochOrder(inner, None, None).order(0, 3)
    assert order.epoch == 3 and data.epoch == -1


def test_workers_that_stay_begin_each_epoch_like_new_ones():
    def drawn(epochs, *, persistent, position=None):
        loader = DataLoader(_Told(), batch_size=1, shuffle=True, num_workers=2, persistent_workers=persistent)
        loader, _ = weft.shard_data(loader, fake(1, 2, seed=3))
        if position is not None:
            loader.load_state_dict(position)
        return [[batch.tolist() for batch in loader] for _ in range(epochs)], loader.state_dict()

    new, position = drawn(2, persistent=False)
    stay, _ = drawn(3, persistent=True)
    assert stay[:2] == new and stay[2] == drawn(1, persistent=True, position=position)[0][0]
    assert len({row[2] for epoch in stay for batch in epoch for row in batch}) == 6  # no number twice


# -- samples that are not in the batch ---------------------------------------------------------------

BAD = {1, 2, 6, 13, 14, 20, *range(24, 30), 31, 40}


class _Data(Dataset):
    def __init__(self, sample, length=72):
        self.sample, self.length = sample, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.sample(index)


class _Several(_Data):
    """Leaves bad samples out itself."""

    def __getitems__(self, indices):
        return [self.sample(index) for index in indices if index not in BAD]


class _Columns:
    """A batch of a user's own class."""

    def __init__(self, x, y):
        self.x, self.y = x, y


class _Slots:
    """One that cannot be looked into."""

    __slots__ = ("pair",)

    def __init__(self, *pair):
        self.pair = pair


def _pair(index):
    return torch.full((3,), float(index)), torch.tensor(index)  # three numbers, in batches of three samples, too


def _or_none(index):
    return None if index in BAD else _pair(index)


def _good(samples):
    return [one for one in samples if one is not None]


def _boxes(samples):
    good = _good(samples)
    boxes = [torch.full((int(y) % 3, 4), float(y)) for _, y in good]
    return torch.stack([x for x, _ in good]), torch.cat(boxes), [int(y) for _, y in good]


def _taken_out(samples):
    labels = [one.pop("y") for one in samples]
    kept = [place for place, label in enumerate(labels) if label not in BAD]
    return {"x": torch.tensor([samples[place]["x"] for place in kept]), "y": [labels[place] for place in kept]}


def _or_empty(make):
    return lambda samples: make(_good(samples)) if _good(samples) else None


def _ints(values):
    return [int(value) for value in values]


# A dataset, a `collate_fn`, the samples in a batch of it, and what is expected on several ranks if none is left out.
COLLATES = {
    "columns": (_Data(_or_none), _or_empty(default_collate), lambda b: _ints(b[1]), "exact"),
    "samples": (_Data(_or_none), _good, lambda b: [int(y) for _, y in b], "exact"),
    "tensors": (_Data(_or_none), lambda s: [x.clone() for x, _ in _good(s)], lambda b: [int(x[0]) for x in b], "exact"),
    "zip": (_Data(_or_none), lambda s: tuple(zip(*_good(s), strict=True)), lambda b: _ints(b[1]) if b else [], "exact"),
    "boxes": (_Data(_or_none), _or_empty(_boxes), lambda b: b[2], "exact"),
    "text": (_Data(_or_none), lambda s: [f"{int(y)}" for _, y in _good(s)], _ints, "exact"),
    "class": (_Data(_or_none), _or_empty(lambda s: _Columns(*default_collate(s))), lambda b: _ints(b.y), "exact"),
    "nested": (_Data(_or_none), _or_empty(lambda s: {"in": default_collate(s)}), lambda b: _ints(b["in"][1]), "exact"),
    "by name": (_Data(_or_none), lambda s: {f"{int(y)}": x for x, y in _good(s)}, _ints, "exact"),
    "twice": (_Data(_or_none), _or_empty(lambda s: default_collate(s + s)), lambda b: _ints(b[1]), "exact"),
    "beside constants": (
        _Data(_or_none),
        lambda s: {"y": torch.tensor([int(y) for _, y in _good(s)]), "anchors": torch.zeros(9, 4), "n": 3},
        lambda b: _ints(b["y"]),
        "exact",
    ),
    "taken out": (_Data(lambda i: {"x": float(i), "y": i}), _taken_out, lambda b: b["y"], "exact"),
    "by the dataset": (_Several(_pair), lambda s: [x.clone() for x, _ in s], lambda b: [int(x[0]) for x in b], "exact"),
    "slots": (_Data(_or_none), _or_empty(lambda s: _Slots(*default_collate(s))), lambda b: _ints(b.pair[1]), "raises"),
    "iterator": (
        _Data(_or_none),
        lambda s: zip(*_good(s), strict=True),
        lambda b: _ints(dict(enumerate(b)).get(1, ())),
        "raises",
    ),
    "first": (_Data(_pair), lambda s: default_collate(s[:1]), lambda b: _ints(b[1]), "raises"),
    "halves": (
        _Data(_pair),
        lambda s: [default_collate(s[: len(s) // 2]), default_collate(s[len(s) // 2 :])],
        lambda b: _ints([*b[0][1], *b[1][1]]),
        "raises",
    ),
    "one row": (
        _Data(lambda i: torch.full((1 + i % 3,), i)),
        weft.data.pack_collate(),
        lambda b: sorted({*_ints(b[0][0])}),
        "raises",
    ),
    "fixed": (
        _Data(_or_none),
        lambda s: torch.tensor([int(y) for _, y in _good(s)] + [-1] * (8 - len(_good(s)))),
        lambda b: [y for y in b.tolist() if y >= 0],
        "raises",
    ),
}


class _Stream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        return (self.data[index] for index in range(len(self.data)))


def _weights(kind, ranks, size, how):
    """For each step, the weight that each sample gets by its share in the mean over the ranks; "raises" if it does."""
    data, collate, samples_of, _ = COLLATES[kind]
    data = _Stream(data) if how == "stream" else data
    order = [[*range(i, i + size)] for i in range(0, 72, size)]
    options = {"batch_sampler": order} if how == "batches" else {"batch_size": size}
    options |= {"num_workers": 1} if how == "workers" else {}
    steps = None
    for rank in range(ranks):
        loader = DataLoader(data, collate_fn=collate, **options)
        loader, _ = weft.shard_data(loader, fake(rank, ranks), uneven="balance")
        found = []
        try:
            for batch in loader:
                there = [] if batch is None else samples_of(batch)
                share = 0.0 if batch is None else loader.share
                found.append([share / ranks / len(there) for _ in there])
        except weft.errors.ContractError as error:
            assert "weft.metrics.denominator" in str(error) and "samples" in str(error)
            return "raises"
        steps = found if steps is None else [[*a, *b] for a, b in zip(steps, found, strict=True)]
    return steps


def _is_mean(weights):
    return all(abs(weight * len(weights) - 1) < 1e-12 for weight in weights)


@pytest.mark.parametrize("how", ["samples", "batches", "stream"])
@pytest.mark.parametrize("kind", COLLATES)
def test_a_share_is_that_of_the_samples_in_the_batch_or_raises(kind, how, monkeypatch):
    if kind == "by the dataset" and how == "stream":
        kind = "samples"
    for size in (2, 3, 4):
        assert all(map(_is_mean, _weights(kind, 1, size, how))), size
        if COLLATES[kind][3] == "raises":
            assert _weights(kind, 2, size, how) == "raises" or kind == "halves"
            continue
        assert _weights(kind, 2, size, how) == _weights(kind, 3, size, how) == "raises", size
    monkeypatch.setattr(f"{__name__}.BAD", set())
    if COLLATES[kind][3] == "exact":
        for ranks, size in itertools.product((2, 3), (2, 3, 4)):
            assert all(map(_is_mean, _weights(kind, ranks, size, how))), (ranks, size)


@pytest.mark.parametrize("kind", COLLATES)
def test_shares_in_windows_on_one_rank(kind):
    data, collate, samples_of, alone = COLLATES[kind]
    loader, ctx = weft.shard_data(DataLoader(data, batch_size=3, collate_fn=collate), weft.local())
    frozen = torch.nn.Linear(1, 1).requires_grad_(False)
    weights = []
    try:
        for window in weft.accumulate_grads(frozen, loader, ctx, steps=4)[1]:
            weights.append([])
            for batch in window:
                there = [] if batch is None else samples_of(batch)
                weights[-1] += [window.share / len(there) for _ in there]
    except ValueError as error:
        assert (alone == "raises" or kind == "by name") and "window.denominator" in str(error)  # see below
    else:
        assert all(map(_is_mean, weights)) and len(weights) == 6


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [kind for kind in COLLATES if COLLATES[kind][3] == "exact" and kind != "twice"])
def test_ids_are_those_of_the_samples_in_the_batch(kind, workers):
    if workers and kind not in ("tensors", "taken out"):
        return
    data, collate, samples_of, _ = COLLATES[kind]
    torch.manual_seed(0)
    states = torch.get_rng_state(), random.getstate()
    loader = DataLoader(data, batch_size=3, shuffle=True, collate_fn=collate, num_workers=workers)
    found = [(b, ids) for b, ids in weft.shard_data(loader, weft.local(seed=1), with_ids=True)[0]]
    unknown = 0
    for batch, ids in found:
        there = [] if batch is None else samples_of(batch)
        assert ids.valid.all() and len(ids) >= len(there)
        unknown += ids.ids.tolist() != there
        assert len(ids) > len(there) or ids.ids.tolist() == there
    assert unknown <= 1  # by name: one sample alone says nothing
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()


def test_metrics_of_samples_in_batches():
    loader = DataLoader(_Several(_pair), batch_size=4, shuffle=True)
    loader, ctx = weft.shard_data(loader, weft.local(seed=2), with_ids=True)
    batches, ids = zip(*((batch[1], ids) for batch, ids in loader if len(ids)), strict=True)
    assert weft.metrics.gather_metrics(list(batches), ctx, ids=list(ids)).tolist() == sorted({*range(72)} - BAD)


def test_a_sample_in_place_of_another_one_is_not_known_by_its_id():
    collate = lambda samples: default_collate((_good(samples) * 4)[:4])  # noqa: E731
    loader, ctx = weft.shard_data(
        DataLoader(_Data(_or_none, 8), batch_size=4, collate_fn=collate), weft.local(), with_ids=True
    )
    with pytest.raises(ValueError, match="leaves do not have one entry per row"):
        [weft.metrics.gather_metrics(batch[1], ctx, ids=ids) for batch, ids in loader]


def test_collate_functions_that_draw_are_not_disturbed():
    class Noise:
        def __init__(self):
            self.own, self.calls = np.random.default_rng(3), 0

        def __call__(self, samples):
            self.calls += 1
            x, y = default_collate(samples)
            return x + self.own.random() + random.random() + torch.rand(()), y

    def drawn(shard):
        random.seed(1), torch.manual_seed(1)
        noise = Noise()
        loader = DataLoader(_Data(_pair, 12), batch_size=3, collate_fn=noise)
        found = torch.stack([x for x, _ in (weft.shard_data(loader, weft.local())[0] if shard else loader)])
        return found, noise.calls

    torch.manual_seed(1)
    torch.empty((), dtype=torch.int64).random_()  # torch's iterator draws a seed of its own
    (mine, calls), (torchs, _) = drawn(shard=True), drawn(shard=False)
    assert calls == 4 and mine.shape == torchs.shape


def test_a_batch_that_makes_an_earlier_share_wrong_is_not_given():
    for bad in ({6}, {6, 7}):
        data = _Data(lambda i, bad=bad: None if i in bad else _pair(i), 8)
        loader = DataLoader(data, batch_size=2, collate_fn=COLLATES["columns"][1])
        loader, _ = weft.shard_data(loader, fake(1, 2))
        batches = iter(loader)
        assert len(next(batches)[0]) == 2 and loader.share == 1
        with pytest.raises(
            weft.errors.ContractError, match=rf"(?s){2 - len(bad)} samples in a batch made on rank 1, for which 2 were"
        ):
            next(batches)
        with pytest.raises(weft.errors.ContractError, match="samples in a batch made on rank 1"):
            _ = loader.share  # from then on


def _losses(ctx, how):
    """Trains as the message says; where nothing is left of a batch, it has no rows."""
    rows = torch.arange(48.0, dtype=torch.float64).reshape(16, 3).sin()
    bad = {1, 2, 3, 9}

    def collate(indices):
        return rows[[index for index in indices if index not in bad]]

    def updated(model):
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1).double()
    first = updated(model)
    loader, ctx = weft.shard_data(DataLoader(range(16), batch_size=2, collate_fn=collate), ctx)
    model, ctx = weft.replicate(model, ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if how == "windows":
        model, windows, ctx = weft.accumulate_grads(model, loader, ctx, steps=2)
    seen = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for window in windows if how == "windows" else ([batch] for batch in loader):
            count = window.denominator(len) if how == "windows" else None
            for x in window:
                losses = model(x).square()
                if how == "unweighted":
                    loss = losses.mean() if len(x) else losses.sum()
                else:
                    loss = losses.sum() / (count or weft.metrics.denominator(len(x), ctx))
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(updated(model))
    kept = [i for i in range(4 if how != "windows" else 8) if i not in bad]
    torch.manual_seed(0)
    alone = torch.nn.Linear(3, 1).double()
    assert torch.equal(updated(alone), first)
    alone(rows[kept]).square().mean().backward()
    wanted = torch.cat([(p - 0.1 * p.grad).detach().flatten() for p in alone.parameters()])
    return (seen[0] - wanted).abs().max().item(), [str(each.message) for each in said]


@pytest.mark.slow
def test_the_lines_that_the_message_names_train_on_the_mean():
    for how in ("denominator", "windows"):
        assert all(found < 1e-12 and not said for found, said in run_ranks(_losses, 2, how)), how
    (_, zero), (_, one) = run_ranks(_losses, 2, "unweighted")
    assert "1 samples in a batch made on rank 0" in zero[0] and "0 samples in a batch made on rank 1" in one[0]
    assert "unweighted loss" in zero[0] and "weft.metrics.denominator(len(y), ctx)" in one[0]


# -- loader classes that change what torch's iterator yields -----------------------------------------


class _Repeat:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class _MultiEpoch(DataLoader):
    """As in timm."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._DataLoader__initialized = False
        if self.batch_sampler is None:
            self.sampler = _Repeat(self.sampler)
        else:
            self.batch_sampler = _Repeat(self.batch_sampler)
        self._DataLoader__initialized = True
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.sampler if self.batch_sampler is None else self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


class _Lazy(DataLoader):
    iterator = None

    def __iter__(self):
        if self.iterator is None:
            self.iterator = super().__iter__()
        for _ in range(len(self)):
            yield next(self.iterator)


class _Own(DataLoader):
    """Is its own iterator."""

    def __iter__(self):
        self.iterator = super().__iter__()
        return self

    def __next__(self):
        return next(self.iterator)


class _Ahead(DataLoader):
    def __iter__(self):
        batches = super().__iter__()
        ahead = next(batches)
        for batch in batches:
            yield ahead * 1
            ahead = batch
        yield ahead * 1


class _All(DataLoader):
    def __iter__(self):
        yield from list(super().__iter__())


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
@pytest.mark.parametrize("kind", [_MultiEpoch, _Lazy, _Own, _Ahead, _All])
def test_loaders_that_keep_or_read_ahead_their_iterator(kind, workers):
    if workers and kind in (_Own, _All):
        return
    original = kind(torch.arange(12), batch_size=2, **workers)
    loader, _ = weft.shard_data(original, fake(1, 2), with_ids=True)
    assert len(loader) == 3
    for _ in range(3):
        found = [(batch.tolist(), ids.ids.tolist(), loader.share) for batch, ids in loader]
        assert found == [([i, i + 1], [i, i + 1], 1.0) for i in (2, 6, 10)]
    next(iter(loader))
    again, _ = weft.shard_data(kind(torch.arange(12), batch_size=4, **workers), weft.local())
    again.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in again] == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert next(iter(original)).tolist() == [0, 1]  # it is as it was


class _Doubled(DataLoader):
    def __iter__(self):
        batches = super().__iter__()
        for _ in range(len(self)):
            yield 2 * next(batches)


@pytest.mark.parametrize("kind", [_MultiEpoch, _Lazy, _Own, _Ahead, _All, _Doubled])
def test_windows_hold_the_batches_of_such_loaders(kind):
    loader, ctx = weft.shard_data(kind(torch.arange(12), batch_size=2), fake(1, 2))
    _, loader, _ = weft.accumulate_grads(torch.nn.Linear(1, 1), loader, ctx, steps=2)
    factor = 2 if kind is _Doubled else 1
    for _ in range(2):
        assert len(loader) == loader.remaining == 2
        found = [[batch.tolist() for batch in window] for window in loader]
        assert found == [[[factor * i, factor * (i + 1)] for i in part] for part in ([2, 6], [10])]


def test_a_loader_that_keeps_an_iterator_over_an_unknown_epoch_is_refused():
    class Endless(_MultiEpoch):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.__dict__["batch_sampler"] = itertools.cycle([[0], [1]])

    with pytest.raises(ValueError, match=r"(?s)Endless, which keeps an iterator over a cycle.*persistent_workers=True"):
        weft.shard_data(Endless(torch.arange(4), batch_size=2), weft.local())


OTHERS = {
    "fewer": lambda batches: itertools.islice(batches, 0, None, 2),
    "twice": lambda batches: (batch for one in batches for batch in (one, one)),
    "joined": lambda batches: (list(pair) for pair in zip(batches, batches, strict=True)),
    "reversed": lambda batches: list(batches)[::-1],
    "others": lambda batches: iter([torch.arange(2)]),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", OTHERS)
def test_a_loader_class_that_yields_other_batches_is_told_so(kind, stream):
    class Other(DataLoader):
        def __iter__(self):
            return iter(OTHERS[kind](super().__iter__()))

    data = _Stream(_Data(int, 12)) if stream else range(12)
    loader, _ = weft.shard_data(Other(data, batch_size=2), weft.local())
    with pytest.raises(weft.errors.ContractError, match=r"Other.__iter__ does not yield the batches of this iteration"):
        list(loader)


def test_a_loader_class_that_begins_again_or_keeps_batches_is_told_so():
    class Again(DataLoader):
        def __iter__(self):
            yield from super().__iter__()
            yield from super().__iter__()

    class Kept(DataLoader):
        iterator = None

        def __iter__(self):
            self.iterator = self.iterator or (batch + 1 for batch in super().__iter__())
            for _ in range(len(self)):
                yield next(self.iterator)

    for kind, text in ((Again, "it begins again in one iteration"), (Kept, "one more batch than were read")):
        for workers in ({}, {"num_workers": 1, "persistent_workers": True}):
            loader, _ = weft.shard_data(kind(torch.arange(4), batch_size=2, **workers), weft.local())
            with pytest.raises(
                weft.errors.ContractError, match=rf"(?s){kind.__name__}.__iter__ does not yield.*{text}"
            ):
                [list(loader) for _ in range(2)]


def test_rows_that_a_loader_class_leaves_out_are_counted():
    class Odd(DataLoader):
        def __iter__(self):
            return (batch[batch % 4 > 1] for batch in super().__iter__())

    loader, _ = weft.shard_data(Odd(torch.arange(8), batch_size=4), weft.local())
    assert [(batch.tolist(), loader.share) for batch in loader] == [([2, 3], 1.0), ([6, 7], 1.0)]
    loader, _ = weft.shard_data(Odd(torch.arange(8), batch_size=4), fake(0, 2))
    with pytest.raises(weft.errors.ContractError, match="which cannot be counted in it"):
        [loader.share for _ in loader]


def test_batches_come_in_the_order_they_were_asked_for():
    slow = _Data(lambda index: (time.sleep(0.2 if index == 0 else 0), index)[1], 4)
    loader = DataLoader(slow, num_workers=2, in_order=False)
    loader, _ = weft.shard_data(loader, weft.local(), with_ids=True)
    assert [(batch.item(), *ids.ids.tolist()) for batch, ids in loader] == [(i, i) for i in range(4)]
