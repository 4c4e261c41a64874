"""`check_element`: are your functions of gradients right in a `grad_chain`, under strategies that shard?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from weft.context import DistContext
from weft.grads import Element
from weft.testing.law_job import Job, Parts, Row
from weft.testing.laws import leaves_no_trace, one_rank_changes_nothing, ranks_equal_reference
from weft.transforms.fully_shard import fully_shard
from weft.transforms.grad_chain import grad_chain
from weft.transforms.replicate import replicate
from weft.transforms.tensor_parallel import tensor_parallel


def check_element(*elements: Element) -> None:
    """Check that a chain of your elements computes in any layout what it computes on whole gradients.

    They are called, in this order, by `weft.grad_chain` under `replicate`, `fully_shard` and `tensor_parallel` on two
    ranks, and by hand on the gradients of one process; parameters must be equal after training, to 1e-12. Random
    states, the environment and the like must be as before. The parameters of the model are `first.weight` [8, 6],
    `first.bias`, `second.weight` [8, 8], which is tied, `second.bias`, `third.bias`, `head.weight` [3, 8], `head.bias`,
    and `scale` [].

    Changes: starts processes. Collectives: those of the elements.

    Args:
        elements: Functions `f(grads, ctx)` that can be sent to processes: of a module, not local ones.

    Raises:
        AssertionError: A law is broken; the text says which and how.
        RanksFailed: It is broken on some rank, or the ranks hang.

    Example:
        >>> import weft
        >>> check_element(weft.grads.clip_value(0.01))
    """
    gathered: dict[str, str] = dict.fromkeys(("first", "second", "third"), "gather")
    for name, transform, mesh in (
        ("replicate", replicate, None),
        ("fully_shard", partial(fully_shard, units=nn.Linear), None),
        ("tensor_parallel", partial(tensor_parallel, plan=gathered), {"tensor": -1}),
    ):
        apply = partial(_apply, part="module", transform=transform)
        row = Row(
            name=f"grad_chain after {name}",
            needs=(Row(name=name, apply=apply, synchronizes=True),),
            apply=partial(_apply, part="optimizer", transform=grad_chain, options=elements),
            on_optimizer=True,
            mesh=mesh,
            job=partial(Job, elements=elements),
        )
        if name == "replicate":
            one_rank_changes_nothing(row)
            leaves_no_trace(row)
        ranks_equal_reference(row)


def _apply(
    parts: Parts, ctx: DistContext, part: str, transform: Callable[..., Any], options: tuple[Any, ...] = ()
) -> DistContext:
    changed, next_ctx = transform(getattr(parts, part), ctx, *options)
    setattr(parts, part, changed)
    return next_ctx  # type: ignore[no-any-return]
