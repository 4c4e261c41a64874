"""Configurations of other libraries, as `weft config import` reads them.

accelerate.py  of Accelerate
megatron.py    of Megatron-LM
"""
