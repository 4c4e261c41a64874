"""Mixed precision.

autocast.py              casts and autocast around a module
recast_saved_weights.py  what autocast has cast, cast again in backward instead of kept
fp8_linear.py            linear layers that multiply matrices of 8-bit numbers
loss_scale.py            the fp16 scale inside a module
stored_weights.py        weights that rest in fewer bits

Tested by: tests/precision, tests/transforms/test_with_precision.py
"""
