"""`log_start`: what a program is that begins or resumes a run, for the report and for readers of the log."""

from __future__ import annotations

import datetime as dt
import json
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from weft.context import DistContext, explain
from weft.monitoring.log import log
from weft.monitoring.values import HParams, Tracker, plain
from weft.version import __version__


def log_start(
    step: int,
    ctx: DistContext,
    trackers: Tracker | Iterable[Tracker],
    *,
    steps: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Log what a program is that begins or resumes a run; call it once, before the first step.

    Two texts are logged: "explain", the context as `weft.explain` prints it, and "program", a line of JSON with the
    time, the command line, the number of ranks and hosts, the first host, the device, the transforms, the versions of
    weft, torch and Python, the git commit of the script, `steps` and `settings`. `weft report` shows them for each
    start, and compares them between runs. The command line is written as it is: give secrets in another way.

    The settings are also logged as `HParams`, so that every tracker stores them once, where it keeps the configuration
    of a run; a value that is neither number, text nor truth becomes a text.

    Changes: nothing. Collectives: those of `weft.log`.

    Args:
        step: The last step that is done: 0, or that of the checkpoint which was restored.
        ctx: After all transforms.
        trackers: As for `weft.log`.
        steps: Of the whole run, for the time left.
        settings: Hyperparameters by name, such as `vars(options)`.

    Example:
        >>> import weft
        >>> log_start(0, weft.local(), lambda values, step: print(step, sorted(values)), settings={"lr": 0.1})
        0 ['explain', 'program', 'settings']
    """
    program = json.dumps(program_facts(ctx, steps, settings or {}), default=str) if ctx.is_main else ""
    configuration = {"settings": HParams({n: plain(value) for n, value in settings.items()})} if settings else {}
    log({**configuration, "explain": explain(ctx), "program": program}, step, ctx, trackers)


def program_facts(ctx: DistContext, steps: int | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a program is, as `log_start` writes it."""
    device = torch.cuda.get_device_name(ctx.device) if ctx.device.type == "cuda" else ctx.device.type
    return {
        "started": f"{dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M:%SZ}",
        "command": shlex.join(sys.argv),
        "host": socket.gethostname(),
        "nodes": ctx.num_nodes,
        "ranks": ctx.world_size,
        "device": device,
        "attempt": ctx.attempt,
        "transforms": ", ".join(dict.fromkeys(record.name for record in ctx.applied)),
        "versions": f"weft {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "commit": _git_commit(Path(sys.argv[0]).resolve().parent),
        "steps": steps,
        "settings": dict(settings),
    }


def _git_commit(folder: Path) -> str:
    """Of the repository that a folder is in, with "-dirty" if files in it were changed; empty if there is none."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip()
