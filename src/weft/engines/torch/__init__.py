"""The default engine: plain torch on CPU, CUDA, MPS and XPU.

devices.py     which device, which backend
backward.py    when a backward pass enters a module, and when it has ended
calls.py       something before and after a module's calls
reducer.py     gradients averaged during backward ...
buckets.py     ... in buckets, with torch's DDP reducer
flat.py        ... in one flat buffer
past_forward.py  the error for gradients that came through another method
exchange.py    sums of small buffers between pairs of ranks
flat_step.py   the optimizer's step on that buffer
precision.py   casts and autocast around a module
loss_scale.py  the fp16 scale inside a module
skipping.py    the optimizer's step that is skipped
shards.py      questions about DTensors, without importing them
sharding.py    FSDP2 laid on a module, and taken off
rebinding.py   optimizers moved to exchanged parameters
partitioned_step.py  the step on this rank's rows (ZeRO stage 1)
whole_step.py  the step on whole parameters, where they are cut
gradient_norm.py  the norm of gradients in shards, and clipping
cut_gradient.py  what stands for a gradient that lies in other memory
gathering.py   whole parameters for a moment
averages.py    averages of weights, shard by shard
checkpointing.py  activations computed again
compiling.py   torch.compile in place
survey.py      what a backward pass runs through
batch_norm.py  batch statistics over all ranks
prefetch.py    batches to the device ahead of use
"""

from weft.engines.torch.engine import TorchEngine

__all__ = ["TorchEngine"]
