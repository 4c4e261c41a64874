"""Tracking, checkpoints each epoch or every few steps, and resuming from one of them."""

import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration, set_seed


class Counter:
    """Something of one's own that belongs to a checkpoint."""

    def __init__(self):
        self.samples = 0

    def state_dict(self):
        return {"samples": self.samples}

    def load_state_dict(self, state):
        self.samples = state["samples"]


def training_function(config, args):
    dataloader_config = DataLoaderConfiguration(use_stateful_dataloader=False)
    project_config = ProjectConfiguration(project_dir=args.project_dir)
    if args.with_tracking:
        accelerator = Accelerator(
            cpu=args.cpu,
            log_with="tensorboard",
            project_config=project_config,
            project_dir=args.project_dir,
            dataloader_config=dataloader_config,
        )
    else:
        accelerator = Accelerator(cpu=args.cpu, dataloader_config=dataloader_config)
    set_seed(config["seed"])
    if args.with_tracking:
        run = os.path.split(__file__)[-1].split(".")[0]
        accelerator.init_trackers(run, config)
    checkpointing_steps = int(args.checkpointing_steps) if args.checkpointing_steps.isdigit() else "epoch"

    random = torch.Generator().manual_seed(0)
    x = torch.randn(48, 4, generator=random)
    train_dataloader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.9)
    counter = Counter()
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    accelerator.register_for_checkpointing(counter)

    overall_step, starting_epoch = 0, 0
    if args.resume_from_checkpoint:
        accelerator.print(f"resumed from {os.path.basename(args.resume_from_checkpoint)}")
        accelerator.load_state(args.resume_from_checkpoint)
        path = os.path.basename(args.resume_from_checkpoint)
        training_difference = os.path.splitext(path)[0]
        if "epoch" in training_difference:
            starting_epoch = int(training_difference.replace("epoch_", "")) + 1
            resume_step = None
            overall_step = starting_epoch * len(train_dataloader)
        else:
            resume_step = int(training_difference.replace("step_", ""))
            overall_step = resume_step
            starting_epoch = resume_step // len(train_dataloader)
            resume_step -= starting_epoch * len(train_dataloader)

    for epoch in range(starting_epoch, config["num_epochs"]):
        model.train()
        if args.with_tracking:
            total_loss = 0
        if args.resume_from_checkpoint and epoch == starting_epoch and resume_step is not None:
            # Skip what was used before the checkpoint
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
        else:
            active_dataloader = train_dataloader
        for x, y in active_dataloader:
            loss = nn.functional.mse_loss(model(x), y)
            if args.with_tracking:
                total_loss += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            counter.samples += len(x) * accelerator.num_processes
            overall_step += 1
            mean = accelerator.reduce(loss.detach(), "mean")
            accelerator.print(f"step {overall_step} loss {mean.item():.8f}")
            if isinstance(checkpointing_steps, int):
                output_dir = f"step_{overall_step}"
                if overall_step % checkpointing_steps == 0:
                    output_dir = os.path.join(args.output_dir, output_dir)
                    accelerator.save_state(output_dir)
        accelerator.print(f"epoch {epoch}: samples {counter.samples}")
        if args.with_tracking:
            accelerator.log(
                {
                    "train_loss": total_loss.item() / len(train_dataloader),  # of this rank
                    "epoch": epoch,
                },
                step=epoch,
            )
        if checkpointing_steps == "epoch":
            output_dir = os.path.join(args.output_dir, f"epoch_{epoch}")
            accelerator.save_state(output_dir)
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpointing_steps", default="epoch")
    parser.add_argument("--resume_from_checkpoint", default=None)
    parser.add_argument("--with_tracking", action="store_true")
    parser.add_argument("--output_dir", default=".")
    parser.add_argument("--project_dir", default="logs")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    training_function({"lr": 1e-2, "num_epochs": 2, "seed": 42}, args)


if __name__ == "__main__":
    main()
