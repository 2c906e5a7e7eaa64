"""The trackers that a recipe may name, a class each, and the function that opens them."""

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from mcore_rl.config import LogConfig
from mcore_rl.config.tree import flatten
from mcore_rl.logs.trackers.first_charts import PATTERNS, select_charts, select_first
from mcore_rl.logs.trackers.tracker import (
    SAMPLE_COLUMNS,
    SAMPLE_TABLES,
    Rows,
    TrackedRun,
    Tracker,
    fold_layers,
    import_tracker,
    make_table,
)
from mcore_rl.process.disk import report_full_disk, write_whole


class WandB:
    """Weights & Biases with `step` as x axis; a resumed run keeps its id (<run_dir>/wandb_id).

    W&B sorts charts by name and takes no order from code, but hides those that it is told to.
    """

    def __init__(self, run: TrackedRun, project: str) -> None:
        self._wandb = import_tracker("wandb", f"log.wandb_project={project!r}", "wandb")
        options = run.options
        self._run = self._wandb.init(
            project=project,
            entity=options.entity or None,
            group=options.group or None,
            tags=options.tags or None,
            name=run.name,
            dir=str(run.run_dir),
            config=dict(run.config),
            id=run.read_id("wandb_id"),
            resume="allow",
        )
        write_whole(run.run_dir / "wandb_id", self._run.id)
        self._run.define_metric("*", step_metric="step", hidden=options.charts == "first")
        self._shown: set[str] = set()
        self._show(SAMPLE_TABLES)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._show(select_first(metrics))
        single, layers = fold_layers(metrics)
        histograms = {name: self._wandb.Histogram(values) for name, values in layers.items()}
        self._run.log({**single, **histograms, "step": step})

    def log_samples(self, step: int, split: str, rows: Rows) -> None:
        table = self._wandb.Table(columns=list(SAMPLE_COLUMNS), data=make_table(rows))
        self._run.log({f"samples/{split}": table, "step": step})

    def _show(self, names: Sequence[str]) -> None:
        """Show charts of these names, each defined by itself: of two patterns any one would win."""
        for name in names:
            if name not in self._shown:
                self._shown.add(name)
                self._run.define_metric(name, step_metric="step", hidden=False)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


PLOT_ORDER = "TRACKIO_PLOT_ORDER"
"""Variable with the order of charts, which a new Space takes over from the run that makes it."""


class Trackio:
    """trackio, on this machine or in a Space; a resumed run keeps its name."""

    def __init__(self, run: TrackedRun, project: str) -> None:
        self._trackio = import_tracker("trackio", f"log.trackio_project={project!r}", "trackio")
        os.environ.setdefault(PLOT_ORDER, ",".join(PATTERNS))
        self._trackio.init(
            project=project,
            name=run.name,
            group=run.options.group or None,
            space_id=run.options.entity or None,
            config=dict(run.config),
            resume="never" if run.last_step is None else "allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._trackio.log(dict(metrics), step=step)

    def log_samples(self, step: int, split: str, rows: Rows) -> None:
        table = self._trackio.Table(columns=list(SAMPLE_COLUMNS), data=make_table(rows))
        self._trackio.log({f"samples/{split}": table}, step=step)

    def close(self, failed: bool) -> None:
        self._trackio.finish()


OVERVIEW = "overview"


class SwanLab:
    """SwanLab; a resumed run keeps its id (<run_dir>/swanlab_id).

    The first charts of all runs of a project are in one section.
    """

    def __init__(self, run: TrackedRun, project: str) -> None:
        self._swanlab = import_tracker("swanlab", f"log.swanlab_project={project!r}", "swanlab")
        options = run.options
        self._run = self._swanlab.init(
            project=project,
            workspace=options.entity or None,
            group=options.group or None,
            tags=options.tags or None,
            name=run.name,
            log_dir=str(run.run_dir / "swanlab"),
            config=dict(run.config),
            id=run.read_id("swanlab_id"),
            resume="allow",
        )
        write_whole(run.run_dir / "swanlab_id", self._run.id)
        self._run.define_metric("*", hidden=options.charts == "first")
        for name in SAMPLE_TABLES:
            self._run.define_metric(name, hidden=False)
        self._shown: set[str] = set()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name in select_first(metrics):
            if name not in self._shown:
                self._shown.add(name)
                self._run.define_metric(name, section_name=OVERVIEW, hidden=False)
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, split: str, rows: Rows) -> None:
        texts = [
            self._swanlab.Text(
                f"{row['prompt']}\n---\n{row['response']}", caption=f"reward {row['reward']}"
            )
            for row in rows
        ]
        self._run.log({f"samples/{split}": texts}, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(state="crashed" if failed else "success")


EXPERIMENT = "mcore_rl"
MOST_CHARS = 500
"""MLflow takes no longer parameter."""
TRACED = ("reward", "parts", "advantage", "reward_error", "finish_reason", "weights", "set")
TRACED_OF_TURN = ("tokens", "finish_reason", "reward", "parent")
"""Fields of samples and of turns that a trace and its spans get as attributes."""


class MLflow:
    """An experiment at `uri`; a resumed run keeps its id (<run_dir>/mlflow_id).

    Samples are rows of a table, and a trace each; turns of an episode are spans of its trace.
    """

    def __init__(self, run: TrackedRun, uri: str) -> None:
        mlflow = import_tracker("mlflow", f"log.mlflow_uri={uri!r}", "mlflow")
        mlflow.set_tracking_uri(uri)  # where traces go, whatever the client's is
        self._mlflow = mlflow
        self._metric = mlflow.entities.Metric
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        self._run_id = run.read_id("mlflow_id") or self._create_run(run)
        self._experiment_id = self._client.get_run(self._run_id).info.experiment_id
        self._client.update_run(self._run_id, status="RUNNING")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        timestamp_ms = int(time.time() * 1000)
        batch = [self._metric(name, value, timestamp_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=batch)

    def log_samples(self, step: int, split: str, rows: Rows) -> None:
        columns = zip(SAMPLE_COLUMNS, zip(*make_table(rows), strict=True), strict=True)
        table = {name: list(values) for name, values in columns}
        self._client.log_table(self._run_id, table, f"samples/{split}.json")
        for row in rows:
            self._trace(split, row)

    def _trace(self, split: str, row: Mapping[str, Any]) -> None:
        tags = {"split": split, "step": str(row["step"]), "run_id": self._run_id}
        root = self._client.start_trace(
            f"{split} sample",
            span_type="AGENT" if "turns" in row else "LLM",
            inputs={"prompt": row["prompt"], "ground_truth": row.get("ground_truth")},
            attributes={name: row[name] for name in TRACED if name in row},
            tags=tags,
            experiment_id=self._experiment_id,
        )
        for number, turn in enumerate(row.get("turns", ())):
            span = self._client.start_span(
                f"turn {number}",
                root.trace_id,
                root.span_id,
                span_type="LLM",
                inputs={"messages": turn["messages"]},
                attributes={name: turn[name] for name in TRACED_OF_TURN if name in turn},
            )
            answer = {"answer": turn["answer"], "calls": turn.get("calls", [])}
            self._client.end_span(root.trace_id, span.span_id, outputs=answer)
        self._client.end_trace(root.trace_id, outputs={"response": row["response"]})

    def close(self, failed: bool) -> None:
        self._mlflow.flush_trace_async_logging()
        self._client.set_terminated(self._run_id, status="FAILED" if failed else "FINISHED")

    def _create_run(self, run: TrackedRun) -> str:
        options = run.options
        name = options.group or EXPERIMENT
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(name)
        )
        tags = dict.fromkeys(options.tags, "true")
        created = self._client.create_run(experiment_id, run_name=run.name, tags=tags)
        for option, value in flatten(run.config).items():
            self._client.log_param(created.info.run_id, option, str(value)[:MOST_CHARS])
        write_whole(run.run_dir / "mlflow_id", created.info.run_id)
        return created.info.run_id


class ClearML:
    """ClearML; a resumed run continues its task (<run_dir>/clearml_id)."""

    def __init__(self, run: TrackedRun, project: str) -> None:
        clearml = import_tracker("clearml", f"log.clearml_project={project!r}", "clearml")
        options = run.options
        former = run.read_id("clearml_id")
        self._task = clearml.Task.init(
            project_name=f"{project}/{options.group}" if options.group else project,
            task_name=run.name,
            tags=options.tags or None,
            reuse_last_task_id=False,
            continue_last_task=former if former and not clearml.Task.is_offline() else False,
            auto_connect_arg_parser=False,
            auto_connect_frameworks=False,
            auto_connect_streams=False,
            auto_resource_monitoring=False,
        )
        self._task.connect(dict(run.config), name="recipe")
        write_whole(run.run_dir / "clearml_id", self._task.id)
        self._logger = self._task.get_logger()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            title, _, series = name.partition("/")
            self._logger.report_scalar(title, series or title, value, iteration=step)

    def log_samples(self, step: int, split: str, rows: Rows) -> None:
        table = [list(SAMPLE_COLUMNS), *make_table(rows)]
        self._logger.report_table("samples", split, iteration=step, table_plot=table)

    def close(self, failed: bool) -> None:
        if failed:
            self._task.mark_failed()
        self._task.close()


class TensorBoard:
    """Event files in <run_dir>/tensorboard; a resume hides steps beyond `last_step`.

    The tab Custom Scalars has the first charts.
    """

    def __init__(self, run_dir: Path, last_step: int | None) -> None:
        purge_step = 0 if last_step is None else last_step + 1
        option = "log.tensorboard=true"
        module = import_tracker("torch.utils.tensorboard", option, "tensorboard")
        self._folder = run_dir / "tensorboard"
        with report_full_disk(self._folder):
            self._writer = module.SummaryWriter(str(self._folder), purge_step=purge_step)
        self._known: set[str] = set()
        self._charts: dict[str, dict[str, list[str]]] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with report_full_disk(self._folder):
            self._lay_out(metrics)
            single, layers = fold_layers(metrics)
            for name, value in single.items():
                self._writer.add_scalar(name, value, step)
            for name, values in layers.items():
                self._writer.add_histogram(name, np.asarray(values), step)
            self._writer.flush()

    def _lay_out(self, metrics: Mapping[str, float]) -> None:
        """Write the first charts again when one has a new metric: TensorBoard takes the last."""
        self._known.update(metrics)
        if (charts := select_charts(self._known)) == self._charts:
            return
        self._charts = charts
        self._writer.add_custom_scalars(
            {
                section: {
                    chart: ["Multiline", [f"^{re.escape(name)}$" for name in names]]
                    for chart, names in named.items()
                }
                for section, named in charts.items()
            }
        )

    def log_samples(self, step: int, split: str, rows: Rows) -> None:
        with report_full_disk(self._folder):
            for number, row in enumerate(rows):
                text = f"reward {row['reward']}\n\n{row['prompt']}\n\n---\n\n{row['response']}"
                self._writer.add_text(f"samples/{split}/{number}", text, step)

    def close(self, failed: bool) -> None:
        with report_full_disk(self._folder):
            self._writer.close()


def open_trackers(log: LogConfig, run: TrackedRun) -> list[Tracker]:
    """Return the trackers of a run. If one cannot be opened, those before it are closed."""
    trackers: list[Tracker] = []
    with ExitStack() as opened:

        def add(tracker: Tracker) -> None:
            trackers.append(tracker)
            opened.callback(tracker.close, True)

        if log.tensorboard:
            add(TensorBoard(run.run_dir, run.last_step))
        if log.wandb_project:
            add(WandB(run, log.wandb_project))
        if log.trackio_project:
            add(Trackio(run, log.trackio_project))
        if log.swanlab_project:
            add(SwanLab(run, log.swanlab_project))
        if log.clearml_project:
            add(ClearML(run, log.clearml_project))
        if log.mlflow_uri:
            add(MLflow(run, log.mlflow_uri))
        opened.pop_all()
    return trackers
