"""Trackers of libraries whose own calls differ from `tracker(values, step=step)`, or that take fewer values.

Each can be closed, which finishes the run: see `weft.monitoring.closing`. What a library does not have is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from weft.monitoring.trackers.lifetime import RunTracker, is_failing
from weft.monitoring.values import Artifact, Figure, HParams, Image, Table, numbers_of

_Kind = TypeVar("_Kind")


def _of(values: Mapping[str, Any], kind: type[_Kind]) -> dict[str, _Kind]:
    return {name: value for name, value in values.items() if isinstance(value, kind)}


def _configs(values: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters, all in one."""
    return {k: v for value in _of(values, HParams).values() for k, v in value.values.items()}


def _pictures(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Pictures as arrays: (H, W, C), or (H, W) of one channel, uint8."""
    for name, value in _of(values, Image).items():
        pixels = value.pixels.detach()
        if pixels.ndim == 3:
            whole = (pixels.clamp(0, 1) * 255).round().byte() if pixels.is_floating_point() else pixels
            shown = whole.permute(1, 2, 0).cpu().numpy()
            yield name, shown[..., 0] if shown.shape[-1] == 1 else shown


def _media(values: Mapping[str, Any], image: Callable[[Any], Any] | None, *, figures: bool) -> dict[str, Any]:
    """Pictures, and figures of matplotlib, as the library has them: made by `image`."""
    if image is None:
        return {}
    plots = {n: each.figure for n, each in _of(values, Figure).items() if figures and hasattr(each.figure, "savefig")}
    return {name: image(each) for name, each in [*_pictures(values), *plots.items()]}


def _file(name: str, step: int, figure: Any) -> str:
    return f"{name}/{step}.{'html' if hasattr(figure, 'to_html') else 'png'}"


def wandb(
    run: Any, *, image: Callable[[Any], Any] | None = None, table: Callable[..., Any] | None = None
) -> RunTracker:
    """A tracker of a run of Weights & Biases.

    Args:
        run: From `wandb.init(...)`; None on other ranks than the main one.
        image: `wandb.Image`, if there are pictures or figures of matplotlib; those of plotly need nothing.
        table: `wandb.Table`, if there are tables.

    Returns:
        The tracker. Hyperparameters go to `run.config`. Closing it finishes the run, with exit code 1 after an error.
    """

    def write(values: dict[str, Any], /, *, step: int) -> None:
        if configs := _configs(values):
            run.config.update(configs, allow_val_change=True)  # a resumed run may have others
        for name, artifact in _of(values, Artifact).items():
            run.log_artifact(str(artifact.path), name=name, type="file")
        found = {**numbers_of(values), **_of(values, str), **_media(values, image, figures=True)}
        found |= {name: each.figure for name, each in _of(values, Figure).items() if hasattr(each.figure, "to_html")}
        for name, rows in _of(values, Table).items() if table is not None else ():
            found[name] = table(columns=list(rows.columns), data=[list(row) for row in rows.rows])  # type: ignore[misc]
        if found:
            run.log(found, step=step)

    return RunTracker(write, lambda: run.finish(exit_code=int(is_failing())))


def swanlab(
    run: Any, *, image: Callable[[Any], Any] | None = None, table: Callable[[], Any] | None = None
) -> RunTracker:
    """A tracker of a run of SwanLab.

    Args:
        run: From `swanlab.init(...)`.
        image: `swanlab.Image`, if there are pictures or figures of matplotlib.
        table: `swanlab.echarts.Table`, if there are tables.

    Returns:
        The tracker. Hyperparameters go to `run.config`, artifacts to `run.save`. Closing it finishes the run.
    """

    def write(values: dict[str, Any], /, *, step: int) -> None:
        if configs := _configs(values):
            run.config.update(configs)
        for artifact in _of(values, Artifact).values():
            run.save(str(artifact.path), base_path=str(Path(artifact.path).parent))
        found = {**numbers_of(values), **_of(values, str), **_media(values, image, figures=True)}
        for name, rows in _of(values, Table).items() if table is not None else ():
            found[name] = table().add(list(rows.columns), [list(row) for row in rows.rows])  # type: ignore[misc]
        if found:
            run.log(found, step=step)

    return RunTracker(write, lambda: run.finish(**({"state": "crashed", "error": "error"} if is_failing() else {})))


def trackio(
    run: Any, *, image: Callable[[Any], Any] | None = None, table: Callable[..., Any] | None = None
) -> RunTracker:
    """A tracker of a run of Trackio.

    Args:
        run: From `trackio.init(...)`.
        image: `trackio.Image`, if there are pictures.
        table: `trackio.Table`, if there are tables.

    Returns:
        The tracker. Hyperparameters go to `run.config`, which Trackio stores with the first values: log them before.
        Closing it finishes the run.
    """

    def write(values: dict[str, Any], /, *, step: int) -> None:
        if configs := _configs(values):
            run.config.update(configs)
        for name, artifact in _of(values, Artifact).items():
            run.log_artifact(str(artifact.path), name=name, type="file")
        found = {**numbers_of(values), **_of(values, str), **_media(values, image, figures=False)}
        for name, rows in _of(values, Table).items() if table is not None else ():
            found[name] = table(columns=list(rows.columns), data=[list(row) for row in rows.rows])  # type: ignore[misc]
        if found:
            run.log(found, step=step)

    return RunTracker(write, lambda: run.finish())


def mlflow(module: Any) -> RunTracker:
    """A tracker of the run of MLflow that is active now.

    Args:
        module: The module `mlflow`, after `mlflow.start_run(...)`.

    Returns:
        The tracker. Hyperparameters go to `log_params`; texts, tables, pictures and figures to files of the run, named
        "NAME/STEP" and an ending; artifacts to the folder of their name. Closing it ends the run, as FAILED after an
        error.
    """
    client, run_id = module.MlflowClient(), module.active_run().info.run_id  # other threads have no active run

    def write(values: dict[str, Any], /, *, step: int) -> None:
        if configs := _configs(values):
            module.log_params(configs, run_id=run_id)
        if numbers := numbers_of(values):
            module.log_metrics(numbers, step=step, run_id=run_id)
        for name, text in _of(values, str).items():
            client.log_text(run_id, text, f"{name}/{step}.txt")
        for name, table in _of(values, Table).items():
            rows = [list(row) for row in table.rows]
            client.log_dict(run_id, {"columns": list(table.columns), "data": rows}, f"{name}/{step}.json")
        for name, pixels in _pictures(values):
            client.log_image(run_id, pixels, f"{name}/{step}.png")
        for name, value in _of(values, Figure).items():
            client.log_figure(run_id, value.figure, _file(name, step, value.figure))
        for name, artifact in _of(values, Artifact).items():
            client.log_artifact(run_id, str(artifact.path), name)

    def end() -> None:
        status, active = "FAILED" if is_failing() else "FINISHED", module.active_run()
        if active is not None and active.info.run_id == run_id:
            module.end_run(status)
        else:
            client.set_terminated(run_id, status)

    return RunTracker(write, end)


def comet(experiment: Any) -> RunTracker:
    """A tracker of an experiment of Comet: from `comet_ml.start(...)`. All kinds of values but histograms."""

    def write(values: dict[str, Any], /, *, step: int) -> None:
        if configs := _configs(values):
            experiment.log_parameters(configs)
        if numbers := numbers_of(values):
            experiment.log_metrics(numbers, step=step)
        for name, text in _of(values, str).items():
            experiment.log_text(text, step=step, metadata={"name": name})
        for name, table in _of(values, Table).items():
            rows = [list(row) for row in table.rows]
            experiment.log_table(f"{name}.csv", tabular_data=rows, headers=list(table.columns), step=step)
        for name, pixels in _pictures(values):
            experiment.log_image(pixels, name=name, step=step)
        for name, value in _of(values, Figure).items():
            experiment.log_figure(figure_name=name, figure=value.figure, step=step)
        for name, artifact in _of(values, Artifact).items():
            experiment.log_asset(str(artifact.path), file_name=name, step=step)

    return RunTracker(write, lambda: experiment.end())


def aim(run: Any, *, text: Callable[[str], Any] | None = None, image: Callable[[Any], Any] | None = None) -> RunTracker:
    """A tracker of a run of Aim.

    Args:
        run: From `aim.Run(...)`.
        text: `aim.Text`, if there are texts.
        image: `aim.Image`, if there are pictures or figures of matplotlib.

    Returns:
        The tracker. Hyperparameters go to `run["hparams"]`, tables to `run[NAME]`, artifacts to the storage that
        `run.set_artifacts_uri` names. Closing it closes the run.
    """

    def write(values: dict[str, Any], /, *, step: int) -> None:
        if configs := _configs(values):
            run["hparams"] = configs
        for name, table in _of(values, Table).items():
            run[name] = {"step": step, "columns": list(table.columns), "rows": [list(row) for row in table.rows]}
        for name, artifact in _of(values, Artifact).items():
            run.log_artifact(str(artifact.path), name=name)
        texts = {} if text is None else {name: text(words) for name, words in _of(values, str).items()}
        for name, value in {**numbers_of(values), **texts, **_media(values, image, figures=True)}.items():
            run.track(value, name=name, step=step)

    return RunTracker(write, lambda: run.close())


def clearml(task: Any) -> RunTracker:
    """A tracker of a task of ClearML: from `Task.init(...)`. A name such as "train/loss" is title and series.

    All kinds of values but histograms; closing it closes the task.
    """

    def write(values: dict[str, Any], /, *, step: int) -> None:
        if configs := _configs(values):
            task.connect(configs)
        there = task.get_logger()
        for name, value in numbers_of(values).items():
            title, _, series = name.partition("/")
            there.report_scalar(title=title, series=series or title, value=value, iteration=step)
        for name, words in _of(values, str).items():
            there.report_text(f"{name}: {words}")
        for name, table in _of(values, Table).items():
            rows = [list(table.columns), *([*row] for row in table.rows)]
            there.report_table(title=name, series=name, iteration=step, table_plot=rows)
        for name, pixels in _pictures(values):
            there.report_image(title=name, series=name, iteration=step, image=pixels)
        for name, plot in _of(values, Figure).items():
            kind = there.report_plotly if hasattr(plot.figure, "to_html") else there.report_matplotlib_figure
            kind(title=name, series=name, iteration=step, figure=plot.figure)
        for name, artifact in _of(values, Artifact).items():
            task.upload_artifact(name, str(artifact.path))

    return RunTracker(write, lambda: task.close())


def dvclive(live: Any) -> RunTracker:
    """A tracker of DVCLive: from `dvclive.Live(...)`. Numbers, hyperparameters, pictures, figures and artifacts."""

    def write(values: dict[str, Any], /, *, step: int) -> None:
        if configs := _configs(values):
            live.log_params(configs)
        live.step = step
        for name, value in numbers_of(values).items():
            live.log_metric(name, value)
        plots = {name: value.figure for name, value in _of(values, Figure).items()}
        for name, shown in [*_pictures(values), *plots.items()]:
            live.log_image(f"{name}.png", shown)
        for name, artifact in _of(values, Artifact).items():
            live.log_artifact(str(artifact.path), name=name)
        live.make_summary()

    return RunTracker(write, lambda: live.end())
