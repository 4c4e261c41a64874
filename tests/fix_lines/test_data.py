"""Batch sizes, collate functions, mixtures, sequences in parts, and windows: `weft.data`."""

import copy
import types

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset

import weft
from tests.fix_lines.told import printed, told
from weft.testing import fake, run_ranks


def with_line(kind, it, fill, **names):
    """The class with the method of the line; `fill` is what the program has where the line says `...`."""
    it.fix = it.fix.replace("...", fill)
    methods = {name: value for name, value in it.run(**names).items() if isinstance(value, types.FunctionType)}
    return type(kind.__name__, (kind,), methods)


def loader_of(it, data, **options):
    """The loader of the line, over this data."""
    it.fix = it.fix.replace("...", "data, **options")
    return it.run(DataLoader=DataLoader, data=data, options=options)["loader"]


def from_workers(loader):
    """What they raise."""
    batches = iter(loader)
    with pytest.raises(weft.errors.WeftError) as caught:
        next(batches)
    batches._shutdown_workers()  # now: by the garbage collector it takes torch five seconds per worker
    return str(caught.value)


# -- batch sizes -----------------------------------------------------------------------------------------


def test_batch_math():
    ctx = fake(0, 4)
    for wrong in ({"per_rank": 0}, {"accumulate": 2}, {"per_rank": 3, "global_batch": 8}):
        with told("data/batch_size.py", "batch_math: {problem}") as it:
            weft.data.batch_math(ctx, **wrong)
        it.run(ctx=ctx)


def test_no_batch_size_fits():
    ctx, memory = weft.local(), 7000
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()) for _ in range(8)))

    def trial(size):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()), lambda _: None):
            model(torch.ones(size, 4))
        if sum(kept) > memory:
            raise MemoryError

    with told("data/batch_size.py", "f'start={start}, smallest={smallest}'") as it:
        weft.data.find_batch_size(trial, ctx, start=0)
    it.run(trial=trial, ctx=ctx)
    with told("data/batch_size.py", "f'shrink({size}) = {after}'") as it:
        weft.data.find_batch_size(trial, ctx, shrink=lambda size: size)
    it.run(trial=trial, ctx=ctx)
    with told("data/batch_size.py", "f'out of memory with {listed(tried)}'") as it:
        weft.data.find_batch_size(trial, ctx, smallest=110)
    it.run(trial=trial, ctx=ctx)
    memory = 100
    with told("data/batch_size.py", "f'out of memory with {listed(tried)}'") as it:
        weft.data.find_batch_size(trial, ctx, start=8)
    ctx = it.run(model=model, ctx=ctx, Block=nn.Sequential)["ctx"]
    assert weft.data.find_batch_size(trial, ctx, start=8) > 1


def test_what_split_between_cannot_cut():
    ctx = fake(1, 2)
    with told("data/batch_size.py", "differ in length") as it:
        weft.data.split_between({"text": ["a", "b"], "id": [0]}, ctx)
    it.run(texts=["a", "b"], ids=[0, 1], ctx=ctx)
    value = (torch.ones(2), torch.ones(3))  # two samples, not columns
    with told("data/batch_size.py", "differ in length") as it:
        weft.data.split_between(value, ctx)
    it.run(value=value, ctx=ctx)
    for value in ((text for text in "ab"), {"a", "b"}):
        with told("data/batch_size.py", "cannot be cut") as it:
            weft.data.split_between(value, ctx)
        it.run(value=value, ctx=ctx)
    assert "sorted" in it.fix  # ranks have a set in different orders


# -- collate functions -----------------------------------------------------------------------------------


def test_padding_and_batches_of_like_length():
    lengths = [3, 1, 2]
    with told("data/collate.py", "check_count('pad_collate'") as it:
        weft.data.pad_collate(multiple_of=0)
    it.run()
    for wrong in ({"batch_size": 0}, {"batch_size": 2, "pool": 0}):
        with told("data/collate.py", "check_count('length_batches'") as it:
            weft.data.length_batches(lengths, **wrong)
        it.run(lengths=lengths)
    with told("data/collate.py", "an index that is out of range") as it:
        weft.data.padding_share(lengths, [[0, 3]])
    it.run(lengths=lengths)


def test_packing():
    with told("data/pack_collate.py", "check_count('pack_collate'") as it:
        weft.data.pack_collate(multiple_of=0)
    it.run()
    pairs = [(torch.ones(length), torch.ones(length + 1)) for length in (2, 3)]
    for samples in (pairs, [1.0, 2.0]):
        with told("data/pack_collate.py", "a sample has no length") as it:
            list(DataLoader(samples, batch_size=2, collate_fn=weft.data.pack_collate()))
        assert len(list(loader_of(it, samples, batch_size=2))) == 1
    tokens = [x for x, _ in pairs]  # the other way
    assert [row.shape for row, *_ in DataLoader(tokens, batch_size=2, collate_fn=weft.data.pack_collate())] == [(1, 5)]


# -- mixtures --------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    """Without a length."""

    def __init__(self, n=4):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))


class Untrue(Stream):
    def __len__(self):
        return self.n + 2


class Resumable(Stream):
    at = 0

    def __iter__(self):
        for self.at in range(self.at + 1, self.n + 1):  # noqa: B020
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Mapped(Dataset):
    """Without a length."""

    def __getitem__(self, index):
        return index


class Long(Mapped):
    def __len__(self):
        return 2**54


def mixed(first, second=range(4), **options):
    return weft.data.mix({"text": (first, 1), "code": (second, 1)}, **options)


def test_arguments_of_mix():
    text, code = range(4), range(8)
    with told("data/mixture.py", "check_choice('mix', 'stop'") as it:
        mixed(text, stop="last")
    it.run(text=text, code=code)
    with told("data/mixture.py", "check_count('mix', 'seed'") as it:
        mixed(text, seed=-1)
    it.run(text=text, code=code)
    for sources in ({}, [(text, 1)]):
        with told("data/mixture.py", "expected='a dict of sources'") as it:
            weft.data.mix(sources)
        it.run(text=text, code=code)
    with told("data/mixture.py", "'mix: a source cannot be used', found=found, expected=expected") as it:
        weft.data.mix({"text": text})
    it.run(text=text, code=code)


def test_sources_that_cannot_be_mixed():
    text, code, weight = range(4), range(8), 1
    for wrong in (0, "1", float("nan")):
        with told("data/mixture.py", "what, found=repr(weight)") as it:
            weft.data.mix({"text": (text, wrong)})
        it.run(text=text, code=code)
    with told("data/mixture.py", "a source would never be read") as it:
        weft.data.mix({"text": (text, 1), "code": (code, 1e-300)})
    it.run(text=text, code=code)
    stream = Stream()
    with told("data/mixture.py", "expected='a stream of its own for each'") as it:
        mixed(stream, stream)
    assert sorted(mixed(stream, it.run(copy=copy, stream=stream)["other"])) == [0, 0, 1, 1, 2, 2, 3, 3]
    sources = {"text": ([], 1), "code": (code, 1)}
    with told("data/mixture.py", "expected='samples, and a length'") as it:
        weft.data.mix(sources)
    it.run(sources=sources)
    assert len(weft.data.mix(sources)) == 8
    with told("data/mixture.py", "expected='samples, and a length'") as it:
        mixed(Mapped())
    assert len(mixed(with_line(Mapped, it, "4")())) == 8
    sources = {"text": (7, 1), "code": (code, 1)}
    with told("data/mixture.py", "an iterable that can be read again and again") as it:
        weft.data.mix(sources)
    it.run(text=text, code=code)
    for dataset in ({"train": code}, iter(code)):
        sources["text"] = (dataset, 1)
        with told("data/mixture.py", "an iterable that can be read again and again") as it:
            weft.data.mix(sources)
        it.run(sources=sources, dataset=dataset, weight=weight)
        assert len(weft.data.mix(sources)) == 16
    with told("data/mixture.py", "an iterable that can be read again and again") as it:
        mixed(iter(code))
    sources = {"text": (Long(), 1), "code": (Long(), 1)}
    with told("data/mixture.py", "an epoch is too long") as it:
        weft.data.mix(sources)
    it.run(sources=sources)


def test_reading_mixtures():
    mixture = mixed(Stream())
    with told("data/mixture.py", "len: a mixture without an end") as it:
        len(mixture)
    it.run(mixture=mixture)
    loader, ctx = DataLoader(mixture, num_workers=2), weft.local()
    it = printed("data/mixture.py", "several workers would each read the whole mixture", from_workers(loader))
    assert len(list(it.run(loader=loader, ctx=ctx)["loader"])) == len(list(mixture))
    with told("data/mixture.py", "a stream does not yield what its length says") as it:
        list(mixed(Untrue(), range(8)))
    assert len(list(mixed(with_line(Untrue, it, "self.n")()))) == 8
    with told("data/mixture.py", "a stream does not yield what its length says") as it:
        list(mixed(Stream(0)))
    assert len(list(mixed(with_line(Stream, it, "range(4)")(0)))) == 8
    mixture = mixed(range(4))
    for use in (lambda: mixture[8], lambda: mixture.source_of([9])):
        with told("data/order/mixed_order.py", "there is no such position") as it, pytest.raises(IndexError):
            use()
        it.run(mixture=mixture)


def test_a_state_of_another_mixture():
    mixture = mixed(Resumable(), seed=1)
    with told("data/mixture.py", "the state belongs to another mixture") as it:
        mixture.load_state_dict(mixed(Resumable()).state_dict())
    it.run(mixture=mixture, saved_epoch=0)
    expected = list(mixture)
    data = [DataLoader(mixed(Resumable(), seed=seed)) for seed in (0, 1)]
    loaders = [weft.shard_data(one, weft.local(), mode="dispatch")[0] for one in data]
    for _ in loaders[0]:
        loaders[1].load_state_dict(loaders[0].state_dict())
        break
    with told("data/mixture.py", "the state belongs to another mixture"):
        list(loaders[1])
    loaders[1].set_epoch(1)
    assert [int(sample) for sample in loaders[1]] == expected


# -- sequences in parts ----------------------------------------------------------------------------------


def test_split_sequence():
    ctx, x = fake(0, 2, mesh={"context": 2}), torch.arange(18).view(2, 9)
    batch = x[:, :8]
    with told("data/split_sequence.py", "check_count('split_sequence', 'dim'") as it:
        weft.data.split_sequence(batch, ctx, dim=-1)
    it.run(batch=batch, ctx=ctx)
    with told("data/split_sequence.py", "check_choice('split_sequence', 'order'") as it:
        weft.data.split_sequence(batch, ctx, order="stripes")
    it.run(batch=batch, ctx=ctx)
    with told("data/split_sequence.py", "have sequences of different lengths") as it:
        weft.data.split_sequence((x, x[:, 1:]), ctx)
    it.run(x=x, ctx=ctx)
    with told("data/split_sequence.py", "have sequences of different lengths") as it:
        weft.data.split_sequence(batch[0], ctx)
    it.run(batch=batch[0], ctx=ctx)


def nested(rows):
    return {"input_ids": torch.nested.nested_tensor([row["input_ids"] for row in rows], layout=torch.jagged)}


def test_rows_of_a_length_that_cannot_be_split():
    ctx = fake(0, 2, mesh={"context": 2})
    rows = [{name: torch.arange(length) for name in ("input_ids", "labels")} for length in (3, 7)]
    with told("data/split_sequence.py", "cannot be split along a sequence") as it:
        weft.data.split_sequence(nested(rows), ctx)
    loaders = [loader_of(it, rows, batch_size=2)]
    with told("data/split_sequence.py", "places cannot be split over") as it:
        weft.data.split_sequence(weft.data.pad_collate()(rows), ctx)
    loaders.append(loader_of(it, rows, batch_size=2))
    for loader in loaders:
        for batch in loader:
            assert weft.data.split_sequence(batch, ctx)["labels"].tolist() == [[0, 1, -100, -100], [0, 1, 6, -100]]


def test_what_stays_whole():
    ctx, x, at, ids = fake(0, 2, mesh={"context": 2}), *torch.arange(24).view(3, 1, 8)
    model = lambda x, at, ids: (x.shape, at.shape, ids.shape)  # noqa: E731
    with told("data/split_sequence.py", "is not in the batch") as it:
        weft.data.split_sequence((x, x, at, ids), ctx, whole="ids")
    assert it.run(x=x, y=x, at=at, ids=ids, ctx=ctx, model=model)["at"].tolist() == [[8, 9, 14, 15]]


def in_worker(rows):
    return weft.data.split_sequence(torch.stack(rows), fake(0, 2, mesh={"context": 2}))


def test_split_sequence_in_a_worker():
    data, ctx = list(torch.arange(16).view(2, 8)), fake(0, 2, mesh={"context": 2})
    text = from_workers(DataLoader(data, batch_size=2, num_workers=1, collate_fn=in_worker))
    it = printed("data/split_sequence.py", "called in a worker of a DataLoader", text)
    it.fix = text.partition("fix:")[2].strip()  # both lines of it
    part = it.run(loader=DataLoader(data, batch_size=2, num_workers=1), ctx=ctx)["part"]
    assert part.tolist() == [[0, 1, 6, 7], [8, 9, 14, 15]]


# -- windows ---------------------------------------------------------------------------------------------


def pairs(*sizes):
    return [(torch.ones(size, 2), torch.zeros(size, dtype=torch.int64)) for size in sizes]


def windows_of(loader, steps=2, **options):
    return weft.accumulate_grads(nn.Linear(2, 2), loader, weft.local(), steps=steps, **options)[:2]


class Untold:
    """Batches whose number is said wrong."""

    def __init__(self, n, said=0):
        self.n, self.said = n, said

    def __len__(self):
        return self.said

    def __iter__(self):
        return iter(pairs(*[2] * self.n))


class Foreign:
    """Batches with a state of their own."""

    at = 0

    def __len__(self):
        return 5

    def __iter__(self):
        return iter(pairs(2, 2, 2, 2, 2))

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_shares_of_windows():
    data = list(zip(torch.ones(8, 2), torch.zeros(8).long(), strict=True))
    loader, ctx = weft.shard_data(DataLoader(data, batch_size=2), weft.local())
    model, loader, _ = weft.accumulate_grads(nn.Linear(2, 2), loader, ctx, steps=2)
    names = {"model": model, "cross_entropy": cross_entropy}
    with told("data/windows/loader.py", "a loader of windows has no share") as it:
        _ = loader.share
    for window in loader:
        it.run(window=window, **names)
    with told("data/windows/window.py", "there is no current micro-batch") as it:
        _ = window.share
    for window in loader:
        it.run(window=window, **names)
    with told("data/windows/loader.py", "check_count('load_state_dict'") as it:
        loader.load_state_dict({**loader.state_dict(), "windows": -1})
    it.run(loader=loader, saved_loader=loader)


def test_windows_are_not_batches():
    model, loader = windows_of(pairs(2, 2, 2))
    window = next(iter(loader))
    for use in (lambda: model(window), lambda: window[0], lambda: window["x"]):
        with told("data/windows/window.py", "f'a window was {what}'") as it:
            use()
        it.run(loader=loader)
    with told("data/windows/window.py", "f'a window was {what}'") as it, pytest.raises(AttributeError):
        window.to("cpu")
    it.run(loader=loader)
    with told("data/windows/window.py", "f'a window was {what}'") as it:
        for x, y in loader:  # noqa: B007
            pass
    it.run(loader=loader)
    list(window)
    with told("data/windows/window.py", "a window was iterated a second time") as it:
        list(window)
    assert len(it.run(loader=loader)["batches"]) == 1
    window = next(iter(loader))
    count = lambda batch: len(batch[1])  # noqa: E731
    with told("data/windows/window.py", "a function was given after the window was begun") as it:
        for _ in window:
            window.denominator(count)
    window = next(iter(loader))
    assert it.run(window=window, count=count)["tokens"] == 4
    window = next(iter(loader))
    with told("data/windows/window.py", "total_count(counts") as it:
        window.denominator(-1)
    it.run(window=window)


def unweighted(ctx):
    model, ctx = weft.replicate(nn.Linear(2, 2), ctx)
    model, loader, ctx = weft.accumulate_grads(model, pairs(2, 3), ctx, steps=2)
    with told("data/windows/window.py", "micro-batches of this window are not weighted") as it:
        for window in loader:
            for x, y in window:
                cross_entropy(model(x), y).backward()
    train(it, model, loader)


def train(it, model, loader):
    for window in loader:
        for x, y in window:
            it.run(model=model, x=x, y=y, window=window, cross_entropy=cross_entropy)["loss"].backward()


@pytest.mark.slow
def test_losses_of_windows_that_are_not_weighted():
    run_ranks(unweighted, 2)


def test_losses_that_are_divided_by_the_number_of_batches():
    model, loader = windows_of(pairs(2, 3))
    with told("data/windows/window.py", "mean losses divided by len(window) are not the mean") as it:
        for window in loader:
            for x, y in window:
                (cross_entropy(model(x), y) / len(window)).backward()
    train(it, model, loader)
    model, loader = windows_of(pairs(2, 3))
    over_tokens = it.fix.rpartition("; over tokens: ")[2]
    for window in loader:
        for x, y in window:
            names = {"loss_sum": cross_entropy(model(x), y, reduction="sum"), "window": window, "count": 5}
            eval(over_tokens, names).backward()


def test_numbers_of_micro_batches():
    for wrong, n in ((0, 5), (7, 5)):
        _, loader = windows_of(Untold(n, wrong))
        with told("data/windows/micro_batches.py", "accumulate_grads: the loader {what}") as it:
            for window in loader:
                list(window)
    assert sum(len(list(w)) for w in windows_of(with_line(Untold, it, "self.n")(5))[1]) == 5
    loader = pairs(2, 2, 2)
    for wrong in (0, lambda window: 0):
        with told("data/windows/splitter.py", "check_count('accumulate_grads', what, steps") as it:
            windows_of(loader, steps=wrong)
        it.run(model=nn.Linear(2, 2), loader=loader, ctx=weft.local())


def test_the_position_of_windows_by_a_schedule():
    def windows_of():
        loader, ctx = weft.shard_data(DataLoader(range(12), batch_size=1), weft.local())
        return loader, weft.accumulate_grads(nn.Linear(1, 1), loader, ctx, steps=lambda window: 1 + window)[1]

    loader, windows = windows_of()
    reading = iter(windows)
    for _ in range(2):
        list(next(reading))
    with told("data/split/sharded_loader.py", "how many windows were read") as it:
        loader.state_dict()
    state, _ = eval(it.fix, {"weft": weft, "windows": windows, "ctx": weft.local()})
    _, again = windows_of()
    again.load_state_dict(state.objects["loader"].state_dict())
    assert len(next(iter(again))) == 3


def test_states_between_windows():
    _, loader = windows_of(Foreign(), remainder="carry")
    window = next(iter(loader))
    with told("data/windows/splitter.py", "a window in progress cannot be saved") as it:
        for _ in window:
            loader.state_dict()
    assert it.fix.startswith("leave `for batch in window` first; after a break:")
    for _ in window:
        pass  # as it says
    loader.state_dict()
    with told("data/windows/splitter.py", "carried over cannot be saved") as it:
        for window in loader:
            list(window)
        loader.state_dict()
    loader = it.run(model=nn.Linear(2, 2), loader=Foreign(), ctx=weft.local())["loader"]
    for window in loader:
        list(window)
    loader.state_dict()
