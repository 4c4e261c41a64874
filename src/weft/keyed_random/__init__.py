"""Random numbers that follow from what they are for: from seed, epoch, sample and place, not from a state.

philox.py    numbers by counting: masks, and normal numbers by the place of an element in the whole tensor
row_keys.py  which samples the rows of a batch are: noted on its tensors

Tested by: tests/transforms/test_keyed_dropout.py, tests/transforms/test_grad_chain.py, tests/test_rng.py
"""
