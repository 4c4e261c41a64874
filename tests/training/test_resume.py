"""A windowed, sharded loader goes on exactly where it was: with the same windows, and no sample read twice."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import weft
from tests.variants import variants
from weft.testing import fake, run_ranks

STEPS = {"2": 2, "3": 3, "grows": lambda window: 1 + window % 4}


class Ids(Dataset):
    """Samples that are their own numbers; keeps which were read, and what epoch it was told of."""

    def __init__(self, size):
        self.size, self.read, self.epoch = size, [], 0

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        return index


class EpochIds(Ids):
    """Samples that depend on the epoch."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return 1000 * self.epoch + super().__getitem__(index)


def _windows(ctx, dataset, *, steps=2, remainder="step", batch_size=2, workers=0, mode="split", **options):
    """A windowed loader over shuffled samples; batch sizes are those of all ranks together."""
    loader = DataLoader(
        dataset, batch_size=batch_size, shuffle=True, num_workers=workers, drop_last=options.pop("drop", False)
    )
    loader, ctx = weft.shard_data(loader, ctx, mode=mode, seed=5, **options)
    _, windows, ctx = weft.accumulate_grads(nn.Identity(), loader, ctx, steps=steps, remainder=remainder)
    return windows, ctx


def _endless(loader):
    while True:
        yield from loader


def _lists(window):
    return [batch.tolist() for batch in window]


def _flat(lists):
    return list(itertools.chain.from_iterable(lists))


def _after_each_window(windows, count):
    """Contents of the next windows, and the position after each."""
    stream = itertools.islice(_endless(windows), count)
    return [(_lists(window), windows.state_dict()) for window in stream]


# -- one process: every position --------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Ids, EpochIds])
@pytest.mark.parametrize("remainder", ["step", "drop", "carry"])
@pytest.mark.parametrize("steps", STEPS)
def test_going_on_after_any_window_gives_the_windows_of_a_run_without_interruption(steps, remainder, kind):
    def make():
        return _windows(weft.local(), kind(13), steps=STEPS[steps], remainder=remainder)[0]

    whole = _after_each_window(make(), 14)
    for index, (_, position) in enumerate(whole[:-1]):
        windows = make()
        windows.load_state_dict(position)
        assert windows.state_dict() == position
        assert _after_each_window(windows, 13 - index) == whole[index + 1 :], position


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_what_is_carried_over_is_read_once_and_at_another_number_of_ranks(n, drop):
    def make(ctx, dataset):
        return _windows(ctx, dataset, steps=4, remainder="carry", batch_size=6, drop=drop, uneven="empty")[0]

    dataset = Ids(33)
    alone = make(weft.local(), dataset)
    first = [_lists(window) for window in alone]
    position = alone.state_dict()
    # 5 or 6 batches: one window of 4, the rest waits, unread.
    assert sorted(dataset.read) == sorted(_flat(first[0])) and len(dataset.read) == 24
    digest = position.get("order")
    expected = {"seed": 5, "epoch": 1, "samples": 0, "carried": [[0, 24, 33]], "length": 33, "windows": 1}
    assert position == expected | {"order": digest} and [epoch for epoch, _ in digest] == [0]
    expected = _after_each_window(alone, 3)
    parts = []
    for rank in range(n):
        windows = make(fake(rank, n), Ids(33))
        windows.load_state_dict(position)
        parts.append(_after_each_window(windows, 3))
    for index, (contents, after) in enumerate(expected):
        joined = [_flat(batches) for batches in zip(*(part[index][0] for part in parts), strict=True)]
        assert joined == contents and all(part[index][1] == after for part in parts)


def test_windows_larger_than_epochs_carry_several_of_them():
    windows, _ = _windows(weft.local(), Ids(4), steps=5, remainder="carry")
    assert [[_lists(w) for w in windows] for _ in range(2)] == [[], []]
    position = windows.state_dict()
    assert position == {
        "seed": 5,
        "epoch": 2,
        "samples": 0,
        "carried": [[0, 0, 4], [1, 0, 4]],
        "length": 4,
        "windows": 0,
    }
    dataset = Ids(4)
    again, _ = _windows(weft.local(), dataset, steps=5, remainder="carry")
    again.load_state_dict(position)
    assert len(again) == 1 and dataset.read == []
    assert [sorted(_flat(_lists(window))) for window in again] == [sorted([*range(4)] * 2 + dataset.read[8:])]
    assert again.state_dict() == {
        "seed": 5,
        "epoch": 3,
        "samples": 0,
        "carried": [[2, 2, 4]],
        "length": 4,
        "order": again.state_dict()["order"],
        "windows": 1,
    }


def test_a_padded_last_step_repeats_the_same_samples_after_going_on():
    def make():
        loader = DataLoader(Ids(10), batch_size=4, shuffle=True)
        return weft.shard_data(loader, weft.local(), uneven="pad")[0]

    whole = [batch.tolist() for batch in make()]
    loader = make()
    next(iter(loader))
    position, loader = loader.state_dict(), make()
    loader.load_state_dict(position)
    assert [batch.tolist() for batch in loader] == whole[1:]


def test_the_last_batch_of_an_epoch_leads_to_the_next_epoch():
    loader, _ = weft.shard_data(DataLoader(Ids(7), batch_size=2, drop_last=True), weft.local())
    for _ in loader:
        position = loader.state_dict()
    assert position == loader.state_dict() == {"seed": 0, "epoch": 1, "samples": 0}


class ReadsAhead:
    """An engine as one of an accelerator: a batch is read before the one ahead of it is given."""

    def prefetch(self, batches, device):
        ahead = next(batches)
        for batch in batches:
            yield ahead
            ahead = batch
        yield ahead


def test_batches_that_are_read_ahead_for_an_accelerator_do_not_count():
    ctx = replace(weft.local(), device=torch.device("meta"), engine=ReadsAhead())
    loader, _ = weft.shard_data(DataLoader(Ids(8), batch_size=2), ctx)
    assert [loader.state_dict()["samples"] for _ in loader] == [2, 4, 6, 0]


def test_a_position_of_a_loader_without_windows_and_back():
    windows, _ = _windows(weft.local(), Ids(12), steps=2)
    windows.load_state_dict({"seed": 5, "epoch": 1, "samples": 4})
    assert (len(windows), windows.remaining) == (3, 2)
    position = _after_each_window(windows, 1)[0][1]
    loader, _ = weft.shard_data(DataLoader(Ids(12), batch_size=4, shuffle=True), weft.local())
    loader.load_state_dict(position)
    assert position.pop("windows") == 1 and loader.state_dict() == position
    assert position == {"seed": 5, "epoch": 1, "samples": 8, "length": 12, "order": position["order"]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"samples": 99}, {"samples": -1}, {"carried": [[0, 5, 3]]}, {"carried": [[0, 1]]}, {"carried": [["a", 0, 1]]},
        {"carried": 3}, {"windows": -1}, {"windows": True}, {"windows": "2"}, {"more": 1},
    ],
)  # fmt: skip
def test_what_is_no_position_is_refused_and_changes_nothing(wrong):
    windows, _ = _windows(weft.local(), Ids(12))
    before = windows.state_dict()
    with pytest.raises(ValueError, match="(?s)load_state_dict: (this is not a position|windows = ).*found:.*fix:"):
        windows.load_state_dict({**before, "epoch": 7, **wrong})
    assert windows.state_dict() == before


# -- the middle of a window --------------------------------------------------------------------------


def _saved(windows, folder, step, ctx=None):
    state, ctx = weft.checkpointable({"loader": windows}, ctx or weft.local())
    return weft.save(state, folder, step, ctx)


@pytest.mark.parametrize("read_ahead", [False, True])
def test_the_middle_of_a_window_is_not_saved_and_its_position_is_where_it_begins(tmp_path, read_ahead):
    windows, ctx = _windows(weft.local(), Ids(12), steps=3)
    begins = windows.state_dict()
    for window in windows:
        _saved(windows, tmp_path, 2 * begins["windows"], ctx)  # nothing of the window is used yet
        if read_ahead:
            window.denominator(len)
        for _ in window:
            assert windows.state_dict() == begins
            with pytest.raises(
                weft.errors.ContractError, match=r"(?s)found:    \d of 3 micro-batches.*fix:.*for batch in window"
            ):
                _saved(windows, tmp_path, 99, ctx)
        begins = windows.state_dict()
        _saved(windows, tmp_path, 2 * begins["windows"] - 1, ctx)
    assert begins == {"seed": 5, "epoch": 1, "samples": 0, "windows": 2}


def test_a_window_left_early_is_not_saved_until_the_rest_is_left_out(tmp_path):
    windows, _ = _windows(weft.local(), Ids(12), steps=3)
    for window in windows:
        for _ in window:
            break
        with pytest.raises(weft.errors.ContractError, match="(?s)found:    1 of 3.*fix:.*for _ in window: pass"):
            _saved(windows, tmp_path, 1)
        for _ in window:
            pass
        _saved(windows, tmp_path, 1)
        assert windows.state_dict()["samples"] == 6
        break
    for window in windows:
        next(iter(window))
        break
    # Neither is a run that left both loops.
    assert windows.state_dict() == {"seed": 5, "epoch": 1, "samples": 0, "windows": 1}
    with pytest.raises(weft.errors.ContractError, match="(?s)found:    1 of 3.*fix:"):
        _saved(windows, tmp_path, 2)


def test_going_back_in_the_middle_of_a_window(tmp_path):
    windows, _ = _windows(weft.local(), Ids(12), steps=2)
    state, ctx = weft.checkpointable({"loader": windows}, weft.local())
    found = []
    for index, window in enumerate(windows):
        if index == 1:
            weft.save(state, tmp_path, 1, ctx)
        found.append(_lists(window) if index < 2 else [next(iter(window)).tolist()])
    assert len(found) == 3
    for window in windows:
        next(iter(window))
        assert weft.restore(state, tmp_path, ctx).step == 1
        break
    assert _lists(next(iter(windows))) == found[1]


# -- loaders that shard_data did not make ------------------------------------------------------------


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(9))


class Counting:
    """An iterable with a position of its own."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 9:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class CountingLoader(DataLoader):
    def __iter__(self):
        self.counting = Counting()
        self.counting.at = self.__dict__.get("at", 0)
        return iter(self.counting)

    def state_dict(self):
        return self.counting.state_dict()

    def load_state_dict(self, state):
        self.__dict__["at"] = state["at"]


def test_a_loader_without_a_position_is_refused():
    for loader in ([1, 2, 3], DataLoader(Ids(4)), DataLoader(Stream())):
        _, windows, ctx = weft.accumulate_grads(nn.Linear(1, 1), loader, weft.local(), steps=2)
        with pytest.raises(TypeError, match=r"(?s)found:    loader: .*fix:.*state_dict\(\)"):
            weft.checkpointable({"loader": windows}, ctx)


@pytest.mark.parametrize("make", [Counting, lambda: CountingLoader(Stream(), batch_size=None)])
def test_a_loader_with_a_position_of_its_own_kind_goes_on_between_windows(make):
    def windowed(**options):
        return weft.accumulate_grads(nn.Linear(1, 1), make(), weft.local(), steps=2, **options)[1]

    windows, positions, found = windowed(), [], []
    for window in windows:
        with pytest.raises(weft.errors.ContractError, match="(?s)found:    0 of .* micro-batches.*fix:"):
            windows.state_dict()
        found.append(list(window))
        positions.append(windows.state_dict())
    assert positions[1] == {"loader": {"at": 4}, "windows": 2}
    again = windowed()
    again.load_state_dict(positions[1])
    assert [list(window) for window in again] == found[2:] and again.weft_splitter.windows == 5
    with pytest.raises(ValueError, match="(?s)windows = -1 .*fix:"):
        again.load_state_dict({"loader": {"at": 4}, "windows": -1})
    carrying = windowed(remainder="carry")
    assert len([list(window) for window in carrying]) == 4
    with pytest.raises(
        weft.errors.ContractError, match=r"(?s)found:    1 of the last epoch, in memory.*weft.shard_data.*fix:"
    ):
        carrying.state_dict()


# -- real ranks --------------------------------------------------------------------------------------


def _some_windows(ctx, folder, run, workers, remainder, *, last):
    """Restore, use two or three windows and save, then die in the middle of the next one."""
    dataset = Ids(44)
    windows, ctx = _windows(ctx, dataset, steps=3, batch_size=4, workers=workers, remainder=remainder)
    state, ctx = weft.checkpointable({"loader": windows}, ctx)
    restored = weft.restore(state, folder, ctx)
    used, kept = [], 0
    for step, window in enumerate(_endless(windows), start=1 + (restored.step if restored else 0)):
        if len(used) == 2 + run % 2 and not last:
            next(iter(window))  # this work is lost, and done again
            break
        used.append(_flat(_lists(window)))
        if step == 11:
            break
        if len(used) == 2 + run % 2 and not last:
            weft.save(state, folder, step, ctx)
            kept = len(dataset.read)
    return used, dataset.read if last else dataset.read[:kept]


@pytest.mark.parametrize(
    ("workers", "remainder", "ranks"),
    [(0, "carry", (2, 1, 4, 2)), pytest.param(2, "step", (2, 1, 2, 1), marks=pytest.mark.variant)],
)
def test_each_sample_once_over_three_interruptions_at_other_numbers_of_ranks(tmp_path, workers, remainder, ranks):
    used, read = [], []
    for run, n in enumerate(ranks):
        parts = run_ranks(_some_windows, n, tmp_path, run, workers, remainder, last=run == 3)
        used += [_flat(windows) for windows in zip(*(part[0] for part in parts), strict=True)]
        read += [index for part in parts for index in part[1]]
    ((whole, _),) = run_ranks(_some_windows, 1, tmp_path / "whole", 0, 0, remainder, last=True)
    assert [sorted(window) for window in used] == [sorted(window) for window in whole]
    flat = _flat(whole)
    # An epoch has 11 batches: windows of 3, 3, 3, 2 with "step"; exactly three epochs in 11 windows with "carry".
    epochs = [flat[start : start + 44] for start in range(0, len(flat), 44)]
    assert [len(set(epoch)) for epoch in epochs] == ([44, 44, 36] if remainder == "step" else [44] * 3)
    if workers == 0:
        assert sorted(read) == sorted(flat), "a sample that was skipped was read"


def _train(ctx, folder, until, save_at, remainder):
    """Losses and parameters of a model with dropout, batch statistics and random augmentation."""
    torch.manual_seed(1 + ctx.rank)
    data = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    noisy = Noisy(data)
    windows, ctx = _windows(ctx, noisy, steps=2, batch_size=4, remainder=remainder)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    model, ctx = weft.replicate(model, ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer, "loader": windows}, ctx)
    torch.manual_seed(7 + ctx.rank)
    restored = weft.restore(state, folder, ctx)
    losses = []
    first = restored.step if restored else 0
    for step, window in enumerate(_endless(windows), start=first + 1):
        for x in window:
            loss = model(x).square().mean() / len(window)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if step in save_at:
            weft.save(state, folder, step, ctx)
        if step == until:
            break
    return losses, [p.tolist() for p in model.parameters()]


class Noisy(Dataset):
    """Draws from the global random states when it is read."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index] + 0.1 * torch.randn(3) + 0.01 * random.random()


@pytest.mark.parametrize("remainder", ["step", "carry"])
@pytest.mark.parametrize("n", [2, *variants(1)])
def test_training_in_windows_goes_on_bit_for_bit(tmp_path, n, remainder):
    whole = run_ranks(_train, n, tmp_path / "whole", 12, (), remainder)
    parts = [[] for _ in range(n)]
    for until in (3, 6, 9, 12):  # 5 batches in an epoch: windows end in its middle and at its end
        got = run_ranks(_train, n, tmp_path / "parts", until, (until,), remainder)
        for rank in range(n):
            parts[rank] += got[rank][0]
    assert [(parts[rank], got[rank][1]) for rank in range(n)] == whole


class Backwards(nn.Module):
    """Layers that are called in another order than they were added in."""

    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(20, 8), nn.Linear(8, 20)

    def forward(self, x):
        return self.last(self.first(x).tanh())


def _in_buckets(ctx, folder, strategy):
    """Whether a run and one that resumed it have the same bits; buckets are made anew after the first step."""

    def build():
        torch.manual_seed(0)
        model = Backwards()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if strategy == "replicate":
            model, here = weft.replicate(model, ctx)
        else:
            model, optimizer, here = weft.zero_partition(model, optimizer, ctx, stage=1)
        return model, optimizer, *weft.checkpointable({"model": model, "optimizer": optimizer}, here)

    def train(model, optimizer, steps):
        for step in steps:
            draw = torch.Generator().manual_seed(10 * step + ctx.rank)
            model(torch.randn(4, 8, generator=draw)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    model, optimizer, state, here = build()
    train(model, optimizer, range(3))
    weft.save(state, folder, 3, here)
    expected = train(model, optimizer, range(3, 7))
    model, optimizer, state, here = build()
    weft.restore(state, folder, here)
    return all(map(torch.equal, expected, train(model, optimizer, range(3, 7))))


@pytest.mark.parametrize("strategy", ["replicate", *variants("zero1")])
def test_sums_over_4_ranks_have_the_same_bits_after_going_on(tmp_path, strategy):
    assert all(run_ranks(_in_buckets, 4, tmp_path, strategy))
    model = Backwards()  # what adds up nothing does without the order
    state, ctx = weft.checkpointable({"model": model, "optimizer": torch.optim.SGD(model.parameters())}, weft.local())
    assert weft.restore(state, tmp_path, ctx).step == 3
