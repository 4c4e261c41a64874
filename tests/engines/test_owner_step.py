"""gather_step(by="owner"): each matrix is stepped on by one rank."""

import functools

import pytest
import torch
from torch import nn

import weft
from weft.testing import largest_difference, run_ranks


class Shampoo(torch.optim.Optimizer):
    """Not torch's: state of other shapes than the parameter's, in a list, and a number in its groups."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                rows = p.grad.reshape(len(p.grad), -1) if p.dim() else p.grad.reshape(1, 1)
                if not state:
                    state["sides"] = [torch.eye(size, dtype=p.dtype) for size in rows.shape]
                state["sides"][0] += rows @ rows.T
                state["sides"][1] += rows.T @ rows
                left, right = (torch.linalg.matrix_power(torch.linalg.inv(side), 1) for side in state["sides"])
                p.sub_((left @ rows @ right).view_as(p), alpha=group["lr"] / group["count"])


OPTIMIZERS = {
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, 0.1),
    "muon": lambda parameters: torch.optim.Muon([p for p in parameters if p.dim() == 2], 0.1),
    "shampoo": lambda parameters: Shampoo([{"params": [p]} for p in parameters]),
}
STRATEGIES = ("replicate", "fully_shard", "zero1", "zero2", "zero3")


def _net(only_matrices=False):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    for p in net.parameters():
        p.requires_grad_(p.dim() == 2 or not only_matrices)
    return net


def _train_on(model, optimizer, ctx, steps):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(steps):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        if ctx is not None:
            width = 8 // (ctx.world_size // ctx.axis_size("tensor") if "tensor" in dict(ctx.axes) else ctx.world_size)
            place = ctx.rank // (ctx.axis_size("tensor") if "tensor" in dict(ctx.axes) else 1)
            x = x[place * width : (place + 1) * width]
        model(x).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def _build(ctx, name, strategy):
    model = _net(name == "muon")
    if "tensor" in dict(ctx.axes):
        model, ctx = weft.tensor_parallel(model, ctx, plan={"0": "column", "2": "row"})
    if strategy == "replicate":
        model, ctx = weft.replicate(model, ctx)
    elif strategy == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx, units=nn.Linear)
    optimizer = OPTIMIZERS[name](model.parameters())
    if strategy.startswith("zero"):
        stage = int(strategy[-1])
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=stage, by="owner")
    else:
        optimizer, ctx = weft.gather_step(optimizer, ctx, by="owner")
    return model, optimizer, ctx


def _whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


@functools.cache
def _plain(name, steps=3):
    model = _net(name == "muon")
    optimizer = OPTIMIZERS[name](model.parameters())
    _train_on(model, optimizer, None, steps)
    return [p.detach() for p in model.parameters()], optimizer.param_groups[-1].get("count")


def _train(ctx, cases):
    found = {}
    for name, strategy in cases:
        model, optimizer, _ = _build(ctx, name, strategy)
        _train_on(model, optimizer, ctx, 3)
        held = [id(p) for p in optimizer.state]
        count = optimizer.param_groups[-1].get("count")
        found[name, strategy] = [_whole(p) for p in model.parameters()], count, len(held)
    return found


def _check(n, mesh, cases):
    answers = run_ranks(_train, n, cases, mesh=mesh)
    for found in answers:
        for (name, strategy), (parameters, count, _) in found.items():
            expected, expected_count = _plain(name)
            assert largest_difference(parameters, expected) < 1e-12, (name, strategy)
            assert count == expected_count
    for name, strategy in cases:
        total = sum(p.requires_grad and (p.dim() == 2 or name != "muon") for p in _net(name == "muon").parameters())
        assert sum(found[name, strategy][2] for found in answers) == total


def test_optimizers_of_whole_tensors_equal_one_process():
    cases = [(name, "fully_shard") for name in OPTIMIZERS] + [("muon", strategy) for strategy in STRATEGIES]
    _check(2, None, cases)


def _assigned(ctx):
    model, optimizer, _ = _build(ctx, "shampoo", "fully_shard")
    for step in range(3):
        for number, p in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(10 * step + number)
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        optimizer.step()
    return [_whole(p) for p in model.parameters()]


def test_whole_gradients_that_are_assigned():
    expected = _assigned(weft.local())
    for found in run_ranks(_assigned, 2):
        assert largest_difference(found, expected) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "mesh"),
    [(2, None), (4, {"replica": 2, "shard": 2}), (4, {"data": 2, "tensor": 2}), (2, {"tensor": 2})],
)
def test_every_strategy_on_every_mesh(n, mesh):
    strategies = ("replicate",) if mesh == {"tensor": 2} else STRATEGIES
    _check(n, mesh, [(name, strategy) for name in OPTIMIZERS for strategy in strategies])


def _run(ctx, folder, name, steps, restored=False, by="owner"):
    """Train on a state that is saved in the end, or restored first."""
    if by == "owner":
        model, optimizer, ctx = _build(ctx, name, "fully_shard")
    else:
        model, ctx = weft.fully_shard(_net(name == "muon"), ctx)
        optimizer = OPTIMIZERS[name](model.parameters())
        optimizer, ctx = weft.gather_step(optimizer, ctx)
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)
    if restored:
        weft.restore(state, folder, ctx)
    _train_on(model, optimizer, ctx, steps)
    if not restored:
        weft.save(state, folder, steps, ctx)
    return [_whole(p) for p in model.parameters()]


@pytest.mark.parametrize("name", ["shampoo", pytest.param("muon", marks=pytest.mark.variant)])
def test_state_is_restored_at_other_world_sizes_and_by_all(name, tmp_path):
    run_ranks(_run, 2, tmp_path, name, 2)
    expected = _plain_from(name)
    for n, by in ((1, "owner"), (2, "all"), (4, "owner")):
        for parameters in run_ranks(_run, n, tmp_path, name, 3, restored=True, by=by):
            assert largest_difference(parameters, expected) < 1e-12, (n, by)


def _plain_from(name):
    model = _net(name == "muon")
    optimizer = OPTIMIZERS[name](model.parameters())
    scheduled = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    del scheduled
    _train_on(model, optimizer, None, 2)
    _train_on(model, optimizer, None, 3)
    return [p.detach() for p in model.parameters()]


def _undone(ctx):
    found = []
    for name, strategy in (("shampoo", "fully_shard"), ("muon", "zero1")):
        model, optimizer, after = _build(ctx, name, strategy)
        _train_on(model, optimizer, ctx, 2)
        model, after = weft.undo(model, after, rebind=optimizer)
        assert not after.applied and not optimizer._optimizer_step_pre_hooks
        model, after = weft.replicate(model, ctx)
        _train_on(model, optimizer, ctx, 3)
        found.append([_whole(p) for p in model.parameters()])
    return found


def test_undo_gives_all_ranks_the_state():
    for shampoo, muon in run_ranks(_undone, 2):
        assert largest_difference(shampoo, _plain_from("shampoo")) < 1e-12
        assert largest_difference(muon, _plain_from("muon")) < 1e-12


def _memory(ctx):
    shapes = [(40, 40), (40, 10), (10, 40), (8, 100), (400, 4), (16, 16), (20, 20), (4, 4)]
    model = nn.ParameterList([nn.Parameter(torch.ones(shape)) for shape in shapes])
    total = sum(p.numel() for p in model) * 4
    model, here = weft.fully_shard(model, ctx)
    optimizer, here = weft.gather_step(torch.optim.Muon(model.parameters(), 0.1), here, by="owner")
    sum((p * p).sum() for p in model).backward()
    optimizer.step()
    held = sum(value.nbytes for state in optimizer.state.values() for value in state.values() if value.dim())
    return held, 1.5 * total / ctx.world_size + 40 * 40 * 4


def test_a_rank_holds_its_share_of_the_state():
    for held, limit in run_ranks(_memory, 2):
        assert held <= limit


def _refused(ctx):
    model, here = weft.fully_shard(_net(), ctx)
    with pytest.raises(ValueError, match=r"(?s)found:    AdamW, whose update.*fix: .*leave by=\"owner\" out"):
        weft.gather_step(torch.optim.AdamW(model.parameters()), ctx, by="owner")
    optimizer, here = weft.gather_step(torch.optim.Adafactor(model.parameters(), 0.1), ctx, by="owner")
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(
        weft.errors.ContractError, match=r"(?s)found:    2 groups.*fix: .*add_param_group.*by=\"owner\""
    ):
        optimizer.step()
    apart = _net(only_matrices=True)
    muon = OPTIMIZERS["muon"](apart.parameters())
    apart, muon, here = weft.local_steps(apart, muon, ctx, every=2)
    with pytest.raises(weft.errors.OrderError, match=r"(?s)found:    local_steps.*fix: .*leave by=\"owner\" out"):
        weft.gather_step(muon, here, by="owner")


def test_what_cannot_have_owners_is_refused():
    run_ranks(_refused, 2)
    muon = torch.optim.Muon(nn.Linear(2, 2, bias=False).parameters())
    with pytest.raises(ValueError, match=r"(?s)by = 'each'.*fix: "):
        weft.gather_step(muon, weft.local(), by="each")
    muon.eval = lambda: None
    with pytest.raises(
        weft.errors.ContractError, match=r"(?s)found:    an optimizer with eval.*fix: .*by=\"owner\" out"
    ):
        weft.gather_step(muon, weft.local(), by="owner")
