"""Steps that teach nothing are told in one line, once, and again only after a change."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from mcore_rl.batches.summary import summarize_samples
from mcore_rl.logs.learning import LearningWatch
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


def list_warnings(
    folder: Path,
    steps: Sequence[Step],
    capsys: pytest.CaptureFixture[str],
    **options: bool,
) -> list[tuple[int, int, str]]:
    """Return (first step, last step, troubles) of each warning on the console."""
    watch = LearningWatch(max_response_len=512, **{"compares_groups": True, **options})
    with tell_progress(), MetricsLogger(folder, console=False, learning=watch) as log:
        for number, step in enumerate(steps, start=1):
            log.log(number, summarize(step))
            log.log(number, {"eval/greedy_accuracy": 0.5})
    found = re.findall(r"warning: steps (\d+) to (\d+): (.*)\n", capsys.readouterr().out)
    names = {"equal": "all rewards .* are equal", "cut off": "all responses are cut off at .*=512"}
    return [
        (int(first), int(last), " ".join(n for n, text in names.items() if re.search(text, told)))
        for first, last, told in found
    ]


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([EQUAL] * 4 + [GOOD] + [EQUAL] * 4, []),
        ([GOOD] * 3 + [EQUAL] * 20, [(4, 8, "equal")]),
        ([CUT_OFF] * 20, [(1, 5, "cut off")]),
        ([CUT_OFF_AND_ZERO] * 20, [(1, 5, "equal cut off")]),
        ([CUT_OFF_AND_ZERO] * 8 + [ZERO] * 20, [(1, 5, "equal cut off")]),
        ([CUT_OFF] * 6 + [CUT_OFF_AND_ZERO] * 6, [(1, 5, "cut off"), (7, 11, "equal")]),
        ([EQUAL] * 5 + ([GOOD] + [EQUAL] * 6) * 9, [(1, 5, "equal")]),
        ([EQUAL] * 5 + [GOOD] * 5 + [EQUAL] * 9, [(1, 5, "equal"), (11, 15, "equal")]),
    ],
)
def test_five_steps_in_a_row_are_told_once(
    tmp_path: Path,
    steps: Sequence[Step],
    told: list[tuple[int, int, str]],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert list_warnings(tmp_path, steps, capsys) == told
    assert len(caplog.records) == len(told), "the log of the controller has them, too"


def test_what_compares_no_groups_learns_from_groups_that_are_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list_warnings(tmp_path / "a", [EQUAL] * 9, capsys, compares_groups=False) == []
    zero = list_warnings(tmp_path / "b", [ZERO] * 9, capsys, compares_groups=False)
    assert zero == [(1, 5, "equal")]


def test_what_reads_no_rewards_is_told_of_truncated_responses_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = list_warnings(tmp_path, [CUT_OFF_AND_ZERO] * 9, capsys, reads_rewards=False)
    assert told == [(1, 5, "cut off")]
