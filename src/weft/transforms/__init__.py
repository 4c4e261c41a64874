"""The transforms, one file each; file name = function name.

Tested by: tests/transforms, tests/laws
"""
