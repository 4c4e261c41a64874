"""Gradients averaged over ranks, during backward or after it.

strategy.py            what the strategies of this package and FSDP have in common
reducer.py             when, for which parameters, and what can go wrong
trained.py             the parameters: which got a gradient, which gradients were not reduced
transport.py           how the gradients travel
buckets.py             gradients in buckets, with torch's DDP reducer
flat_buffer.py         gradients in one flat buffer
flat_step.py           the step on that buffer
power_sgd.py           gradients as products of thin matrices on their way
zero_gradients.py      gradients of zeros, for hooks that wait for gradients
separate_reduction.py  parameters whose gradients are averaged separately from the others
replica_average.py     gradients averaged over replicas that may be lost in between

Tested by: tests/transforms/test_replicate.py, tests/transforms/test_fuse_step.py, tests/precision/test_compress.py,
    tests/elastic/test_replica_average.py
"""
