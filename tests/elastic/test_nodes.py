"""Elastic jobs on several nodes: launchers come, are lost and are replaced, and the run ends as without that.

The nodes are launchers on this machine, which meet at a loopback address.
"""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.elastic.chaos import LIMIT_S, Job, check, lines, write_garbage
from tests.fix_lines.told import printed
from tests.processes import is_alive, listening, until
from weft.peers.connect import wait_for_listener

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_S)]


@pytest.fixture
def node(tmp_path):
    """Starts a launcher of a job with so many nodes; they are ended with the test. Steps are slow at first."""
    (tmp_path / "slow").touch()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.2:{probe.getsockname()[1]}"
    jobs = []

    def start(nodes, *more, **setting):
        jobs.append(Job(tmp_path, more=["--nnodes", nodes, "--rdzv", address, *more], **setting))
        if len(jobs) == 1:  # the first one decides
            wait_for_listener(*address.split(":"), who="this test", limit_s=LIMIT_S)
        return jobs[-1]

    yield start
    for job in jobs:
        if job.process.returncode is None:
            job.process.kill()
            job.ended(10)


def _steps(folder, replicas=None):
    """The last step that was begun, by so many replicas at once if a number is given."""
    by_step = {}
    for line in lines(folder):
        by_step.setdefault((line.step, line.quorum), []).append(line)
    return max((step for (step, _), who in by_step.items() if replicas in (None, len(who))), default=-1)


def _ranks_of(folder, numbers):
    return [
        int(path.read_text() or 0)
        for path in folder.glob("*.pid")
        if int(path.stem.partition(".")[0]) in numbers and is_alive(int(path.read_text() or 2**22))
    ]


def _finish(folder, *jobs):
    """Let a job go on to its end, which all of its launchers report."""
    (folder / "slow").unlink()
    for job in jobs:
        code, text = job.ended()
        assert code == 0, f"{text}\n{jobs[0].text}"


@pytest.mark.parametrize(("shards", "least"), [(1, 1), (2, 2)])
def test_a_killed_launcher_takes_its_ranks_along_and_another_one_takes_its_place(tmp_path, node, shards, least):
    setting = {"replicas": 1, "shards": shards, "epochs": 40 // shards, "pause_s": 0.01, "least": least}
    first = node(2, **setting)
    second = node(2, **setting)
    assert until(lambda: _steps(tmp_path) > 4, LIMIT_S), first.text
    second.process.kill()
    assert until(lambda: not _ranks_of(tmp_path, [1]), 60)
    before = _steps(tmp_path)
    assert until(lambda: _steps(tmp_path) > before + 1, LIMIT_S if least == 1 else 7) == (least == 1), first.text
    third = node(2, **setting)
    assert until(lambda: _steps(tmp_path, 2 * shards) > before + 2, LIMIT_S), first.text
    _finish(tmp_path, first, third)
    text = first.text
    check(tmp_path, replicas=2, epochs=setting["epochs"])
    counts = [json.loads(line)["replicas"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert counts == ([2, 1, 2] if least == 1 else [2, 2]), text
    assert re.search(r"node 1 \(.*\) was not heard from for 5 s\n.*replica 1 .*: its launcher was not heard from", text)
    assert "node 1 of the job at 127.0.0.2:" in third.text and "with replicas 1" in third.text


def test_a_job_begins_with_one_node_and_grows(tmp_path, node):
    setting = {"replicas": 1, "epochs": 40, "pause_s": 0.01}
    first = node("1:3", **setting)
    assert until(lambda: _steps(tmp_path, 1) > 3, LIMIT_S), first.text
    others = [node("1:3", **setting) for _ in range(2)]
    assert until(lambda: _steps(tmp_path, 3) > 3, LIMIT_S), first.text
    _finish(tmp_path, first, *others)
    check(tmp_path, replicas=3, epochs=40)


def test_a_launcher_too_many_waits_and_replaces_one_that_leaves(tmp_path, node):
    setting = {"replicas": 2, "epochs": 40, "pause_s": 0.01}
    first, second = node(2, **setting), node(2, **setting)
    assert until(lambda: _steps(tmp_path, 4) > 3, LIMIT_S), first.text
    spare = node(2, **setting)
    assert until(lambda: "this launcher waits until one of them is lost" in spare.text, LIMIT_S), spare.text
    second.process.send_signal(signal.SIGTERM)
    code, text = second.ended()
    assert code == 128 + signal.SIGTERM and "ended by SIGTERM" in text
    assert until(lambda: "with replicas 2, 3" in spare.text, LIMIT_S), first.text
    _finish(tmp_path, first, spare)
    check(tmp_path, replicas=4, epochs=40)
    assert "node 1" in first.text and "has left" in first.text, first.text


def test_ranks_of_all_nodes_die_and_begin_again_with_the_newest_copy_in_memory(tmp_path, node):
    faults = {"0.0": [8, signal.SIGKILL], "1.0": [8, signal.SIGKILL], "copy_every": 3}
    setting = {"replicas": 1, "epochs": 4, "faults": faults}
    jobs = node(2, **setting), node(2, **setting)
    _finish(tmp_path, *jobs)
    check(tmp_path, replicas=2, epochs=4)
    assert "from step 6 on with" in jobs[0].text, jobs[0].text


def test_without_the_first_launcher_the_others_end(tmp_path, node):
    setting = {"replicas": 1, "epochs": 400, "pause_s": 0.01}
    first, second = node(2, **setting), node(2, **setting)
    assert until(lambda: _steps(tmp_path, 2) > 3, LIMIT_S), first.text
    first.process.kill()
    code, text = second.ended()
    assert code == 1 and re.search(r"the launcher at 127\.0\.0\.2:\d+ is lost", text), text
    assert until(lambda: not _ranks_of(tmp_path, [0, 1]), 60)


def test_a_launcher_that_was_stopped_is_replaced_and_told_so(tmp_path, node):
    setting = {"replicas": 1, "epochs": 40, "pause_s": 0.01}
    first, second = node(2, **setting), node(2, **setting)
    assert until(lambda: _steps(tmp_path, 2) > 3, LIMIT_S), first.text
    second.process.send_signal(signal.SIGSTOP)
    assert until(lambda: "was not heard from for 5 s" in first.text, LIMIT_S), first.text
    third = node(2, **setting)
    assert until(lambda: "with replicas 1" in third.text, LIMIT_S), first.text
    second.process.send_signal(signal.SIGCONT)
    code, text = second.ended()
    assert code == 1 and "was not heard from for 5 s, and its replicas were given up" in text, text
    _finish(tmp_path, first, third)
    check(tmp_path, replicas=2, epochs=40)


@pytest.mark.parametrize("seed", [0])
def test_random_kills_of_ranks_and_launchers(tmp_path, node, seed):
    chance = random.Random(seed)
    setting = {"replicas": 2, "epochs": 40, "pause_s": 0.01, "restarts": 100}
    first, *others = node(3, **setting), node(3, **setting), node(3, **setting)
    assert until(lambda: _steps(tmp_path, 6) > 2, LIMIT_S), first.text
    faults = 0
    while faults < 10:
        time.sleep(chance.uniform(0.2, 1.5))
        if chance.random() < 0.3:
            victim = others.pop(chance.randrange(2))
            victim.process.kill()
            others.append(node(3, **setting))
        elif ranks := _ranks_of(tmp_path, range(6)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(ranks), signal.SIGKILL)
        faults += 1
    assert until(lambda: all("of the job at" in job.text for job in others), LIMIT_S), first.text
    _finish(tmp_path, first, *others)
    check(tmp_path, replicas=6, epochs=40)


def test_nodes_with_other_options_are_refused_and_a_program_that_fails_ends_all(tmp_path, node):
    setting = {"epochs": 40, "pause_s": 0.01, "restarts": 0}
    faults = {"0.0": [14, signal.SIGKILL], "1.0": [14, signal.SIGKILL]}
    first = node(2, replicas=1, faults=faults, **setting)
    (tmp_path / "slow").unlink()
    assert until(lambda: _ranks_of(tmp_path, [0]), LIMIT_S), first.text
    other = node(2, replicas=2, **setting)
    code, text = other.ended()
    assert code == 1 and "-n 2, where the first node has 1" in text, text
    second = node(2, replicas=1, faults=faults, **setting)
    code, text = first.ended()
    assert code == 128 + signal.SIGKILL, text
    assert second.ended()[0] == 128 + signal.SIGKILL, second.text
    assert re.search(r"weft launch: the job at 127\.0\.0\.2:\d+ has ended", second.text), second.text


def test_nodes_that_do_not_know_the_secret_stay_outside_and_strangers_change_nothing(tmp_path, node):
    setting = {"replicas": 2, "epochs": 40, "pause_s": 0.01}
    first, second = (node(2, secret="of this job", **setting) for _ in range(2))
    assert until(lambda: _steps(tmp_path, 4) > 3, LIMIT_S), first.text
    assert {host for host, _ in listening(first.process.pid)} == {"127.0.0.2"}
    other = node(2, secret="of another job", **setting)
    write_garbage(first.process.pid, random.Random(0))
    os.kill(_ranks_of(tmp_path, [3])[0], signal.SIGKILL)
    code, text = other.ended()
    it = printed("launching/replicas/joined_node.py", "this is not the address of an elastic job", text)
    assert code == 2 and it.fix == "the same options of weft launch, and the same WEFT_SECRET, on all nodes"
    _finish(tmp_path, first, second)
    check(tmp_path, replicas=4, epochs=40)
    assert first.text.count("it is started again") == 1 and "of this job" not in first.text + second.text + text


def test_somebody_else_at_the_address(tmp_path):
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.2", 0))
        stranger.listen()
        command = [sys.executable, "-m", "weft", "launch", "--nnodes", "2", "--min-replicas", "1"]
        address = f"127.0.0.2:{stranger.getsockname()[1]}"
        (tmp_path / "train.py").write_text("")
        ended = subprocess.run(
            [*command, "--rdzv", address, str(tmp_path / "train.py")],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            env={k: v for k, v in os.environ.items() if not k.startswith("WEFT_")},
        )
    assert ended.returncode != 0
    assert "launch: this node cannot connect to the others of its job" in ended.stderr and address in ended.stderr
