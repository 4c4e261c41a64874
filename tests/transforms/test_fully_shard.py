"""fully_shard: units, ties, sizes, meta, what is ignored and unused, and everything that is refused."""

import copy
import gc
import io
import math
import pickle
import time
import weakref

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import weft
from tests.variants import diagonal, variants
from weft.tensors.dtensor import groups_of
from weft.testing import RanksFailed, largest_difference, run_ranks
from weft.version import TESTED_TORCH

pytestmark = pytest.mark.usefixtures("warm_ranks")


class Block(nn.Module):
    def __init__(self, size=4):
        super().__init__()
        self.inner = nn.Linear(size, size)
        self.outer = nn.Linear(size, size, bias=False)

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(x)))


class Net(nn.Module):
    def __init__(self, size=4, blocks=2):
        super().__init__()
        self.first = nn.Linear(3, size)
        self.blocks = nn.ModuleList([Block(size) for _ in range(blocks)])
        self.head = nn.Linear(size, 2)

    def features(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x):
        return self.head(self.features(x))

    def loss(self, x):
        return self.head(self.features(x)).square().mean()


def _net(make=Net, *args):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return make(*args).double()


def _x(rows=4):
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def _mine(ctx, rows=4):
    return _x(rows).chunk(ctx.world_size)[ctx.rank]


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _loss(model, x):
    return model(x).square().mean()


def _train(model, x, steps=2, optimizer=None, loss=_loss):
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.05)
    for _ in range(steps):
        loss(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [_whole(p.detach()).clone() for p in model.parameters()]


def _units(model):
    from torch.distributed.fsdp import FSDPModule

    return [name for name, part in model.named_modules() if isinstance(part, FSDPModule)]


def _sharded(ctx, model, x, **options):
    model, _ = weft.fully_shard(model, ctx, **options)
    return _train(model, x)


def _refusal(fn, *args, **options):
    """The error of a call, and that nothing was left half-done; on every rank."""
    try:
        fn(*args, **options)
    except (weft.errors.WeftError, ValueError, TypeError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


# -- units ------------------------------------------------------------------------------------------


def _choose(ctx):
    choices = {
        "class": Block,
        "pattern": "blocks.*",
        "size": 30,
        "function": lambda name, part: name.endswith("inner"),
        "part": lambda model: model.blocks[1],
        "nested": ["blocks.*", "blocks.*.inner"],
        "default": None,
        "root": lambda model: model,
    }
    found = {}
    for name, choice in choices.items():
        model = _net()
        chosen = choice(model) if name in ("part", "root") else choice
        model, _ = weft.fully_shard(model, ctx, units=chosen)
        found[name] = _units(model), _train(model, _mine(ctx))
    return found


def test_units_are_chosen_in_every_way_and_numbers_do_not_depend_on_them():
    expected = _train(_net(), _x())
    for found in run_ranks(_choose, 2):
        for name, (_, parameters) in found.items():
            assert largest_difference(parameters, expected) < 1e-12, name
        blocks = ["blocks.0", "blocks.1"]
        inner = ["blocks.0.inner", "blocks.1.inner"]
        assert {name: units[1:] for name, (units, _) in found.items()} == {
            "class": blocks,
            "pattern": blocks,
            "size": blocks,
            "function": inner,
            "part": ["blocks.1"],
            "nested": ["blocks.0", "blocks.0.inner", "blocks.1", "blocks.1.inner"],
            "default": blocks,
            "root": [],
        }
        assert all(units[0] == "" for units, _ in found.values())


class Stages(nn.Module):
    """Lists in lists: what is in them are blocks, they themselves are never called."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([nn.ModuleList([Block(3), Block(3)]), nn.ModuleList([Block(3), Block(3)])])

    def forward(self, x):
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return x


def _stages(ctx):
    model, _ = weft.fully_shard(_net(Stages), ctx)
    return _units(model), _train(model, _mine(ctx))


def test_default_units_are_the_blocks_when_lists_stand_in_lists():
    for units, parameters in run_ranks(_stages, 2):
        assert units == ["", "stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]
        assert largest_difference(parameters, _train(_net(Stages), _x())) < 1e-12


def _refused(ctx, options):
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1) if options.pop("with_optimizer", False) else None
    if options.pop("with_hook", False):
        model.head.weight.register_hook(lambda gradient: 2 * gradient)
    if options.pop("mixed", False):
        model.blocks[1].inner.float()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    keys = {name: sorted(part.__dict__) for name, part in model.named_modules()}
    hooks = {name: len(part._forward_hooks) + len(part._forward_pre_hooks) for name, part in model.named_modules()}
    begin = time.monotonic()
    if options.pop("on_last_rank_only", False) and ctx.rank < ctx.world_size - 1:
        options = {}
    error = _refusal(weft.fully_shard, model, ctx, **options)
    assert time.monotonic() - begin < 30
    assert type(model) is Net
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert keys == {name: sorted(part.__dict__) for name, part in model.named_modules()}
    assert hooks == {n: len(part._forward_hooks) + len(part._forward_pre_hooks) for n, part in model.named_modules()}
    del optimizer
    return error


REFUSED = {
    "pattern": ({"units": "layers.*"}, "ValueError", "no part of Net is chosen by 'layers.*'"),
    "class": ({"units": nn.Conv2d}, "ValueError", "class Conv2d"),
    "container": ({"units": "blocks"}, "ValueError", "'blocks' (ModuleList)"),
    "ignored": ({"ignored": "tail"}, "ValueError", "fully_shard: ignored"),
    "reshard": ({"reshard_after_forward": 3}, "ValueError", "3, with 2 rank(s) along 'data'"),
    "negative": ({"reshard_after_forward": -1}, "ValueError", "-1, with"),
    "unused": ({"unused": "maybe"}, "ValueError", "'maybe'"),
    "buffers": ({"buffers": "average"}, "ValueError", "'average'"),
    "methods": ({"methods": ["embed"]}, "ValueError", "'embed'"),
    "weights": ({"weights": {}}, "ValueError", "Net with real parameters"),
    "axis": ({"axis": "tensor"}, "ContextError", "tensor"),
    "axes": ({"axis": ()}, "ContextError", "0 axes"),
    "rebind": ({"rebind": [1]}, "TypeError", "int"),
    "stranger": (
        {"rebind": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)},
        "ValueError",
        "1 optimizer(s) in rebind hold no parameter of Net",
    ),
    "optimizer": ({"with_optimizer": True}, "OrderError", "SGD, 1 group(s)"),
    "hook": ({"with_hook": True}, "ValueError", "head.weight"),
    "mixed": ({"mixed": True, "units": Block}, "ValueError", "blocks.1.inner.weight torch.float32"),
}


def _refused_all(ctx):
    found = {name: _refused(ctx, dict(options)) for name, (options, _, _) in REFUSED.items()}
    found["one rank"] = _refused(ctx, {"units": "layers.*", "on_last_rank_only": True})
    found["one rank, another unit"] = _refused(ctx, {"units": "blocks.0", "on_last_rank_only": True})
    found["no module"] = _refusal(weft.fully_shard, torch.ones(1), ctx)
    found["lazy"] = _refusal(weft.fully_shard, nn.LazyLinear(2), ctx)
    return found


def test_what_cannot_be_is_refused_on_all_ranks_and_changes_nothing():
    for rank, found in enumerate(run_ranks(_refused_all, 2)):
        for name, (_, kind, text) in REFUSED.items():
            assert found[name][0] == kind, (name, found[name])
            assert all(part in found[name][1] for part in (text, "found:", "fix:")), found[name]
        assert found["one rank"][0] == ("ValueError" if rank else "PeerError")
        assert "layers.*" in found["one rank"][1]
        assert found["one rank, another unit"][0] == "ContextError"
        assert "units" in found["one rank, another unit"][1]
        assert found["no module"][0] == "TypeError"
        assert "no shape yet" in found["lazy"][1]


def test_an_option_is_checked_with_one_rank():
    with pytest.raises(ValueError, match=r"found:.*'layers\.\*'|no part of Net is chosen by 'layers"):
        weft.fully_shard(_net(), weft.local(), units="layers.*")
    with pytest.raises(ValueError, match=r"(?s)found:    -2.*fix: .*reshard_after_forward=True"):
        weft.fully_shard(_net(), weft.local(), reshard_after_forward=-2)


def test_one_rank_changes_nothing():
    model, ctx = weft.fully_shard(_net(), weft.local(), units=Block)
    assert type(model) is Net and [record.name for record in ctx.applied] == ["fully_shard"]
    assert largest_difference(_train(model, _x()), _train(_net(), _x())) == 0


# -- applied twice, or with the wrong context -------------------------------------------------------


def _twice(ctx):
    model, after = weft.fully_shard(_net(), ctx)
    other, _ = weft.replicate(_net(), ctx)
    whole = nn.Sequential(nn.Linear(3, 3).double(), model)
    return [
        _refusal(weft.fully_shard, model, after),
        _refusal(weft.fully_shard, model, ctx),
        _refusal(weft.replicate, model, ctx),
        _refusal(weft.fully_shard, other, ctx),
        _refusal(weft.fully_shard, whole, ctx),
        _refusal(weft.fully_shard, model.head, after),
        _refusal(weft.with_precision, model, after, "bf16"),
        _refusal(weft.average_weights, model, ctx, decay=0.9),
        largest_difference(_train(model, _mine(ctx)), _train(_net(), _x())),
    ]


def test_a_second_application_a_stale_context_and_a_wrong_order_are_refused():
    for *errors, difference in run_ranks(_twice, 2):
        kinds = [kind for kind, _ in errors]
        assert kinds[:7] == [
            "AlreadyApplied",
            "AlreadyApplied",
            "OrderError",
            "OrderError",
            "AlreadyApplied",
            "AlreadyApplied",
            "OrderError",
        ]
        assert kinds[7] == "StaleContext" and "fully_shard" in errors[7][1]
        assert difference < 1e-12


# -- ties, sizes, kinds of parameters ---------------------------------------------------------------


class Tied(nn.Module):
    """Ties of every kind: unit with unit, unit with the rest, a unit with one inside another."""

    def __init__(self, kind):
        super().__init__()
        self.blocks = nn.ModuleList([Block(3), Block(3), Block(3)])
        self.last = nn.Linear(3, 3)
        a, b = self.blocks[0], self.blocks[2]
        if kind == "units":
            b.inner.weight = a.inner.weight
        elif kind == "root":
            self.last.weight = a.inner.weight
        elif kind == "three":
            self.blocks[1].outer.weight = a.inner.weight
            b.outer.weight = a.inner.weight
        elif kind == "inner":
            b.inner.weight = a.inner.weight

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def _ties(ctx):
    found = {}
    for kind in ("units", "root", "three", "inner"):
        model = _net(Tied, kind)
        # The inner layer of the last block is tied to the first block.
        units = ["blocks.*", "blocks.2.inner"] if kind == "inner" else Block
        model, _ = weft.fully_shard(model, ctx, units=units)
        found[kind] = len(list(model.parameters())), _units(model), _train(model, _mine(ctx))
    return found


def test_tied_weights_are_one_parameter_in_one_unit():
    for found in run_ranks(_ties, 2):
        for kind, (number, units, parameters) in found.items():
            assert number == len(list(_net(Tied, kind).parameters()))
            assert largest_difference(parameters, _train(_net(Tied, kind), _x())) < 1e-12, kind
            assert ("blocks.0" in units) == (kind != "root"), units


class Sizes(nn.Module):
    """Sizes no number of ranks divides, rows fewer than ranks, a number, an odd stride, nothing."""

    def __init__(self):
        super().__init__()
        self.wide, self.thin = nn.Linear(3, 7), nn.Linear(7, 1)
        self.one = nn.Parameter(torch.ones(1))
        self.number = nn.Parameter(torch.tensor(0.5))
        self.turned = nn.Parameter(torch.arange(6.0).view(3, 2).t())
        self.counted = nn.Parameter(torch.tensor([3, 4]), requires_grad=False)

    def forward(self, x):
        y = self.thin(torch.tanh(self.wide(x))) * self.one * self.number
        return y + (x @ self.turned.t()).sum(-1, keepdim=True) + self.counted.sum()


class Mixed(nn.Module):
    """A frozen backbone in float32 and in float64, trained parameters in float64."""

    def __init__(self):
        super().__init__()
        self.back, self.head = nn.Linear(3, 3), nn.Linear(3, 2)
        self.back.requires_grad_(False)

    def forward(self, x):
        return self.head(self.back(x.to(self.back.weight.dtype)).double())


def _mixed():
    model = _net(Mixed)
    model.back.float()
    return model


def _kinds(ctx):
    found = []
    for make in (lambda: _net(Sizes), _mixed):
        model, _ = weft.fully_shard(make(), ctx)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.05)
        norms = []

        def loss(model, x, norms=norms):
            norms.append(
                _whole(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
            )
            return _loss(model, x)

        found.append(_train(model, _mine(ctx, 8), 2, optimizer, loss))
        _loss(model, _mine(ctx, 8)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        found.append(_whole(norm))
    return found


@pytest.mark.parametrize("n", [4, *variants(2)])
def test_every_size_and_kind_of_parameter_equals_one_process(n):
    expected = []
    for make in (lambda: _net(Sizes), _mixed):
        model = make()
        expected.append(_train(model, _x(8)))
        _loss(model, _x(8)).backward()
        expected.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    for found in run_ranks(_kinds, n):
        assert largest_difference(found, expected) < 1e-12


def _frozen(ctx):
    teacher = _net().requires_grad_(False)
    student = _net(Net, 4, 1)
    teacher, ctx = weft.fully_shard(teacher, ctx, units=Block)
    student, ctx = weft.replicate(student, ctx)
    counts = []

    def loss(model, x):
        with torch.no_grad():
            goal = teacher(x)
        return (model(x) - goal).square().mean()

    parameters = _train(student, _mine(ctx), 3, None, loss)
    counts.append(sum(p.grad is not None for p in teacher.parameters()))
    return parameters, counts, [_whole(p) for p in teacher.parameters()]


def test_a_frozen_sharded_teacher_and_a_replicated_student_equal_one_process():
    teacher = _net().requires_grad_(False)
    expected = _train(_net(Net, 4, 1), _x(), 3, None, lambda model, x: (model(x) - teacher(x)).square().mean())
    for parameters, counts, held in run_ranks(_frozen, 2):
        assert largest_difference(parameters, expected) < 1e-12
        assert counts == [0]
        assert largest_difference(held, [p.detach() for p in teacher.parameters()]) == 0


# -- ignored, unused, buffers, methods --------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, both=True):
        y = self.always(x)
        return y + torch.nn.functional.linear(x, self.sometimes.weight, self.sometimes.bias) if both else y


def _ignored(ctx):
    found = []
    for reduce in ("last", "every"):
        model, here = weft.fully_shard(_net(), ctx, units=Block, ignored=["blocks.1.inner", "head"])
        plain = [name for name, p in model.named_parameters() if not hasattr(p, "full_tensor")]
        batches = [part.chunk(ctx.world_size)[ctx.rank] for part in _x(8).chunk(2)]
        model, windows, _ = weft.accumulate_grads(model, batches, here, steps=2, reduce=reduce)
        optimizer = torch.optim.AdamW(model.parameters(), 0.05)
        for _ in range(2):
            for window in windows:
                for x in window:
                    (_loss(model, x) / 2).backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append((plain, [_whole(p.detach()) for p in model.parameters()]))
    return found


def test_ignored_parts_stay_whole_and_train_like_one_process():
    expected = _train(_net(), _x(8))
    for rank in run_ranks(_ignored, 2):
        for plain, parameters in rank:
            assert plain == ["blocks.1.inner.weight", "blocks.1.inner.bias", "head.weight", "head.bias"]
            assert largest_difference(parameters, expected) < 1e-12


def _unused(ctx, ignored):
    """Used on one rank only; used on none."""
    model, _ = weft.fully_shard(_net(Branches), ctx, unused="zero", ignored=ignored)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.5)
    grads = []
    for _ in range(2):
        model(_mine(ctx), both=ctx.rank == 0).square().mean().backward()
        grads.append([None if p.grad is None else _whole(p.grad).clone() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return [_whole(p.detach()) for p in model.parameters()], [[g is None for g in step] for step in grads]


@pytest.mark.parametrize("ignored", [None, ["sometimes", "never"]], ids=str)
def test_an_unused_parameter_counts_as_zero_and_one_that_no_rank_used_stays_as_it_is(ignored):
    model = _net(Branches)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.5)
    one, two = _x().chunk(2)
    for _ in range(2):
        ((model(one).square().mean() + model(two, both=False).square().mean()) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameters, missing in run_ranks(_unused, 2, ignored):
        assert missing == [[False, False, False, False, True, True]] * 2
        assert largest_difference(parameters, [p.detach() for p in model.parameters()]) < 1e-12


def _unused_is_an_error(ctx, ignored, last_only):
    model, _ = weft.fully_shard(_net(Branches), ctx, ignored=ignored)
    for part in (model.never,):
        part.requires_grad_(False)
    both = last_only and ctx.rank < ctx.world_size - 1
    model(_mine(ctx), both=both).square().mean().backward()
    model(_mine(ctx)).sum().backward()


@pytest.mark.parametrize(("ignored", "last_only"), diagonal((None, "sometimes"), (False, True)))
def test_an_unused_parameter_is_an_error_and_reaches_all_ranks(ignored, last_only):
    begin = time.monotonic()
    with pytest.raises(RanksFailed, match=r"(?s)found:    sometimes.bias, sometimes.weight.*fix: .*unused=\"zero\""):
        run_ranks(_unused_is_an_error, 2, ignored, last_only)
    assert time.monotonic() - begin < 20


class Statistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(self.norm(x))


def _buffers(ctx, buffers):
    model, _ = weft.fully_shard(_net(Statistics), ctx, buffers=buffers)
    _train(model, _mine(ctx, 8))
    return model.norm.running_mean.clone()


def test_buffers_are_the_first_ranks_or_local():
    one, two = run_ranks(_buffers, 2, "broadcast")
    assert torch.equal(one, two) and one.abs().sum() > 0
    one, two = run_ranks(_buffers, 2, "local")
    assert not torch.equal(one, two)


def _methods(ctx):
    model, _ = weft.fully_shard(_net(), ctx, units=Block, methods=["loss"])
    return _train(model, _mine(ctx), 2, None, lambda model, x: model.loss(x)), "loss" in model.__dict__


def test_a_listed_method_works_like_forward():
    expected = _train(_net(), _x())
    for parameters, is_patched in run_ranks(_methods, 2):
        assert largest_difference(parameters, expected) < 1e-12 and is_patched


class CallsItself(nn.Module):
    """Methods that call each other, and parameters of the module itself after that."""

    def __init__(self):
        super().__init__()
        self.body, self.last = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 3)

    def features(self, x):
        return self.body(x).tanh()

    def both(self, x):
        return self(x) + self.last(self.features(x) * 2)

    def forward(self, x):
        return self.last(self.features(x))


def _methods_in_methods(ctx, units):
    torch.manual_seed(0)
    x = torch.randn(4, 4, dtype=torch.float64)
    model, ctx = weft.fully_shard(CallsItself().double(), ctx, units=units, methods=("features", "both"))
    x, found = weft.data.split_between(x, ctx), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with torch.no_grad():
            found += [weft.gather(call(x), ctx) for call in (model, model.both, model.features)]
        for call in (model, model.both):
            (call(x).square().mean() + model(x).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return found


def test_listed_methods_that_call_each_other_have_their_parameters_until_the_outermost_ends():
    for units in (None, ["body.0"]):
        expected = _methods_in_methods(weft.local(), None)
        for found in run_ranks(_methods_in_methods, 2, units):
            assert largest_difference(found, expected) < 1e-12


# -- orders of passes -------------------------------------------------------------------------------


def _several_passes(ctx):
    """Forward passes and backward passes in every order, between the same steps."""
    found = {}
    x = _mine(ctx, 8)
    one, two = x.chunk(2)

    def two_forwards(model, x):
        return (_loss(model, one) + _loss(model, two)) / 2

    def looks_first(model, x):
        with torch.no_grad():
            model(x)
        model.eval()
        model(x).detach()
        model.train()
        return _loss(model, x)

    def looks_between(model, x):
        loss = _loss(model, x)
        with torch.no_grad():
            model(x)
        return loss

    for loss in (two_forwards, looks_first, looks_between):
        for options in ({}, {"reshard_after_forward": False}):
            model, _ = weft.fully_shard(_net(), ctx, units=Block, **options)
            found[loss.__name__, str(options)] = _train(model, x, 2, None, loss)
    model, _ = weft.fully_shard(_net(), ctx, units=Block)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    for _ in range(2):
        loss = _loss(model, x) / 2
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found["retain_graph"] = [_whole(p.detach()) for p in model.parameters()]
    return found


def test_passes_in_any_order_equal_one_process():
    expected = _train(_net(), _x(8))
    for found in run_ranks(_several_passes, 2):
        for name, parameters in found.items():
            assert largest_difference(parameters, expected) < 1e-12, name


def _looks_before_the_optimizer(ctx):
    found = []
    for reshard in (True, False):
        model, _ = weft.fully_shard(_net(), ctx, units=Block, reshard_after_forward=reshard)
        with torch.no_grad():
            model(_mine(ctx))
        found.append(_train(model, _mine(ctx)))
    return found


def test_an_optimizer_made_after_an_evaluation_trains_the_shards():
    for found in run_ranks(_looks_before_the_optimizer, 2):
        assert largest_difference(found, [_train(_net(), _x())] * 2) < 1e-12


def _without_backward(model, x, whole):
    """Change weights after a call with gradients, of which no backward pass comes: in a step, and by hand."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    resting, found = list(model.parameters()), []
    for _ in range(2):
        _loss(model, x).backward()
        model(x)
        optimizer.step()
        optimizer.zero_grad()
        found += [_whole(p.detach()).clone() for p in model.parameters()]
        model(x)
        with torch.no_grad():
            for parameter in resting:
                parameter.mul_(0.9)
        found += whole(model)
        model(x)
        with torch.no_grad():
            for parameter in resting:
                parameter.mul_(0.9)
    return found, model(x).detach()


def _shards_without_backward(ctx):
    def whole(model):
        with weft.full_params(model, after):
            return [p.detach().clone() for p in model.parameters()]

    found = []
    for options in ({"units": Block}, {"units": Block, "reshard_after_forward": False}, {"units": "blocks.0"}):
        model, after = weft.fully_shard(_net(), ctx, **options)
        found.append(_without_backward(model, _mine(ctx), whole))
    return found


def test_what_a_call_without_backward_left_gathered_is_not_used_after_the_weights_changed():
    weights, output = _without_backward(_net(), _x(), lambda model: [p.detach().clone() for p in model.parameters()])
    for rank, every in enumerate(run_ranks(_shards_without_backward, 2)):
        for found, mine in every:
            assert largest_difference(found, weights) < 1e-12
            assert largest_difference([mine], [output.chunk(2)[rank]]) < 1e-12


class Wanders(Net):
    """Ends with another block in every call, and calls one of them twice."""

    calls = 0

    def features(self, x):
        self.calls += 1
        x = self.first(x)
        first, second = self.blocks if self.calls % 2 else reversed(self.blocks)
        return second(first(second(x) if self.calls == 4 else x))


def _gathered_after(ctx, make):
    """The units that are gathered when calls with and without gradients have ended."""
    model, _ = weft.fully_shard(_net(make), ctx, units=Block)
    groups = {name: groups_of(part)[0] for name, part in model.blocks.named_children()}
    optimizer, found = torch.optim.AdamW(model.parameters(), 0.05), []
    for _ in range(5):
        loss = _loss(model, _mine(ctx))
        found.append([name for name, group in groups.items() if group.is_unsharded])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(_mine(ctx))
    model.blocks[1](_mine(ctx) @ torch.ones(3, 4, dtype=torch.float64))  # by itself
    found.append([name for name, group in groups.items() if group.is_unsharded])
    return found, [_whole(p.detach()) for p in model.parameters()]


@pytest.mark.parametrize(
    ("make", "kept"),
    [(Net, [["1"]] * 5), (Wanders, [["1"], ["1"], ["0"], ["1"], []])],
    ids=lambda it: getattr(it, "__name__", ""),
)
def test_the_unit_that_the_call_before_ended_with_stays_gathered_until_backward(make, kept):
    expected = _train(_net(make), _x(), 5)
    for found, weights in run_ranks(_gathered_after, 2, make):
        assert largest_difference(weights, expected) < 1e-12
        assert found == [*kept, []]


class Fails(Net):
    fails = ""

    def features(self, x):
        x = self.blocks[0](self.first(x))
        if self.fails == "forward":
            raise RuntimeError("in forward")
        if self.fails == "backward":
            x.register_hook(self._raise)
        return self.blocks[1](x)

    def _raise(self, gradient):
        raise RuntimeError("in backward")


def _exceptions(ctx):
    model, _ = weft.fully_shard(_net(Fails), ctx, units=Block)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    for place in ("forward", "backward", "forward", ""):
        model.fails = place
        try:
            _loss(model, _mine(ctx)).backward()
        except RuntimeError as error:
            assert place in str(error)
            optimizer.zero_grad()
        else:
            optimizer.step()
            optimizer.zero_grad()
    model.fails = ""
    return _train(model, _mine(ctx), 1, optimizer)


def test_training_goes_on_after_exceptions():
    expected = _train(_net(), _x())
    for parameters in run_ranks(_exceptions, 2):
        assert largest_difference(parameters, expected) < 1e-12


def _windows(ctx, how):
    """Two windows of four; the first is left early, or left and taken up again."""
    model, ctx = weft.fully_shard(_net(), ctx, units=Block)
    batches = [part.chunk(ctx.world_size)[ctx.rank] for part in _x(32).chunk(8)]
    model, windows, ctx = weft.accumulate_grads(model, batches, ctx, steps=4)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    for number, window in enumerate(windows):
        for place, x in enumerate(window):
            (_loss(model, x) / 4).backward()
            if number == 0 and place == (2 if how == "late" else 1) and how != "whole":
                break
        if number == 0 and how in ("resumed", "late"):
            for x in window:
                (_loss(model, x) / 4).backward()
        if number == 0 and how == "left":
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
    return [_whole(p.detach()) for p in model.parameters()]


def test_a_window_that_is_left_early_is_forgotten_or_taken_up_again():
    def expected(parts):
        model = _net()
        optimizer = torch.optim.AdamW(model.parameters(), 0.05)
        for part in parts:
            _train(model, part, 1, optimizer)
        return [p.detach() for p in model.parameters()]

    one, two = _x(32).chunk(2)
    for how in ("whole", "resumed", "late", "left"):
        for parameters in run_ranks(_windows, 2, how):
            assert largest_difference(parameters, expected([two] if how == "left" else [one, two])) < 1e-12, how


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([View(), View()])

    def forward(self, x):
        for part in self.parts:
            x = part(x)
            x += 1  # in place, on what a unit returned
        return x


class View(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x).view(-1, 3)[:]


class _Scales(nn.Module):
    """Returns its parameters beside what it computes: one, a view of one, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.body, self.scale, self.table = nn.Linear(3, 4), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4, 2))
        self.frozen = nn.Parameter(torch.full((2,), 0.5), requires_grad=False)

    def forward(self, x):
        return self.body(x), {"scale": self.scale, "table": self.table.t(), "frozen": self.frozen}


class _ReturnsParameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.temperature = _Scales(), nn.Parameter(torch.ones(1))

    def forward(self, x):
        x, found = self.inner(x)
        return x, (self.temperature, found)


def _returned(ctx, shards=True):
    model, x = _net(_ReturnsParameters), _x()
    if shards:
        model, _ = weft.fully_shard(model, ctx, units=[_Scales])
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for trains in (True, True, False):
        with torch.set_grad_enabled(trains):
            y, (temperature, found) = model(x)
            loss = y.square().mean() * temperature.exp().sum() + found["table"].square().sum() * found["scale"].sum()
            losses.append((loss * found["frozen"].sum()).item())
            if trains:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return losses


def test_a_unit_may_return_its_parameters():
    expected = _returned(weft.local(), shards=False)
    for found in run_ranks(_returned, 2):
        assert found == pytest.approx(expected, abs=1e-6)


def _views(ctx):
    model, _ = weft.fully_shard(_net(Views), ctx, units=View)
    return _train(model, _mine(ctx))


def test_units_may_return_views_that_are_changed_in_place():
    for parameters in run_ranks(_views, 2):
        assert largest_difference(parameters, _train(_net(Views), _x())) < 1e-12


# -- what stays -------------------------------------------------------------------------------------


def _stays(ctx):
    model = _net()
    model.head.weight.note = "mine"
    _loss(model, _x()).backward()
    held = [_whole(p.grad).clone() for p in model.parameters()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model, ctx = weft.fully_shard(model, ctx, units=Block)
    assert isinstance(model, Net) and isinstance(model.blocks[0], Block)
    assert list(model.state_dict()) == list(before)
    assert model.head.weight.note == "mine"
    assert largest_difference(held, [_whole(p.grad) for p in model.parameters()]) == 0
    model.zero_grad()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    first = _train(model, _mine(ctx))
    model.load_state_dict(saved)
    again = {name: _whole(value) for name, value in model.state_dict().items()}
    assert largest_difference(again, before) == 0
    assert largest_difference(first, _train(model, _mine(ctx))) == 0
    return first


def test_class_names_attributes_and_gradients_stay_and_the_state_dict_can_be_loaded():
    for parameters in run_ranks(_stays, 2):
        assert largest_difference(parameters, _train(_net(), _x())) < 1e-12


def _shards(ctx):
    model, ctx = weft.fully_shard(_net(Net, 8), ctx, units=Block)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    _loss(model, _mine(ctx)).backward()
    optimizer.step()
    local = _bytes(t for p in model.parameters() for t in (p, p.grad, *optimizer.state[p].values()))
    return local, 4 * 8 * sum(math.prod(p.shape) for p in model.parameters())


def _bytes(tensors):
    """Memory of this rank's parts of tensors, step counters left out."""
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors if t.dim())
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())


@pytest.mark.parametrize("n", [4, *variants(2)])
def test_parameters_gradients_and_state_take_a_share_of_the_memory(n):
    for local, total in run_ranks(_shards, n):
        assert local <= total / n + 4 * 8 * (8 * 8 + 8)


# -- optimizers made before -------------------------------------------------------------------------


def _rebound(ctx):
    model = _net()
    names = dict(model.named_parameters())
    weights = torch.optim.AdamW(
        [{"params": [p for n, p in names.items() if "weight" in n], "lr": 0.02}], lr=0.05, weight_decay=0.3
    )
    biases = torch.optim.SGD([p for n, p in names.items() if "bias" in n], 0.05, momentum=0.9)
    stray = nn.Parameter(torch.ones(2, dtype=torch.float64))
    biases.add_param_group({"params": [stray], "lr": 1.0})
    scheduler = torch.optim.lr_scheduler.StepLR(weights, 1, 0.5)
    x = _x()
    _step(model, x, weights, biases, scheduler)
    if ctx is not None:
        with pytest.raises(weft.errors.OrderError, match=r"(?s)found:    SGD, 2 group.*fix: .*rebind=optimizer"):
            weft.fully_shard(model, ctx, rebind=weights)
        model, ctx = weft.fully_shard(model, ctx, units=Block, rebind=[weights, biases])
        x = _mine(ctx)
        assert biases.param_groups[1]["params"][0] is stray
        assert {id(p) for p in weights.state} <= {id(p) for p in model.parameters()}
    for _ in range(2):
        _step(model, x, weights, biases, scheduler)
    assert weights.param_groups[0]["lr"] == 0.02 / 8
    return [_whole(p.detach()) for p in model.parameters()]


def _step(model, x, weights, biases, scheduler):
    _loss(model, x).backward()
    for optimizer in (weights, biases):
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()


def test_optimizers_made_before_are_carried_over_with_groups_state_and_schedulers():
    expected = _rebound(None)
    for parameters in run_ranks(_rebound, 2):
        assert largest_difference(parameters, expected) < 1e-12


def _dropped_in_a_cycle(ctx):
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.itself = optimizer
    del optimizer
    weft.fully_shard(model, ctx)


def test_an_optimizer_that_waits_for_the_garbage_collector_does_not_count():
    run_ranks(_dropped_in_a_cycle, 2)


# -- meta -------------------------------------------------------------------------------------------


class Tables(nn.Module):
    """A buffer that is not saved, made in reset_parameters."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.empty(3), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        self.table.copy_(torch.arange(3.0))

    def forward(self, x):
        return x + self.table


class MetaNet(Net):
    def __init__(self):
        super().__init__()
        self.tables = Tables()
        self.tail = nn.Linear(2, 2)
        self.tail.weight = self.head.weight if self.head.weight.shape == (2, 2) else self.tail.weight
        self.blocks[1].inner.weight = self.blocks[0].inner.weight

    def forward(self, x):
        return self.tail(super().forward(self.tables(x)))


def _meta():
    with torch.device("meta"):
        return MetaNet().double()


def _from_meta(ctx):
    source = _net(MetaNet)
    state = source.state_dict()
    asked = []

    def read():
        asked.append(1)
        return {name: value for name, value in state.items() if name != "blocks.1.inner.weight"}  # tied

    found = []
    for options in ({"units": Block}, {}, {"units": "first", "ignored": ["blocks.0", "head"]}):
        model, _ = weft.fully_shard(_meta(), ctx, weights=read, **options)
        assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
        assert model.blocks[1].inner.weight is model.blocks[0].inner.weight
        if "ignored" in options:
            assert not hasattr(model.head.weight, "full_tensor")
        found.append(({n: _whole(p.detach()).clone() for n, p in model.named_parameters()}, model.tables.table.clone()))
        found[-1] += (_train(model, _mine(ctx)),)
    # The first rank brings a real model, the others one on meta.
    model, _ = weft.fully_shard(source if ctx.rank == 0 else _meta(), ctx, units=Block)
    found.append(({n: _whole(p.detach()).clone() for n, p in model.named_parameters()}, model.tables.table.clone()))
    found[-1] += (_train(model, _mine(ctx)),)
    return found, len(asked)


def test_a_module_on_meta_gets_the_first_ranks_weights():
    source = _net(MetaNet)
    weights = {name: p.detach().clone() for name, p in source.named_parameters()}
    trained = _train(source, _x())
    for rank, (found, asked) in enumerate(run_ranks(_from_meta, 2)):
        assert asked == (0 if rank else 3)
        for held, table, parameters in found:
            assert largest_difference(held, weights) == 0
            assert table.tolist() == [0, 1, 2]
            assert largest_difference(parameters, trained) < 1e-12


def _drawn(ctx):
    found = []
    for units in (Block, nn.Linear, None):
        model, _ = weft.fully_shard(_meta(), ctx, units=units)
        found.append([_whole(t.detach()).clone() for t in (*model.parameters(), *model.buffers())])
    return found


def test_numbers_drawn_depend_on_the_seed_alone():
    one = run_ranks(_drawn, 1)[0]
    everywhere = [one, *run_ranks(_drawn, 2), *run_ranks(_drawn, 4)]
    for found in everywhere:
        for each in found:
            assert largest_difference(each, one[0]) == 0
    assert all(t.std() > 0.01 for t in one[0] if t.numel() > 1)
    assert largest_difference(run_ranks(_drawn, 2, seed=1)[0][0], one[0]) > 0.01


class NoReset(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.weight


def _wrong_weights(ctx):
    state = _net(MetaNet).state_dict()
    with torch.device("meta"):
        bare = NoReset()

    def fails():
        raise OSError("no such file")

    given = {
        "missing": {name: value for name, value in state.items() if name != "head.weight"},
        "shape": {**state, "head.weight": torch.ones(1)},
        "extra": {**state, "heads.weight": torch.ones(1)},
        "fails": fails,
    }
    found = {}
    for name, weights in given.items():
        try:
            weft.fully_shard(_meta(), ctx, weights=weights if ctx.rank == 0 else None)
        except (weft.errors.WeftError, ValueError, OSError) as error:
            found[name] = type(error).__name__, str(error)
    found["bare"] = _refusal(weft.fully_shard, bare, ctx)
    return found


def test_missing_and_wrong_weights_are_one_error_on_all_ranks():
    for rank, found in enumerate(run_ranks(_wrong_weights, 2)):
        assert "no value: head.weight" in found["missing"][1]
        assert "head.weight of shape (1,), not (2, 4)" in found["shape"][1]
        assert "heads.weight, of which the module has none" in found["extra"][1]
        assert "no such file" in found["fails"][1]
        assert "no value: weight" in found["bare"][1] and "fix:" in found["bare"][1]
        kinds = [kind for kind, _ in found.values()]
        assert kinds == (["PeerError"] * 5 if rank else ["ValueError"] * 3 + ["OSError", "ValueError"])


def _whole_layers():
    """How many layers of `Heavy` are whole in memory."""
    gc.collect()
    wholes = [
        one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and type(one).__name__ != "DTensor"
    ]
    sizes = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in wholes
        if one.layout is torch.strided and not (one.is_meta or isinstance(one, FakeTensor))
    }
    return sum(size >= 4 * 256 * 256 for size in sizes.values())


def _one_by_one(ctx):
    counts = []

    class Heavy(nn.Linear):
        def reset_parameters(self):
            super().reset_parameters()
            if not self.weight.is_meta:
                for _ in range(100):  # threads of gloo let go of what they have sent a moment later
                    count = _whole_layers()
                    if count - before <= 1:
                        break
                    time.sleep(0.02)
                counts.append(count)

    before = _whole_layers()
    with torch.device("meta"):
        model = nn.Sequential(*[Heavy(256, 256) for _ in range(4)])
    weft.fully_shard(model, ctx, units=Heavy)
    return [count - before for count in counts]


def test_a_module_on_meta_is_never_whole():
    assert run_ranks(_one_by_one, 2) == [[1] * 4] * 2


class Scaled(nn.Module):
    """As of transformers: no reset_parameters, a buffer that is not saved, a tied head."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), NoReset4()
        self.register_buffer("steps", torch.arange(4.0), persistent=False)

    def forward(self, x):
        return x + self.inner(self.norm(x)) + 0.01 * self.steps


class NoReset4(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 1.5))

    def forward(self, x):
        return x * self.weight


class Speaker(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.blocks = nn.ModuleList([Scaled(), Scaled()])
        self.number = nn.Parameter(torch.tensor(0.5))
        self.tie_weights()

    def tie_weights(self):
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.number


def _speaker(buffers_too=False):
    """A model whose parameters alone lie on meta, untied, as accelerate's init_empty_weights leaves it."""
    model = _net(Speaker)
    for part in model.modules():
        for name, p in list(part._parameters.items()):
            part._parameters[name] = None if p is None else nn.Parameter(p.detach().to("meta"))
    return model.to("meta") if buffers_too else model


def _tokens(ctx=None):
    tokens = torch.arange(8).view(4, 2) % 7
    return tokens if ctx is None else tokens.chunk(ctx.world_size)[ctx.rank]


def _speak(model, tokens):
    return _train(model, tokens, optimizer=torch.optim.SGD(model.parameters(), 0.1))


def _loaded_later(ctx, folder):
    found = {}
    for policy in (None, "bf16"):
        model = _speaker()
        model.tie_weights()
        after = ctx if policy is None else weft.with_precision(model, ctx, policy)[1]
        model, after = weft.fully_shard(model, after, units=Scaled, weights="later")
        assert all(p.is_meta for p in model.parameters())
        if ctx.world_size > 1:
            found["early"] = _refusal(model, _tokens(ctx))
        weft.load_weights(model, folder, after)
        found[policy] = [_whole(p.detach()).clone() for p in model.parameters()]
        found[policy, "trained"] = _speak(model, _tokens(ctx))
        model.requires_grad_(requires_grad=False)
        model.number.requires_grad_()
        model(_tokens(ctx)).sum().backward()  # frozen after it was loaded
        assert model.blocks[0].inner.weight.grad is None
    untied, _ = weft.fully_shard(_speaker(), ctx, units=Scaled, weights="later")
    found["untied"] = _refusal(weft.load_weights, untied, folder, ctx)
    bare = _speaker(buffers_too=True)
    bare.tie_weights()
    bare, _ = weft.fully_shard(bare, ctx, units=Scaled, weights="later")
    found["buffers"] = _refusal(weft.load_weights, bare, folder, ctx)
    found["path"] = _refusal(weft.fully_shard, _speaker(), ctx, weights=folder)
    found["real"] = _refusal(weft.fully_shard, _net(Speaker), ctx, weights="later")
    return found


@pytest.mark.parametrize("n", [2, *variants(1)])
def test_weights_can_come_later_and_each_rank_reads_its_own(tmp_path, n):
    source = _net(Speaker)
    state = {name: value for name, value in source.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    values, trained = [p.detach().clone() for p in source.parameters()], _speak(source, _tokens())
    for found in run_ranks(_loaded_later, n, str(tmp_path)):
        assert largest_difference(found[None], values) == largest_difference(found["bf16"], values) == 0
        assert largest_difference(found[None, "trained"], trained) < 1e-12
        assert 0 < largest_difference(found["bf16", "trained"], trained) < 0.1
        if n > 1:
            assert found["early"][0] == "ContractError" and "weft.load_weights(model, path, ctx)" in found["early"][1]
        assert "head.weight" in found["untied"][1] and "fix:      model.tie_weights()" in found["untied"][1]
        assert "blocks.0.steps" in found["buffers"][1]
        assert found["path"][0] == "TypeError" and 'weights="later"' in found["path"][1]
        assert found["real"][0] == "ValueError" and "weft.load_weights(model, path, ctx)" in found["real"][1]


# -- precision --------------------------------------------------------------------------------------


def _overflow(ctx, strategy, accumulate):
    """Steps in fp16; in the second one a gradient overflows, on the last rank's shard only."""
    model = Net().requires_grad_(True)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.full_like(p, 0.1))
    scaling = weft.precision.LossScaling(init=2.0**12, growth_every=1000)
    policy = weft.Precision(param=torch.float32, compute=torch.float16, output=torch.float32, scaling=scaling)
    model, ctx = weft.with_precision(model, ctx, policy)
    if strategy == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx, units=Block)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    optimizer, ctx = weft.skip_nonfinite(optimizer, ctx)
    if strategy.startswith("zero"):
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=int(strategy[-1]))
    found = []
    for step in range(3):
        factor = torch.tensor(1e8 if step == 1 and ctx.rank == ctx.world_size - 1 else 1.0)
        for part in range(accumulate):
            if accumulate > 1:
                for sync in weft.contract.offered(model, weft.contract.GradSync):
                    (sync.last_backward if part == accumulate - 1 else sync.begin_window)()
            (_loss(model, _x().float().chunk(ctx.world_size)[ctx.rank]) * factor / accumulate).backward()
        grads = [_whole(p.grad).clone() for p in model.parameters()]
        optimizer.step()
        found.append((weft.was_skipped(optimizer), float(weft.loss_scale(model)), grads))
        optimizer.zero_grad()
    return found, [_whole(p.detach()) for p in model.parameters()]


@pytest.mark.parametrize("accumulate", [2, *variants(1)])
def test_an_overflow_in_one_shard_skips_everywhere_and_the_scale_backs_off_once(accumulate):
    model = Net()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.full_like(p, 0.1))
    _loss(model, _x().float()).backward()
    true = [p.grad for p in model.parameters()]
    for strategy in ("fully_shard", "zero1", "zero2", "zero3"):
        for found, parameters in run_ranks(_overflow, 2, strategy, accumulate):
            assert [skipped for skipped, _, _ in found] == [False, True, False], strategy
            assert [scale for _, scale, _ in found] == [2.0**12, 2.0**11, 2.0**11], strategy
            assert largest_difference(found[0][2], true) < 2e-2, strategy
            assert all(torch.isfinite(p).all() for p in parameters)


def _reduces_in(ctx):
    from torch.distributed.tensor.debug import CommDebugMode

    found = []
    for dtype in (torch.bfloat16, None):
        model = Net()
        policy = weft.Precision(compute=torch.bfloat16, output=torch.float32, reduce=dtype)
        model, here = weft.with_precision(model, ctx, policy)
        model, here = weft.fully_shard(model, here, ignored="head")
        (group,) = groups_of(model)
        with CommDebugMode():
            _loss(model, _x().float()).backward()
        found.append((group._reduce_dtype, next(model.parameters()).dtype, model.head.weight.grad.dtype))
    return found


def test_gradients_travel_in_the_dtype_of_the_precision():
    for low, high in run_ranks(_reduces_in, 2):
        assert low == (torch.bfloat16, torch.float32, torch.float32)
        assert high[0] in (None, torch.float32)


# -- several models, traffic, memory ----------------------------------------------------------------


def _gan(ctx):
    maker, judge = _net(nn.Sequential, nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)), _net()
    counts = {}
    if ctx is not None:
        maker, ctx = weft.fully_shard(maker, ctx, units=nn.Linear)
        judge, ctx = weft.fully_shard(judge, ctx, units=Block)
    for_maker = torch.optim.AdamW(maker.parameters(), 0.02)
    for_judge = torch.optim.AdamW(judge.parameters(), 0.02)
    x = _x() if ctx is None else _mine(ctx)
    for step in range(3):
        with torch.no_grad():
            made = maker(x)
        with _Counting() as counting:
            (judge(made).square().mean() - judge(x).mean()).backward()
            for_judge.step()
        counts[step] = counting.sizes
        for_judge.zero_grad()
        judge.requires_grad_(False)
        judge(maker(x)).mean().backward()
        judge.requires_grad_(True)
        for_maker.step()
        for_maker.zero_grad()
    return [_whole(p.detach()) for p in (*maker.parameters(), *judge.parameters())], counts


def _judge_alone(ctx):
    judge, _ = weft.fully_shard(_net(), ctx, units=Block)
    optimizer = torch.optim.AdamW(judge.parameters(), 0.02)
    for _ in range(3):
        with _Counting() as counting:
            (judge(_mine(ctx)).square().mean() - judge(_mine(ctx)).mean()).backward()
            optimizer.step()
        optimizer.zero_grad()
    return counting.sizes


class _Counting:
    """Collectives of the c10d ops, by name, with the bytes of the larger side."""

    def __enter__(self):
        from torch.utils._python_dispatch import TorchDispatchMode

        calls = []

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func.namespace == "c10d":
                    tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
                    calls.append((func._schema.name.removeprefix("c10d::"), max(t.nbytes for t in tensors)))
                return func(*args, **(kwargs or {}))

        self.sizes = calls
        self._mode = Mode()
        self._mode.__enter__()
        return self

    def __exit__(self, *error):
        self._mode.__exit__(*error)


def test_two_sharded_models_equal_one_process_and_the_judges_step_leaves_the_maker_alone():
    expected, _ = _gan(None)
    alone = run_ranks(_judge_alone, 2)
    for rank, (parameters, counts) in enumerate(run_ranks(_gan, 2)):
        assert largest_difference(parameters, expected) < 1e-12
        assert counts[2] == alone[rank]


def _traffic(ctx, case):
    model = _net(Net, 4, 3)
    options = {} if case == "shard" else {"reshard_after_forward": False}
    steps = 4 if case == "window" else 1
    if case == "replicate":
        model, ctx = weft.replicate(model, ctx)
    else:
        model, ctx = weft.fully_shard(model, ctx, units=Block, **options)
    batches = [_mine(ctx)] * (2 * steps)
    model, windows, ctx = weft.accumulate_grads(model, batches, ctx, steps=steps)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for window in windows:
        with _Counting() as counting:
            for x in window:
                _loss(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
    return counting.sizes, 8 * sum(math.prod(p.shape) for p in model.parameters())


def test_traffic_per_step_is_what_is_written():
    """Three blocks, of which the last stays gathered for backward, and the module's own unit, as torch leaves it."""
    for case, gathers, reductions in (("shard", 6, 4), ("keep", 4, 4), ("window", 16, 4), ("replicate", 0, 1)):
        for sizes, total in run_ranks(_traffic, 2, case):
            gathered = [size for name, size in sizes if "allgather" in name]
            reduced = [size for name, size in sizes if "reduce_scatter" in name or "allreduce" in name]
            assert (len(gathered), len(reduced)) == (gathers, reductions), (case, sizes)
            assert total <= sum(reduced) <= 1.2 * total, (case, sizes)


def _collected(ctx, strategy):
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    if strategy == "fully_shard":
        options = {"units": Block, "ignored": "head", "unused": "zero", "methods": ["loss"]}
        model, ctx = weft.fully_shard(model, ctx, rebind=optimizer, **options)
    else:
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=int(strategy[-1]))
    _train(model, _mine(ctx), 2, optimizer)
    refs = [weakref.ref(one) for one in (model, optimizer, ctx, *model.parameters(), *model.modules())]
    del model, optimizer, ctx
    gc.collect()
    return [type(ref()).__name__ for ref in refs if ref() is not None]


def _collected_all(ctx):
    return {s: _collected(ctx.on(ctx.data_axes), s) for s in ("fully_shard", "zero1", "zero2", "zero3")}


def test_everything_is_collected_when_it_is_dropped():
    for found in run_ranks(_collected_all, 2):
        assert not any(found.values()), found


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(nn.functional.linear(x, self.inner.weight))


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0])


def _sequences():
    return torch.linspace(-1, 1, 4 * 5 * 6, dtype=torch.float64).view(4, 5, 6)


def _attend(model, x):
    return _train(model, x, optimizer=torch.optim.SGD(model.parameters(), 0.1))


def _reads(ctx):
    model, _ = weft.fully_shard(_net(Reads), ctx, units=nn.Linear)
    with pytest.raises(RuntimeError, match="DTensor") as caught:
        model(_mine(ctx))
    (note,) = caught.value.__notes__
    attending, _ = weft.fully_shard(_net(Attends), ctx, units=nn.Linear)
    units = _units(attending)
    return note, _attend(attending, _sequences().chunk(ctx.world_size)[ctx.rank]), units


def test_a_unit_that_is_read_and_not_called_is_told_and_that_of_attention_goes_with_its_parent():
    expected = _attend(_net(Attends), _sequences())
    for note, parameters, units in run_ranks(_reads, 2):
        assert "Reads reads parameters of a unit instead of calling it" in note
        assert "inner, head" in note and "fix:      weft.fully_shard(..., units=...)" in note
        assert largest_difference(parameters, expected) < 1e-12
        assert "head" in units and "attention.out_proj" not in units


def _over_some_axes(ctx):
    found = {}
    for name, strategy in (("replicate", weft.replicate), ("fully_shard", weft.fully_shard)):
        found[name] = [_refusal(strategy, _net(), ctx, axis=axis) for axis in ("shard", "replica")]
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found["zero"] = [_refusal(weft.zero_partition, model, optimizer, ctx, stage=n, axis="shard") for n in (1, 3)]
    found["whole"] = _train(weft.fully_shard(_net(), ctx, axis=("replica", "shard"))[0], _mine(ctx))
    return found


def test_a_strategy_that_leaves_a_data_axis_out_is_refused_and_a_hybrid_mesh_is_right():
    expected = _train(_net(), _x())
    for found in run_ranks(_over_some_axes, 4, mesh={"replica": 2, "shard": 2}):
        assert largest_difference(found.pop("whole"), expected) < 1e-12
        for what, refusals in found.items():
            for kind, text in refusals:
                assert kind == "ContextError" and "gradients would not be averaged" in text, (what, text)
                assert "axis=('replica', 'shard')" in text and "data_axes=('" in text


def _cut_by_torch(ctx):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    diagonal = DeviceMesh("cpu", torch.tensor([[0, 3], [1, 2]]), mesh_dim_names=("one", "other"))["other"]

    def parallel(mesh):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})

    found = []
    for mesh in (ctx.mesh["data"], diagonal):
        of_mesh = [_refusal(strategy, parallel(mesh), ctx) for strategy in (weft.replicate, weft.fully_shard)]
        for stage in (1, 3):
            model = parallel(mesh)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            of_mesh.append(_refusal(weft.zero_partition, model, optimizer, ctx, stage=stage))
        found.append(of_mesh)
    model = parallel(ctx.mesh["tensor"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found.append([_refusal(weft.zero_partition, model, optimizer, ctx, stage=2, engine="deepspeed")])
    flat = _refusal(weft.replicate, parallel(ctx.mesh["tensor"]), ctx, flat=True)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    parallelize_module(model, ctx.mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    meta = _refusal(weft.fully_shard, model, ctx)
    plain, _ = weft.fully_shard(_net(), ctx)
    return *found, flat, meta, _train(plain, _x().chunk(2)[ctx.data_rank])


def test_parameters_along_an_axis_of_the_strategy_are_refused_and_plain_ones_beside_it_are_trained():
    expected = _train(_net(), _x())
    for ours, foreign, deepspeed, flat, meta, parameters in run_ranks(_cut_by_torch, 4, mesh={"data": 2, "tensor": 2}):
        assert largest_difference(parameters, expected) < 1e-12
        for kind, text in ours:
            assert kind == "AlreadyApplied" and "DTensors over 'data'" in text, text
            assert "0.weight, 0.bias, 1.weight, 1.bias" in text and "fix: " in text
        for kind, text in foreign:
            assert kind == "ContractError" and "no axis of the context" in text, text
        assert deepspeed[0][0] == "ContractError" and 'engine="torch"' in deepspeed[0][1], deepspeed
        assert flat[0] == "ValueError" and "flat=True" in flat[1] and "0.weight" in flat[1]
        assert meta[0] == "ValueError" and "0.weight" in meta[1] and 'weights="later"' in meta[1]


def _copied(ctx):
    model, after = weft.fully_shard(_net(), ctx, units=Block)
    found = []
    for use in (copy.deepcopy, pickle.dumps, lambda one: torch.save(one, io.BytesIO())):
        found += [_refusal(use, model), _refusal(use, model.blocks[0]), _refusal(use, {"model": model})]
    model, after = weft.undo(model, after)
    assert largest_difference(copy.deepcopy(model).state_dict(), _net().state_dict()) == 0
    assert pickle.loads(pickle.dumps(model)).state_dict().keys() == model.state_dict().keys()
    return found


def test_copies_and_pickles_of_shards_are_one_clear_error():
    for found in run_ranks(_copied, 2):
        for kind, text in found:
            assert kind == "ContractError" and "can be neither copied nor pickled" in text, text
            assert "weft.undo(model, ctx, rebind=optimizer)" in text


def _goes_another_way(ctx, ignored):
    from torch.distributed.fsdp import FSDPModule

    with pytest.MonkeyPatch.context() as patch:  # as in a version that keeps them and asks others
        for name in ignored:
            patch.setattr(FSDPModule, name, lambda unit, comm: None)
        model, _ = weft.fully_shard(_net(), ctx, units=Block)
    model(_mine(ctx))  # nothing was reduced yet
    return _refusal(_train, model, _mine(ctx))


@pytest.mark.parametrize(
    ("ignored", "found"),
    [
        (["set_custom_all_gather"], ["gathers the outermost unit in forward", "gathers 'blocks.1' in forward"]),
        (["set_custom_reduce_scatter"], ["reduces the outermost unit", "reduces 'blocks.1'"]),
        (
            ["set_custom_all_gather", "set_custom_reduce_scatter"],
            ["gathers 'blocks.0' in forward", "reduces 'blocks.0'"],
        ),
    ],
    ids=["gathers", "reductions", "both"],
)
def test_a_torch_that_goes_around_the_order_of_gathers_is_an_error_of_the_first_step_on_all_ranks(ignored, found):
    for kind, text in run_ranks(_goes_another_way, 2, ignored):
        assert kind == "ContextError" and f"torch {torch.__version__} did not call" in text, text
        assert all(one in text for one in found), text
        assert f"pip install 'torch=={TESTED_TORCH[-1]}'" in text and TESTED_TORCH[0] in text
