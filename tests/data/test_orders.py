"""The order of an epoch, whatever sampler makes it: the same on all ranks, and after a resume, or refused by name."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler

import weft
from tests.data import samplers
from tests.variants import variants
from weft.data.order.digest import digest_of
from weft.data.order.sampler_state import SamplerState
from weft.errors import ContextError, ContractError, PeerError
from weft.testing import RanksFailed, run_ranks

N = 70  # more than the entries of a list that are looked at for counters
AGAIN = [*samplers.GOOD, *samplers.BATCHES, *samplers.DRAWN]


def _loader(kind, ctx, batch_size=2, **options):
    samplers.ClassCounter.calls = 0
    samplers._RNG = np.random.default_rng(5)
    sampler = kind(N)
    if isinstance(sampler, BatchSampler) or kind in samplers.BATCHES:
        loader = DataLoader(torch.arange(N), batch_sampler=sampler)
    else:
        loader = DataLoader(torch.arange(N), batch_size=batch_size, sampler=sampler)
    return weft.shard_data(loader, ctx, **{"uneven": "empty"} | options)[0]


def _epochs(loader, ctx, epochs, positions=None):
    """What all ranks read in each step, epoch by epoch."""
    found = []
    while loader.epoch < epochs:
        mine = []
        for batch in loader:
            mine.append(batch.tolist())
            if positions is not None:
                positions.append(loader.state_dict())
        ranks = weft.collectives.gather_objects(mine, ctx)
        # A rank that has no sample left is done before the others.
        found.append([list(itertools.chain(*step)) for step in itertools.zip_longest(*ranks, fillvalue=())])
    return found


def _read(ctx, kinds, epochs=3):
    found = []
    for kind in kinds:
        positions = []
        found.append((_epochs(_loader(kind, ctx), ctx, epochs, positions), positions))
    return found


def _resume(ctx, jobs):
    found = []
    for kind, position in jobs:
        loader = _loader(kind, ctx, batch_size=3)
        loader.load_state_dict(position)
        found.append(_flat(_epochs(loader, ctx, 3)))
    return found


def _flat(epochs):
    return [i for epoch in epochs for step in epoch for i in step]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, *variants(4)])
def test_a_sampler_is_read_alike_by_any_number_of_ranks_and_resumed_on_another(ranks):
    alone, parts = run_ranks(_read, 1, AGAIN)[0], run_ranks(_read, ranks, AGAIN)[0]
    jobs, left = {1: [], ranks: []}, {1: [], ranks: []}
    for kind, (one, positions), (many, positions_of_many) in zip(AGAIN, alone, parts, strict=True):
        assert _flat(many) == _flat(one), kind
        assert one[0] != one[1] != one[2]
        if kind not in samplers.DRAWN:
            assert all(sorted(i for step in epoch for i in step) == list(range(N)) for epoch in one)
        for other, epochs, saved in ((ranks, one, positions), (1, many, positions_of_many)):
            for at in (2, len(epochs[0]) - 1, len(epochs[0]) + 3):
                jobs[other].append((kind, saved[at]))
                used = sum(len(step) for step in list(itertools.chain(*epochs))[: at + 1])
                left[other].append(_flat(one)[used:])
    for world, each in jobs.items():
        for (kind, position), got, expected in zip(each, run_ranks(_resume, world, each)[0], left[world], strict=True):
            assert got == expected, (kind, position)


@pytest.mark.parametrize("kind", [samplers.Entropy, *variants(*samplers.RANKS_DIFFER[1:])])
def test_ranks_whose_orders_differ_are_named_before_the_first_step(kind):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_read, 2, [kind])
    texts = {type(error): str(error) for error in failed.value.errors.values()}
    assert set(texts) == {ContextError, PeerError}
    assert f"the ranks read what {kind.__name__} yields in different orders" in texts[ContextError]
    assert "rank 0: " in texts[ContextError] and "rank 1: " in texts[ContextError]


@pytest.mark.parametrize("kind", [samplers.Entropy, samplers.System, samplers.Secret, *samplers.HIDDEN])
def test_an_order_that_cannot_be_made_again_is_refused_on_resume_and_its_line_works(kind):
    ctx, positions, options = weft.local(), [], {"resized": "next_epoch"}
    _epochs(_loader(kind, ctx), ctx, 3, positions)
    middle, boundary = positions[35 + 5], positions[69]
    for position in (middle, boundary):
        text = f"{kind.__name__} yields another order of epoch 1 than when .*fix: .*resized=.next_epoch"
        with pytest.raises(ValueError, match=f"(?s){text}"):
            _loader(kind, ctx).load_state_dict(position)
    other = _loader(kind, ctx)
    before = other.state_dict()
    with pytest.raises(ValueError, match="another order"):
        other.load_state_dict(middle)
    assert other.state_dict() == before  # nothing has changed
    for position in (middle, boundary):
        other = _loader(kind, ctx, **options)
        with pytest.warns(UserWarning, match="yields another order of epoch 1 .* resuming with the next epoch"):
            other.load_state_dict(position)
        assert other.epoch == 2 and sorted(_flat(_epochs(other, ctx, 3))) == list(range(N))
    fixed = type(kind.__name__, (kind,), {"__iter__": lambda self: iter(torch.randperm(len(self)).tolist())})
    positions = []
    whole = _flat(_epochs(_loader(fixed, ctx), ctx, 3, positions))
    again = _loader(fixed, ctx)
    again.load_state_dict(positions[40])
    assert _flat(_epochs(again, ctx, 3)) == whole[82:]


def test_a_position_in_an_order_of_another_sampler():
    shuffled, _ = weft.shard_data(DataLoader(range(9), batch_size=2, shuffle=True), weft.local())
    next(iter(shuffled))
    position = shuffled.state_dict()
    plain, _ = weft.shard_data(DataLoader(range(9), batch_size=2), weft.local())
    with pytest.raises(ValueError, match="SequentialSampler yields another order of epoch 0"):
        plain.load_state_dict(position)
    same, _ = weft.shard_data(DataLoader(range(9), sampler=list(shuffled.weft_reading.units.order(0, 0))), weft.local())
    same.load_state_dict(position)  # the same order, by another sampler
    assert len(list(same)) == 7
    for strange in ({"order": [[0, 7]]}, {"order": 3}, {"sampler": [["x", {}]]}):
        with pytest.raises(ValueError, match=r"(?s)this is not a position.*fix:"):
            shuffled.load_state_dict({**position, **strange})
    own = _loader(samplers.OwnNumpy, weft.local())
    next(iter(own))
    position = own.state_dict()
    state = position["sampler"][0][1]["rng"]
    for broken in ("text", {**state, "bit_generator": "MT19937"}, [1], {**state, "state": {"state": -1, "inc": 3}}):
        with pytest.raises(ValueError, match=r"(?s)state of OwnNumpy in this position.*fix:"):
            own.load_state_dict({**position, "sampler": [[0, {"rng": broken}]]})


class Counted(Sampler):
    """Endless, and counts what is drawn of it."""

    def __init__(self, length=None):
        self.length, self.drawn, self.rng = length, 0, np.random.default_rng(2)

    def __iter__(self):
        while True:
            for index in self.rng.permutation(8).tolist():
                self.drawn += 1
                yield index


class CountedWithLength(Counted):
    def __len__(self):
        return self.length


@pytest.mark.parametrize("kind", [Counted, CountedWithLength])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_endless_sampler_is_read_by_steps(kind, workers):
    def make(ctx, batch_size=2):
        data = DataLoader(torch.arange(8), batch_size=batch_size, sampler=kind(8), num_workers=workers)
        return weft.shard_data(data, ctx)[0]

    loader = make(weft.local())
    if kind is Counted:
        with pytest.raises(TypeError, match="has none"):
            len(loader)
    else:
        assert len(loader) == 4
    read, position = [], None
    for number, batch in enumerate(loader):
        read.append(batch.tolist())
        position = loader.state_dict() if number == 9 else position
        if number == 20:
            break
    assert loader.sampler.drawn < 70_000
    rng = np.random.default_rng(2)
    expected = [rng.permutation(8).reshape(4, 2).tolist() for _ in range(5)]
    assert read[:20] == list(itertools.chain(*expected))
    parts = [make(weft.testing.fake(rank, 2), 1) for rank in range(2)]
    for part in parts:
        part.load_state_dict(position)
    steps = [list(itertools.islice(part, 11)) for part in parts]
    assert [[int(a), int(b)] for a, b in zip(*steps, strict=True)] == read[10:]


def test_an_endless_sampler_beyond_what_is_drawn_at_once():
    loader, ctx = weft.shard_data(DataLoader(torch.arange(8), batch_size=512, sampler=Counted()), weft.local())
    _, windows, _ = weft.accumulate_grads(torch.nn.Linear(1, 1), loader, ctx, steps=2)
    read, positions = [], []
    for window in windows:
        shares = [(batch, window.share) for batch in window]
        assert [share for _, share in shares] == [0.5, 0.5]
        read += [batch.tolist() for batch, _ in shares]
        positions.append(windows.state_dict())
        if len(read) == 160:
            break
    assert loader.sampler.drawn < 160 * 512 + 2048
    again = weft.shard_data(DataLoader(torch.arange(8), batch_size=512, sampler=Counted()), weft.local())[0]
    again.load_state_dict(positions[70])
    assert [batch.tolist() for batch in itertools.islice(again, 5)] == read[142:147]


class Huge(Sampler):
    """Ends, but not before it counts as endless."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))


@pytest.mark.parametrize(("uneven", "last"), [("balance", [70_001, 70_002]), ("drop", [70_001]), ("error", None)])
def test_a_long_sampler_that_does_not_tell_its_length_ends(uneven, last):
    def make(rank):
        data = DataLoader(list(range(70_003)), batch_size=100, sampler=Huge(70_003))
        return weft.shard_data(data, weft.testing.fake(rank, 2), uneven=uneven)[0]

    if last is None:
        with pytest.raises(ValueError, match="cannot be split evenly"):
            list(make(0))
        return
    zero, one = list(make(0)), list(make(1))
    assert len(zero) == len(one) == 351 and sum(map(len, zero)) == 35_000 + len(zero[-1])
    assert [*zero[-1].tolist(), *one[-1].tolist()][-len(last) :] == last


def test_a_sampler_with_an_untrue_length_is_named():
    with pytest.raises(ContractError, match=r"(?s)found: +70 in epoch 0, 69 at set-up.*fix:"):
        list(_loader(samplers.WrongLength, weft.local()))


def test_a_digest_is_that_of_the_samples_whatever_their_type():
    order = [3, 1, 2]
    kinds = [np.array(order, dtype=kind) for kind in (np.int16, np.uint64, np.int64)]
    assert (
        len({digest_of(order), *(digest_of(list(kind)) for kind in kinds), digest_of(list(torch.tensor(order)))}) == 1
    )
    others = [
        [3, 1],
        [3, 2, 1],
        [(3, 1, 2)],
        [[3], [1, 2]],
        [[3, 1], [2]],
        ["3", "1", "2"],
        [3.0, 1.0, 2.0],
        [2**70, 1, 2],
    ]
    digests = [digest_of(other) for other in others]
    assert len({*digests, digest_of(order)}) == len(others) + 1
    assert digest_of([object()]) == digest_of([object()])  # of what has no value, only the type counts
    assert digest_of(range(3 * 10**6)) == digest_of(list(range(3 * 10**6)))


def test_the_state_of_a_sampler_is_what_iterating_it_changes():
    sampler = samplers.Nested(N)
    sampler.width, sampler.epoch = 3, None
    state = SamplerState(sampler, None, [])
    first = state.capture()
    assert list(first) == ["parts.inner.0._random"]
    order, sampler.epoch, sampler.new = list(sampler), 4, 1.5
    found = state.capture()
    assert (found["epoch"], found["new"]) == (4, 1.5)
    other = samplers.Nested(N)
    other.width, other.epoch = 8, None
    fresh = SamplerState(other, None, [])
    fresh.prepare(found)()
    assert (other.epoch, other.new, other.width) == (4, 1.5, 8)
    assert list(other) == list(sampler)
    fresh.prepare(first)()
    assert other.epoch is None and list(other) == order


def test_the_order_of_data_that_rank_0_reads_for_all_is_known_to_every_rank():
    found, positions, _ = run_ranks(_dispatched, 2, samplers.OwnNumpy)[0]
    alone, _ = _read(weft.local(), [samplers.OwnNumpy])[0]
    assert _flat(found) == _flat(alone)
    after = run_ranks(_dispatched, 2, samplers.OwnNumpy, None, 1)[0][2]  # an epoch, and asked when it is over
    assert after == positions[17] and after["sampler"]
    assert run_ranks(_dispatched, 2, samplers.OwnNumpy, after, 1)[0][2] == after  # loaded, and asked at once
    for at in (3, 17, 20):
        for ranks in (1, 2):
            got = run_ranks(_dispatched, ranks, samplers.OwnNumpy, positions[at])[0][0]
            assert _flat(got) == _flat(found)[sum(len(step) for step in [*itertools.chain(*found)][: at + 1]) :]
    with pytest.raises(RanksFailed, match="Entropy yields another order of epoch 0"):
        run_ranks(_dispatched, 2, samplers.Entropy, run_ranks(_dispatched, 2, samplers.Entropy)[0][1][3])


def _dispatched(ctx, kind, position=None, epochs=3):
    loader, positions = _loader(kind, ctx, mode="dispatch"), []
    if position is not None:
        loader.load_state_dict(position)
    return _epochs(loader, ctx, epochs, positions), positions, loader.state_dict()


def test_a_sampler_whose_length_changes_from_epoch_to_epoch():
    found, positions = _read(weft.local(), [samplers.Growing])[0]
    assert [len(_flat([epoch])) for epoch in found] == [17, 34, 51]
    parts = [_loader(samplers.Growing, weft.testing.fake(rank, 2)) for rank in range(2)]
    steps = [[batch.tolist() for _ in range(3) for batch in part] for part in parts]
    assert sorted(i for part in steps for batch in part for i in batch) == sorted(_flat(found))
    steps = list(itertools.chain(*found))
    for at in (8, 12, 30):  # after the first epoch, and in the middle of the others
        left = [i for step in steps[at + 1 :] for i in step]
        again = _loader(samplers.Growing, weft.local())
        again.load_state_dict(positions[at])
        assert _flat(_epochs(again, weft.local(), 3))[: len(left)] == left


def test_a_sampler_that_can_be_read_once():
    loader = _loader(samplers.once, weft.local())
    batches = iter(loader)
    next(batches)
    position = loader.state_dict()
    assert _flat([[batch.tolist() for batch in batches]]) == list(range(2, N))
    again = _loader(samplers.once, weft.local())
    again.load_state_dict(position)
    assert len(again) == 35 and _flat(_epochs(again, weft.local(), 1)) == list(range(2, N))
    loader = _loader(samplers.Once, weft.local())
    assert _flat([[batch.tolist() for batch in loader]]) == list(range(N))
    loader = _loader(samplers.Once, weft.local())
    assert len(loader) == 35
    with pytest.raises(ContractError, match=r"(?s)number of samples when it is run again.*found: +0 .*70 .*fix:"):
        list(loader)
