"""Torch's schedules of a pipeline: which stages a rank has, what they ask for, and how they are run.

Source: `torch.distributed.pipelining`. GPipe: Huang et al., 2019; 1F1B: Narayanan et al., "PipeDream", 2019;
interleaved: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021;
looped BFS: Lamy-Poirier, 2023; zero bubble: Qi et al., 2024; DualPipeV: DeepSeek-V3, 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from weft.checks import check_choice
from weft.errors import value_error


class Kind(NamedTuple):
    """One schedule of torch.

    Attributes:
        name: Of its class.
        per_rank: Stages per rank; None: any number from 2.
        is_v: Whether the second stages go back along the ranks, so that rank 0 has the first and the last one.
        min_micro: Whether it takes at least as many micro-batches as there are stages.
        in_rounds: Whether micro-batches come in rounds of as many as there are ranks.
    """

    name: str
    per_rank: int | None = 1
    is_v: bool = False
    min_micro: bool = False
    in_rounds: bool = False


SCHEDULES: Mapping[str, Kind] = MappingProxyType(
    {
        "1f1b": Kind("Schedule1F1B", min_micro=True),
        "gpipe": Kind("ScheduleGPipe"),
        "interleaved_1f1b": Kind("ScheduleInterleaved1F1B", None, in_rounds=True),
        "looped_bfs": Kind("ScheduleLoopedBFS", None),
        "interleaved_zero_bubble": Kind("ScheduleInterleavedZeroBubble", None, in_rounds=True),
        "zbv_zero_bubble": Kind("ScheduleZBVZeroBubble", 2, is_v=True),
        "dualpipe_v": Kind("ScheduleDualPipeV", 2, is_v=True, min_micro=True),
    }
)


def stages_per_rank(schedule: str) -> int:
    """How many stages a rank has if the user does not say."""
    check_choice("pipeline", "schedule", schedule, tuple(SCHEDULES))
    return SCHEDULES[schedule].per_rank or 2


def check_schedule(schedule: str, ranks: int, stages: int, micro_batches: int) -> None:
    """Raise if a schedule cannot run so many stages or micro-batches.

    Raises:
        ValueError: With the numbers.
    """
    kind = SCHEDULES[schedule]
    takes = [
        name
        for name, one in SCHEDULES.items()
        if _takes(one, ranks, stages) and _fits(one, ranks, stages, micro_batches)
    ]
    if not _takes(kind, ranks, stages):
        wanted = f"{kind.per_rank * ranks}" if kind.per_rank else f"a multiple of {ranks}, from {2 * ranks}"
        raise value_error(
            f"pipeline: schedule = {schedule!r} does not fit the number of stages",
            found=f"{stages} stages on {ranks} ranks",
            expected=f"{wanted} stages",
            fix=f'weft.pipeline(..., schedule="{takes[0]}")'
            if takes
            else f"weft.pipeline(..., stages=weft.plan_pipeline(model, {ranks * (kind.per_rank or 2)}))",
        )
    if not _fits(kind, ranks, stages, micro_batches):
        rounds = micro_batches // ranks
        wanted = f"at least {stages}" if kind.min_micro else f"a multiple of {rounds}, the number of rounds"
        raise value_error(
            f"pipeline: schedule = {schedule!r} does not fit the number of micro-batches",
            found=f"{micro_batches} micro-batches for {stages} stages on {ranks} ranks",
            expected=f"{wanted} micro-batches",
            fix=f'weft.pipeline(..., micro_batches={max(stages, ranks * rounds)}), or schedule="{takes[0]}"',
        )


def _takes(kind: Kind, ranks: int, stages: int) -> bool:
    """Whether a schedule runs so many stages."""
    per_rank, rest = divmod(stages, ranks)
    return not rest and (per_rank == kind.per_rank if kind.per_rank else per_rank >= 2)


def _fits(kind: Kind, ranks: int, stages: int, micro_batches: int) -> bool:
    """Whether a schedule runs so many micro-batches."""
    if kind.min_micro and micro_batches < stages:
        return False
    return not kind.in_rounds or micro_batches % max(1, micro_batches // ranks) == 0


def owners(schedule: str, ranks: int, stages: int) -> list[int]:
    """The rank that has each stage."""
    if SCHEDULES[schedule].is_v:
        return [number if number < ranks else stages - 1 - number for number in range(stages)]
    return [number % ranks for number in range(stages)]


def make_schedule(
    schedule: str,
    modules: Mapping[int, nn.Module],
    num_stages: int,
    group: dist.ProcessGroup,
    device: torch.device,
    micro_batches: int,
    borders: Callable[[int], tuple[torch.Tensor, ...]],
) -> Any:
    """Torch's schedule over the stages of this rank.

    Args:
        schedule: Of `SCHEDULES`.
        modules: The stages of this rank, by number.
        num_stages: Of all ranks.
        group: The ranks of the pipeline.
        device: Of this rank.
        micro_batches: How many.
        borders: Gives tensors on meta like those that leave a stage; of -1 there are none.
    """
    from torch.distributed.pipelining import PipelineStage, schedules  # noqa: PLC0415  (a second of imports in torch)

    kind = SCHEDULES[schedule]
    stages = [
        PipelineStage(module, n, num_stages, device, input_args=borders(n - 1), output_args=borders(n), group=group)
        for n, module in modules.items()
    ]
    run: Callable[..., Any] = getattr(schedules, kind.name)
    # What the last stage computes is the loss.
    options: dict[str, Any] = {"loss_fn": lambda output, _: output.sum(), "scale_grads": False}
    return run(stages if kind.per_rank != 1 else stages[0], micro_batches, **options)
