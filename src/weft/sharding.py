"""What comes before a module is cut into shards: checks, units, real tensors, optimizers.

Shared by the transforms that shard; the cutting itself is the engine's.
"""

from __future__ import annotations

import gc
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from weft.context import DistContext
from weft.context.world import disagree, exchange
from weft.contract import ReducesIn, agree_on_parameters, check_methods, offered
from weft.engines.options import ShardOptions
from weft.errors import AlreadyApplied, ContextError, OrderError, listed, message
from weft.placing import place_module
from weft.selecting import Selection, select

__all__ = [
    "Request",
    "Weights",
    "check_module",
    "check_optimizers",
    "exchange_parameters",
    "layouts",
    "optimizers_in",
    "shard_module",
    "sharding_axes",
]

Weights = Mapping[str, torch.Tensor]
_LARGE = 2**20  # parameters of a layer that is worth a unit, and messages, of its own


class Request(NamedTuple):
    """What the user asked for; see `fully_shard`.

    Attributes:
        units: What is gathered together.
        reshard_after_forward: Whether to free it between forward and backward.
        rebind: Optimizers over the module's parameters.
        ignored: Parts that stay whole.
        weights: State for a module on meta.
        unused: What a parameter without gradient means.
        buffers: Whether buffers are kept equal.
        methods: Methods besides forward.
        offload: Keep shards in CPU memory.
    """

    units: Selection | None = None
    reshard_after_forward: bool | int = True
    rebind: Sequence[torch.optim.Optimizer] = ()
    ignored: Selection | None = None
    weights: Weights | Callable[[], Weights] | None = None
    unused: Literal["error", "zero"] = "error"
    buffers: Literal["broadcast", "local"] = "broadcast"
    methods: Sequence[str] = ()
    offload: bool = False


def shard_module(what: str, module: nn.Module, ctx: DistContext, axes: tuple[str, ...], request: Request) -> Any:
    """Check everything, agree with the other ranks, then cut `module`.

    Changes: `module` and the optimizers, as `fully_shard` says. Collectives: as it says.

    Args:
        what: Name of the transform, for errors.
        module: To be cut.
        ctx: Where we run.
        axes: From `sharding_axes`.
        request: What the user asked for.

    Returns:
        What the engine offers to later transforms; None with one rank.

    Raises:
        AlreadyApplied: A part is sharded or replicated already.
        OrderError: A living optimizer holds parameters and is not in `request.rebind`.
        TypeError: Not a module.
        ValueError: An option is out of range.
    """
    check_module(what, module, ctx)
    line = ctx.on(axes)
    _check_options(what, module, ctx, request)
    reshard = _reshard(what, ctx, axes, request.reshard_after_forward)
    groups = _units(what, module, request.units)
    ignored = _ignored(what, module, request.ignored)
    if line.world_size > 1:
        _check_parameters(what, module, groups, ignored)
    check_optimizers(what, module, ctx, request.rebind)
    names = {id(part): name for name, part in module.named_modules()}
    facts: dict[str, object] = {
        "axes": list(axes),
        "units": [[names[id(part)] for part in group] for group in groups],
        "reshard_after_forward": reshard,
        "rebind": layouts(module, request.rebind),
        "ignored": list(ignored),
        "unused": request.unused,
        "buffers": request.buffers,
        "methods": list(request.methods),
        "offload": request.offload,
    }
    on_meta = _is_meta(module)
    if line.world_size > 1:
        world = ctx.require_collective(what)
        agree_on_parameters(what, module, ctx, facts)
        # The first rank may bring a real module, and the others one on meta.
        on_meta = any(entry["meta"] for entry in exchange(world, f"{what}: meta", {"meta": on_meta}))
    source = _Source(what, module, ctx, line, request.weights) if on_meta else None
    old = dict(module.named_parameters())
    if source is None:
        place_module(what, module, ctx)
        if line.group is not None:
            ctx.engine.broadcast_state(module, line.group)
    sharded = None
    if line.world_size > 1:
        assert line.group is not None
        assert ctx.mesh is not None
        dtypes = [offer.reduce_dtype for offer in offered(module, ReducesIn)]
        options = ShardOptions(
            units=groups,
            reshard_after_forward=reshard,
            dtype=dtypes[-1] if dtypes else None,
            ignored=ignored,
            unused=request.unused,
            buffers=request.buffers,
            methods=tuple(request.methods),
            offload=request.offload,
            make_real=None if source is None else source.make_real,
        )
        sharded = ctx.engine.shard(module, ctx.mesh[axes], line.group, options)
    elif source is not None:
        source.make_real(module)
    exchange_parameters(module, ctx, old, request.rebind)
    return sharded


def exchange_parameters(
    module: nn.Module,
    ctx: DistContext,
    old: Mapping[str, nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Carry over what hung on the parameters a module had, to those it has now.

    Changes: attributes of the new parameters; optimizers, which go on with them. Collectives: where
    shards were made whole, one all-gather per tensor of state.
    """
    new = {name: p for name, p in module.named_parameters() if p is not old[name]}
    for name, parameter in new.items():
        for key, value in vars(old[name]).items():
            if key not in vars(parameter):
                setattr(parameter, key, value)
    ctx.engine.rebind(optimizers, {old[name]: parameter for name, parameter in new.items()})


# -- where ------------------------------------------------------------------------------------------


def sharding_axes(what: str, ctx: DistContext, axis: str | Sequence[str] | None) -> tuple[str, ...]:
    """The mesh axes to shard over: one, or (replica, shard).

    Raises:
        ContextError: There is no such axis, or there are more than two.
    """
    if axis is None:
        names = tuple(ctx.data_axes)
        if len(names) > 2:
            names = tuple(name for name in names if ctx.axis_size(name) > 1) or names[:1]
    else:
        names = (axis,) if isinstance(axis, str) else tuple(axis)
    for name in names:
        ctx.axis_size(name)
    if not 1 <= len(names) <= 2 or len(set(names)) != len(names):
        raise ContextError(
            message(
                f"{what}: axis = {names} cannot be sharded over",
                found=f"{len(names)} axes: {listed(names) or 'none'}",
                expected='one axis, or two: ("replica", "shard")',
                fix=f'weft.{what}(..., axis="{ctx.axes[-1][0]}")',
            )
        )
    return names


# -- checks -----------------------------------------------------------------------------------------


def check_module(what: str, module: nn.Module, ctx: DistContext) -> None:
    """Check that this is a module none of whose parameters is sharded or replicated.

    Raises:
        AlreadyApplied: One is.
        TypeError: Not a module.
        ValueError: A parameter has no shape yet.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            message(
                f"{what}: this is not a module",
                found=type(module).__name__,
                expected="a torch.nn.Module",
                fix=f"model, ctx = weft.{what}(model, ctx)",
            )
        )
    taken = [name for name, p in module.named_parameters() if ctx.engine.is_reduced(p) or ctx.engine.is_sharded(p)]
    if taken:
        raise AlreadyApplied(
            message(
                f"{what}: parameters of {type(module).__name__} are sharded or replicated already",
                found=listed(taken),
                expected="each parameter in one sharded or replicated module: the outermost",
                fix=f"call weft.{what} once, on the whole model",
            )
        )
    lazy = [name for name, p in module.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise ValueError(
            message(
                f"{what}: parameters of {type(module).__name__} have no shape yet",
                found=listed(lazy),
                expected="a module that has been called once (lazy modules get their shapes then)",
                fix=f"model(example_batch)  # before {what}",
            )
        )


def _check_options(what: str, module: nn.Module, ctx: DistContext, request: Request) -> None:
    for name, value, allowed in (
        ("unused", request.unused, ("error", "zero")),
        ("buffers", request.buffers, ("broadcast", "local")),
    ):
        if value not in allowed:
            raise ValueError(
                message(
                    f"{what}: {name} = {value!r} is unknown",
                    found=repr(value),
                    expected=" or ".join(map(repr, allowed)),
                    fix=f"weft.{what}(..., {name}={allowed[0]!r})",
                )
            )
    if request.offload and ctx.device.type == "cpu":
        raise ValueError(
            message(
                f"{what}: offload=True has no effect on a CPU",
                found=f"device {ctx.device}",
                expected="an accelerator, whose memory the shards are to leave",
                fix=f"weft.{what}(..., offload=False)",
            )
        )
    if request.weights is not None and not _is_meta(module):
        raise ValueError(
            message(
                f"{what}: weights are for a module on meta",
                found=f"{type(module).__name__} with real parameters",
                expected="with torch.device('meta'): model = ...",
                fix="model.load_state_dict(weights)",
            )
        )
    check_methods(what, module, request.methods)


def _reshard(what: str, ctx: DistContext, axes: tuple[str, ...], reshard: bool | int) -> bool | int:
    """`reshard_after_forward` as True, False, or a number of ranks that is neither one nor all."""
    if isinstance(reshard, bool):
        return reshard
    size = ctx.axis_size(axes[-1])
    if not isinstance(reshard, int) or reshard < 1 or (size > 1 and size % reshard):
        raise ValueError(
            message(
                f"{what}: reshard_after_forward = {reshard!r} cannot be used",
                found=f"{reshard!r}, with {size} rank(s) along {axes[-1]!r}",
                expected="True, False, or a number of ranks that divides those of the axis",
                fix=f"weft.{what}(..., reshard_after_forward=True)",
            )
        )
    return reshard if 1 < reshard < size else reshard != 1


def _check_parameters(
    what: str, module: nn.Module, groups: tuple[tuple[nn.Module, ...], ...], ignored: Sequence[str]
) -> None:
    """Raise if a parameter would not be the same once it is cut, or cannot be reduced with its unit."""
    named = {name: p for name, p in module.named_parameters() if name not in set(ignored)}
    hooked = [name for name, p in named.items() if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)]
    if hooked:
        raise ValueError(
            message(
                f"{what}: hooks on parameters of {type(module).__name__} would be lost",
                found=listed(hooked),
                expected="no hooks: the parameters are exchanged for shards, on which torch calls none",
                fix=f"weft.{what}(..., ignored=...) for the modules that own them, or remove the hooks",
            )
        )
    unit_of = {id(part): number for number, group in enumerate(groups, 1) for part in group}
    owner = _owners(module, [part for group in groups for part in group])
    kinds: dict[int, dict[torch.dtype, str]] = {}
    for prefix, part in module.named_modules():
        for name, p in part.named_parameters(prefix, recurse=False):
            if p.requires_grad and name in named:
                kinds.setdefault(unit_of.get(owner[id(part)], 0), {}).setdefault(p.dtype, name)
    mixed = [
        ", ".join(f"{name} {dtype}" for dtype, name in found.items()) for found in kinds.values() if len(found) > 1
    ]
    if mixed:
        raise ValueError(
            message(
                f"{what}: parameters of one unit have different dtypes",
                found=listed(mixed),
                expected="one dtype for the trained parameters of a unit, which travel together",
                fix=f'weft.with_precision(model, ctx, "bf16") before {what}, or other units',
            )
        )


def layouts(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[object]:
    """What the ranks have to agree on about optimizers: kinds, and parameters per group, by name."""
    names = {id(p): name for name, p in module.named_parameters()}
    return [
        [type(one).__name__, *([names.get(id(p), "another") for p in entry["params"]] for entry in one.param_groups)]
        for one in optimizers
    ]


def optimizers_in(
    what: str, rebind: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
) -> tuple[torch.optim.Optimizer, ...]:
    """`rebind` as a tuple.

    Raises:
        TypeError: Something in it is not an optimizer.
    """
    optimizers = (rebind,) if isinstance(rebind, torch.optim.Optimizer) else tuple(rebind)
    wrong = [type(one).__name__ for one in optimizers if not isinstance(one, torch.optim.Optimizer)]
    if wrong:
        raise TypeError(
            message(
                f"{what}: rebind holds something else than optimizers",
                found=listed(wrong),
                expected="torch.optim.Optimizer",
                fix=f"weft.{what}(..., rebind=[optimizer])",
            )
        )
    return optimizers


def check_optimizers(what: str, module: nn.Module, ctx: DistContext, rebind: Sequence[torch.optim.Optimizer]) -> None:
    """Check that no optimizer would go on with parameters the module will not have.

    Raises:
        OrderError: A living optimizer holds parameters of `module` and is not in `rebind`.
    """
    if _left_out(module, ctx, rebind):
        gc.collect()  # some may have been dropped, in a cycle
    left = _left_out(module, ctx, rebind)
    if left:
        raise OrderError(
            message(
                f"{what}: {len(left)} optimizer(s) hold parameters of {type(module).__name__}, and would keep the old",
                found=listed(f"{type(one).__name__}, {len(one.param_groups)} group(s)" for one in left),
                expected=f"{what}, then the optimizer; or the optimizer given along",
                fix=f"weft.{what}(..., rebind=optimizer)",
            )
        )


def _left_out(
    module: nn.Module, ctx: DistContext, rebind: Sequence[torch.optim.Optimizer]
) -> list[torch.optim.Optimizer]:
    holding = ctx.engine.optimizers_of(list(module.parameters()))
    return [one for one in holding if not any(one is known for known in rebind)]


# -- units ------------------------------------------------------------------------------------------


def _units(what: str, module: nn.Module, chosen: Selection | None) -> tuple[tuple[nn.Module, ...], ...]:
    """The units, inner ones first; modules that share parameters are one unit."""
    if chosen is None:
        parts = _blocks(module)
    else:
        found = select(what, module, chosen)
        parts = [part for part in found.values() if part is not module]
        uncalled = [name for name, part in found.items() if not _has_forward(part)]
        if uncalled:
            raise ValueError(
                message(
                    f"{what}: units are never called",
                    found=listed(f"{name!r} ({type(found[name]).__name__})" for name in uncalled),
                    expected="parts that have a forward, around which they are gathered and freed",
                    fix=f'weft.{what}(..., units="{uncalled[0]}.*")',
                )
            )
    parts = [part for part in parts if any(True for _ in part.parameters())]
    order = {id(part): place for place, part in enumerate(module.modules())}
    while True:
        owner = _owners(module, parts)
        root = id(module)
        shared = [set(owners) for owners in _sharers(module, owner).values() if len(set(owners)) > 1]
        # What is shared with the module's own unit, or between nested ones, goes one unit up.
        by_id = {id(part): part for part in parts}
        lost = {one for owners in shared if root in owners for one in owners if one != root}
        for owners in shared:
            units = [by_id[one] for one in owners if one != root]
            lost |= {id(one) for one in units if any(_is_inside(one, outer) for outer in units if outer is not one)}
        if not lost:
            return _joined(parts, shared, order)
        parts = [part for part in parts if id(part) not in lost]


def _has_forward(part: nn.Module) -> bool:
    return type(part).forward is not nn.Module.forward


def _is_inside(part: nn.Module, outer: nn.Module) -> bool:
    return any(one is part for one in outer.modules())


def _joined(
    parts: list[nn.Module], shared: list[set[int]], order: Mapping[int, int]
) -> tuple[tuple[nn.Module, ...], ...]:
    groups: list[set[int]] = [{id(part)} for part in parts]
    for together in shared:
        touched = [group for group in groups if group & together]
        groups = [group for group in groups if not group & together]
        groups.append(set().union(*touched))
    by_id = {id(part): part for part in parts}
    left = [tuple(by_id[one] for one in sorted(group, key=lambda one: order[one])) for group in groups]
    left.sort(key=lambda group: order[id(group[0])], reverse=True)
    # Inner units have to be cut before the ones around them.
    done: list[tuple[nn.Module, ...]] = []
    while left:
        ready = [one for one in left if not any(_holds(one, other) for other in left if other is not one)]
        done += ready or left
        left = [one for one in left if ready and one not in ready]
    return tuple(done)


def _holds(group: tuple[nn.Module, ...], other: tuple[nn.Module, ...]) -> bool:
    return any(_is_inside(part, outer) for outer in group for part in other)


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The blocks in lists of the module, and the large layers that are in no block."""
    blocks: list[nn.Module] = []

    def visit(part: nn.Module) -> None:
        children = list(part.children())
        if isinstance(part, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            chosen = [child for child in children if any(True for _ in child.children()) and _has_forward(child)]
            if len(chosen) > 1:
                blocks.extend(chosen)
                children = [child for child in children if not any(child is one for one in chosen)]
        for child in children:
            visit(child)
        own = sum(p.numel() for p in part._parameters.values() if p is not None)
        if part is not module and not list(part.children()) and own >= _LARGE:
            blocks.append(part)

    visit(module)
    return blocks


def _owners(module: nn.Module, parts: Sequence[nn.Module]) -> dict[int, int]:
    """The innermost unit around each module, by id."""
    chosen = {id(part) for part in parts}
    owner: dict[int, int] = {}

    def visit(part: nn.Module, unit: int) -> None:
        unit = id(part) if id(part) in chosen else unit
        if id(part) not in owner:
            owner[id(part)] = unit
            for child in part.children():
                visit(child, unit)

    visit(module, id(module))
    return owner


def _sharers(module: nn.Module, owner: Mapping[int, int]) -> dict[int, list[int]]:
    """The units that hold each parameter, by id."""
    holders: dict[int, list[int]] = {}
    for part in module.modules():
        for p in part._parameters.values():
            if p is not None:
                holders.setdefault(id(p), []).append(owner[id(part)])
    return holders


def _ignored(what: str, module: nn.Module, chosen: Selection | None) -> tuple[str, ...]:
    """Names of the parameters that stay whole: those asked for, and single numbers, which cannot be cut."""
    parts = () if chosen is None else select(f"{what}: ignored", module, chosen).values()
    whole = {id(p) for part in parts for p in part.parameters()}
    return tuple(name for name, p in module.named_parameters() if id(p) in whole or not p.dim())


# -- modules on meta --------------------------------------------------------------------------------


def _is_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


class _Source:
    """Makes the parts of a module on meta real, with weights read on the first rank or drawn.

    Raises:
        ValueError: On all ranks, if something on meta would have no value, or a weight no place.
    """

    def __init__(
        self,
        what: str,
        module: nn.Module,
        ctx: DistContext,
        line: DistContext,
        weights: Weights | Callable[[], Weights] | None,
    ) -> None:
        self._ctx = ctx
        self._line = line
        self._names = {id(part): name for name, part in module.named_modules()}
        self._real: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._done: set[int] = set()
        self._given: dict[int, torch.Tensor] = {}
        try:
            if line.rank == 0:
                self._read(what, module, weights)
        except Exception as error:
            disagree(ctx.world, error)
            raise
        ctx.agree(f"{what}: weights")

    def _read(self, what: str, module: nn.Module, source: Weights | Callable[[], Weights] | None) -> None:
        """Find the weight of each tensor, under any of its names."""
        weights: Weights = {} if source is None else source() if callable(source) else source
        kept = {n: t for n, t in module.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
        wrong = [
            f"{name} of shape {tuple(weight.shape)}, not {tuple(kept[name].shape)}"
            if name in kept
            else f"{name}, of which the module has none"
            for name, weight in weights.items()
            if name not in kept or weight.shape != kept[name].shape
        ]
        self._given = {id(tensor): weights[name] for name, tensor in kept.items() if name in weights}
        drawn = {id(t) for part in module.modules() if _draws(part) for _, t in _own_tensors(part)}
        if source is not None:
            # What is saved and was not given is missing; it shall not be drawn in silence.
            drawn -= {id(tensor) for tensor in kept.values()}
        lost = [
            f"{prefix}.{name}" if prefix else name
            for prefix, part in module.named_modules()
            for name, tensor in _own_tensors(part)
            if tensor.is_meta and id(tensor) not in self._given and id(tensor) not in drawn
        ]
        if lost or wrong:
            raise ValueError(
                message(
                    f"{what}: weights do not fit the {type(module).__name__} on meta",
                    found="; ".join(
                        [
                            *([f"wrong: {listed(wrong)}"] if wrong else []),
                            *([f"no value: {listed(lost)}"] if lost else []),
                        ]
                    ),
                    expected="in `weights` a value for each, of its shape; without them, or for what is not saved, "
                    "reset_parameters() in its module",
                    fix=f"weft.{what}(..., weights=lambda: torch.load(path, mmap=True))",
                )
            )

    def make_real(self, unit: nn.Module) -> None:
        """Give every tensor of a unit that is on meta its place and value, the same on all ranks."""
        for part in unit.modules():
            if id(part) in self._done:
                continue
            self._done.add(id(part))
            fresh = [t for _, t in _own_tensors(part) if t.is_meta and id(t) not in self._real]
            for kind in _kinds(part):
                for name, tensor in kind.items():
                    if tensor is not None:
                        kind[name] = self._real_one(tensor)
            if any(id(tensor) not in self._given for tensor in fresh) and _draws(part):
                self._draw(part)
            for _, tensor in _own_tensors(part):
                if id(tensor) in self._given:
                    with torch.no_grad():
                        tensor.copy_(self._given[id(tensor)])
                if self._line.group is not None:
                    torch.distributed.broadcast(tensor.detach(), group=self._line.group, group_src=0)

    def _real_one(self, tensor: torch.Tensor) -> torch.Tensor:
        device = self._ctx.device
        if id(tensor) not in self._real:
            values = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
            real = nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
            self._real[id(tensor)] = (tensor, real)  # the old one too, so that its id is not given away
            self._real[id(real)] = (real, real)
            if id(tensor) in self._given:
                self._given[id(real)] = self._given[id(tensor)]
        return self._real[id(tensor)][1]

    def _draw(self, part: nn.Module) -> None:
        """Let the part draw its numbers: a function of the seed and its name, whatever the units are."""
        device = self._ctx.device
        seed = zlib.crc32(self._names[id(part)].encode()) ^ self._ctx.seed
        others = [] if device.type == "cpu" else [device]
        reset: Any = part.reset_parameters
        with torch.random.fork_rng(devices=others, device_type=others[0].type if others else "cuda"):
            torch.manual_seed(seed)
            reset()


def _draws(part: nn.Module) -> bool:
    return callable(getattr(part, "reset_parameters", None))


def _kinds(part: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return part._parameters, part._buffers


def _own_tensors(part: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for kind in _kinds(part):
        for name, tensor in kind.items():
            if tensor is not None:
                yield name, tensor
