"""Classify pictures: a backbone that is frozen, a one-cycle schedule, clipping, and weights that others read."""

import argparse
import os

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset

import accelerate
from accelerate import Accelerator
from accelerate.logging import get_logger

logger = get_logger(__name__)


class Pictures(Dataset):
    def __init__(self, number):
        random = torch.Generator().manual_seed(number)
        self.label = torch.randint(0, 3, (number,), generator=random)
        self.image = torch.randn(number, 3, 8, 8, generator=random) + self.label[:, None, None, None]

    def __len__(self):
        return len(self.label)

    def __getitem__(self, idx):
        return {"image": self.image[idx], "label": self.label[idx]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten())
        self.classifier = nn.Linear(8 * 36, 3)

    def forward(self, x):
        return self.classifier(self.features(x))


def training_function(config, args):
    if args.cpu:
        accelerator = Accelerator(cpu=True, mixed_precision=args.mixed_precision)
    else:
        accelerator = Accelerator(mixed_precision=args.mixed_precision)
    accelerate.utils.set_seed(config["seed"])
    train_dl = DataLoader(Pictures(48), batch_size=config["batch_size"])
    eval_dl = DataLoader(Pictures(21), batch_size=config["batch_size"])
    net = Net()
    for param in net.features.parameters():
        param.requires_grad = False
    # Means and deviations, on the device that the batches will be on.
    mean = torch.full((1, 3, 1, 1), 0.5).to(accelerator.device)
    optim = torch.optim.SGD((p for p in net.parameters() if p.requires_grad), lr=config["lr"] / 25, momentum=0.9)
    scheduler = OneCycleLR(optim, max_lr=config["lr"], epochs=config["num_epochs"], steps_per_epoch=len(train_dl))

    net, optim, train_dl, eval_dl, scheduler = accelerator.prepare(net, optim, train_dl, eval_dl, scheduler)
    logger.info("training on %d ranks", accelerator.num_processes, main_process_only=True)
    for epoch in range(config["num_epochs"]):
        net.train()
        for batch in train_dl:
            inputs = batch["image"].to(accelerator.device) - mean
            with accelerator.autocast() if args.autocast else torch.enable_grad():
                outputs = net(inputs)
            loss = nn.functional.cross_entropy(outputs, batch["label"])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optim.step()
            scheduler.step()
            optim.zero_grad()
            everyone = accelerator.gather(loss.detach().reshape(1))
            accelerator.print(f"epoch {epoch} loss {everyone.mean().item():.8f}")
        net.eval()
        accurate = num_elems = 0
        for batch in eval_dl:
            with torch.no_grad():
                outputs = net(batch["image"] - mean)
            predictions, references = accelerator.gather_for_metrics((outputs.argmax(dim=-1), batch["label"]))
            accurate_preds = predictions == references
            num_elems += accurate_preds.shape[0]
            accurate += accurate_preds.long().sum()
        accelerator.print(f"epoch {epoch}: {100 * accurate.item() / num_elems:.2f} of {num_elems}")
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(net)
    accelerator.save(unwrapped.state_dict(), os.path.join(args.output_dir, "net.pt"))
    accelerator.save_model(net, args.output_dir)
    accelerator.wait_for_everyone()
    if accelerator.is_local_main_process:
        print(f"files {sorted(os.listdir(args.output_dir))} class {type(unwrapped).__name__}")
    accelerator.free_memory()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", default="no")
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    os.makedirs(args.output_dir, exist_ok=True)
    training_function({"lr": 3e-2, "num_epochs": 2, "seed": 42, "batch_size": 4}, args)


if __name__ == "__main__":
    main()
