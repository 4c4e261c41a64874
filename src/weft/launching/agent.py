"""The launcher proper: torch's agent, which starts the ranks, watches them and starts them again."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.multiprocessing.api import (
    MultiprocessContext,
    PContext,
    RunProcsResult,
    SignalException,
    SubprocessContext,
)
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import create_rdzv_handler
from torch.distributed.launcher.api import elastic_launch
from typing_extensions import override

from weft import torch_internals
from weft.errors import ContextError
from weft.launching.failures import HAS_PREEMPTED, Ending, earlier_tracebacks, ended_by, first_failure
from weft.launching.plan import LaunchPlan
from weft.launching.rank_main import ROUND
from weft.peers.connect import interface_to, is_here, store_at, store_of_launcher
from weft.peers.world import SAME_SIGNAL_S
from weft.private_names import replaced

_BACKEND, _STATIC = "weft-c10d", "weft-static"
_READ_S = 60  # as torch has it
# Besides those that end a job: the ones by which schedulers say that the time is nearly over. Passed on to the ranks.
PASSED_ON = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)


def supervise(plan: LaunchPlan, target: Callable[..., None] | str, *arguments: Any, folder: Path) -> Ending:
    """Run `target` on all ranks of this node until they have ended, one way or the other.

    Args:
        plan: How many ranks and nodes.
        target: A function that can be imported, or a program.
        arguments: Of the target, the same for all ranks.
        folder: In which ranks leave their reports.

    Returns:
        How it ended; the text has the traceback of the rank that failed first.
    """
    # The agent logs every failure at length; the one that came first is reported instead.
    for name in (
        "distributed.elastic.multiprocessing.api",
        "distributed.elastic.agent.server.api",
        "multiprocessing.spawn",
    ):
        logging.getLogger(f"torch.{name}").setLevel(logging.CRITICAL)
    config = plan.torch_config()
    # torch's own listen at all addresses of this machine.
    rendezvous_handler_registry.register(_STATIC, _static_rendezvous)
    rendezvous_handler_registry.register(_BACKEND, _rendezvous)
    if config.rdzv_backend == "static":
        config = replace(config, rdzv_backend=_STATIC)
    else:
        # torch takes the name of the machine, which other machines often cannot resolve.
        host = config.rdzv_endpoint.rpartition(":")[0] if plan.most_nodes > 1 else "127.0.0.1"
        mine = host if is_here(host) else interface_to(host).rpartition(" ")[2]
        more = {"folder": folder, "alone": plan.most_nodes == 1}
        config = replace(config, rdzv_backend=_BACKEND, local_addr=mine, rdzv_configs=config.rdzv_configs | more)
    started: list[_RankProcesses] = []
    try:
        with _own_ranks(started):
            elastic_launch(config, target)(*arguments)
    except ChildFailedError as error:
        left = started[-1].left if started and plan.most_nodes == 1 else {}  # none of other programs
        ending = first_failure(error, folder, attempt=plan.max_restarts, left=left)
    except SignalException as error:
        have_saved = len(list(folder.glob("*.preempted"))) >= plan.nproc
        ending = HAS_PREEMPTED if have_saved else ended_by(error.sigval)
    except RendezvousError as error:
        text = f"weft launch: the nodes did not meet at {plan.rdzv}: {error.__cause__ or error}"
        ending = Ending(1, f"{text}\n  fix:      weft doctor --rdzv {plan.rdzv}, on each node")
    else:
        ending = Ending()
    return ending._replace(text=(earlier_tracebacks(folder, ending.trace) + ending.text).rstrip())


class _Started(PContext):
    """The processes of this node. A signal to the launcher ends them, also one that comes while they are started."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for method in (torch_internals.START, torch_internals.CLOSE):
            method.check()
        super().__init__(*args, **kwargs)
        self._signal_s: float | None = None
        self._is_started = False

    @override
    def _start(self) -> None:
        # An error out of the start of one process would leave those before it, of which the agent would not know.
        early: list[int] = []
        numbers = PASSED_ON if threading.current_thread() is threading.main_thread() else ()
        for each in numbers:  # in place of torch's handlers
            signal.signal(each, lambda number, _: early.append(number))
        try:
            torch_internals.START.of(super())()
            self._is_started = True
        finally:
            for each in numbers:
                signal.signal(each, self.on_signal)
        for number in early[:1]:
            self.on_signal(number, None)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """End the ranks, once; a signal that comes later is passed on."""
        # torch's handler raises each time, also out of what is done about the first signal.
        if self._signal_s is None or number == signal.SIGINT:  # who presses Ctrl-C again is in a hurry
            self._signal_s = time.monotonic()
            raise SignalException(f"signal {number}", sigval=signal.Signals(number))
        if time.monotonic() - self._signal_s > SAME_SIGNAL_S:
            self._send(number)

    @override
    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        self._wake()
        torch_internals.CLOSE.of(super())(death_sig, timeout)

    def _wake(self) -> None:
        """All are about to be ended; one that is stopped would not see it, and be waited for."""
        self._send(signal.SIGCONT)

    def _send(self, number: int) -> None:
        for pid in self.pids().values() if self._is_started else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class _Programs(_Started, SubprocessContext):
    """Programs that are no Python."""


class _RankProcesses(_Started, MultiprocessContext):
    """The ranks of this node. One that ended without a message, by `os._exit(0)` or so, has ended.

    Attributes:
        left: Process ids of these, by their number on this node.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        torch_internals.POLL.check()
        super().__init__(*args, **kwargs)
        self.left: dict[int, int] = {}

    @override
    def _poll(self) -> RunProcsResult | None:
        # torch waits for the return value of each, which such a rank never sends.
        context, values = torch_internals.PROCESSES.of(self), torch_internals.VALUES.of(self)
        processes = [] if context is None else context.processes
        for local_rank, process in enumerate(processes):
            ended = process.exitcode == 0  # as the system has it; a value was sent before
            if ended and local_rank not in values and torch_internals.QUEUES.of(self)[local_rank].empty():
                values[local_rank] = None
                self.left[local_rank] = process.pid
        if any(process.exitcode for process in processes):
            self._wake()
        return torch_internals.POLL.of(super())()  # type: ignore[no-any-return]


@contextlib.contextmanager
def _own_ranks(started: list[_RankProcesses]) -> Iterator[None]:
    """Let torch's agent start its ranks as `_RankProcesses`, and note those of each attempt."""

    def start(*args: Any, **kwargs: Any) -> _RankProcesses:
        started.append(_RankProcesses(*args, **kwargs))
        return started[-1]

    try:
        with replaced(multiprocessing, MultiprocessContext=start, SubprocessContext=_Programs):
            yield
    finally:
        for each in PASSED_ON:
            if getattr(signal.getsignal(each), "__func__", None) is _Started.on_signal:
                signal.signal(each, signal.SIG_IGN)  # nothing is left to end but this process, which has an exit code


def _static_rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    """Torch's rendezvous of nodes that have ranks."""
    handler: Any = create_rdzv_handler(parameters)
    meet = handler.next_rendezvous

    def next_rendezvous() -> RendezvousInfo:
        if torch_internals.RANKS_STORE.of(handler) is None:
            at, serves = (handler.master_addr, handler.master_port), handler.rank == 0
            if not serves:
                store_of_launcher(*at, _READ_S)  # the other one waits for all nodes
            limits = {"world_size": handler.world_size, "timeout": handler.timeout}
            torch_internals.RANKS_STORE.set(handler, store_at(*at, _READ_S, serves=serves, **limits))
        return meet()  # type: ignore[no-any-return]

    handler.next_rendezvous = next_rendezvous
    handler.get_backend = lambda: _STATIC
    return handler  # type: ignore[no-any-return]


def _rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    """The rendezvous of torch's agent. Of several nodes, it also reports to the ranks here how often these have met."""
    folder, alone = parameters.config["folder"], parameters.config["alone"]
    store = dist.HashStore() if alone else _store_of_nodes(*parameters.endpoint.rpartition(":")[::2])
    handler: Any = create_handler(store, C10dRendezvousBackend(store, parameters.run_id), parameters)
    meet = handler.next_rendezvous

    def next_rendezvous() -> RendezvousInfo:
        found = meet()
        (folder / ROUND).write_text(str(torch_internals.NODES_MET.of(handler).state.round), encoding="utf-8")
        return found  # type: ignore[no-any-return]

    if not alone:
        handler.next_rendezvous = next_rendezvous
    torch_internals.RANKS_SERVE.set(handler, partial(store_at, limit_s=_READ_S))  # for the ranks
    # torch compares it with what was asked for.
    handler.get_backend = lambda: _BACKEND
    return handler  # type: ignore[no-any-return]


def _store_of_nodes(host: str, port: str) -> dist.TCPStore:
    """Where the launchers of several nodes meet."""
    # torch compares names to find out which node serves the store; a machine may have more addresses than names.
    if is_here(host):
        with contextlib.suppress(ContextError):  # another launcher on this machine was first
            return store_at(host, int(port), _READ_S, timeout=timedelta(seconds=_READ_S))
    return store_of_launcher(host, int(port), _READ_S)
