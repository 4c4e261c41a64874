"""Tensors, without knowledge of devices and strategies.

nested.py          nested values: their tensors, and their rows
sequence_order.py  which places of a sequence each rank holds
dtensor.py         is it sharded? its local part; without importing DTensor
bit_sums.py        do tensors hold the same bits?
elsewhere.py       tensors on meta that stand for what another rank has
sharded_grad.py    a gradient that lies in the memory of another library
quantized.py       weights that other libraries have quantized
pairwise.py        small tensors, summed and gathered between pairs of ranks
control.py         where numbers travel that the host waits for
rng_state.py       the random states of this process
generator_state.py the states of random generators as JSON
"""
