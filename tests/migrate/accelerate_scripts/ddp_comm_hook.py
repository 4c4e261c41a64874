"""Gradients that travel in 16 bits, and other settings of DistributedDataParallel."""

from datetime import timedelta

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    gather_object,
    set_seed,
)


def main():
    ddp_kwargs = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType.FP16,
        bucket_cap_mb=5,
        find_unused_parameters=True,
        broadcast_buffers=False,
    )
    limit = InitProcessGroupKwargs(timeout=timedelta(seconds=90))
    accelerator = Accelerator(kwargs_handlers=[ddp_kwargs, limit])
    set_seed(5)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x.prod(1, keepdim=True)), batch_size=4)
    model = accelerator.prepare(model)
    loader, optimizer = accelerator.prepare(loader, optimizer)
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_value_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            mean = accelerator.reduce(loss.detach(), "mean")
            accelerator.print(f"loss {mean.item():.8f}")
    with accelerator.split_between_processes(["a", "b", "c", "d"]) as mine:
        found = gather_object([word * 2 for word in mine])
    padded = accelerator.pad_across_processes(torch.ones(1 + accelerator.process_index), dim=0)
    accelerator.print(found, padded.shape[0], accelerator.optimizer_step_was_skipped)
    accelerator.end_training()


if __name__ == "__main__":
    main()
