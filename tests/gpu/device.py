"""Where the tests marked `gpu` compute: on the accelerator; with GPU_TESTS_DRY=1 in miniature, on whatever is there."""

import functools
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from weft.engines.torch.device.devices import TorchDevices
from weft.testing import RanksFailed, run_ranks

DRY = os.environ.get("GPU_TESTS_DRY") == "1"
_KIND = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
DEVICE = "cpu" if _KIND is None else f"{_KIND.type}:0"
COMPILER = "aot_eager" if DRY else "inductor"


def _call(ctx, operation):
    ones, n = torch.ones(4, device=ctx.device), ctx.world_size
    if operation == "sum":
        dist.all_reduce(ones)
    elif operation == "broadcast":
        dist.broadcast(ones, 0)
    elif operation == "all_gather_into_tensor":
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(torch.empty(4 * n, device=ctx.device), ones)
    elif operation == "send":
        dist.send(ones, 1) if ctx.rank == 0 else dist.recv(ones, 0)
    elif operation == "functional all_gather":
        gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
        ones = gather(ones, 0, dist.group.WORLD)
    else:
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(torch.empty(4 // n, device=ctx.device), ones, op=dist.ReduceOp.AVG)
    return float(ones.sum())


@functools.cache
def refusal(operation, backend):
    """Why ranks that share the device cannot do an operation on its tensors, as a try tells; None if they can."""
    try:
        run_ranks(_call, 2, operation, device=DEVICE, backend=backend, timeout_s=30)
    except RanksFailed as error:
        cause = error.__cause__
        return f"{backend}, {operation} of {DEVICE} tensors: " + (str(cause or error).splitlines() or [repr(cause)])[0]
    return None


@functools.cache
def backend():
    """By what ranks that share the device send: its own, such as NCCL, if that lets them, else gloo, by the host."""
    own = TorchDevices().backend(torch.device(DEVICE))
    return "gloo" if refusal("sum", own) else own


def on_ranks(fn, n, *args, **options):
    """`run_ranks` on the device."""
    return run_ranks(fn, n, *args, device=DEVICE, backend=backend(), **options)


def needs(*operations, by=None):
    """Skip the test, with the reason, if ranks that share the device cannot do one of these.

    What gloo is documented to do is no reason to skip: then something else is wrong.
    """
    for operation in operations:
        reason = refusal(operation, by or backend())
        if reason is not None and operation in REPLICATED:
            pytest.fail(reason)
        if reason is not None:
            pytest.skip(reason)


REPLICATED = ("sum", "broadcast")
SHARDED = ("broadcast", "all_gather_into_tensor", "reduce_scatter")
