"""Mixed precision.

autocast.py    casts and autocast around a module
fp8_linear.py  linear layers that multiply matrices of 8-bit numbers
loss_scale.py  the fp16 scale inside a module
stored_weights.py  weights that rest in fewer bits
graph_walk.py  what a backward pass runs through
"""
