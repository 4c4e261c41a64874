"""What a loader really reads, against the plan: indices of any type, epochs in workers, samples that are not there."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, ChainDataset, ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

import weft
from weft.data.order.epoch_order import epoch_order
from weft.testing import fake

# -- indices -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.asarray, torch.tensor, int])
@pytest.mark.parametrize("workers", [0, 1])
def test_ids_are_numbers_for_indices_of_any_integer_type(kind, workers):
    given = []

    class Data:
        def __len__(self):
            return 8

        def __getitem__(self, index):
            given.append(index)
            return int(index)

    order = [kind(i) for i in (5, 2, 7, 0, 1, 6, 3, 4)]
    options = {"with_ids": True, "keyed": True}
    loader, _ = weft.shard_data(
        DataLoader(Data(), batch_size=2, sampler=order, num_workers=workers), fake(1, 2), **options
    )
    found = list(loader)
    assert [ids.ids.tolist() for _, ids in found] == [batch.tolist() for batch, _ in found] == [[7, 0], [3, 4]]
    assert workers or [type(each) for each in given] == [
        type(each) for each in (order[2], order[3], order[6], order[7])
    ]


def test_randomness_by_sample_is_the_same_for_indices_of_any_integer_type():
    class Noise:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.rand(())

    def drawn(kind):
        loader, _ = weft.shard_data(DataLoader(Noise(), sampler=[*map(kind, range(4))]), weft.local(), keyed=True)
        return torch.cat([*loader]).tolist()

    assert drawn(int) == drawn(np.int32) == drawn(torch.tensor)


def test_ids_that_are_numbers_in_part_are_refused():
    data = {0: 0.0, "one": 1.0}
    loader, _ = weft.shard_data(DataLoader(data, batch_size=2, sampler=[0, "one"]), weft.local(), with_ids=True)
    with pytest.raises(weft.errors.ContractError, match=r"(?s)some indices of a batch are numbers.*0, 'one'.*with_ids"):
        list(loader)
    loader, _ = weft.shard_data(DataLoader(data, sampler=["one"]), weft.local(), with_ids=True)
    assert [ids.ids.tolist() for _, ids in loader] == [[-1]]


# -- epochs ------------------------------------------------------------------------------------------


class _Told(Dataset):
    """Says in each sample the epoch that it was told, and numbers that were drawn in it."""

    epoch = -1

    def __init__(self, length=4):
        self.length = length

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor([self.epoch, index, random.random(), np.random.rand(), torch.rand(())], dtype=torch.float64)


class _Wrapper:
    """No dataset of torch, and nothing says that another is inside."""

    def __init__(self, **parts):
        self.__dict__.update(parts)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        found = self.inner
        while not isinstance(found, Dataset):
            found = next(iter(found.values() if isinstance(found, dict) else found))
        return found[index]


class _Stacked(Dataset):
    """In charge of what is inside."""

    def __init__(self, inner):
        self.inner = inner

    def set_epoch(self, epoch):
        self.inner.set_epoch(10 * epoch)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.inner[index]


NESTED = {
    "alone": _Told,
    "subset": lambda: Subset(Subset(_Told(), range(4)), range(4)),
    "joined": lambda: ConcatDataset([_Told(2), _Told(2)]),
    "in a list": lambda: _Wrapper(inner=[_Told()]),
    "in a dict": lambda: _Wrapper(inner={"a": (_Told(),)}, other=list(range(100))),
    "in itself": lambda: _Wrapper(inner=[one := Subset(_Told(), range(4)), one.__dict__.update(one=one)]),
}


@pytest.mark.parametrize(
    ("kind", "persistent"),
    [*((kind, None) for kind in NESTED), *itertools.product(["joined", "in a dict"], [False, True])],
)
def test_datasets_inside_of_others_are_told_the_epoch(kind, persistent):
    workers = {} if persistent is None else {"num_workers": 1, "persistent_workers": persistent}
    loader, _ = weft.shard_data(DataLoader(NESTED[kind](), batch_size=4, **workers), weft.local())
    assert [batch[:, 0].tolist() for _ in range(3) for batch in loader] == [[epoch] * 4 for epoch in range(3)]


def test_a_dataset_with_set_epoch_is_in_charge_of_what_is_inside():
    loader, _ = weft.shard_data(DataLoader(Subset(_Stacked(_Told()), range(4)), batch_size=4), weft.local())
    assert [batch[0, 0].item() for _ in range(3) for batch in loader] == [0, 10, 20]


def test_streams_and_samplers_inside_of_others_are_told_the_epoch():
    class Stream(IterableDataset):
        set_epoch = _Told.set_epoch

        def __iter__(self):
            yield self.epoch

    class Order:
        epoch = -1
        set_epoch = _Told.set_epoch

        def __len__(self):
            return 1

        def __iter__(self):
            return iter([self.epoch % 4])

    loader, _ = weft.shard_data(DataLoader(ChainDataset([Stream(), Stream()]), batch_size=2), weft.local())
    assert [batch.tolist() for _ in range(2) for batch in loader] == [[0, 0], [1, 1]]
    order = Order()
    order.data_source = data = _Told()  # which the loader tells, and not the sampler
    inner = BatchSampler(BatchSampler(order, 1, drop_last=False), 1, drop_last=False)
    epoch_order(inner, 0, 3)
    assert order.epoch == 3 and data.epoch == -1


def test_workers_that_stay_begin_each_epoch_like_new_ones():
    def drawn(epochs, *, persistent, position=None):
        loader = DataLoader(_Told(), batch_size=1, shuffle=True, num_workers=2, persistent_workers=persistent)
        loader, _ = weft.shard_data(loader, fake(1, 2, seed=3))
        if position is not None:
            loader.load_state_dict(position)
        return [[batch.tolist() for batch in loader] for _ in range(epochs)], loader.state_dict()

    new, position = drawn(2, persistent=False)
    stay, _ = drawn(3, persistent=True)
    assert stay[:2] == new and stay[2] == drawn(1, persistent=True, position=position)[0][0]
    assert len({row[2] for epoch in stay for batch in epoch for row in batch}) == 6  # no number twice
