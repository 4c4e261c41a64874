"""Gradient accumulation with `accumulate`, a bar, counters, and a limit of steps."""

import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm

from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, set_seed


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--max_train_steps", type=int, default=100)
    args = parser.parse_args()
    plugin = GradientAccumulationPlugin(num_steps=args.gradient_accumulation_steps)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    set_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    train_dataloader = DataLoader(TensorDataset(x, x.prod(1, keepdim=True)), batch_size=4)
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    progress_bar = tqdm(range(2 * steps_per_epoch), disable=not accelerator.is_local_main_process)
    completed_steps = 0
    for epoch in range(2):
        model.train()
        train_loss = 0.0
        for step, batch in enumerate(train_dataloader):
            # Batches are on the device already.
            x, y = batch
            with accelerator.accumulate(model):
                output = model(x)
                loss = nn.functional.mse_loss(output, y)
                # The mean over the ranks
                mean = accelerator.gather(loss.detach().repeat(len(x))).mean()
                train_loss += mean.item() / args.gradient_accumulation_steps
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()

            # A step of the optimizer was made
            if accelerator.sync_gradients:
                progress_bar.update(1)
                completed_steps += 1
                accelerator.print(f"step {completed_steps} loss {train_loss:.8f}")
                train_loss = 0.0
            if completed_steps % 3 == 0 and accelerator.sync_gradients:
                accelerator.print("three more")
            if completed_steps >= args.max_train_steps:
                break
        accelerator.print(f"epoch {epoch}: {completed_steps} steps")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
