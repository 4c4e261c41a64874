"""Parts whose parameters have memory only while they are called.

slots.py        one piece of memory for two parts, the second read ahead
stream.py       parameters put in place before the call of a part, and taken out after it
placeholder.py  what a parameter is between calls

Tested by: tests/transforms/test_place.py
"""
