"""Signals that come to every process of a job, as schedulers send them: workers end with their rank, not before it.

A rank that is asked to end saves first, and may need its workers until then. If one of them ends, torch raises in the
rank.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name))
_LOOK_S = 0.1  # how often a worker that got a signal looks whether its rank lives


class _SignalStart:
    """What a worker does first: it prepares for signals, and calls the function that it was given."""

    def __init__(self, rest: Callable[[int], None] | None, is_over: Any) -> None:
        self._rest, self._is_over, self._rank = rest, is_over, 0

    def __call__(self, worker: int) -> None:
        self._rank = os.getppid()
        for number in _SIGNALS:
            if number == signal.SIGTERM or signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if self._rest is not None:
            self._rest(worker)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Also of the rank itself, which ends workers that are stuck by SIGTERM: then it is over already.
        threading.Thread(target=self._end_with_rank, daemon=True).start()

    def _end_with_rank(self) -> None:
        while not self._is_over.value and os.getppid() == self._rank:
            time.sleep(_LOOK_S)
        os._exit(0)


def workers_outlive_signals(view: DataLoader[Any], iterate: Callable[[], Any]) -> Any:
    """Make an iterator whose workers no signal ends before their rank needs them no more.

    Args:
        view: The loader that the workers are of.
        iterate: Makes the iterator, and starts them.
    """
    is_over = (view.multiprocessing_context or multiprocessing).RawValue("b", 0)  # in memory that all of them share
    view.__dict__["worker_init_fn"] = _SignalStart(view.worker_init_fn, is_over)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # workers inherit that, until they are prepared
    try:
        iterator = iterate()
        # When it is gone, or this process ends: before it ends its workers and waits for them.
        Finalize(iterator, setattr, (is_over, "value", 1), exitpriority=0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return iterator
