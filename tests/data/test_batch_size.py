"""batch_math, find_batch_size, split_between."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import weft
from weft.testing import fake, run_ranks


def test_any_two_sizes_give_the_third():
    ctx = fake(0, 8, mesh={"data": 4, "tensor": 2})
    found = weft.data.batch_math(ctx, per_rank=2, accumulate=3, samples=100, tokens_per_sample=10)
    assert (found.global_batch, found.ranks, found.steps_per_epoch, found.tokens_per_step) == (24, 4, 5, 240)
    assert weft.data.batch_math(ctx, global_batch=24, accumulate=3).per_rank == 2
    assert weft.data.batch_math(ctx, global_batch=24, per_rank=2).accumulate == 3
    assert weft.data.batch_math(ctx, per_rank=2).global_batch == 8
    assert weft.data.batch_math(ctx, per_rank=2, global_batch=24, accumulate=3, samples=100, drop_last=True) == (
        weft.data.BatchMath(per_rank=2, ranks=4, accumulate=3, global_batch=24, steps_per_epoch=4)
    )


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"per_rank": 2, "global_batch": 24, "accumulate": 2}, "2 x 4 ranks x 2 = 16, not 24"),
        ({"global_batch": 10}, r"10 / \(4 ranks x 1\) = 2.5"),
        ({"global_batch": 12, "per_rank": 2}, r"12 / \(2 x 4 ranks\) = 1.5"),
        ({"accumulate": 2}, "accumulate=2"),
        ({"per_rank": 0}, "per_rank=0"),
        ({"per_rank": True}, "per_rank=True"),
    ],
)
def test_sizes_that_contradict_each_other_raise_with_the_arithmetic(sizes, text):
    with pytest.raises(ValueError, match=f"(?s)batch_math:.*found:    .*{text}.*fix:"):
        weft.data.batch_math(fake(0, 4), **sizes)


@pytest.mark.slow
def test_sizes_that_are_tried():
    tried, alive = [], []

    def trial(size):
        big = torch.ones(3)
        alive.append(weakref.ref(big))
        assert all(ref() is None for ref in alive[:-1])
        tried.append(size)
        if size > 8:
            raise RuntimeError("CUDA out of memory.") if size % 2 else MemoryError

    gc.freeze()  # what the other tests left behind need not be looked at each time
    assert weft.data.find_batch_size(trial, weft.local()) == 8
    gc.unfreeze()
    assert tried[:6] == [128, 115, 103, 92, 82, 73] and tried[-2:] == [9, 8]
    tried.clear()
    assert weft.data.find_batch_size(trial, weft.local(), start=64, shrink=lambda n: n // 2) == 8
    assert tried == [64, 32, 16, 8]


def test_trials_begin_with_untouched_objects():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(model.parameters())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    seen = []

    def trial(size):
        assert optimizer.state_dict()["state"] == {} and all(p.grad is None for p in model.parameters())
        model(torch.randn(size, 2)).sum().backward()
        optimizer.step()
        seen.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        model.eval()
        if size > 3:
            raise torch.OutOfMemoryError

    state = torch.get_rng_state()
    assert weft.data.find_batch_size(trial, weft.local(), start=4, objects=[model, optimizer]) == 3
    assert model.training and all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert optimizer.state_dict()["state"] == {} and torch.equal(state, torch.get_rng_state())


class _WithDevice(weft.engines.TorchEngine):
    """An engine whose device has random numbers of its own."""

    def rng_state(self, device):
        return torch.tensor(_drawn)

    def set_rng_state(self, device, state):
        _drawn[:] = state.tolist()


_drawn = [0]


def test_random_numbers_of_the_device_and_memory_are_as_before(monkeypatch):
    parameter = nn.Parameter(torch.ones(()))
    model = nn.Module()
    model.register_parameter("weight", parameter)
    at_the_end = []
    monkeypatch.setattr(weft.data.batch_size.gc, "collect", lambda: at_the_end.append(parameter.grad))

    def trial(size):
        assert _drawn == [0] and parameter.grad is None
        _drawn[0] += 1
        parameter.grad = torch.ones(())
        if size > 1:
            raise torch.OutOfMemoryError

    assert weft.data.find_batch_size(trial, weft.local(engine=_WithDevice()), start=2, objects=[model]) == 1
    assert _drawn == [0]
    assert at_the_end == [None]  # gradients are gone when memory is given back


@pytest.mark.slow
def test_errors_of_another_kind_and_no_size():
    def wrong(size):
        raise RuntimeError("a bug")

    def never(size):
        raise MemoryError

    with pytest.raises(RuntimeError, match="a bug"):
        weft.data.find_batch_size(wrong, weft.local())
    with pytest.raises(ValueError, match="(?s)found:    out of memory with 3, 2, 1.*fix:"):
        weft.data.find_batch_size(never, weft.local(), start=3)
    with pytest.raises(ValueError, match=r"(?s)found:    shrink\(3\) = 3.*fix:"):
        weft.data.find_batch_size(never, weft.local(), start=3, shrink=lambda n: n)
    with pytest.raises(ValueError, match="(?s)found:    start=0.*fix:"):
        weft.data.find_batch_size(never, weft.local(), start=0)


def _agreed(ctx):
    tried = []

    def trial(size):
        tried.append(size)
        if ctx.rank == 1 and size > 100:
            raise MemoryError

    return weft.data.find_batch_size(trial, ctx), tried


def test_all_ranks_take_the_size_of_the_smallest():
    assert run_ranks(_agreed, 2) == [(92, [128, 115, 103, 92])] * 2


def test_plain_inputs_are_split():
    def split(value, world, **options):
        return [weft.data.split_between(value, fake(rank, world), **options) for rank in range(world)]

    assert [len(part) for part in split(list(range(17)), 4)] == [5, 4, 4, 4]
    assert split((1, 2, 3), 2, pad=True) == [(1, 2), (3, 3)]
    assert (
        split([1], 3) == [[1], [], []]
        and split([1], 3, pad=True) == [[1], [1], [1]]
        and split([], 2, pad=True) == [[], []]
    )
    assert [part.tolist() for part in split(torch.arange(5), 2, pad=True)] == [[0, 1, 2], [3, 4, 4]]
    whole = {"text": ["a", "b", "c"], "id": torch.arange(3)}
    parts = split(whole, 2)
    assert parts[1]["text"] == ["c"] and parts[1]["id"].tolist() == [2] and len(whole["text"]) == 3
    assert split(range(3), 2) == [[0, 1], [2]]
    with pytest.raises(ValueError, match="(?s)found:    a: 1, b: 2.*fix:"):
        weft.data.split_between({"a": [1], "b": [1, 2]}, weft.local())
    with pytest.raises(TypeError, match="(?s)found:    generator.*fix:"):
        weft.data.split_between((i for i in range(2)), weft.local())


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_tuple_of_tensors_is_split_tensor_by_tensor(world):
    def split(value, **options):
        return [weft.data.split_between(value, fake(rank, world), **options) for rank in range(world)]

    x, y = torch.arange(10.0).view(5, 2), np.arange(5)
    parts = split((x, y))
    assert all(type(part) is tuple for part in parts)
    assert torch.equal(torch.cat([part[0] for part in parts]), x)
    assert np.array_equal(np.concatenate([part[1] for part in parts]), y)
    padded = split((x, torch.tensor(7)), pad=True)
    assert {len(part[0]) for part in padded} == {-(-5 // world)} and all(part[1] == 7 for part in padded)
    assert torch.equal(torch.cat([part["pair"][0] for part in split({"pair": (x, x), "n": [*range(5)]})]), x)
    with pytest.raises(ValueError, match="(?s)of the tuple differ in length.*found:    0: 5, 1: 4.*fix:"):
        split((x, y[1:]))
    # These are sequences: lists, and tuples of anything else.
    for value in ([x, y], (torch.tensor(1), torch.tensor(2)), (x, "name"), ("a", "b", "c"), ()):
        assert [id(item) for part in split(value) for item in part] == [id(item) for item in value]
