"""How a run ends in trackers: `RunTracker`, which can be closed; `closing`, for all of them; `in_background`."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from weft.checks import check_count
from weft.monitoring.values import Tracker
from weft.peers.pretended import rehearses
from weft.tensors.nested import map_tensors


class RunTracker:
    """A tracker that ends the run it writes to; made by all trackers of weft but `tensorboard`.

    In a rehearsal it writes nothing.
    """

    def __init__(self, write: Tracker, end: Callable[[], object] = lambda: None) -> None:
        self._write = write
        self._end: Callable[[], object] | None = end

    def __call__(self, values: dict[str, Any], /, *, step: int) -> None:
        """Write values of a step."""
        if not rehearses():
            self._write(values, step=step)

    def close(self) -> None:
        """Write what is pending and end the run; a second call does nothing."""
        end, self._end = self._end, None
        if end is not None:
            end()


def close(tracker: Tracker) -> None:
    """Close a tracker that can be closed."""
    end = getattr(tracker, "close", None)
    if callable(end):
        end()


def is_failing() -> bool:
    """Whether an error is on its way that is neither the end of the program by `sys.exit` nor of a generator."""
    return not isinstance(sys.exception(), SystemExit | GeneratorExit | None)


@contextmanager
def closing(trackers: Tracker | Iterable[Tracker]) -> Iterator[list[Tracker]]:
    """Close all trackers at the end, also after an error, and also if one of them cannot be closed.

    The runs of libraries are finished: those that know a status, W&B, MLflow and SwanLab, record an error as
    a failure. A tracker without a method `close`, such as a function, is left as it is.

    Changes: the trackers, at the end. Collectives: none.

    Args:
        trackers: One, or several.

    Yields:
        The trackers, as a list.

    Example:
        >>> import weft
        >>> with closing([lambda values, step: print(step, values)]) as trackers:
        ...     weft.log({"loss": 0.5}, 1, weft.local(), trackers)
        1 {'loss': 0.5}
        {'loss': 0.5}
    """
    given: list[Tracker] = [trackers] if callable(trackers) else list(trackers)
    with ExitStack() as stack:
        for each in reversed(given):
            stack.callback(close, each)
        yield given


def in_background(tracker: Tracker, *, limit: int = 1000) -> RunTracker:
    """A tracker that writes in a thread of its own, in the order of the calls, so that a step does not wait for it.

    Tensors are copied to the memory of the host when they are logged, so they may change afterwards. What is pending
    is written when the tracker is closed and at the end of the program, also after an error; a killed program loses
    it. An error of the other tracker is raised by the next call, or by `close`.

    Args:
        tracker: Any; nothing else may call it.
        limit: A call waits while so many calls are pending, so that a slow service cannot fill the memory.

    Returns:
        The tracker. Closing it closes the other one.

    Raises:
        ValueError: `limit` is less than 1.

    Source: `concurrent.futures.ThreadPoolExecutor` with one thread.

    Example:
        >>> seen = []
        >>> slow = in_background(lambda values, step: seen.append((step, values)))
        >>> for step in range(3):
        ...     slow({"loss": 1.0}, step=step)
        >>> slow.close()
        >>> [step for step, values in seen]
        [0, 1, 2]
    """
    check_count("in_background", "limit", limit, fix="weft.monitoring.in_background(tracker, limit=1000)")
    pool = ThreadPoolExecutor(1, thread_name_prefix="weft-log")
    pending: deque[Future[object]] = deque()

    def settle(most: int) -> None:
        """Raise the error of a call that is done; wait until at most so many are pending."""
        while pending and (len(pending) > most or pending[0].done()):
            pending.popleft().result()

    def write(values: dict[str, Any], /, *, step: int) -> None:
        settle(limit - 1)
        kept = map_tensors(lambda tensor: tensor.detach().to("cpu", copy=True), dict(values))
        pending.append(pool.submit(tracker, kept, step=step))

    def end() -> None:
        with ExitStack() as stack:  # in this order, and each also after an error
            stack.callback(close, tracker)
            stack.callback(pool.shutdown)
            settle(0)

    made = RunTracker(write, end)
    weakref.finalize(made, settle, 0)  # at the end of a program the thread is done: this shows its errors
    return made
