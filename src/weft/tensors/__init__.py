"""Tensors, without knowledge of devices and strategies.

nested.py            nested values: their tensors, and their rows
sequence_order.py    which places of a sequence each rank holds
blocks.py            which block of a tensor lies on this rank; DTensors made of blocks
dtensor.py           is it sharded? its local part; without importing DTensor
checksums.py         do tensors hold the same bits?
remote_parameter.py  tensors on meta that stand for what another rank has
sharded_grad.py      a gradient that lies in the memory of another library
quantized.py         weights that other libraries have quantized
pairwise.py          small tensors, summed and gathered between pairs of ranks
messages.py          how tensors travel: on which device, many as one message
rng_state.py         the random states of this process; those of generators as JSON

Tested by: tests/data/test_batches.py, tests/data/test_split_sequence.py, tests/collectives/test_pairwise.py,
    tests/training/test_parameter_kinds.py
"""
