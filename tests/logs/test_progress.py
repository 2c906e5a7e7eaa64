"""The console tells what a run waits for, at least as often as it is asked to."""

import io
import re
import time

import pytest
from rich.console import Console as RichConsole

from mcore_rl.logs.console import LiveConsole
from mcore_rl.logs.logger import PhaseTimer
from mcore_rl.logs.progress import count_in_stage, look, say, say_once, tell_progress, tell_stage

CLOCK = r"\d\d:\d\d:\d\d "
SOON_S = 0.01


def read_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what was printed without the time of day, which each line begins with."""
    lines = capsys.readouterr().out.splitlines()
    assert all(re.match(CLOCK, line) for line in lines), lines
    return [re.sub(CLOCK, "", line) for line in lines]


def test_a_run_that_waits_prints_lines_with_the_time_of_day_and_what_it_counts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    done = [0]
    with (
        tell_progress(quiet_s=0.1, poll_s=SOON_S),
        PhaseTimer(3)("rollout"),
        count_in_stage(lambda: f"{done[0]} of 8 samples"),
    ):
        for done[0] in range(8):
            time.sleep(0.06)
    lines = read_lines(capsys)
    assert 2 <= len(lines) <= 5, lines
    counts = [
        int(re.fullmatch(r"step 3: rollout for 0:0\d \| (\d) of 8 samples", line)[1])  # type: ignore[index]
        for line in lines
    ]
    assert counts == sorted(set(counts)), "each line tells of more samples"


def test_a_run_that_prints_lines_is_not_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    with tell_progress(quiet_s=0.2, poll_s=SOON_S), tell_stage("step 1: train"):
        for _ in range(6):
            say("a line")
            time.sleep(0.05)
    assert read_lines(capsys) == ["a line"] * 6


def test_stages_of_the_start_up_are_told_with_their_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with tell_progress():
        with tell_stage("start-up: trainer", is_told=True):
            time.sleep(0.11)
        with pytest.raises(ValueError), tell_stage("start-up: engines", is_told=True):
            raise ValueError("no engine")
    assert read_lines(capsys) == ["start-up: trainer 0.1s"]


def test_what_becomes_true_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    saved = [2]
    with tell_progress(poll_s=SOON_S):
        for step in (2, 4, 6):
            say_once(lambda step=step: step in saved, f"saved step {step}")
        look()
        assert read_lines(capsys) == ["saved step 2"]
        saved.append(4)
        time.sleep(0.2)
        assert read_lines(capsys) == ["saved step 4"]
        saved.append(6)
    assert read_lines(capsys) == ["saved step 6"]


def test_a_run_without_a_console_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with tell_progress(False, quiet_s=SOON_S, poll_s=SOON_S), tell_stage("a", is_told=True):
        say("b")
        time.sleep(0.1)
    say("nobody is told")
    assert capsys.readouterr().out == ""


def test_a_panel_shows_the_stage_in_place_of_lines(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    with tell_progress(quiet_s=SOON_S, poll_s=SOON_S):
        terminal = RichConsole(file=stream, force_terminal=True, width=80)
        console = LiveConsole(terminal, "tiny", total_steps=20)
        console.show(1, {"reward/mean": 0.5})
        with tell_stage("step 2: rollout"), count_in_stage(lambda: "3 of 8 samples"):
            time.sleep(0.2)
        console.close()
    assert "step 2: rollout for 0:00 | 3 of 8 samples" in stream.getvalue()
    assert capsys.readouterr().out == ""
