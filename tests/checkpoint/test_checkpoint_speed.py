"""Checkpoints of many tensors, many pieces, many steps: time that grows as they do, and no faster.

Times are of the processor, and are compared with those of other work in the same process: no machine is too slow.
"""

import itertools
import json
import time

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import weft
from tests.variants import variants
from weft.checkpoint.format.manifest import FileEntry, Manifest, Piece, TensorEntry, check, read_manifest


class _Many(nn.Module):
    def __init__(self, count):
        super().__init__()
        for index in range(count):
            self.register_buffer(f"value{index}", torch.full((4,), float(index)))


def _seconds(work):
    """What a call takes."""
    start = time.process_time()
    work()
    return time.process_time() - start


def _restore_s(folder, count):
    """Seconds for one restore, the better of two."""
    return _restore_and_load_s(folder, count)[0]


def _restore_and_load_s(folder, count):
    """Seconds for one restore, and for the same values with safetensors alone; the better of two, in turns."""
    model = _Many(count)
    state, ctx = weft.checkpointable({"model": model}, weft.local())
    weft.save(state, folder, 1, ctx)
    (path,) = folder.glob("*/*.safetensors")

    def load():
        values = safetensors.torch.load_file(path)
        for name, value in model.named_buffers():
            value.copy_(values[f"model/{name}"])

    taken = []
    for _ in range(2):
        for value in model.buffers():
            value.zero_()
        restored = _seconds(lambda: weft.restore(state, folder, ctx))
        assert all(bool((value == index).all()) for index, value in enumerate(model.buffers()))
        taken.append((restored, _seconds(load)))
    return tuple(map(min, zip(*taken, strict=True)))


def test_restore_takes_time_in_proportion_to_the_number_of_tensors(tmp_path):
    _restore_s(tmp_path / "first", 100)
    few, many = (_restore_s(tmp_path / str(count), count) for count in (500, 4_000))
    assert many < 24 * few, (few, many)  # 64 times as long if it were quadratic


@pytest.mark.slow
def test_40_000_tensors_are_restored_in_8_times_what_safetensors_takes(tmp_path):
    restored, loaded = _restore_and_load_s(tmp_path, 40_000)  # 2.2 s and 0.55 s on a slow machine of 2026
    assert restored < 8 * loaded, (restored, loaded)


# -- pieces ------------------------------------------------------------------------------------------


def _cut(shape, counts):
    """A tensor cut into pieces of one size along each dimension."""
    size = tuple(most // count for most, count in zip(shape, counts, strict=True))
    places = itertools.product(*(range(0, most, step) for most, step in zip(shape, size, strict=True)))
    pieces = tuple(Piece(file="a.safetensors", offsets=tuple(place), shape=size) for place in places)
    return TensorEntry(dtype="float32", shape=shape, pieces=pieces)


def _manifest(entry):
    files = {"a.safetensors": FileEntry(bytes=2**40, hash="sha256", digest="0" * 64)}
    return Manifest(step=1, world_size=1, tensors={"x": entry}, values={}, ranks=[{}], files=files)


WIDE = {
    "first": ((16_000, 4, 4), (16_000, 1, 1)), "second": ((4, 16_000, 4), (1, 16_000, 1)),
    "last": ((4, 4, 16_000), (1, 1, 16_000)), "all": ((250, 64, 8), (125, 32, 4)), "two": ((4, 400, 40), (1, 400, 40)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dimension", ["second", "all", *variants("first", "last", "two")])
def test_a_manifest_of_16_000_pieces_is_checked_in_no_more_than_linear_time(tmp_path, dimension):
    entry = _cut(*WIDE[dimension])
    assert len(entry.pieces) == 16_000
    text = _manifest(entry).text()
    (tmp_path / "manifest.json").write_bytes(text)
    assert read_manifest(tmp_path).tensors["x"] == entry
    parsed, checked = (
        min(_seconds(lambda: json.loads(text)) for _ in range(3)),
        min(_seconds(lambda: read_manifest(tmp_path)) for _ in range(3)),
    )
    assert checked < 100 * parsed, (parsed, checked)  # 13 to 20 times; thousands if pieces were compared in pairs
    # In the middle, one is there twice and another is not.
    wrong = TensorEntry(dtype="float32", shape=entry.shape, pieces=(*entry.pieces[:8000], *entry.pieces[7999:-1]))
    assert "or pieces that overlap" in str(check(_manifest(wrong)))


_SIDE = st.tuples(st.integers(0, 3), st.integers(0, 3))


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(st.data())
def test_pieces_cover_a_tensor_if_each_element_is_in_one_of_them(data):
    dims = data.draw(st.integers(0, 3))
    shape = tuple(data.draw(st.integers(0, 4)) for _ in range(dims))
    if data.draw(st.booleans()):  # any pieces
        sides = data.draw(st.lists(st.tuples(*[_SIDE] * dims), max_size=4))
        blocks = [tuple((min(at, n), min(size, n - min(at, n))) for (at, size), n in zip(side, shape, strict=True))
                  for side in sides]  # fmt: skip
    else:  # cut in two again and again, then perhaps moved
        blocks = [tuple((0, n) for n in shape)]
        for _ in range(data.draw(st.integers(0, 4)) if dims else 0):
            block = blocks.pop(data.draw(st.integers(0, len(blocks) - 1)))
            dim = data.draw(st.integers(0, dims - 1))
            (at, size), where = block[dim], data.draw(st.integers(0, 4)) % (block[dim][1] + 1)
            blocks += [(*block[:dim], side, *block[dim + 1 :]) for side in ((at, where), (at + where, size - where))]
        if data.draw(st.booleans()):
            blocks[-1] = data.draw(st.sampled_from(blocks))
    count = torch.zeros(shape, dtype=torch.int64)
    for block in blocks:
        count[tuple(slice(at, at + size) for at, size in block)] += 1
    pieces = tuple(
        Piece(file="a.safetensors", offsets=tuple(at for at, _ in b), shape=tuple(size for _, size in b))
        for b in blocks
    )
    wrong = check(_manifest(TensorEntry(dtype="float32", shape=shape, pieces=pieces)))
    assert (not wrong) == bool((count == 1).all()), (shape, blocks)


def test_a_tensor_cut_in_every_dimension_it_has_is_refused_and_takes_no_time():
    shape = (2,) * 40
    piece = Piece(file="a.safetensors", offsets=(0,) * 40, shape=(1,) * 40)
    start = time.process_time()
    assert check(_manifest(TensorEntry(dtype="float32", shape=shape, pieces=(piece,) * 100)))
    assert time.process_time() - start < 1


# -- many checkpoints --------------------------------------------------------------------------------


def _save_s(folder, kept, tensors):
    """Seconds of the processor for a save where so many are kept, for each of these numbers, measured in turns."""
    state, ctx = weft.checkpointable({"model": _Many(tensors)}, weft.local())
    taken = {keep: [] for keep in kept}
    for keep in kept:
        for step in range(keep + 2):
            weft.save(state, folder / str(keep), step, ctx, keep=keep)
    for turn in range(2, 12):
        for keep in kept:
            start = time.process_time()
            weft.save(state, folder / str(keep), keep + turn, ctx, keep=keep)
            taken[keep].append(time.process_time() - start)
    for keep in kept:
        assert len(list((folder / str(keep)).glob("step-*"))) == keep
    return [min(taken[keep]) for keep in kept]


@pytest.mark.slow
@pytest.mark.parametrize("tensors", [50, pytest.param(2_000, marks=pytest.mark.variant)])
def test_keeping_100_costs_at_most_twice_what_keeping_10_does(tmp_path, tensors):
    few, many = _save_s(tmp_path, (10, 100), tensors)
    assert many < 2 * few, (few, many)
