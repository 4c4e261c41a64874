"""A loader split over the ranks.

split_plan.py      which rank gets which samples of an epoch, in which step: pure arithmetic
epoch_order.py     the order of an epoch, a function of (seed, epoch)
sharded_loader.py  the loader that `shard_data` returns, and its position
map_samples.py     samples of datasets with an index
stream_samples.py  samples of streams
dispatch.py        one rank reads for all
uneven_ranks.py    ranks whose data has different lengths
loader_checks.py   loaders that cannot be split
"""
