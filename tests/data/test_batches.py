"""Batches of every kind: what is split, moved, counted and emptied is one notion, also for foreign classes."""

import collections
import dataclasses
import types
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import weft
from weft.tensors.nested import leaves, rows_of, without_rows
from weft.testing import fake, run_ranks


class Encoding(collections.UserDict):
    """As `BatchEncoding` of transformers: a UserDict that moves itself."""

    def __init__(self, data, note=None):
        super().__init__(data)
        self.note = note

    def to(self, device):
        return Encoding({key: value.to(device) for key, value in self.data.items()}, note=f"moved to {device}")


class Table(collections.abc.MutableMapping):
    """As `TensorDict`: a mapping of tensors with a `batch_size` that holds for all of them."""

    def __init__(self, columns, batch_size):
        self.columns, self.batch_size = {}, torch.Size(batch_size)
        for key, value in columns.items():
            self[key] = value

    def __getitem__(self, which):
        if isinstance(which, str):
            return self.columns[which]
        cut = {key: value[which] for key, value in self.columns.items()}
        return Table(cut, next(iter(cut.values())).shape[:1])

    def __setitem__(self, key, value):
        if value.shape[: len(self.batch_size)] != self.batch_size:
            raise RuntimeError(f"batch dimension mismatch, got {value.shape} and {self.batch_size}")
        self.columns[key] = value

    def __delitem__(self, key):
        del self.columns[key]

    def __iter__(self):
        return iter(self.columns)

    def __len__(self):
        return self.batch_size[0]

    def to(self, device):
        return Table({key: value.to(device) for key, value in self.columns.items()}, self.batch_size)

    def items(self):
        return self.columns.items()


class Pair(NamedTuple):
    x: torch.Tensor
    names: list


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    names: list
    width: int = 3


class Cuttable:
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, which):
        return Cuttable(self.rows[which])


class Opaque:
    """Has rows, and nobody can look at them."""

    def __init__(self, rows):
        self.rows = rows

    def to(self, device):
        return self


def _x(n):
    return torch.arange(float(n))


def _names(n):
    return [f"sample {i}" for i in range(n)]


KINDS = {
    "tensor": _x,
    "dict": lambda n: {"x": _x(n), "names": _names(n)},
    "UserDict": lambda n: Encoding({"x": _x(n)}, note="kept"),
    "read-only mapping": lambda n: types.MappingProxyType({"x": _x(n), "names": _names(n)}),
    "table": lambda n: Table({"x": _x(n)}, [n]),
    "table inside": lambda n: [Table({"x": _x(n)}, [n]), _x(n)],
    "table without batch size": lambda n: Table({"x": _x(n)}, []),
    "named tuple": lambda n: Pair(_x(n), _names(n)),
    "dataclass": lambda n: Record(_x(n), _names(n)),
    "array": lambda n: {"x": np.arange(float(n)), "width": 3},
    "columns": lambda n: [_x(n), _x(n), tuple(_names(n))],
    "one column": lambda n: [_x(n)],
    "nested columns": lambda n: [{"a": {"x": _x(n)}}, _x(n), _x(n)],
    "cuttable": lambda n: {"x": _x(n), "graph": Cuttable(list(range(n)))},
    "constants": lambda n: {"x": _x(n), "task": "a", "size": torch.Size([2]), "scale": torch.tensor(2.0)},
}


def _rows_left(batch):
    """The number of rows in every part of a batch that has rows."""
    return {len(leaf) for _, leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()}


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_any_kind_is_counted_and_emptied(kind, rows):
    batch = KINDS[kind](rows)
    assert rows_of(batch) == rows
    empty = without_rows(batch, rows)
    assert type(empty) is type(batch) and rows_of(batch) == rows
    assert kind == "array" or _rows_left(empty) == {0}
    assert rows_of(empty) == 0


def test_what_is_no_row_stays():
    empty = without_rows(KINDS["constants"](2), 2)
    assert empty["task"] == "a" and empty["size"] == torch.Size([2]) and empty["scale"] == 2
    assert without_rows(KINDS["dataclass"](2), 2).width == 3 and without_rows(KINDS["dataclass"](2), 2).names == []
    assert without_rows(KINDS["UserDict"](2), 2).note == "kept"
    assert len(without_rows(KINDS["cuttable"](2), 2)["graph"]) == 0
    assert without_rows(KINDS["array"](2), 2)["x"].shape == (0,)


def _images(n):
    return [torch.ones(3, 4 + i, 4) for i in range(n)]


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_lists_of_samples_lose_all_of_them(rows):
    boxes = [{"boxes": torch.ones(i + 1, 4), "label": torch.tensor(i)} for i in range(rows)]
    assert without_rows((tuple(_images(rows)), tuple(boxes)), rows) == ((), ())
    assert without_rows(_images(rows), rows) == []
    assert without_rows([(image, 3) for image in _images(rows)], rows) == []
    assert without_rows([{"id": i} for i in range(rows)], rows) == []
    assert without_rows([["a"] * rows, ["b"] * rows, ["c"] * rows], rows) == [[], [], []]


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.ones(2), "graph": Opaque(2)},
        Opaque(2),
        nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]),
        {"graph": types.SimpleNamespace(x=torch.ones(2))},
    ],
    ids=["part", "whole", "packed", "namespace"],
)
def test_a_batch_that_cannot_be_emptied_is_an_error(batch):
    with pytest.raises(
        TypeError, match=r"(?s)a batch without rows cannot be made.*fix:.*uneven=\"pad\", with_ids=True"
    ):
        without_rows(batch, 2)


def test_batches_that_cannot_be_counted():
    assert rows_of({"ids": torch.ones(1, 8), "starts": torch.zeros(4)}) is None
    assert rows_of(Opaque(3)) is None and rows_of({"x": torch.ones(3), "graph": Opaque(3)}) == 3
    windows = weft.accumulate_grads(nn.Linear(1, 1), [Opaque(1), Opaque(2)], weft.local(), steps=2)[1]
    with pytest.raises(ValueError, match=r"(?s)share: the samples of a batch cannot be counted.*denominator"):
        [window.share for window in windows for _ in window]


# -- through loaders ---------------------------------------------------------------------------------

COLLATE = {
    "UserDict": lambda samples: Encoding({"x": torch.tensor(samples)}),
    "table": lambda samples: Table({"x": torch.tensor(samples)}, [len(samples)]),
    "dataclass": lambda samples: Record(torch.tensor(samples), _names(len(samples))),
    "named tuple": lambda samples: Pair(torch.tensor(samples), _names(len(samples))),
}


def _ids(batch):
    return (batch["x"] if isinstance(batch, collections.abc.Mapping) else batch.x).tolist()


@pytest.mark.parametrize("kind", COLLATE)
def test_every_sample_counts_once_in_batches_of_any_kind(kind):
    found = []
    for rank in range(2):
        loader = DataLoader(range(9), batch_size=4, collate_fn=COLLATE[kind])
        loader, _ = weft.shard_data(loader, fake(rank, 2), uneven="empty")
        found.append([_ids(batch) for batch in loader])
    assert found == [[[0, 1, 2, 3], [8]], [[4, 5, 6, 7], []]]


def _unemptied(ctx, *, steps_together):
    loader = DataLoader(range(5), batch_size=2, collate_fn=Opaque)
    loader, ctx = weft.shard_data(loader, ctx, uneven="empty")
    return [weft.reduce(torch.tensor(batch.rows), ctx) if steps_together else batch.rows for batch in loader]


def test_a_rank_that_cannot_have_a_batch_without_rows_says_so():
    with pytest.raises(weft.testing.RanksFailed, match="a batch without rows cannot be made: the batch has rows"):
        run_ranks(partial(_unemptied, steps_together=True), 2)
    # No rank waits for it: its loop is over.
    assert list(map(len, run_ranks(partial(_unemptied, steps_together=False), 2))) == [2, 1]


def _item_of_each(ctx, item):
    loader, ctx = weft.shard_data(DataLoader(range(5), batch_size=2), ctx, uneven="empty")
    return [batch[item] * loader.share for batch in loader]


@pytest.mark.parametrize("item", [0, 9])
def test_an_error_over_a_batch_without_rows_says_so(item):
    with pytest.raises(weft.testing.RanksFailed, match="IndexError") as caught:
        run_ranks(_item_of_each, 2, item)  # item 9 is missing in the first batch already, which has rows
    assert ('rank 1 was given a batch without rows, as of uneven="empty"' in str(caught.value)) == (item == 0)


# -- moving and splitting ----------------------------------------------------------------------------


def test_objects_that_move_themselves_do_so_wherever_they_are():
    ctx = weft.local()
    batch = weft.to_device((Encoding({"x": _x(2)}), {"inside": Encoding({"x": _x(2)})}), ctx)
    assert batch[0].note == batch[1]["inside"].note == f"moved to {ctx.device}"
    table = weft.to_device([Table({"x": _x(2)}, [2])], ctx)[0]
    assert isinstance(table, Table) and table.batch_size == (2,)
    kept = Encoding({"x": _x(2), "here": _x(2)}, note="walked")
    assert weft.to_device(kept, ctx, skip_keys=["here"]).note == "walked"


@pytest.mark.parametrize(
    "kind", ["dict", "UserDict", "table", "named tuple", "dataclass", "array", "read-only mapping"]
)
def test_values_of_any_kind_are_split(kind):
    value = KINDS[kind](5) if kind != "array" else np.arange(5.0)
    first, last = (weft.data.split_between(value, fake(rank, 2)) for rank in range(2))
    assert type(first) is type(value) and (rows_of(first), rows_of(last)) == (3, 2)
    padded = weft.data.split_between(value, fake(1, 2), pad=True)
    assert type(padded) is type(value) and rows_of(padded) == 3
    if kind == "dataclass":
        return
    if kind in ("dict", "named tuple"):
        names = padded["names"] if kind == "dict" else padded.names
        assert names == ["sample 3", "sample 4", "sample 4"]


class Arrow:
    """As `Dataset` of the `datasets` library: rows are chosen by `select`; a slice is a dict of columns."""

    column_names = ("x",)

    def __init__(self, rows):
        self.rows = list(rows)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, which):
        return {"x": self.rows[which]}

    def select(self, rows):
        return Arrow([self.rows[row] for row in rows])


def test_a_dataset_stays_one_when_it_is_split():
    parts = [weft.data.split_between(Arrow(range(5)), fake(rank, 2)) for rank in range(2)]
    assert [part.rows for part in parts] == [[0, 1, 2], [3, 4]]
    assert weft.data.split_between(Arrow(range(5)), fake(1, 2), pad=True).rows == [3, 4, 4]


def test_metrics_in_mappings_of_any_class():
    rows = weft.metrics.SampleIds(ids=torch.tensor([1, 0]), valid=torch.tensor([True, True]))
    value = collections.UserDict({"x": torch.tensor([1.0, 0.0]), "names": ["b", "a"]})
    found = weft.metrics.gather_metrics(value, weft.local(), ids=rows)
    assert type(found) is collections.UserDict
    assert found["x"].tolist() == [0, 1] and found["names"] == ["a", "b"]


def test_samples_that_are_dataclasses_are_padded():
    collate = weft.data.pad_collate(fill=-1)
    batch = collate([Record(torch.ones(2), 0), Record(torch.ones(3), 1)])
    assert isinstance(batch, Record) and batch.x.tolist() == [[1, 1, -1], [1, 1, 1]] and batch.names.tolist() == [0, 1]
