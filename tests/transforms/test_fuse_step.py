"""fuse_step: one kernel per group, and the user's optimizer to the outside."""

import copy
import pickle

import pytest
import torch
from torch import nn

import weft
from weft.errors import ContractError, OrderError
from weft.testing import RanksFailed, largest_difference, run_ranks


class Net(nn.Module):
    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.ones(()))
        self.third = nn.Linear(5, 2)
        self.to(dtype)

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)) * self.scale)))


def _x(step, dtype=torch.float64):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)


OPTIMIZERS = {
    "sgd": lambda g: torch.optim.SGD(g, 0.1),
    "momentum": lambda g: torch.optim.SGD(g, 0.1, momentum=0.9, dampening=0.1),
    "nesterov": lambda g: torch.optim.SGD(g, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda g: torch.optim.AdamW(g, 0.02, weight_decay=0.1),
    "adamw foreach": lambda g: torch.optim.AdamW(g, 0.02, foreach=True),
    "adamw fused": lambda g: torch.optim.AdamW(g, 0.02, fused=True),
    "amsgrad": lambda g: torch.optim.Adam(g, 0.02, amsgrad=True),
    "rmsprop": lambda g: torch.optim.RMSprop(g, 0.02, momentum=0.5, centered=True),
    "adagrad": lambda g: torch.optim.Adagrad(g, 0.1),
    "adadelta": lambda g: torch.optim.Adadelta(g, 0.5),
    "adamax": lambda g: torch.optim.Adamax(g, 0.02),
    "nadam": lambda g: torch.optim.NAdam(g, 0.02),
    "radam": lambda g: torch.optim.RAdam(g, 0.02),
    "rprop": lambda g: torch.optim.Rprop(g, 0.02),
    "asgd": lambda g: torch.optim.ASGD(g, 0.02),
    "maximize": lambda g: torch.optim.AdamW(g, 0.02, maximize=True),
    "tensor lr": lambda g: torch.optim.AdamW(g, torch.tensor(0.02, dtype=torch.float64), foreach=False),
}
GROUPS = {
    "one": lambda m: m.parameters(),
    "named": lambda m: m.named_parameters(),
    "two": lambda m: [
        {"params": [p for p in m.parameters() if p.dim() > 1], "weight_decay": 0.2},
        {"params": [p for p in m.parameters() if p.dim() <= 1], "lr": 0.05, "weight_decay": 0.0},
    ],
    "backwards": lambda m: [{"params": list(m.third.parameters())}, {"params": list(m.first.parameters())}],
}


def _prepare(ctx, make, groups="one", fused=True, frozen=(), **options):
    model = Net()
    for name, p in model.named_parameters():
        p.requires_grad_(name not in frozen)
    model, ctx = weft.replicate(model, ctx, flat=True, **options)
    optimizer = OPTIMIZERS[make](GROUPS[groups](model)) if isinstance(make, str) else make(model)
    if fused:
        optimizer, ctx = weft.fuse_step(optimizer, ctx)
    return model, optimizer, ctx


def _train(model, optimizer, steps=4, clip=None, to_none=True, scheduler=None):
    for step in range(steps):
        model(_x(step)).square().sum().backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad(set_to_none=to_none)
    return [p.detach().clone() for p in model.parameters()]


def _both(ctx, prepare, train):
    """The same training with the plain step and with the fused one."""
    return [_train(*_prepare(ctx, *prepare[0], fused=fused, **prepare[1])[:2], **train) for fused in (False, True)]


def _check(prepare, train=None, limit=1e-14):
    for plain, fused in run_ranks(_both, 2, prepare, train or {}):
        assert largest_difference(plain, fused) <= limit
        assert largest_difference(plain, [p.detach() for p in Net().parameters()]) > 1e-3  # something was learned


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_numbers_are_those_of_the_plain_step(name):
    _check(((name,), {}))


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("name", ["adamw", "nesterov"])
def test_groups_keep_their_own_options(name, groups):
    _check(((name, groups), {}))


@pytest.mark.parametrize("train", [{"clip": 0.1}, {"to_none": False}, {"to_none": False, "clip": 0.1}], ids=str)
def test_clipping_and_both_ways_of_zero_grad(train):
    _check((("adamw",), {}), train)


@pytest.mark.parametrize("frozen", [["first.weight"], ["second.bias", "scale"]], ids=str)
def test_frozen_parameters_stay(frozen):
    _check((("adamw", "one"), {"frozen": frozen}))


def _scheduled(ctx, fused):
    model, optimizer, _ = _prepare(ctx, "adamw", "two", fused)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    return _train(model, optimizer, steps=6, scheduler=scheduler), scheduler.get_last_lr()


def test_schedulers_drive_the_users_groups():
    plain, fused = run_ranks(_scheduled, 2, False), run_ranks(_scheduled, 2, True)
    assert largest_difference(plain[0][0], fused[0][0]) <= 1e-14 and plain[0][1] == fused[0][1]


# -- the optimizer stays the user's ------------------------------------------------------------------


def _looks(ctx):
    model, optimizer, ctx = _prepare(ctx, "adamw", "two")
    groups = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    _train(model, optimizer)
    assert groups == [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    assert {id(p) for p in model.parameters()} == {i for group in groups for i in group}
    for p in model.parameters():
        state = optimizer.state[p]
        assert state["exp_avg"].shape == p.shape and float(state["step"]) == 4
    assert len(optimizer.state) == len(list(model.parameters()))
    assert type(optimizer) is torch.optim.AdamW
    return True


def test_groups_and_state_show_the_users_parameters():
    assert run_ranks(_looks, 2) == [True, True]


def _portable(ctx, name, groups):
    """State from the fused step to a plain optimizer, and back: all go on alike."""
    found = []
    for source, target in ((False, True), (True, False), (True, True), (False, False)):
        model, optimizer, _ = _prepare(ctx, name, groups, source)
        _train(model, optimizer, steps=2)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        other, fresh, _ = _prepare(ctx, name, groups, target)
        if target:
            _train(other, fresh, steps=1)  # what was there is replaced
        other.load_state_dict(saved[0])
        fresh.load_state_dict(copy.deepcopy(saved[1]))  # torch takes some tensors as they are
        found.append((_train(other, fresh, steps=3), saved[1]))
    return found


@pytest.mark.parametrize(
    ("name", "groups"), [("adamw", "two"), ("nesterov", "backwards"), ("sgd", "one"), ("asgd", "one")]
)
def test_state_goes_from_and_to_the_plain_optimizer(name, groups):
    for found in run_ranks(_portable, 2, name, groups):
        for parameters, state in found:
            assert largest_difference(parameters, found[-1][0]) <= 1e-14
            assert state["param_groups"] == found[-1][1]["param_groups"]
            assert state["state"].keys() == found[-1][1]["state"].keys()
            for index, entry in state["state"].items():
                assert largest_difference(entry, found[-1][1]["state"][index]) <= 1e-14


def _late(ctx):
    """Applied to an optimizer that has stepped already."""
    found = []
    for fused in (False, True):
        model, optimizer, ctx_ = _prepare(ctx, "adamw", "two", fused=False)
        _train(model, optimizer, steps=2)
        if fused:
            weft.fuse_step(optimizer, ctx_)
        found.append(_train(model, optimizer, steps=3))
    return largest_difference(*found)


def test_a_state_that_is_there_already_is_taken_over():
    assert max(run_ranks(_late, 2)) <= 1e-14


def _undone(ctx):
    model, optimizer, _ = _prepare(ctx, "adamw", "two")
    _train(model, optimizer, steps=2)
    for undoable in weft.contract.offered(optimizer, weft.contract.Undoable):
        undoable.undo()
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    assert [type(hook.__self__).__name__ for hook in hooks] == ["Steps"]  # replicate's
    plain, reference, _ = _prepare(ctx, "adamw", "two", fused=False)
    _train(plain, reference, steps=2)
    return largest_difference(_train(model, optimizer), _train(plain, reference))


def test_it_can_be_taken_back():
    assert max(run_ranks(_undone, 2)) <= 1e-14


def _pickled(ctx):
    model, optimizer, _ = _prepare(ctx, "adamw")
    _train(model, optimizer, steps=2)
    twin, other = pickle.loads(pickle.dumps((model, optimizer)))
    assert weft.contract.offered(other, weft.contract.Undoable) == []
    own = {id(p) for p in twin.parameters()}
    assert {id(p) for group in other.param_groups for p in group["params"]} == own
    before = [p.detach().clone() for p in model.parameters()]
    alone = _train(twin, other, steps=2)  # leaves the original as it was
    unchanged = largest_difference(before, [p.detach() for p in model.parameters()])
    return unchanged, largest_difference(alone, _train(model, optimizer, steps=2))


def test_a_copy_is_a_plain_optimizer_and_goes_on_alike():
    for unchanged, difference in run_ranks(_pickled, 2):
        assert unchanged == 0 and difference <= 1e-14


def _two_optimizers(ctx):
    """Two optimizers over one module: the second one's layout is the first one's too."""
    found = []
    for fused in (False, True):
        model, ctx_ = weft.replicate(Net(), ctx, flat=True)
        # every other parameter, so that neither lies in one stretch of the other's layout
        parameters = list(model.parameters())
        optimizers = []
        for index, make in enumerate((OPTIMIZERS["adamw"], OPTIMIZERS["nesterov"])):
            optimizer = make(parameters[index::2])
            if index:
                _train(model, optimizers[0], steps=1)
            if fused:
                optimizer, ctx_ = weft.fuse_step(optimizer, ctx_)
            optimizers.append(optimizer)
        for step in range(4):
            model(_x(step)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
        found.append([p.detach().clone() for p in parameters])
    return largest_difference(*found)


def test_two_optimizers_over_one_module():
    assert max(run_ranks(_two_optimizers, 2)) <= 1e-14


def _raises_half_way(ctx):
    model, optimizer, _ = _prepare(ctx, "adamw", "two")
    _train(model, optimizer, steps=1)
    groups = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    rate = optimizer.param_groups[0]["lr"]
    model(_x(1)).square().sum().backward()
    optimizer.param_groups[0]["lr"] = "nonsense"
    try:
        optimizer.step()
    except TypeError:
        optimizer.param_groups[0]["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    assert groups == [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    return len(optimizer.state) == len(list(model.parameters()))


def test_a_step_that_raised_is_made_good_by_the_next():
    assert run_ranks(_raises_half_way, 2) == [True, True]


def _unfrozen(ctx):
    found = []
    for fused in (False, True):
        model, optimizer, _ = _prepare(ctx, "adamw", frozen=["third.bias"], fused=fused)
        _train(model, optimizer, steps=2)
        model.third.bias.requires_grad_()
        found.append(_train(model, optimizer, steps=2))
    return largest_difference(*found)


def test_a_parameter_that_is_unfrozen_later_is_stepped_by_itself():
    assert max(run_ranks(_unfrozen, 2)) <= 1e-14


def _different_state(ctx):
    found = []
    for fused in (False, True):
        model, optimizer, ctx_ = _prepare(ctx, "adamw", fused=False)
        _train(model, optimizer, steps=2)
        optimizer.state[model.scale]["step"] += 1
        if fused:
            weft.fuse_step(optimizer, ctx_)
        found.append(_train(model, optimizer, steps=2))
    return largest_difference(*found)


def test_a_state_of_parameters_that_were_stepped_unequally_is_taken_over():
    assert max(run_ranks(_different_state, 2)) <= 1e-14


def _added_group(ctx):
    model, optimizer, _ = _prepare(ctx, lambda m: torch.optim.SGD(m.third.parameters(), 0.1))
    optimizer.add_param_group({"params": list(model.first.parameters())})
    _train(model, optimizer, steps=1)


def test_a_group_that_is_added_later_is_refused_and_not_forgotten():
    with pytest.raises(
        RanksFailed, match=r"(?s)fuse_step: .*found:    2 groups of 2, 2 parameters, before 1 of 2, .*fix:      "
    ):
        run_ranks(_added_group, 2, timeout_s=55)


# -- gradients that are missing ----------------------------------------------------------------------


def _without_gradients(ctx):
    """A step without any gradient does nothing, as torch's."""
    model, optimizer, _ = _prepare(ctx, "adamw")
    _train(model, optimizer, steps=1)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    steps = {float(optimizer.state[p]["step"]) for p in model.parameters()}
    return largest_difference(before, [p.detach() for p in model.parameters()]), steps


def test_a_step_without_gradients_does_nothing():
    assert run_ranks(_without_gradients, 2) == [(0.0, {1.0})] * 2


def _some_missing(ctx):
    model, optimizer, _ = _prepare(ctx, "adamw")
    model(_x(0)).sum().backward()
    model.second.weight.grad = None
    optimizer.step()


def test_a_missing_gradient_raises_and_leaves_the_optimizer_as_it_was():
    with pytest.raises(RanksFailed, match=r"(?s)fuse_step: 1 of 7 parameters have no gradient\n.*\(5, 5\)\n.*fix:"):
        run_ranks(_some_missing, 2)


def _replaced(ctx):
    """Gradients that the user put there count, also those outside of the buffer."""
    found = []
    for fused in (False, True):
        model, optimizer, _ = _prepare(ctx, "momentum", fused=fused)
        for step in range(3):
            model(_x(step)).sum().backward()
            model.first.weight.grad = model.first.weight.grad * 2 + 1
            for p in model.parameters():
                p.grad = p.grad.clone() if step == 1 else p.grad
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 1)
        found.append([p.detach().clone() for p in model.parameters()])
    return largest_difference(*found)


def test_gradients_put_there_by_the_user_count():
    assert max(run_ranks(_replaced, 2)) <= 1e-14


def _closure(ctx):
    model, optimizer, _ = _prepare(ctx, "sgd")
    refused = []
    for call in (lambda f: optimizer.step(f), lambda f: optimizer.step(closure=f)):
        try:
            call(lambda: model(_x(0)).sum())
        except ContractError as error:
            refused.append("closure" in str(error) and "fix:" in str(error))
    optimizer.step(None)
    optimizer.step(closure=None)
    return refused


def test_a_closure_is_refused_and_none_is_none():
    assert run_ranks(_closure, 2) == [[True, True]] * 2


# -- fp16 --------------------------------------------------------------------------------------------


def _fp16(ctx, fused):
    model, ctx = weft.with_precision(Net(torch.float32), ctx, "fp16")
    model, ctx = weft.replicate(model, ctx, flat=True)
    optimizer, ctx = weft.skip_nonfinite(torch.optim.AdamW(model.parameters(), 0.02), ctx)
    if fused:
        optimizer, ctx = weft.fuse_step(optimizer, ctx)
    skipped, scales = [], []
    for step in range(4):
        factor = float("inf") if step == 2 and ctx.rank == 1 else 1.0
        (model(_x(step, torch.float32)).square().mean() * factor).backward()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        skipped.append(weft.was_skipped(optimizer))
        assert skipped[-1] == (largest_difference(before, [p.detach() for p in model.parameters()]) == 0)
        scales.append(weft.loss_scale(model))
        optimizer.zero_grad()
    steps = {float(optimizer.state[p]["step"]) for p in model.parameters()}
    return [p.detach().clone() for p in model.parameters()], skipped, scales, steps


def test_a_bad_fp16_step_is_skipped_on_all_ranks():
    plain, fused = run_ranks(_fp16, 2, False), run_ranks(_fp16, 2, True)
    for rank in range(2):
        assert fused[rank][1] == [False, False, True, False] == plain[rank][1]
        assert fused[rank][2:] == plain[rank][2:] and fused[rank][3] == {3.0}
        assert largest_difference(plain[rank][0], fused[rank][0]) <= 1e-6
    assert largest_difference(fused[0][0], fused[1][0]) == 0


# -- refused -----------------------------------------------------------------------------------------


class Mine(torch.optim.SGD):
    """A subclass may look at whole tensors."""


REFUSED = {
    "LBFGS": lambda m: torch.optim.LBFGS(m.parameters()),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "Muon": lambda m: torch.optim.Muon([p for p in m.parameters() if p.dim() == 2]),
    "SparseAdam": lambda m: torch.optim.SparseAdam(m.parameters()),
    "Mine": lambda m: Mine(m.parameters()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_looks_at_whole_tensors_is_refused(name):
    model, ctx = weft.replicate(Net(), weft.local(), flat=True)
    with pytest.raises(
        ValueError, match=rf"(?s)fuse_step: {name} cannot step.*found:    {name}\n.*AdamW.*fix:      leave"
    ):
        weft.fuse_step(REFUSED[name](model), ctx)


def test_something_else_than_an_optimizer_is_refused():
    with pytest.raises(ValueError, match="fuse_step: Net cannot step"):
        weft.fuse_step(Net(), weft.local())


def _refused(ctx, how):
    try:
        if how == "plain":
            model, ctx = weft.replicate(Net(), ctx)
            weft.fuse_step(torch.optim.SGD(model.parameters()), ctx)
        elif how == "unused":
            _prepare(ctx, "sgd", unused="zero")
        elif how == "stranger":
            _, _, ctx = _prepare(ctx, "sgd", fused=False)
            weft.fuse_step(torch.optim.SGD(Net().parameters()), ctx)
        elif how == "two models":
            one, two = Net(), Net()
            one, ctx = weft.replicate(one, ctx, flat=True)
            two, ctx = weft.replicate(two, ctx, flat=True)
            weft.fuse_step(torch.optim.SGD([*one.parameters(), *two.parameters()]), ctx)
        elif how == "order":
            _, optimizer, ctx = _prepare(ctx, "sgd")
            weft.skip_nonfinite(optimizer, ctx)
    except (ContractError, ValueError) as error:
        return type(error), str(error)
    return None


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("plain", OrderError, "7 parameters with storage of their own"),
        ("stranger", OrderError, "7 parameters with storage of their own"),
        ("two models", OrderError, "14 parameters"),
        ("unused", ContractError, 'found:    replicate(..., flat=True, unused="zero")'),
        ("order", OrderError, "skip_nonfinite: comes too late, after fuse_step"),
    ],
)
def test_what_is_refused_is_named(how, kind, text):
    for found in run_ranks(_refused, 2, how):
        assert found[0] is kind and text in found[1] and "fix:" in found[1]


def _calls(ctx, fused):
    from torch.profiler import ProfilerActivity, profile

    model, optimizer, _ = _prepare(ctx, "momentum", fused=fused)
    _train(model, optimizer, steps=2)
    model(_x(0)).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        optimizer.step()
    return sum(event.count for event in seen.key_averages() if event.key in ("aten::add_", "aten::mul_"))


def test_one_kernel_per_group_and_not_per_tensor():
    plain, fused = run_ranks(_calls, 2, False)[0], run_ranks(_calls, 2, True)[0]
    assert fused <= 3 < 14 <= plain or fused * 5 <= plain, (plain, fused)
