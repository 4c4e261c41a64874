"""`optimizers`: several optimizers by the names of parameters, as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeAlias

import torch
from torch import nn

from weft.checks import check_module
from weft.collectives.on_all_ranks import on_all
from weft.context import DistContext
from weft.contract.name_table import patterns_by_name
from weft.engines.torch.steps.combined_optimizer import CombinedOptimizer
from weft.errors import listed, type_error, value_error

Build: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_CALL = 'optimizer = weft.optimizers(model, {"blocks.*.weight": torch.optim.Muon, "*": torch.optim.AdamW}, ctx)'


def optimizers(module: nn.Module, table: Mapping[str, Build | None], ctx: DistContext) -> torch.optim.Optimizer:
    """Build an optimizer for each pattern of names, and return them as one.

    For Muon on matrices and AdamW on the rest, for other rates or no weight decay by name. What is returned is an
    optimizer like any other, with the groups of all, in the order of the table: transforms, schedulers, `clip_grads`,
    checkpoints and `rebind=` take it as one, and it can be built before or after the strategy. Each group has its
    pattern under "pattern", and torch's "param_names".

    Where parameters are in shards and one of them looks at whole tensors, as Muon does, `gather_step` comes next, as
    for that one alone; only groups of that kind are gathered.

    Changes: nothing. Collectives: a meeting through the store.

    Args:
        module: Whose parameters, those with `requires_grad`, are trained.
        table: By pattern, what builds the optimizer of a list of parameters: its class, or a `functools.partial` of
            it with options. The first pattern that fits a parameter, or something that it lies in, decides; see
            `weft.contract.name_table`. None: these parameters are left to others.
        ctx: The current context.

    Returns:
        The optimizer, whose groups a scheduler may treat each by itself.

    Raises:
        TypeError: A value of the table builds no optimizer; or it is LBFGS, or one that changes parameters outside of
            `step`, or keeps its state in a form of its own.
        ValueError: A pattern decides about nothing, a trained parameter fits none, or an optimizer refuses its own.
        ContextError: The ranks pass different tables or models.
        PeerError: Another rank failed.

    Example:
        >>> import functools, weft
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> sgd = functools.partial(torch.optim.SGD, lr=0.1)
        >>> optimizer = optimizers(model, {"*.bias": torch.optim.AdamW, "*": sgd}, weft.local())
        >>> [(group["pattern"], group["lr"]) for group in optimizer.param_groups]
        [('*.bias', 0.001), ('*', 0.1)]
    """
    built, parts = on_all("optimizers", ctx, lambda: _build(module, table))
    ctx.agree("optimizers", {"kinds": [type(one).__name__ for one in built], "parameters": parts})
    return CombinedOptimizer(built)


def _build(
    module: nn.Module, table: Mapping[str, Build | None]
) -> tuple[list[torch.optim.Optimizer], dict[str, list[str]]]:
    """The optimizers, and the names of the parameters of each pattern."""
    check_module("optimizers", module, fix=_CALL)
    parts = _parts(module, table)
    built = [_built(pattern, build, parts[pattern]) for pattern, build in table.items() if build is not None]
    return built, {pattern: list(named) for pattern, named in parts.items()}


def _parts(module: nn.Module, table: Mapping[str, Build | None]) -> dict[str, dict[str, nn.Parameter]]:
    """The parameters of each pattern, by name."""
    if not isinstance(table, Mapping) or not any(build is not None for build in table.values()):
        raise type_error(
            "optimizers: there is nothing to build",
            found=f"{table!r:.80}",
            expected="a table from patterns of names to classes of optimizers, or partials of them",
            fix=_CALL,
        )
    trained = [(name, p) for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad]
    of = patterns_by_name("optimizers", trained, table)
    left = [name for name, p in trained if id(p) not in of]
    if left:
        raise value_error(
            "optimizers: trained parameters fit no pattern",
            found=listed(left),
            expected="a pattern for each parameter with requires_grad; None as its value leaves some to others",
            fix='{..., "*": torch.optim.AdamW}',
        )
    named = [(name, p, of[id(p)]) for name, p in module.named_parameters() if id(p) in of]
    return {pattern: {name: p for name, p, own in named if own == pattern} for pattern in table}


def _built(pattern: str, build: Any, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of some parameters."""
    if not callable(build) or isinstance(build, torch.optim.Optimizer):
        _raise_unusable(pattern, f"{build!r:.80} builds no optimizer", type(build).__name__)
    try:
        built = build(list(named.values()))
    except Exception as error:
        raise value_error(
            f"optimizers: the optimizer of {pattern!r} cannot be built",
            found=f"{type(error).__name__}: {error}; for {listed(f'{n} {tuple(p.shape)}' for n, p in named.items())}",
            expected="an optimizer that takes these parameters",
            fix='{"*norm*": torch.optim.AdamW, ...}  # in the table before it, for what it does not take',
        ) from error
    if not isinstance(built, torch.optim.Optimizer):
        _raise_unusable(pattern, "what was built is no optimizer", type(built).__name__)
    held = [id(p) for entry in built.param_groups for p in entry["params"]]
    if sorted(held) != sorted(map(id, named.values())):
        _raise_unusable(pattern, f"{type(built).__name__} holds other parameters than it was given", f"{len(held)}")
    if isinstance(built, torch.optim.LBFGS):
        _raise_unusable(pattern, "LBFGS couples all parameters", "LBFGS")
    if callable(getattr(built, "eval", None)):
        _raise_unusable(
            pattern, f"{type(built).__name__} changes parameters outside of step", "an optimizer with eval()"
        )
    kind, base = type(built), torch.optim.Optimizer
    own = [name for name in ("state_dict", "load_state_dict") if getattr(kind, name) is not getattr(base, name)]
    if own:
        _raise_unusable(pattern, f"{type(built).__name__} keeps its state in a form of its own", listed(own))
    names = {id(p): name for name, p in named.items()}
    for entry in built.param_groups:
        entry["pattern"] = pattern
        entry["param_names"] = [names[id(p)] for p in entry["params"]]  # as torch keeps names
    return built


def _raise_unusable(pattern: str, problem: str, found: str) -> NoReturn:
    raise type_error(
        f"optimizers: {pattern!r}: {problem}",
        found=found,
        expected="a class of optimizers that steps on each parameter in step(), or a function of a list of parameters "
        "that builds one",
        fix=_CALL,
    )
