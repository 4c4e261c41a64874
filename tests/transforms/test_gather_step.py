"""gather_step: optimizers that look at whole tensors, on shards."""

import copy

import pytest
import torch
from torch import nn

import weft
from tests.variants import variant_cases, variants
from weft.testing import largest_difference, run_ranks


class Counts(torch.optim.Optimizer):
    """Not torch's: keeps a number in its groups that moves once per step, and looks at norms."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["sum"] = state.get("sum", 0) + p.grad
                    p.sub_(group["lr"] / group["count"] * state["sum"] / p.grad.norm())


OPTIMIZERS = {
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, 0.1),
    "adafactor foreach": lambda parameters: torch.optim.Adafactor(parameters, 0.1, foreach=True),
    "muon": lambda parameters: torch.optim.Muon([p for p in parameters if p.dim() == 2], 0.1),
    "counts": Counts,
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.05),
}


def _net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5)).double()


def _mine(ctx):
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return x if ctx is None else x.chunk(ctx.world_size)[ctx.rank]


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _train(ctx, name, steps=3):
    model = _net()
    if name == "muon":
        for p in model.parameters():
            p.requires_grad_(p.dim() == 2)
    if ctx is not None:
        model, ctx = weft.fully_shard(model, ctx, units=nn.Linear)
    optimizer = OPTIMIZERS[name](model.parameters())
    if ctx is not None:
        optimizer, ctx = weft.gather_step(optimizer, ctx)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(steps):
        model(_mine(ctx)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    shapes = [
        (hasattr(value, "full_tensor"), tuple(value.shape))
        for p in model.parameters()
        for value in optimizer.state.get(p, {}).values()
        if isinstance(value, torch.Tensor) and value.dim() and value.shape == p.shape
    ]
    count = optimizer.param_groups[0].get("count")
    return [_whole(p.detach()).clone() for p in model.parameters()], count, all(cut for cut, _ in shapes)


def _train_all(ctx):
    return {name: _train(ctx, name) for name in OPTIMIZERS}


@pytest.mark.parametrize("n", [2, *variants(4)])
def test_optimizers_of_whole_tensors_equal_one_process(n):
    for found in run_ranks(_train_all, n):
        for name, (parameters, count, is_cut) in found.items():
            expected, expected_count, _ = _train(None, name)
            assert largest_difference(parameters, expected) < 1e-12, name
            assert count == expected_count
            assert is_cut, f"{name}: state of the parameters' shape is held whole"


def _state(ctx):
    """Saved in the middle, loaded whole and in shards, and trained on."""
    model, here = weft.fully_shard(_net(), ctx)
    optimizer, here = weft.gather_step(Counts(model.parameters()), here)
    for _ in range(2):
        model(_mine(ctx)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = copy.deepcopy(optimizer.state_dict())
    weights = {name: _whole(value).clone() for name, value in model.state_dict().items()}
    for state in saved["state"].values():
        state.update({key: _whole(value) for key, value in state.items()})
    other = _net()
    other.load_state_dict(weights)
    other, here = weft.fully_shard(other, ctx)
    optimizer, here = weft.gather_step(Counts(other.parameters()), here)
    optimizer.load_state_dict(saved)
    assert all(hasattr(state["sum"], "full_tensor") for state in optimizer.state.values())
    other(_mine(ctx)).square().mean().backward()
    optimizer.step()
    return [_whole(p.detach()).clone() for p in other.parameters()]


def test_whole_state_is_cut_when_it_is_loaded():
    for parameters in run_ranks(_state, 2):
        assert largest_difference(parameters, _train_counts(3)) < 1e-12


def _train_counts(steps):
    model = _net()
    optimizer = Counts(model.parameters())
    for _ in range(steps):
        model(_mine(None)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


class Remembers(torch.optim.Optimizer):
    """Keeps tensors in a list and in a dict of its state."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for p in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
            state = self.state[p]
            state["last"] = [*state.get("last", []), p.grad.clone()][-3:]
            sums = state.setdefault("sums", {"gradient": torch.zeros_like(p), "steps": 0})
            sums["gradient"].add_(p.grad)
            sums["steps"] += 1
            p.sub_(self.param_groups[0]["lr"] * (sum(state["last"]) / sums["gradient"].norm() + p.grad / sums["steps"]))


def _remembered(ctx, strategy, by, folder):
    """Two steps, and two more after a restore, and two more without the strategy."""
    for begin in (0, 2):
        model = _net()
        if strategy == "fully_shard":
            model, here = weft.fully_shard(model, ctx)
            optimizer, here = weft.gather_step(Remembers(model.parameters()), here, by=by)
        else:
            model, optimizer, here = weft.zero_partition(model, Remembers(model.parameters()), ctx, stage=by)
        state, here = weft.checkpointable({"model": model, "optimizer": optimizer}, here)
        if begin:
            weft.restore(state, folder, here)
        _steps(model, optimizer, _mine(ctx), 2)
        if not begin:
            weft.save(state, folder, 2, here)
    model, here = weft.undo(model, here, rebind=optimizer)
    _steps(model, optimizer, _mine(None), 2)
    return [p.detach() for p in model.parameters()]


def _steps(model, optimizer, x, count):
    for _ in range(count):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("strategy", "by"), [("fully_shard", "all"), ("zero_partition", 2), *variant_cases(("fully_shard", "owner"))]
)
def test_tensors_in_lists_and_dicts_of_the_state_are_resumed_and_brought_back(strategy, by, tmp_path):
    model = _net()
    _steps(model, Remembers(model.parameters()), _mine(None), 6)
    expected = [p.detach() for p in model.parameters()]
    for parameters in run_ranks(_remembered, 2, strategy, by, str(tmp_path)):
        assert largest_difference(parameters, expected) < 1e-12


def _refused(ctx):
    model, here = weft.fully_shard(_net(), ctx)
    optimizer, here = weft.gather_step(torch.optim.Adafactor(model.parameters(), 0.1), here)
    model(_mine(ctx)).square().mean().backward()
    before = [_whole(p.detach()).clone() for p in model.parameters()]
    with pytest.raises(
        weft.errors.ContractError, match=r"(?s)found:    optimizer.step\(closure\).*fix: .*loss = closure"
    ):
        optimizer.step(lambda: torch.ones(()))
    assert largest_difference(before, [_whole(p.detach()) for p in model.parameters()]) == 0
    for known in (here, ctx):
        with pytest.raises(weft.errors.AlreadyApplied, match=r"(?s)found:.*gather_step.*fix: .*leave one"):
            weft.gather_step(optimizer, known)
    with pytest.raises(weft.errors.OrderError, match=r"(?s)gather_step, then|skip_nonfinite, then gather_step.*fix: "):
        weft.skip_nonfinite(optimizer, here)
    with pytest.raises(weft.errors.OrderError, match=r"(?s)either fuse_step or gather_step.*fix: "):
        weft.fuse_step(optimizer, here)
    optimizer.step(closure=None)


def test_closures_a_second_application_and_wrong_orders_are_refused():
    run_ranks(_refused, 2)


def test_what_is_no_such_optimizer_is_refused():
    with pytest.raises(TypeError, match=r"(?s)found:    Linear.*fix: .*gather_step\(optimizer, ctx\)"):
        weft.gather_step(nn.Linear(1, 1), weft.local())
    with pytest.raises(weft.errors.ContractError, match=r"(?s)found:    LBFGS.*fix: .*weft.replicate"):
        weft.gather_step(torch.optim.LBFGS(nn.Linear(1, 1).parameters()), weft.local())


def test_one_rank_changes_nothing():
    model, plain = _net(), _net()
    optimizer, ctx = weft.gather_step(torch.optim.Adafactor(model.parameters(), 0.1), weft.local())
    plainly = torch.optim.Adafactor(plain.parameters(), 0.1)
    for one, by in ((model, optimizer), (plain, plainly)):
        one(_mine(None)).sum().backward()
        by.step()
    assert [record.name for record in ctx.applied] == ["gather_step"]
    assert largest_difference(list(model.parameters()), list(plain.parameters())) == 0


def _without(ctx):
    found = {}
    for name in ("adafactor", "muon", "adamw", "lbfgs"):
        model, _ = weft.fully_shard(_net(), ctx, units=nn.Linear)
        optimizer = {**OPTIMIZERS, "lbfgs": torch.optim.LBFGS}[name](model.parameters())
        for _ in range(2):
            before = [_whole(p.detach()).clone() for p in model.parameters()]
            try:
                model(_mine(ctx)).square().mean().backward()
                optimizer.step(*([lambda: 0.0] if name == "lbfgs" else []))
            except weft.errors.OrderError as error:
                found[name] = str(error)
                assert largest_difference(before, [_whole(p.detach()) for p in model.parameters()]) == 0
        del optimizer
    return found


def test_an_optimizer_that_needs_it_and_has_it_not_is_refused_before_its_first_step():
    for found in run_ranks(_without, 2):
        assert list(found) == ["adafactor", "muon", "lbfgs"]
        for name, text in found.items():
            fix = "model, ctx = weft.replicate" if name == "lbfgs" else "optimizer, ctx = weft.gather_step"
            assert "over sharded parameters" in text and f"fix:      {fix}" in text
