"""Random numbers that follow from what they are for: from seed, epoch, sample and place, not from a state.

philox.py    numbers by counting, and masks of them
row_keys.py  which samples the rows of a batch are: noted on its tensors

Tested by: tests/transforms/test_keyed_dropout.py, tests/test_rng.py
"""
