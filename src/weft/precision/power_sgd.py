"""`PowerSGD`: gradients that are approximated on their way between ranks."""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import listed, value_error


@dataclass(frozen=True, kw_only=True)
class PowerSGD:
    """How gradients are approximated on their way between ranks, for `replicate(compress=...)`.

    A matrix [rows, columns] travels as two thin ones, of `rank` columns; the error that is made is added to the next
    gradient. Each rank keeps it, in memory of 1x the gradients.

    Source: Vogels et al., "PowerSGD", NeurIPS 2019; `torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook`.

    Attributes:
        rank: Of the approximation, >= 1: 1 to 4 mostly, up to 32 for language models.
        start_step: Steps before it without compression, >= 2.
        min_rate: Matrices that would not become smaller by this factor travel as they are.
        seed: Of the first approximation.
    """

    rank: int = 1
    start_step: int = 1000
    min_rate: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = [f"rank={self.rank!r}"] if type(self.rank) is not int or self.rank < 1 else []
        wrong += [f"start_step={self.start_step!r}"] if type(self.start_step) is not int or self.start_step < 2 else []
        wrong += [f"min_rate={self.min_rate!r}"] if type(self.min_rate) is not int or self.min_rate < 1 else []
        if wrong:
            raise value_error(
                f"PowerSGD: {listed(wrong)} cannot be used",
                found=listed(wrong),
                expected="whole numbers: rank >= 1, start_step >= 2, min_rate >= 1",
                fix="weft.precision.PowerSGD(rank=2, start_step=1000)",
            )
