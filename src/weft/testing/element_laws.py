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

_LAYERS = ("first", "second", "third")


def chain_row(*elements: Element, **facts: Any) -> Row:
    """The row of a chain of these elements, for the laws; the reference calls them on whole gradients.

    Args:
        elements: As for `weft.grad_chain`.
        facts: Fields of `Row`.
    """
    job = facts.pop("job", Job)
    return Row(
        **{
            "name": "grad_chain",
            "apply": partial(_chain, elements=elements),
            "on_optimizer": True,
            "job": partial(job, elements=elements),
            "break_input": partial(_chain, elements=(*elements, None)),
            **facts,
        }
    )


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
    gathered = dict.fromkeys(_LAYERS, "gather")
    for name, transform, mesh in (
        ("replicate", replicate, None),
        ("fully_shard", partial(fully_shard, units=nn.Linear), None),
        ("tensor_parallel", partial(tensor_parallel, plan=gathered), {"tensor": -1}),
    ):
        strategy = Row(name=name, apply=partial(_strategy, transform=transform), synchronizes=True, mesh=mesh)
        row = chain_row(*elements, name=f"grad_chain after {name}", needs=(strategy,), mesh=mesh)
        if name == "replicate":
            one_rank_changes_nothing(row)
            leaves_no_trace(row)
        ranks_equal_reference(row)


def _strategy(parts: Parts, ctx: DistContext, transform: Callable[..., Any]) -> DistContext:
    parts.module, ctx = transform(parts.module, ctx)
    return ctx


def _chain(parts: Parts, ctx: DistContext, elements: tuple[Any, ...]) -> DistContext:
    assert parts.optimizer is not None
    parts.optimizer, ctx = grad_chain(parts.optimizer, ctx, *elements)
    return ctx
