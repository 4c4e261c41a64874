"""DiLoCo: ranks step on gradients of their own, and exchange parameters after every 8 steps.

Differs from base_loop.py in the lines marked `new`.

    weft launch -n 2 examples/local_steps.py
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import weft  # new
from weft.transforms.local_steps import averaged  # new


def spirals(count: int = 1500, arms: int = 3) -> TensorDataset:
    """Points [count, 2] on the arms of a spiral, and their arm [count]."""
    arm = torch.arange(count) % arms
    radius = torch.linspace(0.05, 1.0, count)
    angle = 4.0 * radius + 2 * torch.pi / arms * arm
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    noise = 0.03 * torch.randn(count, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points + noise, arm)


def nesterov(anchors: list[nn.Parameter]) -> torch.optim.Optimizer:  # new
    return torch.optim.SGD(anchors, lr=0.7, momentum=0.6, nesterov=True)  # new


def main(ctx: weft.DistContext) -> None:  # new
    torch.manual_seed(0)
    layers = nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
    model = nn.Sequential(*layers)
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(spirals(), batch_size=60, shuffle=True)
    loader, ctx = weft.shard_data(loader, ctx, mode="split")  # new
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, ctx = weft.local_steps(model, optimizer, ctx, every=8, outer=nesterov)  # new

    for epoch in range(8):
        total = 0.0
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            (loss * loader.share).backward()  # new
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item() * len(y)
        mean = weft.reduce(torch.tensor(total, device=ctx.device), ctx) / 1500  # new
        ctx.print(f"epoch {epoch}  loss {mean:.4f}")  # new
    with averaged(model, ctx), torch.no_grad():  # new
        x, y = spirals()[:]  # new
        hits = (model(x.to(ctx.device)).argmax(1).cpu() == y).float().mean()  # new
    ctx.print(f"mean of the replicas: {hits:.1%} right")  # new


if __name__ == "__main__":
    with weft.start() as ctx:  # new
        main(ctx)  # new
