"""Mixed precision.

autocast.py    casts and autocast around a module
loss_scale.py  the fp16 scale inside a module
graph_walk.py  what a backward pass runs through
"""
