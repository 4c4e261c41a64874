"""zero_partition: memory of each stage, state in and out, and everything that is refused."""

import copy
import functools
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from weft.engines.torch.sharded_step import shards as zero1_step
from weft.testing import fake, largest_difference, run_ranks

STAGES = (1, 2, 3)


class Net(nn.Module):
    def __init__(self, size=6):
        super().__init__()
        self.first = nn.Linear(3, size)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(size, size), nn.Tanh()) for _ in range(3)])
        self.head = nn.Linear(size, 5)
        self.number = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.number


def _net(size=6, dtype=torch.float64):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Net(size).to(dtype)


def _mine(ctx, dtype=torch.float64):
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
    return x if ctx is None else x.chunk(ctx.world_size)[ctx.rank]


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _step(model, optimizer, x, set_to_none=True):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)


def _parameters(model):
    return [_whole(p.detach()).clone() for p in model.parameters()]


def _refusal(fn, *args, **options):
    try:
        fn(*args, **options)
    except (weft.errors.WeftError, ValueError, TypeError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


# -- a torch that does not call what it was given ----------------------------------------------------


def _hooks_not_called(ctx, kind):
    model = _net()
    model, optimizer, ctx = weft.zero_partition(model, kind(model.parameters(), 0.1), ctx, stage=1)
    optimizer.step = functools.partial(kind.step.__wrapped__, optimizer)
    return _refusal(lambda: [_step(model, optimizer, _mine(ctx)) for _ in range(2)])


def test_a_step_around_which_no_hook_is_called():
    for kind in (torch.optim.Adam, torch.optim.Adafactor):  # of which one steps on rows, and one on whole parameters
        for name, text in run_ranks(_hooks_not_called, 2, kind):
            assert name == "NotSynchronized" and f"{kind.__name__} steps on whole parameters" in text
    assert run_ranks(_hooks_not_called, 2, torch.optim.SGD) == [("nothing", "")] * 2  # has no state to divide


# -- memory -----------------------------------------------------------------------------------------


def _bytes(tensors):
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors if t is not None and t.dim()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())


def _memory(ctx):
    found = {}
    for name in ("fully_shard", *STAGES):
        model = _net(32, torch.float32)
        numbers = sum(p.numel() for p in model.parameters())
        if name == "fully_shard":
            model, _ = weft.fully_shard(model, ctx)
            optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), 0.01)
            model, optimizer, _ = weft.zero_partition(model, optimizer, ctx, stage=name)
        _step(model, optimizer, _mine(ctx, torch.float32))
        model(_mine(ctx, torch.float32)).square().mean().backward()
        parameters = list(model.parameters())
        state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        found[name] = (
            _bytes([*parameters, *(p.grad for p in parameters), *state]) / numbers,
            _bytes(state) / numbers,
            16 * (32 * 32 + 32) / numbers,
        )
    return found


@pytest.mark.parametrize("n", [4, pytest.param(2, marks=pytest.mark.variant)])
def test_memory_per_parameter_is_what_each_stage_promises(n):
    limits = {1: 8 + 8 / n, 2: 4 + 12 / n, 3: 16 / n, "fully_shard": 16 / n}
    for found in run_ranks(_memory, n):
        for name, (all_bytes, state, unit) in found.items():
            assert all_bytes <= limits[name] + unit, name
            assert state <= 8 / n + unit / 2, name


# -- variants of optimizers -------------------------------------------------------------------------


def _variants():
    """Optimizers over the parameters of a model, by name."""

    def groups(model):
        named = dict(model.named_parameters())
        return [
            {"params": [p for n, p in named.items() if "weight" in n], "weight_decay": 0.3},
            {"params": [p for n, p in named.items() if "weight" not in n], "lr": 0.002, "weight_decay": 0.0},
        ]

    return {
        "groups": lambda model: torch.optim.AdamW(groups(model), 0.01),
        "foreach": lambda model: torch.optim.AdamW(model.parameters(), 0.01, foreach=True),
        "fused": lambda model: torch.optim.AdamW(model.parameters(), 0.01, fused=True),
        "amsgrad": lambda model: torch.optim.Adam(model.parameters(), 0.01, amsgrad=True),
        "part": lambda model: torch.optim.SGD(model.head.parameters(), 0.1, momentum=0.9),
        "lr tensor": lambda model: torch.optim.AdamW(model.parameters(), torch.tensor(0.01), foreach=False),
        "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), 0.1),
        "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), 0.1),
    }


def _train_variant(ctx, name, stage):
    """Steps before and after, with a scheduler and with gradients set to zero."""
    model = _net()
    optimizer = _variants()[name](model)
    if name == "part":
        model.requires_grad_(False)
        model.head.requires_grad_(True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    x = _mine(None)
    _step(model, optimizer, x)
    scheduler.step()
    if ctx is not None:
        model, optimizer, _ = weft.zero_partition(model, optimizer, ctx, stage=stage)
        x = _mine(ctx)
    for set_to_none in (True, False, False):
        _step(model, optimizer, x, set_to_none)
        scheduler.step()
    return _parameters(model), float(optimizer.param_groups[0]["lr"])


def _train_variants(ctx):
    return {(name, stage): _train_variant(ctx, name, stage) for name in _variants() for stage in STAGES}


@pytest.mark.slow
def test_every_variant_of_an_optimizer_goes_on_as_in_one_process():
    for found in run_ranks(_train_variants, 2):
        for (name, stage), (parameters, lr) in found.items():
            expected = _train_variant(None, name, None)
            assert largest_difference(parameters, expected[0]) < 1e-12, (name, stage)
            assert lr == expected[1], (name, stage)


# -- state in and out -------------------------------------------------------------------------------


def _state(ctx):
    """From partitioned to partitioned and to plain, and from plain to partitioned, in the middle of training."""
    found = {}
    for kind in ("adamw", "adafactor"):

        def make(model, kind=kind):
            if kind == "adamw":
                return torch.optim.AdamW(model.parameters(), 0.02)
            return torch.optim.Adafactor(model.parameters(), 0.1)

        for stage in STAGES:
            model = _net()
            model, optimizer, _ = weft.zero_partition(model, make(model), ctx, stage=stage)
            for _ in range(2):
                _step(model, optimizer, _mine(ctx))
            saved = copy.deepcopy(optimizer.state_dict())
            weights = {name: _whole(value).clone() for name, value in model.state_dict().items()}

            other = _net()
            other.load_state_dict(weights)
            other, again, _ = weft.zero_partition(other, make(other), ctx, stage=stage)
            again.load_state_dict(copy.deepcopy(saved))
            _step(other, again, _mine(ctx))
            found[kind, stage, "partitioned"] = _parameters(other)

            plain = _net()
            plain.load_state_dict(weights)
            optimizer = make(plain)
            whole = copy.deepcopy(saved)
            for state in whole["state"].values():
                state.update({key: _whole(value) for key, value in state.items()})
            optimizer.load_state_dict(copy.deepcopy(whole))
            _step(plain, optimizer, _mine(None))
            found[kind, stage, "plain"] = _parameters(plain)

            other = _net()
            other.load_state_dict(weights)
            other, again, _ = weft.zero_partition(other, make(other), ctx, stage=stage)
            again.load_state_dict(copy.deepcopy(whole))
            state = [t for s in again.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
            assert kind == "adafactor" or all(hasattr(t, "full_tensor") for t in state if t.dim())
            _step(other, again, _mine(ctx))
            found[kind, stage, "from plain"] = _parameters(other)
    return found


@pytest.mark.slow
def test_state_dicts_go_in_and_out_in_the_middle_of_training():
    expected = {}
    for kind in ("adamw", "adafactor"):
        model = _net()
        make = torch.optim.AdamW if kind == "adamw" else torch.optim.Adafactor
        optimizer = make(model.parameters(), 0.02 if kind == "adamw" else 0.1)
        for _ in range(3):
            _step(model, optimizer, _mine(None))
        expected[kind] = _parameters(model)
    for found in run_ranks(_state, 2):
        for (kind, *rest), parameters in found.items():
            assert largest_difference(parameters, expected[kind]) < 1e-12, (kind, rest)


def _raising_step(ctx):
    """A step that raises half-way leaves the optimizer as the user knows it, for the next one."""
    found = []
    for kind in (torch.optim.AdamW, torch.optim.Adafactor):
        model = _net()
        model, optimizer, _ = weft.zero_partition(model, kind(model.parameters(), 0.02), ctx, stage=1)
        _step(model, optimizer, _mine(ctx))
        model(_mine(ctx)).square().mean().backward()
        option = "betas" if kind is torch.optim.AdamW else "eps"
        value, optimizer.param_groups[0][option] = optimizer.param_groups[0][option], None
        with pytest.raises(TypeError, match="NoneType"):
            optimizer.step()
        optimizer.param_groups[0][option] = value
        optimizer.step(None)
        optimizer.zero_grad()
        assert optimizer.param_groups[0]["params"][0] is model.number
        found.append(_parameters(model))
    return found


def test_a_step_that_raised_can_be_taken_again():
    expected = []
    for kind in (torch.optim.AdamW, torch.optim.Adafactor):
        model = _net()
        optimizer = kind(model.parameters(), 0.02)
        for _ in range(2):
            _step(model, optimizer, _mine(None))
        expected.append(_parameters(model))
    for found in run_ranks(_raising_step, 2):
        assert largest_difference(found, expected) < 1e-12


def _moved(ctx):
    """Parameters that are given other memory after they were partitioned."""
    model = _net(dtype=torch.float32)
    model, optimizer, _ = weft.zero_partition(model, torch.optim.SGD(model.parameters(), 0.1), ctx, stage=1)
    for p in model.parameters():
        p.data = p.data.clone()
    _step(model, optimizer, _mine(ctx, torch.float32))
    return _parameters(model)


def test_parameters_with_new_memory_are_trained():
    model = _net(dtype=torch.float32)
    _step(model, torch.optim.SGD(model.parameters(), 0.1), _mine(None, torch.float32))
    for parameters in run_ranks(_moved, 2):
        assert largest_difference(parameters, _parameters(model)) < 1e-6


# -- refused ----------------------------------------------------------------------------------------


def _refused(ctx):
    def partition(change=None, **options):
        model = _net()
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        if change is not None:
            optimizer = change(model, optimizer)
        before = [p.detach().clone() for p in model.parameters()]
        keys = sorted(model.__dict__)
        begin = time.monotonic()
        error = _refusal(weft.zero_partition, model, optimizer, ctx, **{"stage": 1, **options})
        assert time.monotonic() - begin < 30
        assert largest_difference(before, [p.detach() for p in model.parameters()]) == 0
        assert sorted(model.__dict__) == keys and type(model) is Net
        return error

    def stranger(model, optimizer):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
        return optimizer

    def lbfgs(model, optimizer):
        del optimizer
        return torch.optim.LBFGS(model.parameters())

    kept = []

    def second(model, optimizer):
        kept.append(torch.optim.SGD(model.head.parameters(), 0.1))
        return optimizer

    def smaller(model, optimizer):
        return torch.optim.AdamW(model.parameters() if ctx.rank else model.head.parameters(), 0.1)

    last = ctx.rank == ctx.world_size - 1
    found = {
        "stage 0": partition(stage=0),
        "stage 4": partition(stage=4),
        "stage True": partition(stage=True),
        "engine": partition(engine="megatron"),
        "offload": partition(offload="cpu"),
        "config": partition(stage=3, config={}),
        "units": partition(units=nn.Linear),
        "units 2": partition(stage=2, units="layers.*"),
        "no optimizer": partition(lambda model, optimizer: model.parameters()),
        "stranger": partition(stranger),
        "lbfgs": partition(lbfgs),
        "lbfgs 3": partition(lbfgs, stage=3),
        "second 3": partition(second, stage=3),
        "axis": partition(axis="tensor"),
        "one rank": partition(stage=5 if last else 1),
        "one rank 3": partition(stage=3, **({"unused": "no"} if last else {})),
        "stages": partition(stage=1 if last else 3),
        "groups": partition(smaller),
        "groups 3": partition(smaller, stage=3),
        "no module": _refusal(
            weft.zero_partition, 1, torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1), ctx, stage=1
        ),
    }
    kept.clear()
    return found


def test_what_cannot_be_is_refused_on_all_ranks_and_changes_nothing():
    expected = {
        "stage 0": ("ValueError", "weft.replicate(model, ctx)"),
        "stage 4": ("ValueError", "stage = 4 is unknown"),
        "stage True": ("ValueError", "True"),
        "engine": ("ValueError", "'torch' or 'deepspeed'"),
        "offload": ("ValueError", "offload = 'cpu'"),
        "config": ("ValueError", "config = {}"),
        "units": ("ValueError", "stage=1 with units"),
        "units 2": ("ValueError", "'layers.*'"),
        "no optimizer": ("TypeError", "generator"),
        "stranger": ("ContractError", "group 1: a parameter of shape (2, 2)"),
        "lbfgs": ("ContractError", "LBFGS"),
        "lbfgs 3": ("ContractError", "LBFGS"),
        "second 3": ("OrderError", "SGD, 1 group(s)"),
        "axis": ("ContextError", "tensor"),
        "no module": ("TypeError", "int"),
    }
    for rank, found in enumerate(run_ranks(_refused, 2)):
        for name, (kind, text) in expected.items():
            assert found[name][0] == kind, (name, found[name])
            assert all(part in found[name][1] for part in (text, "found:", "fix:")), found[name]
        assert found["one rank"][0] == ("ValueError" if rank else "PeerError"), found["one rank"]
        assert found["one rank 3"][0] == ("ValueError" if rank else "PeerError"), found["one rank 3"]
        for name in ("stages", "groups", "groups 3"):
            assert found[name][0] == "ContextError", (name, found[name])


def _refused_later(ctx):
    found = {}
    for kind in (torch.optim.AdamW, torch.optim.Adafactor):
        model = _net()
        model, optimizer, after = weft.zero_partition(model, kind(model.parameters(), 0.1), ctx, stage=1)
        _step(model, optimizer, _mine(ctx))
        before = _parameters(model)
        found[kind.__name__, "closure"] = _refusal(optimizer.step, lambda: torch.ones(()))
        assert largest_difference(before, _parameters(model)) == 0
        if kind is torch.optim.AdamW:
            for other in (weft.replicate, weft.fully_shard):
                found[other.__name__] = _refusal(other, model, after)
            found["again"] = _refusal(weft.zero_partition, model, optimizer, after, stage=2)
            found["stale"] = _refusal(weft.zero_partition, model, optimizer, ctx, stage=2)
            found["gather_step"] = _refusal(weft.gather_step, optimizer, after)
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
            found["group"] = _refusal(optimizer.step)
    return found


def test_closures_new_groups_and_other_strategies_are_refused_afterwards():
    for found in run_ranks(_refused_later, 2):
        kinds = {name: kind for name, (kind, _) in found.items()}
        assert kinds == {
            ("AdamW", "closure"): "nothing",
            ("Adafactor", "closure"): "ContractError",
            "replicate": "OrderError",
            "fully_shard": "OrderError",
            "again": "AlreadyApplied",
            "stale": "AlreadyApplied",
            "gather_step": "OrderError",
            "group": "ContractError",
        }
        assert "found:    2 groups" in found["group"][1] and "add_param_group" in found["group"][1]
        assert "fix:      loss = closure()" in found["Adafactor", "closure"][1]


def test_one_rank_changes_nothing():
    for stage in STAGES:
        model, plain = _net(), _net()
        optimizer, plainly = (torch.optim.AdamW(m.parameters(), 0.1) for m in (model, plain))
        model, optimizer, _ = weft.zero_partition(model, optimizer, weft.local(), stage=stage)
        _step(model, optimizer, _mine(None))
        _step(plain, plainly, _mine(None))
        assert type(model) is Net and largest_difference(_parameters(model), _parameters(plain)) == 0


def _rows_of_many(ctx, few):
    zero1_step._FEW_RANKS, before = few, zero1_step._FEW_RANKS
    try:
        model = _net(size=10)  # 3 rows on each rank but the last, which has one
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=1)
        for _ in range(2):
            _step(model, optimizer, _mine(ctx))
        return _parameters(model)
    finally:
        zero1_step._FEW_RANKS = before


@pytest.mark.slow
def test_rows_of_many_ranks_are_copied_together():
    one_by_one, together = (run_ranks(_rows_of_many, 4, few) for few in (16, 1))
    assert all(
        torch.equal(a, b) for ranks in zip(one_by_one, together, strict=True) for a, b in zip(*ranks, strict=True)
    )


def _own_messages(ctx):
    """A message of the program is under way on the same group, from before a step until after it."""
    torch.manual_seed(0)
    model = nn.Linear(256, 256)  # large enough to be gathered in place
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=1)
    peer, sent, received = 1 - ctx.rank, torch.full((256 * 128,), float(7 + ctx.rank)), torch.zeros(256 * 128)
    work = dist.isend(sent, peer)
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    dist.recv(received, peer)
    work.wait()
    return received.unique().tolist(), _parameters(model)


def test_messages_of_the_program_are_not_taken_for_those_of_a_step():
    torch.manual_seed(0)
    plain = nn.Linear(256, 256)
    plain(torch.ones(1, 256)).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for rank, (received, parameters) in enumerate(run_ranks(_own_messages, 2)):
        assert received == [8.0 - rank]
        for found, expected in zip(parameters, plain.parameters(), strict=True):
            assert torch.equal(found, expected)


def test_one_optimizer_too_many_is_to_be_deleted():
    model = nn.Linear(2, 2)
    optimizer, other_optimizer = (torch.optim.SGD(model.parameters(), 0.1) for _ in range(2))
    with pytest.raises(weft.errors.OrderError, match=r"fix: +del other_optimizer"):
        weft.zero_partition(model, optimizer, fake(0, 2), stage=2)
    del other_optimizer
