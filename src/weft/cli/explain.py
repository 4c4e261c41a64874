"""`weft explain`: every setting of `weft.start` and `weft launch`, and which layer it comes from."""

from __future__ import annotations

import argparse
import os
from typing import Any

from weft.context.config import Config, read_config
from weft.context.settings import CONFIG_VARIABLE, resolve
from weft.environments import cores_here, topology
from weft.launching.plan import make_plan


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    sub = commands.add_parser(
        "explain",
        help="print every setting and where it comes from",
        description="Print what weft.start and weft launch would work with here, and from which layer each value is: "
        "argument, environment, file, default. Nothing is started.",
    )
    sub.add_argument("--config", metavar="FILE", help=f"a TOML file; default: the one {CONFIG_VARIABLE} names")


def run(options: argparse.Namespace) -> int:
    """Print; returns 0."""
    env = os.environ  # noqa: TID251  (this command is about it)
    path = options.config or env.get(CONFIG_VARIABLE)
    file = read_config(path) if path else Config("", {}, {})
    place = topology(env)
    settings = resolve({}, env, place.source, (file.path, file.start))
    plan = make_plan({}, file, cores=len(cores_here()), omp_num_threads=env.get("OMP_NUM_THREADS"))
    rank = f"{place.rank} of {place.world_size}"
    values = {**settings._asdict(), "rank, world_size": rank}
    lines = ["[start]"]
    lines += [f"  {name:<18}{_text(values[name]):<26}from {source}" for name, source in settings.sources]
    options_of_plan = {**plan._asdict(), "nnodes": plan.nodes(":")}
    lines += ["[launch]"]
    lines += [f"  {name:<18}{_text(options_of_plan[name]):<26}from {source}" for name, source in plan.sources]
    print("\n".join(lines))  # noqa: T201
    return 0


def _text(value: object) -> str:
    if value is None:
        return "not set"
    if isinstance(value, dict):
        return ",".join(f"{name}={size}" for name, size in value.items())
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
