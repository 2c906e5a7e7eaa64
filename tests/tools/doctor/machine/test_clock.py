"""The offset of a clock, from round trips of which the quickest is the most certain."""

import pytest

from mcore_rl.tools.doctor.machine.clock import (
    ClockOffset,
    TimeSample,
    judge_offset,
    measure_offset,
)


def test_the_quickest_round_trip_counts() -> None:
    slow, quick = TimeSample(0.0, 50.0, 8.0), TimeSample(10.0, 40.5, 10.2)
    offset = measure_offset([slow, quick])
    assert offset.seconds == pytest.approx(30.4)
    assert offset.uncertainty_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("seconds", "uncertainty_s", "outcome"),
    [
        (0.9, 0.0, "ok"),
        (-1.5, 0.0, "warning"),
        (1.5, 1.0, "ok"),
        (31.0, 0.1, "failed"),
        (-31.0, 2.0, "warning"),
        (-45.0, 2.0, "failed"),
    ],
)
def test_the_least_that_the_skew_can_be_decides(
    seconds: float, uncertainty_s: float, outcome: str
) -> None:
    finding = judge_offset(ClockOffset(seconds, uncertainty_s), "b", "a")
    assert finding.outcome == outcome
    assert f"{seconds:+.3f} s beside a" in finding.text
