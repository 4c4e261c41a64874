"""Collectives over nested values: values, structures, uneven shapes, and what is refused."""

import contextlib
import dataclasses
import itertools
import os
import pathlib
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import weft
from weft.collectives import entry
from weft.testing import run_ranks


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Box:
    inside: torch.Tensor
    label: int = 0


def _reduce(ctx):
    r = ctx.rank
    value = {
        "float": torch.tensor([1.0, 2.0]) + r,
        "int": torch.tensor(r + 1),
        "pair": Pair(torch.full((2, 2), r, dtype=torch.float64), [torch.tensor(r, dtype=torch.uint8)]),
        "bool": torch.tensor(r == 1),
        "odd": torch.arange(6.0).view(2, 3).t()[:, ::1] * r,
        "half": torch.tensor([0.5], dtype=torch.bfloat16),
        "none": torch.empty(0, 3),
    }
    return {op: weft.reduce(value, ctx, op) for op in ("sum", "mean", "max", "min")}


@pytest.mark.parametrize("n", [1, 2, 4])
def test_reduce(n):
    ranks = torch.arange(n, dtype=torch.float64)
    for found in run_ranks(_reduce, n):
        assert found["sum"]["float"].tolist() == [n + ranks.sum(), 2 * n + ranks.sum()]
        assert found["sum"]["int"].item() == n * (n + 1) // 2 and found["sum"]["int"].dtype == torch.int64
        assert found["mean"]["int"].item() == (n + 1) / 2 and found["mean"]["int"].dtype == torch.float64
        assert found["mean"]["pair"].right[0].item() == (n - 1) / 2
        assert found["max"]["pair"].left.tolist() == [[n - 1] * 2] * 2 and isinstance(found["max"]["pair"], Pair)
        assert found["max"]["bool"].item() is (n > 1) and found["min"]["bool"].item() is False
        assert found["sum"]["bool"].item() == int(n > 1)
        assert found["sum"]["odd"].shape == (3, 2) and found["sum"]["half"].dtype == torch.bfloat16
        assert found["sum"]["half"].item() == 0.5 * n and found["sum"]["none"].shape == (0, 3)


def _gather(ctx):
    r = ctx.rank
    value = {
        "rows": torch.full((r + 1, 2), float(r)),
        "scalar": torch.tensor(r),
        "flags": torch.tensor([r == 0]),
        "some": torch.ones(r % 2, 3, dtype=torch.int16),
        "half": torch.full((1,), r, dtype=torch.bfloat16),
        "column": torch.arange(4.0).view(2, 2)[:, r % 2 : r % 2 + 1],
        "box": Box(torch.tensor([r], dtype=torch.complex64)),
    }
    value["box"] = {"inside": value["box"].inside}
    return weft.gather(value, ctx)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_gather_joins_uneven_rows(n):
    for found in run_ranks(_gather, n):
        assert found["rows"][:, 0].tolist() == [float(r) for r in range(n) for _ in range(r + 1)]
        assert found["scalar"].tolist() == list(range(n)) and found["scalar"].dtype == torch.int64
        assert found["flags"].tolist() == [r == 0 for r in range(n)]
        assert found["some"].shape == (n // 2, 3) and found["some"].dtype == torch.int16
        assert found["half"].tolist() == list(range(n))
        assert found["column"].shape == (2 * n, 1)
        assert found["box"]["inside"].tolist() == [complex(r) for r in range(n)]


def _gather_shapes(ctx, shapes):
    shape = shapes[ctx.rank]
    value = torch.arange(float(torch.Size(shape).numel())).view(shape) + 100 * ctx.rank
    return weft.gather(value, ctx)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=2), st.integers(0, 3))
def test_gather_any_number_of_rows(rows, width):
    shapes = [(r, width) for r in rows]
    expected = torch.cat([torch.arange(float(r * width)).view(r, width) + 100 * i for i, r in enumerate(rows)])
    for found in run_ranks(_gather_shapes, 2, shapes):
        assert torch.equal(found, expected)


def _gather_many(ctx):
    value = [torch.full((ctx.rank + 1, 2, 1), i) for i in range(40)]  # more shapes than one header holds
    return [t.shape[0] for t in weft.gather(value, ctx)], weft.gather(value, ctx)[7].unique().tolist()


def test_gather_of_many_tensors():
    assert run_ranks(_gather_many, 2) == [([3] * 40, [7])] * 2


def _gather_wrong(ctx, kind):
    value = {
        "inner": torch.ones(2, 3 + ctx.rank),
        "dtype": torch.ones(2, dtype=torch.float32 if ctx.rank else torch.float64),
        "structure": {"a": torch.ones(1)} if ctx.rank else [torch.ones(1)],
    }[kind]
    try:
        weft.gather(value, ctx)
    except weft.ContextError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("inner", r"(2, 3) on rank 0, (2, 4) on rank 1"),
        ("dtype", "torch.float64, 1-d' on rank 0"),
        ("structure", "a: torch.float32, 1-d' on rank 1"),
    ],
)
def test_gather_of_values_that_do_not_fit(kind, text):
    for found in run_ranks(_gather_wrong, 2, kind):
        assert text in found and "fix:" in found


@pytest.mark.parametrize("call", [weft.reduce, weft.gather, weft.pad_across])
def test_a_leaf_that_is_no_tensor(call):
    with pytest.raises(TypeError, match="(?s)a.1 is not a tensor.*found:    str 'x'.*fix:"):
        call({"a": [torch.ones(1), "x"]}, weft.local())


def test_unknown_op():
    with pytest.raises(ValueError, match="(?s)found:    'median'.*fix:"):
        weft.reduce(torch.ones(1), weft.local(), "median")


def _pad(ctx):
    r = ctx.rank
    x = torch.ones(r + 1, 2 - r)
    rows = weft.pad_across(x, ctx, dim=0)
    front = weft.pad_across(x, ctx, dim=-1, fill=9, side="start")
    return rows.tolist(), front.tolist(), weft.pad_across(x, ctx, dim=5) is x


def test_pad_across():
    zero, one = run_ranks(_pad, 2)
    assert zero == ([[1, 1], [0, 0]], [[1, 1]], True)
    assert one == ([[1], [1]], [[9, 1], [9, 1]], True)


def test_pad_across_refuses_nested_tensors():
    with pytest.warns(UserWarning, match="nested"):
        nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    with pytest.raises(TypeError, match="(?s)nested.*fix:"):
        weft.pad_across(nested, weft.local())


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.tuples(inner)
    ),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None)
@given(VALUES)
def test_any_plain_value_travels(value):
    assert run_ranks(_broadcast_value, 2, value) == [value, value]


def _broadcast_value(ctx, value):
    assert weft.gather_objects([ctx.rank, value], ctx) == [[r, value] for r in range(ctx.world_size)]
    return weft.broadcast(value if ctx.rank == 1 else None, ctx, source=1)


def _broadcast_tensors(ctx):
    value = None
    if ctx.rank == 0:
        value = {
            "a": torch.empty(0, 3),
            "b": (torch.arange(6).view(2, 3).t(), torch.tensor(True)),
            "c": torch.ones((), dtype=torch.bfloat16),
        }
    found = weft.broadcast(value, ctx)
    return found["a"].shape, found["b"][0].tolist(), found["b"][1].item(), found["c"].dtype


def test_tensors_of_unknown_shape_travel():
    assert run_ranks(_broadcast_tensors, 3) == [((0, 3), [[0, 3], [1, 4], [2, 5]], True, torch.bfloat16)] * 3


def _send_strange(ctx, call):
    try:
        call(object() if ctx.rank == 1 else 1, ctx)
    except TypeError as error:
        return str(error)
    return "nothing raised"


def _broadcast_from_one(value, ctx):
    return weft.broadcast(value, ctx, source=1)


@pytest.mark.parametrize("call", [_broadcast_from_one, weft.gather_objects])
def test_a_strange_value_raises_on_all_ranks(call):
    zero, one = run_ranks(_send_strange, 2, call)
    assert "found:    object" in one and "fix:" in one and "rank 1 brought a value that cannot be sent" in zero


def test_broadcast_from_nowhere():
    with pytest.raises(ValueError, match="(?s)source = 3.*fix:"):
        weft.broadcast(1, weft.local(), source=3)


def _flag(ctx):
    return [weft.any_rank(step == ctx.rank, ctx) for step in range(3)]


def test_a_flag_of_any_rank_is_seen_by_all_once():
    assert run_ranks(_flag, 2) == [[True, True, False]] * 2


def _once(ctx):
    weft.print_once("loss", 0.5, ctx=ctx)
    ctx.print("as", "a", "method", sep="-", end="!\n")
    on_last = weft.on_rank(_name, ctx, "last")
    return on_last(ctx.rank), on_last.__name__


def _name(rank):
    """Doc."""
    return f"rank {rank}"


def test_print_and_work_on_one_rank(capsys):
    assert run_ranks(_once, 2) == [(None, "_name"), ("rank 1", "_name")]
    assert capsys.readouterr().out == "[rank 0] loss 0.5\n[rank 0] as-a-method!\n"


def _no_tensors_moved(ctx):
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as counter:
        weft.reduce([torch.ones(2), torch.ones(3), torch.ones(1)], ctx)
        one = counter.get_total_counts()
        weft.barrier(ctx)
        with weft.together(ctx), weft.main_first(ctx):
            pass
    return one, counter.get_total_counts()


def test_one_message_for_many_tensors_and_none_for_meetings():
    assert run_ranks(_no_tensors_moved, 2) == [(1, 1)] * 2


def _debug(ctx, kind):
    try:
        if kind == "op":
            weft.reduce(torch.ones(1), ctx, "sum") if ctx.rank else weft.gather(torch.ones(1), ctx)
        else:
            weft.reduce({"x": torch.ones(2 + ctx.rank)}, ctx)
    except weft.ContextError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize(
    ("kind", "text"),
    [("op", "call: 'gather' on rank 0 at "), ("shape", "'x: [2] torch.float32' on rank 0 at ")],
)
def test_debug_compares_before_communicating(kind, text):
    for found in run_ranks(_debug, 2, kind, debug=True):
        assert text in found and "test_collectives.py:" in found and "on rank 1" in found


def _debug_fine(ctx):
    value = weft.reduce(torch.ones(2), ctx, "sum")
    return value.tolist(), weft.gather(torch.ones(ctx.rank, 1), ctx).shape[0]


def test_debug_changes_no_result():
    assert run_ranks(_debug_fine, 2, debug=True) == [([2, 2], 1)] * 2


def _messages(ctx):
    before = ctx.world.meetings
    weft.reduce(torch.ones(1), ctx)
    return ctx.world.meetings - before


def test_no_meetings_without_debug():
    assert run_ranks(_messages, 2) == [0, 0]


# -- meetings ----------------------------------------------------------------------------------------


def _together(ctx, inside):
    try:
        with weft.together(ctx, "reading the data"):
            if ctx.rank == 1:
                raise FileNotFoundError("no such shard: 7")
            if inside:
                weft.reduce(torch.ones(1), ctx)
    except weft.PeerError as error:
        return "peer", error.rank, str(error)
    except FileNotFoundError as error:
        return "own", 1, str(error)
    return None


@pytest.mark.parametrize("inside", [False, True])
def test_together_fails_on_all_ranks(inside):
    found = run_ranks(_together, 3, inside)
    assert found[1] == ("own", 1, "no such shard: 7")
    for kind, rank, text in (found[0], found[2]):
        assert (kind, rank) == ("peer", 1) and "FileNotFoundError: no such shard: 7" in text


class Slow:
    """A collective that is not done in some slices of the wait, and maybe right after the last of them."""

    def __init__(self, slices, done_after):
        self.slices, self.done_after = slices, done_after

    def wait(self, limit=None):
        if limit is not None and self.slices > 0:
            self.slices -= 1
            raise RuntimeError("Operation timed out!")

    def is_completed(self):
        return self.slices == 0 and self.done_after


@pytest.mark.parametrize(("slices", "blamed_at", "raises"), [
    (1, (), False), (3, (1,), False), (3, (1, 3), False), (4, (2, 3), True),
])  # fmt: skip
def test_a_peer_is_blamed_only_while_the_collective_is_not_done(monkeypatch, slices, blamed_at, raises):
    looks = itertools.count(1)
    monkeypatch.setattr(entry.dist, "get_backend", lambda _: "gloo")
    monkeypatch.setattr(entry, "absent", lambda _: None)
    monkeypatch.setattr(entry, "culprit", lambda _: (1, "left") if next(looks) in blamed_at else None)
    world = weft.local().world
    with pytest.raises(weft.PeerError, match="rank 1 failed: left") if raises else contextlib.nullcontext():
        entry.finish(Slow(slices, done_after=slices == 1), world)
    assert world.abandoned == raises


def test_a_world_with_an_abandoned_collective_is_not_used_again():
    first = run_ranks(_process, 3)
    run_ranks(_together, 3, False)
    assert run_ranks(_process, 3) == first
    run_ranks(_together, 3, True)
    assert not set(run_ranks(_process, 3)) & set(first)


def _process(ctx):
    return os.getpid()


def _together_again(ctx):
    results = []
    for guilty in (0, 1, None):
        try:
            with weft.together(ctx):
                if ctx.rank == guilty:
                    raise ValueError(f"step {guilty}")
            results.append("fine")
        except (weft.PeerError, ValueError) as error:
            results.append(type(error).__name__)
    return results


def test_together_can_be_used_again_after_a_failure():
    assert run_ranks(_together_again, 2) == [["ValueError", "PeerError", "fine"], ["PeerError", "ValueError", "fine"]]


def _first(ctx, path):
    with weft.main_first(ctx), pathlib.Path(path).open("a") as file:
        file.write(f"{ctx.rank}\n")
    weft.barrier(ctx)
    return pathlib.Path(path).open().read().split()


def test_main_comes_first(tmp_path):
    found = run_ranks(_first, 3, str(tmp_path / "order"))[0]
    assert found[0] == "0" and sorted(found) == ["0", "1", "2"]


def _first_fails(ctx):
    try:
        with weft.main_first(ctx):
            if ctx.is_main:
                raise OSError("disk full")
    except weft.PeerError as error:
        return error.rank, error.text
    except OSError as error:
        return "own", str(error)
    return None


def test_main_fails_and_releases_the_others():
    assert run_ranks(_first_fails, 2) == [("own", "disk full"), (0, "OSError: disk full")]


def _first_takes_long(ctx):
    import dataclasses
    import time

    impatient = dataclasses.replace(ctx, world=ctx.world)
    impatient.world.timeout_s = 1.0
    begin = time.monotonic()
    with weft.main_first(impatient):
        if ctx.is_main:
            time.sleep(2.5)
    impatient.world.timeout_s = 60.0
    return time.monotonic() - begin


def test_main_may_take_longer_than_the_timeout():
    assert all(seconds > 2.4 for seconds in run_ranks(_first_takes_long, 2))
