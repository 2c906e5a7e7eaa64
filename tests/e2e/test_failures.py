"""Killed ranks, engines, controllers and Ray: one clear message, no leftovers, a working resume."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.books import assert_same_prompts
from tests.support.runs import Run
from tests.support.victims import PHASES, VICTIMS, assert_complete, kill_in_phase

pytestmark = pytest.mark.e2e
Start = Callable[..., Run]
SETTINGS = (
    "train.mini_batches=2",
    "algorithm.kl.coef=0.01",
    "checkpoint.every_steps=1",
    "rollout.restarts=0",
    "reward.workers=1",
    "run.recovery.partner=none",
)


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_saves_ends_whole(start: Start, tmp_path: Path) -> None:
    survive(start, tmp_path / "run", [("controller", "save")], num_steps=5)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("victim", [victim for victim in VICTIMS if victim != "critic"])
def test_a_run_that_is_killed_in_every_phase_ends_whole(
    start: Start, tmp_path: Path, victim: str
) -> None:
    survive(start, tmp_path / "run", [(victim, phase) for phase in PHASES])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_that_samples_beside_training_is_killed_again_and_again(
    start: Start, tmp_path: Path
) -> None:
    deaths = [
        ("rank", "train"),
        ("scheduler", "train"),
        ("gcs", "rollout"),
        ("controller", "save"),
        ("raylet", "train"),
        ("interrupted", "sync"),
    ]
    more = (
        "rollout.mode=async",
        "algorithm.correction.weight=token",
        "rollout.deterministic=false",
    )
    # A step takes half a second: on a busy machine ten are over before a victim is found.
    survive(start, tmp_path / "run", deaths, *more, num_steps=20)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_with_a_critic_is_killed_again_and_again(start: Start, tmp_path: Path) -> None:
    deaths = [
        ("critic", "train"),
        ("rank", "train"),
        ("critic", "save"),
        ("gcs", "logprobs"),
        ("controller", "save"),
        ("interrupted", "train"),
    ]
    survive(start, tmp_path / "run", deaths, "algorithm.advantage=gae")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_that_is_killed_trains_on_the_prompts_of_one_that_is_not(
    start: Start, tmp_path: Path
) -> None:
    """Steps after the last whole checkpoint are lost, and their prompts drawn again."""
    deaths = [("rank", "train"), ("scheduler", "rollout"), ("controller", "sync")]
    more = ("rollout.dynamic_sampling=true",)
    survive(start, tmp_path / "killed", deaths, *more, num_steps=8)
    survive(start, tmp_path / "calm", [], *more, num_steps=8)
    assert_same_prompts(tmp_path / "killed", tmp_path / "calm")


def survive(
    start: Start, run_dir: Path, deaths: list[tuple[str, str]], *more: str, num_steps: int = 10
) -> None:
    """Each launch resumes what the one before it left; the last one is left alone."""
    settings = (f"run.steps={num_steps}", *SETTINGS, *more)
    for victim, phase in deaths:
        kill_in_phase(start("train", *settings, run_dir=run_dir), VICTIMS[victim], phase)
    last = start("train", *settings, run_dir=run_dir)
    assert last.finish() == 0, last.tail()
    assert_complete(last, num_steps)
