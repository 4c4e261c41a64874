"""Where parameters lie, and over which axes their gradients are averaged."""

import pytest
import torch
from torch import nn

import weft
from tests.variants import diagonal
from weft.contract import Layout, gradient_axes, layouts
from weft.testing import RanksFailed, run_ranks


class _Parts:
    """Offers `ReducesOver`: the ranks along an axis see other parts of one batch."""

    axes = ("context",)


class _Experts:
    """Offers `Placed`: parameters of an expert are the rank's own, and summed over the data axis alone."""

    def layout(self, name):
        return Layout(cut=("expert",), reduce_over=("data",)) if name.startswith("expert") else None


@weft.transform(before={"replicate", "fully_shard", "zero_partition"})
def in_parts(module, ctx):
    return module, ctx.offering(_Parts())


@weft.transform()
def with_experts(module, ctx):
    return module, ctx.offering(_Experts())


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def _rows(total=8):
    return torch.randn(total, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


# -- layouts -----------------------------------------------------------------------------------------


def test_without_cuts_a_parameter_has_copies_and_is_reduced_over_the_data_axes():
    ctx = weft.testing.fake(0, 8, mesh={"data": 2, "expert": 2, "tensor": 2})
    assert layouts(nn.Linear(2, 2, bias=False), ctx) == {"weight": Layout(reduce_over=("data", "expert"))}


def test_the_axes_of_parts_of_a_batch_are_reduced_over_too_in_the_order_of_the_mesh():
    ctx = weft.testing.fake(0, 4, mesh={"context": 2, "data": 2})
    module, ctx = in_parts(nn.Linear(2, 2), ctx)
    assert gradient_axes(module, ctx) == ("context", "data")
    assert gradient_axes(nn.Sequential(module), ctx) == ("context", "data")
    assert gradient_axes(nn.Linear(2, 2), ctx) == ("data",)


def test_what_a_transform_places_goes_before_what_is_derived():
    ctx = weft.testing.fake(0, 4, mesh={"data": 2, "expert": 2})
    module, ctx = with_experts(nn.ModuleDict({"expert": nn.Linear(2, 2), "dense": nn.Linear(2, 2)}), ctx)
    found = layouts(nn.Sequential(module), ctx)
    assert found["0.expert.weight"] == Layout(cut=("expert",), reduce_over=("data",))
    assert found["0.dense.weight"] == Layout(reduce_over=("data", "expert"))


def _cut(ctx):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    module = nn.ParameterDict({name: torch.zeros(4, 4) for name in ("ours", "copied", "foreign", "both", "plain")})
    group = ctx.on("tensor").group
    foreign = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    for name, mesh, places in (
        ("ours", ctx.mesh["tensor"], [Shard(0)]),
        ("copied", ctx.mesh["tensor"], [Replicate()]),
        ("foreign", foreign, [Shard(1)]),
        ("both", ctx.mesh, [Shard(0), Shard(0)]),
    ):
        module[name] = nn.Parameter(distribute_tensor(module[name].data, mesh, places))
    wrong = nn.ParameterDict()
    mesh = DeviceMesh("cpu", torch.tensor([[0, 3], [1, 2]]), mesh_dim_names=("odd", "even"))
    wrong["odd"] = nn.Parameter(distribute_tensor(torch.zeros(4), mesh["even"], [Shard(0)]))
    try:
        layouts(wrong, ctx)
        error = ""
    except weft.errors.ContractError as raised:
        error = str(raised)
    return {name: layout.cut for name, layout in layouts(module, ctx).items()}, error


def test_cuts_are_told_by_the_ranks_of_a_mesh_whatever_it_is_called():
    for cut, error in run_ranks(_cut, 4, mesh={"data": 2, "tensor": 2}):
        assert cut == {
            "ours": ("tensor",),
            "copied": (),
            "foreign": ("tensor",),
            "both": ("data", "tensor"),
            "plain": (),
        }
        # ranks 0 and 3 lie along no axis; neither do 1 and 2
        assert "no axis of the context" in error


# -- axes along which a batch is in parts ------------------------------------------------------------


def _train_in_parts(ctx, strategy):
    """Two steps, where the ranks along "context" see other rows of one batch."""
    module, ctx = in_parts(_net(), ctx)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    if strategy.startswith("zero"):
        module, optimizer, ctx = weft.zero_partition(module, optimizer, ctx, stage=int(strategy[-1]))
    elif strategy == "fully_shard":
        module, ctx = weft.fully_shard(module, ctx, rebind=optimizer)
    else:
        module, ctx = weft.replicate(module, ctx)
    for _ in range(2):
        rows = _rows().chunk(ctx.world_size)[ctx.rank]
        module(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    mean_over = weft.contract.offered(module, weft.contract.GradSync)[0].mean_over
    share = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in module.parameters())
    with weft.full_params(module, ctx):
        return mean_over, share, {name: p.detach().clone() for name, p in module.named_parameters()}


def _alone():
    module = _net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(2):
        module(_rows()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(module.named_parameters())


@pytest.mark.parametrize(
    ("mesh", "strategy"),
    diagonal(({"context": 2}, {"data": 2, "context": 2}), ("replicate", "fully_shard", "zero1", "zero2", "zero3")),
    ids=str,
)
def test_strategies_average_over_the_parts_of_a_batch_as_well(strategy, mesh):
    ranks = 2 * mesh.get("data", 1)
    truth = _alone()
    for mean_over, share, found in run_ranks(_train_in_parts, ranks, strategy, mesh=mesh):
        assert mean_over == ranks
        for name, value in truth.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)
        if strategy in ("fully_shard", "zero3"):
            # the ranks of both axes together hold one copy
            assert share <= sum(-(-len(p) // ranks) * (p.numel() // len(p)) for p in truth.values())


def _saved(ctx, directory, resume):
    module, ctx = in_parts(_net(), ctx)
    module, ctx = (weft.replicate if resume else weft.fully_shard)(module, ctx)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    state, ctx = weft.checkpointable({"module": module, "optimizer": optimizer}, ctx)
    if resume:
        weft.restore(state, directory, ctx)
    for step in range(1 if resume else 0, 2):
        module(_rows().chunk(ctx.world_size)[ctx.rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            weft.save(state, directory, 1, ctx)
    with weft.full_params(module, ctx):
        return {name: p.detach().clone() for name, p in module.named_parameters()}


def test_what_is_sharded_over_two_axes_together_is_saved_and_resumed(tmp_path):
    truth = _alone()
    run_ranks(_saved, 4, tmp_path, False, mesh={"data": 2, "context": 2})
    for found in run_ranks(_saved, 2, tmp_path, True, mesh={"context": 2}):
        for name, value in truth.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def _windows_in_parts(ctx):
    module, ctx = in_parts(_net(), ctx)
    module, ctx = weft.replicate(module, ctx)
    loader = torch.utils.data.DataLoader(list(_rows(10)), batch_size=2)
    loader, ctx = weft.shard_data(loader, ctx)
    module, loader, ctx = weft.accumulate_grads(module, loader, ctx, steps=2)
    found = []
    for window in loader:
        for rows in window:
            part = rows.chunk(2)[ctx.rank]
            (module(part).square().mean() * window.share).backward()
        found.append([p.grad.clone() for p in module.parameters()])
        module.zero_grad()
    return found


def test_a_share_counts_the_samples_of_a_batch_in_parts_once():
    found = run_ranks(_windows_in_parts, 2, mesh={"context": 2})
    module = _net()
    loader, _ = weft.shard_data(torch.utils.data.DataLoader(list(_rows(10)), batch_size=2), weft.local())
    batches = list(loader)
    for number, gradients in enumerate(found[0]):
        module.zero_grad()
        module(torch.cat(batches[2 * number : 2 * number + 2])).square().mean().backward()
        for one, parameter in zip(gradients, module.parameters(), strict=True):
            torch.testing.assert_close(one, parameter.grad, rtol=0, atol=1e-12)


def test_leaving_the_axis_of_parts_out_is_refused_on_all_ranks():
    with pytest.raises(RanksFailed, match="see different parts"):
        run_ranks(_leave_out, 4, mesh={"data": 2, "context": 2})


def _leave_out(ctx):
    module, ctx = in_parts(_net(), ctx)
    weft.replicate(module, ctx, axis="data")


class _Mixed:
    def layout(self, name):
        return Layout(reduce_over=("data",)) if name == "1.weight" else None


@weft.transform()
def mixed(module, ctx):
    return module, ctx.offering(_Mixed())


def test_parameters_of_one_layer_that_belong_on_different_ranks_are_refused_by_name():
    module, ctx = mixed(_net_of_layers(), weft.testing.fake(0, 4, mesh={"data": 2, "expert": 2}))
    with pytest.raises(weft.errors.ContractError, match=r"(?s)fully_shard: .*1.weight over .*1.bias over"):
        weft.fully_shard(module, ctx)


def _net_of_layers():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
