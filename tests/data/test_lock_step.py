"""Evaluation as people write it: equal to one process on any number of ranks, also where some have no sample left."""

import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import weft
from weft.errors import PeerError
from weft.testing import RanksFailed, run_ranks

F64 = torch.float64
X = torch.randn(70, 4, dtype=F64, generator=torch.Generator().manual_seed(1))
Y = torch.arange(70) % 3


def _ratio(total, count, ctx):
    sums = weft.reduce(torch.tensor([float(total), float(count)], dtype=F64), ctx)
    return (sums[0] / sums[1]).item()


def _mean_times_rows(model, loader, ctx):
    total, count = 0.0, 0
    for x, y in loader:
        total += cross_entropy(model(x), y).item() * len(y)
        count += len(y)
    return _ratio(total, count, ctx)


@torch.no_grad()
def _correct(model, loader, ctx):
    model.eval()
    right = count = 0
    for x, y in loader:
        right += (model(x).argmax(1) == y).sum()
        count += y.numel()
    return _ratio(right, count, ctx)


@torch.inference_mode()
def _lists_of_losses(model, loader, ctx):
    losses, sizes = [], []
    for x, y in loader:
        losses.append(cross_entropy(model(x), y).item())
        sizes.append(len(y))
    every = weft.collectives.gather_objects(list(zip(losses, sizes, strict=True)), ctx)
    pairs = list(itertools.chain.from_iterable(every))
    return sum(loss * size for loss, size in pairs) / sum(size for _, size in pairs)


def _mean_of_means(model, loader, ctx):
    total, count = torch.zeros((), dtype=F64), 0
    with torch.no_grad():
        for x, y in loader:
            total += cross_entropy(model(x), y) * len(y)
            count += len(y)
    return weft.metrics.weighted_mean(total / max(count, 1), ctx, weight=count).item()


def _predictions(model, loader, ctx):
    found = []
    for x, y in loader:
        with torch.no_grad():
            found += [(a == b).item() for a, b in zip(model(x).argmax(1), y, strict=True)]
    every = list(itertools.chain.from_iterable(weft.collectives.gather_objects(found, ctx)))
    return sum(every) / len(every)


@torch.no_grad()
def _sums_of_each_step(model, loader, ctx):
    total = count = 0.0
    for x, y in loader:
        here = torch.stack([cross_entropy(model(x), y, reduction="sum"), torch.tensor(float(len(y)), dtype=F64)])
        sums = weft.reduce(here, ctx)
        total, count = total + sums[0].item(), count + sums[1].item()
    return total / count


def _skips_empty_batches(model, loader, ctx):
    total, count = 0.0, 0
    for x, y in loader:
        if len(y) == 0:
            continue
        total += cross_entropy(model(x), y).item() * len(y)
        count += len(y)
    return _ratio(total, count, ctx)


LOOPS = [_mean_times_rows, _correct, _lists_of_losses, _mean_of_means, _predictions, _sums_of_each_step]
LOOPS += [_skips_empty_batches]


def _evaluations(ctx, sizes, batch_sizes, strategies):
    found = {}
    for strategy in strategies:
        torch.manual_seed(0)
        model, new = nn.Linear(4, 3, dtype=F64), ctx
        if strategy is not None:
            model, new = strategy(model, ctx)
        for n, batch_size, loop in itertools.product(sizes, batch_sizes, LOOPS):
            data = DataLoader(TensorDataset(X[:n], Y[:n]), batch_size)
            loader, _ = weft.shard_data(data, ctx, uneven="empty")
            model.train()
            name = getattr(strategy, "__name__", "none")
            found[name, n, batch_size, loop.__name__] = loop(model, loader, new)
            assert loader.epoch == 1 and loader.state_dict()["samples"] == 0  # as after a full epoch, on every rank
    return found


def _compare(ranks, sizes, batch_sizes, timeout_s=300):
    one = run_ranks(_evaluations, 1, sizes, batch_sizes, [None], timeout_s=timeout_s)[0]
    for found in run_ranks(_evaluations, ranks, sizes, batch_sizes, [None, weft.replicate], timeout_s=timeout_s):
        assert len(found) == 2 * len(one)
        wrong = {
            key: value
            for key, value in found.items()
            if not abs(value - one["none", *key[1:]]) < 1e-12  # also NaN
        }
        assert not wrong


def test_evaluation_is_that_of_one_process():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _compare(3, [1, 7], [2])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 3])
def test_evaluation_of_any_size_is_that_of_one_process(ranks):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _compare(ranks, [1, 2, 3, 5, 7, 11, 16, 17, 48], [1, 3, 16], timeout_s=300)


# -- what decides ----------------------------------------------------------------------------------------


class _Stream(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        yield from ((X[i], Y[i]) for i in range(self.n))


def _rows(loader, body=lambda batch: None):
    seen = []
    for batch in loader:
        seen.append(len(batch[1]))
        body(batch)
    return seen


def _who_goes_along(ctx):
    def sharded(n=5, data=None, **options):
        data = TensorDataset(X[:n], Y[:n]) if data is None else data
        return weft.shard_data(DataLoader(data, 1), ctx, uneven="empty", **options)[0]

    found = {
        "nothing": _rows(sharded()),
        "stream": _rows(sharded(data=_Stream(5))),
        "dispatch": _rows(sharded(mode="dispatch")),
    }
    found["reduce"] = _rows(sharded(), lambda batch: weft.reduce(batch[0].sum(), ctx))
    found["meeting"] = _rows(sharded(n=1), lambda batch: ctx.agree("a meeting", {}))
    late = itertools.count()
    found["late"] = _rows(sharded(), lambda batch: next(late) and weft.reduce(batch[0].sum(), ctx))
    loader = sharded()
    found["share"] = [_rows(loader, lambda batch: loader.share) for _ in range(2)]
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad, sgd = torch.zeros(1), torch.optim.SGD([parameter], 0.1)
    found["steps"] = _rows(sharded(n=1), lambda batch: sgd.step())  # a strategy may reduce every tenth of them
    found["ids"] = [[len(rows) for _, rows in sharded(n=n, with_ids=True)] for n in (1, 5)]
    loader = sharded()
    found["left"] = [len(y) for _, y in itertools.islice(loader, len(loader))]
    loader = sharded()
    if ctx.is_main:
        next(iter(loader))  # a look at a batch, on one rank
    found["looked at"] = _rows(loader)
    sub = ctx.subset([0, 1])
    found["others' collectives"] = _rows(sharded(), lambda batch: ctx.rank < 2 and weft.reduce(batch[0].sum(), sub))
    return found


def test_a_rank_without_samples_goes_along_where_the_others_wait_for_it():
    first, _, last = run_ranks(_who_goes_along, 3)
    assert {name: rows for name, rows in first.items() if rows != [1, 1]} == {
        "share": [[1, 1]] * 2, "ids": [[1], [1, 1]], "meeting": [1], "steps": [1],
    }  # fmt: skip
    assert last.pop("looked at") in ([1], [1, 0])  # without a hang
    assert last == {
        "nothing": [1], "stream": [1], "dispatch": [1], "reduce": [1, 0], "meeting": [0], "late": [1, 0],
        "share": [[1, 0]] * 2, "steps": [0], "ids": [[0], [1]], "left": [1], "others' collectives": [1, 0],
    }  # fmt: skip


def _joined(ctx):
    part = TensorDataset(X[: 5 - 2 * ctx.rank], Y[: 5 - 2 * ctx.rank])
    options = {"already_sharded": True, "uneven": "join"}
    alone = _rows(weft.shard_data(DataLoader(part, 1), ctx, **options)[0])
    body = lambda batch: weft.reduce(batch[0].sum(), ctx)  # noqa: E731
    return alone, _rows(weft.shard_data(DataLoader(part, 1), ctx, **options)[0], body)


def test_data_that_was_split_already():
    assert run_ranks(_joined, 2) == [([1] * 5, [1] * 5), ([1] * 3, [1] * 3 + [0] * 2)]


def _along_model_axes(ctx):
    loader, _ = weft.shard_data(DataLoader(TensorDataset(X[:1], Y[:1]), 1), ctx, uneven="empty")
    tensor = ctx.on("tensor")
    return _rows(loader, lambda batch: weft.reduce(batch[0].sum(), tensor)), ctx.data_rank


def test_collectives_of_ranks_that_share_batches_need_no_others():
    assert run_ranks(_along_model_axes, 4, mesh={"data": 2, "tensor": 2}) == [([1], 0)] * 2 + [([], 1)] * 2


def _without_the_leader(ctx, fails):
    loader, _ = weft.shard_data(DataLoader(TensorDataset(X[:1], Y[:1]), 1), ctx, uneven="empty")
    if ctx.rank == 0:
        return 1 // 0 if fails else []
    return _rows(loader)


def test_a_rank_that_fails_is_named_and_one_that_left_is_not_waited_for():
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_without_the_leader, 2, True)
    assert isinstance(failed.value.errors[1], PeerError) and "ZeroDivisionError" in str(failed.value.errors[1])
    assert run_ranks(_without_the_leader, 2, False) == [[], []]


# -- where the model makes collectives -------------------------------------------------------------------


def _sharded_model(ctx, form):
    torch.manual_seed(0)
    model, new = weft.fully_shard(nn.Linear(4, 3, dtype=F64), ctx)
    data = DataLoader(TensorDataset(X[:5], Y[:5]), 1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if form == "naive":
            mean = _mean_times_rows(model, weft.shard_data(data, ctx, uneven="empty")[0], new)
        else:
            loader, _ = weft.shard_data(data, ctx, uneven="pad", with_ids=True)
            total = count = 0.0
            for (x, y), ids in loader:
                total += cross_entropy(model(x), y, reduction="none")[ids.valid].sum().item()
                count += ids.valid.sum().item()
            mean = _ratio(total, count, new)
    return mean, [str(each.message) for each in said if "without rows" in str(each.message)]


def test_a_sharded_model_needs_rows_that_do_not_count_and_a_warning_says_so():
    torch.manual_seed(0)
    expected = cross_entropy(nn.Linear(4, 3, dtype=F64)(X[:5]), Y[:5]).item()
    told = [said for _, said in run_ranks(_sharded_model, 4, "naive")]
    assert [len(said) for said in told] == [0, 1, 1, 1]
    assert all('uneven="pad", with_ids=True' in text for said in told for text in said)
    assert run_ranks(_sharded_model, 4, "as the fix says") == [(pytest.approx(expected, abs=1e-12), [])] * 4
