"""The order in which an epoch reads its samples.

epoch_order.py    the order of each epoch, made with random states that are a function of (seed, epoch)
compare_order.py  ranks whose orders differ find out
sample_digest.py  a digest of the samples of a stream
stream_state.py   what reading changes in a stream is put back
"""
