"""Optimizers step right on whole and sharded parameters together, in lists of tensors and in one kernel, as on CUDA."""

import pytest
import torch
from torch import nn

import weft
from tests.variants import variant_cases, variants
from weft.testing import largest_difference, run_ranks

HOW = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
PLAN = {"1.up": "column", "1.down": "row"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stacked(nn.Module):
    """Experts as transformers has them."""

    def __init__(self):
        super().__init__()
        self.num_experts = 4
        self.weight = nn.Parameter(torch.randn(4, 6, 6) / 3)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        rows = torch.einsum("th,tkoh->tko", hidden_states, self.weight[top_k_index])
        return (torch.tanh(rows) * top_k_weights[..., None]).sum(1)


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(6, 4), Stacked()

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x, chosen, weights)


def _net(block):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 6), block(), nn.Linear(6, 5)).double()


def _cut(module, ctx):
    return weft.tensor_parallel(module, ctx, plan=PLAN)


def _experts(module, ctx):
    return weft.expert_parallel(module, ctx, experts=Stacked)


# Name: the mesh, the block, what makes the layers parallel, and the strategy.
TWO = {
    "replicate": (None, Block, None, weft.replicate),
    "flat": (None, Block, None, lambda m, c: weft.replicate(m, c, flat=True)),
    "fully_shard": (None, Block, None, weft.fully_shard),
    "fully_shard, a layer ignored": (None, Block, None, lambda m, c: weft.fully_shard(m, c, ignored=["0"])),
    "zero 1": (None, Block, None, 1),
    "zero 2": (None, Block, None, 2),
    "zero 3": (None, Block, None, 3),
    "tensor": ({"tensor": 2}, Block, _cut, None),
    "experts": ({"expert": 2}, Routed, _experts, weft.replicate),
    "experts, fully_shard": ({"expert": 2}, Routed, _experts, weft.fully_shard),
}
FOUR = {
    "tensor, replicate": ({"data": 2, "tensor": 2}, Block, _cut, weft.replicate),
    "tensor, fully_shard": ({"data": 2, "tensor": 2}, Block, _cut, weft.fully_shard),
    "tensor, a layer ignored": (
        {"data": 2, "tensor": 2},
        Block,
        _cut,
        lambda m, c: weft.fully_shard(m, c, ignored=["0", "1.norm"]),
    ),
    "tensor, zero 1": ({"data": 2, "tensor": 2}, Block, _cut, 1),
    "tensor, zero 2": ({"data": 2, "tensor": 2}, Block, _cut, 2),
    "experts, 2 x 2": ({"data": 2, "expert": 2}, Routed, _experts, weft.fully_shard),
    "experts, zero 1": ({"data": 2, "expert": 2}, Routed, _experts, 1),
    "hybrid": ({"replica": 2, "shard": 2}, Block, None, weft.fully_shard),
}


class Own(torch.optim.AdamW):
    """Torch's implementations, in a class that weft does not know."""


class Listed(torch.optim.Optimizer):
    """One of a user, that hands lists to torch and needs a norm of everything."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            momenta = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in parameters]
            torch._foreach_lerp_(momenta, [p.grad for p in parameters], 0.3)
            norm = sum(m.square().sum() for m in momenta).sqrt()
            torch._foreach_add_(parameters, torch._foreach_div(momenta, norm), alpha=-group["lr"])


# Adam divides by the root of squares: where a gradient is next to 0, so would be the differences of rounding.
OPTIMIZERS = {
    "AdamW": lambda p, how: torch.optim.AdamW(p, 0.02, eps=1e-3, **how),
    "SGD": lambda p, how: torch.optim.SGD(p, 0.05, momentum=0.9, **how),
    "Adagrad": lambda p, how: torch.optim.Adagrad(p, 0.05, eps=1e-3, **how),
    "of a class that is not torch's": lambda p, how: Own(p, 0.02, eps=1e-3, **how),
}


def _x():
    return torch.randn(3, 8, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def _train(model, optimizer, batches):
    for x in batches:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _whole(model):
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def _make(ctx, case, make):
    """The model, the optimizer and the rank's part of the batches."""
    mesh, block, parallel, strategy = case
    model = _net(block)
    if mesh is not None and dict(ctx.axes) != mesh:
        ctx = weft.adopt(device="cpu", mesh=mesh)
    if parallel is not None:
        model, ctx = parallel(model, ctx)
    if isinstance(strategy, int):
        model, optimizer, ctx = weft.zero_partition(model, make(model.parameters()), ctx, stage=strategy)
    else:
        model, ctx = (model, ctx) if strategy is None else strategy(model, ctx)
        optimizer = make(model.parameters())
    data = ctx.on(ctx.data_axes)
    return model, optimizer, [x.chunk(data.world_size)[data.rank] for x in _x()], ctx


def _on_ranks(ctx, case, name, hows):
    found = {}
    for how in hows:
        model, optimizer, batches, _ = _make(ctx, case, lambda p, how=how: OPTIMIZERS[name](p, HOW[how]))
        _train(model, optimizer, batches)
        found[how] = _whole(model)
    return found


def _check(ranks, cases, name, hows):
    expected = {}
    for block in (Block, Routed):
        for how in hows:
            model = _net(block)
            _train(model, OPTIMIZERS[name](model.parameters(), HOW[how]), _x())
            expected[block, how] = _whole(model)
    for case in cases:
        mesh, block, *_ = made = {**TWO, **FOUR}[case]
        for found in run_ranks(_on_ranks, ranks, made, name, hows, mesh=mesh):
            for how, result in found.items():
                assert largest_difference(result, expected[block, how]) < 1e-12, (case, how)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(2, list(TWO)), pytest.param(4, list(FOUR), marks=pytest.mark.variant)],
    ids=("2", "2 x 2"),
)
def test_every_strategy_steps_as_one_process(ranks, cases):
    _check(ranks, cases, "AdamW", ["foreach", "fused"])


def _gradients(model):
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone() for p in model.parameters()]


def _clip(ctx, case):
    """The gradients that torch's function clips, or what is said instead, and those that weft's clips then."""
    found = {}
    for foreach in (None, True, False):
        model, _, batches, ours = _make(ctx, case, torch.optim.AdamW)
        model(batches[0]).square().mean().backward()
        said = ""
        try:
            with weft.local():
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=foreach)
        except weft.errors.ContractError as error:
            said = str(error)
            weft.clip_grads(model, ours, max_norm=0.01)
        found[foreach] = _gradients(model), said
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cases"), [(2, list(TWO)), *variant_cases((4, list(FOUR)))], ids=("2", "2 x 2"))
def test_clipping_by_torch_is_right_or_says_what_to_write(ranks, cases):
    expected = {}
    for block in (Block, Routed):
        model = _net(block)
        model(_x()[0]).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        expected[block] = _gradients(model)
    refused = set()
    for case in cases:
        mesh, block, *_ = made = {**TWO, **FOUR}[case]
        for found in run_ranks(_clip, ranks, made, mesh=mesh):
            for foreach, (result, said) in found.items():
                assert largest_difference(result, expected[block]) < 1e-12, (case, foreach, said)
                assert "weft.clip_grads(model, ctx, max_norm=1.0)" in said or not said, said
                refused |= {case} if said else set()
    assert ranks == 4 or refused == {"fully_shard, a layer ignored", "tensor", "experts"}


@pytest.mark.parametrize("name", variants(*list(OPTIMIZERS)[1:]))
def test_other_optimizers_do(name):
    for ranks, cases in ((2, TWO), (4, FOUR)):
        mixed = [case for case in cases if "tensor" in case or "experts" in case or "ignored" in case]
        _check(ranks, mixed[:: ranks // 2], name, list(HOW))


MIXED = ("fully_shard, a layer ignored", "tensor", "experts")


class Outer(torch.optim.Optimizer):
    """A wrapper, as Lookahead: it has the groups of the optimizer inside."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.param_groups, self.inner = inner.param_groups, inner

    @torch.no_grad()
    def step(self, closure=None):
        before = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.inner.step()
        for p, old in zip((p for group in self.param_groups for p in group["params"]), before, strict=True):
            p.lerp_(old, 0.5)


USERS = {
    "lists and a norm of all": lambda p: Listed(p),
    "a wrapper": lambda p: Outer(torch.optim.AdamW(p, 0.02, eps=1e-3, foreach=True)),
    "Rprop": lambda p: torch.optim.Rprop(p, 1e-3, foreach=True),
}


def _users(ctx):
    found = {}
    for case in MIXED:
        for name, make in USERS.items():
            model, optimizer, batches, _ = _make(ctx, TWO[case], make)
            _train(model, optimizer, batches)
            found[case, name] = _whole(model)
    return found


@pytest.mark.slow
def test_optimizers_that_weft_does_not_know_step_as_in_one_process():
    expected = {}
    for block in (Block, Routed):
        for name, make in USERS.items():
            model = _net(block)
            _train(model, make(model.parameters()), _x())
            expected[block, name] = _whole(model)
    for found in run_ranks(_users, 2):
        for (case, name), result in found.items():
            assert largest_difference(result, expected[TWO[case][1], name]) < 1e-12, (case, name)


def _experts_alone(ctx):
    """Without a strategy, as for ranks that have the same batches: of an expert, the gradients of all ranks add up."""
    found = []
    for how in HOW.values():
        model, optimizer, batches, after = _make(
            ctx, ({"expert": 2}, Routed, _experts, None), lambda p, how=how: torch.optim.AdamW(p, 0.02, **how)
        )
        _train(model, optimizer, batches)
        found.append(_whole(model))
        weft.undo(model, after, rebind=optimizer)
        assert not optimizer._optimizer_step_pre_hooks
    return max(largest_difference(found[0], one) for one in found)


def test_experts_without_a_strategy_step_in_every_form():
    assert max(run_ranks(_experts_alone, 2)) < 1e-12


def _of_whole_tensors(ctx):
    makes = {
        "tensor": lambda p: torch.optim.Muon([one for one in p if one.dim() == 2], 0.02),
        "experts": lambda p: torch.optim.Adafactor(p, 0.02, foreach=True),
    }
    found = {}
    for case, make in makes.items():
        model, optimizer, batches, _ = _make(ctx, TWO[case], make)
        with pytest.raises(weft.errors.OrderError, match=r"(?s)looks at whole tensors.*fix: .*gather_step"):
            _train(model, optimizer, batches)
        model, optimizer, batches, after = _make(ctx, TWO[case], make)
        optimizer, _ = weft.gather_step(optimizer, after)
        _train(model, optimizer, batches)
        alone = _net(TWO[case][1])
        _train(alone, make(alone.parameters()), _x())
        found[case] = largest_difference(_whole(model), _whole(alone))
    return found


def test_optimizers_of_whole_tensors_need_gather_step_where_layers_are_cut():
    """Without it their weights would differ from those of one process."""
    for found in run_ranks(_of_whole_tensors, 2):
        assert max(found.values()) < 1e-12, found


def _between_steps(ctx):
    model, optimizer, batches, after = _make(ctx, TWO["tensor"], lambda p: torch.optim.AdamW(p, 0.02, foreach=True))
    groups = [list(entry["params"]) for entry in optimizer.param_groups]
    seen = []
    _train(model, optimizer, batches[:1])
    handles = [
        optimizer.register_step_pre_hook(lambda o, *_: seen.append([entry["params"] for entry in o.param_groups])),
        optimizer.register_step_post_hook(lambda o, *_: seen.append([entry["params"] for entry in o.param_groups])),
    ]
    _train(model, optimizer, batches[1:])
    assert len(seen) == 4 and all(one is mine for held in seen for one, mine in zip(held[0], groups[0], strict=True))
    for p in model.parameters():
        state = optimizer.state[p]["exp_avg"]
        assert type(state) is (torch.Tensor if type(p) is nn.Parameter else type(p))
        assert getattr(state, "placements", None) == getattr(p, "placements", None)
    # What is loaded, added or cleared counts.
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.float64))]})
    model[0].weight.grad = None
    _train(model, optimizer, batches[:1])
    assert optimizer.state[model[0].weight]["step"] == 4
    optimizer.state.clear()
    _train(model, optimizer, batches[:1])
    assert optimizer.state[model[0].weight]["step"] == 1 and optimizer.state[model[1].up.weight]["step"] == 1
    for handle in handles:
        handle.remove()
    optimizer, _ = weft.gather_step(optimizer, after)  # asked for by now: it takes over
    _train(model, optimizer, batches[:1])
    assert optimizer.state[model[1].up.weight]["step"] == 2
    assert len(optimizer._optimizer_step_pre_hooks) == 2  # to see steps, and to make them


def test_between_steps_an_optimizer_looks_as_always():
    run_ranks(_between_steps, 2)


def _cleared(ctx):
    for case in ("fully_shard", "zero 1", "zero 2"):
        model, optimizer, batches, _ = _make(ctx, TWO[case], lambda p: torch.optim.AdamW(p, 0.02))
        _train(model, optimizer, batches)
        optimizer.state.clear()
        _train(model, optimizer, batches[:1])
        assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}, case


def test_state_that_was_cleared_is_gone():
    run_ranks(_cleared, 2)


def _by_columns(layers=10):
    """Small enough to be reduced in a flat buffer; with matrices that lie column by column in memory."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 5), *(nn.Linear(5, 5) for _ in range(layers)))
    for layer in list(model)[:3]:
        layer.weight.data = layer.weight.data.t().contiguous().t()
    return model.double()


def _train_by_columns(ctx):
    found = {}
    for strategy in ("replicate", "flat", "fully_shard", 1, 2):
        for how, options in HOW.items():
            model, make = _by_columns(), lambda m, o=options: torch.optim.AdamW(m.parameters(), 0.02, eps=1e-3, **o)
            if isinstance(strategy, int):
                model, optimizer, _ = weft.zero_partition(model, make(model), ctx, stage=strategy)
            else:
                model, _ = TWO[strategy][3](model, ctx)
                optimizer = make(model)
            _train(model, optimizer, [x.chunk(2)[ctx.rank] for x in _x()])
            found[strategy, how] = _whole(model)
    return found


def test_matrices_that_lie_column_by_column_are_stepped_on_as_they_lie():
    """torch's fused kernels take for granted that parameters, gradients and state lie alike in memory."""
    model = _by_columns()
    _train(model, torch.optim.AdamW(model.parameters(), 0.02, eps=1e-3), _x())
    for found in run_ranks(_train_by_columns, 2):
        for case, result in found.items():
            assert largest_difference(result, _whole(model)) < 1e-12, case
