"""How a module computes, and what is computed from its parameters and gradients.

activation_checkpoint.py  activations computed again in backward
compile_module.py         torch.compile in place
sync_batch_norm.py        batch statistics over all ranks
grad_norm.py              the norm of gradients in shards, and clipping
ema.py                    averages of weights, shard by shard
layer_flops.py            the operations of layers in one forward, counted without computing

Tested by: tests/transforms/test_recompute.py, tests/transforms/test_compile.py,
    tests/transforms/test_sync_batch_norm.py, tests/transforms/test_clip_grads.py,
    tests/transforms/test_average_weights.py, tests/transforms/test_pipeline.py
"""
