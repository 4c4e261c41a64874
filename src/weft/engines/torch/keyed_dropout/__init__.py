"""Dropout whose masks follow from the samples.

keyed.py           which mask comes next: by rows, module and number of the call, also where a block is computed again
functions.py       torch's functions with dropout in them, with a given mask
divided_layers.py  which features a rank has of an activation

Tested by: tests/transforms/test_keyed_dropout.py
"""
