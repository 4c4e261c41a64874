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

[Note: one iteration] `shard_data` decides once and for all what is read (`ReadPlan`); a `Cursor` knows how far that has
come. An iteration makes the orders of what it reads and compares them with those of the other ranks (`ReadPlan.begin`).
Torch's own iterator reads a view of the loader (`torch_view`), in which requests come from `StepIndices`, or whole
steps from `StreamSteps`; both note what is asked for (`BatchInfo`), and `CountedCollate` whether it came. `Arrivals`
joins each batch with its note. If rank 0 reads for all (`scattered`), or ranks have different numbers of batches
(`UnevenRanks`), the ranks come together there. Then a batch goes to the device and into the user's loop, and the cursor
counts it. `position` makes a state of plan and cursor, `checked_position` what is to be read from a state, at any
number of ranks. In an elastic job only rank and size in the plan change, between two iterations (`weft_divide`).

Tested by: tests/data, tests/transforms/test_shard_data.py
"""
