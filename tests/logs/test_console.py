"""The console: plain lines in a pipe, one panel on a terminal."""

import io
import math
import re
import time

import pytest
from rich.console import Console as RichConsole

from mcore_rl.logs.console import (
    LineConsole,
    LiveConsole,
    draw_sparkline,
    make_console,
    select_telling,
)

STEP = {
    "reward/mean": 0.5125,
    "reward/groups_without_signal": 0.25,
    "loss/total": -0.00312,
    "kl/old_new": 1.2e-4,
    "loss/entropy": 1.25,
    "loss/grad_norm": 0.31,
    "train/optimizer_steps": 2.0,
    "rollout/response_len": 20.4,
    "rollout/truncated_share": 0.125,
    "staleness/max": 2.0,
    "staleness/mean": 0.75,
    "rollout/tokens_per_second": 1432.7,
    "time/rollout": 2.12,
    "time/train": 1.5,
    "time/reward": 0.001,
    "time/step": 3.7,
}


def test_a_pipe_gets_one_plain_line_per_step() -> None:
    stream = io.StringIO()
    console = make_console(stream, "run", total_steps=60)
    assert isinstance(console, LineConsole)
    console.show(3, STEP)
    console.show(3, {"eval/greedy_accuracy": 0.3125, "eval/prompts": 128.0})
    console.close()
    lines = stream.getvalue().splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines), "the time of day"
    assert [line[9:] for line in lines] == [
        "step 3/60 | reward 0.512 | signal 75% | KL 1.2e-04 | entropy 1.250 | grad 0.310"
        " | length 20.4 | truncated 12% | stale 0.8 | tok/s 1,433 | rollout 2.1s train 1.5s",
        "step 3/60 | held-out 31.2%",
    ]


def test_a_line_tells_how_long_the_rest_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    console = make_console(stream, "run", total_steps=60)
    for step, now_s in ((3, 1000.0), (4, 1010.0), (6, 1050.0)):
        monkeypatch.setattr(time, "monotonic", lambda now_s=now_s: now_s)
        console.show(step, {"reward/mean": 0.5})
    rests = [line.split(" | ")[2:] for line in stream.getvalue().splitlines()]
    assert rests == [[], ["9:20 left"], ["15:00 left"]]


def test_what_is_0_by_construction_is_not_shown() -> None:
    """With one optimizer step the policy is the old one; without a reward the loss is shown."""
    once = {**STEP, "train/optimizer_steps": 1.0, "staleness/max": 0.0, "staleness/mean": 0.0}
    shown = select_telling(once)
    assert not {"loss/total", "kl/old_new", "staleness/mean"} & shown.keys()
    assert shown["signal"] == 0.75
    tuned = {"loss/total": 1.5, "train/optimizer_steps": 1.0}
    assert select_telling(tuned) == tuned
    assert "kl/ref" in select_telling({**once, "kl/ref": 0.1})


def test_a_terminal_gets_a_panel_of_the_last_steps() -> None:
    stream = io.StringIO()
    console = LiveConsole(
        RichConsole(file=stream, force_terminal=True, width=80), "tiny", total_steps=20
    )
    for step in range(1, 16):
        console.show(step, {**STEP, "reward/mean": step / 20})
    console.show(15, {"eval/greedy_accuracy": 0.75})
    console.show(16, {**STEP, "reward/mean": math.nan})
    console.close()
    panel = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).rpartition("tiny")[2]
    rows = [line.split()[1] for line in panel.splitlines() if re.match(r"│ +\d+ ", line)]
    assert rows == [str(step) for step in range(5, 17)]
    for text in ("step 16/20", "left", "75.0%", "rollout 2.1s", "train 1.5s", "▁", "█", "nan"):
        assert text in panel, text
    assert "…" not in panel, "a number that does not fit"


def test_sparkline_spans_lowest_to_highest() -> None:
    assert draw_sparkline([0.0, 1.0, 0.5]) == "▁█▅"
    assert draw_sparkline([2.0, 2.0]) == "▁▁"
