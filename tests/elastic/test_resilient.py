"""resilient: replicas die and come back, and the run ends as if nothing had happened."""

import json
import os
import pathlib
import random
import runpy
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import weft
import weft.cli
from tests.elastic.chaos import LIMIT_S, Job, check, harm
from tests.fix_lines.told import told
from tests.processes import until
from weft.elastic.join import load_received, receive_state, send_state
from weft.elastic.requirements import facts_of_program
from weft.errors import CheckpointError, ContractError
from weft.peers import replica_groups
from weft.peers.quorum import Answer
from weft.peers.replica_groups import ReplicaGroup
from weft.peers.store import RankStore
from weft.peers.world import World
from weft.tensors.rng_state import RngState
from weft.testing import run_ranks


@pytest.mark.slow
def test_a_replica_that_dies_costs_a_step_and_comes_back(tmp_path):
    faults = {"1.0": [3, signal.SIGKILL], "0.0": [8, signal.SIGKILL], "save_every": 3}
    code, text = Job(tmp_path, epochs=6, pause_s=0.05, faults=faults).ended()
    assert code == 0, text
    check(tmp_path, epochs=6)
    saved = {int(path.name[-8:]) for path in (tmp_path / "saved").glob("step-*")}
    assert saved - {9} == {3, 6, 12, 15, 18, 21, 24, 27, 30}, text  # the one that had made step 9 died before it saved
    assert text.count("weft launch: replica") == 2, text
    assert "; new: " in text, text


@pytest.mark.slow
def test_windows_with_a_replica_that_is_stopped_and_no_more_restarts(tmp_path):
    faults = {"1.0": [3, signal.SIGSTOP], "2.0": [5, signal.SIGKILL]}
    code, text = Job(tmp_path, epochs=4, windows=True, restarts=0, faults=faults).ended()
    assert code == 0, text
    check(tmp_path, epochs=4, windows=True)
    assert "was stopped for 3 s, and is killed" in text and "with 1 of 3 replicas" in text
    weft.monitoring.write_report(tmp_path)
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [line["replicas"] for line in told] == [3, 2, 1]
    stopped, killed = (line["elastic"] for line in told[1:])
    assert stopped["again"] and 3 < stopped["seconds"] < 20 and killed["seconds"] < 20
    assert [(loss["replica"], loss["how"], loss["why"]) for line in told for loss in line["elastic"]["lost"]] == [
        (1, "by signal 9 (SIGKILL)", "it was stopped for 3 s"), (2, "by signal 9 (SIGKILL)", "")
    ]  # fmt: skip
    page = (tmp_path / "report.html").read_text()
    assert "it was stopped for 3 s" in page and "a step again, " in page


@pytest.mark.slow
@pytest.mark.parametrize("windows", [False, True])
def test_workers_end_with_their_replica_and_batches_read_ahead_are_read_again(tmp_path, windows):
    faults = {"1.0": [3, signal.SIGKILL], "0.0": [6, signal.SIGKILL], "num_workers": 2}
    setting = {"replicas": 2, "epochs": 3, "windows": windows}
    code, text = Job(tmp_path, pause_s=0.05, faults=faults, **setting).ended()
    assert code == 0, text
    check(tmp_path, **setting)
    told = [json.loads(line)["elastic"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    losses = [line["seconds"] for line in told if line["lost"]]  # the new replica may be there at once
    assert losses and max(losses) < 4, text  # torch's workers look every 5 s


@pytest.mark.slow
@pytest.mark.parametrize("windows", [False, True])
def test_a_rank_of_a_sharded_replica_that_dies_takes_the_replica_with_it(tmp_path, windows):
    faults = {"1.0-1": [3, signal.SIGKILL], "0.0-0": [9, signal.SIGKILL]}
    options = {"replicas": 2, "epochs": 8, "windows": windows}
    code, text = Job(tmp_path, shards=2, pause_s=0.05, faults=faults, **options).ended()
    assert code == 0, text
    check(tmp_path, **options)
    assert text.count("weft launch: replica") == 2 and "; new: " in text, text


@pytest.mark.slow
def test_another_model_is_refused_and_the_others_continue(tmp_path):
    faults = {"1.0": [3, signal.SIGKILL], "1.1": "other model"}
    code, text = Job(tmp_path, epochs=6, pause_s=0.05, faults=faults).ended()
    assert code == 0, text
    check(tmp_path, epochs=6)
    assert "weft launch: refused: 1.1 is another program: objects: " in text
    assert "ended with exit code 1: 1.1 is another program: objects: " in text
    assert text.count("it is started again") == 1  # the next one would be refused, too
    assert text.count("it is started again") == 1, text


@pytest.mark.slow
def test_one_replica_goes_on_alone_until_two_come_at_once(tmp_path):
    faults = {"1.0": [3, signal.SIGKILL], "2.0": [3, signal.SIGKILL], "1.1": "late", "2.1": "late"}
    code, text = Job(tmp_path, epochs=16, pause_s=0.05, faults=faults).ended()
    assert code == 0, text
    check(tmp_path, epochs=16)
    counts = [json.loads(line)["replicas"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert counts[0] == 3 and 1 in counts and counts[-1] == 3, text


@pytest.mark.slow
def test_all_replicas_die_and_begin_again_with_the_copy_in_memory(tmp_path):
    faults = {f"{replica}.0": [8, signal.SIGKILL] for replica in range(3)}
    code, text = Job(tmp_path, epochs=4, faults={**faults, "copy_every": 3}).ended()
    assert code == 0, text
    check(tmp_path, epochs=4)
    assert "from step 6 on with" in text, text


@pytest.mark.slow
def test_one_sharded_replica_begins_again_with_the_newest_of_copy_and_checkpoint(tmp_path):
    faults = {"0.0-0": [7, signal.SIGKILL], "0.1-1": [10, signal.SIGKILL], "copy_every": 4, "save_every": 6}
    code, text = Job(tmp_path, replicas=1, shards=2, epochs=2, faults=faults).ended()
    assert code == 0, text
    check(tmp_path, replicas=1, epochs=2)
    assert text.index("from step 6 on with 1 of 1") < text.index("from step 8 on with 1 of 1"), text


@pytest.mark.slow
def test_who_comes_after_the_end_is_told_and_nobody_waits_for_him(tmp_path):
    faults = {"1.0": [13, signal.SIGKILL], "1.1": "late"}
    code, text = Job(tmp_path, faults=faults).ended()
    assert code == 0, text
    check(tmp_path)
    assert "weft launch: the job has ended before replica 1 could join it" in text


@pytest.mark.slow
def test_too_few_replicas_end_the_job_with_the_words_of_the_one_that_failed(tmp_path):
    code, text = Job(tmp_path, least=3, restarts=0, faults={"1.0": [3, signal.SIGKILL]}).ended()
    assert code == 128 + signal.SIGKILL
    assert "weft launch: replica 1" in text.splitlines()[-1] and "SIGKILL" in text.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "shards"), [(1, 1), (2, 2)])
def test_random_kills_and_stops(tmp_path, seed, shards):
    setting = {"replicas": 3 if shards == 1 else 2, "epochs": 24 // shards, "windows": seed == 1}
    job = Job(tmp_path, shards=shards, pause_s=0.03, restarts=100, **setting)
    assert until(lambda: len(list(tmp_path.glob("*.used"))) == setting["replicas"] * shards, LIMIT_S)
    done = harm(job, tmp_path, random.Random(seed), faults=12 // shards, wait_s=(0.05, 0.6))
    code, text = job.ended()
    assert code == 0, text
    assert len(done) > 3
    check(tmp_path, **setting)


@pytest.mark.slow
def test_a_second_process_of_a_replica_is_refused():
    store = torch.distributed.HashStore()
    board = RankStore(store, limit_s=5.0)
    first, second = (ReplicaGroup(board, "0.0", 1, World(ranks=(0,), rank=0), torch.device("cpu")) for _ in range(2))
    board.push("answer/0.0/0", Answer(1, ("0.0",))._asdict())
    assert first.meet(0, fresh=True, facts={}).number == 1
    with told("peers/replica_groups.py", "this replica was refused") as it:
        second.meet(0, fresh=True, facts={})
    assert "two processes" in str(it.error)
    assert first.add_up([torch.ones(1)])
    assert weft.cli.main(["launch", "--dry-run", *it.fix.split()[2:-1], __file__]) == 0  # one process for each rank


def _adds_up(group, together, board):
    return group.add_up([torch.ones(1)])


def test_replicas_that_cannot_connect(monkeypatch):
    *_, loader, state, ctx = _alone()
    board = RankStore(torch.distributed.HashStore(), limit_s=5.0)
    for number in range(6):
        board.push("answer/1.0/0", Answer(number + 1, ("0.0", "1.0"))._asdict())
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such")
    second = replace(ctx, replicas=ReplicaGroup(board, "1.0", 2, ctx.world, ctx.device))
    with told("elastic/resilient_loader.py", "replicas that live cannot connect to each other") as it:
        weft.resilient(loader, second, state=state)
    name, _ = it.fix.removeprefix("export ").split("  # the interface of that network, on each node")
    monkeypatch.setenv(name.partition("=")[0], "lo")
    assert _members(2, _adds_up) == [True, True]
    ctx.close()


def _takes_the_state(ctx, ignored):
    """Whether the state of a replica fits another one; some of its parameters may be sharded in another way."""
    states, build = [], lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    for names in ignored:
        model, own = weft.fully_shard(build(), ctx, ignored=names)
        states.append(weft.checkpointable({"model": model}, own))

    def job(group, together, board):
        state, own = states[group.index]
        if group.index == 0:
            return send_state(state, 3, [1], group, own, began=0)
        return load_received(receive_state(0, group, began=0), state, own)

    if ignored[0] == ignored[1]:
        return _members(2, job)
    with told("elastic/join.py", "is not in {self.folder}") as it:
        _members(2, job)
    return it.fix


@pytest.mark.slow
def test_the_state_of_a_replica_that_shards_in_another_way():
    ignored = [["0"], None]
    assert run_ranks(_takes_the_state, 2, ignored) == ["start the same program on every replica"] * 2
    assert run_ranks(_takes_the_state, 2, ignored[1:] * 2) == [[True, 3]] * 2


def _members(count, job):
    """What a function gives that gets each of so many replicas, which make steps together, and a barrier."""
    store, together = torch.distributed.HashStore(), threading.Barrier(count)
    board = RankStore(store, limit_s=5.0)
    names = tuple(f"{number}.0" for number in range(count))
    for number in range(count):
        board.push(f"answer/{number}.0/0", Answer(1, names)._asdict())

    def run(name):
        world = World(ranks=(0,), rank=0, timeout_s=20)
        group = ReplicaGroup(board, name, count, world, torch.device("cpu"))
        group.meet(0, fresh=True, facts={})
        together.wait()
        return job(group, together, board)

    with ThreadPoolExecutor(count) as all_of_them:
        return list(all_of_them.map(run, names))


def _lets_go(group, together, board):
    if group.index == 0:
        copies = [os.dup(int(path.name)) for path in pathlib.Path("/dev/fd").iterdir() if path.is_socket()]
        group.release()  # others have its connections, as if they were forked from it
    together.wait()
    begin = time.monotonic()
    lost = group.index and not group.add_up([torch.ones(5)])
    together.wait()
    if group.index == 0:
        for number in copies:
            os.close(number)
    return lost, time.monotonic() - begin


def test_who_lets_go_wakes_those_that_wait_though_his_workers_keep_the_connections():
    found = _members(3, _lets_go)
    assert [lost for lost, _ in found] == [0, True, True]
    assert max(seconds for _, seconds in found) < 15


def _stays_away(group, together, board):
    if group.index == 0:
        board.write("broken/1", 1)
    begin = time.monotonic()
    lost = group.index and not group.add_up([torch.ones(5)])
    seconds = time.monotonic() - begin
    together.wait()
    return lost, seconds


def test_who_waits_in_vain_hears_of_a_loss_by_the_launcher(monkeypatch):
    monkeypatch.setattr(replica_groups, "_PATIENCE_S", 0.1)
    (_, _), (lost, seconds) = _members(2, _stays_away)
    assert lost and 0.1 < seconds < 15


def test_who_connects_in_vain_hears_of_a_loss_by_the_launcher(monkeypatch):
    monkeypatch.setattr(replica_groups, "_PATIENCE_S", 0.1)
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = torch.distributed.TCPStore("127.0.0.1", server.port)
    board = RankStore(store, limit_s=20.0)
    board.push("answer/0.0/0", Answer(1, ("0.0", "1.0"))._asdict())
    board.write("broken/1", 1)
    group = ReplicaGroup(board, "0.0", 2, World(ranks=(0,), rank=0), torch.device("cpu"))
    begin = time.monotonic()
    assert group.meet(0, fresh=True, facts={}).number == 1 and group.broken
    assert time.monotonic() - begin < 15


def test_random_numbers_are_those_of_the_source_only_if_all_began_alike():
    def job(group, together, board):
        _, _, _, state, ctx = _alone()
        began = {"alike": 7, "distinct": 7 + group.index}
        if group.index == 0:
            return all(send_state(state, 3, [1], group, ctx, began=each) for each in began.values())
        return [receive_state(0, group, began=each).manifest.ranks[0]["rng"] is None for each in began.values()]

    assert _members(2, job) == [True, [False, True]]
    ctx = weft.start(elastic="replica", device="cpu")
    others = [replace(ctx, replicas=ReplicaGroup(None, f"{n}.4", 9, ctx.world, ctx.device)) for n in range(3)]
    before = RngState.capture()
    assert len({weft.rng.set_seed(0, each, ranks="distinct").seeds for each in others}) == 3
    before.apply()
    ctx.close()


def test_replicas_add_up_and_hear_of_a_new_one_in_the_same_message():
    store = torch.distributed.HashStore()
    board = RankStore(store, limit_s=5.0)
    for number in (0, 1):
        board.push(f"answer/{number}.0/0", Answer(1, ("0.0", "1.0"))._asdict())
    board.write("called/1", 1)

    def add_up(name):
        group = ReplicaGroup(board, name, 2, World(ranks=(0,), rank=0), torch.device("cpu"))
        group.meet(0, fresh=True, facts={})
        values, others = torch.tensor([1.0, 2.0, 7.0]), torch.tensor([3])
        assert group.add_up([values, others], room=True)
        return values[:2].tolist(), others.tolist(), group.called

    with ThreadPoolExecutor(2) as both:
        assert list(both.map(add_up, ("0.0", "1.0"))) == [([2.0, 4.0], [6], True)] * 2


# -- without a launcher: one replica ----------------------------------------------------------------


def _alone(uneven="balance", *, module=None, samples=8, targets=False):
    ctx = weft.start(elastic="replica", device="cpu")
    data = TensorDataset(*[torch.arange(float(samples)).view(-1, 1)] * (1 + targets))
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


def test_a_step_that_failed_is_not_saved(tmp_path):
    model, optimizer, loader, state, ctx = _alone()
    batches = weft.resilient(loader, ctx, state=state)
    for (x,) in batches:
        ctx.replicas.broken = batches.step in (1, 2) and batches.again < batches.step
        (model(x).mean() * loader.share).backward()
        optimizer.step()
        optimizer.zero_grad()
        save = weft.save if batches.step % 2 else lambda *args: weft.save_async(*args).wait()
        path = save(state, tmp_path, batches.step + 1, ctx)
        assert path.exists() is not ctx.replicas.broken
    assert batches.again == 2 and len(list(tmp_path.glob("step-*"))) == 4
    ctx.close()


def test_replicas_save_into_one_directory_and_each_step_once(tmp_path):
    *_, state, ctx = _alone()
    one, other, stranger = (
        replace(
            ctx,
            world=World(ranks=(0,), rank=0),
            replicas=ReplicaGroup(None, name, 2, ctx.world, ctx.device, {} if job is None else {"job": job}),
        )
        for name, job in (("0.0", "a"), ("1.0", "a"), ("2.0", None))
    )
    weft.save(state, tmp_path, 1, one)
    before = (tmp_path / "step-00000001").stat().st_mtime_ns
    assert weft.save(state, tmp_path, 1, other).stat().st_mtime_ns == before
    weft.save(state, tmp_path, 2, other)
    with pytest.raises(CheckpointError, match="another run"):
        weft.save(state, tmp_path, 3, stranger)
    before = (tmp_path / "step-00000002").stat().st_mtime_ns
    assert weft.save(state, tmp_path, 2, other).stat().st_mtime_ns == before  # tried again
    ctx.close()


def test_weights_that_the_loop_changes_by_itself_are_put_back():
    ends = []
    for fails in False, True:
        torch.manual_seed(0)
        model, optimizer, loader, _, ctx = _alone()
        average, teacher = torch.optim.swa_utils.AveragedModel(model), torch.nn.Linear(1, 1)
        objects = {"model": model, "optimizer": optimizer, "loader": loader, "average": average, "teacher": teacher}
        batches = weft.resilient(loader, ctx, state=weft.checkpointable(objects, ctx)[0])
        for (x,) in batches:
            teacher.weight.data = 0.9 * teacher.weight.data + 0.1 * model.weight.data
            (model(x).sub(teacher(x)).square().mean() * loader.share).backward()
            if fails and batches.step == 2 and not batches.again:
                ctx.replicas.broken = True
                ctx.replicas.on_loss()
            model.weight.data.mul_(0.9)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
        ends.append([p.detach().clone() for each in (model, average, teacher) for p in each.parameters()])
        ctx.close()
    assert all(map(torch.equal, *ends))


def test_weights_inside_of_a_model_that_no_optimizer_steps_may_not_change_in_a_step():
    model, optimizer, loader, state, ctx = _alone(
        module=torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    )
    del optimizer.param_groups[0]["params"][2:]
    for parameter in model[1].parameters():
        parameter.requires_grad_(False)

    def train(state, model, changed):
        for (x,) in weft.resilient(loader, ctx, state=state):
            (model(x).mean() * loader.share).backward()
            optimizer.step()
            optimizer.zero_grad()
            changed.bias.data = changed.bias.data + 1

    with told("elastic/step_mark.py", "it changed weights that no optimizer updates") as it:
        train(state, model, model[1])
    assert "1.bias" in str(it.error)
    teacher = torch.nn.Linear(1, 1)
    line = it.fix.replace("...", '"optimizer": optimizer, "loader": loader')
    model, ctx = weft.replicate(torch.nn.Linear(1, 1), ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state, ctx = eval(line, {"weft": weft, **locals()})
    train(state, model, teacher)
    ctx.close()


def test_what_has_to_be_alike_on_all_replicas(tmp_path, monkeypatch):
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "train.py").write_text("")
    (folder / "elastic_helper.py").write_text("")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(folder / "train.py"), raising=False)
    monkeypatch.syspath_prepend(folder)
    __import__("elastic_helper")

    def facts(change=None, *, activation=torch.nn.Tanh, **options):
        model = torch.nn.Sequential(torch.nn.Linear(1, 1), activation())
        _, _, loader, state, ctx = _alone(module=model, **options)
        if change:
            (folder / change).write_text("1")
        ctx.close()
        return facts_of_program(state, loader, ctx)

    usual = facts()
    assert usual == facts()
    others = {
        "objects": facts(activation=torch.nn.ReLU),
        "samples": facts(samples=10),
        "shard_data": facts(uneven="empty"),
        "elastic_helper.py": facts("elastic_helper.py"),
    }
    for key, found in others.items():
        assert usual[key] != found[key], key


def test_loops_whose_steps_cannot_be_made_again_are_refused():
    model, optimizer, loader, state, ctx = _alone()
    with pytest.raises(ContractError, match=r"0 optimizer steps after a backward pass[\s\S]*expected:  ?one step"):
        for (x,) in weft.resilient(loader, ctx, state=state):
            model(x).sum().backward()
    with told("elastic/resilient_loader.py", "this step could not be repeated by other replicas") as it:
        for _ in weft.resilient(loader, ctx, state=state):
            optimizer.step(lambda: 0.0)
    assert "optimizer.step(closure)" in str(it.error)
    with told("elastic/resilient_loader.py", "'step', step, least=0") as step:
        weft.resilient(loader, ctx, state=state, step=-1)
    step.run(loader=loader, ctx=ctx, state=state)
    with told("elastic/resilient_loader.py", "'copy_every', copy_every") as copy:
        weft.resilient(loader, ctx, state=state, copy_every=0)
    copy.run(loader=loader, ctx=ctx, state=state)
    ctx.close()
    model, optimizer, loader, state, ctx = _alone(targets=True)
    batches = weft.resilient(loader, ctx, state=state)
    it.run(model=model, optimizer=optimizer, loader=loader, loss=torch.nn.functional.mse_loss, batches=batches)
    assert batches.step == 4
    ctx.close()


def test_programs_whose_steps_cannot_be_made_again_are_refused():
    model, optimizer, loader, state, ctx = _alone()
    call = {"state": state}
    with told("elastic/requirements.py", "resilient: this is not an elastic job") as it:
        weft.resilient(loader, weft.local(), **call)
    exec(it.fix.replace("...", "assert ctx.replicas"), {"weft": weft})
    with told("elastic/requirements.py", "the samples of this loader cannot be divided again") as it:
        weft.resilient(DataLoader(range(4)), ctx, **call)
    _follow(it.fix, loader=DataLoader(range(4)))
    with told("elastic/requirements.py", "the samples of a step are not known beforehand") as it:
        _follow("loader, ctx = weft.shard_data(loader, ctx)", loader=DataLoader(Stream(), batch_size=2))
    _follow(it.fix, dataset=range(16), DataLoader=DataLoader)
    with told("elastic/requirements.py", "the state lacks objects that a new replica needs") as it:
        some, _ = weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)
        weft.resilient(loader, ctx, state=some)
    full = it.run(model=model, optimizer=optimizer, loader=loader, ctx=ctx)
    weft.resilient(loader, full["ctx"], state=full["state"])
    with pytest.raises(TypeError, match=r"this is not a state[\s\S]*fix: "):
        weft.resilient(loader, ctx, state={})
    with told("elastic/requirements.py", """'uneven="balance" or "empty"', fix""") as it:
        _, _, padded, of_padded, after = _alone("pad")
        weft.resilient(padded, after, state=of_padded)
    _follow(it.fix, loader=DataLoader(range(4), batch_size=2))
    with told("elastic/requirements.py", "modules that are replicated or sharded") as it:
        other = torch.nn.Linear(1, 1)
        objects = {"model": other, "optimizer": torch.optim.SGD(other.parameters(), lr=1.0), "loader": loader}
        weft.resilient(loader, ctx, state=weft.checkpointable(objects, ctx)[0])
    after = it.run(model=other, ctx=ctx)["ctx"]
    weft.resilient(loader, after, state=weft.checkpointable(objects, after)[0])
    with told("elastic/requirements.py", "not supported in an elastic job: {listed(strange)}") as it:
        weft.resilient(loader, weft.average_weights(model, ctx)[1], **call)
    assert it.fix == "leave average_weights out"
    weft.resilient(loader, ctx, **call)
    with told("elastic/requirements.py", "dense gradients of real numbers") as it:
        _, _, loader_of_sparse, sparse, after = _alone(module=torch.nn.Embedding(8, 1, sparse=True))
        weft.resilient(loader_of_sparse, after, state=sparse)
    dense = eval(it.fix.replace("...", "8, 1"), {"nn": torch.nn})
    _, _, loader_of_dense, state_of_dense, after = _alone(module=dense)
    weft.resilient(loader_of_dense, after, state=state_of_dense)
    with pytest.raises(ValueError, match=r"replicate: not supported in an elastic job[\s\S]*found:  ?.*flat=True"):
        weft.replicate(torch.nn.Linear(1, 1), ctx, flat=True)
    with pytest.raises(ContractError, match=r"counts cannot be added up[\s\S]*fix: .*loader.share"):
        weft.metrics.denominator(3, ctx)
    ctx.close()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


def _follow(line, **names):
    """`resilient` takes what a line makes of a loader."""
    made = {"weft": weft, "ctx": weft.start(elastic="replica", device="cpu"), **names}
    exec(line, made)
    model, ctx = weft.replicate(torch.nn.Linear(1, 1), made["ctx"])
    objects = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.01), "loader": made["loader"]}
    state, ctx = weft.checkpointable(objects, ctx)
    weft.resilient(made["loader"], ctx, state=state)
    ctx.close()
