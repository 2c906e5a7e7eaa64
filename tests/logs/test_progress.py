"""The console tells what a run waits for, at least as often as it is asked to."""

import io
import re
import time
from collections.abc import Callable
from contextlib import redirect_stdout

import pytest
from rich.console import Console as RichConsole

from mcore_rl.logs import progress
from mcore_rl.logs.console import LiveConsole
from mcore_rl.logs.logger import PhaseTimer
from mcore_rl.logs.progress import count_in_stage, look, say, say_once, tell_progress, tell_stage

CLOCK = r"\d\d:\d\d:\d\d "
SOON_S = 0.01
NEVER_S = 3600.0
PATIENCE_S = 20.0


@pytest.fixture
def pass_seconds(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return what moves a clock that stands still, and then does what the console's thread does."""
    now_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])

    def move(seconds: float) -> None:
        now_s[0] += seconds
        progress._told[-1]._tell_stage()

    return move


def wait_for_text(stream: io.StringIO, pattern: str) -> None:
    """Wait until a thread has printed what matches."""
    until_s = time.monotonic() + PATIENCE_S
    while not re.search(pattern, stream.getvalue()):
        assert time.monotonic() < until_s, stream.getvalue()
        time.sleep(SOON_S)


def strip_clock(text: str) -> list[str]:
    """Return lines without the time of day, which each of them begins with."""
    lines = text.splitlines()
    assert all(re.match(CLOCK, line) for line in lines), lines
    return [re.sub(CLOCK, "", line) for line in lines]


def read_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return strip_clock(capsys.readouterr().out)


def test_a_run_that_waits_prints_lines_with_the_time_of_day_and_what_it_counts(
    capsys: pytest.CaptureFixture[str], pass_seconds: Callable[[float], None]
) -> None:
    done = [0]
    with (
        tell_progress(poll_s=NEVER_S),
        PhaseTimer(3)("rollout"),
        count_in_stage(lambda: f"{done[0]} of 8 samples"),
    ):
        for done[0] in range(8):
            pass_seconds(25.0)
    assert read_lines(capsys) == [
        "step 3: rollout for 1:15 | 2 of 8 samples",
        "step 3: rollout for 2:30 | 5 of 8 samples",
    ]


def test_a_run_that_prints_lines_is_not_told_of(
    capsys: pytest.CaptureFixture[str], pass_seconds: Callable[[float], None]
) -> None:
    with tell_progress(poll_s=NEVER_S), tell_stage("step 1: train"):
        for _ in range(6):
            say("a line")
            pass_seconds(59.0)
    assert read_lines(capsys) == ["a line"] * 6


def test_stages_of_the_start_up_are_told_with_their_seconds(
    capsys: pytest.CaptureFixture[str], pass_seconds: Callable[[float], None]
) -> None:
    with tell_progress(poll_s=NEVER_S):
        with tell_stage("start-up: trainer", is_told=True):
            pass_seconds(0.11)
        with pytest.raises(ValueError), tell_stage("start-up: engines", is_told=True):
            raise ValueError("no engine")
    assert read_lines(capsys) == ["start-up: trainer 0.1s"]


def test_what_becomes_true_is_told_once() -> None:
    saved = [2]
    stream = io.StringIO()  # capsys may lose what a thread prints while it is read
    with redirect_stdout(stream), tell_progress(poll_s=SOON_S):
        for step in (2, 4, 6):
            say_once(lambda step=step: step in saved, f"saved step {step}")
        look()
        assert strip_clock(stream.getvalue()) == ["saved step 2"]
        saved.append(4)
        wait_for_text(stream, "saved step 4\n")
        saved.append(6)
    assert strip_clock(stream.getvalue()) == [f"saved step {step}" for step in (2, 4, 6)]


def test_a_waiting_run_is_told_of_by_a_thread() -> None:
    stream = io.StringIO()
    with (
        redirect_stdout(stream),
        tell_progress(quiet_s=SOON_S, poll_s=SOON_S),
        tell_stage("step 1: train"),
    ):
        wait_for_text(stream, r"step 1: train for 0:\d\d\n")


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
            wait_for_text(stream, r"step 2: rollout for 0:\d\d \| 3 of 8 samples")
        console.close()
    assert capsys.readouterr().out == ""
