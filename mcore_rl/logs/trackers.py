"""Sends metrics to TensorBoard, W&B and MLflow, each imported only if a run asks for it."""

import importlib
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from mcore_rl.process.disk import report_full_disk, write_whole


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self, failed: bool) -> None: ...


class TensorBoard:
    """Event files in <run_dir>/tensorboard; a resume hides steps beyond `last_step`."""

    def __init__(self, run_dir: Path, last_step: int | None) -> None:
        purge_step = 0 if last_step is None else last_step + 1
        module = _import("torch.utils.tensorboard", "log.tensorboard=true", "tensorboard")
        self._folder = run_dir / "tensorboard"
        with report_full_disk(self._folder):
            self._writer = module.SummaryWriter(str(self._folder), purge_step=purge_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with report_full_disk(self._folder):
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def close(self, failed: bool) -> None:
        with report_full_disk(self._folder):
            self._writer.close()


class WandB:
    """Weights & Biases with `step` as x axis; a resumed run keeps its id (<run_dir>/wandb_id)."""

    def __init__(
        self, run_dir: Path, last_step: int | None, project: str, config: Mapping[str, Any]
    ) -> None:
        wandb = _import("wandb", f"log.wandb_project={project!r}", "wandb")
        self._run = wandb.init(
            project=project,
            name=run_dir.name,
            dir=str(run_dir),
            config=dict(config),
            id=_read_id(run_dir / "wandb_id", last_step),
            resume="allow",
        )
        write_whole(run_dir / "wandb_id", self._run.id)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow:
    """MLflow experiment mcore_rl at `uri`; a resumed run keeps its id (<run_dir>/mlflow_id)."""

    def __init__(
        self, run_dir: Path, last_step: int | None, uri: str, config: Mapping[str, Any]
    ) -> None:
        mlflow = _import("mlflow", f"log.mlflow_uri={uri!r}", "mlflow")
        self._metric = mlflow.entities.Metric
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        self._run_id = _read_id(run_dir / "mlflow_id", last_step)
        if self._run_id is None:
            self._run_id = self._create_run(run_dir, config)
        self._client.update_run(self._run_id, status="RUNNING")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        timestamp_ms = int(time.time() * 1000)
        batch = [self._metric(name, value, timestamp_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=batch)

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._run_id, status="FAILED" if failed else "FINISHED")

    def _create_run(self, run_dir: Path, config: Mapping[str, Any]) -> str:
        experiment = self._client.get_experiment_by_name("mcore_rl")
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment("mcore_rl")
        )
        run_id = self._client.create_run(experiment_id, run_name=run_dir.name).info.run_id
        for name, value in _flatten(config).items():
            self._client.log_param(run_id, name, value[:500])
        write_whole(run_dir / "mlflow_id", run_id)
        return run_id


def _import(module: str, option: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{option} needs the package {package} ({error}): pip install {package}, or leave the"
            " option out"
        ) from error


def _read_id(path: Path, last_step: int | None) -> str | None:
    """Return the tracker's id of the run that is resumed, or None if it was not tracked."""
    return path.read_text() if last_step is not None and path.exists() else None


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return {"a.b": "1"} for {"a": {"b": 1}}."""
    flat: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = str(value)
    return flat
