"""average_weights: torch's averages bit for bit, on shards, in the very same module."""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import weft
from tests.variants import variant_cases
from weft.testing import RanksFailed, largest_difference, laws, run_ranks

HYBRID = {"replica": 2, "shard": 2}


class Net(nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7) if norm else nn.Identity()
        self.second = nn.Linear(7, 2)
        self.second_again = self.second
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.second(torch.tanh(self.norm(self.first(x)) * self.scale))


def _net(kind=torch.float64, norm=False):
    torch.manual_seed(0)
    return Net(norm).to(kind)


def _x(rank, step=0, rows=4):
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(rank + 10 * step), dtype=torch.float64)


def _step(model, optimizer, *inputs):
    for x in inputs:
        (model(x.to(model.scale.dtype)).square().mean() / len(inputs)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _values(module):
    return [_full(p.detach()).clone() for p in module.parameters()]


# -- one process: the bits of AveragedModel ----------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    decay=st.sampled_from([0.0, 0.5, 0.9, 0.999, 1.0, 1]),
    kind=st.sampled_from([torch.float32, torch.float64]),
    buffers=st.sampled_from(["live", "copy", "average"]),
    steps=st.integers(1, 6),
)
def test_one_process_gives_the_bits_of_averaged_model(decay, kind, buffers, steps):
    model = _net(kind, norm=True)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=buffers == "average")
    model, _ = weft.average_weights(model, weft.local(), decay=decay, buffers=buffers)
    averages = weft.averages(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for step in range(steps):
        _step(model, optimizer, _x(0, step))
        theirs.update_parameters(model)
        averages.update()
    assert averages.num_averaged == steps
    if buffers != "live":
        model(_x(0, 98).to(kind))  # the statistics move on, as in steps of another model
    x = _x(0, 99).to(kind)
    model.eval(), theirs.eval()
    with averages.swapped():
        assert all(map(torch.equal, model.parameters(), theirs.module.parameters()))
        floats = [
            (a, b) for a, b in zip(model.buffers(), theirs.module.buffers(), strict=True) if a.is_floating_point()
        ]
        assert len(floats) == 2 and all(torch.equal(a, b) for a, b in floats)
        assert torch.equal(model(x), theirs(x))
    assert buffers == "live" or not torch.equal(model(x), theirs(x))


def test_equal_weights_are_those_of_averaged_model_and_exact():
    for kind in (torch.float32, torch.float64):
        model = _net(kind)
        theirs, seen = AveragedModel(model, multi_avg_fn=get_swa_multi_avg_fn()), []
        model, _ = weft.average_weights(model, weft.local(), decay=None)
        averages, optimizer = weft.averages(model), torch.optim.SGD(model.parameters(), 0.5)
        for step in range(7):
            _step(model, optimizer, _x(0, step))
            theirs.update_parameters(model)
            averages.update()
            seen.append(_values(model))
        with averages.swapped():
            found = _values(model)
        if kind is torch.float32:
            assert all(map(torch.equal, found, theirs.module.parameters()))
        else:
            assert largest_difference(found, [torch.stack(p).mean(0) for p in zip(*seen, strict=True)]) < 1e-15


def test_a_schedule_is_asked_with_the_number_of_averages_so_far():
    asked = []

    def warm_up(n):
        asked.append(n)
        return min(0.9, (1 + n) / (10 + n))

    model, _ = weft.average_weights(_net(), weft.local(), decay=warm_up)
    averages, expected = weft.averages(model), None
    for step in range(4):
        with torch.no_grad():
            model.scale.fill_(step)
        averages.update()
        expected = 0.0 if step == 0 else expected + (1 - min(0.9, (1 + step) / (10 + step))) * (step - expected)
    assert asked == [1, 2, 3]
    with averages.swapped():
        assert abs(model.scale.item() - expected) < 1e-15


def _counts(averages, model, calls):
    taken = []
    for call in range(1, calls + 1):
        before = averages.num_averaged
        with torch.no_grad():
            model.scale.fill_(call)
        averages.update()
        taken += [call] if averages.num_averaged > before else []
    return taken


def test_every_and_start():
    for options, expected in (({"every": 3}, [3, 6, 9]), ({"start": 4, "every": 2}, [6, 8, 10]), ({"start": 9}, [10])):
        model, _ = weft.average_weights(_net(), weft.local(), decay=None, **options)
        averages = weft.averages(model)
        assert _counts(averages, model, 10) == expected
        with averages.swapped():
            assert abs(model.scale.item() - sum(expected) / len(expected)) < 1e-12
        assert model.scale.item() == 10


def test_before_the_first_average_the_weights_stand_in_for_it():
    model, _ = weft.average_weights(_net(), weft.local(), start=5)
    averages, other = weft.averages(model), _net()
    with torch.no_grad():
        model.scale.fill_(3)
    with averages.swapped():
        assert model.scale.item() == 3
    averages.copy_to(other)
    assert other.scale.item() == 3 and averages.state_dict()["weights"]["scale"].item() == 3


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_16_bit_weights_are_averaged_in_float32(kind):
    model, _ = weft.average_weights(_net(kind), weft.local(), decay=0.999)
    averages = weft.averages(model)
    with torch.no_grad():
        model.scale.fill_(1)
    averages.update()
    with torch.no_grad():
        model.scale.fill_(2)
    for _ in range(100):
        averages.update()
    kept = averages.state_dict()["weights"]["scale"]
    assert kept.dtype == torch.float32 and abs(kept.item() - (2 - 0.999**100)) < 1e-5
    with averages.swapped():
        assert model.scale.dtype == kind and model.scale.item() == kept.to(kind).item()
    assert model.scale.item() == 2


def test_frozen_parameters_are_left_alone_and_cost_nothing():
    model = _net()
    model.first.requires_grad_(False)
    model, _ = weft.average_weights(model, weft.local())
    names = ["second.bias", "second.weight", "scale"]
    assert sorted(weft.averages(model).state_dict()["weights"]) == sorted(names)
    model.second.requires_grad_(False)  # frozen later: its average goes on
    weft.averages(model).update()
    model.first.requires_grad_(True)
    with pytest.raises(
        weft.errors.ContractError, match=r"found:    first.weight is new, first.bias is new\n.*\n  fix: "
    ):
        weft.averages(model).update()


# -- the very same module ----------------------------------------------------------------------------


def test_swapping_gives_back_every_bit_also_after_an_error():
    model, _ = weft.average_weights(_net(norm=True), weft.local(), decay=0.5, buffers="average")
    averages, optimizer = weft.averages(model), torch.optim.SGD(model.parameters(), 0.5)
    for step in range(3):
        _step(model, optimizer, _x(0, step))
        averages.update()
    parameters = list(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(KeyError), averages.swapped():
        assert type(model) is Net and list(model.state_dict()) == list(before)
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert model.second_again is model.second
        changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
        assert "first.weight" in changed and "norm.running_mean" in changed
        assert "norm.num_batches_tracked" not in changed
        raise KeyError
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())
    _step(model, optimizer, _x(0, 9))


def test_training_is_not_changed_by_averaging():
    plain, model = _net(), _net()
    model, _ = weft.average_weights(model, weft.local(), decay=0.5)
    ours, theirs = torch.optim.AdamW(model.parameters(), 0.1), torch.optim.AdamW(plain.parameters(), 0.1)
    for step in range(4):
        _step(model, ours, _x(0, step))
        _step(plain, theirs, _x(0, step))
        weft.averages(model).update()
        with weft.averages(model).swapped(), torch.no_grad():
            model(_x(0))
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_an_autocast_around_it_does_not_keep_old_casts():
    model, _ = weft.average_weights(_net(torch.float32), weft.local(), decay=0.5)
    averages, x = weft.averages(model), _x(0).float()
    averages.update()
    with torch.no_grad():
        model.first.weight.add_(1)
    averages.update()
    with torch.autocast("cpu", torch.bfloat16):
        live = model(x)
        with averages.swapped():
            inside = model(x)
        again = model(x)
    with averages.swapped(), torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    assert torch.equal(inside, expected) and torch.equal(live, again) and not torch.equal(live, inside)


def test_a_graph_from_the_other_side_raises():
    model, _ = weft.average_weights(_net(), weft.local())
    loss = model(_x(0)).sum()
    with weft.averages(model).swapped(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inside_of_swapped_the_averages_can_be_saved_but_not_changed():
    model, _ = weft.average_weights(_net(), weft.local(), decay=0.5)
    averages = weft.averages(model)
    averages.update()
    with torch.no_grad():
        model.scale.fill_(3)
    averages.update()
    state = copy.deepcopy(averages.state_dict())
    with averages.swapped():
        inside = averages.state_dict()
        assert all(torch.equal(inside["weights"][n], state["weights"][n]) for n in state["weights"])
        assert all(torch.equal(dict(model.named_parameters())[n], t) for n, t in state["weights"].items())
        for name, call in {
            "update": averages.update,
            "copy_to": lambda: averages.copy_to(model),
            "load_state_dict": lambda: averages.load_state_dict(state),
            "swapped": lambda: averages.swapped().__enter__(),
        }.items():
            with pytest.raises(weft.errors.ContractError, match=rf"{name}: .*\n  found: .*{name}\(\)(.|\n)*fix: "):
                call()
    assert model.scale.item() == 3


def test_copy_to_itself_and_to_another_module():
    model, _ = weft.average_weights(_net(torch.float32, norm=True), weft.local(), decay=0.5, buffers="average")
    averages, optimizer = weft.averages(model), torch.optim.SGD(model.parameters(), 0.5)
    for step in range(3):
        _step(model, optimizer, _x(0, step))
        averages.update()
    other = _net(torch.float64, norm=True)
    averages.copy_to(other)
    averages.copy_to(model)
    assert all(torch.equal(a.double(), b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert torch.equal(model.norm.running_var.double(), other.norm.running_var)
    smaller = nn.Linear(5, 7)
    with pytest.raises(
        ValueError, match=r"copy_to: this Linear .*\n  found:    scale: missing, first.weight: missing(.|\n)*fix:"
    ):
        averages.copy_to(smaller)
    wider = _net(norm=True)
    wider.first = nn.Linear(6, 7)
    kept = wider.second.weight.detach().clone()
    with pytest.raises(ValueError, match=r"first.weight: \(7, 6\) instead of \(7, 5\)"):
        averages.copy_to(wider)
    assert torch.equal(wider.second.weight, kept)


# -- as a state --------------------------------------------------------------------------------------


def _train(model, averages, optimizer, steps):
    for step in steps:
        _step(model, optimizer, _x(0, step))
        averages.update()


def test_going_on_from_a_saved_state_gives_the_same_bits():
    def fresh():
        model, _ = weft.average_weights(_net(), weft.local(), decay=lambda n: 1 - 1 / (n + 2), every=2, start=1)
        return model, weft.averages(model), torch.optim.SGD(model.parameters(), 0.5)

    model, averages, optimizer = fresh()
    _train(model, averages, optimizer, range(4))
    saved, weights = copy.deepcopy(averages.state_dict()), copy.deepcopy(model.state_dict())
    _train(model, averages, optimizer, range(4, 9))
    again, restored, optimizer = fresh()
    again.load_state_dict(weights)
    restored.load_state_dict(saved)
    assert saved["calls"] == 4 and saved["num_averaged"] == restored.num_averaged == 1
    _train(again, restored, optimizer, range(4, 9))
    one, two = averages.state_dict(), restored.state_dict()
    assert one["num_averaged"] == two["num_averaged"] == 4 and one["calls"] == two["calls"]
    assert all(torch.equal(one["weights"][name], two["weights"][name]) for name in one["weights"])


def test_a_state_of_something_else_is_refused_as_a_whole():
    model, _ = weft.average_weights(_net(), weft.local())
    averages = weft.averages(model)
    averages.update()
    good = copy.deepcopy(averages.state_dict())
    weights = {**good["weights"], "extra": torch.ones(1), "scale": torch.ones(2), "first.bias": 3}
    del weights["first.weight"]
    text = r"found:    first.weight is missing, extra is unknown, .*first.bias: a int(.|\n)*fix:"
    with pytest.raises(ValueError, match=text) as caught:
        averages.load_state_dict({**good, "weights": {**weights, "second.bias": torch.zeros(2)}})
    assert "scale: (2,) instead of (1,)" in str(caught.value)
    for state in ({}, {"weights": {}}, {**good, "calls": -1}, {**good, "num_averaged": None}):
        with pytest.raises(ValueError, match=r"no state of averages\n  found:    keys (.|\n)*fix:"):
            averages.load_state_dict(state)
    assert all(torch.equal(averages.state_dict()["weights"][n], t) for n, t in good["weights"].items())


# -- several ranks -----------------------------------------------------------------------------------


def _lay_out(model, ctx, how):
    from torch.distributed.fsdp import fully_shard

    if how == "sharded":
        fully_shard(model.first, mesh=ctx.mesh)
        fully_shard(model, mesh=ctx.mesh)
    else:
        model, ctx = weft.replicate(model, ctx, flat=how == "flat")
    return model, ctx


def _ranks(ctx, how, decay):
    from torch.distributed.tensor.debug import CommDebugMode

    model, ctx = _lay_out(_net(), ctx, how)
    model, ctx = weft.average_weights(model, ctx, decay=decay)
    averages = weft.averages(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model(_x(9))  # torch 2.9 lays shards out anew in the first forward pass
    for part in model.modules():
        if how == "sharded" and hasattr(part, "reshard"):
            part.reshard()
    pointers = [(p.to_local() if how == "sharded" else p).data_ptr() for p in model.parameters()]
    outputs = []
    for step in range(4):
        _step(model, optimizer, _x(ctx.rank, step))
        with CommDebugMode() as counter:
            averages.update()
        with torch.no_grad():
            live = model(_x(9))
            with averages.swapped():
                outputs.append(model(_x(9)))
            assert torch.equal(model(_x(9)), live)  # no copy of the averages stays anywhere
        assert counter.get_total_counts() == 0
    with CommDebugMode() as counter, averages.swapped():
        state = averages.state_dict()
    assert counter.get_total_counts() == 0
    assert all(hasattr(t, "full_tensor") == (how == "sharded") for t in state["weights"].values())
    sizes = [(t.to_local() if how == "sharded" else t).numel() for t in state["weights"].values()]
    for part in model.modules():
        if how == "sharded" and hasattr(part, "reshard"):
            part.reshard()
    locals_ = [p.to_local() if how == "sharded" else p for p in model.parameters()]
    assert pointers == [p.data_ptr() for p in locals_] and sizes == [p.numel() for p in locals_]
    weights = {name: _full(t).clone() for name, t in state["weights"].items()}
    return weights, outputs, _values(model)


def _reference(n, decay):
    model = _net()
    model, _ = weft.average_weights(model, weft.local(), decay=decay)
    averages, outputs = weft.averages(model), []
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for step in range(4):
        _step(model, optimizer, *(_x(rank, step) for rank in range(n)))
        averages.update()
        with averages.swapped(), torch.no_grad():
            outputs.append(model(_x(9)))
    return averages.state_dict()["weights"], outputs, _values(model)


@pytest.mark.parametrize("decay", [0.6, None])
@pytest.mark.parametrize(
    ("how", "n", "mesh"),
    [
        ("plain", 1, None),
        ("plain", 2, None),
        *variant_cases(("plain", 4, None)),
        ("flat", 2, None),
        ("sharded", 2, None),
        *variant_cases(("sharded", 4, None)),
        ("sharded", 4, HYBRID),
    ],
)
def test_ranks_give_the_averages_of_one_process_and_send_nothing(how, n, mesh, decay):
    weights, outputs, values = _reference(n, decay)
    for found, rank_outputs, rank_values in run_ranks(_ranks, n, how, decay, mesh=mesh):
        assert list(found) == list(weights)
        assert largest_difference(list(found.values()), list(weights.values())) < 1e-12
        assert largest_difference(rank_outputs, outputs) < 1e-12
        assert largest_difference(rank_values, values) < 1e-12


def _reload(ctx):
    from torch.distributed.tensor.debug import CommDebugMode

    def fresh():
        model, after = _lay_out(_net(), ctx, "sharded")
        model, _ = weft.average_weights(model, after, decay=0.5)
        return model, weft.averages(model)

    model, averages = fresh()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for step in range(3):
        _step(model, optimizer, _x(ctx.rank, step))
        averages.update()
    cut = averages.state_dict()
    whole = {**cut, "weights": {name: t.full_tensor() for name, t in cut["weights"].items()}}
    for state in (cut, whole):
        _, restored = fresh()
        with CommDebugMode() as counter:
            restored.load_state_dict(state)
        again = restored.state_dict()["weights"]
        assert counter.get_total_counts() == 0
        assert all(torch.equal(again[n].to_local(), t.to_local()) for n, t in cut["weights"].items())
    twin, _ = _lay_out(_net(), ctx, "sharded")
    averages.copy_to(twin)
    assert all(torch.equal(p.to_local(), cut["weights"][n].to_local()) for n, p in twin.named_parameters())
    with pytest.raises(ValueError, match=r"first.weight: whole instead of \(Shard"):
        averages.copy_to(_net())
    plain, _ = weft.average_weights(_net(), weft.local())
    with pytest.raises(ValueError, match="instead of whole"):
        weft.averages(plain).load_state_dict(cut)


def test_a_state_is_loaded_whole_or_cut_without_messages():
    run_ranks(_reload, 2)
    run_ranks(_reload, 4)


def _shard_late(ctx):
    from torch.distributed.fsdp import fully_shard

    model, ctx = weft.average_weights(_net(), ctx)
    fully_shard(model, mesh=ctx.mesh)
    weft.averages(model).update()


def test_sharding_behind_its_back_is_noticed():
    with pytest.raises(RanksFailed, match=r"first.weight had \(7, 5\) on this rank, has \(4, 5\)(.|\n)*as the last"):
        run_ranks(_shard_late, 2)


def _skips(ctx, guarded):
    fp16 = weft.Precision(
        param=torch.float32, compute=torch.float16, output=torch.float32, scaling=weft.precision.LossScaling(init=256.0)
    )
    model, ctx = weft.with_precision(_net(torch.float32), ctx, fp16)
    model, ctx = weft.replicate(model, ctx)
    model, ctx = weft.average_weights(model, ctx, decay=0.5)
    optimizer, ctx = weft.skip_nonfinite(torch.optim.SGD(model.parameters(), 0.1), ctx)
    for step in range(3):
        factor = 1e30 if step == 1 and ctx.rank == 0 else 1.0
        (model(_x(ctx.rank, step).float()).square().mean() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
        if not (guarded and weft.was_skipped(optimizer)):
            weft.averages(model).update()
    return weft.averages(model).num_averaged


def test_a_skipped_step_can_be_left_out():
    assert run_ranks(_skips, 2, True) == [2, 2]
    assert run_ranks(_skips, 2, False) == [3, 3]


# -- the contract ------------------------------------------------------------------------------------


def _average(parts, ctx, **options):
    parts.module, ctx = weft.average_weights(parts.module, ctx, **options)
    return ctx


def _replicate(parts, ctx):
    parts.module, ctx = weft.replicate(parts.module, ctx)
    return ctx


ROW = laws.Row(name="average_weights", apply=_average, break_input=partial(_average, decay=2.0))


@pytest.mark.parametrize("law", laws.LAWS)
def test_it_keeps_the_laws(law):
    laws.LAWS[law](ROW)


def test_a_strategy_comes_before_it():
    row = laws.Row(name="replicate", apply=_replicate, synchronizes=True)
    laws.pairs_agree(ROW, row)
    model, ctx = weft.average_weights(_net(), weft.local())
    with pytest.raises(weft.errors.OrderError, match=r"replicate, then average_weights"):
        weft.replicate(model, ctx)
    with pytest.raises(weft.errors.OrderError, match=r"with_precision, then average_weights"):
        weft.with_precision(model, ctx, "bf16")


def test_it_composes_and_is_found_again():
    prepare = weft.compose(weft.replicate, partial(weft.average_weights, decay=0.9))
    model, ctx = prepare(_net(), weft.local())
    assert [record.name for record in ctx.applied] == ["replicate", "average_weights"]
    assert weft.averages(model) is weft.averages(model) and isinstance(
        weft.averages(model), weft.transforms.average_weights.Averages
    )
    with pytest.raises(
        weft.errors.ContractError, match=r"no averages\n  found:    Linear\n.*\n  fix:      model, ctx = weft.ave"
    ):
        weft.averages(nn.Linear(1, 1))
    with pytest.raises(weft.errors.ContractError, match="no averages"):
        weft.averages(copy.deepcopy(model))  # a copy is plain


def test_nothing_keeps_the_module_or_the_averages_alive():
    model, ctx = weft.average_weights(_net(), weft.local())
    averages = weft.averages(model)
    averages.update()
    with averages.swapped():
        pass
    gc.collect()
    gc.disable()
    try:
        gone, tensor = weakref.ref(model), weakref.ref(averages.state_dict()["weights"]["scale"])
        del model
        assert gone() is None  # no cycle: gone without the collector
        with pytest.raises(weft.errors.ContractError, match=r"the Net is gone\n  found: .*\n.*\n  fix: "):
            averages.update()
        alone = weakref.ref(averages)
        del averages
        assert alone() is None and tensor() is None
    finally:
        gc.enable()
    assert ctx.applied[0].name == "average_weights"


def _different(ctx):
    weft.average_weights(_net(), ctx, decay=0.9 if ctx.rank else 0.99)


def test_ranks_that_ask_for_different_averages_raise():
    with pytest.raises(RanksFailed, match=r"do not agree(.|\n)*decay: 0.99 on rank 0.*0.9 on rank 1"):
        run_ranks(_different, 2)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"decay": 1.5}, ValueError, r"decay = 1.5 cannot be used\n  found:    1.5"),
        ({"decay": -0.1}, ValueError, "found:    -0.1"),
        ({"decay": float("nan")}, ValueError, "found:    nan"),
        ({"decay": "0.9"}, ValueError, "found:    '0.9'"),
        ({"decay": True}, ValueError, "found:    True"),
        ({"every": 0}, ValueError, r"every = 0 cannot be used\n(.|\n)*whole number >= 1"),
        ({"every": 2.0}, ValueError, "every = 2.0 cannot be used"),
        ({"start": -1}, ValueError, r"start = -1 cannot be used\n(.|\n)*whole number >= 0"),
        ({"buffers": "all"}, ValueError, "expected: 'live', 'copy' or 'average'"),
    ],
    ids=str,
)
def test_options_that_are_refused(options, kind, text):
    model = _net()
    with pytest.raises(kind, match=text) as caught:
        weft.average_weights(model, weft.local(), **options)
    assert all(f"  {field}:" in str(caught.value) for field in ("found", "expected", "fix"))


def test_modules_that_are_refused():
    with pytest.raises(TypeError, match=r"not a module\n  found:    int(.|\n)*fix:"):
        weft.average_weights(3, weft.local())
    with pytest.raises(ValueError, match=r"no weights to average\n  found:    no parameter requires a gradient"):
        weft.average_weights(_net().requires_grad_(False), weft.local())
    with pytest.raises(ValueError, match=r"have no shape yet\n  found:    weight, bias\n(.|\n)*fix:      model\(ex"):
        weft.average_weights(nn.LazyLinear(2), weft.local())


def test_a_schedule_that_gives_nonsense_is_refused():
    model, _ = weft.average_weights(_net(), weft.local(), decay=lambda n: 2.0)
    weft.averages(model).update()
    with pytest.raises(ValueError, match=r"decay\(1\) = 2.0 cannot be used(.|\n)*fix:"):
        weft.averages(model).update()


def _strategies(ctx, how):
    model = _net(torch.float32 if how == "precise" else torch.float64)
    if how == "precise":
        model, ctx = weft.with_precision(model, ctx, "bf16")
    if how.startswith("zero"):
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=int(how[-1]))
    else:
        model, ctx = weft.fully_shard(model, ctx, units=["first"])
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model, ctx = weft.average_weights(model, ctx, decay=0.6)
    averages, norms = weft.averages(model), []
    for step in range(4):
        model(_x(ctx.rank, step).to(model.scale.dtype)).square().mean().backward()
        norms.append(weft.clip_grads(model, ctx, max_norm=0.05))
        optimizer.step()
        optimizer.zero_grad()
        averages.update()
    with averages.swapped(), torch.no_grad():
        output = model(_x(9).to(model.scale.dtype))
    return [_full(t).clone() for t in averages.state_dict()["weights"].values()], output, norms


@pytest.mark.parametrize(
    ("how", "tolerance"),
    [("shard", 1e-12), ("zero 2", 1e-12), *variant_cases(("zero 1", 1e-12), ("zero 3", 1e-12), ("precise", 0.02))],
)
def test_with_the_strategies_of_this_package_and_clipping(how, tolerance):
    n = 2
    model, _ = weft.average_weights(_net(), weft.local(), decay=0.6)
    averages, norms = weft.averages(model), []
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for step in range(4):
        for rank in range(n):
            (model(_x(rank, step)).square().mean() / n).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()
        averages.update()
    with averages.swapped(), torch.no_grad():
        output = model(_x(9))
    weights = list(averages.state_dict()["weights"].values())
    for found, rank_output, rank_norms in run_ranks(_strategies, n, how):
        assert largest_difference([t.double() for t in found], weights) < tolerance
        assert largest_difference([rank_output.double()], [output]) < tolerance
        assert largest_difference([t.double() for t in rank_norms], norms) < tolerance
