"""A copy of the state in the memory of the machine, which outlives the processes of a job but not its launcher.

It is a checkpoint in a folder of the launcher that lies in memory (tmpfs), and is read as one.
"""

from __future__ import annotations

from pathlib import Path

from weft.checkpoint.restore import restore
from weft.checkpoint.save import save
from weft.checkpoint.state.collect import Checkpoint
from weft.checkpoint.storage.find import latest
from weft.context import DistContext


class MemoryCopy:
    """The newest copy of the state of a job.

    Attributes:
        every: A copy is made every so many steps; None: never.
        step: Of the copy that was there when this replica began; -1 if there was none.
    """

    def __init__(self, folder: Path | None, every: int | None, state: Checkpoint, ctx: DistContext) -> None:
        self.every = every if folder is not None else None
        self._folder, self._state, self._ctx = folder or Path(), state, ctx
        self.step = self._newest()

    def _newest(self) -> int:
        found = None if self.every is None else latest(self._folder)
        return -1 if found is None else int(found.name.rpartition("-")[2])

    def make(self, step: int) -> None:
        """Copy the state if it is time to; called by the ranks of one replica."""
        # A replica that died after its copy may have been the only one to have made the step.
        if self.every is not None and step % self.every == 0 and step > self._newest():
            save(self._state, self._folder, step, self._ctx, keep=1)

    def load(self) -> int:
        """Give the objects the state of the copy; returns its step."""
        found = restore(self._state, self._folder, self._ctx)
        assert found is not None
        return found.step
