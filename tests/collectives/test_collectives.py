"""Collectives over nested values: values, structures, uneven shapes, and what is refused."""

import collections
import contextlib
import dataclasses
import datetime as dt
import enum
import itertools
import json
import os
import pathlib
import sys
import threading
import time
import zoneinfo
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import weft
from weft.collectives import encoding
from weft.collectives import primitives as entry
from weft.testing import run_ranks

pytestmark = pytest.mark.usefixtures("warm_ranks")


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


@settings(max_examples=20, deadline=None)
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
    except weft.errors.ContextError as error:
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


@pytest.mark.parametrize("call", [weft.reduce, weft.gather, weft.collectives.pad_across])
def test_a_leaf_that_is_no_tensor(call):
    with pytest.raises(TypeError, match="(?s)a.1 is not a tensor.*found:    str 'x'.*fix:"):
        call({"a": [torch.ones(1), "x"]}, weft.local())


def test_unknown_op():
    with pytest.raises(ValueError, match="(?s)found:    'median'.*fix:"):
        weft.reduce(torch.ones(1), weft.local(), "median")


def _pad(ctx):
    r = ctx.rank
    x = torch.ones(r + 1, 2 - r)
    rows = weft.collectives.pad_across(x, ctx, dim=0)
    front = weft.collectives.pad_across(x, ctx, dim=-1, fill=9, side="start")
    return rows.tolist(), front.tolist(), weft.collectives.pad_across(x, ctx, dim=5) is x


def test_pad_across():
    zero, one = run_ranks(_pad, 2)
    assert zero == ([[1, 1], [0, 0]], [[1, 1]], True)
    assert one == ([[1], [1]], [[9, 1], [9, 1]], True)


def test_pad_across_refuses_nested_tensors():
    with pytest.warns(UserWarning, match="nested"):
        nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    with pytest.raises(TypeError, match="(?s)nested.*fix:"):
        weft.collectives.pad_across(nested, weft.local())


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


@settings(max_examples=20, deadline=None)
@given(VALUES)
def test_any_plain_value_travels(value):
    assert run_ranks(_broadcast_value, 2, value) == [value, value]


def _broadcast_value(ctx, value):
    assert weft.collectives.gather_objects([ctx.rank, value], ctx) == [[r, value] for r in range(ctx.world_size)]
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


@pytest.mark.parametrize("call", [_broadcast_from_one, weft.collectives.gather_objects])
def test_a_strange_value_raises_on_all_ranks(call):
    zero, one = run_ranks(_send_strange, 2, call)
    assert "found:    object" in one and "fix:" in one and "rank 1 brought a value that cannot be sent" in zero


def test_broadcast_from_nowhere():
    with pytest.raises(ValueError, match="(?s)source = 3.*fix:"):
        weft.broadcast(1, weft.local(), source=3)


def _flag(ctx):
    return [weft.collectives.any_rank(step == ctx.rank, ctx) for step in range(3)]


def test_a_flag_of_any_rank_is_seen_by_all_once():
    assert run_ranks(_flag, 2) == [[True, True, False]] * 2


def _once(ctx):
    ctx.print("loss", 0.5)
    ctx.print("as", "a", "method", sep="-", end="!\n", flush=True)
    on_last = weft.collectives.on_rank(_name, ctx, "last")
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
        with weft.collectives.all_or_none(ctx), weft.main_first(ctx):
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
    except weft.errors.ContextError as error:
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
    for _ in range(3):
        weft.reduce(torch.ones(1), ctx)
    return ctx.world.meetings - before


def test_shapes_meet_once_without_debug():
    assert run_ranks(_messages, 2) == [1, 1]


def _unequal(ctx, kind):
    one, other = {
        "dtype of one size": (torch.tensor(0), torch.tensor(1.5, dtype=torch.float64)),
        "dtype": (torch.tensor(0), torch.tensor(1.5)),
        "shape": (torch.ones(2), torch.ones(3)),
        "structure": ({"a": torch.ones(2)}, {"b": torch.ones(2)}),
    }[kind]
    with pytest.raises(weft.errors.ContextError, match="the ranks do not agree") as caught:
        weft.reduce(other if ctx.rank else one, ctx)
    assert weft.reduce(torch.ones(1), ctx).item() == ctx.world_size  # nothing is on its way
    return str(caught.value)


@pytest.mark.parametrize("kind", ["dtype of one size", "dtype", "shape", "structure"])
def test_unequal_values_are_refused_before_they_are_sent(kind):
    for found in run_ranks(_unequal, 2, kind):
        assert "on rank 0 at " in found and "on rank 1 at " in found and "test_collectives.py" in found


_OTHER_ARGUMENTS = {
    "broadcast": lambda value, ctx: weft.broadcast(value, ctx, source=ctx.rank),
    "scatter": lambda value, ctx: weft.collectives.scatter([value] * 2, ctx, source=ctx.rank),
    "reduce": lambda value, ctx: weft.reduce(value, ctx, ("sum", "mean")[ctx.rank]),
    "reduce with a gradient": lambda value, ctx: weft.reduce(value.requires_grad_(bool(ctx.rank)), ctx, grad=True),
    "reduce_scatter": lambda value, ctx: weft.collectives.reduce_scatter(value, ctx, ("sum", "mean")[ctx.rank]),
    "pad_across, dim": lambda value, ctx: weft.collectives.pad_across(value, ctx, dim=ctx.rank),
    "pad_across, fill": lambda value, ctx: weft.collectives.pad_across(value, ctx, fill=ctx.rank),
    "pad_across, side": lambda value, ctx: weft.collectives.pad_across(value, ctx, side=("start", "end")[ctx.rank]),
}


def _other_arguments(ctx, call):
    with pytest.raises(weft.errors.ContextError, match="the ranks do not agree"):
        _OTHER_ARGUMENTS[call](torch.ones(1 + ctx.rank if "pad" in call else 2, 3), ctx)
    return weft.reduce(torch.ones(1), ctx).item()  # nothing is on its way


@pytest.mark.parametrize("call", _OTHER_ARGUMENTS)
def test_other_arguments_on_one_rank_are_refused(call):
    assert run_ranks(_other_arguments, 2, call) == [2, 2]


def _new_on_one_rank(ctx):
    weft.reduce(torch.tensor(0), ctx)
    weft.reduce(torch.tensor(1.5, dtype=torch.float64) if ctx.rank else torch.tensor(0), ctx)


def test_other_values_than_before_on_one_rank():
    with pytest.raises(
        weft.testing.RanksFailed, match="(?s)waits in a collective.*compares the ranks when arguments are new.*float64"
    ):
        run_ranks(_new_on_one_rank, 2)


# -- meetings ----------------------------------------------------------------------------------------


def _together(ctx, inside):
    weft.reduce(torch.ones(1), ctx)
    try:
        with weft.collectives.all_or_none(ctx, "reading the data"):
            if ctx.rank == 1:
                raise FileNotFoundError("no such shard: 7")
            if inside:
                weft.reduce(torch.ones(1), ctx)
    except weft.errors.PeerError as error:
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
    monkeypatch.setattr(entry, "find_absent_rank", lambda _: None)
    monkeypatch.setattr(entry, "find_culprit", lambda _: (1, "left") if next(looks) in blamed_at else None)
    world = weft.local().world
    with pytest.raises(weft.errors.PeerError, match="rank 1 failed: left") if raises else contextlib.nullcontext():
        entry.wait_for_collective(Slow(slices, done_after=slices == 1), world)
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
            with weft.collectives.all_or_none(ctx):
                if ctx.rank == guilty:
                    raise ValueError(f"step {guilty}")
            results.append("fine")
        except (weft.errors.PeerError, ValueError) as error:
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
    except weft.errors.PeerError as error:
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


@pytest.mark.slow
def test_main_may_take_longer_than_the_timeout():
    assert all(seconds > 2.4 for seconds in run_ranks(_first_takes_long, 2))


# -- gradients through collectives -------------------------------------------------------------------


class Towers(torch.nn.Module):
    """Two encoders of one batch, as in a contrastive model."""

    def __init__(self):
        super().__init__()
        self.image = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4))
        self.text = torch.nn.Linear(3, 4)

    def forward(self, image, text):
        return self.image(image), self.text(text)


def _towers():
    torch.manual_seed(0)
    model = Towers().double()
    data = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(9, 6, generator=data).double(), torch.randn(9, 3, generator=data).double()) for _ in range(3)
    ]
    return model, batches


def _contrastive(images, texts, first=0):
    """InfoNCE of some images, the rows from `first` on, against all texts, and the other way round."""
    logits = images @ texts.t()
    targets = torch.arange(first, first + len(images))
    return torch.nn.functional.cross_entropy(logits, targets)


def _plain_towers():
    model, batches = _towers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for image, text in batches:
        images, texts = model(image, text)
        (_contrastive(images, texts) + _contrastive(texts, images)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _distributed_towers(ctx, strategy, loss):
    model, batches = _towers()
    optimizer = None
    if strategy == "replicate":
        model, ctx = weft.replicate(model, ctx)
    elif strategy == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx, units=torch.nn.Linear)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    if strategy.startswith("zero"):
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=int(strategy[-1]))
    for image, text in batches:
        # Of whole batches each rank has another number of rows; a mean over own rows takes equally many.
        rows = slice(0, 8) if loss == "own rows" else slice(0, 9)
        mine = [part[rows].tensor_split(ctx.world_size)[ctx.rank] for part in (image, text)]
        images, texts = model(*mine)
        if loss == "all rows":
            images, texts = weft.gather((images, texts), ctx, grad=True)
            value = _contrastive(images, texts) + _contrastive(texts, images)
        else:
            everyone = weft.gather({"images": images, "texts": texts}, ctx, grad=True)
            first = ctx.rank * len(images)
            value = _contrastive(images, everyone["texts"], first) + _contrastive(texts, everyone["images"], first)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
    with weft.full_params(model, ctx):
        return {name: value.detach().clone() for name, value in model.named_parameters()}


def _check_towers(n, strategy, loss):
    expected = _plain_towers() if loss == "all rows" else run_ranks(_distributed_towers, 1, "replicate", loss)[0]
    for found in run_ranks(_distributed_towers, n, strategy, loss):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=f"{name} of {strategy}, {n} ranks")


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["replicate", "fully_shard", "zero1", "zero2"])
def test_a_contrastive_loss_over_all_ranks_equals_one_process(n, strategy):
    _check_towers(n, strategy, "all rows")


@pytest.mark.parametrize(("n", "strategy"), [(2, "replicate"), (4, "fully_shard"), (2, "zero3")])
def test_a_contrastive_loss_of_own_rows_against_all_equals_one_process(n, strategy):
    _check_towers(n, strategy, "own rows")


def _adjoint(ctx, call):
    """The gradient of the sum of all ranks' results weighted by w, and the results: what this rank's input is worth."""
    torch.manual_seed(ctx.rank)
    x = torch.randn(5 if call != "all_to_all" else 3 + ctx.rank, 2, dtype=torch.float64, requires_grad=True)
    whole = torch.tensor([1, 2])  # is sent too, and no gradient flows through it
    if call == "gather":
        y, _ = weft.gather((x[: 1 + ctx.rank], whole), ctx, grad=True)
    elif call == "all_to_all":
        splits = [len(x) - 1, *[0] * (ctx.world_size - 2), 1]
        y, numbers = weft.collectives.all_to_all((x, torch.zeros(len(x), 0)), ctx, splits=splits, grad=True)
        assert numbers.shape == (len(y), 0)
    elif call == "reduce_scatter":
        y = weft.collectives.reduce_scatter(x, ctx, "mean", grad=True)
    else:
        y, _ = weft.reduce([x, whole], ctx, "mean", grad=True)
    w = torch.full_like(y, ctx.rank + 1.0)
    (gradient,) = torch.autograd.grad((y.square() * w).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), x)
    return x.detach(), y.detach(), gradient.detach(), second


def _joint(call, xs):
    """What the ranks compute together, in one process."""
    n = len(xs)
    if call == "gather":
        whole = torch.cat([x[: 1 + r] for r, x in enumerate(xs)])
        return [whole] * n
    if call == "all_to_all":
        return [torch.cat([x[:-1] for x in xs]), *[xs[0][:0]] * (n - 2), torch.cat([x[-1:] for x in xs])]
    mean = torch.stack(xs).mean(0)
    return list(mean.tensor_split(n)) if call == "reduce_scatter" else [mean] * n


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("call", ["gather", "all_to_all", "reduce_scatter", "reduce"])
def test_gradients_flow_back_to_where_the_rows_came_from(n, call):
    found = run_ranks(_adjoint, n, call)
    xs = [x.clone().requires_grad_() for x, *_ in found]
    ys = _joint(call, xs)
    total = sum((y.square() * (rank + 1)).sum() for rank, y in enumerate(ys))
    gradients = torch.autograd.grad(total, xs, create_graph=True)
    seconds = torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), xs)
    for (_, y, gradient, second), *expected in zip(found, ys, gradients, seconds, strict=True):
        for value, right in zip((y, gradient, second), expected, strict=True):
            torch.testing.assert_close(value, right.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "call", [weft.gather, weft.collectives.all_to_all, weft.collectives.reduce_scatter, weft.reduce]
)
def test_a_result_without_gradients_is_said(call):
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(TypeError, match=f"(?s)no gradient would flow.*weft.*{call.__name__}.value, ctx, grad=True"):
        call({"x": x}, weft.local())
    with torch.no_grad():
        assert not call({"x": x}, weft.local())["x"].requires_grad
    assert not call(x.detach(), weft.local()).requires_grad
    assert call(x, weft.local(), grad=True).requires_grad


@pytest.mark.parametrize(
    "call", [weft.broadcast, weft.collectives.gather_objects, lambda x, ctx: weft.collectives.scatter([x], ctx)]
)
def test_objects_hold_no_tensors_that_require_grad(call):
    with pytest.raises(TypeError, match="(?s)requires grad.*value.detach"):
        call(torch.ones(2, requires_grad=True), weft.local())


def test_only_sums_and_means_send_gradients_back():
    with pytest.raises(ValueError, match="(?s)op = 'max' sends no gradients.*amax"):
        weft.reduce(torch.ones(2, requires_grad=True), weft.local(), "max", grad=True)


def _grad_on_one_rank(ctx):
    try:
        weft.gather(torch.ones(2, requires_grad=ctx.rank == 1), ctx, grad=True)
    except weft.errors.ContextError as error:
        return str(error)
    return "nothing raised"


def test_ranks_that_disagree_on_what_requires_grad_are_told():
    for text in run_ranks(_grad_on_one_rank, 2):
        assert "grad through [0]' on rank 1" in text


# -- rows for each rank ------------------------------------------------------------------------------


def _rows_for_all(ctx):
    n, r = ctx.world_size, ctx.rank
    splits = [(r + other) % 3 for other in range(n)]
    x = torch.tensor([[r, other] for other in range(n) for _ in range(splits[other])]).view(-1, 2)
    box = Box(x, torch.ones(len(x), 2, 3, dtype=torch.bool))
    found = weft.collectives.all_to_all(box, ctx, splits=splits)
    counts = weft.collectives.all_to_all(torch.tensor(splits), ctx)
    expected = [[other, r] for other in range(n) for _ in range((r + other) % 3)]
    assert isinstance(found, Box) and found.inside.tolist() == expected and found.label.shape == (len(expected), 2, 3)
    assert counts.tolist() == [(r + other) % 3 for other in range(n)]
    nothing = weft.collectives.all_to_all({"a": torch.empty(0, 4), "b": torch.empty(0, dtype=torch.int8)}, ctx)
    many = weft.collectives.all_to_all(
        [torch.full((n,), i) for i in range(70)], ctx
    )  # more counts than one header holds
    return [*nothing["a"].shape, *nothing["b"].shape], [int(t[0]) for t in many] == list(range(70))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_all_to_all(n):
    assert run_ranks(_rows_for_all, n) == [([0, 4, 0], True)] * n


def _scattered_sum(ctx, rows):
    value = {
        "float": torch.arange(rows * 2.0).view(rows, 2) + ctx.rank,
        "bool": torch.arange(rows) % 2 == ctx.rank % 2,
        "int": torch.arange(rows, dtype=torch.int16) * (ctx.rank + 1),
        "half": torch.ones(rows, dtype=torch.bfloat16) / 3,
        "complex": torch.full((rows,), 1 + 2j) * ctx.rank,
    }
    for op in ("sum", "mean", "max", "min"):
        if op == "max":
            del value["complex"]
        whole = weft.reduce(value, ctx, op)
        again = weft.gather(weft.collectives.reduce_scatter(value, ctx, op), ctx)
        for name, right in whole.items():
            torch.testing.assert_close(again[name], right, msg=f"{name}: {op}")
    last = weft.collectives.reduce_scatter(value, ctx, splits=[0] * (ctx.world_size - 1) + [rows])
    return last["float"].shape[0]


@pytest.mark.parametrize(("n", "rows"), [(1, 3), (2, 5), (3, 2), (2, 0)])
def test_reduce_scatter_and_gather_are_reduce(n, rows):
    assert run_ranks(_scattered_sum, n, rows) == [0] * (n - 1) + [rows]


def _wrong_rows(ctx, kind):
    x = torch.ones(4, 2)
    try:
        if kind == "inner":
            weft.collectives.all_to_all(torch.ones(2, 2 + ctx.rank), ctx)
        elif kind == "structure":
            weft.collectives.all_to_all([x] * (1 + 70 * ctx.rank), ctx)
        elif kind == "shape":
            weft.collectives.reduce_scatter(torch.ones(2 + ctx.rank), ctx)
        else:
            weft.collectives.reduce_scatter(x, ctx, splits=[1 + ctx.rank, 3 - ctx.rank])
    except weft.errors.ContextError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("inner", "rows of [3]' on rank 1"),
        ("structure", "70: torch.float32"),
        ("shape", "torch.float32 [3] cut into [2, 1]' on rank 1"),
        ("splits", "cut into [2, 2]' on rank 1"),
    ],
)
def test_rows_that_do_not_fit_are_told_on_all_ranks(kind, text):
    for found in run_ranks(_wrong_rows, 2, kind):
        assert text in found


@pytest.mark.parametrize("call", [weft.collectives.all_to_all, weft.collectives.reduce_scatter])
@pytest.mark.parametrize(
    ("value", "splits", "text"),
    [
        (torch.tensor(1.0), None, r"\(\)"),
        (torch.ones(3), [2], "3,"),
        (torch.ones(3), [1, 2], "2 numbers"),
        (torch.ones(3), [-1], "smallest -1"),
    ],
)
def test_rows_that_cannot_be_cut(call, value, splits, text):
    with pytest.raises(ValueError, match=f"(?s)found: .*{text}.*fix:"):
        call(value, weft.local(), splits=splits)


def _scatter(ctx, source):
    values = [{"rank": r, "rows": torch.full((r, 2), r)} for r in range(ctx.world_size)]
    mine = weft.collectives.scatter(values if ctx.rank == source else None, ctx, source=source)
    assert mine["rows"].tolist() == [[ctx.rank] * 2] * ctx.rank
    rows = torch.arange(7)
    part = weft.collectives.scatter(
        rows.tensor_split(ctx.world_size) if ctx.rank == source else None, ctx, source=source
    )
    assert torch.equal(weft.gather(part, ctx), rows)
    try:
        weft.collectives.scatter([1] * (ctx.world_size + 1), ctx, source=source)
    except (ValueError, weft.errors.PeerError) as error:
        return mine["rank"], type(error).__name__, "one value for each rank" in str(error)
    return None


@pytest.mark.parametrize(("n", "source"), [(1, 0), (2, 1), (3, 2)])
def test_scatter(n, source):
    expected = [(r, "ValueError" if r == source else "PeerError", True) for r in range(n)]
    assert run_ranks(_scatter, n, source) == expected


# -- values that are no tensors ----------------------------------------------------------------------


class Color(enum.Enum):
    RED = "r"
    BLUE = "b"


class Level(enum.IntEnum):
    LOW = 1


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    name: str
    values: frozenset[int] = frozenset()


@dataclasses.dataclass
class Careful:
    made: int = dataclasses.field(init=False, default=0)

    def __post_init__(self):
        raise RuntimeError("constructors do not run on the receiver")


def _careful():
    new = object.__new__(Careful)
    new.made = 3
    return new


OBJECTS = [
    np.float32(0.1), np.float64("nan"), np.int64(-3), np.bool_(True), np.str_("é"), np.bytes_(b"x"), np.complex64(1j),
    np.datetime64("2024-01-02"), np.str_(""),
    np.arange(6, dtype=">i2").reshape(2, 3).T, np.zeros((0, 3)), np.array(2.5), np.array(["a", "bc"]),
    {1, 2}, frozenset({(1, "a"), None}), set(), 1 + 2j, bytearray(b"ab"), 10**5000, -(2**64), 2**63,
    dt.date(2024, 2, 29), dt.datetime(2024, 1, 2, 3, 4, 5, 6, fold=1),  # noqa: DTZ001
    dt.time(1, 2), dt.timedelta(-1, 2, 3),
    dt.datetime(2024, 1, 2, tzinfo=dt.timezone(dt.timedelta(hours=-3))),
    Color.BLUE, {Level.LOW: 1}, Rights.READ | Rights.WRITE, Rights(0), Frozen("x", frozenset({1})), Pair(1, [2]),
    pathlib.Path("/a/b"), pathlib.PureWindowsPath("c:/x"), torch.float16, torch.device("cuda:1"), torch.Size([2, 3]),
    collections.OrderedDict(b=1, a=2), collections.Counter("aab"), {(1, 2): {3: np.int8(4)}}, "\ud800",
]  # fmt: skip


def _objects_travel(ctx):
    wrong = []
    for value in OBJECTS:
        for found in (
            *weft.collectives.gather_objects(value, ctx),
            weft.broadcast(value if ctx.is_main else None, ctx),
        ):
            same = found == value if not isinstance(value, np.ndarray) else np.array_equal(found, value)
            kind = type(found) is type(value) and getattr(found, "dtype", 0) == getattr(value, "dtype", 0)
            if not kind or not (same or value != value):
                wrong.append((value, found))
    made = weft.collectives.gather_objects(_careful(), ctx)
    first = weft.collectives.gather_objects(dt.time(1, fold=1), ctx)[0]
    return wrong, [type(one).__name__ for one in made], [one.made for one in made], first.fold


def test_objects_keep_their_type():
    assert run_ranks(_objects_travel, 2) == [([], ["Careful"] * 2, [3, 3], 1)] * 2


def _loop():
    value = []
    value.append(value)
    return value


def _local_class():
    @dataclasses.dataclass
    class Inner:
        a: int = 1

    return Inner()


STRANGE = {
    "object": object, "loop": _loop, "local class": _local_class, "sparse": lambda: torch.eye(2).to_sparse(),
    "structured": lambda: np.zeros(1, dtype=[("a", "i4")]), "objects": lambda: np.array([object()]),
    "zone": lambda: dt.datetime(2024, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")), "module": lambda: {"a": torch.nn.ReLU()},
}  # fmt: skip


def _send_all_strange(ctx):
    found = {}
    for name, make in STRANGE.items():
        try:
            weft.collectives.gather_objects(make() if ctx.rank else 1, ctx)
        except TypeError as error:
            found[name] = str(error)
    return found


def test_what_cannot_be_sent_is_refused_on_all_ranks():
    zero, one = run_ranks(_send_all_strange, 2)
    assert set(zero) == set(one) == set(STRANGE)
    assert all("cannot be sent" in text and "expected:" in text for text in one.values())
    assert "not found by its name" in one["local class"] and "in more than 100 others" in one["loop"]


@pytest.mark.parametrize(
    ("module", "name"), [("not_imported_anywhere", "X"), ("os", "system"), ("subprocess", "Popen"), ("enum", "Enum.x")]
)
def test_a_message_imports_nothing_and_calls_nothing(module, name):
    for kind in ("fields", "enum", "named"):
        text = json.dumps([{"$": kind, "items": [module, name, []]}, []]).encode()
        with pytest.raises(TypeError, match="(?s)unknown on this rank.*fix:"):
            encoding.unpack(encoding.bytes_tensor(text), len(text), torch.device("cpu"))
    assert "not_imported_anywhere" not in sys.modules


def _pad_different(ctx):
    try:
        weft.collectives.pad_across(torch.ones(2, 2) if ctx.rank else torch.ones(2, 2, 2), ctx)
    except weft.errors.ContextError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize("debug", [False, True])
def test_pad_across_compares_numbers_of_dimensions(debug):
    for text in run_ranks(_pad_different, 2, debug=debug):
        assert "3-d' on rank 0" in text and "2-d' on rank 1" in text


# -- threads -----------------------------------------------------------------------------------------


def _from_two_threads(ctx):
    """One thread reduces, another one gathers; each rank begins with another one of them."""
    own = ctx.subset(range(ctx.world_size))  # its group goes when this ends, which nothing may hold up
    found = []

    def work(call):
        try:
            while True:
                call(torch.ones(3), own)
                time.sleep(0.001)
        except weft.errors.ContextError as error:
            found.append(str(error).splitlines()[0])
        except weft.errors.PeerError as error:
            found.append(str(error))

    calls = [weft.reduce, weft.gather][:: 1 if ctx.is_main else -1]
    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found, any(thread.is_alive() for thread in threads)


def test_collectives_of_two_threads_are_refused_by_name():
    for found, hangs in run_ranks(_from_two_threads, 2):
        assert not hangs and len(found) == 2
        assert any("two threads of this rank call collectives" in text for text in found)


def _meets_while_another_thread_reduces(ctx):
    weft.reduce(torch.ones(1), ctx)
    entered = threading.Event()
    found = []

    def work():
        entered.set()
        try:
            weft.reduce(torch.ones(1), ctx)
        except weft.errors.ContextError as error:
            found.append("barrier in thread" in str(error) and "reduce in thread" in str(error))

    if ctx.is_main:
        thread = threading.Thread(target=work)
        thread.start()
        entered.wait()
        while not ctx.world.inside:
            time.sleep(0.001)
        try:
            weft.barrier(ctx)
        except weft.errors.ContextError as error:
            found.append("barrier in thread" in str(error) and "reduce in thread" in str(error))
    else:
        time.sleep(0.3)
        found.append(weft.reduce(torch.ones(1), ctx).item())
    if ctx.is_main:
        thread.join()
    return found, ctx.world.clash


def test_a_meeting_of_one_thread_in_a_collective_of_another_one():
    assert run_ranks(_meets_while_another_thread_reduces, 2) == [([True, True], None), ([2.0], None)]


def _threads_with_contexts_of_their_own(ctx):
    own = [ctx.subset(range(ctx.world_size)) for _ in range(2)]
    found = [0.0, 0.0]

    def work(index):
        for _ in range(20):
            found[index] += weft.reduce(torch.tensor(1.0 + index), own[index]).item()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_threads_may_have_contexts_of_their_own():
    assert run_ranks(_threads_with_contexts_of_their_own, 2) == [[40.0, 80.0]] * 2


def _on_main_only(ctx):
    try:
        if ctx.is_main:
            ctx.agree("save", {"step": 1})
        else:
            weft.barrier(ctx)
    except weft.errors.ContextError as error:
        return str(error)
    return "nothing raised"


def test_a_call_on_the_main_rank_only_gets_a_fix_that_fits():
    for text in run_ranks(_on_main_only, 2):
        assert "call save and barrier on all ranks, without `if ctx.is_main:` around it" in text
