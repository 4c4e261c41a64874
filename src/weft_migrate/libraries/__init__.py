"""The libraries whose scripts are rewritten: one row per call.

rows.py        what a row says
accelerate.py  of Accelerate
fabric.py      of Lightning Fabric

Tested by: tests/migrate
"""
