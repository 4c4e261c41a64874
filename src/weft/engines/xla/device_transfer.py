"""Modules, batches and values to the devices of XLA, and back.

[Note: same objects] `Module.to` would make new parameters, because memory of XLA cannot stand in for that of the
CPU: an optimizer made before would keep the old ones, and tied weights would no longer be tied. Here the
contents of both are exchanged, so that every tensor stays the object that it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, pairwise
from typing import Any

import torch
from torch import nn

from weft.engines.torch.hooks.every_optimizer import optimizers_of
from weft.engines.xla import internals
from weft.engines.xla.device_layout import batch_plan
from weft.engines.xla.library import TorchXLA
from weft.errors import ContractError, listed
from weft.tensors.dtensor import is_sharded
from weft.tensors.nested import map_leaves, moves_itself


def place(module: nn.Module, device: torch.device) -> None:
    """Bring a module to the device, and with it the state that optimizers have of its parameters.

    Raises:
        ContractError: FSDP2 has cut it already; or somebody holds memory of a parameter that cannot follow.
    """
    cut = [name for name, p in module.named_parameters() if is_sharded(p)]
    if cut:
        raise ContractError(
            f"{type(module).__name__} cannot be brought to xla: FSDP2 does not work there",
            found=f"parameters sharded by torch.distributed.fsdp: {listed(cut)}",
            expected="a plain module; on xla the compiler cuts parameters, and weft tells it how",
            fix="model, ctx = weft.fully_shard(model, ctx)  # instead of torch's fully_shard",
        )
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    there = {name: tensor for name, tensor in named.items() if tensor.device.type != "xla"}
    for name, tensor in there.items():
        try:
            _exchange(tensor, device)
        except RuntimeError as error:
            raise ContractError(
                f"{type(module).__name__} cannot be brought to xla",
                found=f"{name}: {error}".split("\n", 1)[0],
                expected="parameters that no graph of an earlier forward pass holds",
                fix="weft.to_device(model, ctx)  # before its first forward pass",
            ) from error
    for optimizer in optimizers_of([p for p in there.values() if isinstance(p, nn.Parameter)]):
        for parameter, state in optimizer.state.items():
            for key, value in state.items() if parameter.device.type == "xla" else ():
                if isinstance(value, torch.Tensor) and value.dim() and value.device.type != "xla":
                    state[key] = value.to(device)


def _exchange(tensor: torch.Tensor, device: torch.device) -> None:
    gradient = tensor.grad
    moved = tensor.detach().to(device)
    if isinstance(tensor, nn.Parameter):
        moved = nn.Parameter(moved, tensor.requires_grad)
    attributes = dict(vars(tensor))
    tensor.grad = None
    torch.utils.swap_tensors(tensor, moved)
    vars(tensor).update(attributes)
    if gradient is not None:
        tensor.grad = gradient.to(device)


def send(
    value: Any, device: torch.device, skip: frozenset[str], lib: TorchXLA, mesh: Any, data_axes: Mapping[str, int]
) -> Any:
    """Put a nested value on the devices, the rows of tensors shared out among those along `data_axes`."""

    def put(path: tuple[str, ...], leaf: Any) -> Any:
        if skip and any(key in skip for key in path):
            return leaf
        if not isinstance(leaf, torch.Tensor):
            return leaf.to(device) if moves_itself(leaf) else leaf
        if mesh is None or leaf.device.type != "cpu":
            return leaf.to(device)
        hosts = lib.runtime.process_count()
        plan = batch_plan(leaf.shape, tuple(data_axes), math.prod(data_axes.values()) // hosts)
        layout = lib.spmd.ShardingSpec(mesh, plan, minibatch=hosts > 1)
        return lib.model.send_cpu_data_to_device([leaf], device, input_sharding=layout)[0]

    return map_leaves(put, value)


def prefetch(batches: Iterable[Any], move: Callable[[Any], Any], lib: TorchXLA) -> Iterator[Any]:
    """Yield every batch on the devices; the copy of the next one runs while this one is used.

    Where no gradients are wanted no optimizer steps, so the work on each batch is a graph of its own.
    """
    # In pairs of a batch and the one after it, which is moved before the first is used.
    for now, _ in pairwise(chain(map(move, batches), (None,))):
        yield now
        if not torch.is_grad_enabled():
            lib.torch_xla.sync()


def fetch(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The values of tensors in the memory of the CPU, all in one go."""
    names = [name for name, tensor in tensors.items() if tensor.device.type == "xla"]
    values = internals.to_cpu([tensors[name].detach() for name in names]) if names else []
    return {**tensors, **dict(zip(names, values, strict=True))}
