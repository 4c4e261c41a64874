"""What the ranks of a node want alike is read once per node, into memory that they share; or rank by rank."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import weft
from weft.checkpoint import node_memory, passing, reader
from weft.errors import CheckpointError
from weft.testing import RanksFailed, run_ranks

WIDTH = 512  # a layer is 1 MiB
MB = 1e6


def _build(ctx, *, steps, dtype=torch.float32, seed=1):
    torch.manual_seed(seed)
    model, ctx = weft.replicate(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)).to(dtype), ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.5 + step)
        optimizer.step()
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)
    return state, model, optimizer, ctx


def _values(model, optimizer):
    moments = [optimizer.state[p] for p in model.parameters()]
    return [p.detach().clone() for p in model.parameters()], [
        {key: value.clone() for key, value in entry.items()} for entry in moments
    ]


def _same(found, expected):
    (weights, moments), (wanted, wanted_moments) = found, expected
    assert all(torch.equal(a, b) for a, b in zip(weights, wanted, strict=True))
    assert len(moments) == len(wanted_moments)
    for a, b in zip(moments, wanted_moments, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def _saved(ctx, folder):
    state, model, optimizer, ctx = _build(ctx, steps=2)
    weft.save(state, folder, 1, ctx)
    return _values(model, optimizer)


def _bytes_read():
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def _restored(ctx, folder, steps):
    state, model, optimizer, ctx = _build(ctx, steps=steps, seed=2)
    held = [entry["exp_avg"] for entry in optimizer.state.values()]
    before = _bytes_read()
    weft.restore(state, folder, ctx)
    nbytes = _bytes_read() - before
    stays = all(entry["exp_avg"] is one for entry, one in zip(optimizer.state.values(), held, strict=False))
    return _values(model, optimizer), nbytes, stays


@pytest.mark.parametrize("saved_by", [1, 2])
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("steps", [0, 3])
def test_every_byte_is_read_once_per_node(tmp_path, saved_by, n, steps):
    expected = run_ranks(_saved, saved_by, tmp_path)[0]
    found = run_ranks(_restored, n, tmp_path, steps)
    for values, _, stays in found:
        _same(values, expected)
        assert stays
    once = 3 * 4 * sum(w.numel() for w in expected[0])
    assert once <= sum(nbytes for _, nbytes, _ in found) < once + n * 0.2 * MB


def _without_pipes(place, kind, how):
    if kind == "pipe:":
        raise OSError("not here")
    return _REAL_OPENED(place, kind, how)


_REAL_OPENED = node_memory._opened


def _restored_without(ctx, folder, where, steps):
    problem = OSError("not here")
    patches = {
        "offer": mock.patch.object(os, "memfd_create", side_effect=problem),
        "open": mock.patch.object(Path, "readlink", side_effect=problem),
        "other file": mock.patch.object(node_memory, "_TOKEN", 8),
        "system": mock.patch.object(node_memory, "_LEAST", 10**9),
        "pipes": mock.patch.object(node_memory, "_opened", _without_pipes),
        "many ranks": mock.patch.object(node_memory, "_MOST", 1),
    }
    with patches[where] if ctx.rank == ctx.world_size - 1 else contextlib.nullcontext():
        return _restored(ctx, folder, steps)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("where", ["offer", "open", "other file", "system", "pipes", "many ranks"])
def test_a_rank_that_cannot_share_reads_for_itself(tmp_path, where, steps):
    expected = run_ranks(_saved, 2, tmp_path)[0]
    found = run_ranks(_restored_without, 2, tmp_path, where, steps)
    for values, _, _ in found:
        _same(values, expected)
    weights = 4 * sum(w.numel() for w in expected[0])
    # Memory is shared as far as it goes; else each rank reads all of it.
    both = 3 * weights if steps else weights + 2 * 2 * weights
    least = both if where in ("pipes", "many ranks") else 2 * 3 * weights
    assert least <= sum(nbytes for _, nbytes, _ in found) < least + 1.5 * MB  # a file that is checked is read whole


def _restored_large(ctx, folder, how):
    torch.manual_seed(ctx.rank)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(12)]
    model, ctx = weft.replicate(nn.Sequential(*layers), ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)
    if how == "save":
        for p in model.parameters():
            p.grad = torch.randn(p.shape)
        optimizer.step()
        weft.save(state, folder, 1, ctx)
        for file in Path(folder).rglob("*.safetensors"):
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    real = reader.Reader.__init__

    def checked_elsewhere(self, *rest):
        real(self, *rest)
        self._checkers = dict.fromkeys(self._checkers, 99)

    def interrupted(self, *rest):
        if rest[-1].start:
            raise KeyboardInterrupt
        real_give(self, *rest)

    real_give = passing.Passing.give
    patches = {
        "another node": mock.patch.object(reader.Reader, "__init__", checked_elsewhere),
        "impatient": mock.patch.object(passing, "_PATIENCE", 0 if ctx.rank else 10_000),
        "killed": mock.patch.object(passing.Passing, "give", lambda *_: os.kill(os.getpid(), signal.SIGKILL)),
        "interrupted": mock.patch.object(passing.Passing, "give", interrupted),
    }
    only_last = how in ("killed", "interrupted") and ctx.rank != ctx.world_size - 1
    before = _bytes_read()
    with contextlib.nullcontext() if only_last or how not in patches else patches[how]:
        try:
            weft.restore(state, folder, ctx)
        except KeyboardInterrupt:
            raise RuntimeError("interrupted") from None
    return _values(model, optimizer), _bytes_read() - before


@pytest.mark.parametrize("how", ["as ever", "another node", "impatient"])
@pytest.mark.parametrize("n", [2, 3])
def test_more_than_there_are_places_for(tmp_path, how, n):
    expected = run_ranks(_restored_large, 2, tmp_path, "save")[0][0]
    found = run_ranks(_restored_large, n, tmp_path, how)
    for values, _ in found:
        _same(values, expected)
    once = 3 * 4 * sum(w.numel() for w in expected[0])
    total = sum(nbytes for _, nbytes in found)
    assert once <= total < (once + n * 0.2 * MB if how != "impatient" else n * 1.5 * once)


@pytest.mark.parametrize("how", ["killed", "interrupted"])
def test_a_rank_that_ends_while_it_passes_on_ends_the_others(tmp_path, how):
    run_ranks(_restored_large, 2, tmp_path, "save")
    begin = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_restored_large, 2, tmp_path, how)
    assert time.monotonic() - begin < 8
    assert {type(caught.value.errors.get(0))} == {weft.PeerError}


def _restored_small(ctx, folder):
    with mock.patch.object(node_memory, "_LEAST", 0):
        state, model, optimizer, ctx = _build(ctx, steps=3, dtype=torch.float64, seed=2)
        weft.restore(state, folder, ctx)
        return _values(model, optimizer)


def test_other_dtypes_are_converted_and_not_lost(tmp_path):
    weights, moments = run_ranks(_saved, 2, tmp_path)[0]
    double = (
        [w.double() for w in weights],
        [{key: value if key == "step" else value.double() for key, value in entry.items()} for entry in moments],
    )
    for values in run_ranks(_restored_small, 2, tmp_path):
        _same(values, double)


def _keeps_what_it_had(ctx, folder, steps):
    state, model, optimizer, ctx = _build(ctx, steps=steps, seed=2)
    before = _values(model, optimizer)
    with pytest.raises(CheckpointError, match=r"rank-\S+\.safetensors is damaged"):
        weft.restore(state, folder, ctx)
    _same(_values(model, optimizer), before)


@pytest.mark.parametrize("steps", [0, 3])
def test_a_flipped_byte_changes_nothing_on_any_rank(tmp_path, steps):
    run_ranks(_saved, 2, tmp_path)
    file = max(tmp_path.rglob("rank-*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    run_ranks(_keeps_what_it_had, 2, file.parent, steps)


def _refuses_on_one(ctx, folder):
    class Refuses:
        def state_dict(self):
            return {"x": 1}

        times = 0

        def load_state_dict(self, state):
            self.times += 1
            if ctx.rank == 1 and self.times == 1:  # and takes back what it had
                raise ValueError("no")

    state, model, optimizer, ctx = _build(ctx, steps=3, seed=2)
    state, ctx = weft.checkpointable({**state.objects, "z": Refuses()}, ctx)
    weft.save(state, folder, 2, ctx)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = _values(model, optimizer)
    error = CheckpointError if ctx.rank == 1 else weft.PeerError
    with pytest.raises(error, match="no"):
        weft.restore(state, folder, ctx)
    _same(_values(model, optimizer), before)


def test_an_object_that_refuses_its_state_on_one_rank_changes_nothing_on_any(tmp_path):
    run_ranks(_refuses_on_one, 2, tmp_path)


def _open_files(ctx, folder, steps):
    state, _, _, ctx = _build(ctx, steps=steps)
    handles = len(list(Path("/proc/self/fd").iterdir()))
    names = []
    for _ in range(3):
        weft.restore(state, folder, ctx)
        ctx.agree("restored")
    for handle in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            names.append(str(handle.readlink()))
    maps = Path("/proc/self/maps").read_text()
    more = len(list(Path("/proc/self/fd").iterdir())) - handles
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("weft-")]
    return [name for name in names if "weft-restore" in name], "weft-restore" in maps, more, threads


@pytest.mark.parametrize("steps", [0, 3])
def test_nothing_of_it_stays(tmp_path, steps):
    run_ranks(_saved, 2, tmp_path)
    for names, is_mapped, handles, threads in run_ranks(_open_files, 2, tmp_path, steps):
        assert (names, is_mapped, threads) == ([], False, [])
        assert handles <= 0


def _dies(ctx, folder):
    state, _, _, ctx = _build(ctx, steps=3)
    if ctx.rank == 1:
        with mock.patch("weft.checkpoint.reader.Reader.fill", side_effect=SystemExit(3)):
            weft.restore(state, folder, ctx)
    weft.restore(state, folder, ctx)


def test_a_rank_that_ends_while_it_reads_ends_the_others(tmp_path):
    run_ranks(_saved, 2, tmp_path)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_dies, 2, tmp_path)
    assert isinstance(caught.value.errors.get(0), weft.PeerError), caught.value
