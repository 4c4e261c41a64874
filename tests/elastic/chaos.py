"""Faults at random moments of real runs, and the end is compared: processes are killed, stopped, delayed and cut off,
end with exit code 0 or an error, and leave early; a stranger writes into the store.

As a program it makes many, and prints what they cost:

    python -m tests.elastic.chaos --replicas 3 --shards 1 --faults 200
"""

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from tests.elastic.train_replicas import SAMPLES, reference
from tests.processes import is_alive, listening, until

PROGRAM = [str(pathlib.Path(sys.executable).with_name("weft")), "launch"]
SCRIPT = str(pathlib.Path(__file__).with_name("train_replicas.py"))
KINDS = {"kill": 5, "stop": 1, "delay": 2, "cut": 1}  # how often each is chosen
KINDS |= {"exit0": 2, "sys.exit": 2, "leave": 1, "raise": 1, "garbage": 3}
LIMIT_S = 180
GARBAGE = ("", "garbage", "1" * 5000, "[" * 100_000, "NaN", "null", '{"kind": "ask"}', '{"name": "1.0", "step": 1e99}')


class Job:
    """A launcher with replicas of train_replicas.py.

    Attributes:
        process: The launcher.
        said: When each line of its output came, and the line.
    """

    def __init__(
        self,
        folder,
        *,
        replicas=3,
        shards=1,
        restarts=5,
        epochs=3,
        windows=False,
        pause_s=0.01,
        faults=None,
        least=1,
        more=(),
        secret=None,
    ):
        words = [SCRIPT, folder, epochs, "windows" if windows else "batches", shards, pause_s, json.dumps(faults or {})]
        options = ["-n", replicas * shards, "--min-replicas", least, "--max-restarts", restarts]
        options += ["--replica-ranks", shards] if shards > 1 else []
        options += ["--events", folder / "events.jsonl", *more]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("WEFT_")} | {"OMP_NUM_THREADS": "1"}
        environment |= {} if secret is None else {"WEFT_SECRET": secret}
        self.said = []
        self.process = subprocess.Popen(
            [*PROGRAM, *map(str, options), *map(str, words)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.said.append((time.monotonic(), line))

    @property
    def text(self):
        return "".join(line for _, line in self.said)

    def ended(self, limit_s=LIMIT_S):
        """Wait for the end; its exit code and its output."""
        try:
            self.process.wait(limit_s)
        finally:
            self.process.kill()
        self._reader.join()
        self.process.stdout.close()
        return self.process.returncode, self.text


class Line(NamedTuple):
    """What a rank noted at the beginning of a step."""

    step: int
    quorum: int
    samples: list
    time: float


def lines(folder):
    """What all ranks noted."""
    texts = (text for path in folder.glob("*.used") for text in path.read_text().splitlines())
    return [Line(*json.loads(text)) for text in texts if text.endswith("]")]  # else it was killed over it


def check(folder, *, replicas=3, epochs=3, windows=False):
    """The end is that of one process, and every sample was used once in the steps that counted."""
    expected, steps = reference(replicas, epochs, windows=windows)
    ends = sorted(folder.glob("*.end"))
    assert ends
    for end in ends:
        difference = max(float((a - b).abs().max()) for a, b in zip(expected, torch.load(end), strict=True))
        assert difference < 1e-12, (end.name, difference)
    used = {}
    for line in lines(folder):
        used.setdefault(line.step, {}).setdefault(line.quorum, []).extend(line.samples)
    counted = [sorted(used[step][max(used[step])]) for step in range(len(steps))]  # the last attempt
    assert counted == steps
    assert sorted(i for step in steps[: len(steps) // epochs] for i in step) == list(range(SAMPLES))


def harm(job, folder, chance, *, faults, wait_s):
    """Make so many faults while the job runs; a list of when, the kind and the replica."""
    done, kinds = [], dict(KINDS)
    while job.process.poll() is None and len(done) < faults:
        time.sleep(chance.uniform(*wait_s))
        victims = [(path, int(path.read_text() or 0) or 2**22) for path in sorted(folder.glob("*.pid"))]
        victims = [(path, pid) for path, pid in victims if is_alive(pid)]
        if not victims:
            continue
        path, pid = chance.choice(victims)
        kind = chance.choices(list(kinds), list(kinds.values()))[0]
        if kind == "leave":
            del kinds[kind]  # if two left after the same step, that would be the end
        try:
            if kind in ("cut", "exit0"):
                path.with_suffix(f".{kind}").touch()
            elif kind in ("sys.exit", "leave", "raise"):
                path.with_suffix(".asked").write_text(kind)
            elif kind == "garbage":
                write_garbage(job.process.pid, chance)
            else:
                os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
                done.append((time.monotonic(), kind, path.stem))
            if kind == "delay":
                time.sleep(chance.uniform(0.1, 2.0))
                os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            continue
        if kind not in ("kill", "stop", "delay"):
            done.append((time.monotonic(), kind, path.stem))
    return done


def write_garbage(pid, chance, *, times=20):
    """What somebody can do who reaches the store of a launcher and does not know its secret."""
    for address in listening(pid):
        with contextlib.suppress(RuntimeError):  # the job has ended
            store = dist.TCPStore(*address, is_master=False, wait_for_workers=False)
            for _ in range(times):
                keys = store.list_keys() if hasattr(store, "list_keys") else []
                for key in [*keys, "weft/replicas/asks", "weft/replicas/answer/1.0/0", "weft/replicas/broken/1"]:
                    store.queue_push(key, chance.choice(GARBAGE))
                    store.set(key, chance.choice(GARBAGE))
                    if chance.random() < 0.5:
                        store.delete_key(key)
                time.sleep(0.01)


class Costs(NamedTuple):
    """What faults of one run took, in seconds.

    Attributes:
        deaths: From a SIGKILL to the end of the step that was made again, where others lived on.
        ends: From a SIGKILL after which nobody lived to the first step of those who were started again.
        joins: From the launcher's notice that a replica is started again to its first quorum.
        longest: The longest time without a step.
        step: A step without faults, the median.
    """

    deaths: list
    ends: list
    joins: list
    longest: float
    step: float


def costs(job, folder, faults):
    """What the faults of a run have cost."""
    seen = sorted((line.time, line.quorum, line.step) for line in lines(folder))
    firsts = {}
    for at, quorum, step in seen:
        firsts.setdefault((quorum, step), at)
    steps = [firsts[q, s + 1] - at for (q, s), at in firsts.items() if (q, s + 1) in firsts]
    found = Costs([], [], [], max(b[0] - a[0] for a, b in itertools.pairwise(seen)), statistics.median(steps))
    for at in (at for at, kind, _ in faults if kind == "kill"):
        _, before, reached = max(((w, q, s) for w, q, s in seen if w <= at), default=(0, 0, 0))
        begun = next(((w, q, s) for w, q, s in seen if w > at and q > before), None)
        after = begun and next((w for w, q, s in seen if (q, s) > begun[1:] and w > at), None)
        if after and begun[2] < reached:
            found.ends.append(begun[0] - at)
        elif after:
            found.deaths.append(after - at)
    asked = {}
    for at, line in job.said:
        if again := re.search(r"replica (\d+) .*it is started again", line):
            asked[again[1]] = at
        elif new := re.search(r"; new: (.*)", line):
            found.joins.extend(at - asked.pop(number) for number in new[1].split(", ") if number in asked)
    return found


def main():
    parser = argparse.ArgumentParser()
    for name, value in {"replicas": 3, "shards": 1, "faults": 200, "seed": 0, "each": 20, "epochs": 60}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--wait", type=float, default=3.0)
    parser.add_argument("--windows", action="store_true")
    options = parser.parse_args()
    kinds, all_costs = {}, []
    run = 0
    while sum(kinds.values()) < options.faults:
        chance = random.Random(1000 * options.seed + run)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            folder = pathlib.Path(name)
            setting = {"replicas": options.replicas, "epochs": options.epochs, "windows": options.windows}
            job = Job(folder, shards=options.shards, restarts=1000, pause_s=0.03, **setting)
            try:
                assert until(lambda: len(list(folder.glob("*.used"))) == options.replicas * options.shards, LIMIT_S)  # noqa: B023
                faults = harm(job, folder, chance, faults=options.each, wait_s=(0.2, options.wait))
                code, _ = job.ended(180)
                assert code == 0, code
                check(folder, **setting)
            except BaseException:
                keep = pathlib.Path(tempfile.mkdtemp(prefix=f"chaos-{options.seed}-{run}-"))
                (keep / "said").write_text("".join(f"{at:.3f} {line}" for at, line in job.said))
                folder.rename(keep / "run")
                print("FAILED", keep, flush=True)
                raise
            all_costs.append(costs(job, folder, faults))
        for _, kind, _ in faults:
            kinds[kind] = kinds.get(kind, 0) + 1
        run += 1
        print(f"{run} runs, faults {kinds}", end="; ")
        for name in "deaths", "ends", "joins":
            values = sorted(value for one in all_costs for value in getattr(one, name)) or [0.0]
            print(f"{len(values)} {name}: median {statistics.median(values):.2f} s, most {values[-1]:.2f} s", end="; ")
        step, longest = statistics.median(one.step for one in all_costs), max(one.longest for one in all_costs)
        print(f"a step {step:.3f} s; longest time without a step {longest:.1f} s", flush=True)


if __name__ == "__main__":
    main()
