"""Random numbers that follow from what they are for: from seed, epoch, sample and place, not from a state.

philox.py    numbers by counting, and masks of them
elements.py  numbers for the elements of a tensor, by their places in the whole
row_keys.py  which samples the rows of a batch are: noted on its tensors

Tested by: tests/transforms/test_keyed_dropout.py, tests/transforms/test_grad_chain.py,
    tests/transforms/test_state_in_bf16.py, tests/test_rng.py
"""
