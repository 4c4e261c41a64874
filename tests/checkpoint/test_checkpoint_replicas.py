"""Tensors that several ranks hold: written once, and compared."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import weft
from weft.errors import CheckpointError, PeerError
from weft.tensors.checksums import _SMALL, checksums
from weft.testing import run_ranks


class Box:
    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def _save(how, state, folder, step, ctx):
    found = how(state, folder, step, ctx)
    return found.wait() if how is weft.save_async else found


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def _drifted(ctx, folder, size):
    model, ctx = weft.replicate(_model(), ctx)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    box = Box([torch.zeros(size), torch.ones(size)])
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer, "box": box}, ctx)
    step = 0
    for how in (weft.save, weft.save_async):
        for name, tensor in {
            "model/2.weight": model[2].weight,
            "optimizer/state/model/0.bias/exp_avg": optimizer.state[model[0].bias]["exp_avg"],
            "box/value/1": box.value[1],
        }.items():
            kept = tensor.detach().clone()
            with torch.no_grad():
                tensor.reshape(-1)[-1] += 1e-3 * ctx.rank
            with pytest.raises(
                CheckpointError if ctx.rank == 0 else PeerError,
                match=rf"(?s)different values.*.*{name}: one value on rank 0, another on rank 1\n.*expected: .*fix: ",
            ):
                _save(how, state, folder, step, ctx)
            with torch.no_grad():
                tensor.copy_(kept)
        _save(how, state, folder, step, ctx)
        step += 1
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("size", [5, _SMALL])
def test_replicas_that_drifted_apart_are_named_and_not_saved(tmp_path, size):
    assert run_ranks(_drifted, 2, tmp_path, size) == [[".saving", "step-00000000", "step-00000001"]] * 2


def test_which_of_three_ranks_differs_is_told(tmp_path):
    def saves(ctx, folder):
        state = weft.checkpointable({"box": Box(torch.tensor([float(ctx.rank == 1)]))}, ctx)[0]
        with pytest.raises((CheckpointError, PeerError), match="box/value: one value on rank 0, 2, another on rank 1"):
            weft.save(state, folder, 1, ctx)

    run_ranks(saves, 3, tmp_path)


def test_buffers_of_a_rank_of_its_own_are_those_of_rank_0(tmp_path):
    def saves(ctx, folder):
        model, ctx = weft.replicate(_model(), ctx)
        state, ctx = weft.checkpointable({"model": model}, ctx)
        model(torch.full((2, 4), float(ctx.rank)))  # without a backward: each rank has running statistics of its own
        before = copy.deepcopy(dict(model.named_buffers()))
        weft.save(state, folder, 1, ctx)
        weft.restore(state, folder, ctx)
        return before, dict(model.named_buffers())

    (first, _), (second, found) = run_ranks(saves, 2, tmp_path)
    assert not torch.equal(first["1.running_mean"], second["1.running_mean"])
    assert all(torch.equal(first[name], found[name]) for name in first)


MESHES = {
    "data of data and tensor": ({"data": 2, "tensor": 2}, ("data",), {}),
    "shard of replica and shard": ({"replica": 2, "shard": 2}, ("replica", "shard"), {"axis": "shard"}),
    "both of replica and shard": ({"replica": 2, "shard": 2}, ("replica", "shard"), {}),
}


def _on_a_part(ctx, folder, options, drifts):
    from torch.distributed.fsdp import fully_shard

    model = _model()
    names = [options["axis"]] if "axis" in options else [name for name, _ in ctx.axes if name in ctx.data_axes]
    fully_shard(model, mesh=ctx.mesh[tuple(names)])
    expected = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    state, ctx = weft.checkpointable({"model": model}, ctx)
    if drifts and ctx.rank == 3:
        with torch.no_grad():
            model[0].weight.to_local().add_(1.0)
    if drifts:
        with pytest.raises(
            (CheckpointError, PeerError), match=r"model/0.weight: one value on rank 1, another on rank 3"
        ):
            weft.save(state, folder, 1, ctx)
        return
    path = weft.save(state, folder, 1, ctx)
    manifest = weft.checkpoint.verify(path)
    assert {len(entry.pieces) for name, entry in manifest.tensors.items() if name.endswith("weight")} <= {1, 2}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    weft.restore(state, folder, ctx)
    assert all(torch.equal(p.full_tensor(), expected[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("kind", MESHES)
def test_what_is_cut_over_a_part_of_the_mesh_is_written_once(tmp_path, kind):
    mesh, data_axes, options = MESHES[kind]
    run_ranks(_on_a_part, 4, tmp_path / "whole", options, False, mesh=mesh, data_axes=data_axes)
    plain = _model()
    weft.restore(weft.checkpointable({"model": plain}, weft.local())[0], tmp_path / "whole", weft.local())
    assert all(torch.equal(one, two) for one, two in zip(plain.parameters(), _model().parameters(), strict=True))
    if kind == "data of data and tensor":
        run_ranks(_on_a_part, 4, tmp_path / "drifts", options, True, mesh={"tensor": 2, "data": 2}, data_axes=("data",))


def test_fully_shard_over_data_of_a_mesh_with_tensor_is_saved_and_resumed(tmp_path):
    def trains(ctx, folder):
        model, ctx = weft.fully_shard(_model(), ctx)
        optimizer = torch.optim.AdamW(model.parameters())
        state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)
        weft.restore(state, folder, ctx)
        for _ in range(2):
            model(torch.ones(2, 4) + ctx.data_rank).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        step = 1 if weft.checkpoint.latest(folder) is None else 2
        weft.save(state, folder, step, ctx)
        return step, [p.full_tensor().tolist() for p in model.parameters()]

    mesh = {"mesh": {"data": 2, "tensor": 2}, "data_axes": ("data",)}
    for step in (1, 2):
        assert [found[0] for found in run_ranks(trains, 4, tmp_path, **mesh)] == [step] * 4
    assert weft.checkpoint.verify(weft.checkpoint.latest(tmp_path)).step == 2


# -- the numbers -------------------------------------------------------------------------------------

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.complex64, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_that_differ_have_other_numbers(dtype):
    # Sizes at which sums of equal numbers would lose all their bits.
    for size in (1, 7, 1000, _SMALL, 2**20 + 3):
        zeros, ones = torch.zeros(size, dtype=dtype), torch.ones(size, dtype=dtype)
        last = zeros.clone()
        last[-1] = 1
        first = zeros.clone()
        first[0] = 1
        found = checksums((zeros, ones, last, first)[: 2 if size == 1 else 4])
        assert len(set(found)) == len(found), (dtype, size)
        assert checksums([ones.clone()])[0] == found[1]


def _of_other_ranks(ctx, folder):
    """A tensor of rank 0 alone, as a DTensor of a mesh without the others."""
    mesh = DeviceMesh("cpu", [0])

    def made(values):
        part = torch.full((3,), float(values)) if ctx.rank == 0 else torch.empty(0)
        model = nn.Linear(2, 2)
        model.register_buffer(
            "own", DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=(3,), stride=(1,))
        )
        return model, weft.checkpointable({"model": model}, ctx)[0]

    weft.save(made(5)[1], folder, 1, ctx)
    model, state = made(0)
    weft.restore(state, folder, ctx)
    return model.own.to_local().tolist(), model.weight.tolist()


def test_a_tensor_of_other_ranks_is_theirs_to_save_and_to_restore(tmp_path):
    (first, weights), (second, others) = run_ranks(_of_other_ranks, 2, tmp_path)
    assert first == [5.0] * 3 and second == [] and weights == others


@settings(max_examples=50, deadline=None)
@given(
    st.integers(_SMALL, _SMALL + 5000),
    st.integers(0, 9),
    st.integers(0, 2**31),
    st.integers(0, 2**31),
    st.integers(0, 7),
)
def test_a_flipped_bit_or_two_numbers_that_changed_places_are_seen_wherever_they_lie(size, offset, one, other, bit):
    whole = torch.randint(0, 256, (size + offset,), dtype=torch.uint8)
    tensor = whole[offset:]
    before = checksums([tensor])[0]
    assert checksums([tensor.clone()])[0] == before
    one, other = one % size, other % size
    swapped = tensor.clone()
    swapped[one], swapped[other] = tensor[other].clone(), tensor[one].clone()
    if not torch.equal(swapped, tensor) and (one // 8) % 1024 != (other // 8) % 1024:
        assert checksums([swapped])[0] != before
    flipped = tensor.clone()
    flipped[one] ^= 1 << bit
    assert checksums([flipped])[0] != before
