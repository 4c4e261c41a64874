"""The default engine: plain torch on CPU, CUDA, MPS and XPU.

engine.py         what transforms ask for
strategy.py       what ddp and fsdp have in common
reduced_apart.py  parameters whose gradients are averaged apart from the others
ddp/              gradients averaged during backward
fsdp/             parameters in shards
pipeline/         layers on several ranks, one stage after the other
stepping/         steps of the optimizer at other moments
optim/            what happens around an optimizer's step
amp/              mixed precision
compute/          activation checkpointing, torch.compile
parallel/         one model computed by several ranks: layers, sequences and experts divided
probes/           promises that are measured
hooks/            seeing what a module and its gradients do
parts/            what users do with tensors of which this rank has a part
device/           devices, and batches brought to them
streaming/        parts whose parameters have memory only while they are called
"""
