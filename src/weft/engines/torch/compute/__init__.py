"""How a module computes, and what is computed from its parameters and gradients.

activation_checkpoint.py  activations computed again in backward
compile_module.py         torch.compile in place
sync_batch_norm.py        batch statistics over all ranks
grad_norm.py              the norm of gradients in shards, and clipping
ema.py                    averages of weights, shard by shard
"""
