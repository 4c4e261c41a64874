"""plain: every transform taken back, and strategies exchanged in the middle of training."""

import pytest
import torch
from torch import nn

import weft
from tests.variants import variants
from weft.testing import largest_difference, run_ranks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(x + torch.tanh(self.layer(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 4)
        self.head.weight = self.first.weight
        self.number = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("shift", torch.ones(4))
        self.note = "mine"

    def features(self, x):
        return self.blocks[1](self.blocks[0](self.first(x) + self.shift))

    def forward(self, x):
        return self.head(self.features(x)) * self.number


def _net(dtype=torch.float64):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Net().to(dtype)


def _mine(ctx, dtype=torch.float64):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
    return x if ctx is None else x.chunk(ctx.world_size)[ctx.rank]


def _step(model, optimizer, x):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _anatomy(model):
    """Everything that transforms could have left on a module."""
    return {
        name: (
            type(part),
            {key: len(value) if hasattr(value, "__len__") else value for key, value in part.__dict__.items()},
            part.forward.__func__,
            [
                (key, type(p), tuple(p.shape), p.dtype, p.requires_grad)
                for key, p in part._parameters.items()
                if p is not None
            ],
            [len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ()) for p in part.parameters()],
        )
        for name, part in model.named_modules()
    }


def _hook(module, args, output):
    return output


APPLIED = {
    "replicate": lambda model, optimizer, ctx: weft.replicate(model, ctx, methods=["features"]),
    "replicate flat": lambda model, optimizer, ctx: weft.replicate(model, ctx, flat=True),
    "fully_shard": lambda model, optimizer, ctx: weft.fully_shard(
        model, ctx, units=Block, methods=["features"], rebind=optimizer, ignored="blocks.0.norm", unused="zero"
    ),
    "zero1": lambda model, optimizer, ctx: weft.zero_partition(model, optimizer, ctx, stage=1)[::2],
    "zero2": lambda model, optimizer, ctx: weft.zero_partition(model, optimizer, ctx, stage=2)[::2],
    "zero3": lambda model, optimizer, ctx: weft.zero_partition(model, optimizer, ctx, stage=3, units=Block)[::2],
}


def _undone(ctx):
    found = {}
    for name, apply in APPLIED.items():
        model, reference = _net(), _net()
        for one in (model, reference):
            one.head.register_forward_hook(_hook)
            one.blocks[0].register_forward_pre_hook(lambda module, args: None)
        optimizer, plainly = (torch.optim.AdamW(one.parameters(), 0.05) for one in (model, reference))
        hooks = len(optimizer._optimizer_step_pre_hooks)
        before = _anatomy(model)
        model, after = apply(model, optimizer, ctx)
        for _ in range(2):
            _step(model, optimizer, _mine(ctx))
            _step(reference, plainly, _mine(None))
        model(_mine(None)).mean().backward()
        reference(_mine(None)).mean().backward()
        model, after = weft.undo(model, after, rebind=optimizer)
        assert _anatomy(model) == before, name
        assert after == ctx and not after.applied, name
        assert len(optimizer._optimizer_step_pre_hooks) == hooks, name
        assert model.head.weight is model.first.weight
        assert [id(p) for e in optimizer.param_groups for p in e["params"]] == list(map(id, model.parameters()))
        assert list(model.state_dict()) == list(reference.state_dict())
        values = [
            (
                [p.detach().clone() for p in one.parameters()],
                [p.grad.clone() for p in one.parameters()],
                [value for p in one.parameters() for value in by.state[p].values()],
            )
            for one, by in ((model, optimizer), (reference, plainly))
        ]
        found[name] = largest_difference(*values)
        for one, by in ((model, optimizer), (reference, plainly)):
            by.zero_grad()
            _step(one, by, _mine(None))
        found[name, "goes on"] = largest_difference(list(model.parameters()), list(reference.parameters()))
    return found


@pytest.mark.slow
def test_nothing_is_left_of_a_strategy_but_values_gradients_and_state():
    for found in run_ranks(_undone, 2):
        assert all(difference < 1e-12 for difference in found.values()), found


def _migrate(ctx, kind):
    """local -> replicate -> fully_shard -> zero 1 -> zero 3 -> local, a step in each."""
    model = _net()
    make = torch.optim.AdamW if kind == "adamw" else torch.optim.Adafactor
    optimizer = make(model.parameters(), 0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    for strategy in ("local", "replicate", "fully_shard", "zero1", "zero3", "local"):
        x = _mine(None)
        if strategy != "local" and ctx is not None:
            x = _mine(ctx)
            if strategy == "replicate":
                model, ctx = weft.replicate(model, ctx)
            elif strategy == "fully_shard":
                model, ctx = weft.fully_shard(model, ctx, units=Block, rebind=optimizer)
                if kind == "adafactor":
                    optimizer, ctx = weft.gather_step(optimizer, ctx)
            else:
                model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=int(strategy[-1]))
        for _ in range(2):
            _step(model, optimizer, x)
            scheduler.step()
        if ctx is not None:
            model, ctx = weft.undo(model, ctx, rebind=optimizer)
            assert not ctx.applied and type(model) is Net
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw", *variants("adafactor")])
def test_strategies_are_exchanged_in_the_middle_of_training(kind):
    expected = _migrate(None, kind)
    for n in (2, 4) if kind == "adamw" else (2,):
        for parameters in run_ranks(_migrate, n, kind):
            assert largest_difference(parameters, expected) < 1e-12


def _migrate_in_fp16(ctx):
    """The optimizer is told of each new scale; gradients overflow at first."""
    model = _net(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scales = []
    for strategy in ("replicate", "fully_shard", "zero1"):
        model, ctx = weft.with_precision(model, ctx, "fp16")
        if strategy == "replicate":
            model, ctx = weft.replicate(model, ctx)
        elif strategy == "fully_shard":
            model, ctx = weft.fully_shard(model, ctx, rebind=optimizer)
        optimizer, ctx = weft.skip_nonfinite(optimizer, ctx)
        if strategy == "zero1":
            model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=1)
        for _ in range(2):
            _step(model, optimizer, _mine(ctx, torch.float32))
        scales.append(weft.was_skipped(optimizer))
        model, ctx = weft.undo(model, ctx, rebind=optimizer)
    return scales, [p.detach().clone() for p in model.parameters()]


def test_precision_is_taken_off_the_optimizer_too():
    model = _net(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(6):
        _step(model, optimizer, _mine(None, torch.float32))
    for skipped, parameters in run_ranks(_migrate_in_fp16, 2):
        assert skipped == [False] * 3
        assert largest_difference(parameters, list(model.parameters())) < 5e-3


def _refused(ctx):
    model, after = weft.fully_shard(_net(), ctx, units=Block)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    _step(model, optimizer, _mine(ctx))
    before = {name: _whole(value).clone() for name, value in model.state_dict().items()}
    kinds = [type(part) for part in model.modules()]
    with pytest.raises(
        weft.errors.StaleContext,
        match=r"(?s)found:    .*not in ctx.applied: fully_shard.*fix: ",
    ):
        weft.undo(model, ctx, rebind=optimizer)
    with pytest.raises(
        weft.errors.OrderError, match=r"(?s)found:    AdamW, 1 group.*fix: .*weft.undo\(..., rebind=optimizer"
    ):
        weft.undo(model, after)
    with pytest.raises(TypeError, match=r"(?s)found:    int.*fix: .*rebind="):
        weft.undo(model, after, rebind=[3])
    begun = "nothing"
    try:  # one rank forgets the optimizer
        weft.undo(model, after, rebind=optimizer if ctx.rank else ())
    except weft.errors.WeftError as error:
        begun = type(error).__name__
    assert kinds == [type(part) for part in model.modules()]
    assert largest_difference(before, {n: _whole(v) for n, v in model.state_dict().items()}) == 0
    _step(model, optimizer, _mine(ctx))
    model, after = weft.undo(model, after, rebind=optimizer)
    assert type(model) is Net and not after.applied
    return begun


def test_a_stale_context_and_a_forgotten_optimizer_are_refused_and_change_nothing():
    assert run_ranks(_refused, 2) == ["OrderError", "PeerError"]


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"(?s)found:    int.*fix: .*weft.undo\(model, ctx"):
        weft.undo(3, weft.local())


def test_a_plain_module_stays_as_it_is():
    model, ctx = _net(), weft.local()
    before = _anatomy(model)
    assert weft.undo(model, ctx) == (model, ctx)
    assert _anatomy(model) == before


def _partly(ctx):
    """What concerns another module stays."""
    one, ctx = weft.fully_shard(_net(), ctx)
    two, ctx = weft.replicate(_net(), ctx)
    (one, two), windows, ctx = weft.accumulate_grads([one, two], [1, 2], ctx, steps=2)
    one, ctx = weft.undo(one, ctx)
    del windows
    return [record.name for record in ctx.applied], [record.name for record in ctx.records(two)]


def test_records_of_other_modules_stay():
    for applied, of_two in run_ranks(_partly, 2):
        assert applied == ["replicate", "accumulate_grads"] == of_two


def test_what_was_done_to_parts_is_undone_with_the_module():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model, ctx = weft.with_precision(model, weft.local(), {"1": "fp32", "*": "bf16"})
    assert len(ctx.applied) == 2
    model, ctx = weft.undo(model, ctx)
    assert ctx.applied == ()
    assert not any(
        part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part) for part in model.modules()
    )
    weft.with_precision(model, ctx, {"1": "fp32", "*": "bf16"})
