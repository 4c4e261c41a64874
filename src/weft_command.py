"""The `weft` command, up to the point where torch is needed.

It lies outside of the package because importing `weft` imports torch. `weft launch` starts the
process that ranks are forked from first, so that both import torch at the same time.
"""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> int:
    """Run the `weft` command."""
    if sys.argv[1:2] == ["launch"] and not {"-h", "--help"} & set(sys.argv[2:3]):
        _start_fork_server(sys.argv[2:])
    try:
        import weft.cli  # noqa: PLC0415  (imports torch)

        return weft.cli.main(sys.argv[1:])
    except KeyboardInterrupt:
        return 130


def _start_fork_server(arguments: list[str]) -> None:
    import multiprocessing  # noqa: PLC0415  (not for `weft --help`)
    from multiprocessing import forkserver  # noqa: PLC0415

    if "forkserver" not in multiprocessing.get_all_start_methods():
        return
    # Read by OpenMP when torch is imported; the ranks share the cores of this machine.
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(os.cpu_count() or 1, _ranks(arguments))))  # noqa: TID251
    multiprocessing.set_forkserver_preload(["weft.cli.preload"])
    forkserver.ensure_running()


def threads_per_rank(cores: int, ranks: int) -> int:
    """Cores shared out among ranks, at least one each.

    Example:
        >>> [threads_per_rank(4, ranks) for ranks in (1, 2, 3, 4, 8)]
        [4, 2, 1, 1, 1]
    """
    return max(cores // max(ranks, 1), 1)


def _ranks(arguments: list[str]) -> int:
    """The number after `-n`, before the real parser is there."""
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name in ("-n", "--nproc"):
            value = value if equals else next(rest, "")
        elif argument[:2] == "-n":
            value = argument[2:]
        elif name in ("--nnodes", "--node-rank", "--rdzv", "--max-restarts"):
            value = value if equals else next(rest, "")
            continue
        else:
            break  # -m, or the script: what follows is not ours
        return int(value) if value.isdecimal() else 1
    return 1
