"""Rehearsal: what a rank of 64 would hold and send, before the training on the ranks that are here.

Differs from base_loop.py in the lines marked `new`.

    weft launch -n 2 examples/rehearse.py
"""

from collections.abc import Callable  # new

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


def program(ctx: weft.DistContext) -> Callable[[], None]:  # new
    """A larger model on the ranks of `ctx`; gives a function that makes one step of its training."""  # new
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))  # new
    model, ctx = weft.fully_shard(model, ctx, units=nn.Linear)  # new
    optimizer = torch.optim.AdamW(model.parameters())  # new

    def step() -> None:  # new
        model(torch.ones(32, 1024)).square().mean().backward()  # new
        optimizer.step()  # new
        optimizer.zero_grad()  # new

    return step  # new


def main(ctx: weft.DistContext) -> None:  # new
    ctx.print(weft.rehearse(program, ranks=64, mesh={"replica": 8, "shard": 8}))  # new
    torch.manual_seed(0)
    layers = nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
    model = nn.Sequential(*layers)
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(spirals(), batch_size=60, shuffle=True)
    loader, ctx = weft.shard_data(loader, ctx, mode="split")  # new
    model, ctx = weft.replicate(model, ctx)  # new
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

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


if __name__ == "__main__":
    with weft.start() as ctx:  # new
        main(ctx)  # new
