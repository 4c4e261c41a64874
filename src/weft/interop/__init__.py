"""Thin functions between weft and other libraries: each takes an object of theirs and gives a tracker.

trackers.py  W&B, MLflow, Comet, Aim, ClearML, DVCLive, SwanLab, Trackio

Nothing of them is imported here: you make the run, as their documentation says, on the main rank
(`if ctx.is_main:`), and hand it over.
"""

from weft.interop.trackers import aim, clearml, comet, dvclive, mlflow, swanlab, trackio, wandb

__all__ = ["aim", "clearml", "comet", "dvclive", "mlflow", "swanlab", "trackio", "wandb"]
