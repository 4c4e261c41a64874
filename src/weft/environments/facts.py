"""Environment variables as facts: numbers, texts, files, and clear errors where they are not what they should be."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from weft.environments.topology import DEFAULT_PORT
from weft.errors import ContextError


class EnvironmentFacts:
    """A mapping of strings, with numbers that name their variable when they are wrong."""

    def __init__(self, env: Mapping[str, str], read_file: Callable[[str], str] | None = None) -> None:
        self.env = env
        self._read_file = read_file

    def has(self, *names: str) -> bool:
        """Whether all of `names` are set, and not to nothing."""
        return all(self.env.get(name, "") != "" for name in names)

    def text(self, *names: str) -> str | None:
        """The first of `names` that is set."""
        return next((self.env[name] for name in names if self.has(name)), None)

    def number(self, *names: str) -> int | None:
        """The first of `names` that is set, as a whole number >= 0."""
        name = next((name for name in names if self.has(name)), None)
        if name is None:
            return None
        text = self.env[name].strip()
        if not text.isdecimal():
            raise ContextError(
                f"topology: {name} = {self.env[name]!r} is not a whole number",
                found=f"{name}={self.env[name]!r}",
                expected="a whole number >= 0",
                fix="start every rank with one launcher, e.g. `weft launch -n 2 script.py`",
            )
        return int(text)

    def number_or(self, default: int, *names: str) -> int:
        """As `number`, or a default if none of `names` is set."""
        value = self.number(*names)
        return default if value is None else value

    def required(self, *names: str, beside: str) -> int:
        """As `number`, but one of `names` must be set because `beside` is."""
        value = self.number(*names)
        if value is None:
            raise ContextError(
                f"topology: {beside} is set, but {names[0]} is not",
                found=f"{beside}={self.env[beside]!r}, {names[0]} unset",
                expected=f"both {beside} and {names[0]}, as a launcher sets them",
                fix="start the script with `weft launch -n 2 script.py`, or unset " + beside,
            )
        return value

    def both(self, rank: str, size: str) -> tuple[int, int]:
        """Rank and world size, of which neither has a meaning alone."""
        return self.required(rank, beside=size), self.required(size, beside=rank)

    def lines(self, name: str) -> list[str]:
        """The lines of the file that a variable names; none if it is not set, or files are not read."""
        path = self.text(name)
        if path is None or self._read_file is None:
            return []
        try:
            return [line for line in self._read_file(path).splitlines() if line.strip()]
        except OSError as error:
            raise ContextError(
                f"topology: the file that {name} names cannot be read",
                found=f"{name}={path!r}: {error.strerror or error}",
                expected="a list of hosts, written by the scheduler",
                fix="export MASTER_ADDR=<host of rank 0>",
            ) from error


def port_of(facts: EnvironmentFacts) -> int:
    """The port of the store: said, or derived from the number of the job."""
    port = facts.number("MASTER_PORT")
    if port is not None and not 1 <= port <= 65535:
        raise ContextError(
            f"topology: MASTER_PORT = {port} is not a port",
            found=f"MASTER_PORT={facts.env['MASTER_PORT']!r}",
            expected="1 to 65535",
            fix=f"export MASTER_PORT={DEFAULT_PORT}",
        )
    if port is not None:
        return port
    job = facts.text("SLURM_JOB_ID", "SLURM_JOBID", "LSB_JOBID")
    # Two jobs on one node must not meet: derive the port from the job when there is one.
    return 15000 + int(job) % 20000 if job is not None and job.isdecimal() else DEFAULT_PORT
