"""step_in_backward: each parameter is stepped on as soon as its gradient is reduced."""

import pytest
import torch
from torch import nn

import weft
from weft.testing import largest_difference, run_ranks

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.05),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.1),
    "groups": lambda parameters: torch.optim.AdamW([{"params": [p], "lr": 0.01 * i} for i, p in enumerate(parameters)]),
}


def _net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
        return nn.Sequential(*layers, nn.Linear(4, 1)).double()


def _whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def _prepared(ctx, name="adamw", model=None, **options):
    model = model or _net()
    if ctx is None:
        return model, OPTIMIZERS[name](model.parameters()), None
    model, ctx = weft.fully_shard(model, ctx, units=nn.Sequential, **options)
    optimizer = OPTIMIZERS[name](model.parameters())
    optimizer, ctx = weft.step_in_backward(optimizer, ctx)
    return model, optimizer, ctx


def _train(ctx, name, steps=4):
    """Parameters in the end, and the most gradients there were at once in a pass."""
    model, optimizer, _ = _prepared(ctx, name)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
    most = 0
    for step in range(steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        loss = model(x if ctx is None else x.chunk(ctx.world_size)[ctx.rank]).square().mean()
        if ctx is not None:
            watched = [p for entry in optimizer.param_groups for p in entry["params"]]

            def count(_, watched=watched):
                nonlocal most
                most = max(most, sum(p.grad is not None for p in watched))

            handles = [p.register_post_accumulate_grad_hook(count) for p in watched]
            loss.backward()
            for handle in handles:
                handle.remove()
            assert all(p.grad is None for p in model.parameters())
        else:
            loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return [_whole(p) for p in model.parameters()], most


def _train_all(ctx):
    return {name: _train(ctx, name) for name in OPTIMIZERS}


def _check(n, mesh=None):
    for found in run_ranks(_train_all, n, mesh=mesh):
        for name, (parameters, most) in found.items():
            assert largest_difference(parameters, _train(None, name)[0]) < 1e-12, name
            assert most == 0, "gradients are freed one after the other"


def test_steps_are_those_of_the_plain_loop():
    _check(2)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, {"replica": 2, "shard": 2}])
def test_steps_on_4_ranks_are_those_of_the_plain_loop(mesh):
    _check(4, mesh)


def test_one_rank_frees_gradients_too():
    parameters, most = _train(weft.local(), "adamw")
    assert largest_difference(parameters, _train(None, "adamw")[0]) == 0 and most == 0


def _resumed(ctx, folder):
    """Two steps, saved; restored into a plain loop, which goes on."""
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4).chunk(ctx.world_size)[ctx.rank]

    def go_on(model, optimizer):
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer, here = _prepared(ctx)
    go_on(model, optimizer)
    state, here = weft.checkpointable({"model": model, "optimizer": optimizer}, here)
    weft.save(state, folder, 2, here)
    go_on(model, optimizer)
    other, here = weft.fully_shard(_net(), ctx, units=nn.Sequential)
    plain = OPTIMIZERS["adamw"](other.parameters())
    state, here = weft.checkpointable({"model": other, "optimizer": plain}, here)
    weft.restore(state, folder, here)
    go_on(other, plain)
    other, here = weft.undo(other, here, rebind=plain)
    return largest_difference([_whole(p) for p in model.parameters()], list(other.parameters()))


def test_state_is_that_of_the_plain_optimizer(tmp_path):
    assert max(run_ranks(_resumed, 2, tmp_path)) < 1e-12


def _refused(ctx):
    order = weft.errors.OrderError
    model, optimizer, here = _prepared(ctx)
    x = torch.ones(2, 4, dtype=torch.float64)
    for name, call in {
        "clip_grads": lambda: weft.clip_grads(model, here, max_norm=1.0),
        "accumulate_grads": lambda: weft.accumulate_grads(model, [x], here, steps=2),
    }.items():
        with pytest.raises(order, match=rf"(?s){name}: needs.*found:    step_in_backward.*fix: .*or {name}"):
            call()
    with pytest.raises(order, match=r"(?s)found:    another optimizer.*fix: .*the other optimizer out"):
        weft.step_in_backward(torch.optim.SGD(model.parameters()), here)
    model(x).sum().backward()
    with pytest.raises(weft.errors.ContractError, match=r"(?s)found:    a parameter of shape.*fix: .*optimizer.step"):
        model(x).sum().backward()
    optimizer.step()
    model(x).sum().backward()
    for prepare in (
        lambda: weft.replicate(_net(), ctx),
        lambda: weft.fully_shard(_net(), ctx, unused="zero"),
        lambda: (_net(), ctx),
    ):
        other, there = prepare()
        with pytest.raises(order, match=r"(?s)found:    8 parameters.*fix: .*weft.fully_shard"):
            weft.step_in_backward(OPTIMIZERS["adamw"](other.parameters()), there)
    other, there = weft.fully_shard(_net(), ctx)
    other, _, there = weft.accumulate_grads(other, [x], there, steps=2)
    with pytest.raises(order, match=r"(?s)found:    accumulate_grads.*fix: .*step_in_backward or accumulate_grads out"):
        weft.step_in_backward(OPTIMIZERS["adamw"](other.parameters()), there)
    scaled, there = weft.with_precision(nn.Linear(2, 2), ctx, "fp16")
    scaled, there = weft.fully_shard(scaled, there)
    with pytest.raises(order, match=r"(?s)found:    a loss scale.*fix: .*fp16 out"):
        weft.step_in_backward(OPTIMIZERS["adamw"](scaled.parameters()), there)


def test_what_needs_all_gradients_is_refused():
    run_ranks(_refused, 2)
    with pytest.raises(ValueError, match=r"(?s)found:    Adafactor.*fix: .*step_in_backward out"):
        weft.step_in_backward(torch.optim.Adafactor(_net().parameters()), weft.local())
