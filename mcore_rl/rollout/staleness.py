"""How old samples are against the weights that train on them, in weight versions."""

from collections.abc import Sequence
from statistics import fmean

from mcore_rl.types import Sample, WeightVersion


def staleness_metrics(
    samples: Sequence[Sample], version: WeightVersion, bound: int | None
) -> dict[str, float]:
    """Of samples that weights `version` train on; fails if one is older than `bound` allows (None: any)."""
    ages = [
        version - min(span.version for span in sample.versions)
        for sample in samples
        if sample.response_ids
    ]
    if bound is not None:
        assert max(ages, default=0) <= bound, (
            f"samples of age {ages} for version {version}, bound {bound}"
        )
    partial = sum(len({span.version for span in sample.versions}) > 1 for sample in samples)
    return {
        "staleness/mean": fmean(ages) if ages else 0.0,
        "staleness/max": float(max(ages, default=0)),
        "staleness/partial": float(partial),
    }
