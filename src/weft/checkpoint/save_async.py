"""`save_async`: the state is copied at once, and written and committed while the program continues.

[Note: in the background] The copy is the only thing the program waits for. Then a thread writes,
hashes and syncs, all of which let other threads run: steps of a training loop beside it are as long as
beside a process that does the same, and a thread needs no shared memory, leaves nothing behind and ends
with its process. It meets the other ranks through the store, in a world of its own (same ranks,
keys of their own), so it makes no collective of torch and no meeting of the program. A rank
that dies, or gives up, is named to all; nothing is committed without every rank's file.
"""

from __future__ import annotations

import math
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from weft.checkpoint.draft import Outline, Saving, complete, outline, start_saving
from weft.checkpoint.save import check_ready_to_save, note_rehearsed_save
from weft.checkpoint.staging import Staging
from weft.checkpoint.state.collect import Checkpoint, with_user_hooks
from weft.checkpoint.storage.find import step_folder
from weft.collectives.on_all_ranks import num_threads, on_all
from weft.context import DistContext, World
from weft.context.placement import value_device
from weft.errors import CheckpointError, PeerError, listed
from weft.peers.agreement import absentees
from weft.peers.liveness import announce, exception_text, part
from weft.peers.pretended import PretendedGroup

_WHAT = "save_async"
_STOP_S = 2.0  # a thread that waits for peers looks up every half second


def save_async(
    state: Checkpoint,
    directory: str | Path,
    step: int,
    ctx: DistContext,
    *,
    keep: int | None = None,
    keep_best: int | None = None,
    score: float | None = None,
    fresh: bool = False,
) -> RunningSave:
    """Write a checkpoint as `save` does, while the program continues.

    When it returns, the state has been copied to host memory and may change: the checkpoint holds the values of the
    moment of the call. Writing and committing happen in a thread, with the same protocol and guarantees as `save`. A
    save that begins before this one has ended waits for it, and so does leaving the context and the end of the program.
    The memory of the copy is kept for the next save.

    Changes: nothing of the state; the directory. Keeps host memory of the size of what this rank writes,
    and a thread until the save has ended. Collectives: meetings through the store, none of torch; those
    in the background have keys of their own.

    Args:
        state: From `checkpointable`.
        directory: Of the run, on a file system all ranks share; created if missing. Or a URL, as for `save`.
        step: Number of the checkpoint, >= 0 and below 10**18; its folder is `step-<number>`.
        ctx: The context whose ranks take part; all of them call it.
        keep: After the checkpoint is complete, remove all but the newest `keep` checkpoints by step.
        keep_best: As for `save`.
        score: As for `save`.
        fresh: As for `save`.

    Returns:
        The running save: `wait()` gives the folder once it is complete, or raises; `done()` tells
        without waiting.

    Raises:
        CheckpointError: As with `save`: the step, or the directory, is not free for it, or names are too long.
        TypeError: Something in the state cannot be saved; the text names it.
        ValueError: An argument is out of range.
        PeerError: Another rank failed, or does something else that waits for this one.
        OSError: The hidden folder cannot be made, or the save before this one failed unseen.

    Example:
        >>> import tempfile, torch, weft
        >>> model = torch.nn.Linear(2, 2)
        >>> state, ctx = weft.checkpointable({"model": model}, weft.local())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     running = weft.save_async(state, folder, 10, ctx)
        ...     _ = model.weight.data.zero_()               # the checkpoint has the values before it
        ...     running.wait().name
        'step-00000010'
    """
    where, kept = check_ready_to_save(_WHAT, state, directory, step, ctx, keep, keep_best, score, fresh)
    if isinstance(ctx.world.group, PretendedGroup):
        with with_user_hooks("save", state, ctx):
            _, mine = on_all(_WHAT, ctx, lambda: outline(state, ctx))
        return _nothing_to_do(note_rehearsed_save(where, step, mine, ctx.world.group))
    saver = _saver_of(ctx.world)
    beside = replace(ctx, world=saver.open_board(ctx.world))
    with with_user_hooks("save", state, ctx):
        brought, staged = on_all(_WHAT, ctx, lambda: saver.staged(state, ctx))
    saving = start_saving(_WHAT, where, step, brought, ctx, fresh=fresh)
    if saving is None:
        return _nothing_to_do(step_folder(where, step))
    second_half = partial(complete, saving, brought, staged, beside, keep=kept, score=score)
    return saver.start(saving, second_half, beside.world)


class RunningSave:
    """A save in the background, as returned by `save_async`.

    An error that no `wait` has raised is raised by the next save, or when the context is closed.

    Attributes:
        path: The folder that appears when the checkpoint is complete.
    """

    def __init__(self, path: Path, future: Future[None], thread: ThreadPoolExecutor) -> None:
        self.path = path
        self._future = future
        self._thread = thread
        self._seen = False

    def done(self) -> bool:
        """Whether it has ended, well or not; returns at once. Collectives: none."""
        return self._future.done()

    def wait(self) -> Path:
        """Wait until the checkpoint is on the disk and complete. Collectives: none; any rank may ask.

        Returns:
            The folder of the checkpoint.

        Raises:
            OSError: Writing failed, with the reason of the system; nothing was committed.
            CheckpointError: The state differed between the ranks.
            PeerError: Another rank failed or died; names it.
        """
        self.ends_within(math.inf)
        self._seen = True
        self._future.result()
        return self.path

    def ends_within(self, limit_s: float) -> bool:
        """Wait, at most so long, for its end; no error is raised."""
        if wait_for([self._future], None if math.isinf(limit_s) else limit_s).not_done:
            return False
        self._thread.shutdown()  # the thread itself has at most to end
        return True

    def unseen_error(self) -> BaseException | None:
        """What made it fail, if it did; once, and not if `wait` told."""
        error = self._future.exception() if self.done() and not self._seen else None
        self._seen = self._seen or error is not None
        return error


def _nothing_to_do(path: Path) -> RunningSave:
    done: Future[None] = Future()
    done.set_result(None)
    return RunningSave(path, done, ThreadPoolExecutor(1))


class _Saver:
    """The saves of one process beside its program: one at a time, in the same memory."""

    patience_s = 0.0

    def __init__(self) -> None:
        self._staging = Staging()
        self._board: World | None = None
        self.leaving = False  # this process, before its peers came
        self._running: list[RunningSave] = []
        weakref.finalize(self, _report, self._running)

    def staged(self, state: Checkpoint, ctx: DistContext) -> tuple[Outline, Iterator[Any]]:
        """Read the state and copy what this rank writes."""
        brought, mine = outline(state, ctx)
        copies = self._staging.copy(mine, value_device(ctx), num_threads=num_threads(ctx))
        brought.replicas.result()  # the state may change from now on
        return brought, copies

    def open_board(self, world: World) -> World:
        """The same ranks, for meetings of the next save; all ranks have ended the one before."""
        _clear(self._board)
        self._board = World(ranks=world.ranks, rank=world.rank, timeout_s=world.timeout_s)
        self._board.watch, self.leaving = self, False
        if world.store is not None and world.size > 1:
            self._board.store = world.store.below(f"saving/{world.meetings}")
            announce(self._board)
            near = world.root.near or range(world.root.size)
            self._board.near = [rank for rank, member in enumerate(world.members()) if member in near]
        return self._board

    def start(self, saving: Saving, second_half: Callable[[], None], board: World) -> RunningSave:
        """Start the thread."""
        try:
            thread = ThreadPoolExecutor(1, thread_name_prefix="weft save")
            running = RunningSave(saving.path, thread.submit(_work, saving, second_half, board), thread)
        except BaseException as error:
            saving.ending.__exit__(type(error), error, None)
            raise
        thread.shutdown(wait=False)  # it ends after this
        self._running[:] = [running]
        return running

    def finish(self, limit_s: float) -> BaseException | None:
        """See `Background`."""
        if not self._running:
            return None
        (running,) = self._running
        if not running.ends_within(limit_s):
            self.leaving = True  # the next look at the peers is the last one
            if not running.ends_within(_STOP_S):
                return CheckpointError(
                    f"{_WHAT}: the checkpoint was not complete when the program exited",
                    found=f"still writing after {limit_s:g} s: {running.path}",
                    expected="a disk that can store the state within that time",
                    fix="running.wait()  # before leaving; or weft.start(timeout_s=...)",
                )
        return running.unseen_error()

    def check(self, what: str, ranks: Sequence[int], world: World) -> None:
        """See `Watcher`; ends the waiting of the thread for its peers.

        Raises:
            PeerError: This rank leaves.
        """
        if self.leaving:
            missing = absentees(world)
            text = f"rank {listed(missing)} did not come before this rank left"
            raise PeerError(f"{what}: {text}; nothing was committed", rank=missing[0] if missing else -1, text=text)

    def release(self) -> None:
        """See `Watcher`."""


def _work(saving: Saving, second_half: Callable[[], None], board: World) -> None:
    """In the thread."""
    try:
        with saving.ending:
            second_half()
    except BaseException as error:
        part(board, error)  # for ranks that still wait for this one
        traceback.clear_frames(error.__traceback__)  # they hold the copy of the state
        raise


def _saver_of(world: World) -> _Saver:
    root = world.root
    if not isinstance(root.background, _Saver):
        root.background = _Saver()
    return root.background


def _clear(board: World | None) -> None:
    """Remove what a save left in the store."""
    if board is None or board.store is None:
        return
    kinds = ["peer", "parted", "meet/at"]
    keys = [f"{kind}/{board.rank}" for kind in kinds]
    if board.rank == 0:
        last = range(max(board.meetings - 1, 1), board.meetings + 2)
        keys += [f"meet/{number}/{name}" for number in last for name in ("count", "done")]
        notes = range(1, board.store.add("note/count", 0) + 1)
        keys += ["parted/count", "note/count", *(f"note/{each}" for each in notes)]
    for key in keys:
        board.store.delete(key)


def _report(running: list[RunningSave]) -> None:
    """The end of a program that never asked whether its last save succeeded."""
    for each in running:
        error = each.unseen_error()
        if error is not None:
            text = f"weft: {_WHAT} of {each.path.name} failed: {exception_text(error)}"
            print(text, file=sys.stderr)  # noqa: T201  (the program is over: too late to raise it)
