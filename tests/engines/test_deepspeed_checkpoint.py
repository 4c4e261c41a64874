"""Checkpoints under DeepSpeed, from any strategy to any; whole parameters and gradients; back to plain torch."""

import itertools

import pytest
import torch
from torch import nn

import weft
from weft.contract import KeepsParameters
from weft.testing import largest_difference, run_ranks

from .test_deepspeed import STAGES, _data, _loss, _mine, _prepared, _whole

pytestmark = pytest.mark.deepspeed


class Tied(nn.Module):
    """Tied weights, a single number, a buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(7)
        self.second = nn.Linear(7, 7)
        self.third = nn.Linear(7, 7)
        self.third.weight = self.second.weight
        self.head = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        x = torch.tanh(self.second(torch.tanh(self.norm(self.first(x)))))
        return self.head(torch.tanh(self.third(x))) * self.scale


STRATEGIES = {
    "local": None,
    "replicate": None,
    "fully_shard": None,
    **{f"torch {stage}": {"stage": stage} for stage in STAGES},
    **{f"deepspeed {stage}": {"stage": stage, "engine": "deepspeed"} for stage in STAGES},
    "deepspeed 3, cpu": {"stage": 3, "engine": "deepspeed", "offload": "cpu"},
}
OURS = [name for name in STRATEGIES if name.startswith("deepspeed")]


def _made(ctx, strategy, kind, seed=1):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Tied()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 2e-3},
    ]
    optimizer = torch.optim.AdamW(groups, 1e-2) if kind == "adamw" else torch.optim.SGD(groups, 0.05, momentum=0.9)
    if strategy == "replicate":
        model, ctx = weft.replicate(model, ctx)
    elif strategy == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx, rebind=optimizer)
    elif strategy != "local":
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, **STRATEGIES[strategy])
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer}, weft.local() if ctx is None else ctx)
    return model, optimizer, state, ctx


def _steps(model, optimizer, ctx, numbers, split=1):
    for number in numbers:
        parts = (_mine(ctx, part[number]).chunk(split) for part in _data())
        for x, y in zip(*parts, strict=True):
            (nn.functional.mse_loss(model(x), y) / split).backward()
        optimizer.step()
        optimizer.zero_grad()


def _saved(ctx, folder, strategies):
    found = {}
    for strategy, kind in itertools.product(strategies, ("adamw", "sgd")):
        model, optimizer, state, after = _made(ctx, strategy, kind)
        _steps(model, optimizer, after, range(3))
        weft.save(state, f"{folder}/{strategy}/{kind}", 3, after)
        _steps(model, optimizer, after, range(3, 6))
        assert weft.restore(state, f"{folder}/{strategy}/{kind}", after).step == 3
        _steps(model, optimizer, after, range(3, 6))
        found[strategy, kind] = _whole(model, after)
    return found


def _restored(ctx, folder, pairs):
    found = {}
    for source, strategy, kind in pairs:
        model, optimizer, state, after = _made(ctx, strategy, kind, seed=7)
        done = weft.restore(state, f"{folder}/{source}/{kind}", after)
        assert done.step == 3 and not done.missing and not done.unexpected
        _steps(model, optimizer, after, range(3, 6))
        found[source, strategy, kind] = _whole(model, after), model.calls.item()
    return found


def _in_one_process(ctx, kind, split):
    model, optimizer, _, _ = _made(None, "local", kind)
    _steps(model, optimizer, None, range(6), split)
    return [p.detach() for p in model.parameters()]


def _reference(kind):
    """One process, and how far others may be: twice its noise, the same with every batch cut up.

    A process like the ranks: with other numbers of threads, math libraries may choose other kernels.
    """
    one, *cut = (run_ranks(_in_one_process, 1, kind, split)[0] for split in (1, 2, 4, 8))
    return one, 2 * max(largest_difference(one, other) for other in cut)


def test_saved_under_one_strategy_restored_under_another(tmp_path):
    expected = {kind: _reference(kind) for kind in ("adamw", "sgd")}
    others = ["replicate", "fully_shard", "torch 1", "torch 3"]
    for found in run_ranks(_saved, 2, str(tmp_path), [*OURS, *others]):
        for (strategy, kind), parameters in found.items():
            assert largest_difference(parameters, expected[kind][0]) <= expected[kind][1], (strategy, kind)
    among = [(a, b) for a in OURS for b in OURS if a != b]
    between = [pair for a in OURS[::2] for b in others for pair in ((a, b), (b, a))]
    # On one rank there is nothing to divide: local stands for every strategy.
    for ranks, pairs in ((2, [*among, *between]), (4, [*among[::3], *between[::2]]), (1, [(a, "local") for a in OURS])):
        cases = [(*pair, kind) for pair, kind in zip(pairs, itertools.cycle(("adamw", "sgd", "adamw")))]
        for found in run_ranks(_restored, ranks, str(tmp_path), cases):
            for (source, strategy, kind), (parameters, calls) in found.items():
                assert largest_difference(parameters, expected[kind][0]) <= expected[kind][1], (source, strategy, kind)
                assert calls == 6
    files = weft.export(tmp_path / "deepspeed 3" / "adamw", tmp_path / "weights")
    model = Tied()
    weft.load_weights(model, files[0].parent, weft.local())
    (saved,) = (tmp_path / "torch 1" / "adamw").glob("step-*")
    other = Tied()
    weft.load_weights(other, saved, weft.local())
    assert largest_difference(list(model.parameters()), list(other.parameters())) <= 6e-8


def _loaded(ctx, folder):
    found = {}
    for strategy in OURS:
        model, optimizer, _, after = _made(ctx, strategy, "adamw", seed=7)
        before = _whole(model, after)
        with pytest.raises(weft.errors.CheckpointError, match=r"only in the file: new\.(.|\n)*fix:"):
            weft.load_weights(model, f"{folder}/other", after)
        assert all(map(torch.equal, _whole(model, after), before))
        weft.load_weights(model, f"{folder}/weights", after)
        loaded = _whole(model, after)
        _steps(model, optimizer, after, range(3))
        found[strategy] = loaded, _whole(model, after)
    return found


def test_weights_are_loaded_into_parameters_that_deepspeed_keeps(tmp_path):
    model, optimizer, state, ctx = _made(weft.local(), "local", "adamw", seed=3)
    weft.export(weft.save(state, tmp_path / "run", 0, ctx), tmp_path / "weights")
    start = [p.detach().clone() for p in model.parameters()]
    _steps(model, optimizer, None, range(3))
    model.new = nn.Linear(2, 2)
    other, ctx = weft.checkpointable({"model": model}, weft.local())
    weft.export(weft.save(other, tmp_path / "run2", 1, ctx), tmp_path / "other")
    expected = [p.detach() for name, p in model.named_parameters() if not name.startswith("new")]
    for found in run_ranks(_loaded, 2, str(tmp_path)):
        for strategy, (loaded, trained) in found.items():
            assert all(map(torch.equal, loaded, start)), strategy
            assert largest_difference(trained, expected) <= 6e-8, strategy


def _alone(ctx, folder):
    model, optimizer, state, after = _made(ctx, "deepspeed 2", "adamw")
    _steps(model, optimizer, after, range(1))
    if ctx.rank == 0:
        try:
            weft.save(state, folder, 1, after)
        except weft.errors.PeerError as error:
            return str(error)
    return ""


def test_a_save_on_one_rank_raises(tmp_path):
    main, _ = run_ranks(_alone, 2, str(tmp_path))
    assert "save" in main and not list(tmp_path.glob("step-*"))


# -- whole parameters and gradients --------------------------------------------------------------------


def _looked_at(ctx):
    found = {}
    for stage, offload in itertools.product(STAGES, (None, "cpu")):
        model, optimizer, after = _prepared(ctx, stage, **({"offload": offload} if offload else {}))
        for number in range(3):
            _loss(model, after, number).backward()
            gradients = weft.full_grads(model, after)
            optimizer.step()
            optimizer.zero_grad()
            with weft.full_params(model, after, write=True), torch.no_grad():
                for p in model.parameters() if ctx.rank == 0 else ():
                    p.mul_(0.9)
        assert weft.full_grads(model, after) == {}
        found[stage, offload] = _whole(model, after), gradients
    return found


def test_parameters_and_gradients_are_whole_when_asked_for():
    model, optimizer, _ = _prepared(None, None)
    for number in range(3):
        _loss(model, None, number).backward()
        expected = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)
    for found in run_ranks(_looked_at, 2):
        for key, (parameters, gradients) in found.items():
            assert largest_difference(parameters, [p.detach() for p in model.parameters()]) <= 6e-8, key
            assert list(gradients) == list(expected)
            assert largest_difference(list(gradients.values()), list(expected.values())) <= 6e-8, key


def _from_meta(ctx):
    found = []
    for deepspeed in (False, True):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))
            model.add_module("again", nn.Linear(3, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        if deepspeed:
            model, optimizer, after = weft.zero_partition(model, optimizer, ctx, stage=3, engine="deepspeed")
            assert all(p.numel() == 0 for p in model.parameters())
            assert weft.contract.offered(model, KeepsParameters)[0].elsewhere
        else:
            model, after = weft.fully_shard(model, ctx, rebind=optimizer)
        _steps(model, optimizer, after, range(3))
        found.append(_whole(model, after))
    return found


def test_a_model_on_meta_is_drawn_part_by_part():
    for sharded, partitioned in run_ranks(_from_meta, 2):
        assert largest_difference(sharded, partitioned) <= 6e-8


def _taken_back(ctx):
    found = {}
    for stage, kind in itertools.product(STAGES, ("adamw", "sgd")):
        model, optimizer, _, after = _made(ctx, f"deepspeed {stage}", kind)
        keys = {type(part).__name__: sorted(vars(part)) for part in Tied().modules()}
        _steps(model, optimizer, after, range(3))
        model, after = weft.undo(model, after)
        assert not any(vars(p) for p in model.parameters())
        assert {type(part).__name__: sorted(vars(part)) for part in model.modules()} == keys
        model, optimizer, after = weft.zero_partition(model, optimizer, after, stage=1)
        _steps(model, optimizer, after, range(3, 6))
        found[stage, kind] = _whole(model, after)
    return found


def test_plain_gives_everything_back_for_another_strategy():
    expected = {kind: _reference(kind) for kind in ("adamw", "sgd")}
    for found in run_ranks(_taken_back, 2):
        for (stage, kind), parameters in found.items():
            assert largest_difference(parameters, expected[kind][0]) <= expected[kind][1], (stage, kind)


# -- DeepSpeed's own folders ---------------------------------------------------------------------------


def _their_own(ctx, folder):
    """Trained and saved by DeepSpeed's engine alone."""
    import os

    import deepspeed
    import deepspeed.ops

    from weft.engines.deepspeed.library import without_broadcasts

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ["LOCAL_RANK"] = str(ctx.rank)
    for stage, kind in THEIRS:
        model, optimizer, _, _ = _made(None, "local", kind)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": stage, "memory_efficient_linear": False},
        }
        with without_broadcasts():  # DeepSpeed's own cannot send the single number
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        for number in range(3):
            engine.backward(_loss(engine, ctx, number))
            engine.step()
        engine.save_checkpoint(f"{folder}/{stage}/{kind}", tag="first")
        engine.destroy()
    os.environ.pop("LOCAL_RANK")


THEIRS = [(stage, kind) for stage in STAGES for kind in ("adamw", "sgd")]


def _imported(ctx, folder):
    return [weft.interop.import_deepspeed(f"{folder}/{a}/{b}", f"{folder}/checkpoints/{a}/{b}").name for a, b in THEIRS]


def _gone_on(ctx, folder):
    found = {}
    for (stage, kind), strategy in itertools.product(THEIRS, ("replicate", "fully_shard", "deepspeed 3")):
        model, optimizer, state, after = _made(ctx, strategy, kind, seed=7)
        done = weft.restore(state, f"{folder}/checkpoints/{stage}/{kind}", after)
        assert done.step == 3 and not done.missing and not done.unexpected
        _steps(model, optimizer, after, range(3, 6))
        found[stage, kind, strategy] = _whole(model, after)
    return found


def test_a_run_of_deepspeed_alone_goes_on_under_any_strategy(tmp_path):
    run_ranks(_their_own, 2, str(tmp_path))
    assert run_ranks(_imported, 1, str(tmp_path)) == [["step-00000003"] * len(THEIRS)]
    expected = {kind: _reference(kind) for kind in ("adamw", "sgd")}
    for ranks in (1, 2):
        for found in run_ranks(_gone_on, ranks, str(tmp_path)):
            for (stage, kind, strategy), parameters in found.items():
                assert largest_difference(parameters, expected[kind][0]) <= expected[kind][1], (stage, kind, strategy)
    folder = tmp_path / "1" / "sgd"
    with pytest.raises(weft.errors.CheckpointError, match=r"no folder second(.|\n)*fix:"):
        weft.interop.import_deepspeed(folder, tmp_path / "out", tag="second")
    weft.interop.import_deepspeed(folder, tmp_path / "checkpoints" / "1" / "sgd")  # the same once more
    with pytest.raises(weft.errors.CheckpointError, match=r"another run(.|\n)*fix:"):
        weft.interop.import_deepspeed(folder, tmp_path / "checkpoints" / "1" / "adamw")
    (path,) = sorted((folder / "first").glob("*rank_1*optim*"))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(weft.errors.CheckpointError, match=r"cannot merge(.|\n)*fix:"):
        weft.interop.import_deepspeed(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
