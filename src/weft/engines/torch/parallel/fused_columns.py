"""Column layers that hold several projections side by side: each rank gets its share of every one.

Their weights are cut like those of any column layer, so that checkpoints, strategies and optimizers meet plain shards,
in the order of one process. What is exchanged are outputs: a rank computes those of its rows, which may be all of the
queries and none of the values, and gets its heads of both. Gradients go back the same way, and those of a part that
several ranks share are added up.

[Note: whole sizes] Programs write the sizes of one process between a column and a row layer: `split(width, dim=2)`,
`x[..., :width]`, `reshape(batch, length, 3, heads, 64)`. From the call of a fused layer to the end of the part around
it, such sizes are read as those of this rank. Whether that was meant is measured by the probe of `tensor_parallel`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from weft.engines.options import FusedPart, TensorOptions
from weft.engines.torch.parallel.exchange import exchanged
from weft.engines.torch.parallel.sequence_exchange import AllToAll, find_collectives
from weft.engines.torch.parallel.tensor_hooks import moved
from weft.tensors.blocks import chunk

_Range = tuple[int, int]  # where it begins, and how long it is
_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]


class FusedColumns:
    """The outputs of one layer.

    Attributes:
        whole: The width of each part.
        local: That of this rank's share of it.
        has_run: Whether it has been called since the part around it was.
    """

    def __init__(self, name: str, module: nn.Module, group: dist.ProcessGroup, options: TensorOptions) -> None:
        """Find out what is sent.

        Args:
            name: Of the layer.
            module: That has it.
            group: The ranks.
            options: The projections in it (`fused`), and what attributes of the part that has it are from then on,
                to the end of the call of the part around it (`attributes`).
        """
        ranks, rank = group.size(), group.rank()
        parts, own = options.fused[name], name.rpartition(".")[0]
        parent = module.get_submodule(own)
        self.has_run = False
        self._parent = weakref.ref(parent)
        self._values = {n: (getattr(parent, n), value) for n, value in options.attributes.get(own, {}).items()}
        self.whole = [part.width for part in parts]
        self.local = [part.width // part.pieces for part in parts]
        held = [chunk(sum(self.whole), ranks, one) for one in range(ranks)]
        wanted = [_share(parts, ranks, one) for one in range(ranks)]
        sent = [_common(share, held[rank]) for share in wanted]
        arrives = [_common(wanted[rank], one) for one in held]
        self._sent = [(at - held[rank][0], size) for pieces in sent for at, size in pieces]
        self._arrives = [piece for pieces in arrives for piece in pieces]
        self._how: AllToAll | None = AllToAll(group, find_collectives(), _sizes(arrives), _sizes(sent))

    def release(self) -> None:
        """Let the process group go."""
        self._how = None

    def set_sizes(self, *, local: bool) -> None:
        """From here on, sizes are those of this rank, or of one process."""
        self.has_run = local
        for name, (whole, own) in self._values.items():
            setattr(self._parent(), name, own if local else whole)

    def exchange(self, module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        """A hook after the layer: [..., rows of this rank] to [..., its share of each part].

        Collectives: one all-to-all; the same in backward.
        """
        del module, args
        assert self._how is not None
        self.set_sizes(local=True)
        columns = output.movedim(-1, 0)
        flat = torch.cat([columns.narrow(0, at, size) for at, size in self._sent])
        (arrived,) = exchanged(self._how, [flat]) if flat.numel() else [flat]
        pieces = arrived.split([size for _, size in self._arrives])
        ordered = sorted(zip(self._arrives, pieces, strict=True), key=lambda one: one[0])
        return torch.cat([piece for _, piece in ordered]).movedim(0, -1).contiguous()


def _share(parts: Sequence[FusedPart], ranks: int, rank: int) -> list[_Range]:
    """The columns of a rank, part by part. Ranks next to each other share a piece if there are fewer pieces."""
    begins = accumulate((part.width for part in parts), initial=0)
    sizes = [part.width // part.pieces for part in parts]
    return [
        (begin + size * (rank * part.pieces // ranks), size)
        for begin, size, part in zip(begins, sizes, parts, strict=False)
    ]


def _common(ranges: Sequence[_Range], held: _Range) -> list[_Range]:
    found = [(max(at, held[0]), min(at + size, sum(held))) for at, size in ranges]
    return [(start, end - start) for start, end in found if end > start]


def _sizes(pieces: Sequence[Sequence[_Range]]) -> list[int]:
    return [sum(size for _, size in of_one) for of_one in pieces]


# -- whole sizes, and attributes -------------------------------------------------------------------


def with_local_sizes(
    layers: Sequence[FusedColumns], mesh: DeviceMesh, call: Callable[..., Any], args: _Args, kwargs: _Kwargs
) -> Any:
    """Call the forward of a part with fused layers; see [Note: whole sizes]."""
    try:
        with _LocalSizesMode(layers, mesh):
            return call(*args, **kwargs)
    finally:
        for layer in layers:
            layer.set_sizes(local=False)


class _LocalSizesMode(TorchFunctionMode):
    def __init__(self, layers: Sequence[FusedColumns], mesh: DeviceMesh) -> None:
        super().__init__()
        self.layers = layers
        self.mesh = mesh
        self.ranks = mesh.size()

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = _READ.get(func)
        if read is not None:
            args, kwargs = read(self, args, kwargs)
        return func(*args, **kwargs)

    def layer_of(self, x: torch.Tensor) -> FusedColumns | None:
        """The fused layer whose outputs are as wide."""
        return next((one for one in self.layers if one.has_run and x.shape[-1:] == (sum(one.local),)), None)

    def borders_in(self, x: torch.Tensor) -> dict[int, int]:
        """Where parts begin and end in one process, and in the outputs of a fused layer on this rank."""
        layer = self.layer_of(x)
        whole, local = ([], []) if layer is None else (layer.whole, layer.local)
        return dict(zip(accumulate(whole, initial=0), accumulate(local, initial=0), strict=True))


def _read_split(mode: _LocalSizesMode, args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs]:
    """`x.split(sizes, dim)`, `torch.split(x, sizes, dim)`."""
    names = ("tensor", "split_size_or_sections", "split_size", "dim")
    x, sizes, *rest = (*args, *(kwargs[name] for name in names if name in kwargs))
    if rest not in ([-1], [x.dim() - 1]):
        return args, kwargs
    borders = mode.borders_in(x)
    total = max(borders, default=0)
    if isinstance(sizes, int):
        sizes = [sizes] * (total // sizes)
    asked = list(accumulate(sizes, initial=0))
    if not total or asked[-1] != total or not all(at in borders for at in asked):
        return args, kwargs
    return (x, [borders[end] - borders[start] for start, end in pairwise(asked)], -1), {}


def _read_index(mode: _LocalSizesMode, args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs]:
    """`x[..., start:end]`."""
    x, index = args
    places: tuple[Any, ...] = index if isinstance(index, tuple) else (index,)
    last = places[-1] if places and (places[0] is Ellipsis or len(places) == x.dim()) else None
    if not isinstance(last, slice) or last.step is not None or (last.start is None and last.stop is None):
        return args, kwargs
    borders = mode.borders_in(x)
    start, stop = last.start or 0, max(borders, default=0) if last.stop is None else last.stop
    if not isinstance(start, int) or start not in borders or stop not in borders:
        return args, kwargs
    return (x, (*places[:-1], slice(borders[start], borders[stop]))), kwargs


def _read_view(mode: _LocalSizesMode, args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs]:
    """`x.view(...)`, `x.reshape(...)` of as many elements as all ranks have: heads, or features, are divided.

    They come first after the dimensions that stay, or after the number of parts.
    """
    x, *sizes = (*args, *kwargs.values())
    if len(sizes) == 1 and not isinstance(sizes[0], (int, torch.dtype)):
        sizes = list(sizes[0])
    is_whole = all(isinstance(size, int) and size >= 0 for size in sizes) and (
        math.prod(sizes) == mode.ranks * x.numel() and any(layer.has_run for layer in mode.layers)
    )
    if not is_whole:
        return args, kwargs
    pairs = enumerate(zip(x.shape, sizes, strict=False))
    at = next((place for place, (old, new) in pairs if old != new), min(x.dim(), len(sizes)))
    layer = mode.layer_of(x)
    if layer is not None and len(sizes) > at + 2 and sizes[at] == len(layer.whole):
        at += 1
    if not at or at >= len(sizes) or sizes[at] % mode.ranks:
        return args, kwargs
    sizes[at] //= mode.ranks
    return (x, sizes), {}


def _read_attention(mode: _LocalSizesMode, args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs]:
    """`F.scaled_dot_product_attention` with a mask for all heads, as of relative positions."""
    query, key, value, *rest = args if "query" not in kwargs else (kwargs[name] for name in ("query", "key", "value"))
    mask = rest[0] if rest else kwargs.get("attn_mask")
    if mask is None or query.dim() != mask.dim():
        return args, kwargs
    others = {name: given for name, given in kwargs.items() if name not in ("query", "key", "value", "attn_mask")}
    return (query, key, value, _of_own_heads(mode, query, mask), *rest[1:]), others


def _read_sum(mode: _LocalSizesMode, args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs]:
    """`scores + mask`, where attention is computed step by step."""
    if len(args) != 2 or not all(isinstance(one, torch.Tensor) and one.dim() == 4 for one in args):
        return args, kwargs
    scores, mask = args
    return (scores, _of_own_heads(mode, scores, mask)), kwargs


def _of_own_heads(mode: _LocalSizesMode, of_rank: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """This rank's heads of a mask [..., heads, queries, keys] that has those of all ranks.

    Collectives: one all-gather of its gradient, in backward.
    """
    if mask.shape[-3] != mode.ranks * of_rank.shape[-3]:
        return mask
    own: torch.Tensor = moved(mask, mode.mesh, Replicate(), Shard(mask.dim() - 3)).to_local()
    return own


_READ: MappingProxyType[Any, Callable[[_LocalSizesMode, _Args, _Kwargs], tuple[_Args, _Kwargs]]] = MappingProxyType(
    {
        torch.Tensor.split: _read_split,
        torch.split: _read_split,
        torch.Tensor.__getitem__: _read_index,
        torch.Tensor.view: _read_view,
        torch.Tensor.reshape: _read_view,
        torch.reshape: _read_view,
        torch.nn.functional.scaled_dot_product_attention: _read_attention,
        torch.Tensor.add: _read_sum,
        torch.add: _read_sum,
    }
)
