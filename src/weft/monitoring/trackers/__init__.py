"""Where the numbers of a run are written; a tracker is any callable `(values, step=)`.

files.py        `jsonl`, `csv`
tensorboard.py  `tensorboard`
libraries.py    W&B, MLflow, Comet, Aim, ClearML, DVCLive, SwanLab, Trackio

Nothing of the libraries is imported here: you make the run, as their documentation says, on the main rank
(`if ctx.is_main:`), and hand it over.
"""
