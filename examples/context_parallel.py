"""Context parallelism: each rank holds a part of every sequence, and attention computes over the whole.

Here the points of a batch are one sequence [1, 60, 2], and the model tells the arm of each of them.

Differs from base_loop.py in the lines marked `new`.

    weft launch -n 2 examples/context_parallel.py
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
    block = nn.TransformerEncoderLayer(64, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True)  # new
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), block, nn.Linear(64, 3))  # new
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(spirals(), batch_size=60, shuffle=True)
    loader, ctx = weft.shard_data(loader, ctx)  # new
    model, ctx = weft.context_parallel(model, ctx)  # new
    model, ctx = weft.replicate(model, ctx)  # new
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)  # new

    for epoch in range(8):
        total = 0.0
        for batch in loader:  # new
            x, y = weft.data.split_sequence([part[None] for part in batch], ctx)  # new
            loss = cross_entropy(model(x).flatten(0, 1), y.flatten())  # new
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item() * y.numel()  # new
        mean = weft.reduce(torch.tensor(total, device=ctx.device), ctx) / 1500  # new
        ctx.print(f"epoch {epoch}  loss {mean:.4f}")  # new


if __name__ == "__main__":
    with weft.start(mesh={"context": -1}) as ctx:  # new
        main(ctx)  # new
