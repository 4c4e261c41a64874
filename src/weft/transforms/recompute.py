"""`recompute`: activation checkpointing of chosen blocks.

Arguments, the choice of blocks and the agreement of the ranks are here; the second run is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from weft.checks import check_choice, check_count
from weft.context import DistContext
from weft.contract import Part, Phase, transform
from weft.contract.name_table import is_table, parts_by_name
from weft.contract.select_modules import Selection, check_apart, select_apart
from weft.engines.options import RecomputeOptions
from weft.engines.torch.compute.activation_checkpoint import already_recomputed, saved_ops
from weft.errors import AlreadyApplied, listed, type_error

M = TypeVar("M", bound=nn.Module)
Op: TypeAlias = str | Callable[..., Any]  # of torch.ops
Policy: TypeAlias = Callable[..., CheckpointPolicy | bool]


@transform(phase=Phase.RECOMPUTE, changes=Part.FORWARD, collective=True)
def recompute(
    module: M,
    ctx: DistContext,
    *,
    blocks: Selection | Mapping[str, Sequence[Op] | Policy | bool | None],
    every: int = 1,
    save: Sequence[Op] | Policy = (),
    keep_rng: bool = True,
    determinism_check: Literal["default", "none"] = "default",
    early_stop: bool = True,
    offload: bool = False,
) -> tuple[M, DistContext]:
    """Keep only the inputs of chosen blocks for backward, and compute their insides again there.

    For models whose activations do not fit: memory for one block's insides instead of all, for
    about a third more time. Gradients are the same bits. Without gradients (`torch.no_grad()`)
    nothing is done; with them blocks are run twice in eval mode as well.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; selective saving:
    Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022;
    `torch.utils.checkpoint` (non-reentrant).

    Changes: `module` in place: `forward` of each block is an attribute of the instance; class,
    names and keys stay, and a copy or pickle is plain. Running statistics move once per step, as
    without it.
    Collectives: none; those inside a block, such as of `sync_batch_norm`, are made twice.

    Args:
        module: Contains the blocks. Hooks on a block run once, outside what is run twice.
        ctx: The current context.
        blocks: The blocks: a class, a pattern of names ("layers.*"), a number of parameters, a
            function (name, part) -> bool, parts, or several of these; see `weft.contract.select_modules`. None
            inside another. Or a table, `{"blocks.*.attn": ["matmul"], "blocks.*.mlp": True}`, of what to `save` in
            each; True is `save` as given, False or None is no block; see `weft.contract.name_table`.
        every: Of the chosen blocks, in the order of the module, take the first and then each
            `every`-th: 2 halves both savings and cost.
        save: Results that are kept and not computed again: operations such as
            `torch.ops.aten.gelu`, their names, "matmul", "attention" or "convolution" for all
            operations of the kind; or a policy `(ctx, op, *args, **kwargs) -> CheckpointPolicy`.
            With it, backward can run once only through a block.
        keep_rng: Give the second run the random state of the first, so that dropout drops the
            same. False is right only if blocks are not random, and a little faster. What is
            compiled keeps it always.
        determinism_check: "default" raises if shapes, dtypes or devices differ in the second run.
        early_stop: End the second run as soon as backward has what it needs.
        offload: Keep what is kept of a block, its inputs, in the memory of the CPU until backward
            (`torch.autograd.graph.save_on_cpu`, through pinned memory where there is an accelerator). Results that
            `save` keeps stay on the device. It costs two copies of the inputs per block and step, which wait for each
            other; not for blocks that are compiled.

    Returns:
        `module` itself, and `ctx` with this transform in `applied`.

    Raises:
        AlreadyApplied: A part of `module` is checkpointed already, by this or in another way.
        OrderError: After `replicate`, `compiled` or another transform that comes later.
        ContractError: In forward, if a block changes buffers other than running statistics.
        ValueError: No or nested blocks, one that is never called, or an option out of range.
        TypeError: Something given chooses no blocks, or is no operation.
        PeerError: Another rank failed.

    Example:
        >>> import torch, weft
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.GELU()), nn.Linear(2, 1))
        >>> model, ctx = weft.recompute(model, weft.local(), blocks=nn.Sequential, save=["matmul"])
        >>> model(torch.ones(1, 2)).sum().backward()
    """
    _check_options(every, determinism_check)
    _check_new(module)
    saved: dict[str, Any] = {}
    if is_table(blocks):
        chosen, saved = _in_table(module, blocks)
    else:
        chosen = select_apart("recompute", module, blocks)
    taken = dict(list(chosen.items())[::every])
    options = RecomputeOptions(
        save=_ops(save),
        keep_rng=keep_rng,
        determinism_check=determinism_check,
        early_stop=early_stop,
        offload=offload,
        probes=ctx.probes,
    )
    # What is inside a block may communicate, and then all ranks have to do it again.
    ctx.agree("recompute", {"blocks": list(taken), "keep_rng": keep_rng, "early_stop": early_stop})
    own = [name for name in taken if saved.get(name, True) is not True]
    groups = [({name: taken[name]}, options._replace(save=_ops(saved[name]))) for name in own]
    rest = {name: part for name, part in taken.items() if name not in own}
    groups += [(rest, options)] if rest else []
    return module, ctx.offering(*(ctx.engine.recompute(*group) for group in groups))


def _in_table(
    module: nn.Module, table: Mapping[str, Sequence[Op] | Policy | bool | None]
) -> tuple[dict[str, nn.Module], dict[str, Sequence[Op] | Policy | bool]]:
    """The blocks of a table, and what is saved in each."""
    found = parts_by_name("recompute", module, table)
    saved: dict[str, Sequence[Op] | Policy | bool] = {
        name: value for name, (_, value) in found.items() if value is not None and value is not False
    }
    check_apart("recompute", {name: part for name, (part, _) in found.items()}, outer=saved)
    return {name: found[name][0] for name in saved}, saved


def _ops(save: Sequence[Op] | Policy) -> Any:
    if isinstance(save, str):  # a sequence of letters
        raise type_error(
            f"recompute: save = {save!r} is one name",
            found=repr(save),
            expected="a list of operations",
            fix=f"weft.recompute(model, ctx, blocks=..., save=[{save!r}])",
        )
    return save if callable(save) else saved_ops(save)


def _check_options(every: int, determinism_check: str) -> None:
    call = "weft.recompute(model, ctx, blocks=..., {})"
    check_count("recompute", "every", every, fix=call.format("every=2"))
    checks, line = ("default", "none"), call.format('determinism_check="default"')
    check_choice("recompute", "determinism_check", determinism_check, checks, fix=line)


def _check_new(module: nn.Module) -> None:
    done = already_recomputed(module)
    if done:
        raise AlreadyApplied(
            f"recompute: parts of {type(module).__name__} are already checkpointed",
            found=listed(done),
            expected="one place that decides what is computed twice",
            fix="model, ctx = weft.recompute(model, ctx, blocks=[...])  # once, with all of them",
        )
