"""`grad_chain`: functions of named gradients that run before each step of an optimizer."""

from __future__ import annotations

import inspect
from typing import TypeVar

import torch

from weft.checks import check_optimizer
from weft.context import DistContext
from weft.contract import KeepsParameters, Part, Phase, offered, transform
from weft.contract.marks import known_modules
from weft.engines.torch.hooks.every_optimizer import parameters_of
from weft.engines.torch.steps.in_backward import check_has_gradients
from weft.engines.torch.steps.skip import SkippingStep
from weft.errors import OrderError, listed, type_error, value_error
from weft.grads.chain import GradChain, name_of
from weft.grads.elements import skip_step, skipping_step
from weft.grads.named_grads import Element

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741


@transform(phase=Phase.FINISH, changes=Part.STEP, collective=True)
def grad_chain(optimizer: O, ctx: DistContext, *elements: Element) -> tuple[O, DistContext]:
    """Call functions of the gradients by name before each step, in order: a pipeline from backward to the step.

    Once for each `optimizer.step()`, so once for a window of `accumulate_grads`, on gradients that are reduced over the
    ranks and in true units with fp16. `weft.grads` has elements: `clip_norm`, `clip_value`, `centralize`, `add_noise`,
    `skip_nonfinite`. Your own is a function `f(grads, ctx)`: `grads` is a `weft.grads.NamedGrads`, an immutable mapping
    of full parameter names to gradients as they lie on this rank, a tensor or a DTensor. It returns `grads`, whose
    tensors it may have changed in place, or a mapping of new tensors by these names, of the same shapes and dtypes and
    placed alike. A gradient that is None in it, or missing, is left out: its parameter makes no step. The ranks have
    to do alike; `grads.sums` adds up over those that hold parts of a tensor. Elements run without grad mode.

    Several optimizers have chains of their own; a norm is that of the parameters of one optimizer. Under `local_steps`
    each replica changes its own gradients, with the same noise. The number of steps is in checkpoints, with the
    optimizer; an element with state is an object of its own in `checkpointable`.

    Changes: a hook on `optimizer`; in steps, gradients, in the memory where they lie.
    Collectives: here, a meeting through the store. In `step`, those of the elements, and in steps 1, 2, 4, 8, ... a
    meeting, at which ranks that leave out different gradients are found.

    Args:
        optimizer: Over parameters of modules that `ctx` knows, or made of `model.named_parameters()`.
        ctx: The current context. Elements get it.
        elements: Functions, each of which gets what the one before has left.

    Returns:
        `optimizer` itself, and `ctx` with this transform in `applied`.

    Raises:
        AlreadyApplied: `optimizer` has a chain.
        TypeError: There is no element, or one is no function of gradients and context; or this is not an optimizer.
        OrderError: No module is known that has the parameters; or with `step_in_backward`, or DeepSpeed; later, from
            other transforms of the step, which come before it.
        ValueError: LBFGS, which evaluates the loss inside its step.
        ContextError: The ranks have other elements; in a step, they leave out different gradients.
        ContractError: In a step: an element returned something else than gradients.
        PeerError: Another rank failed.

    Example:
        >>> import weft
        >>> def freeze_first(grads, ctx):
        ...     return {name: g for name, g in grads.items() if grads.step >= 100 or not name.startswith("0.")}
        >>> model, ctx = weft.replicate(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)), weft.local())
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer, ctx = weft.grad_chain(optimizer, ctx, weft.grads.clip_norm(1.0), freeze_first)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> [p.grad is None for p in model.parameters()]
        [True, True, False, False]
    """
    check_optimizer("grad_chain", optimizer)
    wrong = [name_of(one) for one in elements if not _takes_gradients(one)]
    if wrong or not elements:
        raise type_error(
            "grad_chain: these are no functions of gradients and a context" if wrong else "grad_chain: no elements",
            found=listed(wrong) or "an optimizer and a context alone",
            expected="functions f(grads, ctx) -> grads; weft.grads has some that make one, such as clip_norm(1.0)",
            fix="optimizer, ctx = weft.grad_chain(optimizer, ctx, weft.grads.clip_norm(1.0))",
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise value_error(
            "grad_chain: LBFGS evaluates the loss and its gradients several times inside one step",
            found="LBFGS",
            expected="an optimizer that is stepped after backward",
            fix="optimizer = torch.optim.AdamW(model.parameters())",
        )
    check_has_gradients("grad_chain", parameters_of(optimizer))
    if any(offered(part, KeepsParameters) for module in known_modules(ctx) for part in module.modules()):
        raise OrderError(
            'grad_chain: cannot be combined with zero_partition(engine="deepspeed")',
            found="gradients that lie in pieces in the buffers of DeepSpeed, across the borders of parameters",
            expected='gradients of single parameters; engine="torch" divides the same state',
            fix='model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=2)  # engine="torch"',
        )
    ctx.agree("grad_chain", {"optimizer": type(optimizer).__name__, "elements": list(map(name_of, elements))})
    chain = [skipping_step(optimizer, ctx) if one is skip_step else one for one in elements]
    skips = (one for one in chain if isinstance(one, SkippingStep))
    return optimizer, ctx.offering(GradChain(optimizer, chain, ctx), *skips)


def _takes_gradients(element: object) -> bool:
    """Whether something can be called with gradients and a context, as far as its signature says."""
    try:
        inspect.signature(element).bind(None, None)  # type: ignore[arg-type]
    except TypeError:  # it takes others, or cannot be called
        return False
    except ValueError:  # Python does not know what it takes
        return callable(element)
    return True
