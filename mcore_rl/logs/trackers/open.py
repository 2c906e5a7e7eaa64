"""Opens the trackers that a recipe names."""

from contextlib import ExitStack

from mcore_rl.config import LogConfig
from mcore_rl.logs.trackers.hosted import SwanLab, Trackio, WandB
from mcore_rl.logs.trackers.mlflow import MLflow
from mcore_rl.logs.trackers.tensorboard import TensorBoard
from mcore_rl.logs.trackers.tracker import TrackedRun, Tracker


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
        if log.mlflow_uri:
            add(MLflow(run, log.mlflow_uri))
        opened.pop_all()
    return trackers
