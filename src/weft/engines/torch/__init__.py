"""The default engine: plain torch on CPU, CUDA, MPS and XPU.

engine.py      what transforms ask for
reducing/      gradients averaged over ranks, during backward or after it
fsdp/          parameters in shards
pipeline/      layers on several ranks, one stage after the other
steps/         what happens in and around an optimizer's step
sharded_step/  the step where parameters, or the state of the optimizer, are in shards
amp/           mixed precision
compute/       activation checkpointing, torch.compile
keyed_dropout/ dropout whose masks follow from the samples
parallel/      one model computed by several ranks: layers, sequences and experts divided
probes/        promises that are measured
hooks/         seeing what a module and its gradients do
parts/         what users do with tensors of which this rank has a part
device/        devices, and batches brought to them
streaming/     parts whose parameters have memory only while they are called

Tested by: tests/engines, tests/transforms
"""
