"""Pipeline parallelism: the first layers on one rank, the last ones on the other, and batches in small parts.

The call returns the loss, the same on all ranks.

Differs from base_loop.py in the lines marked `new`.

    weft launch -n 2 examples/pipeline.py
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
    model, ctx = weft.pipeline(model, ctx, loss=cross_entropy, micro_batches=4)  # new
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    for epoch in range(8):
        total = 0.0
        for x, y in loader:
            loss = model(x, y)  # new
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
    with weft.start(mesh={"pipeline": -1}) as ctx:  # new
        main(ctx)  # new
