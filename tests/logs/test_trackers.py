"""TensorBoard; W&B and MLflow, offline, where they are installed; else a clear error."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mcore_rl.logs.logger import MetricsLogger
from mcore_rl.logs.sinks import TensorBoard

CONFIG = {"run": {"seed": 3}, "algorithm": {"loss": "ppo_clip"}}


@pytest.mark.parametrize(
    ("package", "option"),
    [("wandb", {"wandb_project": "unit"}), ("mlflow", {"mlflow_uri": "sqlite:///x.db"})],
)
def test_a_missing_package_is_named_with_its_option(
    package: str, option: dict, tmp_path: Path
) -> None:
    if find_spec(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(
        ValueError, match=rf"log\.{next(iter(option))}=.* needs the package {package}"
    ):
        MetricsLogger(tmp_path, console=False, **option)


def test_mlflow_keeps_one_run_over_a_resume(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    for last_step, steps in ((None, (1, 2)), (2, (3,))):
        with MetricsLogger(
            tmp_path / "run", last_step=last_step, console=False, mlflow_uri=uri, config=CONFIG
        ) as log:
            for step in steps:
                log.log(step, {"reward/mean": step / 10})
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("mcore_rl")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params == {"run.seed": "3", "algorithm.loss": "ppo_clip"}
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(point.step, point.value) for point in history] == [(1, 0.1), (2, 0.2), (3, 0.3)]


def test_mlflow_is_told_of_a_failure(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    with pytest.raises(RuntimeError), MetricsLogger(tmp_path, console=False, mlflow_uri=uri):
        raise RuntimeError
    run_id = (tmp_path / "mlflow_id").read_text()
    assert mlflow.MlflowClient(tracking_uri=uri).get_run(run_id).info.status == "FAILED"


def test_wandb_keeps_one_id_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    ids = []
    for last_step in (None, 1):
        with MetricsLogger(
            tmp_path, last_step=last_step, console=False, wandb_project="unit", config=CONFIG
        ) as log:
            log.log((last_step or 0) + 1, {"reward/mean": 0.5})
        ids.append((tmp_path / "wandb_id").read_text())
    assert ids[0] == ids[1]
    folders = sorted(path.name for path in (tmp_path / "wandb").glob("offline-run-*"))
    assert folders and all(name.endswith(ids[0]) for name in folders)


def test_tensorboard_keeps_each_number_under_its_step(tmp_path: Path) -> None:
    tracker = TensorBoard(tmp_path, None)
    tracker.log(1, {"reward/mean": 0.25})
    tracker.log(2, {"reward/mean": 0.5, "loss/nll": 1.0})
    tracker.close(failed=False)
    [folder] = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(folder)).Reload()
    points = [(point.step, point.value) for point in events.Scalars("reward/mean")]
    assert points == [(1, 0.25), (2, 0.5)]
