"""Computes metrics of how old samples are, in weight versions."""

from collections.abc import Sequence
from statistics import fmean

from mcore_rl.types import StoredSample, WeightVersion


def measure_staleness(
    samples: Sequence[StoredSample], version: WeightVersion, bound: int | None
) -> dict[str, float]:
    """Return the ages of non-empty `samples` when weights `version` train on them.

    A sample is as old as its oldest token. Fails an assertion if one is older than `bound` (None:
    no bound).
    """
    ages = []
    num_partial = 0
    for sample in samples:
        versions = {span.version for span in sample.versions}
        num_partial += len(versions) > 1
        if sample.response_len:
            ages.append(version - min(versions))
    oldest = max(ages, default=0)
    if bound is not None:
        assert oldest <= bound, f"samples of age {ages} for version {version}, bound {bound}"
    return {
        "staleness/mean": fmean(ages) if ages else 0.0,
        "staleness/max": float(oldest),
        "staleness/partial": float(num_partial),
    }
