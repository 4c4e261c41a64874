"""What the ranks read, in which order, and from where on: `weft.data.split` and `weft.data.order`."""

import itertools
import os
import random
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import weft
from tests.data import samplers
from tests.fix_lines.test_data import Stream, Untrue, loader_of, with_line
from tests.fix_lines.told import Told, told
from weft.peers.replica_groups import ReplicaGroup
from weft.testing import fake, run_ranks


def read(loader):
    return [int(sample) for batch in loader for sample in batch]


def of_ranks(it, make, **options):
    """What two ranks read together that each do what the line says, with the program's own `options`."""
    it.fix = it.fix.replace("...", "**options")
    names = ({"loader": make(rank), "ctx": fake(rank, 2), "options": options} for rank in range(2))
    return sorted(itertools.chain.from_iterable(read(it.run(**each)["loader"]) for each in names))


def numbers(n=8, batch_size=2, **options):
    return lambda rank=0: DataLoader(list(range(n)), batch_size=batch_size, **options)


def streamed(n=8, batch_size=2):
    return lambda rank=0: DataLoader(Stream(n), batch_size=batch_size)


def split(rank):
    return DataLoader(range(8), batch_size=2, sampler=DistributedSampler(range(8), 2, rank))


class Sharded(IterableDataset):
    """Each shard has its own samples."""

    def __init__(self, shards):
        self.shards = shards

    @property
    def num_shards(self):
        return len(self.shards)

    def shard(self, num_shards, index):
        return Sharded(self.shards[index::num_shards])

    def __iter__(self):
        yield from itertools.chain(*self.shards)


def shards(rank=0):
    return DataLoader(Sharded([[0, 1], [2, 3], [4, 5], [6, 7]]), batch_size=2)


def pairs(n):
    return TensorDataset(torch.randn(n, 4, generator=torch.Generator().manual_seed(1)), torch.arange(n) % 3)


# -- what shard_data refuses -----------------------------------------------------------------------------


def test_arguments_of_shard_data():
    with told("data/split/loader_checks.py", "this is not a loader") as it:
        weft.shard_data(range(8), fake(0, 2))
    weft.shard_data(it.run(DataLoader=DataLoader, dataset=range(64))["loader"], fake(0, 2))
    for wrong in ({"mode": "rows"}, {"uneven": "maybe"}, {"resized": "no"}):
        with told("data/split/loader_checks.py", "check_choice('shard_data', name, value") as it:
            weft.shard_data(numbers(9)(), fake(0, 2), **wrong)
        assert of_ranks(it, numbers()) == [*range(8)]


def test_modes():
    for make in (streamed(), numbers()):
        with told("data/split/loader_checks.py", "an iterable dataset with `num_shards`") as it:
            weft.shard_data(make(), fake(0, 2), mode="shards")
        assert of_ranks(it, make) == [*range(8)]
    for make in (streamed(batch_size=None), numbers(batch_size=None)):
        with told("data/split/loader_checks.py", "with batch_size=None") as it:
            weft.shard_data(make(), fake(0, 2), mode="split")
        loaders = [it.run(loader=make(), ctx=fake(rank, 2))["loader"] for rank in range(2)]
        assert sorted(itertools.chain(*loaders)) == [*range(8)]

    def batches(rank=0):
        return DataLoader(range(8), batch_sampler=[[0, 1, 2], [3], [4, 5, 6, 7]])

    with told("data/split/split_plan.py", "cannot be split over") as it:
        list(weft.shard_data(batches(), fake(0, 2), mode="split")[0])
    assert of_ranks(it, batches) == [*range(8)]
    empty, options = [[0], []], {"mode": "split", "uneven": "empty"}
    with told("data/split/split_plan.py", "cannot be split over") as it:
        list(weft.shard_data(DataLoader(range(1), batch_sampler=empty), fake(0, 2), **options)[0])
    kept = eval(f"[batch for batch in empty {it.fix.partition(':')[0]}]", {"empty": empty})
    assert len(list(weft.shard_data(DataLoader(range(1), batch_sampler=kept), fake(0, 2), **options)[0])) == 1
    with told("data/split/loader_checks.py", "cannot be split among") as it:
        weft.shard_data(numbers(batch_size=3)(), fake(0, 2), mode="split")
    loader = loader_of(it, range(8))
    assert [len(batch) for batch in weft.shard_data(loader, fake(0, 2), mode="split")[0]] == [2, 2]


def test_data_that_is_split_already():
    with told("data/split/loader_checks.py", "the data would be split twice") as it:
        weft.shard_data(split(0), fake(0, 2))
    assert of_ranks(it, split) == [*range(8)]
    with told("data/split/loader_checks.py", "already_sharded=True with mode=") as it:
        weft.shard_data(split(0), fake(0, 2), already_sharded=True, mode="split")
    assert of_ranks(it, split) == [*range(8)]
    with told("data/split/loader_checks.py", "{how} with uneven=") as it:
        weft.shard_data(split(0), fake(0, 2), already_sharded=True, uneven="pad")
    assert of_ranks(it, split) == [*range(8)]
    with told("data/split/loader_checks.py", "{how} with uneven=") as it:
        weft.shard_data(shards(), fake(0, 2), mode="shards", uneven="pad")
    assert of_ranks(it, shards) == [*range(8)]
    with told("data/split/stream_samples.py", "fewer shards than there are ranks") as it:
        weft.shard_data(shards(), fake(0, 5), mode="shards")
    assert of_ranks(it, shards) == [*range(8)]


def test_costs():
    lengths, make, ctx = [3, 1, 0, 5, 2, 2, 4, 1], numbers(), fake(0, 2)
    positive = [max(1, n) for n in lengths]
    names = {"loader": make(), "ctx": ctx, "lengths": positive}
    with told("data/split/loader_checks.py", "check_choice('shard_data', 'balance'") as it:
        weft.shard_data(make(), ctx, cost=positive, balance="bytes")
    it.run(**names)
    for wrong in ({"balance": "tokens"}, {"cost": positive}):
        with told("data/split/loader_checks.py", "expected='both, or none of them'") as it:
            weft.shard_data(make(), ctx, **wrong)
        it.run(**names)
    for wrong in (positive[:-1], len):
        with told("data/equal_cost.py", "does not return the cost of a sample") as it:
            weft.shard_data(make(), ctx, cost=wrong, balance="tokens")
        it.run(**names)
    with told("data/equal_cost.py", "costs cannot be used") as it:
        weft.shard_data(make(), ctx, cost=lengths, balance="tokens")
    it.run(**{**names, "lengths": lengths})
    balance = {"cost": positive, "balance": "tokens"}
    with told("data/split/loader_checks.py", "a dataset with an index and a batch_size, with balance=") as it:
        weft.shard_data(streamed()(), ctx, uneven="drop", **balance)
    assert of_ranks(it, streamed(), uneven="drop") == [*range(8)]
    with told("data/split/loader_checks.py", "samples that weft divides, each used once") as it:
        weft.shard_data(make(), ctx, uneven="pad", **balance)
    assert of_ranks(it, make, uneven="pad") == [*range(8)]
    with told("data/split/loader_checks.py", "samples that weft divides, each used once") as it:
        weft.shard_data(split(0), ctx, already_sharded=True, **balance)
    assert of_ranks(it, split, already_sharded=True) == [*range(8)]


class Kept(DataLoader):
    """Keeps one iterator, over batches without end."""

    def __init__(self, data):
        super().__init__(data, batch_size=2)
        self.__dict__["batch_sampler"] = itertools.cycle([[0], [1]])
        self.__dict__["kept"] = super().__iter__()


class Others(DataLoader):
    """Leaves every other batch out."""

    def __iter__(self):
        return itertools.islice(super().__iter__(), 0, None, 2)


def _masked(samples, generator=None):
    return torch.stack([torch.tensor(sample) * torch.rand((), generator=generator) for sample in samples])


class _Masking:
    generator = torch.Generator()

    def __call__(self, samples):
        return _masked(samples, self.generator)


@pytest.mark.parametrize("collate", [_masked, _Masking()])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_collate_function_that_draws(collate, workers):
    def loader_with(collate):
        own = DataLoader(range(8), batch_size=4, collate_fn=collate, num_workers=workers)
        return weft.shard_data(own, weft.local(), keyed=True, with_ids=True)[0]

    if workers:
        with pytest.raises(weft.errors.ContractError, match="collate_fn draws random numbers"):
            next(iter(loader_with(collate)))
        return
    with told("data/split/map_samples.py", "collate_fn draws random numbers") as it:
        next(iter(loader_with(collate)))
    seen = []
    for numbers, rows in loader_with(torch.tensor):
        draws = eval(it.fix.partition("of the batch, ")[2], {"weft": weft, "rows": rows})
        seen += (numbers * draws).tolist()
    alone = weft.rng.keyed_uniform(torch.arange(8), seed=0, epoch=0)
    assert seen == (torch.arange(8) * alone).tolist()


def test_loader_classes():
    data, ctx = range(64), weft.local()
    with told("data/split/loader_checks.py", "a loader that is read by epochs") as it:
        weft.shard_data(Kept(data), ctx)
    weft.shard_data(it.run(DataLoader=DataLoader, dataset=data)["loader"], ctx)
    with told("data/split/real_batches.py", "does not yield the batches of this iteration") as it:
        read(weft.shard_data(Others(data, batch_size=2), ctx)[0])
    loader, _ = weft.shard_data(it.run(DataLoader=DataLoader, dataset=data)["loader"], ctx)
    assert read(loader) == [*data]


# -- the end of an epoch ---------------------------------------------------------------------------------


def test_the_end_of_a_stream():
    with told("data/split/loader_checks.py", "the end of a stream of unknown length") as it:
        weft.shard_data(streamed(7)(), fake(0, 2))
    assert of_ranks(it, streamed(7)) == [*range(7)]
    loader, ctx = streamed(7)(), weft.local()
    sharded, _ = weft.shard_data(loader, ctx)
    for use in (lambda: len(sharded), lambda: sharded.remaining):
        with told("data/split/sharded_loader.py", "a loader over a stream of unknown length has none") as it:
            use()
        it.run(loader=sharded)
    with told("data/split/stream_samples.py", "the stream does not yield what its length says") as it:
        read(weft.shard_data(DataLoader(Untrue(4), batch_size=2), ctx)[0])
    true = with_line(Untrue, it, "self.n")
    assert read(weft.shard_data(DataLoader(true(4), batch_size=2), ctx)[0]) == [*range(4)]


def test_samples_that_cannot_be_split_evenly():
    groups = [[0, 1], [2, 3], [4, 5]]
    mistakes = (
        (numbers(9), {}),
        (numbers(11), {"uneven": "error"}),
        (streamed(5), {"uneven": "balance"}),
        (lambda rank=0: DataLoader(range(6), batch_sampler=groups), {}),
    )
    for make, options in mistakes:
        with told("data/split/split_plan.py", "cannot be split evenly over") as it:
            read(weft.shard_data(make(), fake(0, 2), **options)[0])
        whole, line = read(make()), it.fix
        assert of_ranks(it, make) == sorted(whole)
        padded, valid = [], []
        it.fix = line.replace('"empty"', '"pad", with_ids=True', 1)
        for rank in range(2):
            for batch, ids in it.run(loader=make(rank), ctx=fake(rank, 2))["loader"]:
                padded += batch.tolist()
                valid += batch[ids.valid].tolist()
        assert len(padded) > len(whole) and sorted(valid) == sorted(whole)
        it.fix = line.replace("empty", "drop", 1)
        assert set(of_ranks(it, make)) < set(whole)
        places = [line.index(f'"{choice}"') for choice in ("empty", "pad", "drop")]
        assert places == sorted(places)


def test_an_epoch_without_a_step():
    for make, options in ((numbers(3, 4, drop_last=True), {}), (numbers(1), {"uneven": "drop"})):
        with told("data/split/split_plan.py", "a loop over the loader does nothing") as it:
            weft.shard_data(make(), fake(0, 2), **options)
        assert it.fix == 'a smaller batch_size; or drop_last=False and weft.shard_data(loader, ctx, uneven="empty")'
    assert len(weft.shard_data(numbers(3, 1, drop_last=True)(), fake(0, 2))[0]) == 1
    assert len(weft.shard_data(numbers(3, 4)(), fake(0, 2), uneven="empty")[0]) == 1
    assert len(weft.shard_data(numbers(1)(), fake(0, 2), uneven="empty")[0]) == 1
    loader, _ = weft.shard_data(streamed(1)(), fake(0, 2), uneven="drop")
    with told("data/split/split_plan.py", "a loop over the loader does nothing") as it:
        read(loader)
    assert read(weft.shard_data(streamed(1)(), fake(0, 2), uneven="empty")[0]) == [0]


# -- shares and ids --------------------------------------------------------------------------------------


def test_shares():
    loader, _ = weft.shard_data(DataLoader(pairs(8), batch_size=2), weft.local())
    with told("data/split/sharded_loader.py", "there is no current batch") as it:
        _ = loader.share
    it.run(loader=loader, model=nn.Linear(4, 3), cross_entropy=cross_entropy)


def good_only(samples):
    return torch.utils.data.default_collate([sample for sample in samples if sample[1] != 1])


def test_shares_of_batches_without_some_samples_in_an_elastic_job():
    ctx, dataset = fake(0, 2), pairs(12)
    ctx = replace(ctx, replicas=ReplicaGroup(None, "0.0", 1, ctx.world, ctx.device))
    loader, _ = weft.shard_data(DataLoader(dataset, batch_size=2, collate_fn=good_only), ctx)
    with told("data/split/real_batches.py", "batches do not hold the samples that were read") as it:
        shares = [loader.share for _ in loader]
    good = [index for index, (_, y) in enumerate(dataset) if y != 1]
    dataset = it.run(torch=torch, dataset=dataset, good=good)["dataset"]
    loader, _ = weft.shard_data(DataLoader(dataset, batch_size=2, collate_fn=good_only), ctx)
    shares = [loader.share for _ in loader]
    assert shares == [1.0, 1.0]


def test_indices_of_two_kinds():
    data, ctx = {0: 0, "a": 1}, weft.local()

    def make():
        return DataLoader(data, sampler=[0, "a"], batch_size=2)

    with told("data/split/sharded_loader.py", "some indices of a batch are numbers and others are not") as it:
        list(weft.shard_data(make(), ctx, with_ids=True)[0])
    assert read(it.run(loader=make(), ctx=ctx)["loader"]) == [0, 1]


# -- positions -------------------------------------------------------------------------------------------


def begun(make, ctx=None, **options):
    """A loader of which a step is used, and its position."""
    loader, _ = weft.shard_data(make(), weft.local() if ctx is None else ctx, **options)
    next(batches := iter(loader))
    position = loader.state_dict()
    batches.close()
    return loader, position


def test_positions_of_a_loader_that_is_read_twice():
    data = range(8)
    loader, _ = weft.shard_data(DataLoader(data), weft.local())
    for _ in loader:
        other = iter(loader)
        next(other)
        with told("data/split/position.py", "read twice at once has no position") as it:
            loader.state_dict()
        break
    first, second = it.fix.split("; or two loaders: ")
    it.fix = first
    it.run(loader=loader, n=1)
    for _ in loader:
        assert loader.state_dict()["epoch"] == 1
        break
    it.fix = second
    found = it.run(DataLoader=DataLoader, data=data, ctx=weft.local())
    for _ in zip(found["first"], found["second"], strict=True):
        found["first"].state_dict()


def test_positions_that_are_none_of_this_loader():
    saved, position = begun(numbers())
    loader, ctx = weft.shard_data(numbers()(), weft.local())
    with told("data/split/position.py", "this is not a position") as it:
        loader.load_state_dict({**position, "samples": 99})
    it.run(loader=loader, saved_loader=saved)
    with told("data/split/position.py", "this is not a position") as it:
        loader.load_state_dict({**position, "order": [[0, 7]]})
    it.run(loader=loader, saved_loader=saved)
    assert read(loader) == [*range(2, 8)]

    def own():
        return DataLoader(range(8), batch_size=2, sampler=samplers.OwnNumpy(8))

    saved, position = begun(own)
    loader, _ = weft.shard_data(own(), ctx)
    with told("data/order/sampler_state.py", "in this position cannot be used") as it:
        loader.load_state_dict({**position, "sampler": [[0, {"rng": [1]}]]})
    it.run(loader=loader, saved_loader=saved)
    assert len(read(loader)) == 6
    _, position = begun(numbers())
    ctx, longer = weft.local(), numbers(10)
    with told("data/split/position.py", "a dataset of another length or mixture") as it:
        weft.shard_data(longer(), ctx)[0].load_state_dict(position)
    loader = it.run(loader=longer(), ctx=ctx)["loader"]
    with pytest.warns(UserWarning, match="resuming with the next epoch"):
        loader.load_state_dict(position)
    assert loader.epoch == 1 and len(read(loader)) == 10


def test_positions_in_data_that_was_split_by_others():
    def make():
        return split(0)

    _, position = begun(make, fake(0, 2), already_sharded=True)
    for loader, ctx, options in (
        (numbers()(), weft.local(), {}),
        (DataLoader(range(8), sampler=DistributedSampler(range(8), 3, 0)), fake(0, 3), {"already_sharded": True}),
    ):
        sharded, _ = weft.shard_data(loader, ctx, **options)
        with told("data/split/position.py", "the data was not split by weft") as it:
            sharded.load_state_dict(position)
        it.run(loader=sharded)
        assert sharded.epoch == 1 and len(read(sharded)) in (8, 3)
    _, position = begun(numbers(), fake(0, 2))
    with told("data/split/position.py", "the data was not split by weft") as it:
        weft.shard_data(make(), fake(0, 2), already_sharded=True)[0].load_state_dict(position)
    loader = it.run(loader=numbers()(), ctx=fake(0, 2))["loader"]
    loader.load_state_dict(position)
    assert read(loader) == [4, 5]


# -- orders ----------------------------------------------------------------------------------------------


def sampled(kind, n=8):
    return lambda: DataLoader(range(n), batch_size=2, sampler=kind(n))


def test_samplers_whose_length_is_not_true():
    ctx = weft.local()
    loader, _ = weft.shard_data(sampled(samplers.Once)(), ctx)
    with told("data/order/epoch_order.py", "another number of samples when it is run again") as it:
        for _ in range(len(loader)):
            read(loader)
    true = with_line(samplers.Once, it, "8")
    loader, _ = weft.shard_data(sampled(true)(), ctx)
    assert len(loader) == 4 and read(loader) == [*range(8)]
    with told("data/order/epoch_order.py", "the sampler does not yield what its length says") as it:
        read(weft.shard_data(sampled(samplers.WrongLength)(), ctx)[0])
    assert it.fix == "give the sampler a __len__ that is true, or none"
    for kind in (samplers.Global, samplers.NoLength):
        assert sorted(read(weft.shard_data(sampled(kind)(), ctx)[0])) == [*range(8)]


def test_an_order_that_cannot_be_made_again():
    make, ctx = sampled(samplers.Entropy), weft.local()
    _, position = begun(make)
    with told("data/order/epoch_order.py", "yields another order of epoch") as it:
        weft.shard_data(make(), ctx)[0].load_state_dict(position)
    first, second = it.fix.split("; from there on: ")
    it.fix = first
    loader = it.run(loader=make(), ctx=ctx)["loader"]
    with pytest.warns(UserWarning, match="resuming with the next epoch"):
        loader.load_state_dict(position)
    assert loader.epoch == 1 and sorted(read(loader)) == [*range(8)]
    it.fix = second
    make = sampled(with_line(samplers.Entropy, it, "", torch=torch))
    _, position = begun(make)
    loader, _ = weft.shard_data(make(), ctx)
    loader.load_state_dict(position)
    assert len(read(loader)) == 6


class Entropy(Stream):
    """In an order that nobody seeds."""

    def __iter__(self):
        return iter(np.random.default_rng().permutation(self.n).tolist())


class OfProcess(Stream):
    def __iter__(self):
        return iter(random.Random(os.getpid()).sample(range(self.n), self.n))


class Seeded(Stream):
    """With a line of its own."""

    line = None

    def __iter__(self):
        return iter(self.line.run(random=random, torch=torch)["rng"].sample(range(self.n), self.n))


class ByEpoch(Stream):
    def __init__(self, n):
        super().__init__(n)
        self.epoch = 0

    def __iter__(self):
        return (self.epoch + i for i in range(self.n))


class Counting(ByEpoch):
    def __iter__(self):
        yield from super().__iter__()
        self.epoch += 1


def test_a_stream_that_changes_while_it_is_read():
    loader, ctx = weft.shard_data(DataLoader(Counting(4)), weft.local())
    with told("data/order/stream_state.py", "changes while it is read") as it:
        [read(loader) for _ in range(2)]
    loader, _ = weft.shard_data(DataLoader(with_line(ByEpoch, it, "")(4)), ctx)
    assert [read(loader) for _ in range(2)] == [[0, 1, 2, 3], [1, 2, 3, 4]]


def test_a_stream_that_yields_other_samples_when_it_is_read_again():
    def make(n=32):
        return DataLoader(Entropy(n), batch_size=2)

    _, position = begun(make)
    loader, _ = weft.shard_data(make(), weft.local())
    loader.load_state_dict(position)
    with told("data/split/stream_samples.py", "yields other samples when it is read again") as it:
        read(loader)
    loader.load_state_dict(position)
    it.run(loader=loader)
    assert loader.epoch == 1 and len(read(loader)) == 32
    _, position = begun(streamed())
    loader, _ = weft.shard_data(streamed(1)(), weft.local())  # a stream that became shorter
    loader.load_state_dict(position)
    with told("data/split/stream_samples.py", "yields other samples when it is read again") as it:
        read(loader)
    loader.load_state_dict(position)
    it.run(loader=loader)
    assert loader.epoch == 1 and read(loader) == [0]


def test_a_stream_that_yields_other_samples_in_another_worker():
    loader, ctx = weft.shard_data(DataLoader(OfProcess(8), batch_size=2, num_workers=2), weft.local())
    batches = iter(loader)
    with told("data/split/stream_samples.py", "in another worker process") as it:
        list(batches)
    loader, _ = weft.shard_data(DataLoader(seeded(it), batch_size=2, num_workers=2), ctx)
    assert sorted(read(loader)) == [*range(8)]


def seeded(it):
    stream = Seeded(8)
    stream.line = it
    return stream


def test_a_loader_that_continues_the_epochs_of_another_one():
    data, ctx = torch.arange(8), weft.local()
    read(weft.shard_data(DataLoader(data), ctx)[0])
    loader, _ = weft.shard_data(DataLoader(data), ctx)
    with told("data/split/sharded_loader.py", "continues the epochs of another one") as it:
        _ = loader.epoch
    it.run(loader=loader)
    assert loader.epoch == 0


# -- on ranks --------------------------------------------------------------------------------------------


def together(ctx, loader):
    return sorted(itertools.chain(*weft.collectives.gather_objects(read(loader), ctx)))


class Permuted(Sampler):
    def __init__(self, rng):
        self.rng = rng

    def __len__(self):
        return 8

    def __iter__(self):
        return iter(self.rng.permutation(8).tolist())


def other_orders(ctx):
    loader, _ = weft.shard_data(sampled(samplers.Entropy)(), ctx)
    it = Told()
    if ctx.rank == 0:
        read(loader)
    ctx.agree("one rank was first", {})
    if ctx.rank == 1:
        with told("data/split/read_plan.py", "in different orders") as it:
            read(loader)
    it.fix = weft.collectives.gather_objects(it.fix, ctx)[1]
    rng = it.run(numpy=np, ctx=ctx)["rng"]
    loader, _ = weft.shard_data(DataLoader(range(8), batch_size=2, sampler=Permuted(rng)), ctx)
    assert together(ctx, loader) == [*range(8)]


def other_samples(ctx):
    loader, _ = weft.shard_data(DataLoader(Entropy(8), batch_size=2), ctx, uneven="drop")
    it = Told()
    if ctx.rank == 0:
        read(loader)
    ctx.agree("one rank was first", {})
    if ctx.rank == 1:
        with told("data/split/stream_samples.py", "compare_order(world, begun") as it:
            read(loader)
    it.fix = weft.collectives.gather_objects(it.fix, ctx)[1]
    loader, _ = weft.shard_data(DataLoader(seeded(it), batch_size=2), ctx, uneven="drop")
    assert together(ctx, loader) == [*range(8)]


def other_numbers_of_batches(ctx):
    def mine():
        return DataLoader(range(8 * ctx.rank, 8 + 4 * ctx.rank), batch_size=2)

    def some():
        return DataLoader(Sharded([[0, 1, 2, 3], [4, 5]]), batch_size=2)

    for make, options, whole in ((mine, {"already_sharded": True}, 12), (some, {"mode": "shards"}, 6)):
        with told("data/split/uneven_ranks.py", "the ranks have different numbers of batches") as it:
            read(weft.shard_data(make(), ctx, **options)[0])
        it.fix = it.fix.replace("...", "**options")
        assert together(ctx, it.run(loader=make(), ctx=ctx, options=options)["loader"]) == [*range(whole)]


def batches_without_some_samples(ctx):
    loaders = [DataLoader(pairs(8), batch_size=2, collate_fn=good_only) for _ in range(2)]
    loader, again = (weft.shard_data(one, ctx)[0] for one in loaders)
    with told("data/split/real_batches.py", "batches do not hold the samples that were read") as it:
        _ = [loader.share for _ in loader]
    model = nn.Linear(4, 3)
    for x, y in again:
        it.run(ctx=ctx, model=model, x=x, y=y, cross_entropy=cross_entropy)["loss"].backward()


def an_evaluation(ctx):
    torch.manual_seed(0)
    model, ctx = weft.fully_shard(nn.Linear(4, 3), ctx)
    whole = DataLoader(pairs(3), batch_size=1)
    loader, _ = weft.shard_data(whole, ctx, uneven="empty")
    place = nullcontext(Told())
    if ctx.rank == 1:
        place = told("data/lock_step.py", "an evaluation got a batch without rows")
    with place as it, torch.no_grad():
        for x, y in loader:
            cross_entropy(model(x), y)
    it.fix = weft.collectives.gather_objects(it.fix, ctx)[1]
    names = {"model": model, "cross_entropy": cross_entropy, "total": 0.0, "count": 0}
    with torch.no_grad():
        names = it.run(loader=whole, ctx=ctx, **names)
    assert weft.reduce(torch.tensor(names["count"]), ctx) == 3


def on_ranks(ctx):
    other_orders(ctx)
    other_samples(ctx)
    other_numbers_of_batches(ctx)
    an_evaluation(ctx)  # before counts are added up, which a program does that knows of them
    batches_without_some_samples(ctx)


@pytest.mark.slow
def test_on_ranks():
    run_ranks(on_ranks, 2)
