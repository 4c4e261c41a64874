"""grad_chain: the numbers of one process under every strategy, once per step, resumed; and what elements may return."""

import math
import tempfile

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from tests.variants import variant_cases
from weft.errors import AlreadyApplied, ContextError, ContractError, OrderError
from weft.grads import NamedGrads, add_noise, centralize, clip_norm, clip_value, skip_nonfinite
from weft.keyed_random.elements import normal_block
from weft.rng import mix
from weft.tensors.blocks import Block, whole
from weft.testing import check_element, largest_difference, run_ranks

STEPS = 4


class Net(nn.Module):
    """Sizes that 4 ranks cannot cut evenly, a tied weight, and a number."""

    def __init__(self):
        super().__init__()
        self.up, self.same, self.down = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 5)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.same.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.down(self.again(torch.tanh(self.same(torch.tanh(self.up(x)))))) * self.scale


def _net(dtype=torch.float64):
    torch.manual_seed(0)
    return Net().to(dtype)


def _x(step, rows=8):
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def by_name(grads, ctx):
    """Each weight gets a norm below 0.05; in every second step a bias stays."""
    norms = grads.sums({name: grads.held(name).local.square().sum() for name in grads})
    return {
        name: g * (0.05 / (1 + norms[name].sqrt())) if name.endswith("weight") else g
        for name, g in grads.items()
        if name != "down.bias" or grads.step % 2
    }


ELEMENTS = (clip_norm(0.1), centralize(), add_noise(lambda step: 0.01 / (1 + step), seed=3), by_name, clip_value(0.04))


def _by_hand(model, step):
    """What the elements are, in one process and plain torch."""
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for name, p in model.named_parameters():
        if p.dim() > 1:
            p.grad -= p.grad.mean(1, keepdim=True)
        noise = normal_block(whole(p.shape), p.shape, mix(3, step, 2, name, "noise"), p.device)
        p.grad += noise * 0.01 / (1 + step)
        if name.endswith("weight"):
            p.grad *= 0.05 / (1 + p.grad.norm())
        p.grad.clamp_(-0.04, 0.04)
    if step % 2 == 0:
        model.down.bias.grad = None


def _expected():
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        model(_x(step)).square().mean().backward()
        _by_hand(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def _applied(strategy, ctx):
    model = _net()
    if strategy == "tensor":
        model.again.weight = nn.Parameter(model.same.weight.detach().clone())  # one weight has one style
        plan = {"up": "column", "same": "row", "again": "column", "down": "row"}
        model, ctx = weft.tensor_parallel(model, ctx, plan=plan)
        model, ctx = weft.fully_shard(model, ctx) if ctx.data_size > 1 else (model, ctx)
    elif strategy == "flat":
        model, ctx = weft.replicate(model, ctx, flat=True)
    elif isinstance(strategy, str):
        model, ctx = getattr(weft, strategy)(model, ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if isinstance(strategy, int):
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=strategy)
    return model, optimizer, ctx


def _fit(model, optimizer, ctx, steps=range(STEPS)):
    for step in steps:
        part = _x(step).tensor_split(ctx.data_size)[ctx.data_rank]
        model(part.to(next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _whole(model, ctx):
    with weft.full_params(model, ctx):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def _train(ctx, strategies):
    found = {}
    for strategy in strategies:
        model, optimizer, after = _applied(strategy, ctx)
        optimizer, after = weft.grad_chain(optimizer, after, *ELEMENTS)
        _fit(model, optimizer, after)
        found[strategy] = _whole(model, after)
    return found


@pytest.mark.parametrize(
    ("ranks", "mesh", "strategies"),
    [
        (1, None, ("replicate",)),
        (2, None, ("replicate", "fully_shard", 1, 2)),
        *variant_cases(
            (4, None, ("replicate", "flat", "fully_shard", 1, 2, 3)),
            (4, {"replica": 2, "shard": 2}, ("fully_shard", 3)),
        ),
    ],
)
def test_every_strategy_has_the_parameters_of_one_process(ranks, mesh, strategies):
    expected = _expected()
    for found in run_ranks(_train, ranks, strategies, mesh=mesh, timeout_s=200):
        for strategy in strategies:
            assert largest_difference(found[strategy], expected) < 1e-12, strategy


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "mesh"), [(2, {"tensor": 2}), (4, {"shard": 2, "tensor": 2})])
def test_rows_that_lie_in_parts_have_one_mean(ranks, mesh):
    (expected,) = run_ranks(_train, 1, ["tensor"], mesh={"tensor": 1})
    for found in run_ranks(_train, ranks, ["tensor"], mesh=mesh, timeout_s=200):
        assert largest_difference(found, expected) < 1e-12


# -- noise -------------------------------------------------------------------------------------------


def test_noise_of_a_part_is_that_part_of_the_noise_of_the_whole():
    for shape in ((), (7,), (5, 9), (3, 4, 5), (6, 1)):
        drawn = normal_block(whole(shape), shape, 5, torch.device("cpu"))
        assert drawn.shape == shape and drawn.dtype == torch.float64
        for start in range(3 if shape else 0):
            block = Block(tuple(min(start, n - 1) for n in shape), tuple(n - min(start, n - 1) for n in shape))
            assert torch.equal(normal_block(block, shape, 5, torch.device("cpu")), drawn[block.slices])
        empty = Block((0,) * len(shape), (0, *shape[1:])) if shape else None
        assert empty is None or normal_block(empty, shape, 5, torch.device("cpu")).numel() == 0


def test_noise_is_normal_and_other_for_each_key():
    shape = (500, 401)
    one, two = (normal_block(whole(shape), shape, key, torch.device("cpu")).flatten() for key in (1, 2))
    assert abs(one.mean()) < 0.01 and abs(one.std() - 1) < 0.01 and abs(one.pow(4).mean() - 3) < 0.1
    inside = [(one.abs() < limit).double().mean() for limit in (0.5, 1.0, 2.0, 3.0)]
    expected = [math.erf(limit / math.sqrt(2)) for limit in (0.5, 1.0, 2.0, 3.0)]
    assert torch.allclose(torch.stack(inside), torch.tensor(expected, dtype=torch.float64), atol=4e-3)
    pairs = torch.stack([one, two, one.roll(1), one.roll(401)])
    assert (torch.corrcoef(pairs) - torch.eye(4)).abs().max() < 0.01
    assert one.unique().numel() == one.numel()


def test_noise_differs_by_step_name_element_and_seed():
    def drawn(step, place, name, seed):
        p = nn.Parameter(torch.zeros(3))
        p.grad = torch.zeros(3)
        add_noise(1.0, seed=seed)(NamedGrads({name: p}, step, place), weft.local())
        return tuple(p.grad.tolist())

    cases = [(0, 0, "a", 1), (1, 0, "a", 1), (0, 1, "a", 1), (0, 0, "b", 1), (0, 0, "a", 2)]
    assert len({drawn(*case) for case in cases}) == len(cases)
    assert drawn(*cases[0]) == drawn(*cases[0])


def test_complex_and_16_bit_gradients():
    for dtype in (torch.complex64, torch.bfloat16):
        p = nn.Parameter(torch.zeros(50, 4, dtype=dtype))
        p.grad = torch.ones_like(p)
        grads = NamedGrads({"p": p})
        for element in (centralize(), add_noise(0.1), clip_norm(1.0)):
            grads = element(grads, weft.local())
        assert grads["p"].dtype == dtype and abs(float(p.grad.abs().float().norm()) - 1) < 0.01


# -- once per step, what is skipped, what is saved ---------------------------------------------------


class Counts:
    """An element with state."""

    def __init__(self):
        self.steps = []

    def __call__(self, grads, ctx):
        self.steps.append(grads.step)
        return grads

    def state_dict(self):
        return {"steps": list(self.steps)}

    def load_state_dict(self, state):
        self.steps = list(state["steps"])


def _windows(ctx):
    model, ctx = weft.replicate(_net(), ctx)
    loader = DataLoader(TensorDataset(torch.cat([_x(step) for step in range(5)])), batch_size=8 // ctx.world_size)
    loader, ctx = weft.shard_data(loader, ctx)
    model, loader, ctx = weft.accumulate_grads(model, loader, ctx, steps=2)
    optimizer, counts = torch.optim.AdamW(model.parameters(), lr=0.01), Counts()
    optimizer, ctx = weft.grad_chain(optimizer, ctx, *ELEMENTS, counts)
    for window in loader:
        for (x,) in window:
            (model(x).square().mean() * window.share).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert counts.steps == [0, 1, 2]
    return _whole(model, ctx)


def _resumed(ctx):
    folder = weft.broadcast(tempfile.mkdtemp(), ctx)

    def made():
        model, after = weft.fully_shard(_net(), ctx)
        optimizer, counts = torch.optim.AdamW(model.parameters(), lr=0.01), Counts()
        optimizer, after = weft.grad_chain(optimizer, after, *ELEMENTS, counts)
        state, after = weft.checkpointable({"model": model, "optimizer": optimizer, "mine": counts}, after)
        return model, optimizer, counts, state, after

    model, optimizer, counts, state, after = made()
    _fit(model, optimizer, after, range(2))
    weft.save(state, folder, 2, after)
    _fit(model, optimizer, after, range(2, STEPS))
    model, optimizer, counts, state, after = made()
    _fit(model, optimizer, after, range(1))
    weft.restore(state, folder, after)
    assert counts.steps == [0, 1]
    _fit(model, optimizer, after, range(2, STEPS))
    assert counts.steps == [0, 1, 2, 3]
    return _whole(model, after)


def _skipped(ctx, policy, by_transform):
    model, ctx = weft.with_precision(_net(torch.float32), ctx, policy)
    model, ctx = weft.fully_shard(model, ctx)
    optimizer, counts = torch.optim.SGD(model.parameters(), lr=0.1), Counts()
    if by_transform:
        optimizer, ctx = weft.skip_nonfinite(optimizer, ctx)
    skip = () if by_transform else (skip_nonfinite(),)
    optimizer, ctx = weft.grad_chain(optimizer, ctx, *skip, counts, clip_norm(1.0))
    skipped, scales = [], []
    for step in range(3):
        bad = math.inf if step == 1 and ctx.rank == ctx.world_size - 1 else 1e-4
        (model(_x(step).float()).square().mean() * bad).backward()
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(weft.was_skipped(optimizer))
        scales.append(weft.loss_scale(model))
    assert skipped == [False, True, False] and counts.steps == [0, 2]
    assert policy != "fp16" or scales[1] == scales[0] / 2
    assert all(p.isfinite().all() for p in _whole(model, ctx).values())


def _cases(ctx):
    for policy, by_transform in (("fp16", False), ("fp16", True), ("fp32", False)):
        _skipped(ctx, policy, by_transform)
    return _windows(ctx), _resumed(ctx)


def test_once_per_window_skipped_on_all_ranks_and_resumed():
    ((window, resumed),) = run_ranks(_cases, 1)
    assert largest_difference(resumed, _expected()) < 1e-12
    for found in run_ranks(_cases, 2):
        assert largest_difference(found, (window, resumed)) < 1e-12


def _staged(ctx, strategy):
    """Three steps in stages, of which the second one is skipped, with the parameters of this rank."""
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4))).double()
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view(p.shape) * (1 + number) / 5)
    model, ctx = weft.pipeline(model, ctx, loss=nn.functional.mse_loss, micro_batches=2)
    if strategy == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if strategy == "zero_partition":
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=2)
    optimizer, ctx = weft.grad_chain(optimizer, ctx, skip_nonfinite(), clip_norm(0.5), add_noise(1e-2, seed=1))
    skipped = []
    for step in range(3):
        x = _x(step).tensor_split(ctx.data_size)[ctx.data_rank]
        bad = math.inf if step == 1 and ctx.data_rank == ctx.data_size - 1 else 1.0

        def closure(x=x, bad=bad):
            loss = model(x, target=x * bad)
            loss.backward()
            return loss.item()  # a number; some stages have no parameter that lies on a device first

        optimizer.step(closure)
        optimizer.zero_grad()
        skipped.append(weft.was_skipped(optimizer))
    assert skipped == [False, True, False]
    return {name: p for name, p in _whole(model, ctx).items() if not p.is_meta}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fully_shard", "zero_partition"])
def test_stages_of_a_pipeline_skip_a_step_together(strategy):
    (expected,) = run_ranks(_staged, 1, strategy, mesh={"pipeline": 1})
    found = run_ranks(_staged, 4, strategy, mesh={"pipeline": 2, "shard": 2}, timeout_s=200)
    assert {name for own in found for name in own} == set(expected)
    for own in found:
        assert largest_difference(own, {name: expected[name] for name in own}) < 1e-12


# -- several optimizers, other transforms of a step --------------------------------------------------


def _two_optimizers(ctx):
    model, ctx = weft.fully_shard(_net(), ctx)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    muon = torch.optim.Muon(matrices, lr=0.02)
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.dim() < 2], lr=0.01)
    muon, ctx = weft.gather_step(muon, ctx, by="owner")  # its hooks come first, and step last
    muon, ctx = weft.grad_chain(muon, ctx, clip_norm(0.1), add_noise(0.01))
    adamw, ctx = weft.grad_chain(adamw, ctx, clip_norm(0.1), centralize())
    for step in range(3):
        model(_x(step).tensor_split(ctx.data_size)[ctx.data_rank]).square().mean().backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    found = _whole(model, ctx)
    model, ctx = weft.undo(model, ctx, rebind=[muon, adamw])
    model(_x(0)).square().mean().backward()
    before = model.up.bias.grad.clone()
    adamw.step()
    assert torch.equal(model.up.bias.grad, before)  # the chain is undone with the rest
    return found


def test_two_optimizers_one_of_which_steps_by_owners():
    (expected,) = run_ranks(_two_optimizers, 1)
    for found in run_ranks(_two_optimizers, 2):
        assert largest_difference(found, expected) < 1e-12


def test_a_chain_after_the_strategy_and_with_a_closure():
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, ctx = weft.zero_partition(model, optimizer, weft.local(), stage=1)
    optimizer, ctx = weft.grad_chain(optimizer, ctx, *ELEMENTS)
    for step in range(STEPS):

        def closure(step=step):
            optimizer.zero_grad()
            loss = model(_x(step)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    assert largest_difference({name: p.detach() for name, p in model.named_parameters()}, _expected()) < 1e-12


def test_names_are_those_of_torch_where_no_module_is_known_and_numbered_where_there_are_several():
    seen = []

    def look(grads, ctx):
        seen.append(list(grads))
        return grads

    one = nn.Linear(2, 2)
    optimizer, _ = weft.grad_chain(torch.optim.SGD(one.named_parameters()), weft.local(), look)
    one(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    first, ctx = weft.replicate(nn.Linear(2, 2), weft.local())
    second, ctx = weft.replicate(nn.Sequential(nn.Linear(2, 1)), ctx)
    optimizer, ctx = weft.grad_chain(torch.optim.SGD([*first.parameters(), *second.parameters()]), ctx, look)
    second(first(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    assert seen == [["weight", "bias"], ["0.weight", "0.bias", "1.0.weight", "1.0.bias"]]


def test_sparse_gradients_are_clipped_and_centralized():
    model, ctx = weft.replicate(nn.Embedding(6, 3, sparse=True), weft.local())
    optimizer, ctx = weft.grad_chain(torch.optim.SGD(model.parameters(), lr=1.0), ctx, centralize(), clip_norm(1.0))
    before = model.weight.detach().clone()
    model(torch.tensor([1, 1, 4])).mul(torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    optimizer.step()
    step = before - model.weight.detach()
    assert torch.allclose(step.norm(), torch.ones(())) and torch.allclose(step.sum(1), torch.zeros(6), atol=1e-6)
    assert torch.allclose(step[1], 2 * step[4]) and not step[0].any()


# -- what may be wrong -------------------------------------------------------------------------------


def _linear(*elements, optimizer=torch.optim.SGD):
    model, ctx = weft.replicate(nn.Linear(2, 2), weft.local())
    made, ctx = weft.grad_chain(optimizer(model.parameters(), lr=0.1), ctx, *elements)
    return model, made, ctx


@pytest.mark.parametrize("wrong", [(), (3,), (clip_norm,), (centralize,), (clip_norm(1.0), None)])
def test_elements_are_functions_of_gradients_and_a_context(wrong):
    with pytest.raises(TypeError, match="(?s)grad_chain: .*found:.*fix: "):
        _linear(*wrong)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (lambda grads: None, "NoneType, no mapping"),
        (lambda grads: {"nowhere": grads["weight"]}, "'nowhere', which has no gradient"),
        (lambda grads: {"weight": 3.0}, "weight: float for"),
        (lambda grads: {"weight": grads["weight"][0]}, r"weight: torch.float32 \[2\] for torch.float32 \[2, 2\]"),
        (lambda grads: {"bias": grads["bias"].double()}, r"bias: torch.float64 \[2\]"),
    ],
)
def test_what_is_returned_is_checked(result, text):
    def mine(grads, ctx):
        return result(grads)

    model, optimizer, _ = _linear(mine)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ContractError, match=f"(?s)grad_chain: mine returned.*found: .*{text}"):
        optimizer.step()


def test_two_chains_lbfgs_and_steps_in_backward():
    model, optimizer, ctx = _linear(clip_norm(1.0))
    with pytest.raises(AlreadyApplied, match="grad_chain"):
        weft.grad_chain(optimizer, ctx, clip_value(1.0))
    weft.clip_grads(model, ctx, max_norm=1.0)  # beside it: as before
    with pytest.raises(ValueError, match="grad_chain: LBFGS"):
        _linear(clip_norm(1.0), optimizer=torch.optim.LBFGS)
    optimizer, ctx = weft.step_in_backward(torch.optim.SGD(nn.Linear(1, 1).named_parameters()), weft.local())
    with pytest.raises(OrderError, match="either grad_chain or step_in_backward"):
        weft.grad_chain(optimizer, ctx, clip_norm(1.0))
    model, optimizer, ctx = _linear(clip_norm(1.0))
    with pytest.raises(OrderError, match="move the call of gather_step before that of grad_chain"):
        weft.gather_step(optimizer, ctx)
    with pytest.raises(OrderError, match="have no names"):
        weft.grad_chain(torch.optim.SGD(nn.Linear(1, 1).parameters()), weft.local(), clip_norm(1.0))


@pytest.mark.parametrize(("make", "value"), [(clip_norm, 0), (clip_value, "1"), (add_noise, -1.0), (add_noise, "1")])
def test_limits_are_positive_numbers(make, value):
    with pytest.raises((TypeError, ValueError), match=f"(?s){make.__name__}: .*expected: a number > 0"):
        make(value)


def test_no_noise_on_sparse_gradients():
    model, ctx = weft.replicate(nn.Embedding(6, 3, sparse=True), weft.local())
    optimizer, ctx = weft.grad_chain(torch.optim.SGD(model.parameters()), ctx, add_noise(1.0))
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ContractError, match="add_noise: sparse gradients"):
        optimizer.step()


def only_here(grads, ctx):
    return {name: g for name, g in grads.items() if ctx.rank or name != "bias"}


def _differ(ctx):
    model, ctx = weft.replicate(nn.Linear(2, 2), ctx)
    optimizer, ctx = weft.grad_chain(torch.optim.SGD(model.parameters()), ctx, only_here)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ContextError, match=r"(?s)only_here leaves out: \['bias'\] on rank 0, \[\] on rank 1"):
        optimizer.step()
    with pytest.raises(ContextError, match="(?s)grad_chain: the ranks.*elements"):
        weft.grad_chain(torch.optim.SGD(model.parameters()), ctx, clip_norm(1.0 + ctx.rank))


def test_ranks_have_the_same_elements_and_leave_out_the_same():
    run_ranks(_differ, 2)


def shard_wise(grads, ctx):
    """Wrong: the norm of what this rank has."""
    return {name: g / (1 + grads.held(name).local.norm()) for name, g in grads.items()}


@pytest.mark.slow
def test_the_laws_see_an_element_that_forgets_the_other_ranks():
    check_element(clip_norm(0.05), by_name)
    with pytest.raises(AssertionError, match="grad_chain after fully_shard: rank 0 of 2 differs"):
        check_element(shard_wise)
