"""Steps that teach nothing are told in one line, once, and again only after a change."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from mcore_rl.batches.summary import summarize_samples
from mcore_rl.config import AlarmsConfig
from mcore_rl.logs.alarms.conditions import list_alarms
from mcore_rl.logs.alarms.watch import AlarmWatch
from mcore_rl.logs.logger import MetricsLogger
from mcore_rl.logs.progress import tell_progress
from mcore_rl.types import GroupLease, Prompt, StoredSample, VersionSpan, WeightVersion
from mcore_rl.types.scores import Scores

Step = tuple[Sequence[float], str]
"""Rewards of two groups of two samples, and why the responses ended."""
GOOD: Step = ([1.0, 0.0, 0.0, 0.0], "stop")
EQUAL: Step = ([1.0, 1.0, 0.0, 0.0], "stop")
"""In each group, not in the step."""
ZERO: Step = ([0.0] * 4, "stop")
CUT_OFF: Step = ([1.0, 0.0, 0.0, 0.0], "length")
CUT_OFF_AND_ZERO: Step = ([0.0] * 4, "length")


def summarize(step: Step) -> dict[str, float]:
    """Return the row of a step, as the loop makes it."""
    rewards, finish_reason = step
    span = VersionSpan(0, 3, WeightVersion(0))
    samples = [
        StoredSample(
            Prompt(i // 2, (1,), (), "unit", "4"),
            0,
            3,
            finish_reason,
            (span,),
            False,
            GroupLease(0, 0),
        )
        for i in range(len(rewards))
    ]
    return summarize_samples(samples, Scores(list(rewards)), seconds=1.0)


def list_told(
    folder: Path,
    steps: Sequence[Step],
    capsys: pytest.CaptureFixture[str],
    *,
    compares_groups: bool = True,
    reads_rewards: bool = True,
) -> list[tuple[str, int, int]]:
    """Return (alarm, first step, last step) of each alarm on the console."""
    options = AlarmsConfig()
    alarms = list_alarms(
        options,
        max_response_len=512,
        compares_groups=compares_groups,
        reads_rewards=reads_rewards,
        drift_bound=0.0,
    )
    watch = AlarmWatch(folder, alarms, options)
    with tell_progress(), MetricsLogger(folder, console=False, alarms=watch) as log:
        for number, step in enumerate(steps, start=1):
            log.log(number, summarize(step))
            log.log(number, {"eval/greedy_accuracy": 0.5})
    found = re.findall(r"alarm: (\w+), steps (\d+) to (\d+): (.*)\n", capsys.readouterr().out)
    remedies = {"signal": "all rewards of .* are equal", "truncated": "cut off at .*=512"}
    assert all(re.search(remedies[name], told) for name, _, _, told in found)
    return [(name, int(first), int(last)) for name, first, last, _ in found]


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([EQUAL] * 4 + [GOOD] + [EQUAL] * 4, []),
        ([GOOD] * 3 + [EQUAL] * 20, [("signal", 4, 8)]),
        ([CUT_OFF] * 20, [("truncated", 1, 5)]),
        ([CUT_OFF_AND_ZERO] * 20, [("truncated", 1, 5), ("signal", 1, 5)]),
        ([CUT_OFF_AND_ZERO] * 8 + [ZERO] * 20, [("truncated", 1, 5), ("signal", 1, 5)]),
        ([CUT_OFF] * 6 + [CUT_OFF_AND_ZERO] * 6, [("truncated", 1, 5), ("signal", 7, 11)]),
        ([EQUAL] * 5 + ([GOOD] + [EQUAL] * 6) * 9, [("signal", 1, 5)]),
        ([EQUAL] * 5 + [GOOD] * 5 + [EQUAL] * 9, [("signal", 1, 5), ("signal", 11, 15)]),
    ],
)
def test_five_steps_in_a_row_are_told_once(
    tmp_path: Path,
    steps: Sequence[Step],
    told: list[tuple[str, int, int]],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert list_told(tmp_path, steps, capsys) == told
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == len(told), "the log of the controller has them, too"


def test_what_compares_no_groups_learns_from_groups_that_are_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list_told(tmp_path / "a", [EQUAL] * 9, capsys, compares_groups=False) == []
    zero = list_told(tmp_path / "b", [ZERO] * 9, capsys, compares_groups=False)
    assert zero == [("signal", 1, 5)]


def test_what_reads_no_rewards_is_told_of_truncated_responses_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = list_told(tmp_path, [CUT_OFF_AND_ZERO] * 9, capsys, reads_rewards=False)
    assert told == [("truncated", 1, 5)]
