"""Streams, dispatch and data that was split already: order, union, position, and ranks that end early."""

import copy
import itertools
import os
import random
import re
import signal
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import weft
from tests.variants import variant_cases, variants
from weft.testing import fake, run_ranks
from weft.testing.equivalence import largest_difference

pytestmark = pytest.mark.usefixtures("warm_ranks")


class Plain(IterableDataset):
    def __init__(self, n):
        self.n, self.opened = n, 0

    def __iter__(self):
        self.opened += 1
        return iter(range(self.n))


class Sized(Plain):
    def __len__(self):
        return self.n


class Seekable(Sized):
    """Notes what was read."""

    def __init__(self, n):
        super().__init__(n)
        self.read = []

    def iter_from(self, start):
        for sample in range(start, self.n):
            self.read.append(sample)
            yield sample


class Resumable(Plain):
    """Goes on where it was, as torchdata has it."""

    def __init__(self, n):
        super().__init__(n)
        self.at, self.loads = 0, []

    def __iter__(self):
        while self.at < self.n:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.loads.append(state)
        self.at = state["at"]


class Shuffled(Plain):
    """Draws its order and its samples from the global random states."""

    def __iter__(self):
        order = list(range(self.n))
        random.shuffle(order)
        for sample in order:
            yield sample + 0.5 * torch.rand(()).item() * (np.random.rand() < 0.5)


class SplitByWorker(Plain):
    """As torch's documentation has it."""

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, self.n, step))


STREAMS = [Plain, Sized, Seekable, Resumable]


def _read(loader):
    return [(batch.tolist(), rows.ids.tolist(), rows.valid.tolist()) for batch, rows in loader]


def _shares(make, world, batch_size, position=None, workers=0, **options):
    """What each rank reads, and the position after each step."""
    parts, positions = [], []
    for rank in range(world):
        loader = DataLoader(make(), batch_size=batch_size, num_workers=workers)
        loader, _ = weft.shard_data(loader, fake(rank, world), with_ids=True, **options)
        if position is not None:
            loader.load_state_dict(position)
        part = []
        for batch, rows in loader:
            part.append((batch.tolist(), rows.ids.tolist(), rows.valid.tolist()))
            positions.append(loader.state_dict())
        parts.append(part)
    return parts, positions[: len(parts[0])]


def _counted(parts):
    """Values and ids of the rows that count, in the order of the steps and ranks."""
    assert len({len(part) for part in parts}) == 1
    rows = [
        (value, number)
        for step in zip(*parts, strict=True)
        for values, ids, valid in step
        for value, number, ok in zip(values, ids, valid, strict=True)
        if ok
    ]
    return [value for value, _ in rows], [number for _, number in rows]


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(STREAMS),
    st.integers(0, 40),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from(["empty", "pad", "drop", "join"]),
    st.booleans(),
)
def test_union_order_and_length(kind, n, batch_size, world, uneven, split):
    mode = "split" if split else "batches"
    size = batch_size * world if split else batch_size
    parts, positions = _shares(lambda: kind(n), world, size, mode=mode, uneven=uneven)
    values, ids = _counted(parts)
    assert values == ids == list(range(len(ids))) and n - len(ids) < (world if uneven == "drop" else 1)
    if uneven == "pad":
        assert all(len(batch) == batch_size for part in parts for batch, *_ in part)
    if hasattr(kind, "__len__"):
        loader, _ = weft.shard_data(DataLoader(kind(n), batch_size=size), fake(0, world), mode=mode, uneven=uneven)
        assert len(loader) == len(parts[0])
    if positions and len(ids) == n:
        assert positions[-1] == {"seed": 0, "epoch": 1, "samples": 0}


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([*STREAMS, Shuffled]),
    st.integers(1, 30),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 4),
    st.data(),
)
def test_going_on_at_another_number_of_ranks(kind, n, batch_size, world, other, data):
    whole, _ = _counted(_shares(lambda: kind(n), 1, 4, uneven="empty")[0])
    parts, positions = _shares(lambda: kind(n), world, batch_size, uneven="empty")
    assert _counted(parts)[0] == whole
    step = data.draw(st.integers(0, len(positions) - 1))
    position = positions[step]
    if position["epoch"]:
        return
    rest, later = _shares(lambda: kind(n), other, 2, position=position, uneven="empty")
    assert _counted(rest)[0] == whole[position["samples"] :]
    if later and not later[0]["epoch"]:  # once more
        last, _ = _shares(lambda: kind(n), world, 1, position=later[0], uneven="empty")
        assert _counted(last)[0] == whole[later[0]["samples"] :]


@pytest.mark.parametrize("kind", [Plain, Resumable, Shuffled, *variants(Seekable, SplitByWorker)])
def test_workers_neither_repeat_nor_lose_samples(kind):
    alone, _ = _shares(lambda: kind(13), 2, 2, uneven="empty")
    several, positions = _shares(lambda: kind(13), 2, 2, uneven="empty", workers=2)
    assert several == alone
    rest, _ = _shares(lambda: kind(13), 1, 3, position=positions[0], uneven="empty", workers=2)
    assert _counted(rest)[0] == _counted(alone)[0][4:]


def test_workers_that_stay_are_told_the_epoch_and_the_position():
    class Epochs(Sized):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter(range(100 * self.epoch, 100 * self.epoch + self.n))

    loader = DataLoader(Epochs(5), batch_size=2, num_workers=2, persistent_workers=True)
    loader, _ = weft.shard_data(loader, weft.local())
    assert [[b.tolist() for b in loader] for _ in range(2)] == [[[0, 1], [2, 3], [4]], [[100, 101], [102, 103], [104]]]
    loader.load_state_dict({"seed": 0, "epoch": 1, "samples": 2})
    assert [b.tolist() for b in loader] == [[102, 103], [104]]


def test_a_stream_is_read_with_random_states_of_its_own():
    epochs = []
    for _ in range(2):
        torch.rand(3), random.random(), np.random.rand()
        loader, _ = weft.shard_data(DataLoader(Shuffled(9), batch_size=4), weft.local(seed=2))
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        epochs.append([[b.tolist() for b in loader] for _ in range(2)])
        assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
        assert states[2] == np.random.get_state()[1].tolist()
    assert epochs[0] == epochs[1] and epochs[0][0] != epochs[0][1]


def test_a_generator_of_the_stream_is_seeded():
    class Own(Plain):
        generator = None

        def __iter__(self):
            return iter(torch.randperm(self.n, generator=self.generator).tolist())

    def make():
        stream = Own(8)
        stream.generator = torch.Generator().manual_seed(random.randrange(100))
        return stream

    assert sorted(_counted(_shares(make, 2, 2, uneven="empty", seed=1)[0])[0]) == list(range(8))


def test_a_seekable_stream_reads_what_it_gives_and_nothing_else():
    loader, _ = weft.shard_data(DataLoader(stream := Seekable(100_000), batch_size=2), fake(1, 2))
    loader.load_state_dict({"seed": 0, "epoch": 0, "samples": 80_000})
    assert next(iter(loader)).tolist() == [80_002, 80_003]
    assert stream.read == [80_002, 80_003]  # none of the 80,000 before


class Endless(Seekable):
    """It counts on and says so."""

    endless = True

    def __init__(self):
        super().__init__(2**62)

    def __len__(self):
        raise TypeError


@pytest.mark.parametrize("mode", ["batches", "dispatch"])
def test_a_seekable_stream_without_an_end_is_read_like_one_that_knows_its_length(mode):
    world = 1 if mode == "dispatch" else 2
    loader, _ = weft.shard_data(DataLoader(stream := Endless(), batch_size=2), fake(0, world), mode=mode)
    loader.load_state_dict({"seed": 0, "epoch": 0, "samples": 10**12})
    found = [(batch.tolist(), loader.share) for batch in itertools.islice(loader, 3)]
    assert found == [([10**12 + i * 2 * world, 10**12 + i * 2 * world + 1], 1.0) for i in range(3)]
    assert len(stream.read) == 6 and loader.epoch == 1
    assert weft.contract.offered(loader, weft.data.DataPlan)[0].reads == 1
    with pytest.raises(TypeError, match="(?s)found:    Endless without __len__.*fix:"):
        len(loader)


def test_a_stream_with_a_state_goes_back_to_it():
    loader, _ = weft.shard_data(DataLoader(Resumable(20), batch_size=2), fake(0, 2), uneven="empty")
    for _ in loader:
        position = loader.state_dict()
        break
    assert position == {"seed": 0, "epoch": 0, "samples": 4, "source": {"at": 4}}
    again, _ = weft.shard_data(DataLoader(stream := Resumable(20), batch_size=2), fake(1, 2), uneven="empty")
    again.load_state_dict(position)
    assert again.state_dict() == position
    assert next(iter(again)).tolist() == [6, 7] and stream.loads == [{"at": 4}]
    # The next epoch begins at the beginning, also after a break.
    assert next(iter(again)).tolist() == [2, 3]


@pytest.mark.filterwarnings("ignore:shard_data. Plain changes while it is read")
def test_break_and_other_loaders_inside_change_nothing():
    loader, _ = weft.shard_data(DataLoader(Resumable(7), batch_size=2), weft.local())
    other, _ = weft.shard_data(DataLoader(Plain(4), batch_size=2), weft.local())
    for _ in loader:
        break
    found = []
    for batch in loader:
        found.append(batch.tolist())
        assert [b.tolist() for b in other] == [[0, 1], [2, 3]]
    assert found == [[0, 1], [2, 3], [4, 5], [6]] and loader.epoch == 2


@pytest.mark.parametrize("remainder", ["step", "carry", "drop"])
def test_windows_over_a_stream_go_on_after_any_of_them(remainder):
    def make():
        loader, ctx = weft.shard_data(DataLoader(Resumable(13), batch_size=2), weft.local())
        return weft.accumulate_grads(nn.Linear(1, 1), loader, ctx, steps=3, remainder=remainder)[1]

    def windows(loader, count):
        found = []
        while len(found) < count:
            for window in loader:
                before = loader.state_dict()
                found.append(([b.tolist() for b in window], before, loader.state_dict()))
                if len(found) == count:
                    break
        return found

    whole = windows(make(), 7)
    for index, (_, before, after) in enumerate(whole[:-1]):
        for position, first in ((before, index), (after, index + 1)):
            again = make()
            again.load_state_dict(position)
            assert [w for w, *_ in windows(again, 7 - first)] == [w for w, *_ in whole[first:]], position


def test_a_stream_whose_length_is_not_true():
    class Lying(Sized):
        def __len__(self):
            return self.n + 2

    loader, _ = weft.shard_data(DataLoader(Lying(5), batch_size=1), weft.local())
    with pytest.raises(weft.errors.ContractError, match="(?s)found:    5 samples, and not 7.*fix:"):
        list(loader)
    with pytest.raises(TypeError, match="(?s)found:    Plain without __len__.*fix:"):
        len(weft.shard_data(DataLoader(Plain(5)), weft.local())[0])


@pytest.mark.parametrize("kind", [Plain, Seekable, Resumable, Shuffled])
@pytest.mark.parametrize("n", [8, 10, 15])
def test_a_stream_whose_incomplete_step_is_dropped_needs_no_choice(kind, n):
    def read(world, position=None):
        found, positions = [[] for _ in range(world)], []
        for rank in range(world):
            loader = DataLoader(kind(n), batch_size=4, drop_last=True)
            loader, _ = weft.shard_data(loader, fake(rank, world), mode="split")
            if position is not None:
                loader.load_state_dict(position)
            for batch in loader:
                found[rank].append(batch.tolist())
                positions.append(loader.state_dict())
            assert loader.state_dict() == {"seed": 0, "epoch": 1, "samples": 0}
        return [[*itertools.chain(*parts)] for parts in zip(*found, strict=True)], positions[: len(found[0])]

    steps, _ = read(1)
    assert len(steps) == n // 4
    for world in (1, 2, 4):
        found, positions = read(world)
        assert found == steps
        for other in (1, 2, 4):
            for done, position in enumerate(positions[:-1], start=1):
                assert read(other, position)[0] == steps[done:]


def test_the_end_of_a_stream_that_cannot_be_shared_out():
    loader, _ = weft.shard_data(DataLoader(Plain(5), batch_size=2), fake(0, 2), uneven="error")
    with pytest.raises(ValueError, match="(?s)the stream, 5 samples long.*fix:"):
        list(loader)


@pytest.mark.parametrize("iterable", [False, True])
def test_without_batches_of_its_own(iterable):
    data = Plain(5) if iterable else list(range(5))
    parts = []
    for rank in range(2):
        loader, _ = weft.shard_data(DataLoader(data, batch_size=None), fake(rank, 2), uneven="drop")
        parts.append(list(loader))
    assert parts == [[0, 2], [1, 3]]


def test_the_plan_says_how_often_samples_are_read():
    def plan(data, workers=0, **options):
        loader, _ = weft.shard_data(DataLoader(data, num_workers=workers), fake(0, 4), **options)
        return weft.contract.offered(loader, weft.data.DataPlan)[0]

    found = plan(Plain(8), uneven="drop")
    assert (found.reads, found.steps, found.resumes, found.any_ranks) == (4, None, "reads again", True)
    assert plan(Plain(8), workers=2, uneven="drop").reads == 8
    assert (plan(Seekable(8)).reads, plan(Seekable(8)).resumes) == (1, "jumps")
    assert plan(Resumable(8), uneven="drop").resumes == "state"
    assert (plan(range(8)).source, plan(range(8)).reads, plan(range(8)).steps) == ("samples", 1, 2)
    found = plan(Plain(8), already_sharded=True)
    assert (found.source, found.reads, found.any_ranks, found.per_step) == ("split already", 1, False, 4)


def test_data_split_by_others_is_found_out():
    class Mine(Plain):
        def __init__(self):
            super().__init__(4)
            self.rank, self.world_size = 0, 2

    with pytest.raises(ValueError, match="(?s)found:    Mine: the data would be split twice.*fix:.*already_sharded"):
        weft.shard_data(DataLoader(Mine()), fake(0, 2), uneven="drop")
    loader, _ = weft.shard_data(DataLoader(Mine()), fake(0, 2), already_sharded=True)
    next(iter(loader))
    assert loader.state_dict() == {"seed": 0, "epoch": 0, "samples": 1, "ranks": 2}
    other, _ = weft.shard_data(DataLoader(Mine()), fake(0, 3), already_sharded=True)
    with pytest.raises(ValueError, match="(?s)found:    a position of data split among 2 ranks.*fix:"):
        other.load_state_dict(loader.state_dict())


# -- real ranks --------------------------------------------------------------------------------------


class Records(Dataset):
    def __init__(self, n):
        self.n, self.read = n, []

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        self.read.append(index)
        return index


def _collate(ids):
    """Nested, ragged, with leaves that are no tensors."""
    return {
        "x": torch.tensor(ids).double(),
        "name": [f"sample {i}" for i in ids],
        "ragged": ([torch.arange(i % 3) for i in ids], torch.zeros(len(ids), max(ids) % 4 + 1)),
        "none": None,
    }


def _plainly(batch):
    ragged, padded = batch["ragged"]
    return batch["x"].tolist(), batch["name"], [r.tolist() for r in ragged], padded.tolist(), batch["none"]


def _dispatched(ctx, cases):
    found = []
    for n, uneven, workers, stream in cases:
        runs = []
        for mode in ("dispatch", "batches"):
            data = Plain(n) if stream else Records(n)
            options = {"num_workers": workers} if stream else {"num_workers": workers, "shuffle": True}
            loader = DataLoader(data, batch_size=2, collate_fn=_collate, **options)
            loader, _ = weft.shard_data(loader, ctx, mode=mode, uneven=uneven, with_ids=True, seed=4)
            steps = [(_plainly(b), r.ids.tolist(), r.valid.tolist(), loader.state_dict()) for b, r in loader]
            runs.append(steps)
            if mode == "dispatch" and ctx.rank and not stream:
                assert data.read == []
            if mode == "dispatch" and ctx.rank and stream:
                assert data.opened == 0
        found.append(runs[0] == runs[1])
    return found


@pytest.mark.parametrize("ranks", [2, *variants(4)])
def test_dispatched_batches_are_those_that_each_rank_would_read(ranks):
    cases = [(n, uneven, 0, stream) for n in (9, 12) for uneven in ("empty", "pad") for stream in (False, True)]
    cases += [(9, "drop", 2, True)] if ranks == 2 else []
    assert run_ranks(_dispatched, ranks, cases) == [[True] * len(cases)] * ranks


def _joined(ctx, strategy, known):
    """Train with 5 samples on rank 0, 2 on rank 1, none on others; compare with the naive loop."""
    counts = [5, 2, 0, 1][: ctx.world_size]
    data = [torch.randn(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7 + r))
            for r, count in enumerate(counts)]  # fmt: skip
    model = nn.Linear(3, 2).double()
    naive = copy.deepcopy(model)

    def loss_of(module, x, total):
        return module(x).square().sum() / total

    optimizer = torch.optim.AdamW(naive.parameters(), lr=0.1)
    for step in range(-(-max(counts) // 2)):
        x = torch.cat([part[2 * step : 2 * step + 2] for part in data])
        loss_of(naive, x, len(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if strategy == "replicate":
        model, ctx = weft.replicate(model, ctx)
    else:
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=1)

    class Mine(IterableDataset):
        def __iter__(self):
            return iter(data[ctx.rank])

    loader = DataLoader(data[ctx.rank] if known else Mine(), batch_size=2)
    loader, ctx = weft.shard_data(loader, ctx, already_sharded=True, uneven="join")
    for x in loader:
        loss_of(model, x, weft.metrics.denominator(len(x), ctx)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return largest_difference(list(model.parameters()), list(naive.parameters()))


@pytest.mark.parametrize(
    ("ranks", "known", "strategy"),
    [
        *((2, False, "replicate"), (4, True, "zero")),
        *variant_cases((2, False, "zero"), (4, True, "replicate"), (4, False, "replicate"), (4, False, "zero")),
    ],
)
def test_ranks_with_fewer_batches_join_in(strategy, ranks, known):
    assert max(run_ranks(_joined, ranks, strategy, known)) < 1e-12


def _ended(ctx, uneven, known):
    n = [5, 3][ctx.rank]
    loader = DataLoader(list(range(n)) if known else Plain(n), batch_size=2)
    loader, ctx = weft.shard_data(loader, ctx, already_sharded=True, uneven=uneven)
    steps = 0
    for _ in loader:
        steps += 1
        weft.reduce(torch.ones(1), ctx)
    return steps


@pytest.mark.parametrize("known", [True, False])
def test_the_shortest_rank_ends_the_epoch(known):
    assert run_ranks(_ended, 2, "drop", known) == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
def test_a_rank_with_fewer_batches_is_named_on_all_ranks(known):
    begin = time.monotonic()
    with pytest.raises(weft.testing.RanksFailed) as caught:
        run_ranks(_ended, 2, None, known)
    assert time.monotonic() - begin < 10 and len(caught.value.traces) == 2
    text = (
        "3 batches on rank 0, 2 batches on rank 1" if known else "rank 1 ended after 2 batches, while rank 0 has more"
    )
    assert all(text in trace for trace in caught.value.traces.values())


class Broken(Records):
    def __getitem__(self, index):
        if index == 6:
            raise RuntimeError("not readable")
        return index


class Deadly(Records):
    def __getitem__(self, index):
        if index == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


class BrokenStream(Plain):
    def __iter__(self):
        for sample in range(self.n):
            if sample == 6 and self.mine:
                raise RuntimeError("not readable")
            yield sample


def _reads(ctx, kind, workers):
    data = kind(12)
    data.mine = ctx.rank == 1
    loader, ctx = weft.shard_data(DataLoader(data, batch_size=2, num_workers=workers), ctx, uneven="empty")
    for _ in loader:
        weft.reduce(torch.ones(1), ctx)


@pytest.mark.parametrize(
    ("kind", "workers"),
    [*((Broken, 1), (Deadly, 1), (BrokenStream, 0)), *variant_cases((Broken, 0), (BrokenStream, 1))],
)
def test_an_error_on_one_rank_names_sample_and_rank_on_all(kind, workers):
    begin = time.monotonic()
    with pytest.raises(weft.testing.RanksFailed) as caught:
        run_ranks(_reads, 2, kind, workers)
    assert time.monotonic() - begin < 10 and set(caught.value.traces) == {0, 1}
    for trace in caught.value.traces.values():
        assert re.search(r"while sample [\d, ]*\b6\b[\d, ]* was read on rank 1", trace)


def _counted_collectives(ctx):
    from torch.distributed.tensor.debug import CommDebugMode

    found = []
    cases = [(Plain(9), {}), (Seekable(9), {}), (Records(9), {}), (Records(9), {"mode": "split"})]
    cases += [(Records(5 - ctx.rank), {"already_sharded": True, "uneven": "join"})]
    for data, options in cases:
        loader, made = weft.shard_data(DataLoader(data, batch_size=2), ctx, **{"uneven": "empty", **options})
        meetings = made.world.meetings
        with CommDebugMode() as counter:
            list(loader)
        found.append((counter.get_total_counts(), made.world.meetings - meetings))
    return found


def test_iterating_sends_nothing():
    assert run_ranks(_counted_collectives, 2) == [[(0, 0)] * 5] * 2


# -- streams with shards -----------------------------------------------------------------------------


class Sharded(IterableDataset):
    """As `IterableDataset` of the `datasets` library: made of shards, and split by them."""

    def __init__(self, shards, read=None):
        self.shards = shards
        self.read = [] if read is None else read

    @property
    def num_shards(self):
        return len(self.shards)

    def shard(self, num_shards, index):
        return Sharded(self.shards[index::num_shards], self.read)

    def __iter__(self):
        for number in itertools.chain(*self.shards):
            self.read.append(number)
            yield number


def _own_shards(ctx, uneven, workers=0):
    data = Sharded([range(5), range(5, 8), range(8, 12)])
    loader = DataLoader(data, batch_size=2, num_workers=workers)
    loader, ctx = weft.shard_data(loader, ctx, mode="shards", uneven=uneven)
    batches = [batch.tolist() for batch in loader]
    plan = weft.contract.offered(loader, weft.data.DataPlan)[0]
    return batches, data.read, (plan.source, plan.reads, plan.any_ranks), loader.state_dict()


def test_each_rank_reads_its_own_shards_and_nothing_else():
    first, last = run_ranks(_own_shards, 2, "join")
    assert first[0] == [[0, 1], [2, 3], [4, 8], [9, 10], [11]] and last[0] == [[5, 6], [7], [], [], []]
    assert first[1] == [*range(5), *range(8, 12)] and last[1] == [5, 6, 7]
    assert first[2] == last[2] == ("split already", 1, False)
    assert first[3] == last[3] == {"seed": 0, "epoch": 1, "samples": 0, "ranks": 2}
    first, last = run_ranks(_own_shards, 2, "drop", workers=2)
    assert first[0] == [[0, 1], [2, 3]] and last[0] == [[5, 6], [7]]


def test_streams_without_enough_shards():
    with pytest.raises(ValueError, match="(?s)fewer shards than there are ranks.*3 shards, 4 ranks.*fix:"):
        weft.shard_data(DataLoader(Sharded([[1]] * 3)), fake(0, 4), mode="shards")
    with pytest.raises(ValueError, match='(?s)mode="shards" with Plain, which has no shards.*fix:'):
        weft.shard_data(DataLoader(Plain(4)), fake(0, 2), mode="shards")
    with pytest.raises(ValueError, match='mode="shards" with uneven="pad"'):
        weft.shard_data(DataLoader(Sharded([[1]] * 2)), fake(0, 2), mode="shards", uneven="pad")
