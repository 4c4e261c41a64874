"""Weights in 8 or 4 bits.

quantize.py          `quantized`
quantized_layers.py  the libraries that quantize a layer

Tested by: tests/interop/test_quantized.py
"""
