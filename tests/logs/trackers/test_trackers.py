"""TensorBoard; W&B, trackio, SwanLab, ClearML and MLflow, offline, where they are installed."""

import json
import re
import struct
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from mcore_rl.config import LogConfig, TrackingConfig
from mcore_rl.logs.logger import MetricsLogger
from mcore_rl.logs.names import add_former_names, find_documented
from mcore_rl.logs.trackers.first_charts import PATTERNS, select_charts, select_first
from mcore_rl.logs.trackers.open import PLOT_ORDER, open_trackers
from mcore_rl.logs.trackers.tracker import TrackedRun, Tracker, fold_layers, make_table
from tests.support.policy import read

CONFIG = {"run": {"seed": 3}, "algorithm": {"loss": "ppo_clip"}}
ROWS = [
    {
        "step": 1,
        "prompt": "2 + 2",
        "response": "4",
        "reward": 1.0,
        "ground_truth": [4],
        "split": "train",
    },
    {"step": 1, "prompt": "2 + 3", "response": "4", "reward": 0.0, "ground_truth": "5"},
]
TABLE_OF_WANDB = "offline-run-*/files/media/table/samples/train_*.table.json"
TRACKING = TrackingConfig(name="mine", group="ours", tags=["moe"], samples=2)


@pytest.fixture(autouse=True)
def in_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have artifacts that trackers write to the working folder land in the test's, and take back
    the variable that one sets.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(PLOT_ORDER, "")
    monkeypatch.delenv(PLOT_ORDER)


def open_here(folder: Path, last_step: int | None = None, **target: Any) -> list[Tracker]:
    log = LogConfig(**{"tensorboard": False, "tracking": TRACKING, **target})
    folder.mkdir(exist_ok=True)
    return open_trackers(log, TrackedRun(folder, last_step, log.tracking, CONFIG))


def log_steps(folder: Path, last_step: int | None, *steps: int, **target: Any) -> None:
    trackers = open_here(folder, last_step, **target)
    with MetricsLogger(folder, last_step=last_step, console=False, trackers=trackers) as log:
        for step in steps:
            log.log(step, {"reward/mean": step / 10})
            for tracker in trackers:
                tracker.log_samples(step, "train", ROWS)


@pytest.mark.parametrize(
    ("package", "option"),
    [
        ("wandb", {"wandb_project": "unit"}),
        ("trackio", {"trackio_project": "unit"}),
        ("swanlab", {"swanlab_project": "unit"}),
        ("clearml", {"clearml_project": "unit"}),
        ("mlflow", {"mlflow_uri": "sqlite:///x.db"}),
    ],
)
def test_a_missing_package_is_named_with_its_option(
    package: str, option: dict[str, str], tmp_path: Path
) -> None:
    if find_spec(package):
        pytest.skip(f"{package} is installed")
    expected = rf"log\.{next(iter(option))}=.* needs the package {package}"
    with pytest.raises(ValueError, match=expected):
        open_here(tmp_path, None, **option)


def test_a_table_of_samples_has_numbers_and_texts() -> None:
    assert make_table(ROWS) == [
        [1, "2 + 2", "4", 1.0, "[4]", None],
        [1, "2 + 3", "4", 0.0, "5", None],
    ]


def test_numbers_of_layers_are_folded_in_their_order() -> None:
    metrics = {"loss/nll": 1.0, "router/layer_10/load": 3.0, "router/layer_2/load": 2.0}
    assert fold_layers(metrics) == ({"loss/nll": 1.0}, {"router/layers/load": [2.0, 3.0]})


OF_A_STEP = add_former_names(
    {
        "batch/lost": 0.0,
        "time/rollout": 2.0,
        "time/sync": 1.0,
        "loss/entropy": 0.5,
        "reward/std": 0.5,
        "reward/mean": 0.25,
        "eval/hard/greedy_accuracy": 0.5,
    }
)
FIRST = [
    "reward/mean",
    "eval/hard/greedy_accuracy",
    "loss/entropy",
    "time/rollout",
    "time/sync",
]


def test_first_charts_show_documented_metrics_in_their_order() -> None:
    assert all(find_documented(pattern.replace("*", "some")) for pattern in PATTERNS)
    document = read("docs/monitoring.md").replace("'\\\n'", "")
    assert f"export TRACKIO_PLOT_ORDER='{','.join(PATTERNS)}'" in document
    assert select_first(OF_A_STEP) == FIRST
    assert select_charts(OF_A_STEP)["Speed"] == {"seconds of a step": ["time/rollout", "time/sync"]}
    assert select_charts({"batch/lost": 0.0}) == {}


def read_records(path: Path) -> Iterator[bytes]:
    """Yield the records of an offline run of W&B or SwanLab: 7 bytes, then LevelDB's log format."""
    data = path.read_bytes()
    place, record = 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, num_bytes, kind = struct.unpack_from("<IHB", data, place)
        place += 7 + num_bytes
        record += data[place - num_bytes : place]
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def read_wandb(folder: Path) -> list[list[Any]]:
    """Return the records of each offline run in a run folder, in the order of their starts.

    W&B's own process ends a file some milliseconds after the run was finished.
    """
    record_type = pytest.importorskip("wandb.proto.wandb_internal_pb2").Record
    runs = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        records: list[Any] = []
        deadline = time.monotonic() + 30
        while not any(record.HasField("exit") for record in records):
            assert time.monotonic() < deadline, f"{file}: no end in {len(records)} records"
            time.sleep(0.02)
            records = [record_type.FromString(record) for record in read_records(file)]
        runs.append(records)
    return runs


@pytest.mark.parametrize(("charts", "is_hidden"), [("first", True), ("all", False)])
def test_wandb_hides_charts_but_the_first(
    charts: Any, is_hidden: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    [tracker] = open_here(
        tmp_path / "run", wandb_project="unit", tracking=TrackingConfig(charts=charts)
    )
    tracker.log(1, OF_A_STEP)
    tracker.close(failed=False)
    [records] = read_wandb(tmp_path / "run")
    defined = [record.metric for record in records if record.HasField("metric")]
    hidden = {metric.name or metric.glob_name: metric.options.hidden for metric in defined}
    assert hidden.pop("*") == is_hidden
    assert hidden == dict.fromkeys(["samples/train", "samples/eval", *FIRST], False)


def test_mlflow_keeps_one_run_over_a_resume(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    log_steps(tmp_path / "run", None, 1, 2, mlflow_uri=uri)
    log_steps(tmp_path / "run", 2, 3, mlflow_uri=uri)
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("ours")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params == {"run.seed": "3", "algorithm.loss": "ppo_clip"}
    assert (run.info.status, run.info.run_name) == ("FINISHED", "mine")
    assert run.data.tags["moe"] == "true"
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(point.step, point.value) for point in history] == [(1, 0.1), (2, 0.2), (3, 0.3)]


def test_mlflow_gets_a_trace_for_each_sample_and_a_span_for_each_turn(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    turns = [
        {"messages": [{"role": "user", "content": "2 + 2"}], "answer": "ask", "calls": ["add"]},
        {"messages": [{"role": "tool", "content": "4"}], "answer": "4", "tokens": 1},
    ]
    [tracker] = open_here(tmp_path / "run", mlflow_uri=uri)
    tracker.log_samples(1, "train", [{**ROWS[0], "turns": turns}, ROWS[1]])
    tracker.close(failed=False)
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("ours")
    traces = mlflow.search_traces(
        experiment_ids=[experiment.experiment_id], return_type="list", order_by=["timestamp ASC"]
    )
    episode, single = sorted(traces, key=lambda trace: -len(trace.data.spans))
    assert episode.info.tags["split"] == "train" and episode.info.tags["step"] == "1"
    root, *spans = episode.data.spans
    assert [span.name for span in spans] == ["turn 0", "turn 1"]
    assert root.attributes["reward"] == 1.0 and root.outputs == {"response": "4"}
    assert spans[0].outputs == {"answer": "ask", "calls": ["add"]}
    assert spans[1].inputs == {"messages": turns[1]["messages"]}
    assert [span.inputs["prompt"] for span in single.data.spans] == ["2 + 3"]


def test_mlflow_is_told_of_a_failure(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    trackers = open_here(tmp_path, mlflow_uri=uri)
    with pytest.raises(RuntimeError), MetricsLogger(tmp_path, console=False, trackers=trackers):
        raise RuntimeError
    run_id = (tmp_path / "mlflow_id").read_text()
    assert mlflow.MlflowClient(tracking_uri=uri).get_run(run_id).info.status == "FAILED"


def test_wandb_keeps_one_id_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    ids = []
    for last_step in (None, 1):
        log_steps(tmp_path, last_step, (last_step or 0) + 1, wandb_project="unit")
        ids.append((tmp_path / "wandb_id").read_text())
    assert ids[0] == ids[1]
    for step, records in enumerate(read_wandb(tmp_path), 1):
        [run] = [record.run for record in records if record.HasField("run")]
        assert (run.run_id, run.display_name, run.run_group) == (ids[0], "mine", "ours")
        assert list(run.tags) == ["moe"]
        recipe = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert CONFIG.items() <= recipe.items()
        items = [item for record in records for item in record.history.item]
        logged = {".".join(item.nested_key) or item.key: item.value_json for item in items}
        assert (logged["reward/mean"], logged["step"]) == (str(step / 10), str(step))
    tables = [json.loads(path.read_text()) for path in tmp_path.glob(f"wandb/{TABLE_OF_WANDB}")]
    assert [table["data"] for table in tables] == [make_table(ROWS)] * 2


def test_swanlab_keeps_one_id_over_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("swanlab")
    record_type = pytest.importorskip("swanlab.proto.swanlab.record.v1.record_pb2").Record
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    ids = []
    for last_step in (None, 1):
        log_steps(tmp_path, last_step, (last_step or 0) + 1, swanlab_project="unit")
        ids.append((tmp_path / "swanlab_id").read_text())
    assert ids[0] == ids[1]
    scalars = []
    for file in sorted(tmp_path.glob("swanlab/run-*/*.swanlab")):
        records = [record_type.FromString(record) for record in read_records(file)]
        found = [record.scalar for record in records if record.HasField("scalar")]
        scalars += [(each.key, each.step, round(each.value.number, 6)) for each in found]
        assert any(record.HasField("media") for record in records), "samples are texts"
        assert any(record.HasField("finish") for record in records)
    assert scalars == [("reward/mean", 1, 0.1), ("reward/mean", 2, 0.2)]


def test_swanlab_shows_the_first_charts_in_a_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    [tracker] = open_here(tmp_path / "run", swanlab_project="unit")
    tracker.log(1, OF_A_STEP)
    tracker.close(failed=False)
    [file] = tmp_path.glob("run/swanlab/run-*/*.swanlab")
    columns = file.read_bytes()
    sections = {name: re.search(name.encode() + rb".{1,2}overview", columns) for name in OF_A_STEP}
    assert {name for name, found in sections.items() if found} == set(FIRST)


def test_clearml_writes_an_offline_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARML_OFFLINE_MODE", "1")
    monkeypatch.setenv("CLEARML_CACHE_DIR", str(tmp_path / "cache"))
    clearml = pytest.importorskip("clearml")
    [tracker] = open_here(tmp_path / "run", clearml_project="unit")
    task = clearml.Task.current_task()
    folder = Path(task.get_offline_mode_folder())
    assert (tmp_path / "run" / "clearml_id").read_text() == task.id
    tracker.log(1, {"reward/mean": 0.25})
    tracker.log_samples(1, "train", ROWS)
    tracker.close(failed=False)
    [file] = folder.parent.rglob("metrics.jsonl")
    events = [event for line in file.read_text().splitlines() if line for event in json.loads(line)]
    told = [(event["metric"], event["variant"], event["iter"]) for event in events]
    assert told == [("reward", "mean", 1), ("samples", "train", 1)]
    assert events[0]["value"] == 0.25 and "2 + 3" in events[1]["plot_str"]
    [described] = folder.parent.rglob("task.json")
    recipe = json.loads(described.read_text())["hyperparams"]["recipe"]
    assert {name: item["value"] for name, item in recipe.items()} == {
        "run/seed": "3",
        "algorithm/loss": "ppo_clip",
    }


def test_trackio_keeps_one_run_over_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    log_steps(tmp_path / "run", None, 1, trackio_project="unit")
    log_steps(tmp_path / "run", 1, 2, trackio_project="unit")
    [run] = trackio.Api().runs("unit")
    assert run.name == "mine" and CONFIG.items() <= run.config.items()
    rows = trackio.sqlite_storage.SQLiteStorage.get_logs("unit", "mine")
    means = [(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row]
    assert means == [(1, 0.1), (2, 0.2)]
    tables = [row["samples/train"]["_value"] for row in rows if "samples/train" in row]
    assert [[list(cells.values()) for cells in table] for table in tables] == [make_table(ROWS)] * 2


def test_a_space_of_trackio_gets_the_order_of_charts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    [tracker] = open_here(tmp_path / "run", trackio_project="unit")
    tracker.close(failed=False)
    groups, _ = trackio.utils.order_metrics_by_plot_preference(list(OF_A_STEP))
    assert groups == ["reward", "eval", "loss", "time", "batch"]


def test_tensorboard_keeps_each_number_under_its_step(tmp_path: Path) -> None:
    [tracker] = open_here(tmp_path, tensorboard=True)
    tracker.log(1, {"reward/mean": 0.25})
    of_layers = {f"router/layer_{i}/idle_share": i / 4 for i in (1, 0, 10)}
    tracker.log(2, {"reward/mean": 0.5, "loss/nll": 1.0, **of_layers})
    tracker.log_samples(2, "train", ROWS)
    tracker.close(failed=False)
    [folder] = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(folder)).Reload()
    points = [(point.step, point.value) for point in events.Scalars("reward/mean")]
    assert points == [(1, 0.25), (2, 0.5)]
    [histogram] = events.Histograms("router/layers/idle_share")
    assert histogram.step == 2 and histogram.histogram_value.num == 3
    assert not any("layer_" in name for name in events.Tags()["scalars"])
    assert "samples/train/1/text_summary" in events.Tags()["tensors"]


def test_tensorboard_lays_out_the_first_charts_as_they_come(tmp_path: Path) -> None:
    [tracker] = open_here(tmp_path, tensorboard=True)
    tracker.log(0, {"eval/greedy_accuracy": 0.1})
    tracker.log(1, OF_A_STEP)
    tracker.log(2, OF_A_STEP)
    tracker.close(failed=False)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    layouts = [
        Layout.FromString(event.tensor_proto.string_val[0])
        for event in events.Tensors("custom_scalars__config__")
    ]
    assert len(layouts) == 2, "it is written once for each set of charts"
    shown = {
        (category.title, chart.title): [
            name
            for name in events.Tags()["scalars"]
            if any(re.match(tag, name) for tag in chart.multiline.tag)
        ]
        for category in layouts[-1].category
        for chart in category.chart
    }
    assert list(shown.items()) == [
        (("Learning", "reward"), ["reward/mean"]),
        (
            ("Learning", "right answers to held-out prompts"),
            ["eval/greedy_accuracy", "eval/hard/greedy_accuracy"],
        ),
        (("Learning", "entropy, nats"), ["loss/entropy"]),
        (("Speed", "seconds of a step"), ["time/rollout", "time/sync"]),
    ]
