"""Devices of this machine.

choose.py    which device, which backend
prefetch.py  batches to the device ahead of use
"""
