"""Lines about DTensors that torch answers with a part, or not at all, are right or refused.

`float(p.grad.norm())` of a sharded parameter is the norm of this rank's shard, and no error of torch's; and
`p.copy_(whole)`, as in `load_state_dict`, is "got mixed torch.Tensor and DTensor". They are found where torch
dispatches them; so is what torch refuses or loses otherwise, see `dtensor_operations`.

[Note: whose DTensors] torch dispatches all DTensors of a process in one place, so the checks are there while a strategy
that cuts parameters lives, and what they replace is put back with the last one. Meanwhile they see every DTensor, also
one that the program has made by itself. Whose it is cannot be told: results of operations have meshes that torch
derives from those of their operands, which may be the program's as well, and meshes that are equal are one. On such a
DTensor they do the same: what torch would answer with a part of the number, or lose, or crash on, raises, and what
torch refuses without saying why may be copied or is explained. Numbers that are right stay what they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from weft import torch_internals
from weft.engines.torch.parts.dtensor_operations import Copies, check_written, copied, no_memory, watched
from weft.engines.torch.parts.linear_loss import HeadReads, for_sharded_heads
from weft.errors import ContractError
from weft.tensors.blocks import cut_as
from weft.tensors.dtensor import axes_of, is_sharded

# These methods are not operations: torch looks for the memory of the DTensor itself, and crashes or raises.
_OF_MEMORY = ("tolist", "numpy", "__format__", "__dlpack__", "storage", "share_memory_", "apply_", "map_", "map2_")


class ReadChecks:
    """Checks for one strategy, until it is collected or releases them; see [Note: whose DTensors]."""

    def __init__(self, heads: HeadReads | None = None) -> None:
        """Check from now on; `heads` is what the strategy knows of weights that a loss reads."""
        from torch.distributed.tensor import DTensor  # noqa: PLC0415  (half a second)

        dispatcher: Any = torch_internals.DISPATCHER.of(DTensor)
        checks = vars(dispatcher).get("weft_checks") or _Checks(dispatcher)
        checks.enter(id(self), heads or HeadReads())
        self._leave = weakref.finalize(self, checks.leave, id(self))
        self._leave.atexit = False

    def release(self) -> None:
        """Check no more."""
        self._leave()  # once


class _Checks:
    """What was replaced, and for whom; kept at torch's dispatcher."""

    def __init__(self, dispatcher: Any) -> None:
        self.copies: Copies = weakref.WeakValueDictionary()
        self._dispatcher = dispatcher
        self._users: dict[int, HeadReads] = {}
        self._undo: list[Callable[[], None]] = []

    def enter(self, user: int, heads: HeadReads) -> None:
        self._users[user] = heads  # first: the last other one may be collected here
        if not self._undo:
            self._dispatcher.weft_checks = self
            self._undo = _replaced(self._dispatcher, self)

    def heads(self) -> list[HeadReads]:
        return list(self._users.values())

    def leave(self, user: int) -> None:
        self._users.pop(user, None)
        if not self._users:
            vars(self._dispatcher).pop("weft_checks", None)
            while self._undo:
                self._undo.pop()()


def _replaced(dispatcher: Any, checks: _Checks) -> list[Callable[[], None]]:
    """Replace functions of torch by those that check; what puts each back."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  (half a second)

    def copies_now() -> Copies | None:
        checks = vars(dispatcher).get("weft_checks")
        return None if checks is None else checks.copies

    operations = torch_internals.OWN_OPERATIONS.of(dispatcher)
    views = [op for op in (torch.ops.aten.as_strided.default,) if op in operations]
    whole, *since = torch_internals.DISPATCH_STEPS
    steps = [whole] if whole.exists else since
    losses = [one for one in torch_internals.linear_losses if one.exists]
    new: list[tuple[Any, Any, Any]] = [
        (operations, torch_internals.read_number.found.default, _number),
        (operations, torch.ops.aten.copy_.default, partial(_copied, checks.copies)),
        *((operations, op, watched(operations[op], copies_now)) for op in views),
        *((dispatcher, step.name, watched(step.of(dispatcher), copies_now)) for step in steps),
        *((DTensor, name, no_memory(name)) for name in _OF_MEMORY),
        (DTensor, "__deepcopy__", copied(DTensor.__deepcopy__)),
        *((*loss.home, for_sharded_heads(loss.found, checks.heads)) for loss in losses),
    ]
    return [_exchange(owner, name, value) for owner, name, value in new]


def _exchange(owner: Any, name: Any, ours: Any) -> Callable[[], None]:
    """Replace an entry of a dict, or an attribute; what puts it back, unless somebody has replaced that since."""
    is_dict = isinstance(owner, dict)
    write, remove = (type(owner).__setitem__, type(owner).__delitem__) if is_dict else (setattr, delattr)

    def held() -> Any:
        return (owner if is_dict else vars(owner)).get(name)

    before = held()
    write(owner, name, ours)

    def put_back() -> None:
        if held() is ours and before is None:
            remove(owner, name)
        elif held() is ours:  # else somebody may call it
            write(owner, name, before)

    return put_back


def _number(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if all(placement.is_replicate() for placement in tensor.placements):
        return op(torch_internals.DTENSOR_PART.of(tensor))
    raise ContractError(
        "the number in a DTensor is read, of which this rank has only a part",
        found=f"item(), float() or bool() of a DTensor that is {', '.join(map(str, tensor.placements))} over "
        f"{axes_of(tensor)}",
        expected="the ranks put their parts together first",
        fix="value.full_tensor().item()  # on all ranks; or norm = weft.clip_grads(model, ctx, max_norm=1.0)",
    )


def _copied(copies: Copies, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`copy_`: a part of a whole tensor is what a shard takes from it. Collectives: those of a change of placements."""
    target, source, *_ = args
    check_written(op, args, kwargs, copies)
    if not is_sharded(target):
        raise ContractError(
            "copy_: a DTensor is copied into a plain tensor",
            found=f"a DTensor {list(source.shape)} over {axes_of(source)}, of which this rank has a part",
            expected="a whole tensor, or a target that is sharded as the source",
            fix="target.copy_(source.full_tensor())  # on all ranks; or with weft.full_params(model, ctx): ...",
        )
    part: Any = source
    if not is_sharded(source):
        if any(placement.is_partial() for placement in target.placements):
            raise ContractError(
                "copy_: a whole tensor is copied into a DTensor of which each rank has a term of a sum",
                found=f"a plain tensor {list(source.shape)}, and a DTensor over {axes_of(target)}",
                expected="a target that is sharded or replicated",
                fix="target = target.redistribute(placements=[Replicate()] * target.device_mesh.ndim)",
            )
        part = cut_as(source.expand(target.shape), target)
    elif source.device_mesh != target.device_mesh:  # torch would take the parts of one for those of the other
        raise ContractError(
            "copy_: a DTensor is copied into one that lies over other ranks",
            found=f"over {axes_of(source)}, into one over {axes_of(target)}",
            expected="DTensors over one mesh, or a whole tensor",
            fix="target.copy_(source.full_tensor())  # on all ranks",
        )
    elif source.placements != target.placements or source.shape != target.shape:
        part = source.expand(target.shape)
        part = part.redistribute(target.device_mesh, target.placements)
    torch_internals.DTENSOR_PART.of(target).copy_(torch_internals.DTENSOR_PART.of(part))
    return target
