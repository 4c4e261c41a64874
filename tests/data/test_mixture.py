"""Mixtures of sources: shares, passes, epochs, ranks, positions."""

import copy
import itertools
import math
import pickle
import re
import traceback
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

import weft
from tests.variants import variants
from weft.data.order import mixed_order
from weft.testing import fake, run_ranks

pytestmark = pytest.mark.usefixtures("warm_ranks")


class Plain(IterableDataset):
    """Numbers from `first` on, in an order that `set_epoch` changes."""

    def __init__(self, first, n):
        self.first, self.n, self.epoch = first, n, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def order(self):
        return [self.first + (i + self.epoch) % self.n for i in range(self.n)]

    def __iter__(self):
        return iter(self.order())


class Sized(Plain):
    def __len__(self):
        return self.n


class Seekable(Sized):
    def __init__(self, first, n):
        super().__init__(first, n)
        self.read = []

    def iter_from(self, start):
        for sample in self.order()[start:]:
            self.read.append(sample)
            yield sample


class Resumable(Plain):
    """Goes on where it was."""

    at = 0

    def __iter__(self):
        while self.at < self.n:
            self.at += 1
            yield self.order()[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Batched(Dataset):
    """Gives many samples at once."""

    def __init__(self, first, n):
        self.first, self.n = first, n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return range(self.first, self.first + self.n)[index]

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def numbers(first, n):
    return range(first, first + n)


KINDS = {
    "map": (numbers, numbers, Batched),
    "seekable": (Seekable, numbers, Seekable),
    "stateful": (Resumable, numbers, Seekable),
    "sized": (Sized, numbers, Sized),
    "plain": (Plain, Sized, Resumable),
}
SIZES, WEIGHTS = (23, 7, 40), (2, 0.5, 3)


def make(kind, stop="first", **options):
    """Three sources, with samples from 1000, 2000 and 3000 on."""
    parts = zip("abc", KINDS[kind], SIZES, WEIGHTS, strict=True)
    sources = {name: (of((i + 1) * 1000, n), weight) for i, (name, of, n, weight) in enumerate(parts)}
    return weft.data.mix(sources, stop=stop, **options)


def passes_of(samples):
    """The samples of each source, cut into passes."""
    for source, n in enumerate(SIZES):
        own = [sample for sample in samples if sample // 1000 == source + 1]
        yield n, [own[first : first + n] for first in range(0, len(own), n)]


# -- one process -------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.floats(1e-3, 1e3)), min_size=1, max_size=6),
    st.sampled_from(["first", "all"]),
    st.integers(0, 5),
    st.booleans(),
)
def test_shares_passes_and_lengths(given_sources, stop, epoch, shuffle):
    total = sum(weight for _, weight in given_sources)
    if sum(1 for _ in given_sources) and max(n / w for n, w in given_sources) * total > 20_000:
        return
    sources = {str(i): ([(i, k) for k in range(n)], weight) for i, (n, weight) in enumerate(given_sources)}
    mixture = weft.data.mix(sources, seed=3, stop=stop, shuffle=shuffle)
    mixture.set_epoch(epoch)
    found = [mixture[i] for i in range(len(mixture))]
    assert found == list(mixture) and len(found) == sum(mixture.counts.values())
    choices = np.array([source for source, _ in found])
    assert mixture.source_of(range(len(found))).tolist() == choices.tolist()
    used_up = []
    for i, (n, weight) in enumerate(given_sources):
        own = [k for source, k in found if source == i]
        for first in range(0, len(own), n):
            part = own[first : first + n]
            assert len(set(part)) == len(part) and (shuffle or part == list(range(len(part))))
        assert len(own) == mixture.counts[str(i)] and abs(len(own) - weight / total * len(found)) <= len(sources)
        used_up.append(len(own) >= n)
        share = len(own) / len(found)
        apart = np.abs(np.cumsum(choices == i) - share * np.arange(1, len(found) + 1)).max()
        assert apart < 1 + max(0, len(sources) - 2) * share + 1e-9
    assert any(used_up) if stop == "first" else all(used_up)
    if stop == "first":
        assert len(set(found)) == len(found)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_orders_are_equally_frequent(n):
    draws = 400 * math.factorial(n)
    keys = np.random.default_rng(0).integers(0, 2**63, draws).astype(np.uint64)
    places = np.tile(np.arange(n), draws)
    orders = mixed_order._shuffled(places, np.full(n * draws, n), keys.repeat(n)).reshape(draws, n)
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    free = math.factorial(n) - 1
    assert len(counts) == free + 1 and ((counts - 400) ** 2 / 400).sum() < free + 4 * math.sqrt(2 * free)


def test_neither_length_nor_position_costs_anything():
    mixture = weft.data.mix({"a": (range(10**11), 1), "b": (range(10**5), 3)}, stop="all")
    assert len(mixture) == 4 * 10**11
    far = [mixture[2 * 10**11 + i] for i in range(5000)]
    assert len(mixture._order._blocks) < 10 and {type(sample) for sample in far} == {int}
    mixture = weft.data.mix({"a": (range(10**6), 1e-6), "b": (range(3), 1e6)}, stop="never")
    assert next(mixture.iter_from(10**15)) in range(3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", ["first", "all"])
def test_an_epoch_of_each_kind(kind, stop):
    mixture = make(kind, stop)
    epochs = []
    for epoch in range(2):
        mixture.set_epoch(epoch)
        epochs.append(found := list(mixture))
        assert found == list(mixture)
        whole = []
        for n, passes in passes_of(found):
            assert all(len(set(one)) == len(one) for one in passes)
            assert all(one != other for one, other in itertools.pairwise(passes))
            whole.append(len(passes[0]) == n)
        assert any(whole) if stop == "first" else all(whole)
        assert mixture.source_of(range(len(found))).tolist() == [sample // 1000 - 1 for sample in found]
        if kind in ("plain", "stateful"):
            with pytest.raises(TypeError):
                len(mixture)
        else:
            assert len(mixture) == len(found)
        if stop == "first":
            assert len(set(found)) == len(found)
    assert epochs[0] != epochs[1]
    other = make(kind, stop, seed=1)
    assert list(other) != epochs[0]
    assert isinstance(mixture, IterableDataset) == (kind != "map")
    assert hasattr(mixture, "iter_from") == (kind == "seekable")
    assert hasattr(mixture, "load_state_dict") == (kind == "stateful")
    again = pickle.loads(pickle.dumps(mixture))
    assert list(again) == epochs[1]


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_never_ends(kind):
    mixture = make(kind, "never")
    found = list(itertools.islice(mixture, 500))
    assert mixture.endless and mixture.counts is None and isinstance(mixture, IterableDataset)
    for (n, passes), weight in zip(passes_of(found), WEIGHTS, strict=True):
        assert abs(sum(map(len, passes)) - 500 * weight / sum(WEIGHTS)) < 2
        assert all(len(set(one)) == n for one in passes[:-1])
    if kind in ("map", "seekable"):
        assert [next(mixture.iter_from(i)) for i in range(0, 500, 7)] == found[::7]


def test_names_and_sources():
    mixture = make("map", with_names=True)
    pairs = [mixture[i] for i in range(len(mixture))]
    assert {name: sample // 1000 for name, sample in pairs} == {"a": 1, "b": 2, "c": 3}
    assert mixture.names == ("a", "b", "c") and mixture[-1] == pairs[-1] == mixture[np.int32(len(pairs) - 1)]
    assert make("plain", with_names=True).__iter__().__next__()[0] in "abc"
    ids = torch.arange(6).reshape(2, 3)
    assert mixture.source_of(ids).tolist() == [["abc".index(name) for name, _ in pairs[i : i + 3]] for i in (0, 3)]
    later = mixture.source_of(range(len(pairs)), epoch=2).tolist()
    mixture.set_epoch(2)
    assert later == mixture.source_of(range(len(pairs))).tolist() != ["abc".index(name) for name, _ in pairs]
    for position in (-1, len(pairs)):
        with pytest.raises(IndexError, match=f"(?s)found:    {position}.*expected: 0 to"):
            mixture.source_of([position])


def test_a_mixture_of_mixtures():
    inner = weft.data.mix({"x": (range(8), 1), "y": (range(10, 30), 2)})
    outer = weft.data.mix({"both": (inner, 1), "z": (range(100, 148), 2)})
    epochs = []
    for epoch in range(2):
        outer.set_epoch(epoch)
        epochs.append([sample for sample in outer if sample < 100])
    assert all(len(set(found)) == len(inner) for found in epochs) and epochs[0] != epochs[1]


# -- several ranks -----------------------------------------------------------------------------------


def read(mixture, world, batch_size, position=None, steps=None, **options):
    """The samples in the order of steps and ranks, and the position after each step."""
    workers = {key: options.pop(key) for key in ("num_workers", "persistent_workers") if key in options}
    parts, positions = [], []
    for rank in range(world):
        loader = DataLoader(mixture(), batch_size=batch_size, **workers)
        loader, _ = weft.shard_data(loader, fake(rank, world), with_ids=True, **options)
        if position is not None:
            loader.load_state_dict(position)
        part = []
        for batch, rows in itertools.islice(loader, steps):
            part.append(batch[rows.valid].tolist())
            if rank == 0:
                positions.append(copy.deepcopy(loader.state_dict()))
        parts.append(part)
    assert len({len(part) for part in parts}) == 1
    return [sample for step in zip(*parts, strict=True) for batch in step for sample in batch], positions


@pytest.mark.parametrize("stop", ["first", "all", "never"])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_and_positions(kind, stop):
    """Stopped after every step and resumed on another number of ranks: the samples of one process."""
    uneven = {"uneven": "empty"}
    steps = 16 if stop == "never" else None
    alone = list(itertools.islice(make(kind, stop), 16 * 12 if steps else None))
    for world, batch_size, other in ((2, 6, 1), (4, 3, 2), (1, 12, 4)):
        found, positions = read(lambda: make(kind, stop), world, batch_size, steps=steps, **uneven)
        assert found == alone
        for position in positions[:: 5 if world == 1 else 3]:
            if position["epoch"] == 0:
                start, size = position["samples"], 12 // other
                rest, _ = read(lambda: make(kind, stop), other, size, position, steps and 16 - start // 12, **uneven)
                assert rest == alone[start:]


@pytest.mark.parametrize("kind", ["map", "seekable", "stateful", *variants("sized", "plain")])
@pytest.mark.parametrize("persistent", [False, *variants(True)])
def test_workers(kind, persistent):
    def epochs(workers):
        loader = DataLoader(
            make(kind, "all"), batch_size=4, num_workers=workers, persistent_workers=persistent and workers > 0
        )
        loader, _ = weft.shard_data(loader, weft.local())
        found = [[batch.tolist() for batch in loader] for _ in range(2)]
        loader.load_state_dict({"seed": 0, "epoch": 1, "samples": 8} | later)
        return found, [batch.tolist() for batch in loader]

    loader, _ = weft.shard_data(DataLoader(make(kind, "all"), batch_size=4), weft.local())
    loader.set_epoch(1)
    later = [loader.state_dict() for _ in itertools.islice(loader, 2)][1]
    whole, rest = epochs(0)
    assert epochs(2) == (whole, rest) and rest == whole[1][2:]


def test_an_endless_mixture_reads_what_it_gives_and_nothing_else():
    class Noted(list):
        read = ()

        def __getitem__(self, index):
            self.read = (*self.read, super().__getitem__(index))
            return self.read[-1]

    sources = Noted(range(1000)), Noted(range(1000, 1100))
    mixture = weft.data.mix({"a": (sources[0], 1), "b": (sources[1], 1)}, stop="never")
    loader, _ = weft.shard_data(DataLoader(mixture, batch_size=8), fake(1, 4))
    loader.load_state_dict(loader.state_dict() | {"samples": 32 * 10**6})
    found = [batch.tolist() for batch in itertools.islice(loader, 3)]
    assert sorted(sources[0].read + sources[1].read) == sorted(itertools.chain(*found))
    assert weft.contract.offered(loader, weft.data.DataPlan)[0].reads == 1


def test_random_augmentation_by_sample():
    class Noisy(Dataset):
        def __len__(self):
            return 9

        def __getitem__(self, index):
            return torch.rand(()).item()

    def mixture():
        return weft.data.mix({"a": (Noisy(), 1), "b": ([2.0] * 9, 1)})

    alone, _ = read(mixture, 1, 4, keyed=True)
    assert read(mixture, 2, 2, keyed=True)[0] == alone and len(set(alone)) == 10


def test_a_job_whose_ranks_have_the_same_mixture_and_one_whose_ranks_differ():
    def job(ctx):
        with pytest.raises(weft.errors.ContextError, match="(?s)mixture.*fix:"):
            weft.shard_data(DataLoader(make("map", seed=ctx.rank), batch_size=2), ctx)
        mixture = make("map", "all")
        loader, ctx = weft.shard_data(DataLoader(mixture, batch_size=4), ctx, uneven="empty", with_ids=True)
        counts = Counter()
        for batch, rows in loader:
            counts.update(
                zip(mixture.source_of(rows.ids, epoch=rows.epoch).tolist(), (batch // 1000).tolist(), strict=True)
            )
        return counts

    total = sum(run_ranks(job, 2), Counter())
    assert {(i, i + 1): count for i, count in enumerate(make("map", "all").counts.values())} == total


@pytest.mark.parametrize("buffered", [False, True])
def test_streams_of_datasets(buffered):
    datasets = pytest.importorskip("datasets")

    def mixture():
        streams = [
            datasets.Dataset.from_dict({"x": list(range(first, first + n))}).to_iterable_dataset(num_shards=2)
            for first, n in ((1000, 23), (2000, 7))
        ]
        if buffered:
            streams = [stream.shuffle(seed=0, buffer_size=5) for stream in streams]
        columns = datasets.Dataset.from_dict({"x": list(range(3000, 3040))})
        return weft.data.mix({"a": (streams[0], 2), "b": (streams[1], 0.5), "c": (columns, 3)}, stop="all")

    found = [sample["x"] for sample in mixture()]
    assert hasattr(mixture(), "state_dict") != buffered
    for n, passes in passes_of(found):
        assert len(passes[0]) == n and all(len(set(one)) == len(one) for one in passes)
    loader, _ = weft.shard_data(DataLoader(mixture(), batch_size=10), weft.local())
    steps = [(batch["x"].tolist(), copy.deepcopy(loader.state_dict())) for batch in loader]
    assert [x for batch, _ in steps for x in batch][: len(found)] == found or buffered
    for at in range(0, len(steps) - 1, 3):
        again, _ = weft.shard_data(DataLoader(mixture(), batch_size=10), weft.local())
        again.load_state_dict(steps[at][1])
        assert [batch["x"].tolist() for batch in again] == [batch for batch, _ in steps[at + 1 :]]


def test_data_that_was_split_already():
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    stream = datasets.Dataset.from_dict({"x": list(range(8))}).to_iterable_dataset(num_shards=2)
    split = split_dataset_by_node(stream, rank=0, world_size=2)
    mixture = weft.data.mix({"a": (split, 1), "b": (Plain(0, 4), 1)})
    with pytest.raises(ValueError, match="(?s)split_dataset_by_node.*already_sharded=True"):
        weft.shard_data(DataLoader(mixture), fake(0, 2), uneven="empty")


@pytest.mark.parametrize("workers", [0, *variants(1)])
def test_two_loaders_of_one_mixture_in_different_epochs(workers):
    mixture, later = make("map", "all"), epoch(make("map", "all"))
    one, other = (weft.shard_data(DataLoader(mixture, num_workers=workers), weft.local())[0] for _ in range(2))
    other.set_epoch(1)
    pairs = [(a.item(), b.item()) for a, b in zip(one, other, strict=True)]
    assert pairs == list(zip(make("map", "all"), later, strict=True))


# -- what raises -------------------------------------------------------------------------------------


class Lying(Sized):
    """Says that it has more, or less."""

    def __init__(self, first, n, said):
        super().__init__(first, n)
        self.said = said

    def __len__(self):
        return self.said


@pytest.mark.parametrize(
    ("n", "said", "found"), [(5, 7, "5 samples"), (9, 7, "7 samples or more"), (0, 7, "0 samples")]
)
@pytest.mark.parametrize("stop", ["first", "all", "never"])
def test_a_length_that_is_not_true(n, said, found, stop):
    mixture = weft.data.mix({"a": (Lying(0, n, said), 1), "b": (range(20), 2)}, stop=stop)
    with pytest.raises(weft.errors.ContractError, match=f"(?s)found:    'a': {found}.*and not 7.*fix:"):
        list(mixture)


def test_a_stream_that_yields_nothing():
    with pytest.raises(weft.errors.ContractError, match="(?s)yields nothing.*'a': 0 samples"):
        list(weft.data.mix({"a": (Plain(0, 0), 1), "b": (range(20), 2)}))


ONE = Resumable(0, 4)


@pytest.mark.parametrize(
    ("sources", "found"),
    [
        ({}, "no source"),
        ([(range(3), 1)], "list"),
        ({"a": range(3)}, "'a': range"),
        ({3: (range(3), 1)}, "3: tuple"),
        ({"a": (iter([1]), 1)}, "'a': list_iterator"),
        ({"a": ({"train": [1]}, 1)}, "'a': dict"),
        ({"a": (7, 1)}, "'a': int"),
        ({"a": ([], 1)}, "'a': list without samples"),
        ({"a": (Sized(0, 0), 1)}, "'a': Sized without samples"),
        *[
            ({"a": (range(3), weight)}, repr(weight))
            for weight in (0, -1, math.nan, math.inf, True, "1", None, 10**400)
        ],
        ({"a": (range(3), 1), "b": (range(3), 1e-300)}, "1e-300 and 1.0"),
        ({"a": (range(10**9), 1e-15), "b": (range(3), 1)}, "1000000000000000"),
        ({"a": (ONE, 1), "b": (ONE, 1)}, "one stream under two names"),
    ],
)
def test_what_cannot_be_mixed(sources, found):
    with pytest.raises((TypeError, ValueError), match="(?s)^mix: .*found: .*expected: .*fix: ") as caught:
        weft.data.mix(sources, stop="all")
    assert f"found:    {found}" in str(caught.value)


def test_other_arguments():
    for bad in ({"stop": "last"}, {"seed": None}):
        with pytest.raises(ValueError, match="(?s)mix: .*fix: "):
            weft.data.mix({"a": (range(3), 1)}, **bad)
    assert len(weft.data.mix({"a": (range(3), np.float32(1)), "b": (range(3), torch.tensor(1))})) == 6


class Broken(Seekable):
    """Its sample number 3 cannot be read."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return [0, 1, 2][index] if index != 3 else int("x")

    def iter_from(self, start):
        return map(self.__getitem__, range(start, 6))


class BrokenMap(Dataset):
    __len__, __getitem__ = Broken.__len__, Broken.__getitem__


@pytest.mark.parametrize("source", [Broken(0, 6), BrokenMap()])
@pytest.mark.parametrize("workers", [0, *variants(1)])
def test_an_error_names_the_sample_and_its_source(source, workers):
    loader = DataLoader(weft.data.mix({"good": (range(9), 1), "bad": (source, 1)}, shuffle=False), num_workers=workers)
    loader, _ = weft.shard_data(loader, weft.local())
    with pytest.raises(ValueError, match="invalid literal") as caught:
        list(loader)
    text = "".join(traceback.format_exception(caught.value))
    assert "while sample 3 of 'bad' was read" in text and re.search(r"while sample \d+ was read on rank 0", text)


def test_workers_that_would_all_read_everything():
    samples = iter(DataLoader(make("plain"), num_workers=2))
    with pytest.raises(weft.errors.ContractError, match="(?s)several workers.*num_workers=2.*fix:"):
        next(samples)
    samples._shutdown_workers()  # now: by the garbage collector it takes torch five seconds per worker


@pytest.mark.parametrize("kind", ["map", "seekable"])
@pytest.mark.parametrize("stop", ["first", "never"])
def test_a_position_of_another_mixture(kind, stop):
    def loader(seed, **options):
        data = DataLoader(make(kind, stop, seed=seed), batch_size=3)
        return weft.shard_data(data, weft.local(), **options)[0]

    for _ in (saved := loader(0)):
        position = saved.state_dict()
        break
    with pytest.raises(ValueError, match='(?s)mixture .* when it was saved, .* now.*fix:.*resized="next_epoch"'):
        loader(1).load_state_dict(position)
    with pytest.warns(UserWarning, match="resuming with the next epoch"):
        (other := loader(1, resized="next_epoch")).load_state_dict(position)
    assert other.epoch == 1 and next(iter(other)).tolist() == list(itertools.islice(epoch(make(kind, stop, seed=1)), 3))


def epoch(mixture, number=1):
    mixture.set_epoch(number)
    return mixture


def test_a_state_of_another_mixture():
    state = make("stateful").state_dict()
    with pytest.raises(ValueError, match="(?s)another mixture.*fix:"):
        make("stateful", seed=1).load_state_dict(state)
