"""Importance weights between engine and trainer, written out sequence by sequence in float64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mcore_rl.algo.correction import correction_weights
from mcore_rl.algo.sequences import Sequences, sequence_sum
from mcore_rl.config import CorrectionConfig

LENS = (2, 3, 1)
LOG_RATIOS = [0.1, -0.3, 0.9, 0.4, -0.2, -1.5]


def weights(config: CorrectionConfig) -> tuple[list[float], dict[str, list[float]]]:
    sums = sequence_sum(LENS, torch.device("cpu"))
    sequences = Sequences(sums, torch.ones(sum(LENS), dtype=torch.bool))
    log_ratio_T = torch.tensor(LOG_RATIOS, dtype=torch.float64, requires_grad=True)
    weights_T, metrics = correction_weights(log_ratio_T, sequences, config)
    assert not weights_T.requires_grad
    return weights_T.tolist(), {name: value.tolist() for name, value in metrics.items()}


def per_sequence(function: Callable) -> list:
    out, first = [], 0
    for n in LENS:
        out += [function(LOG_RATIOS[first : first + n])] * n
        first += n
    return out


TOKEN = [math.exp(x) for x in LOG_RATIOS]
SEQUENCE = per_sequence(lambda xs: math.exp(sum(xs)))
GEOMETRIC = per_sequence(lambda xs: math.exp(sum(xs) / len(xs)))


@pytest.mark.parametrize(
    ("level", "raw"), [("token", TOKEN), ("sequence", SEQUENCE), ("geometric", GEOMETRIC)]
)
def test_levels_and_bounds(level: Any, raw: list[float]) -> None:
    truncated, metrics = weights(CorrectionConfig(weight=level, high=1.2))
    assert truncated == pytest.approx([min(w, 1.2) for w in raw])
    assert metrics["correction/bounded_share"] == [float(w > 1.2) for w in raw]
    masked, metrics = weights(CorrectionConfig(weight=level, bound="mask", low=0.75, high=1.2))
    assert masked == pytest.approx([w if 0.75 <= w <= 1.2 else 0.0 for w in raw])
    assert 0 < sum(metrics["correction/bounded_share"]) < len(raw)


def kl(x: float) -> float:
    """k3 of KL(engine || trainer), x = log trainer - log engine."""
    return math.exp(x) - 1 - x


def test_tokens_and_sequences_too_far_away_are_rejected() -> None:
    by_token, metrics = weights(CorrectionConfig(reject="token", reject_above=0.1))
    assert by_token == [float(kl(x) <= 0.1) for x in LOG_RATIOS]
    assert metrics["correction/rejected_share"] == [1 - w for w in by_token]
    by_sequence, _ = weights(
        CorrectionConfig(weight="token", high=9.0, reject="sequence", reject_above=0.3)
    )
    means = per_sequence(lambda xs: sum(map(kl, xs)) / len(xs))
    assert by_sequence == pytest.approx(
        [w if m <= 0.3 else 0.0 for w, m in zip(TOKEN, means, strict=True)]
    )
    assert 0 < sum(w == 0 for w in by_sequence) < len(by_sequence)


ESTIMATES = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": kl}
"""KL(engine || trainer) of a token, x = log trainer - log engine."""
STATISTICS = {"sequence": lambda xs: sum(xs) / len(xs), "sequence_sum": sum}


@pytest.mark.parametrize("estimator", ESTIMATES)
@pytest.mark.parametrize("reject", ["token", "sequence_max", *STATISTICS])
def test_any_estimate_rejects_by_any_statistic(reject: str, estimator: str) -> None:
    """By k1, a sample is too far below as well as above; its worst token is then on either side."""
    options: dict[str, Any] = {
        "reject": reject,
        "reject_estimator": estimator,
        "reject_above": 0.15,
    }
    kept, metrics = weights(CorrectionConfig(**options))
    if reject == "token":
        wanted = [abs(ESTIMATES[estimator](x)) <= 0.15 for x in LOG_RATIOS]
    elif reject == "sequence_max":
        wanted = per_sequence(lambda xs: max(abs(ESTIMATES[estimator](x)) for x in xs) <= 0.15)
    else:
        of = STATISTICS[reject]
        wanted = per_sequence(lambda xs: abs(of([ESTIMATES[estimator](x) for x in xs])) <= 0.15)
    assert kept == [float(is_kept) for is_kept in wanted]
    assert metrics["correction/rejected_share"] == [1.0 - is_kept for is_kept in wanted]
    if estimator != "k1":
        assert 0 < sum(kept) < len(kept)


def test_the_sides_of_k1_have_bounds_of_their_own() -> None:
    options: dict[str, Any] = {"reject": "token", "reject_estimator": "k1", "reject_above": 0.25}
    kept, _ = weights(CorrectionConfig(**options, reject_below=-0.5))
    assert kept == [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]  # -0.1, 0.3, -0.9, -0.4, 0.2, 1.5
    kept, _ = weights(CorrectionConfig(**options, reject_below=0.0))
    assert kept == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("level", "raw", "of_samples"),
    [("token", TOKEN, False), ("sequence", SEQUENCE, True), ("geometric", GEOMETRIC, True)],
)
def test_weights_are_divided_by_their_mean_over_tokens_or_samples(
    level: str, raw: list[float], of_samples: bool
) -> None:
    """Before tokens are rejected: these stay in the mean."""
    bounded = [min(w, 1.2) for w in raw]
    firsts = [bounded[0], bounded[2], bounded[5]]
    mean = sum(firsts) / 3 if of_samples else sum(bounded) / 6
    options: dict[str, Any] = {"weight": level, "high": 1.2, "normalize": True}
    found, metrics = weights(CorrectionConfig(**options))
    assert found == pytest.approx([w / mean for w in bounded])
    assert metrics["correction/normalizer"] == pytest.approx([mean] * 6)
    assert metrics["correction/weight"] == pytest.approx(bounded)
    rejected, _ = weights(CorrectionConfig(**options, reject="token", reject_above=0.1))
    kept = [kl(x) <= 0.1 for x in LOG_RATIOS]
    assert rejected == pytest.approx(
        [w / mean if is_kept else 0.0 for w, is_kept in zip(bounded, kept, strict=True)]
    )


def test_weights_that_are_all_zero_are_not_divided() -> None:
    found, _ = weights(
        CorrectionConfig(weight="token", bound="mask", low=1, high=1, normalize=True)
    )
    assert found == [0.0] * 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": "tokens"}, r"algorithm.correction.weight='tokens'"),
        (
            {"low": 1.5},
            r"algorithm.correction.low=1.5 and high=2.0: a weight of 1 must lie between",
        ),
        ({"reject": "token"}, r"algorithm.correction.reject_above"),
        ({"reject_estimator": "abs"}, r"algorithm.correction.reject_estimator='abs'"),
        ({"reject_below": 0.1}, r"algorithm.correction.reject_below=0.1: must be at most 0"),
        ({"bypass": True, "weight": "token"}, r"bypass=true with weight=token and reject=none"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CorrectionConfig(**options)  # type: ignore[arg-type]
