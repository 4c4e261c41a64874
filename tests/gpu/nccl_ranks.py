"""One rank of several on one card: some steps equal to those of one process, then a fault. Run by test_nccl.py."""

import faulthandler
import os
import signal
import sys
import time

import torch
from torch import nn

import weft
from weft.context import shutdown

IS_RUN = __name__ == "__main__"
FAULT, DEVICE, RANKS = sys.argv[1:4] if IS_RUN else ("none", "cpu", "2")
DEVICE, HAS_MESH = torch.device(DEVICE), RANKS == "4"
STEPS = 4
clock = {"start": time.monotonic()}


def say(text):
    print(f"{time.monotonic() - clock['start']:.1f} s: {text}", flush=True)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).to(DEVICE)


def step(model, optimizer, number, rank=0, ranks=1):
    draw = torch.Generator().manual_seed(number)
    x, y = torch.randn(16, 8, generator=draw).to(DEVICE), torch.randint(4, (16,), generator=draw).to(DEVICE)
    nn.functional.cross_entropy(model(x[rank::ranks]), y[rank::ranks]).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    float(getattr(norm, "full_tensor", lambda: norm)())  # here a device is waited for
    optimizer.step()
    optimizer.zero_grad()


def whole(model):
    return [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in model.parameters()]


def values(parameters):
    return [getattr(p, "_local_tensor", p).detach().clone() for p in parameters]


def main(ctx):
    expected = build()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    for number in range(STEPS):
        step(expected, optimizer, number)
    model = build()
    if HAS_MESH:
        model, ctx = weft.fully_shard(model, ctx, units=[nn.Linear], axis=("replica", "shard"))
    else:
        model, ctx = weft.replicate(model, ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(STEPS):
        step(model, optimizer, number, ctx.rank, ctx.world_size)
    for one, two in zip(whole(model), whole(expected), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5)
    say("equal")
    weft.barrier(ctx)
    clock["start"] = time.monotonic()
    if FAULT == "none":
        return
    if ctx.rank == 1:
        if FAULT == "raise":
            raise ValueError("bad data")
        os.kill(os.getpid(), signal.SIGKILL)
    faulthandler.dump_traceback_later(12)
    mine = list(model.parameters())  # FSDP2 puts others in their place while a unit is gathered
    before = values(mine)
    try:
        for number in range(2):
            step(model, optimizer, number, ctx.rank, ctx.world_size)
    finally:
        say("the wait is over")
        assert all(map(torch.equal, before, values(mine))), "a parameter has changed"


def run():
    backend = None
    if DEVICE.type == "cpu":
        from tests.peers.waiting_group import NAME, register

        backend = NAME
        register()
    if DEVICE.type != "cuda":  # what is waited for is NCCL; a busy machine may end a process slowly
        shutdown._END_LIMIT_S = 300
    say("imported")
    try:
        with weft.start(device=DEVICE, backend=backend, mesh={"replica": 2, "shard": 2} if HAS_MESH else None) as ctx:
            main(ctx)
    except weft.errors.PeerError as error:
        say(f"PeerError of rank {error.rank}: {error.text}")
        raise
    say("done")


if IS_RUN:
    run()
