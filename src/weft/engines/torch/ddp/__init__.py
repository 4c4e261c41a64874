"""Gradients averaged during backward.

reducer.py          when, for which parameters, and what can go wrong
trained.py          the parameters: which got a gradient, which gradients were not reduced
transport.py        how the gradients travel
buckets.py          gradients in buckets, with torch's DDP reducer
power_sgd.py        gradients as products of thin matrices on their way
flat_buffer.py      gradients in one flat buffer
zero_gradients.py   gradients of zeros, for hooks that wait for gradients
sync_batch_norm.py  batch statistics over all ranks
"""
