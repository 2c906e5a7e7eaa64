"""MLflow: metrics, the recipe as parameters, samples as a table."""

import time
from collections.abc import Mapping

from mcore_rl.config.tree import flatten
from mcore_rl.logs.trackers.tracker import (
    SAMPLE_COLUMNS,
    Rows,
    TrackedRun,
    import_tracker,
    make_table,
)
from mcore_rl.process.disk import write_whole

EXPERIMENT = "mcore_rl"
MOST_CHARS = 500
"""MLflow takes no longer parameter."""


class MLflow:
    """An experiment at `uri`; a resumed run keeps its id (<run_dir>/mlflow_id)."""

    def __init__(self, run: TrackedRun, uri: str) -> None:
        mlflow = import_tracker("mlflow", f"log.mlflow_uri={uri!r}", "mlflow")
        self._metric = mlflow.entities.Metric
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        self._run_id = run.read_id("mlflow_id") or self._create_run(run)
        self._client.update_run(self._run_id, status="RUNNING")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        timestamp_ms = int(time.time() * 1000)
        batch = [self._metric(name, value, timestamp_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=batch)

    def log_samples(self, step: int, split: str, rows: Rows) -> None:
        columns = zip(SAMPLE_COLUMNS, zip(*make_table(rows), strict=True), strict=True)
        table = {name: list(values) for name, values in columns}
        self._client.log_table(self._run_id, table, f"samples/{split}.json")

    def close(self, failed: bool) -> None:
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
