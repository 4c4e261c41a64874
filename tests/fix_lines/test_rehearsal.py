"""Rehearsals, and the estimate beside them: `weft.rehearsal`, `weft rehearse`."""

import pickle
import re
import runpy
import shlex

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import weft
import weft.cli
from tests.fix_lines.told import told
from weft.rehearsal import Rehearsal
from weft.rehearsal.estimate import estimate

SCRIPT = """
import sys, torch, weft
with weft.start(device="cpu") as ctx:
    model, ctx = weft.replicate(torch.nn.Linear(4, 4), ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def rehearse(*words):
    return weft.cli.main(["rehearse", "--ranks", "2", *words])


def training(ctx):
    model, ctx = weft.replicate(nn.Linear(4, 4), ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_what_the_command_is_given(folder):
    with told("cli/rehearse.py", "is not a size") as it:
        rehearse("--limit", "80 apples", "train.py")
    assert rehearse(*it.fix.split(), "train.py") == 0
    with told("rehearsal/search.py", "rehearse: --vary {name} {problem}") as it:
        rehearse("--vary", "batch=8,16", "train.py")
    assert weft.cli.main(shlex.split(it.fix)[1:]) == 0
    empty = folder / "empty.py"
    empty.write_text("import weft\n")
    with told("rehearsal/script.py", "rehearse: {script} makes") as it:
        rehearse(str(empty))
    assert it.fix == f"python {empty}  # does it train?"
    runpy.run_path(str(empty), run_name="__main__")  # it does not
    empty.write_text(SCRIPT)
    assert rehearse(str(empty)) == 0
    with told("rehearsal/result.py", "this is not a rehearsal") as it:
        Rehearsal.from_json("{}")
    assert weft.cli.main(shlex.split(it.fix)[1:]) == 0
    assert Rehearsal.from_json((folder / "rehearsal.json").read_text()).world_size == 8


def test_programs(folder):
    with told("rehearsal/rehearse.py", "cannot make {steps} steps") as it:
        weft.rehearse(training, 2, rank=2)
    call, options = it.fix.split(", or ")
    assert eval(call, {"weft": weft, "program": training}).world_size == 1024
    assert weft.cli.main(["rehearse", *options.split(), "train.py"]) == 0
    with told("rehearsal/rehearse.py", "the program does not return a step") as it:
        weft.rehearse(lambda ctx: training(ctx)(), 2)
    made = it.run(step=training)
    assert callable(made["program"])


def test_one_at_a_time(folder):
    def nested(ctx):
        with told("rehearsal/rehearse.py", "another rehearsal is running") as it:
            weft.rehearse(training, 2)
        lines.append(it)
        with told("rehearsal/rehearse.py", "another rehearsal is running") as it:
            rehearse("train.py")
        lines.append(it)
        return training(ctx)

    lines = []
    assert weft.rehearse(nested, 2)
    for it in lines:
        assert it.fix.endswith("when the other one has returned, or in another process")
        it.run(program=training, ranks=2)


def waits(sends):
    def program(ctx):
        number = torch.zeros(1, dtype=torch.int64)

        def step():
            if ctx.rank == 0:
                torch.distributed.recv(number, 1)
            else:
                exec(sends, {"torch": torch, "tensor": number, "dst": 0})

        return step

    return program


def test_messages_between_ranks():
    with told("rehearsal/rehearse.py", "never sends") as it:
        weft.rehearse(waits(""), 2)
    line, where = it.fix.split(" on ")
    assert where == "the other rank" and weft.rehearse(waits(line), 2)


def reads(ctx):
    model, ctx = weft.replicate(nn.Linear(4, 4), ctx)

    def step():
        loss = model(torch.ones(2, 4)).sum()
        if loss.item() < 5:
            loss.backward()

    return step


def selects(ctx):
    layer = nn.Linear(4, 4)

    def step():
        x = layer(torch.ones(8, 4))
        x[x.sum(1) > 0].sum().backward()

    return step


def routes(ctx):
    router, expert = nn.Linear(4, 2), nn.Linear(4, 4)

    def step():
        x = torch.ones(8, 4)
        chosen = router(x).argmax(1)
        expert(x[chosen == 1]).sum().backward()

    return step


def packs(lengths):
    def program(ctx):
        layer = nn.LSTM(4, 4, batch_first=True)

        def step():
            x = torch.ones(2, 3, 4)
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths(x), batch_first=True)
            layer(packed)[0].data.sum().backward()

        return step

    return program


def test_values_that_are_read(folder):
    with told("rehearsal/both_ways.py", "decides what it does") as it:
        weft.rehearse(reads, 2)
    call, _ = it.fix.split(", or --assume ")
    assert eval(call.replace("...", "reads, 2"), {"weft": weft, "reads": reads}).messages
    text = SCRIPT.replace("optimizer.step()", "weft.reduce(model.bias.detach(), ctx) if model.bias.sum() > 1 else 0")
    (folder / "reads.py").write_text(text.replace("optimizer.zero", "optimizer.step(); optimizer.zero"))
    with told("rehearsal/both_ways.py", "decides what it does") as it:
        rehearse("reads.py")
    assert rehearse(*shlex.split(it.fix.partition(", or ")[2]), "reads.py") == 0


def test_sizes_that_depend_on_values(folder):
    for program in (selects, routes):
        with told("rehearsal/simulation/pretended_tensors.py", "makes one whose size depends on values") as it:
            weft.rehearse(program, 2)
        call, option, *other = re.split(", or --assume |; of what no router .*: --assume ", it.fix)
        found = eval(call.replace("...", "program, 2"), {"weft": weft, "program": program})
        assert any(line.startswith(option.rpartition("=")[0]) for line in found.assumed)
        for line, _, count in (one.rpartition("=") for one in other):
            assert (
                f"{line}: of {count} elements, {count} are selected"
                in weft.rehearse(program, 2, assume={line: int(count)}).assumed
            )
    with told("rehearsal/simulation/pretended_tensors.py", "makes one whose size depends on values") as it:
        weft.rehearse(packs(lambda x: (x.sum((1, 2)) + 1).long()), 2)
    kind, line = it.fix.split(", or ")
    assert kind == "sizes from small tensors of integers, which have values: of a loader"
    assert weft.rehearse(packs(lambda x: eval(line, {"torch": torch, "lengths": [3, 2]})), 2)


def saves(write):
    def program(ctx):
        model, ctx = weft.replicate(nn.Linear(4, 4), ctx)
        state, ctx = weft.checkpointable({"model": model}, ctx)
        names = {"model": model, "state": state, "ctx": ctx, "weft": weft, "pickle": pickle, "save_file": save_file}
        return lambda: exec(write, {**names, "folder": "saved", "step": 1})

    return program


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # by safetensors
def test_values_that_are_written(folder):
    for write in ("pickle.dumps(model.state_dict())", "save_file(dict(model.state_dict()), 'model')"):
        with told("rehearsal/simulation/pretended_tensors.py", "the program writes one to a file") as it:
            weft.rehearse(saves(write), 2)
    assert weft.rehearse(saves(it.fix), 2, steps=1).saved > 0


def test_estimates():
    found = estimate(nn.Linear(4, 4))
    with told("rehearsal/estimate.py", "check_count('Estimate.training'") as it:
        found.training(ranks=0)
    assert found.training(ranks=it.run()["ranks"]).total
    for name in ("optimizer", "dtype", "strategy"):
        with told("rehearsal/estimate.py", "check_choice('Estimate'") as it:
            found.training(**{name: "some"})
        assert found.training(**{name: it.run()[name]}).total
