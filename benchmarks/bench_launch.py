"""How long it takes from the command line to the end of the first training step; see docs/benchmarks.md.

`weft launch -n 2`, `torchrun --nproc-per-node 2` and, where it is installed, `accelerate launch` start the
same plain torch script in turns, and `weft launch` also one written with weft. Each rank notes when it got
how far, rank 0 is shown. CPU time is that of all processes the command started, also of those it did not
wait for (Linux).

    python benchmarks/bench_launch.py [--quick] [--check] [--rounds 8] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

PROMISE = 1.0  # of the medians and of the minima
STAGES = ("script begins", "torch imported", "group made", "model ready", "optimizer made", "first step done")

BEGIN = """
import time
stamps = [time.time()]
import torch
from torch import nn
{imports}
stamps.append(time.time())
"""
END = """
stamps.append(time.time())
optimizer = torch.optim.AdamW(model.parameters())
stamps.append(time.time())
torch.nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.randint(4, (8,))).backward()
optimizer.step()
optimizer.zero_grad()
stamps.append(time.time())
if {rank} == 0:
    import json, sys
    with open(sys.argv[1], "w") as file:
        json.dump(stamps, file)
{close}
"""
TORCH_SCRIPT = (
    BEGIN.format(imports="import torch.distributed as dist\nfrom torch.nn.parallel import DistributedDataParallel")
    + """
dist.init_process_group("gloo")
stamps.append(time.time())
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)))
"""
    + END.format(rank="dist.get_rank()", close="dist.barrier()\ndist.destroy_process_group()")
)
WEFT_SCRIPT = (
    BEGIN.format(imports="import weft")
    + """
ctx = weft.start()
stamps.append(time.time())
model, ctx = weft.replicate(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)), ctx)
"""
    + END.format(rank="ctx.rank", close="ctx.close()")
)
# name: (launcher, its option for 2 processes, script)
CONTESTANTS = {
    "torchrun": ("torchrun", ("--nproc-per-node", "2"), TORCH_SCRIPT),
    "control": ("torchrun", ("--nproc-per-node", "2"), TORCH_SCRIPT),
    # --multi_gpu is its way to several processes; the script itself stays on the CPU.
    "accelerate launch": (
        "accelerate",
        ("launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"),
        TORCH_SCRIPT,
    ),
    "weft launch": ("weft", ("launch", "-n", "2"), TORCH_SCRIPT),
    "weft launch, weft script": ("weft", ("launch", "-n", "2"), WEFT_SCRIPT),
}
PARTS = {
    "python alone": "pass",
    "import torch": "import torch",
    "import torch, torch._dynamo": "import torch, torch._dynamo",
    "import weft": "import weft",
    "import torch.distributed.run": "import torch.distributed.run",
}


def adopt_orphans() -> None:
    """Let processes whose parent has ended become ours, so that their CPU time is seen (Linux)."""
    if sys.platform.startswith("linux"):
        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def timed(command: list[str]) -> tuple[float, float, float, str]:
    """Run a command and all it leaves behind; returns when it began, wall and CPU seconds, the error."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.time()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wall = time.time() - began
    try:
        while True:
            os.wait()
    except ChildProcessError:
        pass
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return began, wall, cpu, done.stderr if done.returncode else ""


def launch(name: str, folder: Path) -> dict[str, Any]:
    """One launch: seconds to each stage on rank 0, to the end of the command, and of CPU."""
    launcher, options, _ = CONTESTANTS[name]
    answer = folder / "stamps.json"
    executable = Path(sysconfig.get_path("scripts")) / launcher
    began, wall, cpu, error = timed([str(executable), *options, str(folder / f"{name}.py"), str(answer)])
    if error:
        # torch's gloo threads abort some plain runs at exit, in spite of a barrier: not what is measured here.
        if not answer.exists() or "terminate called" not in error:
            sys.exit(f"{name} failed:\n{error}")
        print(f"{name}: a rank aborted at exit, the launch is repeated", flush=True)
        return launch(name, folder)
    stamps = [stamp - began for stamp in json.loads(answer.read_text(encoding="utf-8"))]
    answer.unlink()
    return {"stages": stamps, "first_step": stamps[-1], "end": wall, "cpu": cpu}


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Medians and minima per contestant, and their ratios to torchrun's; and the median ratio within a round."""
    result: dict[str, dict[str, Any]] = {}
    for name, mine in runs.items():
        figures: dict[str, Any] = {}
        for what in ("first_step", "cpu", "end"):
            values = [run[what] for run in mine]
            reference = [run[what] for run in runs["torchrun"]]
            figures[what] = {
                "median": statistics.median(values),
                "min": min(values),
                "median_ratio": statistics.median(values) / statistics.median(reference),
                "paired": statistics.median(a / b for a, b in zip(values, reference, strict=True)),
                "min_ratio": min(values) / min(reference),
            }
        figures["stages"] = [statistics.median(times) for times in zip(*[r["stages"] for r in mine], strict=True)]
        result[name] = figures
    return result


def print_tables(result: dict[str, dict[str, Any]], parts: dict[str, float]) -> None:
    titles = {"first_step": "wall to the end of the first step", "end": "wall to the end", "cpu": "CPU, all processes"}
    for what, title in titles.items():
        print(f"\n{title:36}{'median s':>10}{'ratio':>8}{'min s':>8}{'ratio':>8}{'paired':>8}")
        for name, figures in result.items():
            f = figures[what]
            times = f"{f['median']:10.2f}{f['median_ratio']:8.2f}{f['min']:8.2f}{f['min_ratio']:8.2f}{f['paired']:8.2f}"
            print(f"  {name:34}{times}")
    print(f"\n{'rank 0, median s after the command':36}" + "".join(f"{stage:>17}" for stage in STAGES))
    for name, figures in result.items():
        print(f"  {name:34}" + "".join(f"{second:17.2f}" for second in figures["stages"]))
    print("\nCPU s of an interpreter that does nothing but (minimum)")
    for name, seconds in parts.items():
        print(f"  {name:34}{seconds:10.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, help="launches per contestant; default 8")
    parser.add_argument("--quick", action="store_true", help="one round: the figures mean little")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the promise is broken")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    adopt_orphans()
    if not (Path(sysconfig.get_path("scripts")) / "accelerate").exists():
        print("accelerate is not installed and left out")
        del CONTESTANTS["accelerate launch"]
    rounds = options.rounds or (1 if options.quick else 8)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTESTANTS}
    parts: dict[str, list[float]] = {name: [] for name in PARTS}
    order = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for title, (_, _, script) in CONTESTANTS.items():
            (folder / f"{title}.py").write_text(script, encoding="utf-8")
        for title in () if options.quick else ("torchrun", "weft launch, weft script"):
            launch(title, folder)  # fill the disk cache
        for _ in range(rounds):
            for title in order.sample(list(CONTESTANTS), len(CONTESTANTS)):
                runs[title].append(launch(title, folder))
            for title, code in PARTS.items():
                parts[title].append(timed([sys.executable, "-c", code])[2])
    result = summary(runs)
    print_tables(result, {title: min(values) for title, values in parts.items()})
    broken = False
    print()
    for title in ("weft launch", "weft launch, weft script"):
        for what in ("first_step", "cpu"):
            for statistic in ("median_ratio", "min_ratio"):
                ratio, control = result[title][what][statistic], result["control"][what][statistic]
                broken |= ratio > PROMISE
                verdict = "BROKEN" if ratio > PROMISE else "kept  "
                print(f"{verdict} {title}: {what}, {statistic} {ratio:.2f} <= {PROMISE} (control {control:.2f})")
    if options.json:
        options.json.write_text(json.dumps({"launch": result, "parts": parts}, indent=1) + "\n", encoding="utf-8")
    return 1 if options.check and broken else 0


if __name__ == "__main__":
    sys.exit(main())
