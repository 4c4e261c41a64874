"""shard_data: who gets which samples, in which order, and that nothing else changes."""

import inspect
import pickle
import random
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, TensorDataset, WeightedRandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

import weft
from weft.testing import fake, run_ranks


def _loader(n, batch_size=3, **options):
    return DataLoader(list(range(n)), batch_size=batch_size, **options)


def _batches(loader, ctx, **options):
    mine, _ = weft.shard_data(loader, ctx, **options)
    batches = [batch.tolist() for batch in mine]
    assert len(mine) == len(batches)
    return batches


def _all(make, world, **options):
    return [_batches(make(), fake(r, world), **options) for r in range(world)]


FULL = [[0, 1, 2], [6, 7, 8], [12, 13, 14]], [[3, 4, 5], [9, 10, 11], [15, 16, 17]]
# (samples, drop_last, uneven) -> last batches of rank 0 and rank 1, of two, with batch size 3
TAILS = {
    (24, False, "balance"): ([[18, 19, 20]], [[21, 22, 23]]),
    (24, True, "pad"): ([[18, 19, 20]], [[21, 22, 23]]),
    (21, False, "pad"): ([[18, 19, 20]], [[0, 1, 2]]),
    (21, False, "balance"): ([[18, 19]], [[20]]),
    (21, False, "drop"): ([[18]], [[19]]),
    (21, True, "balance"): ([], []),
    (22, False, "pad"): ([[18, 19, 20]], [[21, 0, 1]]),
    (22, False, "balance"): ([[18, 19]], [[20, 21]]),
    (22, False, "error"): ([[18, 19]], [[20, 21]]),
    (20, False, "pad"): ([[18, 19, 0]], [[1, 2, 3]]),
    (20, False, "balance"): ([[18]], [[19]]),
    (20, True, "error"): ([], []),
    (19, False, "drop"): ([], []),
    (19, False, "pad"): ([[18, 0, 1]], [[2, 3, 4]]),
}


@pytest.mark.parametrize("case", TAILS, ids=str)
def test_tabulated_batches(case):
    n, drop_last, uneven = case
    zero, one = _all(lambda: _loader(n, drop_last=drop_last), 2, uneven=uneven)
    assert (zero, one) == (FULL[0] + TAILS[case][0], FULL[1] + TAILS[case][1])


def test_fewer_samples_than_one_batch():
    assert _all(lambda: _loader(2), 2, uneven="pad") == [[[0, 1, 0]], [[1, 0, 1]]]
    assert _all(lambda: _loader(2), 2) == [[[0]], [[1]]]


@pytest.mark.parametrize(
    ("n", "uneven", "text"),
    [(19, "balance", "19 in steps of 3 x 2, 1 left"), (21, "error", "a multiple of 2 left")],
)
def test_samples_that_cannot_be_shared_out(n, uneven, text):
    with pytest.raises(ValueError, match=f"(?s){text}.*fix:.*uneven=.empty"):
        weft.shard_data(_loader(n), fake(0, 2), uneven=uneven)


def test_a_rank_without_samples_gets_a_batch_without_rows():
    dataset = TensorDataset(torch.arange(5.0).view(5, 1), torch.arange(5))
    parts = []
    for rank in range(4):
        loader, _ = weft.shard_data(DataLoader(dataset, batch_size=1), fake(rank, 4), uneven="empty")
        parts.append([(x.shape, y.tolist()) for x, y in loader])
    assert parts[0][1] == ((1, 1), [4]) and parts[3][1] == ((0, 1), [])


@pytest.mark.filterwarnings("ignore:(?s).*an epoch has no step")
@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 40),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from(["empty", "pad", "drop"]),
    st.booleans(),
    st.booleans(),
)
def test_union_and_order(n, batch_size, world, uneven, drop_last, shuffle):
    if n == 0 and shuffle:
        return  # torch refuses to shuffle nothing
    options = {"batch_size": batch_size, "drop_last": drop_last, "shuffle": shuffle}
    parts = _all(lambda: _loader(n, **options), world, uneven=uneven, seed=3)
    assert len({len(part) for part in parts}) == 1
    steps = [[i for part in parts for i in part[step]] for step in range(len(parts[0]))]
    order = [i for step in steps for i in step]
    single = [
        i
        for batch in _batches(
            _loader(n, **{**options, "batch_size": batch_size * world}), fake(), uneven=uneven, seed=3
        )
        for i in batch
    ]
    seen = Counter(order)
    if uneven == "pad":
        assert set(order) == set(single) or drop_last or n == 0
        assert (
            order[: len(single) // (batch_size * world) * batch_size * world]
            == single[: len(single) // (batch_size * world) * batch_size * world]
        )
    else:
        assert all(count == 1 for count in seen.values())
        assert order == single[: len(order)]
        assert len(single) - len(order) < world
    if uneven == "empty" and not drop_last:
        assert set(order) == set(range(n))


def test_order_is_a_function_of_seed_and_epoch():
    one, _ = weft.shard_data(_loader(30, shuffle=True), fake(1, 2, seed=5))
    two, _ = weft.shard_data(_loader(30, shuffle=True), fake(1, 2, seed=5))
    torch.manual_seed(123)
    random.seed(4)
    epochs = [[b.tolist() for b in one] for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    two.set_epoch(2)
    assert [b.tolist() for b in two] == epochs[2]
    other, _ = weft.shard_data(_loader(30, shuffle=True), fake(1, 2), seed=6)
    assert [b.tolist() for b in other] != epochs[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_iterating_leaves_random_state_alone(workers):
    loader, _ = weft.shard_data(_loader(12, shuffle=True, num_workers=workers), fake(0, 2))
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    list(loader)
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert states[2] == np.random.get_state()[1].tolist()


def test_the_generator_of_the_sampler_is_the_seed():
    make = lambda: _loader(10, shuffle=True, generator=torch.Generator().manual_seed(9))  # noqa: E731
    assert _batches(make(), fake(0, 2, seed=1)) == _batches(make(), fake(0, 2, seed=2))


class _Told(Sampler):
    def __init__(self, n):
        self.n, self.epochs = n, []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __len__(self):
        return self.n

    def __iter__(self):
        yield from torch.randperm(self.n).tolist()
        random.random()
        np.random.rand()


def test_any_sampler_is_pure_and_told_the_epoch():
    sampler = _Told(8)
    loader, _ = weft.shard_data(DataLoader(range(8), sampler=sampler, batch_size=2), fake(0, 2))
    first, second = [b.tolist() for b in loader], [b.tolist() for b in loader]
    assert sampler.epochs == [0, 1] and first != second
    again, _ = weft.shard_data(DataLoader(range(8), sampler=_Told(8), batch_size=2), fake(0, 2))
    assert [b.tolist() for b in again] == first


# In a fresh process: numpy imports its random module when it is first used, here inside of the sampler.
FIRST_USE = """
import sys
import numpy as np, weft
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

assert "numpy.random" not in sys.modules

class Shuffled:
    def __len__(self):
        return 50

    def __iter__(self):
        return iter(np.random.permutation(50).tolist())

first, second = (weft.shard_data(DataLoader(range(50), sampler=Shuffled()), weft.local())[0] for _ in range(2))
assert [batch.item() for batch in first] == [batch.item() for batch in second]
"""


@pytest.mark.slow
def test_a_sampler_that_is_the_first_to_use_numpys_generator():
    done = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_weighted_sampler_is_the_same_on_all_ranks():
    make = lambda: DataLoader(range(6), sampler=WeightedRandomSampler([1.0] * 6, 12), batch_size=3)  # noqa: E731
    zero, one = _all(make, 2)
    both = [i for pair in zip(zero, one, strict=True) for batch in pair for i in batch]
    assert both == [i for batch in _batches(make(), fake()) for i in batch]


class _WithEpoch(torch.utils.data.Dataset):
    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index + 100 * self.epoch


def test_dataset_is_told_the_epoch():
    loader, _ = weft.shard_data(DataLoader(_WithEpoch(), batch_size=4), fake())
    assert [next(iter(loader)).tolist()[0], next(iter(loader)).tolist()[0]] == [0, 100]


class _Groups(Sampler):
    batch_size = 2

    def __len__(self):
        return 5

    def __iter__(self):
        yield from ([i, i + 1, i + 2][: 1 + i % 3] for i in range(5))


def test_batches_of_a_batch_sampler_go_round():
    make = lambda: DataLoader(range(10), batch_sampler=_Groups())  # noqa: E731
    assert _all(make, 2, uneven="pad") == [[[0], [2, 3, 4], [4, 5]], [[1, 2], [3], [0]]]
    assert _all(make, 2, uneven="drop") == [[[0], [2, 3, 4]], [[1, 2], [3]]]
    with pytest.raises(ValueError, match="(?s)5 in steps of 1 x 2.*fix:"):
        weft.shard_data(make(), fake(0, 2))


def test_split_cuts_one_batch():
    assert _all(lambda: _loader(8, batch_size=4), 2, mode="split") == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    with pytest.raises(ValueError, match="(?s)batch_size=5, 2 ranks.*fix: .*batch_size=6"):
        weft.shard_data(_loader(10, batch_size=5), fake(0, 2), mode="split")


def test_ranks_of_one_tensor_group_see_the_same():
    contexts = [fake(r, 8, mesh={"data": 2, "tensor": 2, "context": 2}) for r in range(8)]
    found = [_batches(_loader(12), ctx) for ctx in contexts]
    assert found[0] == found[1] == found[2] == found[3] != found[4] == found[7]
    assert sorted(i for rank in (0, 4) for batch in found[rank] for i in batch) == list(range(12))


def _worker_init(worker):
    pass


def _collate(samples):
    return torch.tensor(samples)


class _OwnLoader(DataLoader):
    def __init__(self, name, size):
        super().__init__(list(range(size)), batch_size=2)
        self.name = name
        self.calls = 0

    def __iter__(self):
        self.calls += 1
        return super().__iter__()


def test_attributes_of_the_loader_survive():
    plain = DataLoader(
        list(range(8)), batch_size=2, num_workers=2, collate_fn=_collate, pin_memory=False, timeout=7,
        worker_init_fn=_worker_init,
        prefetch_factor=3, persistent_workers=True, in_order=True, multiprocessing_context="spawn",
    )  # fmt: skip
    plain.later = "set later"
    before = dict(vars(plain))
    loader, _ = weft.shard_data(plain, fake(0, 2))
    assert vars(plain).keys() == before.keys() and all(vars(plain)[k] is before[k] for k in before)
    for name, value in before.items():
        if name not in ("batch_sampler", "_iterator"):
            assert vars(loader)[name] is value, name
    assert isinstance(loader, DataLoader) and type(plain) is DataLoader


def test_a_loader_class_of_the_users():
    own = _OwnLoader("mine", 8)
    loader, _ = weft.shard_data(own, fake(1, 2))
    assert isinstance(loader, _OwnLoader) and loader.name == "mine" and type(loader).__name__ == "_OwnLoader"
    assert [b.tolist() for b in loader] == [[2, 3], [6, 7]] and loader.calls == 1 and own.calls == 0
    copied = pickle.loads(pickle.dumps(loader))
    assert isinstance(copied, _OwnLoader) and copied.name == "mine" and [b.tolist() for b in copied] == [[2, 3], [6, 7]]


def test_a_windowed_loader_pickles():
    loader, ctx = weft.shard_data(_loader(8, batch_size=2), weft.local())
    _, windows, _ = weft.accumulate_grads(torch.nn.Linear(1, 1), loader, ctx, steps=2)
    copied = pickle.loads(pickle.dumps(windows))
    assert [len(window) for window in copied] == [2, 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_position_goes_on_at_another_world_size(workers):
    def make():
        return _loader(24, batch_size=2, shuffle=True, num_workers=workers)

    whole = [i for batch in _batches(make(), fake(seed=1), seed=1) for i in batch]
    zero, _ = weft.shard_data(make(), fake(0, 2, seed=1))
    one, _ = weft.shard_data(make(), fake(1, 2, seed=1))
    seen = [next(iter(zero)).tolist(), next(iter(one)).tolist()]
    digest = zero.state_dict()["order"]
    expected = {"seed": 1, "epoch": 0, "samples": 4, "length": 24, "order": digest}
    assert zero.state_dict() == one.state_dict() == expected and digest[0][0] == 0
    left = []
    for rank in range(4):
        loader, _ = weft.shard_data(make(), fake(rank, 4))
        loader.load_state_dict(zero.state_dict())
        assert (len(loader), loader.remaining) == (3, 3)
        left.append([b.tolist() for b in loader])
        assert loader.state_dict() == {"seed": 1, "epoch": 1, "samples": 0} and len(loader) == 3
    rest = [i for step in zip(*left, strict=True) for batch in step for i in batch]
    assert [i for batch in seen for i in batch] + rest == whole
    with pytest.raises(ValueError, match="(?s)found:.*99.*fix:"):
        loader.load_state_dict({"seed": 0, "epoch": 0, "samples": 99})


def test_the_epoch_of_a_position_that_was_loaded_is_gone_on_with():
    loader, _ = weft.shard_data(_loader(12, shuffle=True), weft.local())
    whole = [batch.tolist() for batch in loader]
    for _ in loader:
        position = loader.state_dict()
        break
    again, _ = weft.shard_data(_loader(12, shuffle=True), weft.local())
    again.load_state_dict(position)
    found = []
    for epoch in range(position["epoch"], 3):  # as in every script for DistributedSampler
        again.set_epoch(epoch)
        again.set_epoch(epoch)
        found.append([i for batch in again for i in batch.tolist()])
    loader.set_epoch(1)
    expected = [i for batch in loader for i in batch.tolist()]
    assert found[0] == expected[3:] and sorted(found[1]) == list(range(12)) != found[1]
    again.load_state_dict(position)
    again.set_epoch(0)
    assert [batch.tolist() for batch in again] == whole
    again.load_state_dict(position)
    next(iter(again))
    again.set_epoch(1)  # something was read: from its beginning
    assert len(list(again)) == 4


@pytest.mark.parametrize("length", [90, 95, 200])
def test_a_position_in_a_dataset_of_another_length(length):
    loader, _ = weft.shard_data(_loader(96, shuffle=True), weft.local())
    for _ in loader:
        position = loader.state_dict()
        break
    other, _ = weft.shard_data(_loader(length, shuffle=True), weft.local())
    with pytest.raises(ValueError, match=f"(?s)found:    96 samples when it was saved, {length} samples now.*resized="):
        other.load_state_dict(position)
    other.load_state_dict({**position, "samples": 0, "epoch": 4})  # nothing of the epoch is used
    assert other.epoch == 4
    other, _ = weft.shard_data(_loader(length, shuffle=True), weft.local(), resized="next_epoch")
    with pytest.warns(UserWarning, match=f"96 samples when it was saved, {length} samples now: resuming with the next"):
        other.load_state_dict(position)
    assert other.epoch == 1 and sum(len(batch) for batch in other) == length
    with pytest.raises(ValueError, match="resized = 'no' is unknown"):
        weft.shard_data(_loader(9), weft.local(), resized="no")


def test_the_position_under_a_batch_sampler_counts_samples():
    batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9]]
    for mode in ("batches", "dispatch"):
        loader, _ = weft.shard_data(DataLoader(range(10), batch_sampler=batches), weft.local(), mode=mode)
        positions = [loader.state_dict() for _ in loader]
        if mode == "batches":
            assert [position["samples"] for position in positions] == [3, 4, 6, 0]
        assert [position["batches"] for position in positions] == [1, 2, 3, 0]
        loader.load_state_dict(positions[1])
        assert [batch.tolist() for batch in loader] == batches[2:]
    loader.load_state_dict({"seed": 0, "epoch": 0, "samples": 3})  # saved before there was "batches"
    assert [batch.tolist() for batch in loader] == batches[3:]


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(2))


def test_an_epoch_without_a_step_is_told():
    for options, uneven in (({}, "drop"), ({"drop_last": True}, "balance")):
        with pytest.warns(UserWarning, match="(?s)an epoch has no step.*found:    1 samples for 2 ranks x 3"):
            loader, _ = weft.shard_data(_loader(1, **options), fake(0, 2), uneven=uneven)
        assert list(loader) == [] and len(loader) == 0
    loader, _ = weft.shard_data(DataLoader(Endless(), batch_size=3), fake(0, 3), uneven="drop")
    with pytest.warns(UserWarning, match="(?s)the stream ended before there was a step.*found:    2 samples for 3"):
        assert list(loader) == []
    loader, _ = weft.shard_data(DataLoader([], batch_size=3), weft.local(), uneven="drop")
    assert list(loader) == []


def test_break_begins_the_next_epoch():
    loader, _ = weft.shard_data(_loader(6, batch_size=1), fake())
    for _ in loader:
        break
    assert loader.state_dict()["samples"] == 1
    assert len(list(loader)) == 6 and loader.state_dict() == {"seed": 0, "epoch": 2, "samples": 0}


class _Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("loader", "options", "text"),
    [
        (DataLoader(_Stream()), {}, "no __len__, 2 ranks, and no uneven="),
        (DataLoader([1, 2], batch_size=None), {"mode": "split"}, "batch_size=None"),
        (DataLoader(_Stream(), batch_size=None), {"mode": "split"}, "batch_size=None"),
        (_loader(4), {"already_sharded": True, "mode": "dispatch"}, "already_sharded=True with mode='dispatch'"),
        (_loader(4), {"already_sharded": True, "uneven": "pad"}, 'already_sharded=True with uneven="pad"'),
        (_loader(4), {"mode": "rows"}, "mode = 'rows' is unknown"),
        (_loader(4), {"uneven": "maybe"}, "uneven = 'maybe' is unknown"),
        (DataLoader([1, 2], sampler=DistributedSampler([1, 2], 2, 0)), {}, "the data would be split twice"),
        (DataLoader([1, 2], batch_sampler=BatchSampler(DistributedSampler([1, 2], 2, 0), 1, False)), {}, "split twice"),
    ],
)
def test_refused_loaders(loader, options, text):
    with pytest.raises(ValueError, match=f"(?s)shard_data: .*{text}.*fix:"):
        weft.shard_data(loader, fake(0, 2), **options)


def test_not_a_loader():
    with pytest.raises(TypeError, match="(?s)found:    list.*fix:"):
        weft.shard_data([1, 2], weft.local())


def test_data_that_is_split_already():
    parts = []
    for rank in range(2):
        sampler = DistributedSampler(range(8), 2, rank, shuffle=False)
        loader, _ = weft.shard_data(
            DataLoader(range(8), sampler=sampler, batch_size=2), fake(rank, 2), already_sharded=True
        )
        parts.append([b.tolist() for b in loader])
    assert parts == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


def test_a_sampler_whose_length_is_not_true():
    class Lying(Sampler):
        def __len__(self):
            return 5

        def __iter__(self):
            return iter(range(3))

    loader, _ = weft.shard_data(DataLoader(range(5), sampler=Lying(), batch_size=1), fake())
    with pytest.raises(weft.errors.ContractError, match="(?s)3 in epoch 0, 5 at set-up.*fix:"):
        list(loader)


def _count_messages(ctx):
    from torch.distributed.tensor.debug import CommDebugMode

    loader, ctx = weft.shard_data(_loader(12), ctx)
    meetings = ctx.world.meetings
    with CommDebugMode() as counter:
        found = [batch.tolist() for batch in loader]
    return found, counter.get_total_counts(), ctx.world.meetings - meetings


def test_iterating_sends_nothing():
    assert run_ranks(_count_messages, 2) == [([[0, 1, 2], [6, 7, 8]], 0, 0), ([[3, 4, 5], [9, 10, 11]], 0, 0)]


def _different_data(ctx):
    try:
        weft.shard_data(_loader(12 + 6 * ctx.rank), ctx)
    except weft.errors.ContextError as error:
        return str(error)
    return "nothing raised"


def test_ranks_with_different_data_are_told():
    for found in run_ranks(_different_data, 2):
        assert "length: 12 on rank 0, 18 on rank 1" in found


# -- profiles ----------------------------------------------------------------------------------------


class _Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor(float(index))


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_have_torchs_names_in_a_profile_and_only_there(workers):
    loader, _ = weft.shard_data(DataLoader(_Numbers(), batch_size=4, num_workers=workers), weft.local())
    kind = "_MultiProcessingDataLoaderIter" if workers else "_SingleProcessDataLoaderIter"
    with torch.autograd.profiler.profile() as unrelated:
        pass
    assert not unrelated.key_averages()
    without = [batch.tolist() for batch in loader]
    with torch.autograd.profiler.profile() as seen:
        watched = [batch.tolist() for batch in loader]
    assert watched == without == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    names = {event.key: event.count for event in seen.key_averages()}
    assert names[f"enumerate(DataLoader)#{kind}.__next__"] == 4  # the last finds nothing more


def test_torchs_iterators_do_what_this_one_leaves_out():
    """Fails if torch comes to do more for a batch than is done without a profiler."""
    source = inspect.getsource(_BaseDataLoaderIter.__next__)
    for line in ("record_function(self._profile_name)", "self._reset()", "self._next_data()", "self._num_yielded += 1",
                 "self._IterableDataset_len_called is not None", "warnings.warn"):  # fmt: skip
        assert line in source
    code = [line for line in source.splitlines() if line.strip() and not line.strip().startswith("#")]
    assert len(code) == 23  # of torch 2.9 to 2.13
