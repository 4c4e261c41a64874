"""Messages of a real run that are over when they are made, so that what is alive is no matter of chance.

A thread of gloo lets go of a message some time after it has arrived, sooner or later from run to run. Here a message is
waited for until only the program holds its tensors; the program gets a work that is done, as from ranks that are
only pretended. Sends and receives are left alone: they wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from weft import torch_internals

_PAIRED = ("send", "recv_", "recv_any_source_")
_LONGEST_S = 10.0


def finish_messages(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Do one operation; if it is a message, until it is over."""
    name = torch_internals.schema.of(func).name.partition("::")[2]
    tree_leaves = torch_internals.tree.found.tree_leaves
    if func.namespace == torch_internals.wait.found.default.namespace and name != "wait_tensor":
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            torch_internals.wait(tensor)
            _until_held_by(tensor, 1)
        return out
    if func.namespace != "c10d" or name in _PAIRED:
        return func(*args, **kwargs)
    tensors: list[Any] = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    holders = [torch_internals.HOLDERS.of(each)() for each in tensors]
    out = func(*args, **kwargs)
    *results, work = out if isinstance(out, tuple) else (out,)
    if not isinstance(work, torch.ScriptObject):
        return out
    dist.Work.unbox(work).wait()
    del out, work
    for tensor, count in zip(tensors, holders, strict=True):
        _until_held_by(tensor, count)
    future: Any = Future()
    future.set_result([each for each in tree_leaves(results) if isinstance(each, torch.Tensor)])
    done = torch_internals.work_of(future).boxed()
    return (*results, done) if results else done


def _until_held_by(tensor: Any, count: int) -> None:
    end = time.monotonic() + _LONGEST_S
    while (held := torch_internals.HOLDERS.of(tensor)()) > count:
        if time.monotonic() > end:
            raise AssertionError(f"a message {list(tensor.shape)} is held by {held}, not {count}")
        time.sleep(1e-4)
