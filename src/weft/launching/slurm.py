"""The script for SLURM: one launcher per node, which starts its ranks, restarts them and says why they failed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from weft.launching.plan import FLAGS, LaunchPlan
from weft.peers.store import SECRET_VARIABLE


def batch_script(
    plan: LaunchPlan,
    script: Sequence[str],
    *,
    name: str,
    kind: str = "script",
    options: Sequence[str] = (),
    config: str | None = None,
) -> str:
    """Write what `sbatch` takes. A pure function.

    The nodes meet at the first node of the job, at a port that follows from the job's number, and know a secret that is
    made when it runs. SIGUSR1 comes two
    minutes before the time is over, for `weft.on_preemption`.

    Args:
        plan: How many processes and nodes.
        script: The script and its arguments.
        name: Of the job.
        kind: What the first of them is: "script", "module" or "program".
        options: More options of sbatch, such as "--partition=gpu"; the last one of a kind counts.
        config: A configuration file, for the ranks.

    Returns:
        The text of the script.
    """
    head = [
        f"--job-name={name}",
        f"--nodes={plan.nodes('-')}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={plan.nproc * plan.threads}",
        f"--output={name}-%j.log",
        "--signal=USR1@120",
    ]
    survives = plan.min_replicas is not None and plan.most_nodes > 1  # the loss of a node
    head += ["--no-kill"] if survives else []
    given = {option.partition("=")[0] for option in options}
    lines = [*(option for option in head if option.partition("=")[0] not in given), *options]
    command = ["weft", "launch", "-n", str(plan.nproc), "--nnodes", plan.nodes(":"), "--threads", str(plan.threads)]
    command += ["--max-restarts", str(plan.max_restarts)] if plan.max_restarts else []
    command += ["--min-replicas", str(plan.min_replicas)] if plan.min_replicas is not None else []
    command += ["--replica-ranks", str(plan.replica_ranks)] if plan.replica_ranks != 1 else []
    command += ["--events", plan.events] if plan.events is not None else []
    command += ["--affinity"] if plan.affinity else []
    command += ["--config", config] if config is not None else []
    words = [shlex.join(command), '--rdzv "$first:$port"' if plan.most_nodes > 1 else "", FLAGS[kind]]
    launch = " ".join(word for word in [*words, shlex.join(script)] if word)
    meeting = [
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "port=$((20000 + SLURM_JOB_ID % 20000))",
        f"export {SECRET_VARIABLE}=${{{SECRET_VARIABLE}:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')}}",
    ]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in lines),
            "set -euo pipefail",
            *(meeting if plan.most_nodes > 1 else []),
            f"srun {'--no-kill --kill-on-bad-exit=0' if survives else '--kill-on-bad-exit=1'} {launch}",
            "",
        ]
    )
