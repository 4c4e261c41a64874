"""A program of replicas that tests start by `weft launch`: it notes which samples it used, and how it ended.

FAULTS is JSON: by the name of a replica, the step in which it gets a signal and the number of the signal, or what it
does at the end of that step (see `act`), or how it differs; besides, after how many steps the state is copied
("copy_every") and saved ("save_every"), and how many workers read ("num_workers").
"""

import json
import os
import pathlib
import random
import sys
import threading
import time

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.peers.gloo_connections import close_connections

SAMPLES, PER_REPLICA = 50, 4
SLOW_S = 0.5  # the pause after a step as long as there is a file "slow": a busy machine takes long to start others


def data():
    source = torch.Generator().manual_seed(1)
    x, y = (torch.randn(SAMPLES, width, generator=source, dtype=torch.float64) for width in (6, 3))
    return TensorDataset(x, y, torch.arange(SAMPLES))


def build(width=8):
    torch.manual_seed(0)
    layers = torch.nn.Linear(6, width), torch.nn.Tanh(), torch.nn.Linear(width, 3)
    model = torch.nn.Sequential(*layers).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)


def reference(replicas, epochs, *, windows):
    """The parameters of one process without faults, and the samples of each step."""
    model, optimizer, scheduler = build()
    size = PER_REPLICA * replicas * (2 if windows else 1)
    loader, _ = weft.shard_data(DataLoader(data(), batch_size=size, shuffle=True), weft.local())
    steps = []
    for _ in range(epochs):
        for x, y, ids in loader:
            steps.append(sorted(ids.tolist()))
            mse_loss(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()], steps


def obey(path, name):
    """When a file ".cut" appears, end some of the connections of this process; with ".exit0", the process itself."""
    chance = random.Random(name)
    while True:
        time.sleep(0.02)
        if path.with_suffix(".exit0").exists():
            os._exit(0)
        if path.with_suffix(".cut").exists():
            path.with_suffix(".cut").unlink()
            close_connections(lambda _, remote: chance.random() < 0.5)


def act(what, ctx):
    """End this rank in the middle of its work; "leave": as if it had come to the end, if others make steps with it."""
    if what == "exit0":
        os._exit(0)
    if what == "sys.exit":
        sys.exit(0)
    if what == "raise":
        raise ValueError("a mistake")
    return what == "leave" and ctx.num_replicas > 1


def main(ctx, folder, epochs, *, windows, shards, pause_s, faults):
    name = ctx.replicas.name + ("" if shards == 1 else f"-{ctx.rank}")
    pathlib.Path(f"{folder}/{name}.pid").write_text(str(os.getpid()))
    asked = pathlib.Path(f"{folder}/{name}.asked")
    threading.Thread(target=obey, args=(asked, name), daemon=True).start()
    workers = faults.get("num_workers", 0)
    loader = DataLoader(data(), batch_size=PER_REPLICA // shards, shuffle=True, num_workers=workers)
    loader, ctx = weft.shard_data(loader, ctx, uneven="empty")
    model, optimizer, scheduler = build(width=9 if faults.get(name) == "other model" else 8)
    if shards == 1:
        model, ctx = weft.replicate(model, ctx)
    else:
        model, ctx = weft.fully_shard(model, ctx, rebind=[optimizer])
    if windows:
        model, loader, ctx = weft.accumulate_grads(model, loader, ctx, steps=2)
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    state, ctx = weft.checkpointable(objects, ctx)
    saved, save_every = f"{folder}/saved", faults.get("save_every", 10**6)
    restored = weft.restore(state, saved, ctx)
    done = restored.step if restored else 0
    if faults.get(name) == "late":
        time.sleep(1.5)
    slow = pathlib.Path(f"{folder}/slow")
    batches = weft.resilient(loader, ctx, state=state, step=done, copy_every=faults.get("copy_every"))
    with pathlib.Path(f"{folder}/{name}.used").open("w") as used:
        for _ in range(batches.epoch, epochs):
            for batch in batches:
                step = batches.step
                for x, y, numbers in batch if windows else [batch]:
                    share = (batch if windows else loader).share
                    line = [step, ctx.replicas.number, numbers.tolist(), time.monotonic()]
                    print(json.dumps(line), file=used, flush=True)
                    (mse_loss(model(x), y) * share).backward()
                    planned = faults[name] if isinstance(faults.get(name), list) else [-1, ""]
                    if planned[0] == step and not isinstance(planned[1], str):
                        os.kill(os.getpid(), planned[1])
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if (step + 1) % save_every == 0 and batches.leads:
                    weft.save(state, saved, step + 1, ctx)
                if act(planned[1] if planned[0] == step else asked.read_text() if asked.exists() else "", ctx):
                    return
                time.sleep(SLOW_S if slow.exists() else pause_s)
    whole = [p.full_tensor() if shards > 1 else p for p in model.parameters()]
    torch.save([p.detach() for p in whole], f"{folder}/{name}.end")


if __name__ == "__main__":
    folder, epochs, kind, shards, pause_s, faults = sys.argv[1:]
    mesh = {"replica": -1} if shards == "1" else {"replica": -1, "shard": int(shards)}
    with weft.start(mesh=mesh, elastic="replica", device="cpu", timeout_s=20) as ctx:
        options = {"shards": int(shards), "pause_s": float(pause_s), "faults": json.loads(faults)}
        main(ctx, folder, int(epochs), windows=kind == "windows", **options)
