"""`explain`: a context as text, every value with where it came from."""

from __future__ import annotations

import torch.distributed as dist

from weft.context.distcontext import DistContext


def explain(ctx: DistContext) -> str:
    """Describe a context: the place of this rank, the settings and their sources, the pipeline and what it chose.

    Changes: nothing. Collectives: none.

    Args:
        ctx: Any context.

    Returns:
        A table as text.

    Example:
        >>> import weft
        >>> print(explain(weft.local()).splitlines()[0])
        rank 0 of 1 on cpu
    """
    lines = [f"rank {ctx.rank} of {ctx.world_size} on {ctx.device}"]
    lines.append(f"node {ctx.node_rank} of {ctx.num_nodes}, process {ctx.local_rank} of {ctx.local_world_size}")
    axes = ", ".join(f"{name}={size}{'' if name in ctx.data_axes else ' (same data)'}" for name, size in ctx.axes)
    lines.append(f"mesh: {axes}")
    values = {
        "seed": ctx.seed,
        "timeout_s": ctx.timeout_s,
        "debug": ctx.debug,
        "probes": ctx.probes,
        "device": ctx.device,
        "mesh": dict(ctx.axes),
        "data_axes": ", ".join(ctx.data_axes),
        "backend": "none, one rank" if ctx.group is None else dist.get_backend(ctx.group),
    }
    for name, source in ctx.sources:
        value = values.get(name, f"{ctx.rank}, {ctx.world_size}" if name == "rank, world_size" else "")
        lines.append(f"  {name:<16} {value!s:<20} from {source}".rstrip())
    lines.append("pipeline:" if ctx.applied else "pipeline: nothing applied yet")
    for index, record in enumerate(ctx.applied, start=1):
        lines.append(f"  {index}. {record}")
        lines += [f"     chosen: {record.chosen}"] if record.chosen else []
    return "\n".join(lines)
