"""Real tensors for modules on meta.

What was made real for a unit is let go when the unit is cut: no rank ever holds more than one unit whole.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn

from weft import torch_internals
from weft.context import DistContext
from weft.context.placement import place_module, value_device
from weft.errors import listed, value_error
from weft.peers.agreement import disagree, exchange
from weft.peers.world import World
from weft.tensors.remote_parameter import is_elsewhere

Weights = Mapping[str, torch.Tensor]
WeightSource = Weights | Callable[[], Weights] | Literal["later"] | None


def is_meta(module: nn.Module) -> bool:
    """Whether a parameter or buffer has no values yet."""
    return any(t.is_meta and not is_elsewhere(t) for t in (*module.parameters(), *module.buffers()))


def on_meta_anywhere(what: str, on_meta: bool, world: World) -> bool:
    """Whether the module of some rank is on meta: the first may bring a real one. Collectives: a meeting."""
    return any(entry["meta"] for entry in exchange(world, f"{what}: meta", {"meta": on_meta}))


def with_values(
    what: str, module: nn.Module, ctx: DistContext, line: DistContext, weights: WeightSource, *, on_meta: bool
) -> Materializer | None:
    """Bring a module to the device of a context, with values; with "later", what is on meta stays there.

    Args:
        what: Name of the transform, for errors.
        module: To be cut over `line`.
        ctx: The current context.
        line: The ranks that get the same values, from the first of them.
        weights: State for a module on meta.
        on_meta: The module of one of the ranks is; see `on_meta_anywhere`.

    Returns:
        What makes the parts of the module real, one after the other, where several ranks have it on meta; else None.

    Raises:
        ValueError: The module lies on another device; or see `Materializer`.
    """
    if weights == "later":
        place_real(module, ctx)
        return None
    if on_meta:
        source = Materializer(what, module, ctx, line, weights)
        if line.world_size > 1:
            return source
        source.make_real(module)
        source.forget()
    place_module(what, module, ctx)
    return None


def place_real(module: nn.Module, ctx: DistContext) -> None:
    """Bring what is not on meta to the device of the context."""
    device = value_device(ctx)
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta and tensor.device != device:
            tensor.data = tensor.data.to(device)


class Materializer:
    """Makes the parts of a module on meta real, with weights read on the first rank or drawn.

    Raises:
        ValueError: On all ranks, if something on meta would have no value, or a weight no place.
    """

    def __init__(
        self, what: str, module: nn.Module, ctx: DistContext, line: DistContext, weights: WeightSource
    ) -> None:
        self._ctx = ctx
        self._line = line
        self._names = {id(part): name for name, part in module.named_modules()}
        # The old one is kept, so that its id is not given away; the real one is its module's.
        self._real: dict[int, tuple[torch.Tensor, weakref.ref[torch.Tensor]]] = {}
        self._done: set[int] = set()
        self._given: dict[int, torch.Tensor] = {}
        try:
            if line.rank == 0:
                self._read(what, module, weights)
        except Exception as error:
            disagree(ctx.world, error)
            raise
        ctx.agree(f"{what}: weights")

    def _read(self, what: str, module: nn.Module, source: WeightSource) -> None:
        """Find the weight of each tensor, under any of its names."""
        weights: Weights = {} if source is None or isinstance(source, str) else source() if callable(source) else source
        kept = {n: t for n, t in module.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
        wrong = [
            f"{name} of shape {tuple(weight.shape)}, not {tuple(kept[name].shape)}"
            if name in kept
            else f"{name}, of which the module has none"
            for name, weight in weights.items()
            if name not in kept or weight.shape != kept[name].shape
        ]
        self._given = {id(tensor): weights[name] for name, tensor in kept.items() if name in weights}
        drawn = {id(t) for part in module.modules() if draws(part) for _, t in own_tensors(part)}
        if source is not None:
            # What is saved and was not given is missing; it shall not be drawn in silence.
            drawn -= {id(tensor) for tensor in kept.values()}
        lost = [
            f"{prefix}.{name}" if prefix else name
            for prefix, part in module.named_modules()
            for name, tensor in own_tensors(part)
            if tensor.is_meta and id(tensor) not in self._given and id(tensor) not in drawn
        ]
        unsaved = any(name not in kept for name in lost)
        call = "fully_shard" if what == "zero_partition" else what  # which takes no weights
        problems = {"wrong": wrong, "no value": lost}
        if lost or wrong:
            raise value_error(
                f"{what}: weights do not fit the {type(module).__name__} on meta",
                found="; ".join(f"{what}: {listed(names)}" for what, names in problems.items() if names),
                expected="in `weights` a value for each, of its shape; without them, or for what is not saved, "
                "reset_parameters() in its module",
                fix="with weft.weights.on_meta(): model = ...  # its buffers are real, also those that are not saved"
                if unsaved
                else f"weft.{call}(..., weights=weights)  # names and shapes as in model.state_dict()",
            )

    def make_real(self, unit: nn.Module) -> None:
        """Give every tensor of a unit that is on meta its place and value, the same on all ranks."""
        for part in unit.modules():
            if id(part) in self._done:
                continue
            self._done.add(id(part))
            slots = tensor_slots(part)
            fresh = [old for _, _, old in slots if old.is_meta and id(old) not in self._real]
            for kind, name, old in slots:
                kind[name] = self._real_one(old)
            if any(id(old) not in self._given for old in fresh) and draws(part):
                draw_values(part, self._names[id(part)], self._ctx)
            for kind, name, old in slots:
                if id(old) in self._given:
                    with torch.no_grad():
                        kind[name].copy_(self._given[id(old)])
                if self._line.group is not None:
                    torch.distributed.broadcast(kind[name].detach(), group=self._line.group, group_src=0)

    def leave(self, parts: Iterable[nn.Module]) -> None:
        """Leave the tensors of these very modules on meta: another rank has them."""
        self._done |= set(map(id, parts))

    def forget(self) -> None:
        """Let go of what was made; engines that exchange tensors refuse those with weak references."""
        self._real.clear()

    def _real_one(self, tensor: torch.Tensor) -> torch.Tensor:
        made = self._real[id(tensor)][1]() if id(tensor) in self._real else None
        if made is not None:
            return made
        device = value_device(self._ctx)
        values = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
        real = nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
        self._real[id(tensor)] = (tensor, weakref.ref(real))
        return real


def draw_values(part: nn.Module, name: str, ctx: DistContext) -> None:
    """Let a part draw its numbers: a function of the seed and its name, whatever was drawn before."""
    device = value_device(ctx)
    seed = zlib.crc32(name.encode()) ^ ctx.seed
    others = [] if device.type == "cpu" else [device]
    reset: Any = part.reset_parameters
    with torch.random.fork_rng(devices=others, device_type=others[0].type if others else "cuda"):
        torch.manual_seed(seed)
        reset()


def draws(part: nn.Module) -> bool:
    """Whether a part can draw its numbers."""
    return callable(getattr(part, "reset_parameters", None))


def own_tensors(part: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of a part itself, not of its children."""
    return ((name, tensor) for _, name, tensor in tensor_slots(part))


def tensor_slots(part: nn.Module) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    """Parameters and buffers of a part itself: where the part has each, under which name, and what is there."""
    kinds = (torch_internals.PARAMETERS.of(part), torch_internals.BUFFERS.of(part))
    return [(kind, name, tensor) for kind in kinds for name, tensor in kind.items() if tensor is not None]
