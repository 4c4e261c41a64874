"""resilient: replicas die and come back, and the run ends as if nothing had happened."""

import json
import os
import pathlib
import random
import runpy
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import weft
from tests.elastic.train_replicas import SAMPLES, reference
from tests.processes import until
from weft.errors import ContextError, ContractError
from weft.peers.board import Board
from weft.peers.quorum import Answer
from weft.peers.replica_groups import ReplicaGroup
from weft.peers.world import World

PROGRAM = [str(pathlib.Path(sys.executable).with_name("weft")), "launch"]
SCRIPT = str(pathlib.Path(__file__).with_name("train_replicas.py"))
LIMIT_S = 60


def _start(folder, *, replicas=3, shards=1, restarts=5, epochs=3, windows=False, pause_s=0.01, faults=None, least=1):
    words = [SCRIPT, folder, epochs, "windows" if windows else "batches", shards, pause_s, json.dumps(faults or {})]
    options = ["-n", replicas * shards, "--min-replicas", least, "--max-restarts", restarts]
    options += ["--replica-ranks", shards] if shards > 1 else []
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WEFT_")} | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*PROGRAM, *map(str, options), *map(str, words)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _ended(process):
    try:
        text, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    return process.returncode, text


def _check(folder, *, replicas=3, epochs=3, windows=False):
    """The end is that of one process, and every sample was used once in the steps that counted."""
    expected, steps = reference(replicas, epochs, windows=windows)
    ends = sorted(folder.glob("*.end"))
    assert ends
    for end in ends:
        difference = max(float((a - b).abs().max()) for a, b in zip(expected, torch.load(end), strict=True))
        assert difference < 1e-12, (end.name, difference)
    used = {}
    for path in folder.glob("*.used"):
        for line in path.read_text().splitlines():
            if line.endswith("]"):  # else it was killed over it
                step, quorum, ids = json.loads(line)
                used.setdefault(step, {}).setdefault(quorum, []).extend(ids)
    counted = [sorted(used[step][max(used[step])]) for step in range(len(steps))]  # the last attempt
    assert counted == steps
    assert sorted(i for step in steps[: len(steps) // epochs] for i in step) == list(range(SAMPLES))


@pytest.mark.slow
def test_a_replica_that_dies_costs_a_step_and_comes_back(tmp_path):
    faults = {"1.0": [3, signal.SIGKILL], "0.0": [8, signal.SIGKILL]}
    code, text = _ended(_start(tmp_path, epochs=6, pause_s=0.05, faults=faults))
    assert code == 0, text
    _check(tmp_path, epochs=6)
    assert text.count("ended by signal 9 (SIGKILL)") == 2, text
    assert "; new: " in text, text


@pytest.mark.slow
def test_windows_with_a_replica_that_is_stopped_and_no_more_restarts(tmp_path):
    faults = {"1.0": [3, signal.SIGSTOP], "2.0": [5, signal.SIGKILL]}
    code, text = _ended(_start(tmp_path, epochs=4, windows=True, restarts=0, faults=faults))
    assert code == 0, text
    _check(tmp_path, epochs=4, windows=True)
    assert "was stopped for 3 s, and is killed" in text and "with 1 of 3 replicas" in text


@pytest.mark.slow
@pytest.mark.parametrize("windows", [False, True])
def test_a_rank_of_a_sharded_replica_that_dies_takes_the_replica_with_it(tmp_path, windows):
    faults = {"1.0-1": [3, signal.SIGKILL], "0.0-0": [9, signal.SIGKILL]}
    options = {"replicas": 2, "epochs": 8, "windows": windows}
    code, text = _ended(_start(tmp_path, shards=2, pause_s=0.05, faults=faults, **options))
    assert code == 0, text
    _check(tmp_path, **options)
    assert text.count("ended by signal 9 (SIGKILL)") == 2 and "; new: " in text, text


@pytest.mark.slow
def test_another_model_is_refused_and_the_others_continue(tmp_path):
    faults = {"1.0": [3, signal.SIGKILL], "1.1": "other model"}
    code, text = _ended(_start(tmp_path, epochs=6, pause_s=0.05, restarts=1, faults=faults))
    assert code == 0, text
    _check(tmp_path, epochs=6)
    assert "weft launch: refused: 1.1 is another program: objects: " in text
    assert "this replica was refused" in text


@pytest.mark.slow
def test_too_few_replicas_end_the_job_with_the_words_of_the_one_that_failed(tmp_path):
    code, text = _ended(_start(tmp_path, least=3, restarts=0, faults={"1.0": [3, signal.SIGKILL]}))
    assert code == 128 + signal.SIGKILL
    assert "weft launch: replica 1" in text.splitlines()[-1] and "SIGKILL" in text.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "shards"), [(0, 1), (1, 1), (2, 2)])
def test_random_kills_and_stops(tmp_path, seed, shards):
    chance, kills = random.Random(seed), 12 // shards
    options = {"replicas": 3 if shards == 1 else 2, "epochs": 24 // shards, "windows": seed == 1}
    process = _start(tmp_path, shards=shards, pause_s=0.03, restarts=kills, **options)
    done = 0
    assert until(lambda: len(list(tmp_path.glob("*.used"))) == options["replicas"] * shards, LIMIT_S)
    while process.poll() is None and done < kills:
        time.sleep(chance.uniform(0.05, 0.6))
        victim = chance.choice(sorted(tmp_path.glob("*.pid")))
        try:
            os.kill(int(victim.read_text() or 0) or 2**22, signal.SIGSTOP if chance.random() < 0.1 else signal.SIGKILL)
        except ProcessLookupError:
            victim.unlink()
        else:
            done += 1
    code, text = _ended(process)
    assert code == 0, text
    assert done > kills / 2
    _check(tmp_path, **options)


def test_a_second_process_of_a_replica_is_refused():
    store = torch.distributed.HashStore()
    board = Board(store, limit_s=5.0)
    first, second = (
        ReplicaGroup(board, store, "0.0", 1, World(ranks=(0,), rank=0), torch.device("cpu")) for _ in range(2)
    )
    board.write("answer/1", Answer(1, ("0.0",))._asdict())
    assert first.meet(0, fresh=True, facts={}).number == 1
    with pytest.raises(ContextError, match=r"refused[\s\S]*found: .*two processes[\s\S]*fix: "):
        second.meet(0, fresh=True, facts={})
    assert first.add_up([torch.ones(1)])


# -- without a launcher: one replica ----------------------------------------------------------------


def _alone(uneven="balance", *, module=None, samples=8):
    ctx = weft.start(elastic="replica", device="cpu")
    data = TensorDataset(torch.arange(float(samples)).view(-1, 1))
    loader, ctx = weft.shard_data(DataLoader(data, batch_size=2), ctx, uneven=uneven)
    model = torch.nn.Linear(1, 1) if module is None else module
    model, ctx = weft.replicate(model, ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer, "loader": loader}, ctx)
    return model, optimizer, loader, state, ctx


def test_one_replica_equals_the_plain_loop_bit_for_bit():
    torch.manual_seed(0)
    plain = torch.nn.Linear(1, 1)
    model, optimizer, loader, state, ctx = _alone()
    model.load_state_dict(plain.state_dict())
    same = torch.optim.SGD(plain.parameters(), lr=0.01)
    batches = weft.resilient(loader, ctx, state=state, step=5)
    for _ in range(batches.epoch, 2):
        for (x,) in batches:
            (model(x).square().mean() * loader.share).backward()
            optimizer.step()
            optimizer.zero_grad()
            plain(x).square().mean().backward()
            same.step()
            same.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert (batches.step, batches.epoch, batches.again, batches.leads) == (13, 2, 0, True)
    ctx.close()


def test_the_example_learns(capsys):
    path = pathlib.Path(__file__).parents[2] / "examples" / "resilient.py"
    with weft.start(elastic="replica", device="cpu") as ctx:
        runpy.run_path(str(path), run_name="example")["main"](ctx)
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 8 and losses[-1] < losses[0] / 2


def test_a_step_that_failed_takes_back_what_it_has_changed():
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
    model, optimizer, loader, _, ctx = _alone(module=model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    objects = {"model": model, "optimizer": optimizer, "loader": loader, "scheduler": scheduler}
    state, ctx = weft.checkpointable(objects, ctx)
    batches = weft.resilient(loader, ctx, state=state)
    seen, kept = [], {}
    for (x,) in batches:
        if batches.step == 1 and not batches.again:
            ctx.replicas.broken = True  # as if another replica were lost in this step
            before = {name: value.clone() for name, value in model.state_dict().items()}
        elif batches.step == 1:
            assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
            assert optimizer.param_groups[0]["lr"] == 0.005
        out = model(x)
        kept.setdefault(tuple(x.view(-1).tolist()), []).append(out.detach().clone())
        (out.square().mean() * loader.share).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen.append(int(x[0]))
    assert seen == [0, 2, 2, 4, 6]
    assert torch.equal(*kept[2.0, 3.0]), "the same dropout"
    assert (batches.step, batches.again, scheduler.last_epoch) == (4, 1, 4)
    ctx.close()


def test_loops_whose_steps_cannot_be_made_again_are_refused():
    model, optimizer, loader, state, ctx = _alone()
    with pytest.raises(ContractError, match=r"0 optimizer steps after a backward pass[\s\S]*expected:  ?one step"):
        for (x,) in weft.resilient(loader, ctx, state=state):
            model(x).sum().backward()
    with pytest.raises(ContractError, match=r"optimizer.step\(closure\)[\s\S]*fix: "):
        for _ in weft.resilient(loader, ctx, state=state):
            optimizer.step(lambda: 0.0)
    ctx.close()


def test_programs_whose_steps_cannot_be_made_again_are_refused():
    model, optimizer, loader, state, ctx = _alone()
    call = {"state": state}
    with pytest.raises(ContextError, match=r"this is no elastic job[\s\S]*elastic="):
        weft.resilient(loader, weft.local(), **call)
    with pytest.raises(TypeError, match=r"cannot be divided anew[\s\S]*found: .*DataLoader[\s\S]*fix: "):
        weft.resilient(DataLoader(range(4)), ctx, **call)
    with pytest.raises(ValueError, match=r"does not have all[\s\S]*found: .*model, optimizer[\s\S]*fix: "):
        some, _ = weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)
        weft.resilient(loader, ctx, state=some)
    with pytest.raises(TypeError, match=r"this is not a state[\s\S]*fix: "):
        weft.resilient(loader, ctx, state={})
    with pytest.raises(ContractError, match=r'uneven="pad" makes other samples[\s\S]*fix: '):
        _, _, padded, of_padded, after = _alone("pad")
        weft.resilient(padded, after, state=of_padded)
    with pytest.raises(ContractError, match=r"num_workers=1: processes[\s\S]*expected: +num_workers=0"):
        busy, after = weft.shard_data(DataLoader(range(4), batch_size=2, num_workers=1), ctx)
        weft.resilient(busy, after, state=state)
    with pytest.raises(ContractError, match=r"nobody averages[\s\S]*weft.replicate"):
        other = torch.nn.Linear(1, 1)
        objects = {"model": other, "optimizer": torch.optim.SGD(other.parameters(), lr=1.0), "loader": loader}
        weft.resilient(loader, ctx, state=weft.checkpointable(objects, ctx)[0])
    with pytest.raises(ContractError, match=r"not supported in an elastic job: average_weights[\s\S]*fix: "):
        weft.resilient(loader, weft.average_weights(model, ctx)[1], **call)
    with pytest.raises(ValueError, match=r"replicate: not supported in an elastic job[\s\S]*found:  ?.*flat=True"):
        weft.replicate(torch.nn.Linear(1, 1), ctx, flat=True)
    with pytest.raises(ContractError, match=r"counts cannot be added up[\s\S]*fix: .*loader.share"):
        weft.metrics.denominator(3, ctx)
    with pytest.raises(ContextError, match=r"not the outermost axis[\s\S]*found: .*shard[\s\S]*fix: "):
        weft.start(mesh={"shard": 1, "replica": -1}, elastic="replica", device="cpu")
    ctx.close()
