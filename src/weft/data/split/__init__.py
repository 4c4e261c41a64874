"""A loader split over the ranks.

split_plan.py      which rank gets which samples of an epoch, in which step: pure arithmetic
read_plan.py       what a sharded loader reads
sharded_loader.py  the loader that `shard_data` returns
position.py        where it stands, and its state
torch_view.py      what torch's iterators see of it
map_samples.py     samples of datasets with an index
real_batches.py    what a batch holds, against what was asked for
stream_samples.py  samples of streams
dispatch.py        one rank reads for all
uneven_ranks.py    ranks whose data has different lengths
loader_checks.py   loaders that cannot be split

Tested by: tests/data, tests/transforms/test_shard_data.py
"""
