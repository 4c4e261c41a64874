"""Where the numbers of a run are written; a tracker is any callable `(values, step=)`.

files.py        `jsonl`, `csv`
tensorboard.py  `tensorboard`
lifetime.py     `RunTracker`, `closing` of all at the end, `in_background`
libraries.py    W&B, MLflow, Comet, Aim, ClearML, DVCLive, SwanLab, Trackio

Nothing of the libraries is imported here: you make the run, as their documentation says, on the main rank
(`if ctx.is_main:`), and hand it over.

Tested by: tests/monitoring/test_log.py, tests/monitoring/test_tracker_libraries.py
"""
