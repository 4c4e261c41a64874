"""A language model whose loss is a mean over the tokens of all micro-batches and ranks, counted by hand."""

import contextlib
import math

import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed


class LanguageModel(nn.Module):
    def __init__(self, vocabulary=20, width=8):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids, labels, num_items_in_batch):
        logits = self.head(self.embedding(input_ids))[:, :-1]
        summed = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return summed / num_items_in_batch


def collate(rows):
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100)}


def training_function():
    gradient_accumulation_steps = 3
    accelerator = Accelerator(gradient_accumulation_steps=gradient_accumulation_steps)
    set_seed(1)
    random = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 20, (int(torch.randint(3, 9, (), generator=random)),), generator=random) for _ in range(40)]
    train_dataloader = DataLoader(rows, batch_size=2, collate_fn=collate)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    for epoch in range(2):
        training_iterator = iter(train_dataloader)
        num_batches = len(train_dataloader)
        remainder = num_batches % gradient_accumulation_steps or gradient_accumulation_steps
        updates = math.ceil(num_batches / gradient_accumulation_steps)
        for update in range(updates):
            number = gradient_accumulation_steps if update != updates - 1 else remainder
            batch_samples = [next(training_iterator) for _ in range(number)]
            local_num_items = sum((batch["labels"][:, 1:] != -100).sum() for batch in batch_samples)
            num_items_in_batch = accelerator.gather(local_num_items).sum().item()
            losses = []
            for i, batch in enumerate(batch_samples):
                is_last = i == len(batch_samples) - 1
                ctx = contextlib.nullcontext if is_last or accelerator.num_processes == 1 else model.no_sync
                with ctx():
                    loss = model(**batch, num_items_in_batch=num_items_in_batch)
                    # Averaged over ranks by the strategy, and over steps by Accelerate, although it is exact already.
                    loss = loss * gradient_accumulation_steps * accelerator.num_processes
                    accelerator.backward(loss)
                    losses.append(loss.detach() / gradient_accumulation_steps / accelerator.num_processes)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            total = accelerator.reduce(torch.stack(losses).sum())
            accelerator.print(f"epoch {epoch} update {update} loss {total.item():.8f}")
    accelerator.end_training()


if __name__ == "__main__":
    training_function()
