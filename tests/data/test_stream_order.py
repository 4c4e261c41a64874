"""Streams: what is read more than once is the same each time, or an error that names it."""

import dataclasses
import itertools
import os
import random
import subprocess
import sys
import time
from collections import OrderedDict, UserDict

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

import weft
from tests.variants import variant_cases, variants
from weft.collectives import reduce
from weft.data.order.compare_order import compare_order
from weft.data.order.sample_digest import ReadDigest, is_compared, next_looked_at
from weft.errors import ContextError, ContractError
from weft.peers.store import RankStore
from weft.peers.world import World
from weft.testing import fake, run_ranks

N = 23
WORKERS = [(0, False), (1, False), (2, True)]


class Stream(IterableDataset):
    """Yields the numbers up to N, in an order of its own."""

    def __init__(self):
        self.at, self.epoch, self.files = 0, -1, list(range(N))
        self.rng, self.python = np.random.default_rng(3), [random.Random(4)]
        self.generator, self.inner = torch.Generator(), Inner()

    def order(self):
        return range(N)

    def __iter__(self):
        yield from self.order()


class Inner:
    def __init__(self):
        self.old = np.random.RandomState(5)


class Plain(Stream):
    pass


class Position(Stream):
    """Goes on where it was, and has no `state_dict`."""

    def __iter__(self):
        while self.at < N:
            self.at += 1
            yield self.at - 1
        self.at = 0


class Stateful(Position):
    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class InPlace(Stream):
    def order(self):
        random.shuffle(self.files)
        return self.files


class Chunks(Stream):
    """Lists in a list, of a dataset in the dataset."""

    def __init__(self):
        self.source = InPlace()
        self.source.files = [list(range(first, min(first + 5, N))) for first in range(0, N, 5)]

    def order(self):
        files = self.source.order()
        for file in files:
            random.shuffle(file)
        self.source.files = random.sample(files, len(files))
        return itertools.chain(*self.source.files)


class Counter(Stream):
    def order(self):
        self.epoch += 1
        return np.random.RandomState(self.epoch).permutation(N).tolist()


class OfNumpy(Stream):
    def order(self):
        return self.rng.permutation(N).tolist()


class OfPython(Stream):
    def order(self):
        return self.python[0].sample(range(N), N)


class OfRandomState(Stream):
    def order(self):
        return self.inner.old.permutation(N).tolist()


class OfGlobal(Stream):
    def order(self):
        return np.random.permutation(torch.randperm(N).tolist()).tolist()


class OfInitialSeed(Stream):  # as the line of the error has it
    def order(self):
        return random.Random(torch.initial_seed()).sample(range(N), N)


class OfEntropy(Stream):
    def order(self):
        return np.random.default_rng().permutation(N).tolist()


class OfClock(Stream):
    def order(self):
        return random.Random(time.time_ns()).sample(range(N), N)


class OfProcess(Stream):
    def order(self):
        return random.Random(os.getpid()).sample(range(N), N)


class LaterOfRank(Stream):
    """Its first samples are those of all ranks, and each of the others is another one on each."""

    def order(self):
        return [*range(5), *(5 + (np.arange(N - 5) + dist.get_rank()) % (N - 5)).tolist()]


SAME = [Position, Stateful, InPlace, Chunks, Counter, OfNumpy, OfPython, OfRandomState, OfGlobal, OfInitialSeed]


def _loader(kind, ctx, workers=0, persistent=False, batch_size=2, **options):
    loader = DataLoader(kind(), batch_size=batch_size, num_workers=workers, persistent_workers=persistent, **options)
    return weft.shard_data(loader, ctx, uneven="empty", with_ids=True)[0]


def _epochs(loader, count, stop=None):
    """Values by epoch, and the position after each batch; the first epoch is left after `stop` batches."""
    epochs, positions = {}, []
    while loader.epoch < count:
        epoch = loader.epoch
        for batch, rows in loader:
            epochs.setdefault(epoch, []).extend(zip(rows.ids.tolist(), batch.tolist(), strict=True))
            positions.append(loader.state_dict())
            if len(positions) == stop:
                loader.set_epoch(epoch + 1)
                break
    return epochs, positions


# -- streams that are changed by reading ---------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:shard_data. .* changes while it is read")
@pytest.mark.parametrize("kind", SAME)
def test_an_epoch_does_not_depend_on_what_was_read_before(kind):
    """Not on epochs before it, nor on one that was left early, nor on which worker reads it."""
    whole, positions = _epochs(_loader(kind, weft.local()), 3)
    for values in whole.values():
        assert [number for number, _ in values] == sorted(value for _, value in values) == list(range(N))
    again = _loader(kind, weft.local())
    _epochs(again, 2, stop=3)
    assert _epochs(again, 3)[0][2] == whole[2]
    again.load_state_dict(positions[13])  # in the same process, in the epoch before
    assert _epochs(again, 3)[0] == {1: whole[1][2 * 2 :], 2: whole[2]}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:shard_data. .* changes while it is read")
@pytest.mark.parametrize("kind", [Position, OfNumpy, *variants(*SAME[1:])])
@pytest.mark.parametrize(("workers", "persistent"), [(2, True), *variant_cases((1, True), (1, False))])
def test_nor_on_the_worker_that_reads_it(kind, workers, persistent):
    whole = _epochs(_loader(kind, weft.local()), 3)[0]
    loader = _loader(kind, weft.local(), workers, persistent)
    _epochs(loader, 1, stop=3)
    assert _epochs(loader, 3)[0] == {epoch: whole[epoch] for epoch in (1, 2)}


@pytest.mark.slow
def test_what_the_program_changes_in_a_stream_stays():
    loader = _loader(Position, weft.local())
    list(loader)
    loader.dataset.at = 20
    assert [batch.tolist() for batch, _ in loader] == [[20, 21], [22]]
    with pytest.warns(UserWarning, match=r"(?s)Position changes while it is read.*at from 20 to 0, put back.*fix:"):
        assert [batch.tolist() for batch, _ in loader] == [[20, 21], [22]]


class Counted(torch.utils.data.IterableDataset):
    epoch = 0  # of the class, until it counts

    def __iter__(self):
        self.epoch += 1
        return iter([self.epoch])


@pytest.mark.filterwarnings("ignore:shard_data. .* changes while it is read")
def test_a_count_that_begins_in_the_class_is_put_back_as_well():
    loader, _ = weft.shard_data(torch.utils.data.DataLoader(Counted(), batch_size=None), weft.local())
    assert [list(loader) for _ in range(3)] == [[1], [1], [1]]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_state_that_was_loaded_is_that_of_one_epoch(persistent):
    positions = _epochs(_loader(Stateful, weft.local(), 1, persistent), 1)[1]
    loader = _loader(Stateful, weft.local(), 1, persistent)
    for begin in (2, 6):
        loader.load_state_dict(positions[begin])
        epochs = _epochs(loader, 2)[0]
        assert [[value for value, _ in values] for values in epochs.values()] == [
            [*range(2 * begin + 2, N)],
            [*range(N)],
        ]
    loader.load_state_dict({"seed": 0, "epoch": 0, "samples": 4})  # without the state of the stream
    assert [value for value, _ in _epochs(loader, 1)[0][0]] == [*range(4, N)]


def _with_noise(samples):
    return torch.tensor([[sample, torch.rand(()), random.random(), np.random.rand()] for sample in samples])


def test_workers_that_stay_draw_what_new_ones_would_draw():
    drawn = []
    for persistent in (False, True):
        loader = DataLoader(Plain(), 4, num_workers=1, persistent_workers=persistent, collate_fn=_with_noise)
        loader, _ = weft.shard_data(loader, fake(1, 2), uneven="empty")
        drawn.append([list(loader) for _ in range(2)])
    assert all(torch.equal(*pair) for pair in zip(itertools.chain(*drawn[0]), itertools.chain(*drawn[1]), strict=True))
    assert not torch.equal(drawn[0][0][0], drawn[0][1][0])


# -- streams that are not the same each time -----------------------------------------------------------


def _read(ctx, kind, workers=0, persistent=False, position=None, epochs=2):
    loader = _loader(kind, ctx, workers, persistent)
    if position is not None:
        loader.load_state_dict(position)
    found = {}
    steps = 0
    try:
        while loader.epoch < epochs:
            epoch = loader.epoch
            for batch, rows in loader:
                found.setdefault(epoch, []).extend(zip(rows.ids.tolist(), batch.tolist(), strict=True))
                steps += 1
                reduce(torch.ones(1), ctx, "sum")
    except (ContextError, ContractError) as error:
        raise type(error)(f"{error}\nafter {steps} steps") from None
    return found, loader.state_dict()


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("kind", [OfEntropy, *variants(OfProcess)])  # two ranks may read one time from a clock
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), *variant_cases(*WORKERS[1:])])
def test_ranks_that_read_other_samples_raise_in_the_first_step(kind, workers, persistent):
    with pytest.raises(Exception, match="(?s)yields other samples on another rank.*after 0 steps") as raised:
        run_ranks(_read, 2, kind, workers, persistent)
    text = str(raised.value)
    assert f"{kind.__name__} yields" in text and "rank 0: " in text and "rank 1: " in text and "fix:" in text


@pytest.mark.usefixtures("warm_ranks")
def test_ranks_raise_in_the_step_in_which_the_first_samples_differ():
    with pytest.raises(Exception, match="(?s)in epoch 0, up to sample 7.*after 1 steps"):
        run_ranks(_read, 2, LaterOfRank)


def test_workers_that_read_other_samples_raise():
    with pytest.raises(
        ContractError, match="(?s)OfProcess yields other samples in another worker.*found: .* and .*fix:"
    ):
        list(_loader(OfProcess, weft.local(), 2))


@pytest.mark.parametrize("kind", [OfEntropy, OfClock])
@pytest.mark.parametrize("workers", [0, *variants(1)])
def test_a_stream_that_yields_other_samples_when_it_is_read_again_raises(kind, workers):
    positions = _epochs(_loader(kind, weft.local()), 1)[1]
    for position in positions[1:-1] if workers == 0 else positions[3:4]:
        loader = _loader(kind, fake(0, 2), workers)
        loader.load_state_dict(position)
        with pytest.raises(
            ContractError, match=f"(?s){kind.__name__} yields other samples when it is read again.*fix:"
        ):
            next(iter(loader))
    loader = _loader(Plain, weft.local())
    for read in ([1], ["a", 1], 5, None, [1, "a", 2]):
        with pytest.raises(ValueError, match="(?s)not a position in this loader.*fix:"):
            loader.load_state_dict({"seed": 0, "epoch": 0, "samples": 2, "read": read})


def test_a_position_says_what_was_read_at_any_batch_size_and_number_of_ranks():
    found = {}
    for world, batch_size in [(1, 1), (1, 3), (2, 2), (4, 1)]:
        loader = _loader(OfGlobal, fake(world - 1, world), batch_size=batch_size)
        for position in _epochs(loader, 1)[1]:
            if position["samples"]:
                found.setdefault(position["samples"], []).append(position["read"])
    assert all(each == reads[0] for reads in found.values() for each in reads)
    assert len({tuple(reads[0]) for reads in found.values()}) == 5
    assert [reads[0][0] for _, reads in sorted(found.items())][:8] == [0, 1, 1, 3, 3, 3, 3, 7]


@pytest.mark.filterwarnings("ignore:shard_data. .* changes while it is read")
@pytest.mark.slow
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("kind", "world"),
    [(kind, (2, 1, 4)[at % 3]) for at, kind in enumerate([Plain, *SAME])],
)
def test_any_stream_on_any_number_of_ranks_with_any_workers_resumed_anywhere(kind, world):
    def joined(results):
        epochs = {}
        for found, _ in results:
            for epoch, values in found.items():
                epochs.setdefault(epoch, []).extend(values)
        return {epoch: sorted(values) for epoch, values in epochs.items()}

    whole, positions = _epochs(_loader(kind, weft.local(), batch_size=2 * world), 2)
    for workers, persistent in [(0, False), (1, False), (1, True), (2, False), (2, True)]:
        assert joined(run_ranks(_read, world, kind, workers, persistent)) == whole
    other = {1: 2, 2: 1, 4: 2}[world]
    for position, (workers, persistent) in zip(positions[:-1], itertools.cycle(WORKERS)):
        rest = {
            epoch: [pair for pair in values if epoch > position["epoch"] or pair[0] >= position["samples"]]
            for epoch, values in whole.items()
            if epoch >= position["epoch"]
        }
        assert joined(run_ranks(_read, other, kind, workers, persistent, position)) == rest


# -- the digest of samples ------------------------------------------------------------------------------


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    name: str


def _digest(sample):
    return ReadDigest().see(0, [sample])[0][1]


def _samples():
    """Pairs that are the same sample, although they look different."""
    many = {f"name {number}" for number in range(30)}
    return [
        ({"a": 1, "b": [2, "c"]}, {"b": [2, "c"], "a": 1}),
        (float("nan"), -float("nan")),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0 + 1e-7, -float("nan")])),
        (object(), object()),
        ([object(), 3, None, "x"], [object(), 3, None, "x"]),
        ("/scratch/node1/a.png", "/scratch/node2/a.png"),
        ({"time": 1.5, "x": 3}, {"time": 2.5, "x": 3}),
        ({"a", "b", "c"}, {"c", "b", "a"}),
        (many, set(many)),
        (torch.arange(12).reshape(3, 4).t(), torch.arange(12).reshape(3, 4).t().contiguous()),
        (UserDict(a=1), UserDict(a=1)),
        (Sample(torch.ones(2), "a"), Sample(torch.ones(2), "a")),
        (lambda: 0, lambda: 0),
    ]


def test_the_digest_is_that_of_the_samples_alone():
    for one, other in _samples():
        assert _digest(one) == _digest(other), one


def test_the_digest_tells_samples_apart():
    samples = [
        1, True + 1, "1", b"1", 1.5, 2.5, None, [1], (1,), {"a": 1}, {"a": 2}, {"b": 1}, OrderedDict(a=1),
        torch.tensor(1), torch.tensor([1]), torch.tensor([1.0]), torch.zeros(3, 100), torch.ones(3, 100),
        torch.arange(300).reshape(3, 100), np.int64(7), np.zeros(3), np.ones(3), np.array(["a"]), np.array(["b"]),
        torch.zeros(2, device="meta"), torch.zeros(3, device="meta"), torch.zeros(0), torch.ones(2, 2).to_sparse(),
        {1, 2}, {1, 3}, Sample(torch.ones(2), "a"), Sample(torch.ones(2), "b"), "a" * 500, "a" * 499 + "b", 1j,
        (torch.rand(3, 8, 8), 1), (torch.rand(3, 8, 8), 1), [[[[[[[[1]]]]]]]], torch.ones(2, requires_grad=True) * 5,
    ]  # fmt: skip
    assert len({_digest(sample) for sample in samples}) == len(samples)


def test_few_samples_are_looked_at():
    looked = [number for number in range(300) if next_looked_at(number) == number]
    assert looked == [0, 1, 3, 7, 15, 31, 63, 127, 191, 255]
    assert [number for number in looked if is_compared(number)] == [0, 1, 3, 7, 15, 31, 63, 127, 255]
    in_one, by_one = ReadDigest(), ReadDigest()
    whole = in_one.see(0, range(300))
    assert whole == [seen for number in range(300) for seen in by_one.see(number, [number])]
    assert [number for number, _ in whole] == looked and in_one.last == by_one.last == whole[-1]


@pytest.mark.slow
def test_the_digest_is_the_same_in_every_process():
    code = "from tests.data.test_stream_order import _digest, _samples\nprint([_digest(one) for one, _ in _samples()])"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


# -- comparing through the store --------------------------------------------------------------------------


def _worlds(*ranks):
    store = dist.HashStore()
    return [World(ranks=ranks, rank=place, store=RankStore(store, limit_s=5)) for place in range(len(ranks))]


def test_ranks_that_read_in_other_orders_are_named():
    first, other, like = _worlds(4, 5, 7)
    for world in (first, like, like, first):  # nobody waits, and to come again is no difference
        compare_order(world, "3/0/0", "aa", "the order differs", "shuffle=True")
    with pytest.raises(ContextError) as raised:
        compare_order(other, "3/0/0", "bb", "the order differs", "shuffle=True")
    text = str(raised.value)
    assert text.startswith("the order differs\n") and text.endswith("shuffle=True")
    assert "rank 4: aa, rank 5: bb" in text
    compare_order(other, "3/0/1", "bb", "the order differs", "shuffle=True")  # another place


def test_places_of_long_ago_are_removed():
    first, other = _worlds(0, 1)
    for iteration in range(4):
        for world in (first, other):
            old = f"{iteration - 2}/0"
            compare_order(world, f"{iteration}/0", f"{iteration}", "the order differs", "shuffle=True", old=old)
    assert [first.store.has(f"order/{iteration}/0") for iteration in range(4)] == [False, False, True, True]
    compare_order(other, "0/0", "late", "the order differs", "shuffle=True")  # two iterations behind: nothing to see
    compare_order(World(ranks=(0,), rank=0), "0/0", "alone", "the order differs", "shuffle=True")
