"""What `weft launch` will do: options of the command line, else of the file, else the defaults. Pure functions."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig

from weft.context.config import LAUNCH, Config, is_nodes
from weft.context.settings import layered
from weft.errors import ContextError
from weft.peers.store import SECRET_VARIABLE

FLAGS = MappingProxyType(
    {"script": "", "module": "-m", "program": "--no-python"}
)  # of the command line, by kind of target
MEETING_S = 900  # the nodes wait so long for each other


class LaunchPlan(NamedTuple):
    """Everything that is decided before a process is started.

    Attributes:
        nproc: Processes on this node.
        least_nodes: Nodes without which the job does not begin.
        most_nodes: Nodes that it takes at most; with fewer than that, late ones may join.
        node_rank: Rank of this node; None lets the rendezvous give ranks as nodes come.
        rdzv: Where the nodes meet, `host:port`; None for one node: a free port of this machine.
        max_restarts: How often all ranks are started again after one of them failed; with `min_replicas`, how often
            single ranks are.
        min_replicas: The ranks are replicas of an elastic job, which makes steps with so many of them at least;
            None: it is no elastic job.
        replica_ranks: Ranks of each replica.
        events: A file that losses and joins of replicas are appended to.
        threads: CPU threads of each process.
        affinity: Whether each process keeps to cores of its own.
        sources: Where each of these came from, by name of the option.
    """

    nproc: int = 1
    least_nodes: int = 1
    most_nodes: int = 1
    node_rank: int | None = None
    rdzv: str | None = None
    max_restarts: int = 0
    min_replicas: int | None = None
    replica_ranks: int = 1
    events: str | None = None
    threads: int = 1
    affinity: bool = False
    sources: tuple[tuple[str, str], ...] = ()

    def torch_config(self) -> LaunchConfig:
        """The same for torch's launcher; ranks are forked where the system can, else spawned."""
        static = self.most_nodes > 1 and self.node_rank is not None
        return LaunchConfig(
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # else a folder per launch, which is never removed
            min_nodes=self.least_nodes,
            max_nodes=self.most_nodes,
            nproc_per_node=self.nproc,
            run_id="weft" if self.rdzv is not None else str(uuid.uuid4()),
            rdzv_backend="static" if static else "c10d",
            rdzv_endpoint=self.rdzv or "localhost:0",
            rdzv_configs={"rank": self.node_rank or 0, "timeout": MEETING_S} if static else {"timeout": MEETING_S},
            max_restarts=self.max_restarts,
            monitor_interval=0.1,
            start_method="forkserver" if sys.platform.startswith("linux") else "spawn",
        )

    def variables(self, local_rank: int, named: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
        """What a rank of this node finds in its environment, as far as that is known before the nodes have met.

        Args:
            local_rank: Of the rank.
            named: Variables that the launcher sets besides.

        Returns:
            Names and values; a pure function of the plan.
        """
        found: dict[str, object] = {}
        alone = self.most_nodes == 1
        if alone or self.node_rank is not None:
            found["RANK"] = (self.node_rank or 0) * self.nproc + local_rank
            found["GROUP_RANK"] = self.node_rank or 0
        if self.least_nodes == self.most_nodes:
            found["WORLD_SIZE"] = self.nproc * self.most_nodes
            found["GROUP_WORLD_SIZE"] = self.most_nodes
        if not alone and self.node_rank is not None and self.rdzv is not None:
            found["MASTER_ADDR"], _, found["MASTER_PORT"] = self.rdzv.rpartition(":")
        found |= {"TORCHELASTIC_MAX_RESTARTS": self.max_restarts, "LOCAL_WORLD_SIZE": self.nproc}
        found |= {**named, "LOCAL_RANK": local_rank, "OMP_NUM_THREADS": self.threads}
        return {name: str(value) for name, value in found.items()}

    def replicas_of(self, node: int) -> range:
        """The numbers of the replicas of a node."""
        each = self.nproc // self.replica_ranks
        return range(node * each, (node + 1) * each)

    def ranks_of(self, replica: int) -> range:
        """The ranks of a replica."""
        return range(replica * self.replica_ranks, (replica + 1) * self.replica_ranks)

    def nodes(self, between: str) -> str:
        """The number of nodes, or the least and the most."""
        most = f"{between}{self.most_nodes}" if self.least_nodes != self.most_nodes else ""
        return f"{self.least_nodes}{most}"

    def text(
        self,
        script: Sequence[str],
        *,
        cores: Sequence[int],
        kind: str = "script",
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        """What `--dry-run` prints."""
        values = self._asdict() | {
            "nnodes": self.nodes(":"),
            "node_rank": "as they come" if self.node_rank is None else self.node_rank,
            "rdzv": self.rdzv or "a free port of this machine",
            "min_replicas": "all ranks, always" if self.min_replicas is None else self.min_replicas,
            "events": self.events or "no file",
            "affinity": "on" if self.affinity else "off",
        }
        lines = [f"  {name:<14}{values[name]!s:<30}from {source}" for name, source in self.sources]
        most = self.nproc * self.most_nodes
        least = self.nproc * self.least_nodes
        lines.append(f"world size: {most}" if least == most else f"world size: {least} to {most}")
        python = {"script": ["python"], "module": ["python", "-m"], "program": []}[kind]
        command = shlex.join([*python, *script])
        for rank in range(self.nproc):
            mine = cores_of(rank, self.nproc, cores) if self.affinity else ()
            place = " ".join(f"{name}={shlex.quote(text)}" for name, text in self.variables(rank, variables).items())
            lines.append(f"{place} {command}{'  # cores ' + ','.join(map(str, mine)) if mine else ''}")
        return "\n".join(["weft launch would start, on this node:", *lines])


def make_plan(given: Mapping[str, Any], file: Config | None, *, cores: int, omp_num_threads: str | None) -> LaunchPlan:
    """Take each option from its highest layer, and see whether they fit together.

    Args:
        given: Options of the command line; None means "not given".
        file: A configuration file.
        cores: Of this machine.
        omp_num_threads: The variable of this name, which somebody may have set.

    Returns:
        The plan.

    Raises:
        ContextError: Numbers out of range, or several nodes without `rdzv`.
    """
    of_file = ("", {}) if file is None else (file.path, file.launch)
    values, sources = layered(LAUNCH, ("the command line", given), {}, of_file)
    if values["threads"] is None:
        values["threads"], sources["threads"] = _threads(omp_num_threads, cores, values["nproc"])
    least, most = _nodes(values["nnodes"])
    for found, expected, options in _wrong(values, least, most):
        fix = f"weft launch {options} train.py"
        raise ContextError("launch: these options cannot be combined", found=found, expected=expected, fix=fix)
    del values["nnodes"]
    return LaunchPlan(**values, least_nodes=least, most_nodes=most, sources=tuple(sources.items()))


def secret_of(plan: LaunchPlan, environment: Mapping[str, str]) -> str:
    """What only the processes of a job know; "" if it has no secret.

    It is that of the environment. A job on one node gets one otherwise; several nodes could not tell each other.
    """
    return environment.get(SECRET_VARIABLE) or (secrets.token_hex(16) if plan.most_nodes == 1 else "")


def _threads(variable: str | None, cores: int, nproc: int) -> tuple[int, str]:
    if variable is not None and variable.isdecimal() and int(variable) > 0:
        return int(variable), "environment OMP_NUM_THREADS"
    return max(cores // max(nproc, 1), 1), f"default: {cores} cores, shared out"


def _nodes(value: Any) -> tuple[int, int]:
    if not is_nodes(value):
        return 0, 0
    least, _, most = str(value).partition(":")
    return int(least), int(most or least)


def _wrong(values: Mapping[str, Any], least: int, most: int) -> Iterator[tuple[str, str, str]]:
    """What does not fit: what was found, what is expected, and options that can be combined."""
    node_rank, each = values["node_rank"], max(values["replica_ranks"], 1)
    nodes = "-n 2 --nnodes 2 --node-rank 0 --rdzv first-node:29500"
    replicas = f"-n {2 * each} --min-replicas 1" + (f" --replica-ranks {each}" if each > 1 else "")
    if values["nproc"] < 1 or least < 1 or not 0 <= (node_rank or 0) < most:
        found = f"-n {values['nproc']} --nnodes {values['nnodes']} --node-rank {node_rank}"
        yield found, "counts >= 1, 0 <= node rank < nodes", "-n 2" if values["nproc"] < 1 or least < 1 else nodes
    if values["max_restarts"] < 0:
        yield f"--max-restarts {values['max_restarts']}", "0 or more", "-n 2 --max-restarts 3"
    if values["min_replicas"] is not None and not _are_replicas(most, **values):
        several = f" --replica-ranks {values['replica_ranks']}" if values["replica_ranks"] != 1 else ""
        several += f" --nnodes {values['nnodes']}" if most > 1 else ""
        found = f"-n {values['nproc']} --min-replicas {values['min_replicas']}{several}"
        yield found, "1 <= least replicas <= replicas, each of the same number of processes", replicas
    if values["min_replicas"] is None and values["replica_ranks"] != 1:
        yield f"--replica-ranks {values['replica_ranks']}, no --min-replicas", "both, for an elastic job", replicas
    if values["min_replicas"] is None and values["events"] is not None:
        events = f"--events {values['events']}"
        yield f"{events}, no --min-replicas", "both, for an elastic job", f"{replicas} {events}"
    if values["threads"] < 1:
        yield f"--threads {values['threads']}", "1 or more", "-n 2 --threads 1"
    if most > 1 and values["rdzv"] is None:
        yield f"--nnodes {values['nnodes']}, no --rdzv", "the address of the first node", nodes
    if values["rdzv"] is not None and not _is_address(values["rdzv"], most):
        expected = "host:port; port 0, a free one, for one node only"
        yield f"--rdzv {values['rdzv']}", expected, nodes if most > 1 else "-n 2"
    if least < most and node_rank is not None:
        found = f"--nnodes {values['nnodes']} --node-rank {node_rank}"
        yield found, "no node rank where nodes come and go", f"-n 2 --nnodes {least}:{most} --rdzv first-node:29500"


def _are_replicas(nodes: int, nproc: int, min_replicas: int, replica_ranks: int, **rest: Any) -> bool:
    return replica_ranks >= 1 and nproc % replica_ranks == 0 and 1 <= min_replicas <= nodes * nproc // replica_ranks


def _is_address(text: str, nodes: int) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and (nodes > 1) <= int(port) < 2**16


def cores_of(local_rank: int, nproc: int, cores: Sequence[int]) -> tuple[int, ...]:
    """The cores that a process keeps to: consecutive ones, so that neighbours share a memory.

    Example:
        >>> [cores_of(rank, 2, [0, 1, 2, 3, 4]) for rank in (0, 1)], cores_of(2, 4, [7])
        ([(0, 1), (2, 3)], (7,))
    """
    share = len(cores) // nproc
    return tuple(cores[local_rank * share : (local_rank + 1) * share]) if share else (cores[local_rank % len(cores)],)
