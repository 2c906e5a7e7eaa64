"""The age of samples in weight versions."""

import pytest

from mcore_rl.loops.sampling import measure_staleness
from mcore_rl.types import GroupLease, Prompt, StoredSample, VersionSpan, WeightVersion


def sample(*versions: int) -> StoredSample:
    """One token of each of `versions`."""
    spans = tuple(VersionSpan(i, i + 1, WeightVersion(v)) for i, v in enumerate(versions))
    prompt = Prompt(0, (1,), (), "unit", "")
    return StoredSample(prompt, 0, len(spans), "stop", spans, False, GroupLease(0, 0))


SAMPLES = [sample(3, 4), sample(4), sample(2), sample()]


def test_age_is_counted_from_the_oldest_token() -> None:
    assert measure_staleness(SAMPLES, WeightVersion(4), bound=2) == {
        "staleness/mean": pytest.approx(1.0),
        "staleness/max": 2.0,
        "staleness/partial": 1.0,
    }


def test_the_bound_is_asserted_if_there_is_one() -> None:
    with pytest.raises(AssertionError, match="bound 1"):
        measure_staleness(SAMPLES, WeightVersion(4), bound=1)
    assert measure_staleness(SAMPLES, WeightVersion(4), bound=None)["staleness/max"] == 2.0


def test_empty_responses_have_no_age() -> None:
    metrics = measure_staleness([sample()], WeightVersion(9), bound=0)
    assert set(metrics.values()) == {0.0}
