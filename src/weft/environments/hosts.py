"""Lists of hosts, as schedulers write them."""

from __future__ import annotations

import re

from weft.environments.facts import EnvironmentFacts
from weft.errors import ContextError


def first_host(nodelist: str) -> str:
    """Name the first host of a SLURM node list.

    Args:
        nodelist: For example `gpu[03-05,9],login1` or `node7`.

    Returns:
        The first host, leading zeros kept.

    Raises:
        ContextError: The list is empty or its brackets do not match.

    Example:
        >>> first_host("gpu[03-05,9]"), first_host("a[1-2]b[7,8],c"), first_host("node7,node8")
        ('gpu03', 'a1b7', 'node7')
    """
    first = re.match(r"((?:[^\[\],]|\[[^\[\]]*\])+)(?:,|$)", nodelist.strip())
    host = "" if first is None else re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[1])
    if not host or "[" in host:
        raise ContextError(
            "topology: the SLURM node list cannot be read",
            found=repr(nodelist),
            expected="a list such as node[1-4,7],login1",
            fix="export MASTER_ADDR=<host of rank 0>",
        )
    return host


def tasks_per_node(text: str) -> list[int]:
    """Expand SLURM's `2(x3),1` into [2, 2, 2, 1].

    Example:
        >>> tasks_per_node("2(x3),1")
        [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def lsf_hosts(facts: EnvironmentFacts) -> list[tuple[str, int]]:
    """Hosts of an LSF job with their slots, in its order; none if it does not say.

    Raises:
        ContextError: The list is not one of names and numbers.

    Example:
        >>> lsf_hosts(EnvironmentFacts({"LSB_MCPU_HOSTS": "batch1 1 a01 4 a02 4"}))
        [('batch1', 1), ('a01', 4), ('a02', 4)]
    """
    words = (facts.text("LSB_MCPU_HOSTS") or "").split()
    if words:
        if len(words) % 2 or not all(count.isdecimal() for count in words[1::2]):
            raise ContextError(
                "topology: LSB_MCPU_HOSTS cannot be read",
                found=f"LSB_MCPU_HOSTS={facts.env['LSB_MCPU_HOSTS']!r}",
                expected="hosts and numbers of slots, as in 'a01 4 a02 4'",
                fix="export MASTER_ADDR=<host of rank 0>",
            )
        return [(name, int(count)) for name, count in zip(words[::2], words[1::2], strict=True)]
    names = (
        facts.lines("LSB_DJOB_RANKFILE") or facts.lines("LSB_DJOB_HOSTFILE") or (facts.text("LSB_HOSTS") or "").split()
    )
    names = [name.split()[0] for name in names]
    return [(name, names.count(name)) for name in dict.fromkeys(names)]


def main_host(facts: EnvironmentFacts, num_nodes: int) -> str | None:
    """The host of rank 0, where the scheduler around an MPI knows it.

    Args:
        facts: Of SLURM or LSF.
        num_nodes: On which the ranks run.

    Returns:
        The first host of the job; of LSF the first one that runs ranks.
    """
    nodelist = facts.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if nodelist is not None:
        return first_host(nodelist)
    hosts = lsf_hosts(facts)
    if len(hosts) > num_nodes and hosts[0][1] == 1:
        hosts = hosts[1:]  # it runs the script of the job, and no rank
    return hosts[0][0] if hosts else None
