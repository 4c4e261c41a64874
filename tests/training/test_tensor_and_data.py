"""Tensor parallelism under a strategy over the data axes: taken back, read whole, averaged, saved and restored."""

import pytest
import torch
from torch import nn

import weft
from tests.lm import LM, PLAN, difference, loss_of, model, optimizer_of, samples, whole
from weft.testing import RanksFailed, run_ranks

MESH = {"data": 2, "tensor": 2}
STRATEGIES = [
    "fully_shard",
    *(pytest.param(name, marks=pytest.mark.variant) for name in ("replicate", "zero1", "zero2")),
]


def batch(number, ctx=None):
    rows = samples(40).split(4)[number]
    return rows if ctx is None else rows.chunk(ctx.data_size)[ctx.data_rank]


def step(module, optimizer, number, ctx=None):
    loss_of(module, batch(number, ctx)).backward()
    optimizer.step()
    optimizer.zero_grad()


def prepared(ctx, strategy, sequence):
    module = model()
    if sequence is not None:
        module, ctx = weft.tensor_parallel(module, ctx, plan=PLAN, sequence=sequence)
    if strategy in ("replicate", "fully_shard"):
        module, ctx = getattr(weft, strategy)(module, ctx)
    optimizer = optimizer_of(module)
    if strategy is not None and strategy.startswith("zero"):
        module, optimizer, ctx = weft.zero_partition(module, optimizer, ctx, stage=int(strategy[-1]))
    return module, optimizer, ctx


def plain(steps):
    module = model()
    optimizer = optimizer_of(module)
    for number in range(steps):
        step(module, optimizer, number)
    return module, {name: p.detach().clone() for name, p in module.named_parameters()}


# -- whole again -------------------------------------------------------------------------------------


def read_and_undo(ctx, strategy, sequence):
    module, optimizer, ctx = prepared(ctx, strategy, sequence)
    for number in range(2):
        step(module, optimizer, number, ctx)
    loss_of(module, batch(2, ctx)).backward()
    gradients = dict(weft.full_grads(module, ctx))
    with weft.full_params(module, ctx):
        parameters = {name: whole(p) for name, p in module.named_parameters()}
    module, ctx = weft.undo(module, ctx, rebind=optimizer)
    optimizer.step()
    optimizer.zero_grad()
    step(module, optimizer, 3)
    return parameters, gradients, {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_and_gradients_are_whole_and_everything_is_taken_back(strategy):
    module, parameters = plain(2)
    loss_of(module, batch(2)).backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    _, end = plain(4)
    for found in run_ranks(read_and_undo, 4, strategy, True, mesh=MESH):
        assert difference(parameters, found[0]) < 1e-12
        assert difference(gradients, found[1]) < 1e-12
        assert difference(end, found[2]) < 1e-12


def stacked(ctx):
    module, _, _ = prepared(ctx, "fully_shard", sequence=True)
    return torch.stack([p.detach().square().sum() for p in module.parameters()])


def test_numbers_of_parameters_over_other_meshes_are_refused_where_they_meet():
    with pytest.raises(RanksFailed, match=r"all DTensors over one mesh\n  found: .*aten.stack(.|\n)*full_tensor\(\)"):
        run_ranks(stacked, 4, mesh=MESH)


def averaged(ctx, strategy, sequence):
    module, optimizer, ctx = prepared(ctx, strategy, sequence)
    module, ctx = weft.average_weights(module, ctx, decay=0.5)
    for number in range(2):
        step(module, optimizer, number, ctx)
        weft.averages(module).update()
    with weft.averages(module).swapped():
        return {name: whole(p) for name, p in module.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fully_shard", "replicate", "zero1", "zero2"])
def test_averages(strategy):
    (expected,) = run_ranks(averaged, 1, None, None)
    for found in run_ranks(averaged, 4, strategy, False, mesh=MESH):
        assert difference(expected, found) < 1e-12


# -- checkpoints -------------------------------------------------------------------------------------


def part(ctx, path, first, last, strategy, sequence):
    module, optimizer, ctx = prepared(ctx, strategy, sequence)
    state, ctx = weft.checkpointable({"model": module, "optimizer": optimizer}, ctx)
    if first:
        assert weft.restore(state, path, ctx).step == first
    for number in range(first, last):
        step(module, optimizer, number, ctx)
    weft.save(state, path, last, ctx)
    return {name: whole(p) for name, p in module.named_parameters()}


@pytest.mark.slow
def test_a_checkpoint_goes_from_mesh_to_mesh(tmp_path):
    _, expected = plain(6)
    run_ranks(part, 4, tmp_path, 0, 1, "replicate", True, mesh=MESH)
    run_ranks(part, 2, tmp_path, 1, 2, None, False, mesh={"tensor": 2})
    run_ranks(part, 4, tmp_path, 2, 3, "zero2", False, mesh=MESH)
    run_ranks(part, 2, tmp_path, 3, 4, "fully_shard", None)
    run_ranks(part, 4, tmp_path, 4, 5, "zero1", True, mesh=MESH)
    for found in run_ranks(part, 4, tmp_path, 5, 6, "fully_shard", True, mesh={"shard": 2, "tensor": 2}):
        assert difference(expected, found) < 1e-12


# -- from meta ---------------------------------------------------------------------------------------


def from_meta(ctx, path):
    with torch.device("meta"):
        module = LM().double()
    module, ctx = weft.tensor_parallel(module, ctx, plan=PLAN, weights="later")
    module, ctx = weft.fully_shard(module, ctx, weights="later")
    weft.load_weights(module, path, ctx)
    optimizer = optimizer_of(module)
    step(module, optimizer, 0, ctx)
    return {name: whole(p) for name, p in module.named_parameters()}


def saved(ctx, path):
    state, ctx = weft.checkpointable({"model": model()}, ctx)
    weft.save(state, path, 1, ctx)


@pytest.mark.slow
def test_weights_are_loaded_into_what_both_have_cut(tmp_path):
    saved(weft.local(), tmp_path / "run")
    weft.export(next((tmp_path / "run").glob("*1")), tmp_path / "out")
    _, expected = plain(1)
    for found in run_ranks(from_meta, 4, tmp_path / "out", mesh=MESH):
        assert difference(expected, found) < 1e-12


# -- precision and compilers -------------------------------------------------------------------------


def scaled(ctx, sequence):
    module, ctx = weft.with_precision(model(torch.float32), ctx, "fp16")
    if sequence is not None:
        module, ctx = weft.tensor_parallel(module, ctx, plan=PLAN, sequence=sequence)
    optimizer, ctx = weft.skip_nonfinite(torch.optim.SGD(module.parameters(), lr=0.1), ctx)
    for number in range(3):
        step(module, optimizer, number)
    return {name: whole(p) for name, p in module.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
def test_fp16(sequence):
    (expected,) = run_ranks(scaled, 1, None)
    for found in run_ranks(scaled, 2, sequence, mesh={"tensor": 2}):
        assert difference(expected, found) < 1e-3


def compiled(ctx, sequence, backend):
    module, optimizer, ctx = prepared(ctx, None, sequence)
    module, ctx = weft.compile(module, ctx, backend=backend)
    for number in range(3):
        step(module, optimizer, number)
    return {name: whole(p) for name, p in module.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
def test_compiled_as_a_whole(sequence):
    _, expected = plain(3)
    for found in run_ranks(compiled, 2, sequence, "aot_eager", mesh={"tensor": 2}):
        assert difference(expected, found) < 1e-12


class Normed(nn.Sequential):
    """Two layers with a norm in between, for styles of torch."""

    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))


def styled(ctx):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    options = {"input_layouts": Replicate(), "output_layouts": Shard(1), "use_local_output": False}
    torch.manual_seed(0)
    plan = {
        "0": RowwiseParallel(**options),
        "1": SequenceParallel(),
        "2": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    module = Normed().double()
    if ctx.world_size > 1:
        module, ctx = weft.tensor_parallel(module, ctx, plan=plan)
    x = torch.arange(64, dtype=torch.float64).view(2, 4, 8).sin()
    for _ in range(2):
        module(x).square().sum().backward()
    norm = float(weft.clip_grads(module, ctx, max_norm=1.0))
    return norm, {name: whole(p.grad) for name, p in module.named_parameters()}


def test_styles_of_torch_leave_no_partial_gradients():
    ((norm, expected),) = run_ranks(styled, 1)
    for found in run_ranks(styled, 2, mesh={"tensor": 2}):
        assert abs(norm - found[0]) < 1e-12 and difference(expected, found[1]) < 1e-12
