"""Loaders and datasets of others: torchdata's StatefulDataLoader, Hugging Face datasets; skipped without them."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import weft
from weft.data import datasets_internals
from weft.testing import fake

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it


def _steps(loader):
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch["x"].tolist() for batch in loader]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(13))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("iterable", [False, True])
def test_a_stateful_data_loader(workers, iterable):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make(rank, world, batch_size=2, kind=torchdata.StatefulDataLoader):
        options = {} if iterable else {"shuffle": True, "generator": torch.Generator().manual_seed(3)}
        data = Stream() if iterable else list(range(13))
        loader = kind(data, batch_size=batch_size, num_workers=workers, **options)
        return weft.shard_data(loader, fake(rank, world), uneven="empty", seed=3)[0]

    parts = [_steps(make(rank, 2)) for rank in range(2)]
    order = [i for step in zip(*parts, strict=True) for part in step for i in part]
    assert sorted(order) == list(range(13)) and isinstance(make(0, 2), torchdata.StatefulDataLoader)
    loader = make(0, 2)
    next(iter(loader))
    position = loader.state_dict()
    digest = position.pop("order", None)
    rest = {"read": position["read"]} if iterable else {"length": 13}
    assert position == {"seed": 3, "epoch": 0, "samples": 4} | rest
    position |= {} if iterable else {"order": digest}
    rest = make(0, 1, batch_size=5)
    rest.load_state_dict(position)
    assert [i for batch in _steps(rest) for i in batch] == order[4:]
    assert len(_steps(rest)) == 3  # and the next epoch is whole


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_of_hugging_face_as_a_stream(workers):
    datasets = pytest.importorskip("datasets")

    def make(rank, world, **options):
        data = datasets.Dataset.from_dict({"x": list(range(14))}).to_iterable_dataset(num_shards=4)
        data = data.shuffle(seed=1, buffer_size=5).with_format("torch")
        loader = DataLoader(data, batch_size=2, num_workers=workers)
        return weft.shard_data(loader, fake(rank, world), uneven="empty", **options)[0]

    parts = [_steps(make(rank, 2)) for rank in range(2)]
    order = [i for step in zip(*parts, strict=True) for part in step for i in part]
    assert sorted(order) == list(range(14))
    loader = make(1, 2)
    epochs = [_steps(loader) for _ in range(2)]
    assert epochs[0] == parts[1] != epochs[1]
    loader = make(0, 2)
    for _ in loader:
        position = loader.state_dict()
        break
    rest = make(0, 1)
    rest.load_state_dict(position)
    # A shuffle buffer is no part of the dataset's state, so what was used is read again.
    assert position == {"seed": 0, "epoch": 0, "samples": 4, "read": position["read"]}
    assert [i for batch in _steps(rest) for i in batch] == order[4:]


def test_a_dataset_of_hugging_face_goes_on_from_its_state():
    datasets = pytest.importorskip("datasets")

    def make(world):
        data = datasets.Dataset.from_dict({"x": list(range(14))}).to_iterable_dataset(num_shards=4).with_format("torch")
        return weft.shard_data(DataLoader(data, batch_size=2), fake(0, world), uneven="empty")[0]

    loader = make(2)
    for _ in loader:
        position = loader.state_dict()
        break
    rest = make(1)
    rest.load_state_dict(position)
    assert [i for batch in _steps(rest) for i in batch] == list(range(4, 14))
    assert [i for batch in _steps(rest) for i in batch] == list(range(14))


def test_a_dataset_that_was_split_by_node_is_found_out():
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    def make(rank):
        data = datasets.Dataset.from_dict({"x": list(range(12))}).to_iterable_dataset(num_shards=4).with_format("torch")
        return DataLoader(split_dataset_by_node(data, rank, 2), batch_size=2)

    with pytest.raises(ValueError, match="(?s)split_dataset_by_node has split.*fix:.*already_sharded"):
        weft.shard_data(make(0), fake(0, 2), uneven="drop")
    parts = [_steps(weft.shard_data(make(rank), fake(rank, 2), already_sharded=True)[0]) for rank in range(2)]
    assert sorted(i for part in parts for batch in part for i in batch) == list(range(12))


def test_batches_of_transformers_and_tensordict_without_rows():
    encoding = pytest.importorskip("transformers").BatchEncoding
    table = pytest.importorskip("tensordict").TensorDict

    def collate_encoding(samples):
        return encoding({"x": torch.tensor(samples)})

    def collate_table(samples):
        return table({"x": torch.tensor(samples)}, batch_size=[len(samples)])

    def collate_nested(samples):
        return {"in": collate_table(samples), "x": torch.tensor(samples)}

    for collate in (collate_encoding, collate_table, collate_nested):
        loaders = [DataLoader(range(9), batch_size=4, collate_fn=collate) for _ in range(2)]
        shared = [weft.shard_data(loader, fake(rank, 2), uneven="empty")[0] for rank, loader in enumerate(loaders)]
        assert [_steps(loader) for loader in shared] == [[[0, 1, 2, 3], [8]], [[4, 5, 6, 7], []]]
        last = [batch for loader in shared for batch in loader][-1]
        assert type(last) is type(collate([1]))
        assert type(weft.to_device((last,), weft.local())[0]) is type(last)
    parts = [weft.data.split_between(collate_table(list(range(5))), fake(rank, 2), pad=True) for rank in range(2)]
    assert [part["x"].tolist() for part in parts] == [[0, 1, 2], [3, 4, 4]] and isinstance(parts[0], table)


def test_a_dataset_of_hugging_face_is_split_and_stays_one():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": list(range(5))})
    parts = [weft.data.split_between(data, fake(rank, 2), pad=True) for rank in range(2)]
    assert [part["x"][:] for part in parts] == [[0, 1, 2], [3, 4, 4]]
    assert all(isinstance(part, datasets.Dataset) for part in parts)


def test_private_names_of_datasets_are_where_they_are_said_to_be():
    pytest.importorskip("datasets")
    names = (datasets_internals.stream, datasets_internals.STREAM_SPLIT, datasets_internals.STREAM_SOURCE)
    assert all(one.exists for one in names)


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_dataset_of_hugging_face_is_split_by_its_shards(shuffled):
    datasets = pytest.importorskip("datasets")

    def make(rank):
        data = datasets.Dataset.from_dict({"x": list(range(12))}).to_iterable_dataset(num_shards=4).with_format("torch")
        data = data.shuffle(seed=3, buffer_size=2) if shuffled else data
        return weft.shard_data(DataLoader(data, batch_size=2), fake(rank, 3), mode="shards", uneven="join")[0]

    parts = [_steps(make(rank)) for rank in range(3)]
    found = [i for part in parts for batch in part for i in batch]
    assert sorted(found) == list(range(12)) and (found != sorted(found)) == shuffled
    assert sorted(sum(map(len, part)) for part in parts) == [3, 3, 6]


def test_a_stateful_data_loader_that_shuffles_has_the_seed_of_the_context():
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def order(state, **options):
        torch.manual_seed(state)
        loader = torchdata.StatefulDataLoader(list(range(20)), batch_size=4, shuffle=True, **options)
        return _steps(weft.shard_data(loader, weft.local(seed=5))[0])

    assert order(1) == order(2) == order(2, generator=torch.Generator().manual_seed(5))
    assert order(1, generator=torch.Generator().manual_seed(6)) != order(1)
