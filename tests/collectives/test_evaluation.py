"""Evaluation: every sample once and in order, means over samples; and torchmetrics, if it is there."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

import weft
from tests.fix_lines.told import told
from tests.variants import variant_cases
from weft.testing import run_ranks


class Pair(NamedTuple):
    a: Any
    b: Any


def _collate(ids):
    return torch.tensor(ids)


def _values(ids):
    """Predictions of a batch: nested, ragged, objects."""
    numbers = ids.tolist()
    return {
        "score": ids.double() * 2,
        "pair": Pair(ids[:, None].repeat(1, 2), [torch.arange(i % 3) for i in numbers]),
        "text": [f"sample {i}" for i in numbers],
        "facts": [{"id": i, "parts": (i, None)} for i in numbers],
        "padded": torch.ones(len(ids), max(numbers, default=0) % 3 + 1),
    }


def _evaluated(ctx, cases):
    found = []
    for n, batch_size, uneven, shuffle, mode in cases:
        options = {"shuffle": shuffle} if n else {}
        loader = DataLoader(list(range(n)), batch_size=batch_size, collate_fn=_collate, **options)
        loader, _ = weft.shard_data(loader, ctx, uneven=uneven, with_ids=True, mode=mode)
        values, rows, per_batch = [], [], 0
        for ids, row in loader:
            values.append(_values(ids))
            rows.append(row)
            per_batch += len(weft.metrics.gather_metrics(ids, ctx, ids=row))
        assert per_batch == n
        if not values:
            continue
        every = weft.metrics.gather_metrics(values, ctx, ids=rows)
        assert every["score"].tolist() == [2.0 * i for i in range(n)] and every["score"].dtype == torch.float64
        assert every["pair"].a.tolist() == [[i, i] for i in range(n)] and isinstance(every["pair"], Pair)
        assert [r.tolist() for r in every["pair"].b] == [list(range(i % 3)) for i in range(n)]
        assert every["text"] == [f"sample {i}" for i in range(n)]
        assert every["facts"] == [{"id": i, "parts": (i, None)} for i in range(n)]
        assert len(every["padded"]) == n
        found.append(n)
    return found


CASES = [
    (n, batch_size, uneven, shuffle, mode)
    for n, batch_size in ((0, 2), (1, 1), (2, 3), (7, 2), (11, 4), (16, 4))
    for uneven in ("empty", "pad")
    for shuffle, mode in ((False, "batches"), (True, "batches"), (True, "dispatch"))
    if n or not shuffle
]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_exactly_the_rows_of_the_dataset_in_its_order(ranks):
    assert len(set(map(str, run_ranks(_evaluated, ranks, CASES)))) == 1


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 4), st.sampled_from(["empty", "pad"]), st.booleans())
def test_rows_of_all_ranks_name_every_sample_once(n, batch_size, world, uneven, shuffle):
    seen = []
    for rank in range(world):
        loader = DataLoader(list(range(n)), batch_size=batch_size, shuffle=shuffle and n > 0)
        loader, _ = weft.shard_data(loader, weft.testing.fake(rank, world), uneven=uneven, with_ids=True)
        for batch, rows in loader:
            assert batch.tolist() == rows.ids.tolist() and len(rows) == len(rows.valid)
            seen += rows.ids[rows.valid].tolist()
    assert sorted(seen) == list(range(n))


def _large(ctx):
    """More than the first message takes; a message that differs between ranks."""
    n = 40 * (ctx.rank + 1)
    rows = weft.metrics.SampleIds(
        ids=torch.arange(n) * ctx.world_size + ctx.rank, valid=torch.ones(n, dtype=torch.bool)
    )
    value = {"logits": rows.ids[:, None].repeat(1, 1000).float(), "ok": rows.ids % 2 == 0}
    every = weft.metrics.gather_metrics(value, ctx, ids=rows)
    expected = sorted(i * ctx.world_size + r for r in range(ctx.world_size) for i in range(40 * (r + 1)))
    assert every["logits"][:, 999].tolist() == expected and every["ok"].tolist() == [i % 2 == 0 for i in expected]


def test_large_values():
    run_ranks(_large, 2)


def _messages(ctx):
    from torch.distributed.tensor.debug import CommDebugMode

    rows = weft.metrics.SampleIds(ids=torch.arange(8), valid=torch.ones(8, dtype=torch.bool))
    with CommDebugMode() as counter:
        weft.metrics.gather_metrics({"a": torch.ones(8), "b": torch.ones(8, 3)}, ctx, ids=rows)
    return counter.get_total_counts()


def test_small_values_travel_in_one_message():
    assert run_ranks(_messages, 2) == [1, 1]


def _of_many_sizes(ctx):
    """Sizes that go up and down, alike or not on the ranks; some in one message, some in several."""
    for number, width in enumerate([1, 3000, 3000, 2, 70_000, 2, 3000, 1]):
        for mine in (4, 4 + ctx.rank, 0 if ctx.rank else 4):
            counts = [mine] if ctx.world_size == 1 else weft.collectives.gather_objects(mine, ctx)
            first = sum(counts[: ctx.rank])
            ids = torch.arange(first, first + mine)
            rows = weft.metrics.SampleIds(ids=ids.flip(0), valid=torch.ones(mine, dtype=torch.bool))
            value = {"x": ids.flip(0).float()[:, None].expand(mine, width), "y": ids.flip(0)}
            found = weft.metrics.gather_metrics(value, ctx, ids=rows)
            expected = torch.arange(sum(counts))
            assert torch.equal(found["y"], expected), number
            assert torch.equal(found["x"], expected.float()[:, None].expand(-1, width)), number


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_values_of_any_size_one_after_the_other(ranks):
    run_ranks(_of_many_sizes, ranks)


def _refused(ctx):
    rows = weft.metrics.SampleIds(ids=torch.arange(2), valid=torch.ones(2, dtype=torch.bool))
    texts = []
    for value in (
        {"a": torch.ones(3)},
        {"a": 3},
        {"a": [object(), object()]} if ctx.rank == 0 else {"a": [1, 2]},
        {"a": torch.ones(2)} if ctx.rank == 0 else {"b": torch.ones(2)},
    ):
        try:
            weft.metrics.gather_metrics(value, ctx, ids=rows)
        except (TypeError, ValueError, weft.errors.ContextError) as error:
            texts.append(str(error))
    return texts


def test_what_cannot_be_gathered_raises_on_all_ranks():
    for texts in run_ranks(_refused, 2):
        assert "a: [3]; 2 rows" in texts[0] and "int 3" in texts[1] and "fix:" in texts[1]
        assert "object" in texts[2] or "rank 0 brought an entry" in texts[2]
        assert "do not agree" in texts[3]


def _means(ctx):
    weight = [3, 0, 5][ctx.rank]
    value = torch.tensor(float("nan") if weight == 0 else weight * 2.0)
    mean = weft.metrics.weighted_mean({"loss": value}, ctx, weight=torch.tensor(weight))["loss"].item()
    count = weft.metrics.denominator(np.array([weight]), ctx)
    line = weft.metrics.denominator(np.float32(weight), ctx, mean_over=1)
    numbers = {"loss": np.float32(value), "one": np.array(1.0), "two": 2}
    also = weft.metrics.weighted_mean(numbers, ctx, weight=np.int64(weight))
    assert (also["loss"].item(), also["one"].item(), also["two"].item()) == (mean, 1.0, 2.0)
    assert weft.metrics.denominator(0, ctx) == 1 / 3  # one process divides by 1: parts of the loss may count then, too
    for bad in ("3", None, 1j):  # on one rank, and all learn of it
        with pytest.raises(ValueError, match="no number"):
            weft.metrics.denominator(1 if ctx.rank else bad, ctx)
    try:
        weft.metrics.weighted_mean(value, ctx, weight=-1 if ctx.rank else 1)
    except ValueError as error:
        return mean, count, line, str(error)


def test_means_over_samples_and_not_over_ranks():
    for mean, count, line, text in run_ranks(_means, 3):
        assert mean == pytest.approx((3 * 6 + 5 * 10) / 8, abs=1e-12) and count == 8 / 3 and line == 8
        assert "negative, not finite" in text and "fix:" in text
    assert weft.metrics.denominator(0, weft.local()) == 1.0
    with pytest.raises(ValueError, match="(?s)found:.*nan.*fix:"):
        weft.metrics.denominator(float("nan"), weft.local())


def _along_the_tensor_axis(ctx):
    loader, ctx = weft.shard_data(DataLoader(list(range(6)), batch_size=2), ctx, uneven="empty", with_ids=True)
    every = [weft.metrics.gather_metrics(batch, ctx, ids=rows).tolist() for batch, rows in loader]
    mean = weft.metrics.weighted_mean(
        torch.tensor(float(ctx.coordinates["data"])), ctx, weight=1 + ctx.coordinates["data"]
    )
    return every, mean.item()


def test_ranks_that_see_the_same_batches_count_once():
    found = run_ranks(_along_the_tensor_axis, 4, mesh={"data": 2, "tensor": 2})
    assert found == [([[0, 1, 2, 3], [4, 5]], pytest.approx(2 / 3))] * 4


def _torchmetrics(ctx):
    import torchmetrics.classification as tm

    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(23, 3, generator=generator), torch.randint(0, 3, (23,), generator=generator)
    data = torch.utils.data.TensorDataset(logits, labels)
    loader, ctx = weft.shard_data(DataLoader(data, batch_size=4), ctx, uneven="pad", with_ids=True)
    summed = tm.MulticlassAccuracy(3, average="micro", process_group=ctx.group)
    values, rows = [], []
    for (x, y), row in loader:
        summed.update(x[row.valid], y[row.valid])
        values.append((x, y))
        rows.append(row)
    every = weft.metrics.gather_metrics(values, ctx, ids=rows)
    gathered = tm.MulticlassAUROC(3, sync_on_compute=False)(*every)
    expected = tm.MulticlassAccuracy(3, average="micro", sync_on_compute=False)(logits, labels)
    assert torch.equal(summed.compute(), expected)
    assert torch.equal(gathered, tm.MulticlassAUROC(3, sync_on_compute=False)(logits, labels))


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_torchmetrics_counts_every_sample_once(ranks):
    pytest.importorskip("torchmetrics")
    run_ranks(_torchmetrics, ranks)


# -- memory ------------------------------------------------------------------------------------------

DTYPES = [getattr(torch, name) for name in (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
    "complex128", "float8_e4m3fn", "float8_e5m2",
)]  # fmt: skip


def _every_dtype(ctx, count):
    ids = torch.arange(count) * ctx.world_size + ctx.rank
    rows = weft.metrics.SampleIds(ids=ids, valid=torch.ones(count, dtype=torch.bool))
    values = {str(dtype): torch.arange(3 * count).view(count, 3).remainder(2).to(dtype) for dtype in DTYPES}
    values["bytes"] = torch.arange(count, dtype=torch.uint8) + 100 * ctx.rank
    return {
        name: each.view(torch.uint8).tolist()
        for name, each in weft.metrics.gather_metrics(values, ctx, ids=rows).items()
    }


@pytest.mark.parametrize(
    ("n", "count"), [*((3, 0), (2, 1), (3, 5), (2, 2000)), *variant_cases((2, 0), (3, 1), (2, 5), (3, 2000))]
)
def test_every_dtype_comes_back_bit_for_bit(n, count):
    for found in run_ranks(_every_dtype, n, count):
        for dtype in DTYPES:
            mine = torch.arange(3 * count).view(count, 3).remainder(2).to(dtype).view(torch.uint8)
            assert found[str(dtype)] == mine.repeat_interleave(n, 0).tolist()
        assert found["bytes"] == [(i + 100 * rank) % 256 for i in range(count) for rank in range(n)]


def _again_and_again(ctx):
    found = []
    for step in range(4):
        # Of another shape now and then, so that what is kept of the last message does not fit.
        count = 3 if step == 2 and ctx.rank == 1 else 5
        ids = torch.arange(count) + 5 * ctx.rank
        rows = weft.metrics.SampleIds(ids=ids, valid=torch.ones(count, dtype=torch.bool))
        values = torch.arange(10.0).view(5, 2)[:count].t().contiguous().t() + 100 * step + 10 * ctx.rank
        values.requires_grad_(requires_grad=True)
        found.append((weft.metrics.gather_metrics((values, values[:, 0]), ctx, ids=rows), values))
    for step, ((pairs, firsts), values) in enumerate(found):
        assert not pairs.requires_grad and pairs.data_ptr() != values.data_ptr()
        second = 3 if step == 2 else 5
        expected = [[2 * i + 100 * step, 2 * i + 1 + 100 * step] for i in range(5)]
        expected += [[2 * i + 100 * step + 10, 2 * i + 11 + 100 * step] for i in range(second)]
        if ctx.world_size == 1:
            expected = expected[:5]
        assert pairs.tolist() == expected and firsts.tolist() == [row[0] for row in expected]


@pytest.mark.parametrize("n", [1, 2])
def test_what_was_gathered_stays_when_more_is(n):
    run_ranks(_again_and_again, n)


def test_on_one_rank_the_result_is_a_copy():
    values = torch.ones(3)
    rows = weft.metrics.SampleIds(ids=torch.arange(3), valid=torch.ones(3, dtype=torch.bool))
    weft.metrics.gather_metrics({"x": values}, weft.local(), ids=rows)["x"][0] = 7
    assert values.tolist() == [1, 1, 1]


class _Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize(
    "make", [lambda a, b: (a, b), _Pair, lambda a, b: {"a": a, 2: b}, lambda a, b: (a, {"b": (b,)})]
)
def test_the_structure_comes_back(make):
    a, b = torch.arange(2), torch.arange(4.0).view(2, 2)
    rows = weft.metrics.SampleIds(ids=torch.tensor([1, 0]), valid=torch.ones(2, dtype=torch.bool))
    found, expected = weft.metrics.gather_metrics(make(a, b), weft.local(), ids=rows), make(a.flip(0), b.flip(0))
    assert type(found) is type(expected) and repr(found) == repr(expected)


def _no_batches(ctx):
    nothing = weft.metrics.gather_metrics([], ctx, ids=[])
    if ctx.world_size > 1:
        some = [
            (
                torch.ones(1),
                weft.metrics.SampleIds(ids=torch.zeros(1, dtype=torch.int64), valid=torch.ones(1, dtype=torch.bool)),
            )
        ]
        mine = some if ctx.rank else []
        with pytest.raises(weft.errors.ContextError, match="no batches"):
            weft.metrics.gather_metrics([value for value, _ in mine], ctx, ids=[rows for _, rows in mine])
    return nothing


@pytest.mark.parametrize("n", [1, 2])
def test_of_no_batches_there_are_no_rows(n):
    assert run_ranks(_no_batches, n) == [[]] * n


def _sums_of_parts(ctx):
    """Of two samples, each rank has a part: 1 and 2 on the first, 10 and 20 on the second."""
    _, ctx = weft.context_parallel(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), ctx)
    ids = weft.metrics.SampleIds(ids=torch.tensor([1, 0]), valid=torch.tensor([True, True]))
    values = torch.tensor([1.0, 2.0]) * 10**ctx.rank
    with told("metrics.py", "a value is that of a part of a sample") as it:
        weft.metrics.gather_metrics(values, ctx, ids=ids)
    values = it.run(values=values, ctx=ctx)["values"]
    return weft.metrics.gather_metrics(values, ctx, ids=ids).tolist()


def test_values_of_parts_of_a_sample_are_put_together_first():
    assert run_ranks(_sums_of_parts, 2, mesh={"context": 2}) == [[22.0, 11.0]] * 2


def _samples_of_one_batch(ctx):
    ids = weft.metrics.SampleIds(ids=torch.tensor([1, 0]), valid=torch.tensor([True, True]))
    return weft.metrics.gather_metrics(torch.tensor([1.0, 2.0]), ctx, ids=ids).tolist()


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "context"])
def test_ranks_that_see_the_same_batch_count_once(axis):
    assert run_ranks(_samples_of_one_batch, 2, mesh={axis: 2}) == [[2.0, 1.0]] * 2
