"""Restoring in two passes: first all is checked, then each rank reads what it holds, in place."""

import contextlib
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import weft
from tests.variants import variant_cases
from weft.checkpoint.reader import Reader
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


@pytest.mark.parametrize(("saved_by", "n"), [(2, 1), (2, 2), *variant_cases((1, 2), (2, 4))])
@pytest.mark.parametrize("steps", [0, 3])
def test_files_are_checked_once_and_each_rank_reads_what_it_holds(tmp_path, saved_by, n, steps):
    expected = run_ranks(_saved, saved_by, tmp_path)[0]
    found = run_ranks(_restored, n, tmp_path, steps)
    for values, _, stays in found:
        _same(values, expected)
        assert stays  # what the optimizer held has its values in place
    once = 3 * 4 * sum(w.numel() for w in expected[0])
    assert (n + 1) * once <= sum(nbytes for _, nbytes, _ in found) < (n + 1) * once + n * 0.2 * MB


def _peak(ctx, folder, strategy):
    """How much the memory of this process grew while it restored, over what the state itself takes."""
    model = nn.Sequential(*(nn.Linear(2 * WIDTH, 4 * WIDTH, bias=False) for _ in range(4)))
    model, ctx = getattr(weft, strategy)(model, ctx)
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)
    weft.save(state, folder, 1, ctx)
    Path("/proc/self/clear_refs").write_text("5")
    before, places = _peak_bytes(), _places(optimizer)
    weft.restore(state, folder, ctx)
    assert _places(optimizer) == places  # moments are read in place
    return _peak_bytes() - before, 3 * sum(p.nbytes for p in model.parameters())


def _places(optimizer):
    moments = [entry[key] for entry in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return [getattr(one, "_local_tensor", one).data_ptr() for one in moments]


def _peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["replicate", "fully_shard"])
def test_there_is_no_second_copy_of_the_state(tmp_path, strategy):
    for more, state in run_ranks(_peak, 2, tmp_path, strategy):
        assert state == 96 * 2**20 and more < state / 4, more


def _unread(ctx, folder, who, fails_in):
    """A disk that dies while one rank reads."""
    from weft.checkpoint.format import safetensors_read

    state, model, optimizer, ctx = _build(ctx, steps=3, seed=2)
    before = _values(model, optimizer)
    real, real_pass, fails = safetensors_read.read_into, getattr(Reader, fails_in), ctx.rank == who

    def broken(handle, memory, at):
        raise OSError(5, "Input/output error")

    def dies(self):
        safetensors_read.read_into = broken
        real_pass(self)

    setattr(Reader, fails_in, dies if fails else real_pass)
    try:
        with pytest.raises(OSError if fails else weft.errors.PeerError, match="Input/output error"):
            weft.restore(state, folder, ctx)
    finally:
        safetensors_read.read_into = real
        setattr(Reader, fails_in, real_pass)
    if fails_in == "read_new":
        _same(_values(model, optimizer), before)
    for save in (weft.save, weft.save_async) if fails_in == "read_live" else ():
        with pytest.raises(
            (CheckpointError, weft.errors.PeerError), match=r"part of another checkpoint(.|\n)*step-00000001"
        ):
            save(state, folder, 2, ctx)
    assert weft.restore(state, folder, ctx).step == 1
    weft.save(state, folder, 2, ctx)
    return _values(model, optimizer)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("fails_in", ["read_new", "read_live"])
def test_a_disk_that_dies_leaves_the_state_as_it_was_or_one_that_is_not_saved(tmp_path, who, fails_in):
    expected = run_ranks(_saved, 2, tmp_path)[0]
    for values in run_ranks(_unread, 2, tmp_path, who, fails_in):
        _same(values, expected)


def test_autograd_notices_that_values_were_restored(tmp_path):
    state, model, _, ctx = _build(weft.local(), steps=0)
    weft.save(state, tmp_path, 1, ctx)
    loss = model(torch.ones(1, WIDTH)).square().sum()
    weft.restore(state, tmp_path, ctx)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_tensors_of_any_layout_are_given_their_values(tmp_path):
    def build(value):
        model = nn.Module()
        model.register_buffer("last", torch.full((2, 3, 4, 5), value).to(memory_format=torch.channels_last))
        model.register_buffer("turned", torch.full((3, 2), value).t())
        model.register_buffer("part", torch.full((4, 8), value)[:, 1::2])
        model.register_buffer("number", torch.tensor(value))
        model.register_buffer("none", torch.zeros(0, 3))
        return model

    saved, found = build(1.0), build(0.0)
    saved.turned += torch.arange(6.0).view(2, 3)
    state, ctx = weft.checkpointable({"model": saved}, weft.local())
    weft.save(state, tmp_path, 1, ctx)
    weft.restore(weft.checkpointable({"model": found}, ctx)[0], tmp_path, ctx)
    assert all(torch.equal(one, two) for one, two in zip(saved.buffers(), found.buffers(), strict=True))
    assert found.last.is_contiguous(memory_format=torch.channels_last)


def _restored_small(ctx, folder):
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
    error = CheckpointError if ctx.rank == 1 else weft.errors.PeerError
    with pytest.raises(error, match="no"):
        weft.restore(state, folder, ctx)
    _same(_values(model, optimizer), before)


def test_an_object_that_refuses_its_state_on_one_rank_changes_nothing_on_any(tmp_path):
    run_ranks(_refuses_on_one, 2, tmp_path)


def _targets():
    """What the open handles of this process are: files by name, connections by number."""
    found = []
    for handle in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            found.append(str(handle.readlink()))
    return found


def _open_files(ctx, folder, steps):
    state, _, _, ctx = _build(ctx, steps=steps)
    before = _targets()
    for _ in range(3):
        weft.restore(state, folder, ctx)
        ctx.agree("restored")
    more = [target for target in _targets() if target not in before]
    return more, [thread.name for thread in threading.enumerate() if thread.name.startswith("weft-")]


@pytest.mark.parametrize("steps", [0, 3])
def test_nothing_of_it_stays(tmp_path, steps):
    run_ranks(_saved, 2, tmp_path)
    found = run_ranks(_open_files, 2, tmp_path, steps)
    for more, threads in found:
        # A rank that waits for another for the first time makes one connection to the store, and keeps it.
        assert len(more) <= 1 and all(target.startswith("socket:") for target in more) and not threads, found


def _dies(ctx, folder):
    state, _, _, ctx = _build(ctx, steps=3)
    if ctx.rank == 1:
        with mock.patch("weft.checkpoint.reader.Reader.read_new", side_effect=SystemExit(3)):
            weft.restore(state, folder, ctx)
    weft.restore(state, folder, ctx)


def test_a_rank_that_ends_while_it_reads_ends_the_others(tmp_path):
    run_ranks(_saved, 2, tmp_path)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_dies, 2, tmp_path)
    assert isinstance(caught.value.errors.get(0), weft.errors.PeerError), caught.value
