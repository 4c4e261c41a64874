"""zero_partition with DeepSpeed: the optimizer's state and the parameters on a disk, in the memory of the CPU, or not.

Needs DeepSpeed's extension for disks, which takes minutes to compile; `.ci/deepspeed` does it once.
"""

import functools
import os
import pathlib

import pytest
import torch
from torch import nn

import weft
from weft.testing import largest_difference, run_ranks

from .test_deepspeed import _mine, _whole

_EXTENSIONS = pathlib.Path(os.environ.get("TORCH_EXTENSIONS_DIR", "/nowhere"))
pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(
        not any(_EXTENSIONS.glob("**/async_io.so")), reason="the extension for disks is not compiled: .ci/deepspeed"
    ),
]

OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.1),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
}


def _net():
    """Large enough for the disk: DeepSpeed leaves tensors below a megabyte in memory."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 1100), nn.Tanh(), nn.Linear(1100, 1100), nn.Tanh(), nn.Linear(1100, 3))


def _step(model, optimizer, ctx, number, split=1):
    draw = torch.Generator().manual_seed(number)
    for _ in range(2):
        x, y = (_mine(ctx, torch.randn(8, size, generator=draw)).chunk(split) for size in (6, 3))
        for some_x, some_y in zip(x, y, strict=True):
            (nn.functional.mse_loss(model(some_x), some_y) / 2 / split).backward()
    if ctx is None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    else:
        weft.clip_grads(model, ctx, max_norm=0.5)
    optimizer.step()
    optimizer.zero_grad()


def _train(ctx, kind, folder=None, split=1, **options):
    """Ten steps; in the middle a checkpoint, which a second model goes on from."""
    model = _net()
    optimizer = OPTIMIZERS[kind](model)
    if ctx is None:
        for number in range(10):
            _step(model, optimizer, None, number, split)
        return _whole(model, None)
    model, optimizer, after = weft.zero_partition(model, optimizer, ctx, stage=3, engine="deepspeed", **options)
    state, after = weft.checkpointable({"model": model, "optimizer": optimizer}, after)
    for number in range(5):
        _step(model, optimizer, after, number)
    weft.save(state, folder, 5, after)
    for number in range(5, 10):
        _step(model, optimizer, after, number)
    first = _whole(model, after)
    assert weft.restore(state, folder, after).step == 5
    for number in range(5, 10):
        _step(model, optimizer, after, number)
    again = _whole(model, after)
    (zero,) = [o.engine.optimizer for o in weft.contract.offered(model, weft.contract.Undoable) if hasattr(o, "engine")]
    in_memory = sum(
        t.numel() for state in zero.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)
    )
    flat = sum(t.numel() for t in zero.fp32_partitioned_groups_flat)
    return first, again, in_memory, flat


@functools.cache
def _reference(kind):
    one, cut = (_train(None, kind, split=split) for split in (1, 2))
    return one, largest_difference(one, cut)


def _on_disk(ctx, kind, folder, parameters):
    disk = pathlib.Path(folder, "disk")
    offload = {"optimizer": disk, "parameters": disk} if parameters else disk
    return _train(ctx, kind, pathlib.Path(folder, "saved"), offload=offload)


@pytest.mark.parametrize(("kind", "parameters"), [("adamw", False), ("sgd", True)])
def test_state_on_a_disk_gives_the_numbers_of_one_process(tmp_path, kind, parameters):
    expected, noise = _reference(kind)
    for first, again, in_memory, flat in run_ranks(_on_disk, 2, kind, str(tmp_path), parameters):
        assert largest_difference(first, expected) <= 2 * noise
        assert largest_difference(again, expected) <= 2 * noise
        assert in_memory < 10 and flat < 10, "weights and moments are on the disk between steps"
    files = {path.name.split("-")[0]: path.stat().st_size for path in tmp_path.glob("disk/**/rank1/*.swp")}
    moments = {"adamw": {"exp_avg", "exp_avg_sq"}, "sgd": {"momentum_buffer"}}[kind]
    assert moments <= set(files) and all(files[name] >= 2**20 for name in moments)


def _no_room(ctx, folder):
    model = _net()
    optimizer = OPTIMIZERS["sgd"](model)
    before = [p.detach().clone() for p in model.parameters()]
    try:
        weft.zero_partition(model, optimizer, ctx, stage=2, engine="deepspeed", offload=folder)
    except ValueError as error:
        assert largest_difference(before, [p.detach() for p in model.parameters()]) == 0
        return str(error)
    return ""


def test_a_disk_needs_stage_3(tmp_path):
    for text in run_ranks(_no_room, 2, str(tmp_path)):
        assert "optimizer to" in text and "stage 3 for parameters, and for a disk" in text
