"""Let a part of a tensor raise where it is pickled, or a whole one is loaded as if it were the part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from weft.engines.torch.hooks.every_optimizer import parameters_of
from weft.engines.torch.hooks.method_hooks import Removable
from weft.errors import ContractError, listed
from weft.tensors.dtensor import is_sharded
from weft.tensors.remote_parameter import RemoteTensor


def refuse_file(what: str, whose: str, name: str, tensor: object) -> None:
    """Let `torch.save` and pickle of a tensor raise.

    Args:
        what: Name of the strategy.
        whose: State it belongs to.
        name: Of the tensor.
        tensor: Anything else is passed over.
    """
    if isinstance(tensor, torch.Tensor):
        vars(tensor)["weft_part"] = _NoFile(what, whose, f"{name} {list(tensor.shape)}")


def refuse_optimizer_file(what: str, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Let the state_dict of an optimizer raise when it is pickled, where it holds parts, or not that of all parameters.

    Args:
        what: Name of the strategy.
        optimizer: Whose state it is.
        state: Of its `state_dict`.
    """
    is_part = any(isinstance(p, RemoteTensor) for p in parameters_of(optimizer))
    for number, entry in state["state"].items():
        for name, value in entry.items():
            if is_part or (isinstance(value, torch.Tensor) and is_sharded(value)):
                refuse_file(what, type(optimizer).__name__, f"{name} of parameter {number}", value)


def refuse_states(what: str, module: nn.Module, removable: Removable) -> None:
    """Let a state_dict of shards raise when it is pickled, and whole tensors when they are loaded as one.

    What other ranks have is passed over in loading.

    Args:
        what: Name of the strategy.
        module: Of which this rank holds shards.
        removable: Ends it.

    Raises:
        ContractError: Not here: in such a call.
    """

    def mark(part: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, tensor in state.items():
            if name.startswith(prefix) and not isinstance(tensor, nn.Parameter) and is_sharded(tensor):
                refuse_file(what, "a sharded module", name, tensor)

    def check(part: nn.Module, state: dict[str, Any], prefix: str, *unused: Any) -> None:
        named = [*part.named_parameters(), *part.named_buffers()]
        for name, p in named:
            if isinstance(p, RemoteTensor) and prefix + name in state:
                state[prefix + name] = p.detach()  # torch would warn that nothing is copied
        whole = [name for name, p in named if is_sharded(p) and _is_whole(state.get(prefix + name))]
        if whole:
            kind = type(part).__name__.removeprefix("FSDP")
            raise ContractError(
                f"{what}: load_state_dict was given whole tensors for a sharded {kind}",
                found=f"{listed(whole)}, of which this rank holds only a shard",
                expected=f"weights that are loaded before {what}, or files from which each rank reads its part",
                fix=f"model.load_state_dict(...) before weft.{what}, or weft.load_weights(model, path, ctx) after it",
            )

    removable.add(module.register_state_dict_post_hook(_NoPickle(what, type(module).__name__, mark)).remove)
    removable.add(module.register_load_state_dict_pre_hook(check).remove)


def _is_whole(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not is_sharded(value)


class _NoPickle:
    """A hook that comes up when its module is pickled; a copy keeps it."""

    def __init__(self, what: str, class_name: str, call: Callable[..., None]) -> None:
        self._what = what
        self._class_name = class_name
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        self._call(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> _NoPickle:
        return self

    def __reduce__(self) -> NoReturn:
        raise ContractError(
            f"{self._what}: pickle of a {self._class_name} of which each rank has a part",
            found="torch.save or pickle of the module itself",
            expected="weft.save or weft.export for files; or a plain module",
            fix="model, ctx = weft.undo(model, ctx, rebind=optimizer)  # before torch.save(model, file)",
        )


class _NoFile:
    """Goes with a shard in a state_dict, and comes up when it is pickled."""

    def __init__(self, what: str, whose: str, name: str) -> None:
        self._what = what
        self._whose = whose
        self._name = name

    def __deepcopy__(self, memo: dict[int, Any]) -> _NoFile:
        return self

    def __reduce__(self) -> NoReturn:
        raise ContractError(
            f"{self._what}: the state_dict of {self._whose} cannot be pickled",
            found=f"torch.save or pickle of {self._name}, of which this rank holds only a part",
            expected="all ranks save their parts, or the weights are made whole",
            fix="path = weft.save(state, directory, step, ctx)  # then, in one process: weft.export(path, folder); or\n"
            "            with weft.full_params(model, ctx): ...  # on all ranks",
        )
