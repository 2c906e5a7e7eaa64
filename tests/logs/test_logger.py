"""The logger writes what it was given to every place, and goes on after a resume."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mcore_rl.logs.logger import (
    ERROR_CHARS,
    FAILED_PER_LOG,
    SAMPLES_PER_LOG,
    MetricsLogger,
    summarize_errors,
)
from mcore_rl.logs.rows import read_rows
from mcore_rl.logs.trackers.open import TensorBoard
from mcore_rl.process.lost_samples import SamplesLostError
from mcore_rl.types import Sample, StoredSample
from mcore_rl.types.scores import Scores
from tests.support.samples import HeldSampleLog, make_sample
from tests.support.stored import make_stored


def test_metrics_samples_and_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with HeldSampleLog(tmp_path / "run", total_steps=2) as log:
        log.log(0, {"eval/greedy_accuracy": 0.25})
        log.log(1, {"reward/mean": 0.5, "time/rollout": 1.0})
        log.log(2, {})
        log.log_held(
            1, [make_sample(0, "1"), make_sample(1, "no")], Scores([1.0, 0.0]), split="eval"
        )
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row.pop("timestamp") > 1e9 for row in rows] == [True, True]
    assert rows == [
        {"step": 0, "eval/greedy_accuracy": 0.25},
        {"step": 1, "reward/mean": 0.5, "time/rollout": 1.0},
    ]
    assert read_rows(tmp_path / "run" / "samples.jsonl")[1] == {
        "step": 1,
        "split": "eval",
        "prompt_index": 1,
        "sample_index": 0,
        "prompt": "What is 1 + 1?",
        "response": "no",
        "response_len": 1,
        "reward": 0.0,
        "ground_truth": "2",
        "finish_reason": "stop",
        "weights": [0],
    }
    printed = capsys.readouterr().out.splitlines()
    without_time = [line.partition(" ")[2] for line in printed]
    assert without_time == [
        "step 0/2 | held-out 25.0%",
        "step 1/2 | reward 0.500 | rollout 1.0s | 0:00 left",
    ]


def test_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    with HeldSampleLog(tmp_path, console=False) as log:
        for step in (1, 2, 3):
            log.log(step, {"reward/mean": 0.0})
            log.log_held(step, [make_sample(step, "")], Scores([0.0]))
    with HeldSampleLog(tmp_path, last_step=2, console=False) as log:
        log.log(3, {"reward/mean": 1.0})
        log.log_held(3, [make_sample(3, "4")], Scores([1.0]))
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["reward/mean"]) for row in rows] == [(1, 0.0), (2, 0.0), (3, 1.0)]
    assert [row["response"] for row in read_rows(tmp_path / "samples.jsonl")] == ["", "", "4"]


def test_samples_per_call_are_bounded(tmp_path: Path) -> None:
    with HeldSampleLog(tmp_path, console=False) as log:
        log.log_held(
            1,
            [make_sample(i, "") for i in range(SAMPLES_PER_LOG + 9)],
            Scores([0.0] * (SAMPLES_PER_LOG + 9)),
        )
        with pytest.raises(ValueError, match="shorter"):
            log.log_held(1, [make_sample(1, "")], Scores([]))
    assert len(read_rows(tmp_path / "samples.jsonl")) == SAMPLES_PER_LOG


def test_tensorboard_holds_the_resumed_curve(tmp_path: Path) -> None:
    for last_step, steps, reward in ((None, (1, 2, 3), 0.0), (2, (3, 4), 1.0)):
        trackers = [TensorBoard(tmp_path, last_step)]
        with MetricsLogger(tmp_path, last_step=last_step, console=False, trackers=trackers) as log:
            for step in steps:
                log.log(step, {"reward/mean": reward})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert points == [(1, 0.0), (2, 0.0), (3, 1.0), (4, 1.0)]


def test_samples_whose_reward_failed_are_always_kept_and_say_why(tmp_path: Path) -> None:
    num = SAMPLES_PER_LOG + 9
    errors = ["" if i < num - 1 else "ValueError: no" for i in range(num)]
    with HeldSampleLog(tmp_path, console=False) as log:
        log.log_held(
            1,
            [make_sample(i, "") for i in range(num)],
            Scores([0.0] * (num - 1) + [float("nan")], {}, errors),
        )
    rows = read_rows(tmp_path / "samples.jsonl")
    assert len(rows) == SAMPLES_PER_LOG + 1
    assert rows[-1]["prompt_index"] == num - 1 and rows[-1]["reward_error"] == "ValueError: no"
    assert rows[-1]["reward"] is None, "no number, as JSON has no NaN"
    assert "reward_error" not in rows[0]


def test_an_outage_of_a_judge_is_a_few_rows_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All samples fail, most with an error that repeats a long request."""
    num = 1000
    errors = ["TimeoutError: judge, " + "x" * 100_000] * 900 + ["ValueError: no"] * 100
    with HeldSampleLog(tmp_path, console=False) as log:
        scores = Scores([0.0] * num, {}, errors)
        log.log_held(7, [make_sample(i, "") for i in range(num)], scores)
    rows = read_rows(tmp_path / "samples.jsonl")
    assert [row["prompt_index"] for row in rows] == list(range(SAMPLES_PER_LOG + FAILED_PER_LOG))
    assert all(len(row["reward_error"]) < ERROR_CHARS + 50 for row in rows)
    assert rows[0]["reward_error"].endswith("x... (98021 more characters)")
    [record] = caplog.records
    message = record.getMessage()
    assert len(message) < 1000
    assert message.startswith("step 7, train: 1000 rewards of 1000 failed, 900 with TimeoutError: ")
    assert "; 100 with ValueError: no; samples.jsonl has the first of them" in message


def test_a_summary_of_errors_shows_the_most_frequent() -> None:
    errors = ["", "a", "b", "b", "c", "c", "c", "d", "e"]
    assert summarize_errors(errors) == (
        "8 rewards of 9 failed, 3 with c; 2 with b; 1 with a; and 2 other errors; samples.jsonl has"
        " the first of them"
    )


def test_samples_that_are_lost_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, here, samples = make_stored(1)
    text_of = {id(stored): sample for stored, sample in zip(samples, here, strict=True)}

    def read(wanted: Sequence[StoredSample]) -> list[Sample]:
        if any(sample.lease.store == 1 for sample in wanted):
            raise SamplesLostError("collector 1 died", [1])
        return [text_of[id(sample)] for sample in wanted]

    with MetricsLogger(tmp_path, console=False, read=read) as log:
        log.log_samples(1, samples, Scores([float(i) for i in range(len(samples))]))
    kept = [float(i) for i, sample in enumerate(samples) if sample.lease.store == 0]
    assert [row["reward"] for row in read_rows(tmp_path / "samples.jsonl")] == kept
    assert len(kept) < len(samples) and "collector 1 died; they are not in the log" in caplog.text


def test_rows_have_what_rewards_are_made_of_and_the_advantage(tmp_path: Path) -> None:
    nan = float("nan")
    scores = Scores([1.0, nan], {"right": [1.0, nan]}, ["", "ValueError: no"])
    with HeldSampleLog(tmp_path, console=False) as log:
        held = [make_sample(0, "1"), make_sample(1, "2")]
        log.log_held(1, held, replace(scores, advantages_N=[0.5, nan]))
    first, second = read_rows(tmp_path / "samples.jsonl")
    assert (first["parts"], first["advantage"]) == ({"right": 1.0}, 0.5)
    assert (second["parts"], second["advantage"]) == ({"right": None}, None)
    assert "NaN" not in (tmp_path / "samples.jsonl").read_text()
