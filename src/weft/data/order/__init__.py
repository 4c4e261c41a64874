"""The order in which an epoch reads its samples.

epoch_order.py    the order of each epoch, made with random states that are a function of (seed, epoch)
mixed_order.py    how the sources of a mixture take turns
"""
