"""Trackers of libraries whose own calls differ from `tracker(values, step=step)`, or that take fewer values.

Each can be closed, which finishes the run: see `weft.monitoring.closing`. What a library does not have is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from weft.monitoring.trackers.lifetime import RunTracker, is_failing
from weft.monitoring.values import Artifact, Figure, HParams, Image, Table, numbers_of

_Kind = TypeVar("_Kind")


class _Values:
    """The values of a step by kind, in the forms that libraries take.

    Attributes:
        configs: Hyperparameters, all in one.
        numbers: As floats.
        texts: As they are.
        tables: Columns and rows.
        figures: Of matplotlib or plotly.
        artifacts: Paths.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.configs = {k: v for value in self._of(HParams).values() for k, v in value.values.items()}
        self.numbers = numbers_of(values)
        self.texts = self._of(str)
        self.tables = {n: (list(t.columns), [list(row) for row in t.rows]) for n, t in self._of(Table).items()}
        self.figures = {name: each.figure for name, each in self._of(Figure).items()}
        self.artifacts = {name: str(each.path) for name, each in self._of(Artifact).items()}

    def _of(self, kind: type[_Kind]) -> dict[str, _Kind]:
        return {name: value for name, value in self._values.items() if isinstance(value, kind)}

    def pictures(self) -> Iterator[tuple[str, Any]]:
        """Pictures as arrays: (H, W, C), or (H, W) of one channel, uint8."""
        for name, value in self._of(Image).items():
            pixels = value.pixels.detach()
            if pixels.ndim == 3:
                whole = (pixels.clamp(0, 1) * 255).round().byte() if pixels.is_floating_point() else pixels
                shown = whole.permute(1, 2, 0).cpu().numpy()
                yield name, shown[..., 0] if shown.shape[-1] == 1 else shown

    def media(self, image: Callable[[Any], Any] | None, *, figures: bool = True) -> dict[str, Any]:
        """Pictures, and figures of matplotlib, as the library has them: made by `image`."""
        if image is None:
            return {}
        plots = {name: each for name, each in self.figures.items() if figures and hasattr(each, "savefig")}
        return {name: image(each) for name, each in [*self.pictures(), *plots.items()]}

    def row(
        self, image: Callable[[Any], Any] | None, table: Callable[..., Any] | None, *, figures: bool = True
    ) -> dict[str, Any]:
        """Numbers, texts, media, and what `table` makes of tables, for a library that takes all of them in one call."""
        tables = {} if table is None else {n: table(columns=c, data=rows) for n, (c, rows) in self.tables.items()}
        return {**self.numbers, **self.texts, **self.media(image, figures=figures), **tables}


def _tracker(write: Callable[[_Values, int], object], end: Callable[[], object]) -> RunTracker:
    """A tracker that writes the values of a step by kind."""
    return RunTracker(lambda values, /, *, step: write(_Values(values), step), end)


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

    def write(found: _Values, step: int) -> None:
        if found.configs:
            run.config.update(found.configs, allow_val_change=True)  # a resumed run may have others
        for name, path in found.artifacts.items():
            run.log_artifact(path, name=name, type="file")
        row = found.row(image, table) | {n: each for n, each in found.figures.items() if hasattr(each, "to_html")}
        if row:
            run.log(row, step=step)

    return _tracker(write, lambda: run.finish(exit_code=int(is_failing())))


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

    def write(found: _Values, step: int) -> None:
        if found.configs:
            run.config.update(found.configs)
        for path in found.artifacts.values():
            run.save(path, base_path=str(Path(path).parent))
        if row := found.row(image, None if table is None else partial(_swanlab_table, table)):
            run.log(row, step=step)

    return _tracker(write, lambda: run.finish(**({"state": "crashed", "error": "error"} if is_failing() else {})))


def _swanlab_table(table: Callable[[], Any], columns: list[str], data: list[list[Any]]) -> Any:
    return table().add(columns, data)


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

    def write(found: _Values, step: int) -> None:
        if found.configs:
            run.config.update(found.configs)
        for name, path in found.artifacts.items():
            run.log_artifact(path, name=name, type="file")
        if row := found.row(image, table, figures=False):
            run.log(row, step=step)

    return _tracker(write, lambda: run.finish())


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

    def write(found: _Values, step: int) -> None:
        if found.configs:
            module.log_params(found.configs, run_id=run_id)
        if found.numbers:
            module.log_metrics(found.numbers, step=step, run_id=run_id)
        for name, text in found.texts.items():
            client.log_text(run_id, text, f"{name}/{step}.txt")
        for name, (columns, rows) in found.tables.items():
            client.log_dict(run_id, {"columns": columns, "data": rows}, f"{name}/{step}.json")
        for name, pixels in found.pictures():
            client.log_image(run_id, pixels, f"{name}/{step}.png")
        for name, figure in found.figures.items():
            client.log_figure(run_id, figure, f"{name}/{step}.{'html' if hasattr(figure, 'to_html') else 'png'}")
        for name, path in found.artifacts.items():
            client.log_artifact(run_id, path, name)

    def end() -> None:
        status, active = "FAILED" if is_failing() else "FINISHED", module.active_run()
        if active is not None and active.info.run_id == run_id:
            module.end_run(status)
        else:
            client.set_terminated(run_id, status)

    return _tracker(write, end)


def comet(experiment: Any) -> RunTracker:
    """A tracker of an experiment of Comet: from `comet_ml.start(...)`. All kinds of values but histograms."""

    def write(found: _Values, step: int) -> None:
        if found.configs:
            experiment.log_parameters(found.configs)
        if found.numbers:
            experiment.log_metrics(found.numbers, step=step)
        for name, text in found.texts.items():
            experiment.log_text(text, step=step, metadata={"name": name})
        for name, (columns, rows) in found.tables.items():
            experiment.log_table(f"{name}.csv", tabular_data=rows, headers=columns, step=step)
        for name, pixels in found.pictures():
            experiment.log_image(pixels, name=name, step=step)
        for name, figure in found.figures.items():
            experiment.log_figure(figure_name=name, figure=figure, step=step)
        for name, path in found.artifacts.items():
            experiment.log_asset(path, file_name=name, step=step)

    return _tracker(write, lambda: experiment.end())


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

    def write(found: _Values, step: int) -> None:
        if found.configs:
            run["hparams"] = found.configs
        for name, (columns, rows) in found.tables.items():
            run[name] = {"step": step, "columns": columns, "rows": rows}
        for name, path in found.artifacts.items():
            run.log_artifact(path, name=name)
        texts = {} if text is None else {name: text(words) for name, words in found.texts.items()}
        for name, value in {**found.numbers, **texts, **found.media(image)}.items():
            run.track(value, name=name, step=step)

    return _tracker(write, lambda: run.close())


def clearml(task: Any) -> RunTracker:
    """A tracker of a task of ClearML: from `Task.init(...)`. A name such as "train/loss" is title and series.

    All kinds of values but histograms; closing it closes the task.
    """

    def write(found: _Values, step: int) -> None:
        if found.configs:
            task.connect(found.configs)
        there = task.get_logger()
        for name, value in found.numbers.items():
            title, _, series = name.partition("/")
            there.report_scalar(title=title, series=series or title, value=value, iteration=step)
        for name, words in found.texts.items():
            there.report_text(f"{name}: {words}")
        for name, (columns, rows) in found.tables.items():
            there.report_table(title=name, series=name, iteration=step, table_plot=[columns, *rows])
        for name, pixels in found.pictures():
            there.report_image(title=name, series=name, iteration=step, image=pixels)
        for name, figure in found.figures.items():
            kind = there.report_plotly if hasattr(figure, "to_html") else there.report_matplotlib_figure
            kind(title=name, series=name, iteration=step, figure=figure)
        for name, path in found.artifacts.items():
            task.upload_artifact(name, path)

    return _tracker(write, lambda: task.close())


def dvclive(live: Any) -> RunTracker:
    """A tracker of DVCLive: from `dvclive.Live(...)`. Numbers, hyperparameters, pictures, figures and artifacts."""

    def write(found: _Values, step: int) -> None:
        if found.configs:
            live.log_params(found.configs)
        live.step = step
        for name, value in found.numbers.items():
            live.log_metric(name, value)
        for name, shown in [*found.pictures(), *found.figures.items()]:
            live.log_image(f"{name}.png", shown)
        for name, path in found.artifacts.items():
            live.log_artifact(path, name=name)
        live.make_summary()

    return _tracker(write, lambda: live.end())
