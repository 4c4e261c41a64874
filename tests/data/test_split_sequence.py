"""split_sequence: parts of batches of any kind, with positions and labels that stay exact."""

import collections
import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader

import weft
from weft.errors import ContextError
from weft.tensors.sequence_order import SequencePart, chunks, part_of, places, rank_order, sequence_order
from weft.testing import fake


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    name: str


def _ctx(rank=0, ranks=2, data=1):
    return fake(rank, ranks * data, mesh={"data": data, "context": ranks})


def _words(rows=2, length=8):
    return torch.arange(rows * length).view(rows, length)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_parts_are_the_whole_in_another_order(order, ranks):
    x = torch.randn(2, 24, 3)
    parts = [weft.data.split_sequence(x, _ctx(rank, ranks), order=order) for rank in range(ranks)]
    assert torch.equal(sequence_order(torch.stack(parts, 1), order), x)
    assert torch.equal(rank_order(x, ranks, order), torch.stack(parts, 1))
    for rank, part in enumerate(parts):
        assert torch.equal(part, x[:, places(24, SequencePart(order, ranks, rank))])
        assert part.shape[1] * ranks == 24


def test_zigzag_gives_all_ranks_as_much_causal_work():
    work = [sum(at + 1 for run in chunks(32, 4, rank, "zigzag") for at in run) for rank in range(4)]
    assert len(set(work)) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda x: (x, x + 1),
        lambda x: [x, "text", 3],
        lambda x: Pair(x, x * 2),
        lambda x: Sample(x, "a"),
        lambda x: {"x": x, "inner": {"y": x.double()}, "id": torch.tensor([1, 2])},
        lambda x: collections.UserDict(x=x),
    ],
)
def test_batches_of_every_kind_keep_their_type(make):
    x = _words()
    batch = make(x)
    part = weft.data.split_sequence(batch, _ctx(1))
    assert type(part) is type(batch)
    assert torch.equal(x, _words())  # the batch is left alone
    first = part.x if isinstance(part, (Pair, Sample)) else part["x"] if "x" in part else part[0]
    assert first.tolist() == x[:, 2:6].tolist()


def test_what_is_no_sequence_stays_whole():
    part = weft.data.split_sequence({"x": _words(), "label": torch.tensor([0, 1]), "name": "a"}, _ctx())
    assert part["label"].tolist() == [0, 1]
    assert part["name"] == "a"


def test_arrays_and_other_dimensions():
    part = weft.data.split_sequence((np.arange(8), torch.arange(8)), _ctx(), dim=0)
    assert part[0].tolist() == part[1].tolist() == [0, 1, 6, 7]
    assert weft.data.split_sequence(torch.zeros(2, 3, 8), _ctx(), dim=2).shape == (2, 3, 4)
    assert weft.data.split_sequence({"x": torch.zeros(8, 2)}, _ctx(), dim=0)["position_ids"].tolist() == [0, 1, 6, 7]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_labels_are_shifted_before_they_are_split(ranks):
    """The mean of the ranks' losses, each computed as transformers does, is the loss of the whole batch."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 16, 11, generator=draw, dtype=torch.float64)
    labels = torch.randint(0, 11, (3, 16), generator=draw)
    labels[0, 9:] = -100
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    losses = []
    for rank in range(ranks):
        part = weft.data.split_sequence({"logits": logits, "labels": labels}, _ctx(rank, ranks))
        assert torch.equal(part["labels"], labels[:, part["position_ids"][0]])
        total = F.cross_entropy(part["logits"].flatten(0, 1), part["shift_labels"].flatten(), reduction="sum")
        losses.append(total / part["num_items_in_batch"])
    assert torch.allclose(torch.stack(losses).mean(), expected, atol=1e-14, rtol=0)


def test_labels_and_numbers_of_the_user_are_kept():
    given = {"labels": _words(), "shift_labels": _words() + 1, "num_items_in_batch": 5}
    part = weft.data.split_sequence(given, _ctx())
    assert part["shift_labels"].tolist() == (part["labels"] + 1).tolist()
    assert part["num_items_in_batch"] == 5


def test_one_rank_gets_the_same_keys():
    part = weft.data.split_sequence({"labels": _words()}, weft.local())
    assert part["position_ids"].tolist() == [list(range(8))] * 2
    assert part["labels"] is not None
    assert int(part["num_items_in_batch"]) == 14


REFUSED = [
    (torch.zeros(2, 10), {}, ValueError, "sequences of 10 places cannot be split over 2 ranks"),
    (torch.zeros(2, 9), {"order": "contiguous"}, ValueError, "a length divisible by 2, such as 10"),
    ((torch.zeros(2, 8), torch.zeros(2, 7)), {}, ValueError, "0: 8, 1: 7"),
    (torch.zeros(8), {}, ValueError, "no tensor with dimension 1"),
    ({"x": _words(), "y": torch.ones(2, 1, 8, 8)}, {"whole": "mask"}, ValueError, "whole = ['mask'], keys x, y"),
    ((_words(), _words()), {"whole": "mask"}, ValueError, "a tuple"),
    (torch.nested.nested_tensor([torch.zeros(2, 3)], layout=torch.jagged), {}, TypeError, "a nested tensor"),
    (_words(), {"dim": -1}, ValueError, "dim = -1"),
    (_words(), {"order": "stripes"}, ValueError, "'stripes' is unknown"),
    (_words(), {"axis": "nothing"}, ContextError, "'nothing' is not an axis"),
]


@pytest.mark.parametrize(("batch", "options", "kind", "text"), REFUSED)
def test_what_would_be_silently_wrong_is_refused(batch, options, kind, text):
    with pytest.raises(kind) as error:
        weft.data.split_sequence(batch, _ctx(), **options)
    assert text in str(error.value)
    assert "fix:" in str(error.value)


def test_masks_of_padding_and_documents_are_split():
    batch = {"x": _words(), "attention_mask": _words() > 2, "position_ids": _words() % 3}
    batch |= {"cu_seq_lens_q": torch.tensor([0, 3, 6, 8]), "mask": torch.ones(2, 1, 8, 8), "ids": {"a": _words()}}
    part = weft.data.split_sequence(batch, _ctx(), whole=["mask", "ids"])
    assert part["attention_mask"].tolist() == [[False, False, True, True], [True] * 4]
    assert part["position_ids"].tolist() == [[0, 1, 0, 1], [2, 0, 2, 0]]
    assert all(part[key] is batch[key] for key in ("cu_seq_lens_q", "mask", "ids"))
    assert not part_of(part["position_ids"]).positions and part_of(part["x"]) is not None


def _in_worker(rows):
    return weft.data.split_sequence(torch.stack(rows), _ctx())


def test_not_in_a_worker_of_a_loader():
    loader = DataLoader(list(_words(4)), batch_size=2, num_workers=1, collate_fn=_in_worker)
    with pytest.raises(ContextError, match="called in a worker of a DataLoader"):
        next(iter(loader))


def test_ranks_that_read_the_same_batches_split_them():
    ctx = _ctx(rank=3, ranks=2, data=2)  # data 1, context 1
    assert weft.data.split_sequence(_words(), ctx)[0].tolist() == [2, 3, 4, 5]
