"""A GAN: two models, two optimizers, two fp16 scales, one context passed through all of it.

Each model keeps its own precision and strategy; the generator's gradients come through the
discriminator in true units. The discriminator's step communicates nothing of the generator.

    weft launch -n 2 examples/two_models.py
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

import weft


def ring(count: int = 1024) -> TensorDataset:
    """Points [count, 2] near the unit circle."""
    angle = torch.linspace(0, 2 * torch.pi, count)
    noise = 0.05 * torch.randn(count, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], dim=1) + noise)


def net(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


def main(ctx: weft.DistContext) -> None:
    torch.manual_seed(0)
    data: DataLoader[tuple[Tensor, ...]] = DataLoader(ring(), batch_size=128, shuffle=True, drop_last=True)
    loader, ctx = weft.shard_data(data, ctx, mode="split", with_ids=True)

    generator, ctx = weft.with_precision(net(4, 2), ctx, "fp16")
    generator, ctx = weft.replicate(generator, ctx)
    judge, ctx = weft.with_precision(net(2, 1), ctx, "fp16")
    judge, ctx = weft.replicate(judge, ctx)
    generator_optimizer, ctx = weft.skip_nonfinite(torch.optim.Adam(generator.parameters(), lr=2e-3), ctx)
    judge_optimizer, ctx = weft.skip_nonfinite(torch.optim.Adam(judge.parameters(), lr=2e-3), ctx)

    for epoch in range(8):
        losses = torch.zeros(2, device=ctx.device)
        for (real,), rows in loader:  # the noise of a row is the same on any number of ranks
            noise = 2 * weft.rng.keyed_uniform(rows.ids, seed=ctx.seed, epoch=rows.epoch, shape=(4,)) - 1
            verdicts = judge(torch.cat([real, generator(noise).detach()]))
            truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)]).to(ctx.device)
            judge_loss = binary_cross_entropy_with_logits(verdicts, truth)
            (judge_loss * loader.share).backward()
            judge_optimizer.step()
            judge_optimizer.zero_grad()

            judge.requires_grad_(requires_grad=False)  # the generator's step needs no gradients of the judge
            loss = binary_cross_entropy_with_logits(
                judge(generator(noise)), torch.ones(len(real), 1, device=ctx.device)
            )
            (loss * loader.share).backward()
            judge.requires_grad_(requires_grad=True)
            generator_optimizer.step()
            generator_optimizer.zero_grad()
            losses += torch.stack([loss.detach(), judge_loss.detach()]) / len(loader)
        mean = weft.reduce(losses, ctx, "mean")
        ctx.print(f"epoch {epoch}  generator {mean[0]:.4f}  judge {mean[1]:.4f}")


if __name__ == "__main__":
    with weft.start() as ctx:
        main(ctx)
