"""Tensor parallelism: each rank holds a part of the layers, and all of them compute every batch together.

The first layer of a pair has some of the outputs on each rank, the second takes them and adds up.

Differs from base_loop.py in the lines marked `new`.

    weft launch -n 2 examples/tensor_parallel.py
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import weft  # new


def spirals(count: int = 1500, arms: int = 3) -> TensorDataset:
    """Points [count, 2] on the arms of a spiral, and their arm [count]."""
    arm = torch.arange(count) % arms
    radius = torch.linspace(0.05, 1.0, count)
    angle = 4.0 * radius + 2 * torch.pi / arms * arm
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    noise = 0.03 * torch.randn(count, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points + noise, arm)


def main(ctx: weft.DistContext) -> None:  # new
    torch.manual_seed(0)
    layers = nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
    model = nn.Sequential(*layers)
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(spirals(), batch_size=60, shuffle=True)
    loader, ctx = weft.shard_data(loader, ctx)  # new
    plan = {"0": "column", "2": "row", "4": "gather"}  # new
    model, ctx = weft.tensor_parallel(model, ctx, plan=plan)  # new
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    for epoch in range(8):
        total = 0.0
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            loss.backward()
            weft.clip_grads(model, ctx, max_norm=1.0)  # new
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item() * len(y)
        ctx.print(f"epoch {epoch}  loss {total / 1500:.4f}")  # new
    model, ctx = weft.undo(model, ctx, rebind=optimizer)  # new
    size = sum(parameter.numel() for parameter in model.parameters())  # new
    ctx.print(f"{size} parameters, whole on every rank")  # new


if __name__ == "__main__":
    with weft.start(mesh={"tensor": -1}) as ctx:  # new
        main(ctx)  # new
