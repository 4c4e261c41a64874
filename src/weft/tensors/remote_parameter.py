"""Tensors that stand for what another rank has, as the parameters of the other stages of a pipeline.

They lie on meta. Unlike tensors on meta that wait for values, they stay there; strategies and device moves leave them
out. What is computed from them is elsewhere as well, and reading it is an error that says so: a sum over
`model.parameters()` is then never the sum over those of one rank.
"""

from __future__ import annotations

from typing import Any, NoReturn, cast

import torch
from torch import nn
from typing_extensions import override

from weft import torch_internals
from weft.errors import ContractError, WeftError
from weft.tensors.nested import map_tensors, tensors

_MARK = "_weft_elsewhere"


class RemoteTensor(torch.Tensor):
    """A tensor on meta; also what is computed from one, with tensors of this rank or without."""

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute shapes, and raise where numbers are wanted.

        Raises:
            ContractError: `func` returns numbers, or changes a tensor of this rank.
        """
        with torch_internals.without_subclasses():
            try:
                return _computed(func, args, kwargs or {})
            except WeftError:
                raise
            except Exception as error:
                raise _refused(func, str(error).strip().partition("\n")[0]) from error

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A copy is elsewhere as well."""
        made: torch.Tensor = memo.setdefault(id(self), empty_elsewhere(self))
        return made

    @override
    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """A file would be without it."""
        raise ContractError(
            "tensors that another rank has cannot be pickled",
            found=f"torch.save or pickle of a tensor {list(self.shape)} that this rank does not have",
            expected="all ranks save what they have, or the weights are made whole",
            fix="model, ctx = weft.undo(model, ctx, rebind=optimizer)  # or weft.save(state, directory, step, ctx)",
        )


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    name = getattr(func, "__name__", "")
    first = args[0] if args else next(iter(kwargs.values()))
    if name == "__get__":  # a shape, a device, a gradient
        found = func(*args)
        return found if isinstance(found, RemoteTensor) else _marked(found)
    if name in {"backward", "grad"}:
        raise _refused(func, "a loss, or parameters, of which other ranks have a part")
    if name in {"cpu", "cuda"}:
        return first
    if name == "to":  # another dtype, and no other device
        devices = (str, int, torch.device)
        args = [first, *("meta" if isinstance(a, devices) and not isinstance(a, bool) else a for a in args[1:])]
        kwargs = {key: "meta" if key == "device" else value for key, value in kwargs.items()}
    changes = (name.endswith("_") and (not name.startswith("__") or name.startswith("__i"))) or name == "__setitem__"
    if changes and isinstance(first, (list, tuple)):
        return _change_ours(func, args, kwargs)
    if changes and not isinstance(first, RemoteTensor):
        raise _refused(func, f"a tensor {list(first.shape)} of this rank is changed by it")
    there = func(*map_tensors(_on_meta, args), **map_tensors(_on_meta, kwargs))
    return first if changes else _marked(there)


def _change_ours(func: Any, args: Any, kwargs: Any) -> Any:
    """A function that changes the tensors of a list: those of this rank alone."""
    ours = [at for at, tensor in enumerate(args[0]) if not isinstance(tensor, RemoteTensor)]
    left = [[a[at] for at in ours] if isinstance(a, (list, tuple)) and len(a) == len(args[0]) else a for a in args]
    if any(isinstance(one, RemoteTensor) for one in tensors((left, kwargs))):
        raise _refused(func, "tensors of this rank are changed by it")
    if not ours and any(True for _ in tensors((left[1:], kwargs))):  # what the function finds is written there
        raise ContractError(
            f"{func.__name__}: gradients that another rank has are looked at, as of a pipeline or of experts",
            found="torch.amp.GradScaler: each rank would see overflows of its own gradients alone",
            expected="a precision that needs no scale",
            fix='model, ctx = weft.with_precision(model, ctx, "bf16")  # in place of GradScaler, before the pipeline',
        )
    if ours:
        func(*left, **kwargs)
    return args[0]


def _refused(func: Any, found: str) -> ContractError:
    return ContractError(
        f"{getattr(func, '__name__', func)}: numbers are read that another rank has, as of a pipeline or of experts",
        found=found or "a tensor on meta",
        expected="what this rank has, or functions that put the parts of the ranks together",
        fix="norm = weft.clip_grads(model, ctx, max_norm=1.0)  # for the norm of all gradients; or\n"
        "            [p for p in model.parameters() if not p.is_meta]  # this rank's own; or\n"
        "            model, ctx = weft.undo(model, ctx, rebind=optimizer)",
    )


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) in {torch.Tensor, nn.Parameter, RemoteTensor}:
        return tensor if tensor.is_meta else tensor.to("meta")
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")  # no DTensor: its result would be one


def _marked(found: Any) -> Any:
    def mark(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_subclass(RemoteTensor) if type(tensor) is torch.Tensor and tensor.is_meta else tensor

    return map_tensors(mark, found)


def empty_elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """What stands for a tensor: its shape and dtype, and no memory; a parameter for a parameter."""
    values = tensor.detach()
    if values.is_meta and type(values) in {torch.Tensor, RemoteTensor}:  # `empty_like` would import sympy: 30 MB
        made = torch.empty_strided(values.size(), values.stride(), dtype=values.dtype, device="meta")
    else:
        made = torch.empty_like(values, device="meta")
    marked: Any = made
    if isinstance(tensor, nn.Parameter):
        marked = nn.Parameter(made, requires_grad=tensor.requires_grad)
        vars(marked)[torch_internals.IS_PARAMETER.name] = True
    if type(made) is torch.Tensor:
        marked.__class__ = RemoteTensor
    vars(marked)[_MARK] = True
    return cast("torch.Tensor", marked)


def gradient_elsewhere(parameter: nn.Parameter) -> torch.Tensor:
    """What stands for the gradient of a parameter that another rank has; also for one of a cut layer, a DTensor."""
    if isinstance(parameter, RemoteTensor):
        return parameter.detach()
    made: torch.Tensor = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta").as_subclass(RemoteTensor)
    return made


def is_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether another rank has a tensor."""
    return isinstance(tensor, RemoteTensor) or (tensor.is_meta and getattr(tensor, _MARK, False))


def forget_elsewhere(tensor: torch.Tensor) -> None:
    """Let a tensor be an ordinary one on meta."""
    vars(tensor).pop(_MARK, None)
    if isinstance(tensor, RemoteTensor):
        marked: Any = tensor
        marked.__class__ = nn.Parameter if isinstance(tensor, nn.Parameter) else torch.Tensor
