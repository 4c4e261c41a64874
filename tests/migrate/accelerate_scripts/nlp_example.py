"""Classify sentences of different lengths; the shape of program that Accelerate's first example has."""

import argparse

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from accelerate import Accelerator, DistributedType
from accelerate.utils import set_seed

EVAL_BATCH_SIZE = 8


class BagOfWords(nn.Module):
    def __init__(self, vocabulary=50, width=16, classes=2):
        super().__init__()
        self.embedding = nn.EmbeddingBag(vocabulary, width, padding_idx=0)
        self.head = nn.Linear(width, classes)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.embedding(input_ids))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def sentences(number, seed):
    random = torch.Generator().manual_seed(seed)
    for _ in range(number):
        length = int(torch.randint(3, 9, (), generator=random))
        words = torch.randint(1, 50, (length,), generator=random)
        yield words.tolist(), int(words[0] > 25)


def get_dataloaders(accelerator: Accelerator, batch_size: int = 4):
    def collate_fn(examples):
        # Fixed lengths suit some devices better
        if accelerator.distributed_type == DistributedType.XLA:
            longest = 16
        else:
            longest = max(len(words) for words, _ in examples)
        rows = [words + [0] * (longest - len(words)) for words, _ in examples]
        return {"input_ids": torch.tensor(rows), "labels": torch.tensor([label for _, label in examples])}

    with accelerator.main_process_first():
        train, validation = list(sentences(32, 1)), list(sentences(22, 2))
    train_dataloader = DataLoader(train, collate_fn=collate_fn, batch_size=batch_size)
    eval_dataloader = DataLoader(validation, collate_fn=collate_fn, batch_size=EVAL_BATCH_SIZE)
    return train_dataloader, eval_dataloader


def training_function(config, args):
    # Initialize accelerator
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    lr, num_epochs, batch_size = config["lr"], int(config["num_epochs"]), int(config["batch_size"])
    set_seed(int(config["seed"]))
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, batch_size)
    model = BagOfWords()

    # The model has to be on its device before the optimizer is made.
    model = model.to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=lr)
    total = len(train_dataloader) * num_epochs
    lr_scheduler = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))

    # The objects come back in the order in which they were given.
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(num_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            batch = {name: value.to(accelerator.device) for name, value in batch.items()}
            outputs = model(**batch)
            loss = outputs["loss"]
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            mean = accelerator.reduce(loss.detach(), reduction="mean")
            accelerator.print(f"epoch {epoch} step {step} loss {mean.item():.8f}")

        model.eval()
        correct = seen = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs["logits"].argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            correct += int((predictions == references).sum())
            seen += len(references)
        accelerator.print(f"epoch {epoch} correct {correct} of {seen}")
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16"])
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    training_function({"lr": 1e-2, "num_epochs": 2, "seed": 42, "batch_size": 4}, args)


if __name__ == "__main__":
    main()
