"""An exponential moving average of the weights, and the model evaluated with it. No communication.

Differs from base_loop.py in the lines marked `new`.

    weft launch -n 2 examples/average_weights.py
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
    loader, ctx = weft.shard_data(loader, ctx, mode="split")  # new
    model, ctx = weft.replicate(model, ctx)  # new
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, ctx = weft.average_weights(model, ctx, decay=0.95)  # new
    averages = weft.averages(model)  # new

    for epoch in range(8):
        total = 0.0
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            (loss * loader.share).backward()  # new
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            averages.update()  # new
            optimizer.zero_grad()
            total += loss.item() * len(y)
        mean = weft.reduce(torch.tensor(total, device=ctx.device), ctx) / 1500  # new
        ctx.print(f"epoch {epoch}  loss {mean:.4f}")  # new
    with averages.swapped(), torch.no_grad():  # new
        x, y = spirals()[:]  # new
        hits = (model(x.to(ctx.device)).argmax(1).cpu() == y).float().mean()  # new
    ctx.print(f"averaged weights: {hits:.1%} right")  # new


if __name__ == "__main__":
    with weft.start() as ctx:  # new
        main(ctx)  # new
