"""The end of a job that is asked to end: all ranks stop after the same step, and say so by their exit code.

A signal comes to some ranks, at any moment of a step, and ranks may be a step apart. No rank may stop at a
step that another one is past already, so the ranks agree through the store, and only when there was a signal.

[Note: the last step] Keys, below a prefix of its own:
    asked        what signal came to which rank
    at/<rank>    the last step after which this rank may continue; null if it asks no more
    count        how many ranks have written that; the last of them writes
    last         the largest of the steps plus one, the step to stop after; null: no rank stops
A thread of each rank looks for `asked` now and then, and answers while the main thread is in the middle of
a step, perhaps waiting for a rank that waits for this answer. From then on the rank may not continue
before `last` is known. The thread also sees signals of its own rank while the main thread is in C++, as in a wait for
a device: Python calls no handler before that ends.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any, ClassVar, Self

from weft.context.distcontext import DistContext
from weft.errors import ContractError, listed, value_error
from weft.peers.agreement import wait_for_key
from weft.peers.store import RankStore, StoreLost
from weft.peers.world import PREEMPTED, SAME_SIGNAL_S, World

_PERIOD_S = 0.5


def on_preemption(ctx: DistContext, *, signals: Sequence[signal.Signals] = (signal.SIGTERM,)) -> Preemption:
    """Watch for the signal that asks a job to end, so that it can save first and resume another time.

        preempted = weft.on_preemption(ctx)
        for step, batch in enumerate(loader, start=first):
            ...
            if preempted(step):
                weft.save(state, directory, step, ctx)
                raise SystemExit(preempted.exit_code)

    If the signal comes to any rank, `preempted(step)` is true on all ranks after the same step, at most one
    after the step that the fastest rank is in; until then asking costs less than a microsecond and sends
    nothing. A signal that comes again more than a second later does what it did before: it ends the process.

    Changes: installs a handler for the signals, until the context is closed, or `release` is called, or
    the block of `with weft.on_preemption(ctx) as preempted:` ends. With several ranks it starts a thread.
    Collectives: none; a meeting through the store here, and a few messages after a signal.

    Args:
        ctx: Whose ranks stop together.
        signals: Which ones; e.g. `signal.SIGUSR1` too, if the scheduler was asked to send it in time.

    Returns:
        What is asked after each step, on every rank, with the number of the step.

    Raises:
        ValueError: Not on the main thread, or something that is no signal.
        ContractError: One of the signals is watched already.
        ContextError: The ranks watch different signals.
        PeerError: Another rank failed.

    Example:
        >>> import weft
        >>> with weft.local() as ctx:
        ...     preempted = weft.on_preemption(ctx)
        ...     before = preempted(1)
        ...     signal.raise_signal(signal.SIGTERM)
        ...     before, preempted(2), preempted.reason
        (False, True, 'SIGTERM on rank 0')
    """
    chosen = _checked(signals)
    world = ctx.require_collective("on_preemption")
    ctx.agree("on_preemption", {"signals": [each.name for each in chosen]})
    preemption = Preemption(world, chosen)
    world.root.holders.add(preemption)
    return preemption


def _checked(signals: Sequence[signal.Signals]) -> list[signal.Signals]:
    wrong: tuple[str, ...] | None = None
    fix = "weft.on_preemption(ctx, signals=(signal.SIGTERM, signal.SIGUSR1))"
    chosen: list[signal.Signals] = []
    try:
        chosen = [signal.Signals(each) for each in signals]
    except (TypeError, ValueError) as error:
        wrong = (str(error), "signals of the module signal")
    if threading.current_thread() is not threading.main_thread():
        wrong = (f"the thread {threading.current_thread().name!r}", "the main thread: signals come to no other")
        fix = "preempted = weft.on_preemption(ctx)  # on the main thread; other threads may ask it"
    elif wrong is None and not chosen:
        wrong = ("no signals", "at least one")
    elif {"SIGKILL", "SIGSTOP"} & {each.name for each in chosen}:
        wrong = (listed(each.name for each in chosen), "signals that a process can catch: not SIGKILL and SIGSTOP")
    if wrong is not None:
        raise value_error("on_preemption: cannot watch", found=wrong[0], expected=wrong[1], fix=fix)
    watched = [each.name for each in chosen if isinstance(getattr(signal.getsignal(each), "__self__", 0), Preemption)]
    if watched:
        raise ContractError(
            "on_preemption: a signal is already being watched",
            found=listed(watched),
            expected="one watch for each signal in a process",
            fix="preempted.release()  # or: with weft.on_preemption(ctx) as preempted:",
        )
    return chosen


class Preemption:
    """Says after each step whether to stop there; what `on_preemption` returns.

    Attributes:
        exit_code: For `SystemExit`: 75, by which a scheduler knows that the job is to be started again.
        reason: The signal and the rank it came to, once it is known that all ranks stop; before, empty.
    """

    exit_code: ClassVar[int] = PREEMPTED

    def __init__(self, world: World, signals: Sequence[signal.Signals]) -> None:
        self.reason = ""
        self._world = world
        self._store = world.store if world.size > 1 else None
        self._key = f"preemption/{world.meetings}"
        self._signal = ""
        self._signal_s = 0.0
        self._unhandled = 0  # signals that the thread has seen, and Python's handler not yet
        self._ending = 0  # the number of one that came again
        self._step = -1
        self._asked = False
        self._last: float | None = None
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._process = os.getpid()
        self._before: dict[signal.Signals, Any] = {each: signal.getsignal(each) for each in signals}
        for each in signals:
            signal.signal(each, self._on_signal)
        self._arrivals = _SignalPipe(use=self._store is not None)
        self._thread: threading.Thread | None = None
        if self._store is not None:
            self._thread = threading.Thread(target=self._listen, name="weft preemption", daemon=True)
            self._thread.start()

    def __call__(self, step: int) -> bool:
        """Whether all ranks stop after this step; the same answer on every rank.

        Args:
            step: Its number, on every rank the same. May be asked several times, and steps left out.

        Raises:
            ValueError: A step before the last one.
            PeerError: Another rank failed while the ranks agreed.
        """
        if self._signal and not self._asked:
            self._answer()
        with self._lock:
            if step < self._step:
                raise value_error(
                    f"on_preemption: asked after step {step}, and before that after step {self._step}",
                    found=f"{step} < {self._step}",
                    expected="a step count that continues across epochs",
                    fix="for step, batch in enumerate(loader, start=epoch * len(loader)): ...",
                )
            if not self._asked:
                self._step = step
                return False
        if self._last is None:
            self._last = self._agreed()
        return step >= self._last

    # -- the signal ------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # forked later; workers of loaders have handlers of their own
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        came = self._arrivals.take()
        unhandled, self._unhandled = self._unhandled, 0
        if unhandled and not came and not self._ending:
            return  # the thread has noted it
        if self._note(number) or self._ending:
            self._restore()
            signal.raise_signal(number)

    def _note(self, number: int) -> bool:
        """Note a signal; whether it came again."""
        now = time.monotonic()
        if not self._signal:
            self._signal_s = now
            self._signal = f"{signal.Signals(number).name} on rank {self._world.rank}"
        return now - self._signal_s > SAME_SIGNAL_S

    def _restore(self) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, signal.SIG_DFL if before is None else before)

    # -- the agreement ---------------------------------------------------------------------------

    def _listen(self) -> None:
        with contextlib.suppress(StoreLost):  # and with it everybody to agree with
            while not self._end.wait(_PERIOD_S):
                if self._ending and self._unhandled:  # the main thread has not come back from C++
                    os._exit(128 + self._ending)
                for number in self._arrivals.take():
                    if number in self._before:
                        self._unhandled += 1
                        self._ending = number if self._note(number) else 0
                if not self._asked and (self._signal or (self._store and self._store.has(f"{self._key}/asked"))):
                    self._answer()

    def _answer(self, *, leaving: bool = False) -> None:
        """Write down the last step after which this rank may continue; once."""
        with self._lock:
            if self._asked:
                return
            self._asked = True
            mine = None if leaving or self._world.root.closed else self._step
        world, store = self._world, self._store
        if store is None:
            return
        if self._signal:
            store.claim(f"{self._key}/asked", self._signal)
        store.write(f"{self._key}/at/{world.rank}", mine)
        if store.add(f"{self._key}/count", 1) == world.size:
            keys = [f"{self._key}/at/{rank}" for rank in range(world.size)]
            steps = [store.parsed(key, text) for key, text in zip(keys, store.values(keys), strict=True)]
            last = None if None in steps else max(steps) + 1
            store.write(f"{self._key}/last", last)

    def _agreed(self) -> float:
        """The step to stop after; infinite if there is a rank that will not come to it."""
        world, store = self._world, self._store
        if store is None:
            self.reason = self._signal
            return self._step + 1
        found = wait_for_key(world, f"{self._key}/last", "on_preemption", lambda: self._silent(store))
        last = store.parsed(f"{self._key}/last", found)
        if last is None:
            return math.inf
        self.reason = store.get(f"{self._key}/asked").decode()
        return float(last)

    def _silent(self, store: RankStore) -> list[int]:
        """The ranks that have not written down a step."""
        said = store.values([f"{self._key}/at/{rank}" for rank in range(self._world.size)])
        return [rank for rank, step in enumerate(said) if step is None and rank != self._world.rank]

    # -- the end ---------------------------------------------------------------------------------

    def release(self) -> None:
        """Watch no more: give the signals back to what handled them before. Idempotent.

        A program that is ending by `SystemExit(preempted.exit_code)` keeps ignoring a signal that comes twice.
        The other ranks will not wait for this one, and will not stop either.
        """
        if self._end.is_set():
            return
        self._end.set()
        with contextlib.suppress(StoreLost):  # then there are no peers left
            self._answer(leaving=True)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * _PERIOD_S)
        self._arrivals.close()
        # The same signal may come once more while the program ends as the first one asked.
        leaving = sys.exc_info()[1]
        if isinstance(leaving, SystemExit) and leaving.code == self.exit_code:
            return
        if os.getpid() == self._process and threading.current_thread() is threading.main_thread():
            self._restore()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class _SignalPipe:
    """The numbers of signals that came, as C notes them at once; Python calls the handlers later."""

    def __init__(self, *, use: bool) -> None:
        """`use`: Note them; unless an event loop does, which has the only place for that."""
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        self._close = weakref.finalize(self, _close_pipe, *self._pipe)
        if use:
            before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            if before != -1:
                signal.set_wakeup_fd(before)
            # What comes to a fork, such as a worker of a loader, did not come to this process.
            os.register_at_fork(after_in_child=self._close)

    def take(self) -> bytes:
        """Those that came since the last call."""
        with contextlib.suppress(OSError):  # there are none
            return os.read(self._pipe[0], 4096)
        return b""

    def close(self) -> None:
        """Note no more. Idempotent; does nothing in other threads than the main one."""
        if threading.current_thread() is threading.main_thread():
            self._close()


def _close_pipe(read: int, write: int) -> None:
    with contextlib.suppress(ValueError):  # in another thread: C may still write there
        now = signal.set_wakeup_fd(-1)
        if now != write:
            signal.set_wakeup_fd(now)
        os.close(read)
        os.close(write)
