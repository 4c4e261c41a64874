"""Trackers of libraries whose own calls differ from `tracker(values, step=step)`, or that take fewer values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weft.monitoring.values import HParams, Image, Tracker, numbers_of

__all__ = ["aim", "clearml", "comet", "dvclive", "mlflow", "swanlab", "trackio", "wandb"]


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: value for name, value in values.items() if isinstance(value, str)}


def _configs(values: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters, all in one."""
    return {k: v for value in values.values() if isinstance(value, HParams) for k, v in value.values.items()}


def _pictures(values: Mapping[str, Any], image: Callable[[Any], Any] | None) -> dict[str, Any]:
    """Pictures as the library has them: made by `image` of an array (H, W, C)."""
    if image is None:
        return {}
    found = {name: value.pixels for name, value in values.items() if isinstance(value, Image)}
    single = {name: pixels for name, pixels in found.items() if pixels.ndim == 3}
    return {name: image(pixels.detach().permute(1, 2, 0).cpu().numpy()) for name, pixels in single.items()}


def wandb(run: Any, *, image: Callable[[Any], Any] | None = None) -> Tracker:
    """A tracker of a run of Weights & Biases.

    Args:
        run: From `wandb.init(...)`; None on other ranks than the main one.
        image: `wandb.Image`, if there are pictures.

    Returns:
        The tracker. Hyperparameters go to `run.config`.
    """

    def write(values: dict[str, Any], /, *, step: int) -> None:
        if configs := _configs(values):
            run.config.update(configs)
        found = {**numbers_of(values), **_texts(values), **_pictures(values, image)}
        if found:
            run.log(found, step=step)

    return write


def swanlab(run: Any, *, image: Callable[[Any], Any] | None = None) -> Tracker:
    """A tracker of a run of SwanLab: from `swanlab.init(...)`; see `wandb`."""
    return wandb(run, image=image)


def trackio(run: Any) -> Tracker:
    """A tracker of a run of Trackio: from `trackio.init(...)`. Numbers and texts."""

    def write(values: dict[str, Any], /, *, step: int) -> None:
        found = {**numbers_of(values), **_texts(values)}
        if found:
            run.log(found, step=step)

    return write


def mlflow(module_or_client: Any) -> Tracker:
    """A tracker of the active run of MLflow.

    Args:
        module_or_client: The module `mlflow`, after `mlflow.start_run(...)`.

    Returns:
        The tracker. Hyperparameters go to `log_params`, texts to `log_text`.
    """

    def write(values: dict[str, Any], /, *, step: int) -> None:
        if configs := _configs(values):
            module_or_client.log_params(configs)
        if numbers := numbers_of(values):
            module_or_client.log_metrics(numbers, step=step)
        for name, text in _texts(values).items():
            module_or_client.log_text(text, f"{name}/{step}.txt")

    return write


def comet(experiment: Any) -> Tracker:
    """A tracker of an experiment of Comet: from `comet_ml.start(...)`. Numbers, texts, hyperparameters."""

    def write(values: dict[str, Any], /, *, step: int) -> None:
        if configs := _configs(values):
            experiment.log_parameters(configs)
        if numbers := numbers_of(values):
            experiment.log_metrics(numbers, step=step)
        for name, text in _texts(values).items():
            experiment.log_text(text, step=step, metadata={"name": name})

    return write


def aim(run: Any, *, text: Callable[[str], Any] | None = None) -> Tracker:
    """A tracker of a run of Aim.

    Args:
        run: From `aim.Run(...)`.
        text: `aim.Text`, if there are texts.

    Returns:
        The tracker. Hyperparameters go to `run["hparams"]`.
    """

    def write(values: dict[str, Any], /, *, step: int) -> None:
        if configs := _configs(values):
            run["hparams"] = configs
        for name, value in numbers_of(values).items():
            run.track(value, name=name, step=step)
        for name, words in _texts(values).items() if text is not None else ():
            run.track(text(words) if text is not None else words, name=name, step=step)

    return write


def clearml(task: Any) -> Tracker:
    """A tracker of a task of ClearML: from `Task.init(...)`. A name such as "train/loss" is title and series."""

    def write(values: dict[str, Any], /, *, step: int) -> None:
        if configs := _configs(values):
            task.connect(configs)
        there = task.get_logger()
        for name, value in numbers_of(values).items():
            title, _, series = name.partition("/")
            there.report_scalar(title=title, series=series or title, value=value, iteration=step)
        for name, words in _texts(values).items():
            there.report_text(f"{name}: {words}")

    return write


def dvclive(live: Any) -> Tracker:
    """A tracker of DVCLive: from `dvclive.Live(...)`. Numbers and hyperparameters."""

    def write(values: dict[str, Any], /, *, step: int) -> None:
        if configs := _configs(values):
            live.log_params(configs)
        live.step = step
        for name, value in numbers_of(values).items():
            live.log_metric(name, value)
        live.make_summary()

    return write
