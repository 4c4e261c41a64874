"""What a job knows of the checkpoints in a directory, so that those of two runs, or of two branches, do not mix.

[Note: one run per directory] Each manifest names its run. A job takes the name from what it restores, or makes one up
with its first save. It saves into a directory only if what lies there was there when it restored from it, or is of
its own run, and if nothing is newer than what it saves: a restart would take that. What `restore` found damaged
does not count.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.checkpoint.format.manifest import NAME, Damage, read_head, step_of
from weft.checkpoint.format.remote import RemotePath
from weft.context import DistContext
from weft.errors import CheckpointError, listed

__all__ = ["History", "history_of"]


@dataclass
class _Job:
    """What one job knows, in this process.

    Attributes:
        own: The name of its run if it goes on with none; all replicas of an elastic job have the same.
        runs: Names of the runs that it goes on with; the first one is given to what it saves elsewhere.
        histories: By directory.
    """

    own: str
    runs: list[str] = field(default_factory=list)
    histories: dict[str, History] = field(default_factory=dict)


class History:
    """What this job knows of one directory.

    Attributes:
        run: Name of the run whose checkpoints these are; None as long as it has none.
    """

    def __init__(self, job: _Job) -> None:
        self.run: str | None = None
        self._job = job
        self._seen: set[int] = set()  # steps that were there when this job restored
        self._own: set[int] = set()  # steps that it saved since
        self._damaged: set[str] = set()  # names of folders
        self._sizes: dict[Path, tuple[Any, dict[Path, int]]] = {}

    def restored(self, run: str | None, there: Iterable[Path], damaged: Iterable[Path]) -> None:
        """Note what was restored, and what else was there.

        Args:
            run: That of the checkpoint; None if it names none.
            there: Folders of checkpoints in the directory.
            damaged: Those of them that were passed over.
        """
        if run is not None:
            self.belongs_to(run)
        self._seen = {step_of(path) for path in there}
        self._own.clear()
        self._damaged = {path.name for path in damaged}

    def belongs_to(self, run: str) -> None:
        """Note the name of the run."""
        self.run = run
        if run not in self._job.runs:
            self._job.runs.append(run)

    def name_run(self) -> str:
        """The name of the run, for the next manifest; one that is made up if it has none."""
        return self.run or next(iter(self._job.runs), self._job.own)

    def saved(self, folder: Path) -> None:
        """Note that this job saved a checkpoint."""
        self._damaged.discard(folder.name)
        self._own.add(step_of(folder))

    def is_of_another_replica(self, folder: Path) -> bool:
        """Whether a checkpoint of this job is there that this process has neither saved nor found when it restored."""
        return folder.exists() and step_of(folder) not in self._own | self._seen and self._is_ours(folder)

    def check(self, directory: Path, step: int, there: Iterable[Path]) -> None:
        """Raise if a checkpoint would be mixed with those of another run, or with a branch that was left.

        Args:
            directory: Of the run.
            step: That is to be saved.
            there: Folders of checkpoints in the directory.

        Raises:
            CheckpointError: It would.
            OSError: A checkpoint there cannot be read.
        """
        numbers = {path: step_of(path) for path in there if path.name not in self._damaged}
        foreign = [
            path.name
            for path, number in numbers.items()
            if number not in self._own | self._seen and not self._is_ours(path)
        ]
        if foreign:
            raise CheckpointError(
                f"save: {directory} holds checkpoints of another run",
                found=listed(foreign),
                expected="a directory for each run: a restart would take the newest, whoever saved it",
                fix="weft.restore(state, directory, ctx) first, to resume that run; or save into another directory",
            )
        newer = [path.name for path, number in numbers.items() if number > step and number not in self._own]
        if newer:
            raise CheckpointError(
                f"save: step {step} is lower than the steps of checkpoints in {directory}",
                found=listed(newer),
                expected="no newer checkpoint than the one that is saved: a restart would take it",
                fix="weft.restore(state, directory / 'step-...', ctx, discard_newer=True), or another directory",
            )

    def _is_ours(self, folder: Path) -> bool:
        try:
            return read_head(folder).run in (self._job.own, *self._job.runs)
        except Damage:
            return False

    def counts(self, folder: Path) -> bool:
        """Whether a checkpoint counts as one: not known to be damaged, and its files are there, of the right size.

        Its manifest is read once.

        Raises:
            OSError: Something cannot be read.
        """
        if folder.name in self._damaged:
            return False
        try:
            stamp = (folder / NAME).lstat()
            facts = (stamp.st_ino, stamp.st_mtime_ns, stamp.st_size)
            known, sizes = self._sizes.get(folder, (None, {}))
            if known != facts:
                sizes = {folder / name: size for name, size in read_head(folder).sizes.items()}
                self._sizes[folder] = facts, sizes
            return all(file.lstat().st_size == size for file, size in sizes.items())
        except (Damage, FileNotFoundError):
            return False

    def is_damaged(self, name: str) -> bool:
        """Whether `restore` passed a folder of this name over."""
        return name in self._damaged

    def forget(self, folder: Path) -> None:
        """Forget a checkpoint that is gone."""
        self._sizes.pop(folder, None)


def history_of(ctx: DistContext, directory: Path) -> History:
    """What the job of a context knows of a directory."""
    root = ctx.world.root
    if not isinstance(root.checkpoints, _Job):
        root.checkpoints = _Job(secrets.token_hex(8) if ctx.replicas is None else ctx.replicas.job())
    job = root.checkpoints
    where = str(directory) if isinstance(directory, RemotePath) else os.path.realpath(directory)
    return job.histories.setdefault(where, History(job))
