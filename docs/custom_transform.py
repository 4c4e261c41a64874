"""A transform of your own: sum the gradients of all ranks instead of averaging them.

Only public names are used, and every law of `weft.testing.laws` holds.
"""

from typing import TypeVar

import torch
import torch.distributed as dist

import weft

M = TypeVar("M", bound=torch.nn.Module)


class SumOverRanks:
    """Offers `GradSync`: later transforms say where a window begins and ends.

    They divide by `mean_over`.
    """

    mean_over = 1  # a sum: nothing is averaged

    def __init__(self, module: torch.nn.Module, ctx: weft.DistContext) -> None:
        self.group, self.waits = ctx.group, False
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        # gradients of micro-batches before the last
        self.waiting: dict[int, torch.Tensor] = {}
        self.hooks = [
            p.register_hook(self.reduce_of(i)) for i, p in enumerate(self.parameters)
        ]

    def reduce_of(self, index: int):
        def reduce(gradient: torch.Tensor) -> torch.Tensor:
            total = gradient + self.waiting.pop(index, torch.zeros(()).to(gradient))
            if self.waits:
                self.waiting[index] = total
                return torch.zeros_like(gradient)
            dist.all_reduce(total, group=self.group)
            return total

        return reduce

    def begin_window(self) -> None:
        self.waits = True

    def last_backward(self) -> None:
        self.waits = False

    def end_window(self, *, left: bool = False) -> None:
        self.waits = False
        if left:
            self.waiting.clear()
        # the last micro-batch was skipped, on all ranks
        for index in list(self.waiting):
            parameter = self.parameters[index]
            parameter.grad += self.reduce_of(index)(torch.zeros_like(parameter))

    def undo(self) -> None:
        for hook in self.hooks:
            hook.remove()


@weft.transform(
    after={"with_precision"},
    before={"accumulate_grads"},
    excludes={"replicate", "fully_shard", "zero_partition"},
    collective=True,
)
def sum_gradients(module: M, ctx: weft.DistContext) -> tuple[M, weft.DistContext]:
    """Sum the gradients of all ranks; every rank starts from rank 0's parameters."""
    ctx.agree(
        "sum_gradients", {"parameters": sum(p.numel() for p in module.parameters())}
    )
    if ctx.world_size == 1:
        return module, ctx
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.detach(), src=ctx.ranks[0], group=ctx.group)
    return module, ctx.offering(SumOverRanks(module, ctx))
