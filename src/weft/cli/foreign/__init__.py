"""Configurations of other libraries, as `weft config import` reads them.

accelerate.py  of Accelerate
megatron.py    of Megatron-LM

Tested by: tests/cli/test_config_megatron.py, tests/context/test_config.py
"""
