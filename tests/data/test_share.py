"""`window.share`, `loader.share`: mean losses have the gradient of the mean over all samples, under any split."""

import re
import textwrap
import types
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import weft
from tests.variants import variant_cases
from weft.testing import fake, largest_difference, run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "index.md"
X = torch.randn(40, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.arange(40) % 3


def _model():
    torch.manual_seed(0)
    return nn.Linear(4, 3, dtype=torch.float64)


def _data(n):
    return TensorDataset(X[:n], Y[:n])


# -- the loop of the first page ----------------------------------------------------------------------


def _loop_of_the_page():
    block = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL).group(1)
    lines = block.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.strip().startswith("for window in windows"))
    return textwrap.dedent("\n".join(lines[begin:]))


def _as_on_the_page(ctx, loop, n, steps):
    loader, ctx = weft.shard_data(DataLoader(_data(n), batch_size=2), ctx)
    model, ctx = weft.replicate(_model(), ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, windows, ctx = weft.accumulate_grads(model, loader, ctx, steps=steps)
    fitting = types.SimpleNamespace(cross_entropy=cross_entropy, nn=nn)
    exec(loop, {"windows": windows, "model": model, "optimizer": optimizer, **vars(fitting), "torch": torch})
    return [p.detach() for p in model.parameters()]


def _plain(n, per_window):
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for part in torch.arange(n).split(per_window):
        cross_entropy(model(X[part]), Y[part]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("steps", [1, 3])
def test_the_loop_of_the_first_page_is_the_plain_loop_over_ragged_data(steps):
    expected = _plain(11, 4 * steps)
    for found in run_ranks(_as_on_the_page, 2, _loop_of_the_page(), 11, steps):
        assert largest_difference(found, expected) < 1e-12


# -- any split ---------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __init__(self, first, last):
        self.first, self.last = first, last

    def __iter__(self):
        return iter([(X[i], Y[i]) for i in range(self.first, self.last)])


class SizedStream(Stream):
    def __len__(self):
        return self.last - self.first


class Unsized:
    """A loader that is none of torch, without a length."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def _ready(batches):
    return [(X[list(ids)], Y[list(ids)]) for ids in batches]


RAGGED = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10]]
MINE = [[RAGGED[0], RAGGED[2], [11, 12]], [RAGGED[1], RAGGED[3], RAGGED[4]]]  # batches of two ranks


FOURS = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def _source(kind, rank):
    """A loader, how it is shared out (None: not), and the samples of each of its steps on two ranks."""
    if kind in ("balance", "drop", "pad"):
        last = {"drop": [8, 9], "pad": [8, 9, 10, 0]}.get(kind, FOURS[2])
        return DataLoader(_data(11), batch_size=2), {"uneven": kind}, [*FOURS[:2], last]
    if kind in ("empty", "join"):
        return DataLoader(_data(9), batch_size=2), {"uneven": kind}, [*FOURS[:2], [8]]
    if kind in ("split", "dispatch"):
        return DataLoader(_data(11), batch_size=4 if kind == "split" else 2), {"mode": kind}, FOURS
    if kind in ("stream", "sized stream"):
        stream = (SizedStream if kind == "sized stream" else Stream)(0, 9)
        return DataLoader(stream, batch_size=2), {"uneven": "empty"}, [*FOURS[:2], [8]]
    if kind in ("batch sampler", "dispatched batch sampler"):
        options = {"uneven": "empty", "mode": "dispatch" if kind.startswith("dispatched") else "batches"}
        steps = [RAGGED[0] + RAGGED[1], RAGGED[2] + RAGGED[3], RAGGED[4]]
        return DataLoader(_data(11), batch_sampler=RAGGED), options, steps
    if kind.startswith("split already"):
        first, last = [(0, 5), (5, 8)][rank]
        mine = Stream(first, last) if kind.endswith("stream") else TensorDataset(X[first:last], Y[first:last])
        options = {"already_sharded": True, "uneven": "join"}
        return DataLoader(mine, batch_size=2), options, [[0, 1, 5, 6], [2, 3, 7], [4]]
    steps = [a + b for a, b in zip(*MINE, strict=True)]
    if kind == "batch_size=None":
        every = _ready([batch for pair in zip(*MINE, strict=True) for batch in pair])
        return DataLoader(every, batch_size=None), {}, steps
    batches = _ready(MINE[rank])
    return (
        {"list": batches, "unsized": Unsized(batches)}[kind],
        None,
        steps,
    )


KINDS = [
    "balance", "empty", "drop", "join", "pad", "split", "dispatch", "stream", "sized stream", "batch sampler",
    "dispatched batch sampler", "batch_size=None", "split already map", "split already stream", "list", "unsized",

]  # fmt: skip


def _gradients(ctx, kind, strategy, steps, remainder):
    loader, options, expected = _source(kind, ctx.rank)
    if options is not None:
        loader, ctx = weft.shard_data(loader, ctx, **options)
    model = _model()
    if strategy == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx)
    else:
        model, ctx = weft.replicate(model, ctx)
    model, windows, ctx = weft.accumulate_grads(model, loader, ctx, steps=steps, remainder=remainder)
    found, epochs = [], 2 if remainder == "carry" else 1
    for _ in range(epochs):
        for window in windows:
            total = torch.zeros((), dtype=torch.float64)
            for x, y in window:
                loss = cross_entropy(model(x), y) * window.share
                loss.backward()
                total += loss.detach() if len(y) else 0
            grads = (
                [weft.full_grads(model, ctx)["weight"].clone()] if strategy == "fully_shard" else [model.weight.grad]
            )
            found.append((grads[0].clone(), weft.reduce(total, ctx, "mean")))
            model.zero_grad()
    return found, expected


def _reference(expected, steps, remainder):
    parts = expected * (2 if remainder == "carry" else 1)
    windows = [parts[i : i + steps] for i in range(0, len(parts), steps)]
    if remainder != "step":
        windows = [window for window in windows if len(window) == steps]
    found = []
    for window in windows:
        model, ids = _model(), [i for part in window for i in part]
        loss = cross_entropy(model(X[ids]), Y[ids])
        loss.backward()
        found.append((model.weight.grad, loss.detach()))
    return found


def _all_kinds(ctx, kinds, strategy, steps, remainder):
    return [_gradients(ctx, kind, strategy, steps, remainder) for kind in kinds]


@pytest.mark.parametrize(
    ("strategy", "steps", "remainder"),
    [
        ("replicate", 2, "carry"),
        *variant_cases(("replicate", 1, "step"), ("replicate", 2, "step"), ("replicate", 2, "drop")),
    ],
)
def test_any_split_has_the_gradient_of_the_mean_over_all_samples(strategy, steps, remainder):
    for ranks in run_ranks(_all_kinds, 2, KINDS, strategy, steps, remainder):
        for kind, (found, expected) in zip(KINDS, ranks, strict=True):
            reference = _reference(expected, steps, remainder)
            assert len(found) == len(reference), kind
            for (grad, loss), (other, mean) in zip(found, reference, strict=True):
                assert (grad - other).abs().max() < 1e-12, kind
                assert abs(loss - mean) < 1e-12, kind


def test_shares_of_sharded_gradients():
    for ranks in run_ranks(_all_kinds, 2, ["empty", "list"], "fully_shard", 2, "step"):
        for found, expected in ranks:
            for (grad, _), (other, _) in zip(found, _reference(expected, 2, "step"), strict=True):
                assert (grad - other).abs().max() < 1e-12


# -- without windows ---------------------------------------------------------------------------------


def _without_windows(ctx, kinds):
    found = []
    for kind in kinds:
        loader, options, expected = _source(kind, ctx.rank)
        loader, after = weft.shard_data(loader, ctx, **options)
        model, after = weft.replicate(_model(), after)
        grads = []
        for x, y in loader:
            (cross_entropy(model(x), y) * loader.share).backward()
            grads.append((model.weight.grad.clone(), torch.zeros(())))
            model.zero_grad()
        found.append((grads, expected))
    return found


def test_a_loop_without_windows():
    kinds = [kind for kind in KINDS if _source(kind, 0)[1] is not None]
    assert len(kinds) == 14
    for ranks in run_ranks(_without_windows, 2, kinds):
        for kind, (found, expected) in zip(kinds, ranks, strict=True):
            for (grad, _), (other, _) in zip(found, _reference(expected, 1, "step"), strict=True):
                assert (grad - other).abs().max() < 1e-12, kind


def _shares(windows):
    return [[window.share for _ in window] for window in windows]


def _split_by(rank, ranks, n, batch_size=2, **options):
    return weft.shard_data(DataLoader(range(n), batch_size=batch_size), fake(rank, ranks), **options)


def _windows(loader, ctx, steps, **options):
    frozen = nn.Linear(1, 1).requires_grad_(False)  # fake ranks cannot average gradients
    return weft.accumulate_grads(frozen, loader, ctx, steps=steps, **options)[1]


@pytest.mark.parametrize("ranks", [1, 3])
def test_equal_batches_have_the_share_of_one_of_them(ranks):
    # a fake rank can send nothing: these shares are known; without a strategy gradients are summed, not averaged
    windows = _windows(*_split_by(ranks - 1, ranks, 24), 3)
    assert all(share == 1 / len(window) / ranks for window in windows for _ in window for share in [window.share])


def test_shares_after_going_on_in_the_middle_of_an_epoch_at_another_number_of_ranks():
    loader, _ = _split_by(0, 2, 13, uneven="empty")
    next(iter(loader))
    position = loader.state_dict()  # 4 of 13 samples are used
    for rank in range(3):
        loader, ctx = _split_by(rank, 3, 13, uneven="empty")
        loader.load_state_dict(position)
        assert _shares(_windows(loader, ctx, 2)) == [[2 / 9, 1 / 9]]


def _counted(ctx, kinds):
    from torch.distributed.tensor.debug import CommDebugMode

    found = {}
    for kind in kinds:
        loader, options, _ = _source(kind, ctx.rank)
        after = ctx
        if options is not None:
            loader, after = weft.shard_data(loader, ctx, **options)
        windows = _windows(loader, after, 2)
        with CommDebugMode() as counter:
            number = len(_shares(windows))
        found[kind] = counter.get_total_counts() / number
    return found


def test_shares_are_known_without_a_message_where_weft_splits_the_data():
    known = [kind for kind in KINDS if "dispatch" not in kind and _source(kind, 0)[1] is not None]
    asked = ["split already map", "split already stream", "batch_size=None", "list", "unsized"]
    for found in run_ranks(_counted, 2, [kind for kind in known if kind not in asked]):
        assert set(found.values()) == {0}
    for found in run_ranks(_counted, 2, ["split already map", "batch_size=None", "list", "unsized"]):
        assert set(found.values()) == {1}  # per window


def test_batches_are_not_read_ahead_where_their_sizes_are_known():
    read = []
    loader = DataLoader(range(8), batch_size=2, collate_fn=lambda ids: read.extend(ids) or torch.tensor(ids))
    window = next(iter(_windows(*weft.shard_data(loader, fake(0, 2), uneven="empty"), 2)))
    for _ in window:
        assert window.share == 0.25
        break
    assert read == [0, 1]


def test_reading_ahead_in_the_middle_of_a_window_gives_every_batch_once():
    batches = [torch.ones(n) for n in (1, 2, 3, 4)]
    window = next(iter(_windows(batches, weft.local(), 4)))
    shares = []
    for number, batch in enumerate(window):
        assert batch is batches[number]
        if number == 1:  # the first micro-batch was skipped
            with pytest.raises(weft.errors.ContractError, match="a function was given after the window was begun"):
                window.denominator(len)
        if number:
            shares.append(window.share)
    assert shares == [0.2, 0.3, 0.4]


def test_batches_of_other_kinds_are_counted_by_the_rows_of_their_first_tensor():
    batches = [{"text": ["a"] * n, "x": {"y": torch.ones(n, 5)}} for n in (1, 3)]
    assert _shares(_windows(batches, weft.local(), 2)) == [[0.25, 0.75]]
    assert _shares(_windows([1, "b", torch.tensor(2.0)], weft.local(), 3)) == [[1 / 3] * 3]


# -- where there is no share -------------------------------------------------------------------------


def test_a_share_is_that_of_a_batch_that_is_being_processed():
    loader, ctx = _split_by(0, 1, 4)
    with pytest.raises(weft.errors.ContractError, match="loader.share inside the loop"):
        _ = loader.share
    assert [loader.share for _ in loader] == [1.0, 1.0]
    with pytest.raises(weft.errors.ContractError, match="no iteration over the loader is running"):
        _ = loader.share
    windows = _windows(loader, ctx, 2)
    with pytest.raises(weft.errors.ContractError, match="a loader of windows has no share"):
        _ = windows.share
    (window,) = windows
    with pytest.raises(weft.errors.ContractError, match="window.share inside the loop over the window"):
        _ = window.share
    for _ in windows:
        pass
    window = next(iter(windows))
    batches = list(window)
    with pytest.raises(weft.errors.ContractError, match="2 of 2 micro-batches given, no inner loop is running"):
        [window.share for _ in batches]


# -- len(window) is no normaliser --------------------------------------------------------------------


def _told(loader, ctx, steps, use, epochs=1):
    windows = _windows(loader, ctx, steps)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(epochs):
            for window in windows:
                use(window)
    return [str(warning.message) for warning in caught]


def _divide(window):
    for _ in window:
        1 / len(window)


def _divide_by_number(window):
    number = len(window)
    for _ in window:
        1 / number


@pytest.mark.parametrize("use", [_divide, _divide_by_number])
def test_a_loop_that_divides_by_the_number_of_unequal_batches_is_told_once(use):
    (text,) = _told(*_split_by(0, 2, 11), 3, use, epochs=2)
    assert "samples per micro-batch: 2, 2, 2 on rank 0; 4, 4, 3 on all ranks" in text
    assert "window.share" in text
    (text,) = _told([torch.ones(2), torch.ones(3)], weft.local(), 2, use)
    assert "samples per micro-batch: 2, 3 on rank 0" in text and "all ranks" not in text


@pytest.mark.parametrize(
    ("n", "use"),
    [
        (12, _divide),
        (11, lambda window: [window.share / len(window) for _ in window]),
        (11, list),
        (11, tuple),
        (11, lambda window: [x * 2 for x in window]),
    ],
)
def test_a_loop_that_does_not_is_not_told(n, use):
    assert _told(*_split_by(0, 2, n), 3, use) == []


def _with_denominator(ctx):
    def use(window):
        window.denominator(len)
        _divide(window)

    return _told(*weft.shard_data(DataLoader(range(11), batch_size=2), ctx), 3, use)


def test_a_loop_with_a_denominator_is_not_told():
    assert run_ranks(_with_denominator, 2) == [[], []]
