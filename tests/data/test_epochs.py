"""Loops over epochs as people write them, stopped at every step and resumed: what they read is what one run reads."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import weft
from tests.variants import variant_cases, variants
from weft.errors import ContractError
from weft.testing import fake, run_ranks

EPOCHS = 3


class Stream(IterableDataset):
    def __init__(self, n, known):
        self.n = n
        if known:
            self.__class__ = Known

    def __iter__(self):
        return iter(torch.randperm(self.n).tolist())


class Known(Stream):
    def __len__(self):
        return self.n


def _data(kind, n):
    return torch.arange(n) if kind == "map" else Stream(n, known=kind == "stream")


def _make(ctx, n, batch_size, steps, remainder, kind="map"):
    options = {"shuffle": True} if kind == "map" else {}
    loader = DataLoader(_data(kind, n), batch_size=batch_size, **options)
    loader, ctx = weft.shard_data(loader, ctx, uneven="drop", seed=7)
    if steps is None:
        return loader, loader
    _, windows, _ = weft.accumulate_grads(nn.Linear(1, 1), loader, ctx, steps=steps, remainder=remainder)
    return loader, windows


def _content(batch):
    return batch.tolist() if isinstance(batch, torch.Tensor) else [each.tolist() for each in batch]


class Stopped(Exception):
    """The run was cut off after a step."""


class Run:
    """What a loop has read; cut off after a step, with the position saved there."""

    def __init__(self, made, stop, done=0):
        self.loader, self.batches = made
        self.read, self.stop, self.step = [], stop, done

    def note(self, epoch, batch):
        self.read.append((epoch, _content(batch)))
        self.step += 1
        self.position = self.batches.state_dict()
        if self.step == self.stop:
            raise Stopped


def by_epochs(run, by_hand):
    """Epochs, where the loader says in which it is."""
    for epoch in range(run.loader.epoch, EPOCHS):
        if by_hand:
            run.loader.set_epoch(epoch)
        for batch in run.batches:
            run.note(epoch, batch)


def by_length(run, by_hand):
    """Epochs, counted by steps and `len`."""
    for epoch in range(run.step // len(run.batches), EPOCHS):
        if by_hand:
            run.loader.set_epoch(epoch)
        for batch in run.batches:
            run.note(epoch, batch)


def by_steps(run, by_hand):
    """Steps only."""
    while run.step < 11:
        for batch in run.batches:
            run.note(None, batch)
            if run.step >= 11:
                break


def by_islice(run, by_hand):
    """A fixed number of steps of each epoch."""
    for epoch in range(run.loader.epoch, EPOCHS):
        if by_hand:
            run.loader.set_epoch(epoch)
        done = len(run.batches) - run.batches.remaining
        for batch in itertools.islice(run.batches, 2 - done):
            run.note(epoch, batch)


def _differences(ctx, cases):
    """The cases in which a run that was stopped and resumed reads something else than one that was not."""
    wrong = []
    for loop, by_hand, *options in cases:
        whole = Run(_make(ctx, *options), None)
        loop(whole, by_hand)
        for stop in range(1, len(whole.read) + 1):
            first = Run(_make(ctx, *options), stop)
            with pytest.raises(Stopped):
                loop(first, by_hand)
            made = _make(ctx, *options)
            made[1].load_state_dict(first.position)
            second = Run(made, None, done=stop)
            loop(second, by_hand)
            if first.read + second.read != whole.read:
                wrong.append((loop.__name__, by_hand, options, stop, whole.read, first.read, second.read))
                break
    return wrong


def _cases(ranks, kinds):
    for kind in kinds:
        for n, batch_size in ((5 * ranks, 1), (9, 2), (4 * ranks, 2)):
            for steps, remainder in ((None, "step"), (2, "step"), (2, "drop"), (2, "carry"), (3, "carry"), (3, "drop")):
                for loop in (by_epochs, by_length, by_steps, by_islice):
                    if loop is by_length and (remainder == "carry" or kind == "unknown"):
                        continue  # epochs have other numbers of steps, or nobody knows it
                    if loop is by_islice and (kind == "unknown" or (kind == "stream" and remainder == "carry")):
                        continue  # what a stream carries over is read only when the loop asks whether there is more
                    if steps and n // (batch_size * ranks) < steps and remainder != "step":
                        continue  # an epoch without a window
                    for by_hand in (False, True):
                        yield loop, by_hand, n, batch_size, steps, remainder, kind


@pytest.mark.parametrize(("ranks", "every"), [(1, 5), (2, 17), *variant_cases((1, 1), (2, 3), (3, 5))])
def test_a_loop_that_is_stopped_at_any_step_and_resumed_reads_what_one_reads_that_is_not(ranks, every):
    for wrong in run_ranks(_differences, ranks, list(_cases(ranks, ["map"]))[::every]):
        assert wrong == []


@pytest.mark.parametrize("ranks", [*variants(1, 2, 3)])
@pytest.mark.parametrize("kind", ["stream", "unknown"])
def test_the_same_of_streams(ranks, kind):
    cases = list(_cases(ranks, [kind]))[ranks % 2 :: 1 + ranks]  # others on each number of ranks
    for wrong in run_ranks(_differences, ranks, cases):
        assert wrong == []


# -- several loaders, and loaders that are built anew -------------------------------------------------


def _shuffled(ctx, data, **options):
    return weft.shard_data(DataLoader(data, batch_size=2, shuffle=True, **options), ctx, uneven="empty")[0]


def _order(loader):
    return [i for batch in loader for i in batch.tolist()]


def test_a_loader_built_anew_continues_the_epochs_of_its_predecessor():
    data, ctx = torch.arange(9), weft.local()
    one = _shuffled(ctx, data)
    epochs = [_order(one) for _ in range(4)]
    ctx = weft.local()
    assert [_order(_shuffled(ctx, data)) for _ in range(4)] == epochs
    ctx = weft.local()
    first = _shuffled(ctx, data)
    for _ in first:
        position = first.state_dict()
        assert first.state_dict()["epoch"] == 0
        break  # left early: the next one is in the next epoch
    second = _shuffled(ctx, data)
    with pytest.warns(UserWarning, match=r"(?s)continues the epochs of another one.*found: +epoch 1.*set_epoch\(0\)"):
        assert second.epoch == 1
    assert _order(second) == epochs[1]
    third = _shuffled(ctx, data)
    third.load_state_dict(position)
    assert _order(third) == epochs[0][2:] and third.epoch == 1
    begun_anew = _shuffled(ctx, data)
    begun_anew.set_epoch(0)
    assert begun_anew.epoch == 0 and _order(begun_anew) == epochs[0]
    assert _order(_shuffled(ctx, torch.arange(9))) not in epochs  # another dataset


def test_loaders_side_by_side_have_orders_of_their_own_that_are_the_same_in_each_run():
    def orders(ctx):
        generator = torch.Generator().manual_seed(3)
        data = torch.arange(50)
        loaders = [_shuffled(ctx, data), _shuffled(ctx, data), _shuffled(ctx, torch.arange(50))]
        loaders += [_shuffled(ctx, data, generator=generator), _shuffled(ctx, data, generator=generator)]
        return [[_order(loader) for loader in loaders] for _ in range(2)]

    first = orders(weft.local())
    assert first == orders(weft.local()) != orders(weft.local(seed=1))
    assert len({tuple(order) for epoch in first for order in epoch}) == 10
    ctx = weft.local()
    alike = [weft.shard_data(DataLoader(range(50), shuffle=True), ctx, seed=4)[0] for _ in range(2)]
    assert _order(alike[0]) == _order(alike[1])  # a seed that was asked for


class Noisy(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.rand(())


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_loaders_side_by_side_draw_other_numbers(persistent):
    def noise(ctx, count):
        data = Noisy()
        loaders = [_shuffled(ctx, data, num_workers=1, persistent_workers=persistent) for _ in range(count)]
        return [[x for batch in loader for x in batch.tolist()] for loader in loaders]

    one, two = noise(weft.local(), 2)
    assert not set(one) & set(two) and noise(weft.local(), 1) == [one]


def test_a_loader_that_is_read_twice_at_once():
    data = torch.arange(50)
    epochs = [_order(_shuffled(weft.local(), data))]
    loader = _shuffled(weft.local(), data)
    epochs = [_order(loader) for _ in range(4)]
    loader = _shuffled(weft.local(), data)
    pairs = [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=False)]
    assert [i for a, _ in pairs for i in a] == epochs[0]
    assert [i for _, b in pairs for i in b] == epochs[1]
    assert loader.epoch == 2 and _order(loader) == epochs[2]
    loader = _shuffled(weft.local(), data)
    inside = [_order(loader) for _, _ in zip(loader, range(2), strict=False)]  # one in the other
    assert inside == epochs[1:3] and _order(loader) == epochs[3]
    loader = _shuffled(weft.local(), data)
    for _ in loader:
        other = iter(loader)
        next(other)
        with pytest.raises(ContractError, match=r"(?s)read twice at once has no position.*fix:.*two loaders"):
            loader.state_dict()
        break
    loader.set_epoch(3)
    for _ in loader:
        assert loader.state_dict()["epoch"] == 3  # `other` is not gone on with
        break


def test_set_epoch_of_the_epoch_that_comes_next_changes_nothing():
    for read in (3, 5):
        loader = _shuffled(weft.local(), torch.arange(9))
        expected = _shuffled(weft.local(), torch.arange(9))
        for one in (loader, expected):
            for _, _ in zip(range(read), one, strict=False):
                pass
        loader.set_epoch(1)
        assert _order(loader) == _order(expected)
        loader.set_epoch(0)
        assert loader.epoch == 0 and len(_order(loader)) == 9


def test_the_length_is_that_of_an_epoch_and_what_remains_is_said_apart():
    loader = _shuffled(weft.local(), torch.arange(9))
    seen = [(len(loader), loader.remaining) for _ in loader]
    assert seen == [(5, 4), (5, 3), (5, 2), (5, 1), (5, 0)] and loader.remaining == 5
    for _ in loader:
        position = loader.state_dict()
        break
    assert (len(loader), loader.remaining) == (5, 5)  # of the epoch that comes next
    loader.load_state_dict(position)
    assert (len(loader), loader.remaining) == (5, 4)
    ranks = [weft.shard_data(DataLoader(torch.arange(9)), fake(rank, 2), uneven="empty")[0] for rank in range(2)]
    for each in ranks:
        each.load_state_dict({"seed": 0, "epoch": 0, "samples": 2})
        assert (len(each), each.remaining) == (5, 4)
    for remainder, whole, parts in (("step", 4, [3, 2, 1, 0]), ("drop", 3, [2, 1, 0]), ("carry", 3, [2, 1, 0])):
        loader, windows = _make(weft.local(), 7, 1, 2, remainder)
        left = []
        for window in windows:
            left.append(windows.remaining)
            assert len(windows) == whole
            list(window)
            assert windows.remaining == left[-1]
        assert left == parts
    loader, windows = _make(weft.local(), 7, 1, lambda window: 1 + window % 2, "carry")
    lengths = []
    for _ in range(3):
        for window in windows:
            list(window)
            lengths.append((len(windows), windows.remaining))
            again = _make(weft.local(), 7, 1, lambda window: 1 + window % 2, "carry")[1]
            again.load_state_dict(windows.state_dict())
            if windows.remaining:
                assert (len(again), again.remaining) == lengths[-1]
    assert lengths == [(5, 4 - i) for i in range(5)] + [(4, 3 - i) for i in range(4)] + [(5, 4 - i) for i in range(5)]
