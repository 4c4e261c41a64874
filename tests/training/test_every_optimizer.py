"""Every optimizer of torch, in each implementation it has, under every strategy: as in one process, or refused."""

import pytest
import torch
from torch import nn

import weft
from weft.testing import largest_difference, run_ranks

STRATEGIES = ("replicate", "flat", "fuse_step", "fully_shard", "gather_step", "zero1", "zero2", "zero3")
KINDS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
VARIANTS = {
    "default": {},
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
    "fused": {"fused": True},
    "momentum": {"momentum": 0.9, "nesterov": True},
    "fused momentum": {"fused": True, "momentum": 0.9},
    "amsgrad": {"amsgrad": True, "maximize": True},
}
LOOK_AT_WHOLE = ("Adafactor", "Muon")


def _net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5)).double()


def _x(ctx=None):
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return x if ctx is None else x.chunk(ctx.world_size)[ctx.rank]


def _optimizer(name, variant, model):
    for p in model.parameters():
        p.requires_grad_(name != "Muon" or p.dim() == 2)  # it takes matrices only
    return KINDS[name]([p for p in model.parameters() if p.requires_grad], lr=0.01, **VARIANTS[variant])


def _exists(name, variant):
    try:
        _optimizer(name, variant, _net())
    except (TypeError, RuntimeError, ValueError):
        return False
    return name != "SparseAdam"  # has a test of its own


CASES = [(name, variant) for name in KINDS for variant in VARIANTS if _exists(name, variant)]


def _train(model, optimizer, x):
    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for step in range(3):
        if step == 1 or isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in model.parameters()]


def _train_on_ranks(ctx, strategy, name, variant):
    model = _net()
    if strategy.startswith("zero"):
        optimizer = _optimizer(name, variant, model)
        model, optimizer, _ = weft.zero_partition(model, optimizer, ctx, stage=int(strategy[-1]))
    elif strategy in ("fully_shard", "gather_step"):
        _optimizer(name, variant, model)
        model, after = weft.fully_shard(model, ctx)
        optimizer = _optimizer(name, variant, model)
        if strategy == "gather_step":
            optimizer, _ = weft.gather_step(optimizer, after)
    else:
        optimizer = _optimizer(name, variant, model)
        model, after = weft.replicate(model, ctx, flat=strategy != "replicate")
        if strategy == "fuse_step":
            optimizer, _ = weft.fuse_step(optimizer, after)
    return _train(model, optimizer, _x(ctx))


def _train_all(ctx, cases, strategies):
    found = {}
    for name, variant in cases:
        for strategy in strategies:
            try:
                found[name, variant, strategy] = _train_on_ranks(ctx, strategy, name, variant)
            except (weft.errors.WeftError, ValueError) as error:
                found[name, variant, strategy] = str(error)
    return found


def _refusal(name, variant, strategy):
    """What of an error is expected; None if it has to work."""
    takes_closures = name not in LOOK_AT_WHOLE
    if name == "LBFGS":
        return None if strategy in ("replicate", "flat") else "LBFGS"
    if strategy == "fuse_step":
        return "cannot step on a flat buffer" if not takes_closures else "closure"
    if strategy == "fully_shard":
        return None if takes_closures else "weft.gather_step(optimizer, ctx)"
    return "closure" if strategy not in ("replicate", "flat") and not takes_closures else None


def _check(cases, strategies):
    expected = {}
    for name, variant in cases:
        model = _net()
        expected[name, variant] = _train(model, _optimizer(name, variant, model), _x())
    for found in run_ranks(_train_all, 2, cases, strategies):
        for (name, variant, strategy), result in found.items():
            refusal = _refusal(name, variant, strategy)
            if refusal is not None:
                assert isinstance(result, str), (name, variant, strategy)
                assert refusal in result and "fix: " in result, result
            else:
                assert not isinstance(result, str), (name, variant, strategy, result)
                assert largest_difference(result, expected[name, variant]) < 1e-12, (name, variant, strategy)


def test_what_torch_has_for_plain_tensors_only_works_on_shards():
    cases = [("Rprop", "default"), ("SGD", "fused momentum"), ("Adagrad", "fused"), ("LBFGS", "default")]
    _check(cases, ("fully_shard", "gather_step", "zero1", "zero2", "zero3"))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_optimizer_steps_as_in_one_process(strategy):
    _check(CASES, (strategy,))


def _sparse():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Embedding(6, 2, sparse=True).double()


def _train_sparse(model, optimizer, rows):
    for _ in range(3):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def _without_fused(name, model):
    """torch has its fused kernels for dense gradients only."""
    options = {} if name == "SparseAdam" else {"foreach": False}
    return KINDS[name](model.parameters(), lr=0.1, **options)


def _on_sparse_gradients(ctx):
    rows, found = ROWS.chunk(ctx.world_size)[ctx.rank], {}
    for name in ("SparseAdam", "SGD", "Adagrad"):
        model, _ = weft.replicate(_sparse(), ctx)
        found[name, "replicate"] = _train_sparse(model, _without_fused(name, model), rows)
        for stage in (1, 2, 3):
            model = _sparse()
            try:
                model, optimizer, _ = weft.zero_partition(model, _without_fused(name, model), ctx, stage=stage)
                found[name, stage] = _train_sparse(model, optimizer, rows)
            except ValueError as error:
                assert stage > 1 and "weight, of embeddings with sparse=True" in str(error)
    with pytest.raises(ValueError, match=r"(?s)sparse gradients of Embedding cannot be sharded.*fix: .*sparse=False"):
        weft.fully_shard(_sparse(), ctx)
    return found


ROWS = torch.tensor([0, 1, 1, 5, 2, 0, 3, 1])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_equal_one_process_or_are_refused():
    for found in run_ranks(_on_sparse_gradients, 2):
        assert {how for _, how in found} == {"replicate", 1}
        for (name, how), result in found.items():
            model = _sparse()
            expected = _train_sparse(model, _without_fused(name, model), ROWS)
            assert largest_difference(result, expected) < 1e-12, (name, how)


def _over_a_part(ctx):
    model, _ = weft.fully_shard(_net(), ctx)
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2])
    model(_x(ctx)).square().mean().backward()
    with pytest.raises(weft.errors.OrderError, match=r"Muon looks at whole tensors"):
        optimizer.step()


def test_an_optimizer_over_a_part_of_the_parameters_is_seen_before_its_first_step():
    run_ranks(_over_a_part, 2)


class Averaging(torch.optim.Optimizer):
    """Stands in for those of schedulefree: the parameters are averages in evaluation, and others in training."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "steps": 0})
        self.training = True

    def _swap(self, *, weight, training):
        for group in self.param_groups if training != self.training else ():
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.data.lerp_(self.state[p]["z"], weight)
        self.training = training

    def train(self):
        self._swap(weight=0.25, training=True)

    def eval(self):
        self._swap(weight=-1 / 3, training=False)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, 0.5 / group["steps"])
                z.sub_(p.grad, alpha=group["lr"])


def _average(model, optimizer, x):
    found = []
    for _ in range(2):
        optimizer.train()
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        optimizer.eval()
        found += [p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in model.parameters()]
    return found


def _averaged(ctx):
    model = _net()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(
        weft.errors.ContractError, match=r"(?s)Averaging changes parameters outside step.*fix: .*stage=2"
    ):
        weft.zero_partition(model, Averaging(model.parameters()), ctx, stage=1)
    assert largest_difference(before, list(model.parameters())) == 0 and not model._forward_hooks
    found = []
    for stage in (2, 3):
        model = _net()
        model, optimizer, _ = weft.zero_partition(model, Averaging(model.parameters()), ctx, stage=stage)
        found.append(_average(model, optimizer, _x(ctx)))
    return found


def test_an_optimizer_that_changes_parameters_in_eval_is_refused_in_stage_1_alone():
    model = _net()
    expected = _average(model, Averaging(model.parameters()), _x())
    for found in run_ranks(_averaged, 2):
        assert all(largest_difference(each, expected) < 1e-12 for each in found)


def _steps_with_the_hooks_of_another(ctx):
    model, ctx = weft.fully_shard(_net(), ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(_x(ctx)).sum().backward()
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    other._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks  # as wrappers do that copy `__dict__`
    other.step()
    optimizer.step()
    return [p.full_tensor().detach() for p in model.parameters()]


def test_an_optimizer_with_the_hooks_of_another_steps():
    model = _net()
    model(_x()).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad /= 2  # the mean of two ranks
    optimizer.step()
    for found in run_ranks(_steps_with_the_hooks_of_another, 2):
        assert largest_difference(found, list(model.parameters())) < 1e-12
