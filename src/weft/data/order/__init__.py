"""The order in which an epoch reads its samples.

epoch_order.py    the order of each epoch, made with random states that are a function of (seed, epoch)
digest.py         what two orders are compared by
sampler_state.py  what iterating a sampler changes in it, and how it is put back
endless_order.py  an order that does not end
loader_place.py   which loader of the program this is, and the one before it over the same dataset
tell_epoch.py     which datasets and samplers get the number of the epoch
compare_order.py  ranks whose orders differ find out
mixed_order.py    how the sources of a mixture take turns
sample_digest.py  a digest of the samples of a stream
stream_state.py   what reading changes in a stream is put back

Tested by: tests/data, tests/transforms/test_shard_data.py
"""
