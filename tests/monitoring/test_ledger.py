"""The ledger of a run: what is recorded, how two runs are compared, and which replicas differ."""

import copy
import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import weft
from weft.cli import main
from weft.errors import NotSynchronized
from weft.monitoring.report import read, render
from weft.monitoring.run_ledger.compare import compare_ledgers
from weft.monitoring.run_ledger.exact_sums import Words, weights
from weft.monitoring.run_ledger.file import read_ledger
from weft.tensors.blocks import Block, whole
from weft.testing import run_ranks


class _Net(nn.Module):
    """With a tied weight, a block that can be cut, odd sizes, and dropout."""

    def __init__(self, p=0.0):
        super().__init__()
        self.embed = nn.Linear(8, 6, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Dropout(p), nn.Linear(10, 6)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _data(count=48):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 8, generator=generator), torch.randn(count, 3, generator=generator))


def _applied(strategy, model, optimizer, ctx):
    if strategy == "replicate":
        model, ctx = weft.replicate(model, ctx)
    elif strategy.startswith("zero"):
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=int(strategy[4]))
    elif strategy == "pipeline":
        model, ctx = weft.pipeline(model, ctx, loss=mse_loss, micro_batches=2, rebind=optimizer)
    else:
        if strategy == "tensor":
            plan = {"blocks.*.0": "column", "blocks.*.3": "row"}
            model, ctx = weft.tensor_parallel(model, ctx, plan=plan, rebind=optimizer)
        model, ctx = weft.fully_shard(model, ctx, units=[nn.Sequential], rebind=optimizer)
    return model, optimizer, ctx


def _train(ctx, folder, strategy="replicate", change="", done=0, steps=6, drift="raise", p=0.0):
    torch.manual_seed(0)
    model = _Net(p)
    torch.manual_seed(1 + (change == "seed"))
    order = list(range(48))
    if change == "sample":
        order[17] = 3
    steps_per_window = 1 if change == "whole" else 2
    loader = DataLoader(_data(), batch_size=8 // ctx.data_size // steps_per_window, sampler=order)
    loader, ctx = weft.shard_data(loader, ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, ctx = _applied(strategy, model, optimizer, ctx)
    model, windows, ctx = weft.accumulate_grads(model, loader, ctx, steps=steps_per_window)
    objects = {"model": model, "optimizer": optimizer, "loader": windows}
    state, ctx = weft.checkpointable(objects, ctx)
    if done:
        weft.restore(state, f"{folder}/checkpoints", ctx)
    with weft.monitoring.ledger(objects, folder, ctx, drift=drift) as record:
        if not done:
            record(0)
        for step, window in enumerate(windows, 1 + done):
            total = 0.0
            for x, y in window:
                loss = (model(x, y) if strategy == "pipeline" else mse_loss(model(x), y)) * window.share
                loss.backward()
                total = total + loss.detach()
            norm = weft.clip_grads(model, ctx, max_norm=1.0)
            if change == "rate" and step == 3:
                optimizer.param_groups[0]["lr"] *= 1.001
            optimizer.step()
            if (change == "bit" and step == 4) or (change == "drift" and step == 2 and ctx.rank == 1):
                _flip_a_bit(model)
            record(step, loss=total, grad_norm=norm)
            optimizer.zero_grad()
            if step == 4 and change == "save":
                weft.save(state, f"{folder}/checkpoints", step, ctx)
            if step == steps:
                break


def _flip_a_bit(model):
    with torch.no_grad():
        weight = model.blocks[1][0].weight
        weight = weight.to_local() if hasattr(weight, "to_local") else weight
        if weight.numel():
            weight.view(torch.int32)[0, 3] ^= 1


def test_sums_over_blocks_are_the_sum_over_the_whole():
    def total(tensor, block):
        words = Words(shape, dtype, block)
        rows, columns = (torch.from_numpy(weights(places, 7)) for places in (words.rows, words.columns))
        read = words.of(tensor)
        return int((read.sum(1) * rows).sum() + (read.sum(0) * columns).sum()) % 2**64

    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool):
        for shape in ((7, 5), (8, 6), (4, 3, 5), (6,), (2, 3, 4, 6), (3, 7000, 5)):
            tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
            one = total(tensor, whole(shape))
            for dim, size in enumerate(shape):
                first = tuple(1 if at == dim else length for at, length in enumerate(shape))
                rest = tuple(size - 1 if at == dim else length for at, length in enumerate(shape))
                parts = (Block((0,) * len(shape), first), tensor.narrow(dim, 0, 1).contiguous())
                others = (
                    Block(tuple(int(at == dim) for at in range(len(shape))), rest),
                    tensor.narrow(dim, 1, size - 1),
                )
                assert (total(parts[1], parts[0]) + total(others[1].contiguous(), others[0])) % 2**64 == one
            if dtype in (torch.float32, torch.float64):
                flat = tensor.reshape(-1)
                flat[[0, 1]] = flat[[1, 0]]
                assert total(tensor, whole(shape)) != one


def test_what_differs_is_named(tmp_path, capsys):
    for name in ("", "again", "sample", "rate", "bit", "seed", "whole"):
        _train(weft.local(), tmp_path / f"run {name}", change=name, p=0.1)
    expected = {
        "again": (0, "no difference in 7 steps, compared bit for bit"),
        "sample": (1, "first difference: step 3, compared bit for bit\n  digest of the samples: "),
        "rate": (1, "step 3, compared bit for bit\n  learning rate of group 0 of optimizer: 0.01 against 0.01001\n"),
        "bit": (1, "step 4, compared bit for bit\n  parameters of 1 of 5 units: model/blocks.1\n"),
        "seed": (1, "step 0, compared bit for bit\n  random state: "),
    }
    for name, (code, text) in expected.items():
        assert main(["ledger", "compare", str(tmp_path / "run "), str(tmp_path / f"run {name}")]) == code
        assert text in capsys.readouterr().out
    # Other windows draw other dropout masks, which is more than rounding.
    assert main(["ledger", "compare", str(tmp_path / "run "), str(tmp_path / "run whole")]) == 1
    told = capsys.readouterr().out
    assert re.search("step 1, compared within rounding\n  loss: ", told)
    assert re.search(r"note: options of accumulate_grads\(_Net, .*\): .*steps=2.* against .*steps=1", told)
    assert main(["ledger", "compare", str(tmp_path / "run "), str(tmp_path)]) == 2
    assert "ledger.jsonl" in capsys.readouterr().err

    runs = [read(tmp_path / f"run {name}") for name in ("", "again", "bit")]
    page = render(runs)
    assert "no difference in 7 steps, compared bit for bit" in page
    assert "first difference: step 4, compared bit for bit\n  parameters of 1 of 5 units: model/blocks.1" in page
    assert "<h2>Ledger</h2>" in render(runs[:1])
    assert not runs[0].series


def test_a_resumed_run_has_one_ledger(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    _train(weft.local(), one, p=0.1)
    _train(weft.local(), two, change="save", p=0.1)
    with (two / "ledger.jsonl").open("a") as file:
        file.write('{"step": 7, "los')  # a program that was killed
    _train(weft.local(), two, done=4, p=0.1)
    lines = (two / "ledger.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if line.endswith("}") and '"start"' not in line] == [
        *range(7),
        5,
        6,
    ]
    assert compare_ledgers(one, two).first is None
    assert sorted(read_ledger(two).steps) == list(range(7))


def test_numbers_that_are_not_finite_and_steps_that_are_left_out(tmp_path):
    model = nn.Linear(2, 1)
    first, second = torch.optim.SGD([model.weight], lr=0.1), torch.optim.AdamW([model.bias], lr=torch.tensor(0.2))
    objects = {"model": model, "first": first, "second": second, "numbers": np.random.default_rng(0)}
    with weft.monitoring.ledger(objects, tmp_path, weft.local(), every=2, parameters_every=4) as record:
        for step in range(7):
            record.saw({"x": torch.ones(3, 2), "names": ["a", "b", "c"]})
            record(step, loss=math.inf if step == 4 else math.nan, tokens=5)
    steps = read_ledger(tmp_path).steps
    assert list(steps) == [0, 2, 4, 6]
    assert [bool(each["sums"]) for each in steps.values()] == [True, False, True, False]
    assert [steps[4][name] for name in ("loss", "tokens", "samples")] == ["inf", 5, 3]
    assert steps[6]["loss"] == "nan"
    assert steps[6]["rates"]["lr of group 0 of second"] == pytest.approx(0.2)
    assert steps[6]["rates"]["lr of group 0 of first"] == 0.1
    assert compare_ledgers(tmp_path, tmp_path).first is None


@pytest.mark.parametrize(("every", "steps"), [(1, 8), (2, 64), (7, 64), (8, 128), (16, 128)])
def test_each_unit_has_its_turn_whichever_steps_are_recorded(every, steps, tmp_path):
    """A norm of each unit, and what rows do not show: elements that change places within one."""
    plain = nn.ModuleList(nn.Linear(4, 1) for _ in range(16))
    other = copy.deepcopy(plain)
    for one in other:
        one.weight.data = one.weight.data.roll(2, 1)
    for model, folder in ((plain, "plain"), (other, "other")):
        with weft.monitoring.ledger({"model": model}, tmp_path / folder, weft.local(), every=every) as record:
            for step in range(every * steps):
                record(step)
    one, two = (read_ledger(tmp_path / folder).steps for folder in ("plain", "other"))
    assert {int(at) for line in one.values() for at in line["norms"]} == set(range(16))
    pairs = [zip(one[step]["sums"], two[step]["sums"], strict=True) for step in one]
    assert len({at for each in pairs for at, (a, b) in enumerate(each) if a != b}) == min(steps, 16)


def test_replicas_that_differ_are_reported_on_all_ranks(tmp_path):
    def raised(ctx, folder):
        with pytest.raises(NotSynchronized, match=r"step 2: model/blocks.1: one value on rank 0, another on rank 1"):
            _train(ctx, folder, change="drift")
        return True

    assert run_ranks(raised, 2, str(tmp_path / "raise"), probes="off") == [True, True]

    def warned(ctx, folder):
        with pytest.warns(UserWarning, match="step 2: model/blocks.1: one value on rank 0, another on rank 1"):
            _train(ctx, folder, change="drift", drift="warn")

    run_ranks(warned, 2, str(tmp_path / "warn"), probes="off")
    assert len(read_ledger(tmp_path / "warn").steps) == 7


def _strategies(ctx, folder, names):
    for name in names:
        _train(ctx, f"{folder}/{name} {ctx.world_size}", name)


def _check_equal(folder, names, ranks, mesh=None):
    _train(weft.local(), folder / "alone", change="whole")
    run_ranks(_strategies, ranks, str(folder), names, mesh=mesh, probes="off", timeout_s=120)
    for name in names:
        found = compare_ledgers(folder / "alone", folder / f"{name} {ranks}")
        assert found.first is None, (name, str(found))
        assert not found.exact
        assert (
            read_ledger(folder / "alone").steps[0]["sums"] == read_ledger(folder / f"{name} {ranks}").steps[0]["sums"]
        )


def test_ranks_and_strategies_make_no_difference(tmp_path):
    _check_equal(tmp_path, ["replicate", "fully_shard", "zero1", "zero3"], 2)


@pytest.mark.slow
def test_four_ranks_and_further_axes_make_no_difference(tmp_path):
    _check_equal(tmp_path, ["replicate", "zero2"], 4)
    _check_equal(tmp_path, ["fully_shard"], 4, {"replica": 2, "shard": 2})
    _check_equal(tmp_path, ["tensor"], 4, {"data": 2, "tensor": 2})
    _check_equal(tmp_path, ["pipeline"], 2, {"data": 1, "pipeline": 2})


def _plain(ctx, folder, change=False):
    torch.manual_seed(0)
    data = _data()
    if change:
        data.tensors[1][20] += 1e-6
    sampler = DistributedSampler(data, ctx.world_size, ctx.rank, shuffle=False)
    with weft.monitoring.ledger({}, folder, ctx) as record:
        for step, batch in enumerate(DataLoader(data, batch_size=8 // ctx.world_size, sampler=sampler)):
            record.saw(batch)
            record(step, tokens=len(batch[0]))


def test_samples_of_other_loaders_are_known_by_their_bytes(tmp_path):
    _plain(weft.local(), tmp_path / "one")
    _plain(weft.local(), tmp_path / "changed", change=True)
    run_ranks(_plain, 2, str(tmp_path / "two"))
    assert compare_ledgers(tmp_path / "one", tmp_path / "two").first is None
    assert read_ledger(tmp_path / "two").steps[0]["tokens"] == 8
    found = compare_ledgers(tmp_path / "one", tmp_path / "changed")
    assert found.first == 2
    assert [each.partition(":")[0] for each in found.differences] == ["digest of the samples"]


def _padded(rows):
    return {"x": nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)}


def _read_rows(ctx, folder, kind, changed=None):
    generator = torch.Generator().manual_seed(3)
    lengths = [5 + at % 7 if kind == "ragged" else 6000 for at in range(22)]
    rows = [torch.randint(0, 9, (length,), generator=generator) for length in lengths]
    if kind == "arrays":
        rows = [row.float().numpy() for row in rows]
    if changed is not None:
        rows[changed][:] = rows[changed][::-1].copy() if kind == "arrays" else rows[changed].flip(0)
    collate = {"ragged": _padded, "arrays": lambda part: {"x": np.stack(part)}}.get(kind)
    loader = DataLoader(rows, batch_size=4 // ctx.data_size, shuffle=True, collate_fn=collate)
    loader, ctx = weft.shard_data(loader, ctx, seed=4, uneven="pad" if ctx.data_size > 1 else None)
    with weft.monitoring.ledger({"loader": loader}, folder, ctx) as record:
        for step, _ in enumerate(loader):
            record(step)


@pytest.mark.parametrize("kind", ["ragged", "arrays", "long"])
def test_what_a_sample_contains_is_compared_beside_its_number(kind, tmp_path):
    _read_rows(weft.local(), tmp_path / "one", kind)
    _read_rows(weft.local(), tmp_path / "changed", kind, 8)
    run_ranks(_read_rows, 2, str(tmp_path / "two"), kind)
    found = compare_ledgers(tmp_path / "one", tmp_path / "changed")
    assert [each.partition(":")[0] for each in found.differences] == ["contents of the samples"]
    run_ranks(_read_rows, 2, str(tmp_path / "two changed"), kind, 8)
    found = compare_ledgers(tmp_path / "two", tmp_path / "two changed")
    assert [each.partition(":")[0] for each in found.differences] == ["contents of the samples"]
    # Batches of other ranks are padded to other lengths.
    assert compare_ledgers(tmp_path / "one", tmp_path / "two").first is None
    if kind != "ragged":
        assert compare_ledgers(tmp_path / "one", tmp_path / "two changed").first == found.first


_SCRIPT = """
import sys, torch, weft
with weft.start(device="cpu") as ctx:
    torch.manual_seed(0)
    model, ctx = weft.replicate(torch.nn.Linear(2, 1), ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[2]))
    with weft.monitoring.ledger({"model": model, "optimizer": optimizer}, sys.argv[1], ctx) as record:
        for step in range(1, 5):
            loss = model(torch.ones(4, 2)).square().mean()
            loss.backward()
            optimizer.step()
            record(step, loss=loss)
            optimizer.zero_grad()
ctx.print("to the end")
"""


@pytest.mark.slow
def test_recorded_steps_run_again(tmp_path, capsys):
    script, run = tmp_path / "train.py", str(tmp_path / "run")
    script.write_text(_SCRIPT)
    assert main(["ledger", "check", run, str(script), run, "0.1"]) == 2
    assert "No such file" in capsys.readouterr().err
    subprocess.run([sys.executable, "-m", "weft", "launch", "-n", "2", str(script), run, "0.1"], check=True)
    before = (tmp_path / "run/ledger.jsonl").read_text()
    capsys.readouterr()
    assert main(["ledger", "check", "--steps", "2", run, str(script), run, "0.1"]) == 0
    told = capsys.readouterr()
    assert "no difference in 2 steps, compared bit for bit" in told.out
    assert "to the end" not in told.out + told.err
    assert main(["ledger", "check", run, str(script), run, "0.2"]) == 1
    assert "learning rate of group 0 of optimizer: 0.1 against 0.2" in capsys.readouterr().out
    assert (tmp_path / "run/ledger.jsonl").read_text() == before
