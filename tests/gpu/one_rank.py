"""One process with a group of the device's own backend: gradients and shards travel through it. Run by test_nccl.py."""

import itertools
import os
import sys
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

import weft
from weft.engines.options import ReduceOptions, ShardOptions

DEVICE = torch.device(sys.argv[1] if __name__ == "__main__" else "cpu")


class Alone:
    """The other ranks of a strategy, of which there are none."""

    copies = None

    def __init__(self):
        self._numbers, self._counts, self.pretended = itertools.count(1), {}, False

    def meet(self, what, mine):
        return [mine]

    def agree(self, what, facts, *, fix=None):
        pass

    compare = agree

    def finish(self):
        pass

    def differing(self, what, numbers):
        return []

    def report(self, error):
        pass

    def next_reduction(self):
        return next(self._numbers)

    def count(self, key, add):
        self._counts[key] = self._counts.get(key, 0) + add
        return self._counts[key]


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).to(DEVICE)


def train(model):
    draw = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(4):
        x, y = torch.randn(16, 8, generator=draw).to(DEVICE), torch.randint(4, (16,), generator=draw).to(DEVICE)
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [whole(p) for p in model.parameters()]


def whole(parameter):
    value = parameter.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def strategies(ctx):
    """Module and strategy, for each way in which an engine sends."""
    world = dist.group.WORLD
    for options in ({}, {"flat": True}, {"unused": "zero"}, {"dtype": torch.bfloat16}, {"bucket_bytes": 1024}):
        model = build()
        yield (
            f"gradients {options}",
            model,
            ctx.engine.reduce_gradients(model, world, ReduceOptions(**options), Alone()),
        )
    model, mesh = build(), torch.distributed.init_device_mesh(DEVICE.type, (1,), mesh_dim_names=("data",))
    units = tuple((part,) for part in model if isinstance(part, nn.Linear))
    yield "shards", model, ctx.engine.shard(model, mesh, world, ShardOptions(units=units), Alone())


@contextmanager
def group():
    backend = "gloo" if DEVICE.type == "cpu" else None
    if DEVICE.type != "cpu":
        torch.accelerator.set_device_index(DEVICE.index)
    dist.init_process_group(backend, device_id=None if DEVICE.type == "cpu" else DEVICE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def main():
    assert os.environ["WORLD_SIZE"] == "1"
    expected = train(build())
    with group(), weft.adopt(device=None if DEVICE.type != "cpu" else "cpu") as ctx:
        assert ctx.device == DEVICE, ctx.device
        for name, model, strategy in strategies(ctx):
            found = train(model)
            # On an accelerator the place of a gradient in memory decides how its norm is added up.
            limit = 2e-2 if "bfloat16" in name else 0.0 if DEVICE.type == "cpu" else 1e-5
            for one, two in zip(found, expected, strict=True):
                torch.testing.assert_close(one, two, rtol=0, atol=limit, msg=lambda text, name=name: f"{name}: {text}")
            strategy.undo()
            print(name, "ok")
        weft.replicate(build(), ctx)
        assert weft.reduce(torch.ones(2, device=DEVICE), ctx).tolist() == [1, 1]
        assert weft.collectives.gather_objects({"a": 1}, ctx) == [{"a": 1}]
    print("all ok")


if __name__ == "__main__":
    main()
