"""Rewards by file and name: every form of function, parts, penalties, and failures."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from mcore_rl.config import RewardConfig
from mcore_rl.rewards.scorer import Scorer, log_failures, overlong_penalty
from mcore_rl.types import EpisodeRecord, Prompt, Sample, VersionSpan, WeightVersion
from mcore_rl.types.scores import Scores, join_scores

FUNCTIONS = """
import asyncio, os, time
ARGS = ("data_source", "solution_str", "ground_truth", "extra_info")
def score(*, data_source, solution_str, ground_truth, extra_info):
    return 2.0 if solution_str == ground_truth else 0
def parts(*, data_source, solution_str, ground_truth, extra_info):
    return {"right": solution_str == ground_truth, "form": 0.5, "note": "not a number"}
def scored(*, data_source, solution_str, ground_truth, extra_info):
    return {"score": 1.5, "extra": 1}
async def slow(*, data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(60 if solution_str == "hang" else 0.3)
    return 1.0
def batch(*, data_sources, solution_strs, ground_truths, extra_infos):
    pairs = zip(solution_strs, ground_truths)
    return [float(len(solution_strs)) if s == g else 0.0 for s, g in pairs]
async def batch_async(*, data_sources, solution_strs, ground_truths, extra_infos):
    return [{"score": 1.0} for _ in solution_strs]
def short(*, data_sources, solution_strs, ground_truths, extra_infos):
    return [0.0]
def wild(*, data_source, solution_str, ground_truth, extra_info):
    if solution_str == "raise":
        return 1 / 0
    if solution_str == "hang":
        while True:
            time.sleep(1)
    if solution_str == "die":
        os._exit(9)
    if solution_str == "nan":
        return float("nan")
    if solution_str == "text":
        return "good"
    return 1.0
def narrow(solution_str):
    return 0.0
"""


def make_sample_of(text: str, ground_truth: Any, index: int = 0, num_tokens: int = 1) -> Sample:
    spans = (VersionSpan(0, num_tokens, WeightVersion(0)),)
    tokens = (5,) * num_tokens, (-0.1,) * num_tokens
    return Sample(Prompt(index, (1,), (), "unit", ground_truth), 0, *tokens, "stop", spans, text)


def make_samples(*texts: str, num_tokens: int = 1) -> list[Sample]:
    return [make_sample_of(text, "7", i, num_tokens) for i, text in enumerate(texts)]


@pytest.fixture
def reward_file(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return str(path)


def scores_of(path: str, name: str, *texts: str, **options: object) -> Scores:
    with Scorer(RewardConfig(path=path, name=name, **options), 100) as scorer:  # type: ignore[arg-type]
        return scorer(make_samples(*texts))


@pytest.mark.parametrize(
    ("name", "rewards"),
    [
        ("score", [2.0, 0.0]),
        ("scored", [1.5, 1.5]),
        ("batch", [2.0, 0.0]),
        ("batch_async", [1.0, 1.0]),
    ],
)
def test_functions_of_one_sample_or_all_sync_or_not(
    reward_file: str, name: str, rewards: list[float]
) -> None:
    scores = scores_of(reward_file, name, "7", "8")
    assert scores.rewards_N == rewards
    assert not any(scores.errors)


def test_parts_are_weighted_and_logged_each(reward_file: str) -> None:
    scores = scores_of(reward_file, "parts", "7", "8", parts=["right", "form"], weights=[1.0, 0.2])
    assert scores.rewards_N == pytest.approx([1.1, 0.1])
    assert scores.means() == {"reward/part/right": 0.5, "reward/part/form": 0.5}
    missing = scores_of(reward_file, "parts", "7", parts=["length"], weights=[1.0])
    assert missing.has_outcome_N == [False]
    assert missing.errors == ["no number 'length' among ['form', 'right']"]


def test_async_functions_run_side_by_side_and_have_a_deadline(reward_file: str) -> None:
    began_s = time.monotonic()
    scores = scores_of(reward_file, "slow", *["7"] * 20, "hang", timeout_s=2.0)
    assert time.monotonic() - began_s < 5
    assert scores.rewards_N[:20] == [1.0] * 20 and scores.has_outcome_N == [True] * 20 + [False]
    assert scores.errors[-1] == "TimeoutError: no answer within reward.timeout_s=2"


COUNTED: dict[str, Any] = {"on_error": "value", "error_value": -2.0}


@pytest.mark.parametrize(
    ("options", "has_outcome", "fate"),
    [
        ({}, False, "is left out"),
        (COUNTED, True, "counts as -2"),
        ({"on_error": "stop"}, False, "ends the run"),
    ],
    ids=["leave_out", "value", "stop"],
)
def test_a_reward_that_failed_has_an_outcome_only_if_the_recipe_gives_it_a_value(
    reward_file: str,
    options: dict[str, Any],
    has_outcome: bool,
    fate: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    texts = ["7", "raise", "nan", "text", "raise", "raise"]
    scores = scores_of(reward_file, "wild", *texts, **options)
    assert scores.has_outcome_N == [True, *[has_outcome] * 5]
    assert scores.outcomes() == [1.0, *[-2.0] * 5 * has_outcome]
    assert scores.select([0, 2]).has_outcome_N == [True, has_outcome]
    assert [error.split(":")[0] for error in scores.errors] == [
        "",
        "ZeroDivisionError",
        "it is nan",
        "TypeError",
        "ZeroDivisionError",
        "ZeroDivisionError",
    ]
    failed = make_samples(*texts)[1:]
    log_failures(failed, scores.errors, RewardConfig(path="unused.py", **options))
    assert f"reward of prompt 1 (unit) failed and {fate}" in caplog.text
    assert "5 rewards of 6 failed" in caplog.text
    caplog.clear()
    long = "y" * 10_000
    sample = replace(failed[0], text=long, prompt=replace(failed[0].prompt, ground_truth=long))
    log_failures(
        [sample] * 9, [long] * 9, RewardConfig(path="unused.py"), ", and 40 more before it"
    )
    assert len(caplog.text) < 5000 and "9 rewards of 9 failed, and 40 more before it" in caplog.text
    assert (
        scores_of(reward_file, "short", "7", "8").errors
        == ["ValueError: 1 rewards for 2 samples"] * 2
    )


def test_what_hangs_or_dies_in_a_process_of_its_own_costs_its_sample_alone(
    reward_file: str,
) -> None:
    texts = ["7", "hang", "7", "die", "raise", "7"]
    before = set(psutil.Process(os.getpid()).children(recursive=True))
    with Scorer(
        RewardConfig(path=reward_file, name="wild", workers=2, timeout_s=3.0), 100
    ) as scorer:
        scores = scorer(make_samples(*texts))
        again = scorer(make_samples("7", "7"))
        started = set(psutil.Process(os.getpid()).children(recursive=True)) - before
    assert scores.has_outcome_N == [True, False, True, False, False, True]
    assert scores.outcomes() == [1.0] * 3
    assert scores.errors[1] == "TimeoutError: no answer within reward.timeout_s=3"
    assert "its process ended with status" in scores.errors[3]
    assert "ZeroDivisionError" in scores.errors[4]
    assert again.rewards_N == [1.0, 1.0]
    workers = [process for process in started if process.is_running()]
    assert all("resource_tracker" in " ".join(process.cmdline()) for process in workers)


def test_long_responses_lose_more_the_longer_they_are() -> None:
    config = RewardConfig(overlong_buffer_len=20, overlong_penalty=0.5)
    lens = (1, 80, 90, 100, 120)
    assert [overlong_penalty(n, 100, config) for n in lens] == pytest.approx(
        [0.0, 0.0, -0.25, -0.5, -0.5]
    )
    assert overlong_penalty(100, 100, RewardConfig()) == 0.0


def test_the_penalty_is_part_of_the_reward(reward_file: str) -> None:
    config = RewardConfig(path=reward_file, name="score", overlong_buffer_len=10)
    with Scorer(config, 20) as scorer:
        scores = scorer(make_samples("7", num_tokens=15))
    assert scores.rewards_N == [1.5]
    assert scores.means()["reward/part/overlong_penalty"] == -0.5
    assert scores.unpenalized_N == scores.select([0]).unpenalized_N == [2.0]
    assert join_scores([scores, Scores([3.0])]).unpenalized_N == [2.0, 3.0]


def test_wrong_names_and_signatures_are_refused(reward_file: str) -> None:
    with pytest.raises(ValueError, match=r"reward.weights=.*there must be one per part"):
        RewardConfig(parts=["a"])
    for path, name, options, message in (
        ("/nowhere.py", "score", {}, "no such file"),
        (reward_file, "scores", {}, "it has batch, batch_async, narrow, parts, score"),
        (
            reward_file,
            "narrow",
            {},
            "must take the keyword arguments data_source.*, or data_sources",
        ),
        (
            reward_file,
            "batch",
            {"workers": 2},
            "reward.workers=2: .*batch takes all samples at once",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            Scorer(RewardConfig(path=path, name=name, **options), 100)  # type: ignore[arg-type]


def test_a_part_that_is_no_number_counts_as_zero(tmp_path: Path) -> None:
    """Advantages made of parts (gdpo) must not meet a NaN."""
    path = tmp_path / "mine.py"
    path.write_text(
        "def reward(*, data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'right': float(solution_str), 'form': 1.0}\n"
    )
    options = {"parts": ["right", "form"], "weights": [1.0, 1.0]}
    scores = scores_of(str(path), "reward", "2", "nan", "inf", **COUNTED, **options)
    assert scores.rewards_N == [3.0, -2.0, -2.0]
    assert scores.parts == {"right": [2.0, 0.0, 0.0], "form": [1.0, 1.0, 1.0]}
    assert scores.errors == ["", "it is nan", "it is inf"]


def test_nobody_is_asked_about_an_episode_whose_environment_failed(tmp_path: Path) -> None:
    """A function of all samples would miss the numbers that the environment did not give."""
    path = tmp_path / "mine.py"
    path.write_text(
        "def reward(*, data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    return [extra_info['episode']['moves'] for extra_info in extra_infos]\n"
    )
    samples = [
        replace(
            make_sample_of("7", "7", i),
            finish_reason=end,
            episode=EpisodeRecord((), (), end, 0.5, "port 1 is closed", metrics),
        )
        for i, (end, metrics) in enumerate(
            [("done", {"moves": 2.0}), ("env_error", {}), ("deadline", {"moves": 4.0})]
        )
    ]
    for on_error in ({}, COUNTED):
        config = RewardConfig(
            path=str(path), parts=["score", "environment"], weights=[1.0, 10.0], **on_error
        )
        with Scorer(config, 100, has_environment=True) as scorer:
            scores = scorer(samples)
        assert scores.has_outcome_N == [True, False, True] and scores.outcomes() == [7.0, 9.0]
        assert scores.errors == ["", "env_error: port 1 is closed", ""]
        assert scores.is_lost_N == [False, True, False]


def test_noise_makes_rewards_differ_also_before_penalties(reward_file: str) -> None:
    """Rehearsals of dynamic sampling depend on it: a random model earns the same everywhere."""
    samples = [make_sample_of("8", "7", num_tokens=length) for length in (1, 2)]
    with Scorer(RewardConfig(path=reward_file, name="score", noise=1.0), 100) as scorer:
        scores = scorer(samples)
    assert scores.unpenalized_N == scores.rewards_N and scores.differ([0, 1])
