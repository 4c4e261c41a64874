"""save and restore: every kind of state, every strategy at every number of ranks, and what is refused."""

import copy
import itertools
import math
import random
import re
import subprocess
import sys
import time
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import weft
from tests.checkpoint.folders import folders
from tests.variants import variant_cases
from weft.checkpoint.state.json_values import encode
from weft.checkpoint.storage.directory import Directory
from weft.collectives.encoding import decode
from weft.errors import CheckpointError, PeerError
from weft.testing import RanksFailed, run_ranks


class Net(nn.Module):
    """Tied weights, an odd width, a buffer, a number as parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.mid = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, x):
        self.seen += 1
        return self.head(torch.tanh(self.mid(self.embed(x)))) * self.gain


def _net(make=Net):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return make()


class Box:
    """A user's object."""

    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Ids(Dataset):
    """Returns tokens by index, and counts what is read."""

    def __init__(self, n=40):
        self.n = n
        self.read = []

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        self.read.append(index)
        return torch.tensor([index % 7, (index * 3) % 7, (index * 5) % 7]), index


def _state(ctx, **objects):
    return weft.checkpointable(objects, ctx)[0]


def _local(objects, **options):
    return weft.checkpointable(objects, weft.local(), **options)


# -- plain values ------------------------------------------------------------------------------------

NESTED = {
    "tuple": (1, (2.5, None), [True, "text"]), "ints": {3: "a", 10: {"deep": (1,)}}, "mixed": {"a": 1, 2: 3},
    "nan": math.nan, "inf": -math.inf, "large": 2**80, "empty": [{}, [], ()], "$": "a key", "": 0, "a/b": "slash",
    "tensor": torch.arange(3), "in tuple": (torch.ones(2, dtype=torch.bfloat16),), "counter": Counter({4: 2}),
    "ordered": OrderedDict(b=1, a=torch.ones(1)), "recent": deque([(1, torch.ones(2)), [None]], maxlen=3),
    "open": deque(), "seen": {"b", "a", (1, 2), 3}, "no more": frozenset({1.5}), "none": set(),
}  # fmt: skip


def _same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple, deque)):
        return getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0) and len(a) == len(b) and all(map(_same, a, b))
    return a == b


def test_a_nested_value_comes_back_with_its_types(tmp_path):
    state, ctx = _local({"box": Box(NESTED)})
    weft.save(state, tmp_path, 1, ctx)
    back = Box()
    weft.restore(_local({"box": back})[0], tmp_path, ctx)
    assert _same(back.value, NESTED)


def test_two_tensors_whose_paths_are_alike_do_not_meet():
    tensors = {}
    text = encode("o", {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}}, tensors)
    assert [float(v) for v in _leaves(decode(text, lambda name: tensors[name].tensor))] == [0.0, 1.0]


def _leaves(value):
    return [x for item in value.values() for x in (_leaves(item) if isinstance(item, dict) else [item])]


@pytest.mark.parametrize("leaf", [{torch.ones(1)}, {b"bytes"}, object(), b"bytes", {(1, 2): 3},
                                  torch.ones(1, dtype=torch.complex128), torch.ones(2).to_sparse(),
                                  torch.ones(1, device="meta")])  # fmt: skip
def test_a_leaf_of_another_type_is_refused_by_name(tmp_path, leaf):
    state, ctx = _local({"box": Box([0, {"here": leaf}])})
    with pytest.raises(TypeError, match=r"box/value/1/here cannot be saved\n  found: .*\n  expected: .*\n  fix: "):
        weft.save(state, tmp_path, 1, ctx)
    assert not list(tmp_path.iterdir())


# -- checkpointable ----------------------------------------------------------------------------------


def test_objects_without_state_and_bad_names_are_refused():
    ctx = weft.local()
    with pytest.raises(TypeError, match=r"objects without state_dict(.|\n)*step: int(.|\n)*fix: "):
        weft.checkpointable({"step": 3}, ctx)
    for objects in ({}, {"a/b": Box()}, {"": Box()}, {"rng": Box()}, {3: Box()}):
        with pytest.raises(ValueError, match=r"found: (.|\n)*expected: names without"):
            weft.checkpointable(objects, ctx)
    with pytest.raises(ValueError, match=r"optimizer holds parameters that belong to no module(.|\n)*shape \(2, 2\)"):
        weft.checkpointable({"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)}, ctx)


def test_what_is_no_state_is_refused(tmp_path):
    ctx = weft.local()
    for call in (lambda: weft.save(nn.Linear(1, 1), tmp_path, 1, ctx), lambda: weft.restore({}, tmp_path, ctx)):
        with pytest.raises(TypeError, match=r"this is not a state(.|\n)*fix: "):
            call()
    state, _ = _local({"box": Box()})
    for step, keep in ((-1, None), (True, None), (1.0, None), (10**18, None), (1, 0)):
        with pytest.raises(ValueError, match=r"save: (step|keep) = (.|\n)*whole number"):
            weft.save(state, tmp_path, step, ctx, keep=keep)


@pytest.mark.slow
def test_a_context_for_one_rank_and_a_pretended_one_are_refused(tmp_path):
    def saves(ctx, folder):
        state = _state(ctx, box=Box())
        with pytest.raises(weft.errors.CollectiveRefused, match="save"):
            weft.save(state, folder, 1, ctx.only(0))
        with pytest.raises(weft.errors.CollectiveRefused, match="restore"):
            weft.restore(state, folder, ctx.only(0))

    run_ranks(saves, 2, tmp_path)
    pretended = weft.testing.fake(0, 2)
    with pytest.raises(weft.errors.ContextError, match="no process group"):
        weft.save(_state(pretended, box=Box()), tmp_path, 1, pretended)


def test_reading_the_state_changes_nothing(tmp_path):
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    random_before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    state, ctx = _local({"model": model, "optimizer": optimizer})
    weft.save(state, tmp_path, 1, ctx)
    assert not optimizer.state and all(p.grad is None for p in model.parameters())
    assert torch.equal(random_before[0], torch.get_rng_state()) and random_before[1] == random.getstate()
    assert (random_before[2] == np.random.get_state()[1]).all()
    weft.restore(state, tmp_path, ctx)
    assert not optimizer.state


def _kept(ctx, folder, saves):
    """Containers before a save, or after a restore."""
    best, losses = ({"best": 0.5, "at": (3, "x")}, [1.0, 2.5]) if saves else ({"best": 9.0, "more": 1}, [])
    recent = deque([4, 5, 6] if saves else [], maxlen=3)
    seen = defaultdict(int, a=2) if saves else defaultdict(int, a=7, b=1)
    objects = {"best": best, "losses": losses, "recent": recent, "seen": seen, "count": Counter(seen)}
    state, ctx = weft.checkpointable({"model": nn.Linear(2, 2), **objects}, ctx)
    if saves:
        weft.save(state, folder, 1, ctx)
    else:
        weft.restore(state, folder, ctx)
    return objects


@pytest.mark.parametrize(("saved_by", "restored_by"), [(1, 4), (2, 1), (4, 2)])
def test_dicts_and_lists_are_filled_in_place(tmp_path, saved_by, restored_by):
    saved = run_ranks(_kept, saved_by, tmp_path, saves=True)
    for objects in run_ranks(_kept, restored_by, tmp_path, saves=False):
        assert objects == saved[0]
        assert [type(value) for value in objects.values()] == [type(value) for value in saved[0].values()]
        assert objects["recent"].maxlen == 3


def test_what_a_dict_cannot_keep_is_refused_at_once_and_ranks_may_not_differ(tmp_path):
    with pytest.raises(TypeError, match=r"progress/best/0 cannot be saved\n  found: +Linear"):
        weft.checkpointable({"progress": {"best": [nn.Linear(1, 1)]}}, weft.local())

    def differs(ctx):
        state, ctx = weft.checkpointable({"progress": {"best": float(ctx.rank)}}, ctx)
        with pytest.raises((CheckpointError, PeerError), match="differs between the ranks(.|\n)*progress"):
            weft.save(state, tmp_path, 1, ctx)

    run_ranks(differs, 2)


def test_a_restore_that_fails_leaves_dicts_as_they_were(tmp_path):
    class Unwilling(Box):
        def load_state_dict(self, state):
            if state["value"] == 1:
                raise ValueError("no")

    state, ctx = _local({"progress": {"best": 1.0}, "box": Box(1)})
    weft.save(state, tmp_path, 1, ctx)
    progress = {"best": 2.0, "more": 3}
    state, ctx = _local({"progress": progress, "box": Unwilling()})
    with pytest.raises(CheckpointError, match="box could not load its state"):
        weft.restore(state, tmp_path, ctx)
    assert progress == {"best": 2.0, "more": 3}
    state, ctx = _local({"progress": [1]})
    with pytest.raises(
        CheckpointError, match=r"progress could not load its state(.|\n)*a list cannot take the values of"
    ):
        weft.restore(state, tmp_path, ctx, strict=False)


# -- what comes back ---------------------------------------------------------------------------------


class Extra(nn.Module):
    def __init__(self, extra=None):
        super().__init__()
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.parametrize("extra", [{"a": (1, 2)}, torch.arange(3)], ids=["values", "tensor"])
def test_extra_state_comes_back(tmp_path, extra):
    state, ctx = _local({"model": nn.Sequential(nn.Linear(1, 1), Extra(extra))})
    weft.save(state, tmp_path, 1, ctx)
    model = nn.Sequential(nn.Linear(1, 1), Extra())
    other, _ = _local({"model": model})
    weft.restore(other, tmp_path, ctx)
    assert _same(model[1].extra, extra)
    with pytest.raises(CheckpointError, match=r"only in the checkpoint: model/1\._extra_state"):
        weft.restore(_local({"model": nn.Sequential(nn.Linear(1, 1), nn.Identity())})[0], tmp_path, ctx)


def test_a_tensor_that_could_not_be_put_back_is_refused(tmp_path):
    model = nn.Linear(1, 1)
    model.register_state_dict_post_hook(lambda module, out, prefix, local: out.update(made_up=torch.ones(1)))
    with pytest.raises(TypeError, match=r"model/made_up could not be restored(.|\n)*get_extra_state"):
        state, ctx = _local({"model": model})
        weft.save(state, tmp_path, 1, ctx)


@pytest.mark.parametrize(("build", "match"), [
    (lambda: nn.Linear(1, 1, device="meta"), r"model/weight cannot be saved(.|\n)*on meta(.|\n)*fix: .*load_weights"),
    (lambda: nn.LazyLinear(1), r"model/weight cannot be saved(.|\n)*without a shape"),
    (lambda: _with("shared", torch.ones(1).expand(3)), r"model/shared could not be restored(.|\n)*share memory"),
    (lambda: _with("#name", torch.ones(1)), r"model/#name could not be restored(.|\n)*begins with #"),
], ids=["meta", "lazy", "expanded", "marked"])  # fmt: skip
def test_a_module_without_values_of_its_own_is_refused_by_name(tmp_path, build, match):
    state, ctx = _local({"model": build()})
    for call in (lambda: weft.save(state, tmp_path, 1, ctx), lambda: weft.save_async(state, tmp_path, 1, ctx)):
        with pytest.raises(TypeError, match=match):
            call()


def _with(name, value):
    model = nn.Module()
    model.register_buffer(name, value)
    return model


def test_tied_weights_are_written_once_and_stay_tied(tmp_path):
    state, ctx = _local({"model": _net()})
    manifest = weft.checkpoint.verify(weft.save(state, tmp_path, 1, ctx))
    assert manifest.tensors["model/head.weight"].same_as == "model/embed.weight"
    assert manifest.tensors["model/head.weight"].pieces == ()
    model = Net()
    weft.restore(_local({"model": model})[0], tmp_path, ctx)
    assert model.head.weight is model.embed.weight and torch.equal(model.head.weight, _net().embed.weight)
    loose = Net()
    loose.head.weight = nn.Parameter(torch.zeros(7, 5))
    weft.restore(_local({"model": loose})[0], tmp_path, ctx)
    assert torch.equal(loose.head.weight, _net().embed.weight) and loose.head.weight is not loose.embed.weight


def test_schedulers_scale_and_averages_come_back(tmp_path):
    def build():
        ctx = weft.local()
        model, ctx = weft.with_precision(_net(), ctx, "fp16")
        model, ctx = weft.average_weights(model, ctx)
        optimizer, ctx = weft.skip_nonfinite(torch.optim.AdamW(model.parameters(), lr=0.1), ctx)
        makers = torch.optim.lr_scheduler
        schedule = makers.SequentialLR(
            optimizer, [makers.LinearLR(optimizer), makers.MultiStepLR(optimizer, [2, 4])], milestones=[2]
        )
        objects = {"model": model, "optimizer": optimizer, "schedule": schedule}
        return model, optimizer, schedule, *weft.checkpointable(objects, ctx)

    def train(model, optimizer, schedule, steps):
        for step in range(steps):
            loss = model(torch.tensor([1, 2, 3])).float().square().mean() * (1e30 if step == 0 else 1.0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            weft.averages(model).update()

    model, optimizer, schedule, state, ctx = build()
    train(model, optimizer, schedule, 3)
    weft.save(state, tmp_path, 3, ctx)
    before = weft.loss_scale(model), schedule.state_dict(), weft.averages(model).state_dict()
    model, optimizer, schedule, state, ctx = build()
    weft.restore(state, tmp_path, ctx)
    after = weft.loss_scale(model), schedule.state_dict(), weft.averages(model).state_dict()
    assert before[0] == after[0]
    assert before[0] != weft.loss_scale(build()[0])
    assert before[1]["last_epoch"] == after[1]["last_epoch"] == 3 and before[1]["_last_lr"] == after[1]["_last_lr"]
    assert before[2]["num_averaged"] == after[2]["num_averaged"] == 3
    assert all(torch.equal(w, after[2]["weights"][n]) for n, w in before[2]["weights"].items())
    plain, _ = _local({"model": _net()})
    with pytest.raises(CheckpointError, match=r"only in the checkpoint: (.|\n)*model/#"):
        weft.restore(plain, tmp_path, weft.local(), strict=True)


def test_what_transforms_of_a_part_keep_comes_back(tmp_path):
    def build():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        _, ctx = weft.with_precision(model[1], weft.local(), "fp16")
        _, ctx = weft.average_weights(model[0], ctx)
        return model, *weft.checkpointable({"model": model}, ctx)

    model, state, ctx = build()
    (model(torch.ones(1, 2)).sum() * float("inf")).backward()
    optimizer, ctx = weft.skip_nonfinite(torch.optim.SGD(model[1].parameters(), 0.1), ctx)
    optimizer.step()
    weft.averages(model[0]).update()
    weft.save(state, tmp_path, 1, ctx)
    other, state, ctx = build()
    assert weft.loss_scale(other[1]) != weft.loss_scale(model[1])
    weft.restore(state, tmp_path, ctx)
    assert weft.loss_scale(other[1]) == weft.loss_scale(model[1])
    assert weft.averages(other[0]).num_averaged == 1


def _draw():
    return random.random(), float(np.random.rand()), float(torch.rand(1))


def test_random_states_go_on_on_each_rank(tmp_path):
    def saves(ctx, folder):
        random.seed(ctx.rank), np.random.seed(ctx.rank), torch.manual_seed(ctx.rank)
        weft.save(_state(ctx, box=Box()), folder, 1, ctx)
        return _draw()

    def restores(ctx, folder, rng=True):
        state, ctx = weft.checkpointable({"box": Box()}, ctx, rng=rng)
        before = torch.get_rng_state()
        weft.restore(state, folder, ctx)
        return _draw() if rng else torch.equal(before, torch.get_rng_state())

    drawn = run_ranks(saves, 2, tmp_path)
    assert len(set(drawn)) == 2 and run_ranks(restores, 2, tmp_path) == drawn
    assert run_ranks(restores, 2, tmp_path, rng=False) == [True, True]
    four = run_ranks(restores, 4, tmp_path)
    assert len(set(four)) == 4 and four == run_ranks(restores, 4, tmp_path)


def _gathered(ctx, folder):
    """A checkpoint between forward and backward, while the shards are gathered."""
    model, ctx = weft.fully_shard(_net(), ctx, reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.tensor([1, 2, 3])).square().mean()
    state, ctx = weft.checkpointable({"optimizer": optimizer, "model": model}, ctx)
    weft.save(state, folder, 1, ctx)
    loss.backward()
    optimizer.step()


def test_gathered_shards_are_saved_as_what_they_are(tmp_path):
    run_ranks(_gathered, 2, tmp_path)
    model = Net()
    weft.restore(_local({"model": model})[0], tmp_path, weft.local(), strict=False)
    assert torch.equal(model.head.weight, _net().head.weight)


# -- strategies and numbers of ranks -----------------------------------------------------------------

CASES = [("replicate", 1), ("replicate", 2), ("flat", 2), ("fully_shard", 2), ("fully_shard", 4), ("zero1", 2),
         ("zero2", 4), ("zero3", 2), ("zero3", 4)]  # fmt: skip


def _build(ctx, strategy):
    model = _net().double()
    loader, ctx = weft.shard_data(DataLoader(Ids(), batch_size=8, shuffle=True), ctx, mode="split")
    if strategy == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx)
    elif not strategy.startswith("zero"):
        model, ctx = weft.replicate(model, ctx, flat=strategy == "flat")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    if strategy == "flat":
        optimizer, ctx = weft.fuse_step(optimizer, ctx)
    if strategy.startswith("zero"):
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=int(strategy[-1]))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    objects = {"model": model, "optimizer": optimizer, "loader": loader, "schedule": schedule}
    state, ctx = weft.checkpointable(objects, ctx)
    return state, ctx, *objects.values()


def _steps(ctx, model, optimizer, loader, schedule):
    """Train, and yield the loss of each step."""
    while True:
        for x, _ in loader:
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            yield float(weft.reduce(loss.detach(), ctx, "mean"))


def _take(losses, count):
    return list(itertools.islice(losses, count))


def _whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def _everything(model, optimizer):
    moments = [
        {key: _whole(value) for key, value in optimizer.state_dict()["state"][i].items()}
        for i in sorted(optimizer.state_dict()["state"])
    ]
    return {name: _whole(value) for name, value in model.state_dict().items()}, moments


def _train_and_save(ctx, strategy, folder):
    state, ctx, *parts = _build(ctx, strategy)
    losses = _steps(ctx, *parts)
    _take(losses, 3)
    weft.save(state, folder, 3, ctx)
    found = _everything(*parts[:2])
    return found, _take(losses, 4)


def _restore_and_train(ctx, cases, folders):
    found = []
    for strategy, folder in [(strategy, folder) for strategy in cases for folder in folders]:
        state, mine, *parts = _build(ctx, strategy)
        result = weft.restore(state, folder, mine)
        assert result.step == 3 and not result.missing and not result.unexpected
        found.append((_everything(*parts[:2]), _take(_steps(mine, *parts), 4)))
    return found


@pytest.mark.slow
def test_every_strategy_restores_what_every_other_saved(tmp_path):
    saved = [run_ranks(_train_and_save, n, strategy, tmp_path / f"{strategy}{n}")[0] for strategy, n in CASES]
    paths = [tmp_path / f"{strategy}{n}" for strategy, n in CASES]
    for n in (1, 2, 4):
        cases = [strategy for strategy, ranks in CASES if ranks == n]
        back = run_ranks(_restore_and_train, n, cases, paths)[0]
        for (strategy, (one, want)), ((weights, moments), losses) in zip(
            [(strategy, pair) for strategy in cases for pair in zip(CASES, saved, strict=True)], back, strict=True
        ):
            what = f"{one[0]} on {one[1]} -> {strategy} on {n}"
            (wanted, wanted_moments), wanted_losses = want
            assert all(torch.equal(value, weights[name]) for name, value in wanted.items()), what
            assert len(moments) == len(wanted_moments) == 4, what
            for a, b in zip(wanted_moments, moments, strict=True):
                assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a), what
            if one == (strategy, n):
                assert losses == wanted_losses, what
            else:
                assert losses == pytest.approx(wanted_losses, abs=1e-9), what


# -- the position in the data ------------------------------------------------------------------------


def _part_of_an_epoch(ctx, folder, batches, step, workers):
    dataset = Ids(44)
    loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=workers)
    loader, ctx = weft.shard_data(loader, ctx, mode="split", uneven="balance")
    state = _state(ctx, loader=loader, box=Box())
    weft.restore(state, folder, ctx)
    used = []
    for count, (_, ids) in enumerate(loader, start=1):
        used += ids.tolist()
        if count == batches:
            weft.save(state, folder, step, ctx)
            break
    return used, dataset.read


@pytest.mark.parametrize("workers", [0, 2])
def test_each_sample_once_over_three_interruptions_at_other_numbers_of_ranks(tmp_path, workers):
    used, read = [], []
    for step, (ranks, batches) in enumerate([(2, 3), (1, 2), (4, 4), (2, 99)]):
        for mine, touched in run_ranks(_part_of_an_epoch, ranks, tmp_path, batches, step, workers):
            used += mine
            read += touched
    assert sorted(used) == list(range(44))
    if workers == 0:
        assert sorted(read) == list(range(44)), "a sample that was skipped was read"


# -- names that differ -------------------------------------------------------------------------------


def test_strict_and_partial_restore(tmp_path):
    state, ctx = _local({"model": nn.Linear(2, 2), "old": Box(1)})
    weft.save(state, tmp_path, 1, ctx)
    bigger = nn.Linear(2, 2)
    bigger.extra = nn.Linear(1, 1)
    kept = bigger.extra.weight.clone()
    other, _ = _local({"model": bigger, "new": Box(5)})
    before = bigger.weight.clone()
    with pytest.raises(CheckpointError, match=r"not in the checkpoint: (.|\n)*only in the checkpoint: old(.|\n)*fix: "):
        weft.restore(other, tmp_path, ctx)
    assert torch.equal(before, bigger.weight)
    found = weft.restore(other, tmp_path, ctx, strict=False)
    assert set(found.missing) == {"model/extra.weight", "model/extra.bias", "new"} and found.unexpected == ("old",)
    assert torch.equal(bigger.extra.weight, kept) and other.objects["new"].value == 5
    assert torch.equal(bigger.weight, state.objects["model"].weight)


def test_other_shapes_and_other_groups_are_refused(tmp_path):
    model = nn.Linear(2, 2)
    state, ctx = _local({"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0)})
    weft.save(state, tmp_path, 1, ctx)
    with pytest.raises(CheckpointError, match=r"shapes: model/weight of shape \(2, 2\), not \(3, 2\)"):
        weft.restore(_local({"model": nn.Linear(2, 3)})[0], tmp_path, ctx, strict=False)
    groups = [{"params": [model.bias]}, {"params": [model.weight]}]
    other, _ = _local({"model": model, "optimizer": torch.optim.SGD(groups, lr=1.0)})
    with pytest.raises(
        CheckpointError, match=r"optimizer has different parameters or groups(.|\n)*group 0: model/weight"
    ):
        weft.restore(other, tmp_path, ctx)


def test_values_that_would_be_lost_are_refused(tmp_path):
    saved = {"whole": torch.tensor([300]), "real": torch.tensor([1e6, 2.0]), "wide": torch.tensor([1.0])}

    def build(**others):
        model = nn.Module()
        for name, value in (saved | others).items():
            model.register_buffer(name, value.clone())
        return model

    state, ctx = _local({"model": build()})
    weft.save(state, tmp_path, 1, ctx)
    cases = {
        r"kinds of numbers: model/whole of int64, not float32": {"whole": torch.tensor([0.0])},
        r"kinds of numbers: model/real of float32, not int32": {"real": torch.tensor([0, 0], dtype=torch.int32)},
        r"model/whole has numbers that int8 does not have": {"whole": torch.tensor([0], dtype=torch.int8)},
        r"model/real has numbers that float16 does not have": {"real": torch.zeros(2, dtype=torch.float16)},
    }
    for match, others in cases.items():
        model = build(wide=torch.tensor([7.0]), **others)
        with pytest.raises(CheckpointError, match=match + r"(.|\n)*expected: (.|\n)*fix: "):
            weft.restore(_local({"model": model})[0], tmp_path, ctx, strict=False)
        assert model.wide.item() == 7
    model = build(real=torch.zeros(2, dtype=torch.bfloat16))
    weft.restore(_local({"model": model})[0], tmp_path, ctx)
    assert torch.equal(model.real, saved["real"].bfloat16())


def _partly(ctx, folder, strategy, saves):
    """Save, or restore over other values, all but the embedding."""
    model, ctx = strategy(_net(), ctx)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model(torch.tensor([[1, 2], [3, 4]])).sum().backward()
    optimizer.step()
    only = re.compile(r"model/(mid\.|gain|seen)").match
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer}, ctx, only=only)
    restored = None
    if saves:
        weft.save(state, folder, 1, ctx)
    else:
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(7.0)
        restored = weft.restore(state, folder, ctx)
    with weft.full_params(model, ctx):
        values = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    return values, None if restored is None else (restored.missing, restored.unexpected)


@pytest.mark.parametrize("whole", [False, True])
def test_only_some_tensors_are_saved_and_restored(tmp_path, whole):
    """Left out where it is saved, or where a whole checkpoint is restored."""
    if whole:
        model = _net()
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        model(torch.tensor([[1, 2], [3, 4]])).sum().backward()
        optimizer.step()
        state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer}, weft.local())
        weft.save(state, tmp_path, 1, ctx)
        saved = dict(model.named_parameters())
    else:
        ((saved, _), _) = run_ranks(_partly, 2, str(tmp_path), weft.fully_shard, saves=True)
        stored = weft.checkpoint.verify(weft.checkpoint.latest(tmp_path)).tensors
        assert [name for name in stored if name.startswith("model/")] == [
            "model/gain", "model/seen", "model/mid.weight", "model/mid.bias",
        ]  # fmt: skip
    for values, names in run_ranks(_partly, 2, str(tmp_path), weft.replicate, saves=False):
        assert names == ((), ())
        for name, value in values.items():
            expected = torch.full_like(value, 7.0) if name == "embed.weight" else saved[name]
            assert torch.equal(value, expected), name
    state, ctx = weft.checkpointable({"model": _net()}, weft.local())
    if not whole:
        with pytest.raises(CheckpointError, match=r"not in the checkpoint: model/embed.weight"):
            weft.restore(state, tmp_path, ctx)


def test_tied_weights_take_one_value_under_any_of_their_names(tmp_path):
    apart = _net()
    apart.head.weight = nn.Parameter(apart.embed.weight.detach().clone())
    state, ctx = _local({"model": apart})
    weft.save(state, tmp_path, 1, ctx)
    model = Net()
    weft.restore(_local({"model": model})[0], tmp_path, ctx)
    assert torch.equal(model.head.weight, apart.head.weight) and model.head.weight is model.embed.weight
    with torch.no_grad():
        apart.head.weight[0, 0] += 1
    weft.save(state, tmp_path, 2, ctx)
    model, before = Net(), copy.deepcopy(_net().state_dict())
    model.load_state_dict(before)
    with pytest.raises(
        CheckpointError, match=r"model/embed.weight and model/head.weight are one tensor(.|\n)*two values"
    ):
        weft.restore(_local({"model": model})[0], tmp_path, ctx)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Counting(torch.optim.SGD):
    """Has state of its own, besides that of parameters, and in other dtypes than theirs."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        self.state["of all"] = {"note": "text", "seen": torch.tensor([self.calls])}
        for p in self.param_groups[0]["params"]:
            self.state[p] = {
                "wide": torch.full(p.shape, 1 / 3, dtype=torch.float64), "mask": torch.tensor([True, False, True]),
                "kept": [(torch.tensor(2**40 + 1), "text")], "step": torch.tensor(3.0),
            }  # fmt: skip

    def state_dict(self):
        return super().state_dict() | {"calls": self.calls}

    def load_state_dict(self, state):
        super().load_state_dict({key: value for key, value in state.items() if key != "calls"})
        self.calls = state["calls"]


def test_an_optimizer_gets_all_of_its_state_in_the_dtypes_it_had(tmp_path):
    def build(make):
        model = _net(lambda: nn.Linear(2, 2).bfloat16())
        return model, make(model.parameters(), lr=0.1)

    for number, make in enumerate((Counting, torch.optim.NAdam, torch.optim.ASGD)):
        model, optimizer = build(make)
        model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        state, ctx = _local({"model": model, "optimizer": optimizer})
        weft.save(state, tmp_path / str(number), 1, ctx)
        model, other = build(make)
        weft.restore(_local({"model": model, "optimizer": other})[0], tmp_path / str(number), ctx)
        found = other.state_dict()["state"]
        for index, entry in optimizer.state_dict()["state"].items():
            for key, value in entry.items():
                if isinstance(value, torch.Tensor):
                    assert found[index][key].dtype == value.dtype and torch.equal(found[index][key], value), (make, key)
                else:
                    assert found[index][key] == value
        if make is Counting:
            assert other.calls == 1 and found["of all"]["note"] == "text"
            assert found[0]["kept"][0][0].dtype == torch.int64


def test_a_wrapper_of_torch_compile_is_saved_as_the_module_in_it(tmp_path):
    model = _net()
    model.mid = torch.compile(model.mid, backend="eager")
    whole = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(whole.parameters(), lr=1.0)
    state, ctx = _local({"model": whole, "optimizer": optimizer})
    names = weft.checkpoint.verify(weft.save(state, tmp_path, 1, ctx)).tensors
    assert set(names) == {f"model/{name}" for name in Net().state_dict()}
    plain = Net()
    weft.restore(_local({"model": plain, "optimizer": torch.optim.SGD(plain.parameters(), lr=1.0)})[0], tmp_path, ctx)
    assert torch.equal(plain.mid.weight, model.mid.weight)
    other = torch.compile(Net(), backend="eager")
    weft.load_weights(other, tmp_path, ctx)
    assert torch.equal(other.mid.weight, model.mid.weight)


def test_conjugated_tensors_are_saved_by_value(tmp_path):
    value = torch.tensor([1 + 2j, 3 - 4j])
    state, ctx = _local({"box": Box({"conj": value.conj(), "imag": value.conj().imag})})
    weft.save(state, tmp_path, 1, ctx)
    weft.save_async(state, tmp_path, 2, ctx).wait()
    for step in (1, 2):
        other, _ = _local({"box": Box()})
        weft.restore(other, tmp_path / f"step-{step:08d}", ctx)
        found = other.objects["box"].value
        assert torch.equal(found["conj"], value.conj()) and found["imag"].tolist() == [-2, 4]


def test_nothing_saved_yet_is_no_error(tmp_path):
    state, ctx = _local({"box": Box()})
    assert weft.restore(state, tmp_path / "none", ctx) is None and weft.checkpoint.latest(tmp_path / "none") is None
    assert not (tmp_path / "none").exists()


# -- which checkpoints there are ---------------------------------------------------------------------


def test_checkpoints_are_kept_by_number_and_not_by_name(tmp_path):
    state, ctx = _local({"box": Box()})
    for step in range(11):
        weft.save(state, tmp_path, step, ctx, keep=2)
    assert [path.name for path in folders(tmp_path)] == ["step-00000009", "step-00000010"]
    for step in (99, 100, 10**9, 10**8):
        weft.save(state, tmp_path, step, ctx)
    assert weft.checkpoint.latest(tmp_path).name == "step-1000000000"
    weft.save(state, tmp_path, 11, ctx, keep=1)  # the one just saved stays, whatever its number
    assert weft.restore(state, tmp_path, ctx).step == 10**9
    assert [path.name for path in folders(tmp_path)] == ["step-00000011", "step-1000000000"]
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == [".saving"]
    assert weft.restore(state, tmp_path / "step-00000011", ctx).step == 11


def test_a_step_is_saved_once(tmp_path):
    state, ctx = _local({"box": Box(1)})
    path = weft.save(state, tmp_path, 5, ctx)
    before = (path / "manifest.json").read_bytes()
    assert weft.save(state, tmp_path, 5, ctx) == weft.save_async(state, tmp_path, 5, ctx).wait() == path  # tried again
    for value in (2, torch.ones(2), torch.zeros(2)):
        state.objects["box"].value = value
        with pytest.raises(CheckpointError, match=r"save: step 5 has already been saved(.|\n)*found: (.|\n)*fix: "):
            weft.save(state, tmp_path, 5, ctx)
    assert (path / "manifest.json").read_bytes() == before


def test_two_savers_are_not_let_in(tmp_path):
    state, ctx = _local({"box": Box()})
    with (
        Directory(tmp_path).lock(),
        pytest.raises(CheckpointError, match=r"another process is saving into (.|\n)*fix: "),
    ):
        weft.save(state, tmp_path, 2, ctx)
    assert weft.save(state, tmp_path, 2, ctx).name == "step-00000002"


@pytest.mark.parametrize("save", [weft.save, lambda *args: weft.save_async(*args).wait()])
def test_arrays_come_back_as_arrays(save, tmp_path):
    rows = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    kept = {
        "rows": rows.copy(),
        "turned": rows.T[::-1].copy(),
        "none": np.zeros((0, 2), np.int64),
        "flag": np.array(True),
    }
    read_only = rows.copy()
    read_only.flags.writeable = False
    progress, box = {"window": [(kept["rows"], 1, 2.0)]}, Box(kept | {"view": rows.T[::-1], "read only": read_only})
    state = _local({"progress": progress, "box": box})[0]
    save(state, tmp_path, 1, weft.local())
    rows[:], kept["rows"][:], progress["window"], box.value = 0, 0, [], None
    weft.restore(state, tmp_path, weft.local())
    expected = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    [(found, one, two)] = progress["window"]
    assert type(found) is np.ndarray and found.dtype == np.float32 and (one, two) == (1, 2.0)
    np.testing.assert_array_equal(found, expected)
    for name in ("view", "turned"):
        np.testing.assert_array_equal(box.value[name], expected.T[::-1])
    np.testing.assert_array_equal(box.value["read only"], expected)
    assert box.value["none"].shape == (0, 2) and (box.value["flag"].dtype, box.value["flag"].shape) == (np.bool_, ())
    box.value["rows"][0] = 7.0  # may be written
    for wrong in (
        np.array([object()]),
        np.array(["a"]),
        np.ma.masked_array([1], [True]),
        np.zeros(2, np.uint32).view(">u4"),
    ):
        with pytest.raises(TypeError, match="box/value cannot be saved"):
            weft.save(_local({"box": Box(wrong)})[0], tmp_path, 2, weft.local())


def test_arrays_that_differ_between_the_ranks_are_refused(tmp_path):
    def saves(ctx, folder):
        with pytest.raises((CheckpointError, PeerError), match="box/value: one value on rank 0, another on rank 1"):
            weft.save(_state(ctx, box=Box(np.full(3, float(ctx.rank)))), folder, 1, ctx)

    run_ranks(saves, 2, tmp_path)


# -- ranks that do not agree -------------------------------------------------------------------------


def test_values_and_tensors_that_differ_between_ranks_are_refused(tmp_path):
    def saves(ctx, folder):
        found = []
        plain, tensors = r"box/value on rank 1", r"box on rank 1"
        for value, told in ((ctx.rank, plain), (torch.zeros(1 + ctx.rank), tensors), ([torch.zeros(1)] * ctx.rank, "")):
            with pytest.raises((CheckpointError, PeerError), match=rf"differs between the ranks(.|\n)*{told}"):
                weft.save(_state(ctx, box=Box(value)), folder, 1, ctx)
            found.append(sorted(p.name for p in folder.iterdir()))
        weft.save(_state(ctx, box=Box(math.nan)), folder, 1, ctx)  # a NaN is alike
        with pytest.raises(weft.errors.ContextError, match="do not agree"):
            weft.save(_state(ctx, box=Box(0)), folder, 2 + ctx.rank, ctx)
        return found

    assert run_ranks(saves, 2, tmp_path)[0] == [[".saving"]] * 3


@pytest.mark.slow
def test_a_late_rank_is_waited_for(tmp_path):
    def saves(ctx, folder):
        state = _state(ctx, box=Box())
        weft.barrier(ctx)
        start = time.monotonic()
        if ctx.rank:
            time.sleep(4)  # longer than it takes to find out that a rank went another way
        weft.save(state, folder, 1, ctx)
        return time.monotonic() - start

    assert min(run_ranks(saves, 2, tmp_path)) >= 4


@pytest.mark.slow
@pytest.mark.parametrize(("instead", "ranks"), [("reduces", 2), *variant_cases(("reduces", 4), ("meets", 3))])
def test_save_on_one_rank_only_fails_on_all_soon_and_names_the_others_line(tmp_path, instead, ranks):
    def saves(ctx, folder):
        state = _state(ctx, box=Box())
        weft.reduce(torch.ones(1), ctx)  # which asks for its shape once
        start = time.monotonic()
        with pytest.raises((PeerError, weft.errors.ContextError)) as caught:
            if ctx.is_main:
                weft.save(state, folder, 1, ctx)
            elif instead == "reduces":
                weft.reduce(torch.ones(1), ctx)
            else:
                weft.barrier(ctx)
        if ctx.is_main:
            assert time.monotonic() - start < 20
        raise caught.value

    with pytest.raises(RanksFailed) as caught:
        run_ranks(saves, ranks, tmp_path)
    errors = caught.value.errors
    assert set(errors) == set(range(ranks))
    if instead == "meets":
        assert all(
            re.search(r"ranks do not agree(.|\n)*'save' on rank 0(.|\n)*'barrier' on rank 1", str(e))
            for e in errors.values()
        )
    else:
        assert errors[0].rank in range(1, ranks)
        assert re.search(
            r"save: rank \d of \d did not call it\n  found: .*test_checkpoint.py:\d+, for rank 0(.|\n)*fix: ",
            str(errors[0]),
        )
    assert weft.checkpoint.latest(tmp_path) is None


_ALONE = """
import sys, time, torch, weft
with weft.start() as ctx:
    model, ctx = weft.replicate(torch.nn.Linear(2, 2), ctx)
    state, ctx = weft.checkpointable({"model": model}, ctx)
    start = time.monotonic()
    try:
        if ctx.is_main:
            weft.save(state, sys.argv[1], 1, ctx)
        if sys.argv[2] == "trains":
            model(torch.ones(1, 2)).sum().backward()
    except BaseException as error:
        print(f"rank {ctx.rank} after {time.monotonic() - start:.1f} s: {error}", flush=True)
        raise
"""


@pytest.mark.slow
@pytest.mark.parametrize("instead", ["trains", "leaves"])
def test_save_on_one_rank_only_ends_the_job_soon(tmp_path, instead):
    script = tmp_path / "alone.py"
    script.write_text(_ALONE)
    command = [sys.executable, "-m", "weft", "launch", "-n", "2", script, tmp_path / "saved", instead]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    text = done.stdout + done.stderr
    ranks = {int(rank): float(after) for rank, after in re.findall(r"rank (\d) after ([\d.]+) s", text)}
    assert max(ranks.values()) < 5, text
    if instead == "trains":
        assert set(ranks) == {0, 1} and "rank 1 of 2 did not call it" in text and "alone.py:11" in text, text
    else:
        assert "rank 1 failed: left the job" in text, text
    assert weft.checkpoint.latest(tmp_path / "saved") is None


# -- reading -----------------------------------------------------------------------------------------


def _saved_in_pieces(ctx, folder):
    torch.manual_seed(0)
    model, ctx = weft.fully_shard(nn.Linear(6, 5), ctx)
    state, ctx = weft.checkpointable({"model": model}, ctx)
    weft.save(state, folder, 1, ctx)


def test_a_tensor_of_several_pieces_is_put_together(tmp_path):
    from weft.checkpoint.format.manifest import read_manifest

    run_ranks(_saved_in_pieces, 4, str(tmp_path))
    torch.manual_seed(0)
    expected = nn.Linear(6, 5)
    assert len(read_manifest(tmp_path / "step-00000001").tensors["model/weight"].pieces) > 1
    for dtype in (torch.float32, torch.float64):
        model = nn.Linear(6, 5).to(dtype)
        weft.restore(_local({"model": model})[0], tmp_path, weft.local())
        assert torch.equal(model.weight, expected.weight.to(dtype))


# -- tensors of users' objects -----------------------------------------------------------------------


@pytest.mark.parametrize("live", [None, torch.zeros(0), torch.zeros(64), torch.zeros(2, 2), torch.zeros(())],
                         ids=["none", "empty", "longer", "other dimensions", "number"])  # fmt: skip
@pytest.mark.parametrize("saved", [torch.arange(3.0), torch.arange(6.0).view(2, 3), torch.tensor(7.0), torch.zeros(0)],
                         ids=["vector", "matrix", "number", "empty"])  # fmt: skip
def test_tensors_of_objects_come_back_in_the_shape_they_were_saved_in(tmp_path, saved, live):
    def build(value):
        return _local({"box": Box({"a": value}), "model": nn.Sequential(Extra({"b": value}))})

    state, ctx = build(saved)
    weft.save(state, tmp_path, 1, ctx)
    state, ctx = build(live)
    weft.restore(state, tmp_path, ctx)
    assert _same(state.objects["box"].value["a"], saved)
    assert _same(state.objects["model"][0].extra["b"], saved)


def test_ranks_whose_objects_hold_tensors_of_other_shapes_get_the_same(tmp_path):
    def restores(ctx, folder):
        state = _state(ctx, box=Box(torch.zeros(9 if ctx.rank else 2)))
        weft.restore(state, folder, ctx)
        return state.objects["box"].value

    state, ctx = _local({"box": Box(torch.arange(4.0))})
    weft.save(state, tmp_path, 1, ctx)
    assert all(_same(value, torch.arange(4.0)) for value in run_ranks(restores, 2, tmp_path))


def test_an_object_whose_tensor_is_cut_over_ranks_is_refused_another_shape(tmp_path):
    def saves(ctx, folder, size):
        from torch.distributed.tensor import Shard, distribute_tensor

        whole = torch.arange(float(size))
        state = _state(ctx, box=Box(distribute_tensor(whole, ctx.mesh, [Shard(0)], src_data_rank=None)))
        if size == 6:
            weft.save(state, folder, 1, ctx)
        state.objects["box"].value.to_local().zero_()
        if size == 6:
            weft.restore(state, folder, ctx)
            return state.objects["box"].value.full_tensor().tolist()
        with pytest.raises(CheckpointError, match=r"box/value has another shape(.|\n)*\(6,\)(.|\n)*\(8,\)"):
            weft.restore(state, folder, ctx)
        return None

    assert run_ranks(saves, 2, tmp_path, 6) == [[0, 1, 2, 3, 4, 5]] * 2
    run_ranks(saves, 2, tmp_path, 8)


@pytest.mark.parametrize("value", ["\ud800", {"\ud800": 1}, {"a": torch.ones(1), "\udfff": torch.ones(1)}, 10**5000,
                                   {10**5000: 1}], ids=["text", "key", "name", "number", "number as key"])  # fmt: skip
def test_values_that_json_could_not_hold_are_refused_by_name(tmp_path, value):
    state, ctx = _local({"box": Box({"deep": [value]})})
    for save in (weft.save, weft.save_async):
        with pytest.raises(TypeError, match=r"box/value/deep/0\S* cannot be saved\n  found: (.|\n)*fix: "):
            save(state, tmp_path, 1, ctx)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", [lambda v: [v], lambda v: {"a": v}, lambda v: {1: v}, lambda v: (v,)])
def test_values_in_each_other_are_saved_up_to_a_depth_and_refused_beyond(tmp_path, make):
    def nested(depth):
        value = 5
        for _ in range(depth):
            value = make(value)
        return value

    state, ctx = _local({"box": Box(nested(190))})
    weft.save(state, tmp_path, 1, ctx)
    back, _ = _local({"box": Box()})
    weft.restore(back, tmp_path, ctx)
    assert back.objects["box"].value == nested(190)
    state.objects["box"].value = nested(1000)
    with pytest.raises(TypeError, match=r"box/value(.|\n)*more than 200 deep"):
        weft.save(state, tmp_path, 2, ctx)
