"""What a job knows of the checkpoints in a directory, so that those of two runs, or of two branches, do not mix.

[Note: one run per directory] Each manifest names its run. A job takes the name from what it restores, or makes one up
with its first save. It saves into a directory only if what lies there was there when it came, and is of its own run,
and if nothing is newer than what it saves: a restart would take that. What is damaged does not count.

A job that resumes goes back to the step that it restores. In another directory, such as that of the best checkpoints,
there may be some of its run that are newer: of a branch that was abandoned. They make room for those that it saves.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from weft.checkpoint.format.manifest import Damage, step_of
from weft.checkpoint.storage.bucket import RemotePath
from weft.checkpoint.storage.protocol import Storage
from weft.context import DistContext
from weft.errors import CheckpointError, listed


class ManifestSummary(NamedTuple):
    """What a manifest says about a checkpoint as a whole.

    Attributes:
        run: Name of its run, if it has one.
        score: Given to `save`, if one was.
        sizes: Bytes of each file.
    """

    run: str | None
    score: float | None
    sizes: dict[str, int]


@dataclass
class _JobHistory:
    """What one job knows, in this process.

    Attributes:
        own: The name of its run if it continues none; all replicas of an elastic job have the same.
        is_elastic: Whether its replicas save in turn.
        runs: Names of the runs that it continues; the first one is given to what it saves elsewhere.
        resumed: The step that it has restored; None if it has restored nothing.
        histories: By directory.
    """

    own: str
    is_elastic: bool
    runs: list[str] = field(default_factory=list)
    resumed: int | None = None
    histories: dict[str, History] = field(default_factory=dict)


class History:
    """What this job knows of one directory.

    Attributes:
        run: Name of the run whose checkpoints these are; None as long as it has none.
        abandoned: Names of checkpoints of a branch of this run that was abandoned.
    """

    def __init__(self, job: _JobHistory) -> None:
        self.run: str | None = None
        self.abandoned: set[str] = set()
        self._job = job
        self._has_come = False  # into this directory
        self._seen: set[int] = set()  # steps that were there when this job came
        self._own: set[int] = set()  # steps that it has saved since
        self._tried: set[int] = set()  # steps that it has tried to save
        self._damaged: set[str] = set()  # names of checkpoints
        self._facts: dict[str, tuple[object, ManifestSummary]] = {}

    def note_restored(self, run: str | None, step: int, there: Iterable[str], damaged: Iterable[str]) -> None:
        """Note what was restored, and what else was there.

        Args:
            run: That of the checkpoint; None if it names none.
            step: Of the checkpoint.
            there: Names of checkpoints in the directory.
            damaged: Those of them that were passed over.
        """
        if run is not None:
            self.belongs_to(run)
        for other in self._job.histories.values():  # what is there, it has to look at again
            other._has_come = False
            other._seen, other._own, other.abandoned = set(), set(), set()
        self._job.resumed = step
        self._has_come = True
        self._seen = {step_of(name) for name in there}
        self._damaged = set(damaged)

    def belongs_to(self, run: str) -> None:
        """Note the name of the run."""
        self.run = run
        if run not in self._job.runs:
            self._job.runs.append(run)

    def name_run(self) -> str:
        """The name of the run, for the next manifest; one that is made up if it has none."""
        return self.run or next(iter(self._job.runs), self._job.own)

    def note_attempt(self, name: str) -> None:
        """Note that this job begins to save a checkpoint: whatever becomes of it, it is no other job's."""
        self._tried.add(step_of(name))

    def note_saved(self, name: str) -> None:
        """Note that this job has saved a checkpoint."""
        self._damaged.discard(name)
        self.abandoned.discard(name)
        self._own.add(step_of(name))

    def is_of_another_replica(self, storage: Storage, name: str, there: Sequence[str]) -> bool:
        """Whether a checkpoint of this job is there that this process has neither saved nor found when it came."""
        return name in there and step_of(name) not in self._own | self._seen and self._is_ours(storage, name)

    def begin_anew(self, storage: Storage, there: Sequence[str]) -> list[str]:
        """If this job comes into the directory only now, give the checkpoints of other runs there another name.

        Returns:
            Names of the checkpoints that are left.
        """
        if not self._has_come:
            for name in self._of_other_runs(storage, there):
                storage.set_aside(name)
                self.forget(name)
        return storage.names()

    def check(self, storage: Storage, step: int, there: Sequence[str]) -> None:
        """Raise if a checkpoint would be mixed with those of another run, or with a branch that was left.

        Args:
            storage: Where it is to be saved.
            step: Of the checkpoint.
            there: Names of the checkpoints that are there.

        Raises:
            CheckpointError: It would.
            OSError: A checkpoint there cannot be read.
        """
        where = storage.where
        foreign = self._of_other_runs(storage, there)
        if foreign:
            raise CheckpointError(
                f"save: {where} holds checkpoints of another run",
                found=listed(foreign),
                expected="a directory for each run: a restart would take the newest, whoever saved it",
                fix="weft.restore(state, directory, ctx)  # resumes that run; or begin anew: weft.save(..., fresh=True)"
                if not self._has_come
                else "end one of the two jobs; or save into another directory",
            )
        unknown = [name for name in self._unknown(there) if name not in self._damaged]
        others = [name for name in unknown if step_of(name) not in self._tried]
        if others and self._has_come and not self._job.is_elastic:
            raise CheckpointError(
                f"save: another job of this run saves into {where}",
                found=f"saved since this job came: {listed(others)}",
                expected="one job at a time: a restart would take the newest, whoever saved it",
                fix="end one of the two jobs; or save into another directory",
            )
        if not self._has_come and self._job.resumed is not None:
            self.abandoned = {name for name in unknown if step_of(name) > self._job.resumed}
        self._has_come = True
        self._seen |= {step_of(name) for name in unknown}
        passed_over = self._damaged | self.abandoned
        newer = [n for n in there if step_of(n) > step and step_of(n) not in self._own and n not in passed_over]
        if newer:
            older = [n for n in there if step_of(n) <= step and n not in passed_over]
            restore = f'weft.restore(state, "{where / max(older, key=step_of, default="")}", ctx, discard_newer=True)'
            raise CheckpointError(
                f"save: step {step} is lower than the steps of checkpoints in {where}",
                found=listed(newer),
                expected="no newer checkpoint than the one that is saved: a restart would take it",
                fix=f"{restore}  # or another directory" if older else "save into another directory",
            )

    def _unknown(self, there: Sequence[str]) -> list[str]:
        return [name for name in there if step_of(name) not in self._own | self._seen]

    def _of_other_runs(self, storage: Storage, there: Sequence[str]) -> list[str]:
        unknown = self._unknown(there)
        return [name for name in unknown if not self._is_ours(storage, name) and name not in self._damaged]

    def _is_ours(self, storage: Storage, name: str) -> bool:
        try:
            return self.facts(storage, name).run in (self._job.own, *self._job.runs)
        except Damage:
            self._damaged.add(name)
            return False

    def facts(self, storage: Storage, name: str) -> ManifestSummary:
        """What the manifest of a checkpoint says, which is read once.

        Raises:
            Damage: There is none.
            CheckpointError: It is of another version of the format.
            OSError: It cannot be read.
        """
        try:
            stamp: Any = storage.stamp(name)
        except FileNotFoundError:
            stamp = None
        known, facts = self._facts.get(name, (None, None))
        if facts is None or stamp is None or known != stamp:
            manifest = storage.manifest(name)
            sizes = {file: entry.bytes for file, entry in manifest.files.items()}
            facts = ManifestSummary(manifest.run, manifest.score, sizes)
            self._facts[name] = stamp, facts
        return facts

    def counts(self, storage: Storage, name: str) -> bool:
        """Whether a checkpoint counts as one: not known to be damaged, and its files are there, of the right size.

        Raises:
            OSError: Something cannot be read.
        """
        if name in self._damaged:
            return False
        try:
            sizes = self.facts(storage, name).sizes
        except Damage:
            return False
        return storage.sizes(name, sizes) == sizes

    def forget(self, name: str) -> None:
        """Forget a checkpoint that is gone."""
        self._facts.pop(name, None)


def history_of(ctx: DistContext, directory: Path) -> History:
    """What the job of a context knows of a directory."""
    root = ctx.world.root
    if not isinstance(root.checkpoints, _JobHistory):
        is_elastic = ctx.replicas is not None
        root.checkpoints = _JobHistory(secrets.token_hex(8) if ctx.replicas is None else ctx.replicas.job(), is_elastic)
    job = root.checkpoints
    where = str(directory) if isinstance(directory, RemotePath) else os.path.realpath(directory)
    return job.histories.setdefault(where, History(job))
