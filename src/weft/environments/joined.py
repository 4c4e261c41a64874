"""Whether the variables of a launcher are meant for this process, or for the rank that started it.

What a rank starts (an evaluation script, a worker) inherits its environment. A rank that has joined its job says so
there, so that none of these joins in its place.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, MutableMapping

JOINED_VARIABLE = "WEFT_JOINED"
_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
# Each launcher has names of its own for ranks and jobs; a nested one sets at least some of them anew.
_PREFIXES = (
    *("MASTER_", "TORCHELASTIC_", "WEFT_REPLICA", "SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP"),
    *("OMPI_COMM_", "PMI_", "PMIX_", "PALS_", "JSM_", "TPU_WORKER_"),
)


def note_joined(env: MutableMapping[str, str]) -> None:
    """Note in `env` that this process is the rank which its variables speak of."""
    env[JOINED_VARIABLE] = f"{os.getpid()}:{_launch_digest(env)}"


def forget_joined(env: MutableMapping[str, str]) -> None:
    """Take the note back, if it is that of this process: the rank has left."""
    if env.get(JOINED_VARIABLE, "").startswith(f"{os.getpid()}:"):
        del env[JOINED_VARIABLE]


def is_inside_a_rank(env: Mapping[str, str]) -> bool:
    """Whether the variables of the launcher are those of a rank that runs, and not this process.

    Args:
        env: Of this process.

    Returns:
        False for the rank itself, without a launcher, and for what another launcher, inside the rank, has started.
    """
    process, _, place = env.get(JOINED_VARIABLE, "").partition(":")
    return process not in ("", str(os.getpid())) and place == _launch_digest(env)


def _launch_digest(env: Mapping[str, str]) -> str:
    """A digest of everything by which launchers say which rank of which job it is."""
    said = sorted((name, text) for name, text in env.items() if name in _NAMES or name.startswith(_PREFIXES))
    return hashlib.blake2b(repr(said).encode(errors="surrogateescape"), digest_size=8).hexdigest()
