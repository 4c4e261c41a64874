"""Expert parallelism: each rank holds some of the experts, and tokens go to the rank of their expert.

Differs from base_loop.py in the lines marked `new`.

    weft launch -n 2 examples/expert_parallel.py
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import weft  # new


class Experts(nn.Module):  # new
    num_experts = 4  # new

    def __init__(self, width: int) -> None:  # new
        super().__init__()  # new
        self.weight = nn.Parameter(torch.randn(4, width, width) / width**0.5)  # new

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:  # new
        result = torch.zeros_like(hidden_states)  # new
        for expert in range(self.num_experts):  # new
            token, place = torch.where(top_k_index == expert)  # new
            rows = torch.tanh(hidden_states[token] @ self.weight[expert])  # new
            result = result.index_add(0, token, rows * top_k_weights[token, place, None])  # new
        return result  # new


class Mixture(nn.Module):  # new
    def __init__(self, width: int) -> None:  # new
        super().__init__()  # new
        self.router, self.experts = nn.Linear(width, 4), Experts(width)  # new

    def forward(self, x: Tensor) -> Tensor:  # new
        weights, chosen = self.router(x).softmax(-1).topk(2)  # new
        mixed: Tensor = self.experts(x, chosen, weights)  # new
        return x + mixed  # new


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
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), Mixture(64), nn.Linear(64, 3))  # new
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(spirals(), batch_size=60, shuffle=True)
    loader, ctx = weft.shard_data(loader, ctx, mode="split")  # new
    model, ctx = weft.expert_parallel(model, ctx)  # new
    model, ctx = weft.replicate(model, ctx)  # new
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    for epoch in range(8):
        total = 0.0
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            (loss * loader.share).backward()  # new
            weft.clip_grads(model, ctx, max_norm=1.0)  # new
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item() * len(y)
        mean = weft.reduce(torch.tensor(total, device=ctx.device), ctx) / 1500  # new
        ctx.print(f"epoch {epoch}  loss {mean:.4f}")  # new


if __name__ == "__main__":
    with weft.start(mesh={"expert": -1}) as ctx:  # new
        main(ctx)  # new
