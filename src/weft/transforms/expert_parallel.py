"""`expert_parallel`: each rank holds some of the experts, and tokens go to where their experts are.

Arguments, the choice of experts and the agreement of the ranks are here; dividing and sending are the engine's.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

import torch
from torch import nn

from weft.checks import check_module
from weft.context import DistContext
from weft.context.placement import place_module
from weft.contract import Layout, Phase, agree_on_parameters, gradient_axes, transform
from weft.contract.select_modules import Selection
from weft.engines.torch.parallel.experts.local_losses import check_local_losses
from weft.errors import ContextError, value_error
from weft.sharding import check_optimizers, exchange_parameters, groups_of, optimizers_in
from weft.sharding.find_experts import find_experts
from weft.sharding.meta import is_meta, place_real
from weft.sharding.stage_tensors import bring_state

M = TypeVar("M", bound=nn.Module)


@transform(phase=Phase.SPLIT, collective=True)
def expert_parallel(
    module: M,
    ctx: DistContext,
    *,
    experts: Selection | Literal["auto"] = "auto",
    axis: str = "expert",
    rebind: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    weights: Literal["later"] | None = None,
) -> tuple[M, DistContext]:
    """Divide the experts of a mixture of experts among the ranks of an axis, and send tokens to them.

    For models most of whose parameters are experts: each rank holds 1/n of them. Each rank brings tokens of
    its own, and the router decides as it does in one process: no token is dropped, however many choose one expert, and
    an expert or a rank may get none. The gradient of an expert is complete where the expert is; a strategy that comes
    after averages it over the other data axes, and all other parameters over all of them.

    Experts are modules with stacked parameters [experts, ...] and
    `forward(hidden_states, top_k_index, top_k_weights)`, as in transformers, whose own implementation (eager, grouped
    or batched products) computes them; or modules in a `torch.nn.ModuleList`, each called with rows [..., width] by the
    module around the list.
    That module's forward runs twice per call, first to see which rows go where: it has to be the same both times.
    An expert of a list gets a gradient where a rank has called it, perhaps without rows; for experts that no rank
    calls, a strategy needs `unused="zero"`.

    Source: Lepikhin et al., "GShard", ICLR 2021; Fedus et al., "Switch Transformers", JMLR 2022.

    Changes: `module` in place: stacked parameters are exchanged for DTensors, cut over the axis; of a list, the
    experts of other ranks lie on meta, under their own names. Values are those of the first rank along the axis.
    `forward` of these modules is an attribute of the instance. The optimizers in `rebind`, in place.
    Collectives: here, one broadcast of the experts along the axis. Per forward and layer, all-to-alls: of counts
    (read by the host, as messages have sizes), of rows, of their weights (stacked experts), and of results; per
    backward, those but the first again. All ranks along the axis call the module equally often.

    Args:
        module: On the CPU, on `ctx.device`, or on meta with `weights="later"`.
        ctx: The current context; batches have to differ along `axis`.
        experts: Which parts are experts: stacked ones or lists, by name, pattern or class; see
            `weft.contract.select_modules`. "auto": stacked ones as in transformers, and lists with "expert" in their
            name.
        axis: Mesh axis to divide them over; its size divides the number of experts of each layer.
        rebind: Optimizers that hold parameters of `module`: groups and state are carried over.
        weights: "later": what is on meta stays there, divided, until `weft.load_weights` reads it after the strategy.

    Returns:
        `module` itself, and `ctx` with this transform in `applied`.

    Raises:
        AlreadyApplied: Experts are cut or replicated already.
        OrderError: An optimizer holds their parameters and is not in `rebind`; or a transform that comes later was
            applied.
        ContextError: There is no such axis, batches are the same along it, or the ranks pass different models or
            options.
        ValueError: There are no experts, they cannot be divided among the ranks, are not alike, or how they are
            computed is not known; the model adds a router's loss over the local batch; or it is on meta.
        PeerError: Another rank failed.

    Example:
        >>> import torch, weft
        >>> class Layer(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.router, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        ...     def forward(self, x):
        ...         weight, chosen = self.router(x).softmax(-1).max(-1)
        ...         result = torch.zeros_like(x)
        ...         for number, expert in enumerate(self.experts):
        ...             result[chosen == number] = expert(x[chosen == number])
        ...         return result * weight[:, None]
        >>> layer, ctx = weft.expert_parallel(Layer(), weft.local())
        >>> [record.name for record in ctx.applied]
        ['expert_parallel']
    """
    check_module("expert_parallel", module)
    ranks = ctx.axis_size(axis) if ctx.world_size > 1 else 1
    _check_axis(ctx, axis)
    found = find_experts("expert_parallel", module, experts, ranks)
    optimizers = optimizers_in("expert_parallel", rebind)
    _check_meta(module, weights)
    if ranks == 1:
        return module, ctx
    check_local_losses("expert_parallel", module)
    check_optimizers("expert_parallel", module, optimizers)
    facts = {"experts": found.names(), "axis": axis, "weights": weights, "rebind": groups_of(module, optimizers)}
    ctx.require_collective("expert_parallel")
    agree_on_parameters("expert_parallel", module, ctx, facts)
    if weights == "later":
        place_real(module, ctx)
    else:
        place_module("expert_parallel", module, ctx)
    assert ctx.mesh is not None
    old = dict(module.named_parameters())
    from weft.engines.torch.parallel.experts.divided import DividedExperts  # noqa: PLC0415  (half a second of imports)

    divided = DividedExperts(module, found.packed, list(found.lists), ctx.mesh[axis])
    exchange_parameters(module, old, optimizers)
    return module, ctx.offering(divided, _ExpertOwners(module, ctx, axis, divided.owners), *divided.probes)


def _check_axis(ctx: DistContext, axis: str) -> None:
    if ctx.world_size > 1 and ctx.axis_size(axis) > 1 and axis not in ctx.data_axes:
        raise ContextError(
            f"expert_parallel: batches are the same along {axis!r}",
            found=f"data axes {', '.join(map(repr, ctx.data_axes))}",
            expected="other tokens on each rank: those of one batch would be computed several times",
            fix=f"weft.start(mesh=..., data_axes={(*ctx.data_axes, axis)!r})",
        )


def _check_meta(module: nn.Module, weights: object) -> None:
    on_meta = is_meta(module)
    if weights != ("later" if on_meta else None):
        later = 'weft.expert_parallel(model, ctx, weights="later")'
        raise value_error(
            f"expert_parallel: weights = {weights!r:.40} does not fit this {type(module).__name__}",
            found="parameters or buffers on meta" if on_meta else "real parameters",
            expected='weights="later" for a module on meta: each rank reads only its own experts; else None',
            fix=f"{later}  # strategy too, then weft.load_weights(model, path, ctx)"
            if on_meta
            else "weft.expert_parallel(model, ctx)",
        )


class _ExpertOwners:
    """Where the experts lie; fulfils `weft.contract.Placed`."""

    def __init__(self, module: nn.Module, ctx: DistContext, axis: str, owners: Mapping[str, int | None]) -> None:
        self._module = weakref.ref(module)
        self._ctx = ctx
        self._axis = axis
        self._owners = owners

    def undo(self) -> None:
        """Give every rank the optimizer's state of all single experts; their values are `DividedExperts`'s to bring."""
        module = self._module()
        if module is not None and any(owner is not None for owner in self._owners.values()):
            bring_state(module, self._owners.get, self._ctx.on(self._axis))

    def layout(self, name: str) -> Layout | None:
        """The layout of a parameter of an expert: its gradient is complete along the axis."""
        module = self._module()
        if module is None or name not in self._owners:
            return None
        others = tuple(one for one in gradient_axes(module, self._ctx) if one != self._axis)
        owner = self._owners[name]
        if owner is None:
            return Layout(cut=(self._axis,), reduce_over=others)
        return Layout(owner=((self._axis, owner),), reduce_over=others)
