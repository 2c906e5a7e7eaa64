"""Measures how far another machine's clock is from this one, by an exchange of times.

    here     sent_s                            received_s
                 \\                            /
    there          ---------> theirs_s ------

Nobody knows where in the round trip the other looked at its clock, so the offset is that of the
middle, give or take half a round trip.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rl.tools.doctor.machine.finding import Finding, fail, ok, warn

SMALL_SKEW_S = 1.0
LARGE_SKEW_S = 30.0
"""More than this breaks leases, tokens and the age of files."""


@dataclass(frozen=True)
class TimeSample:
    """Times of a round trip, in seconds since the epoch: two by this clock, one by the other's."""

    sent_s: float
    theirs_s: float
    received_s: float


@dataclass(frozen=True)
class ClockOffset:
    """Seconds by which the other clock is ahead; the truth is within `uncertainty_s` of it."""

    seconds: float
    uncertainty_s: float


def measure_offset(samples: Sequence[TimeSample]) -> ClockOffset:
    """Return the offset of the quickest round trip, which is the most certain one."""
    best = min(samples, key=lambda sample: sample.received_s - sample.sent_s)
    middle_s = (best.sent_s + best.received_s) / 2
    return ClockOffset(best.theirs_s - middle_s, (best.received_s - best.sent_s) / 2)


def judge_offset(offset: ClockOffset, other: str, own: str) -> Finding:
    """Return the finding about the clock of node `other` beside that of node `own`.

    It is judged by the least that the skew can be.
    """
    least_s = max(0.0, abs(offset.seconds) - offset.uncertainty_s)
    text = f"{offset.seconds:+.3f} s beside {own}, give or take {offset.uncertainty_s:.3f} s"
    figures = {
        "offset_s": round(offset.seconds, 6),
        "uncertainty_s": round(offset.uncertainty_s, 6),
    }
    remedy = f"let an NTP client (chrony) set the clock of {other} and {own}: chronyc tracking"
    if least_s > LARGE_SKEW_S:
        return fail("clock", text, remedy, **figures)
    if least_s > SMALL_SKEW_S:
        return warn("clock", text, remedy, **figures)
    return ok("clock", text, **figures)
