"""Gradients averaged during backward.

reducer.py          when, for which parameters, and what can go wrong
buckets.py          in buckets, with torch's DDP reducer
flat_buffer.py      in one flat buffer
pairwise.py         sums of small buffers between pairs of ranks
sync_batch_norm.py  batch statistics over all ranks
"""
