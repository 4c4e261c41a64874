"""Every `fix:` line of the package is followed by a test, in the situation that prints it.

`sites.py` reads from the source where such lines are, `told.py` is how a test says that it meets one and follows it,
and `test_every_fix_line.py` compares the two.
"""
