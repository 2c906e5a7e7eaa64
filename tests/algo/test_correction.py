"""Importance weights between engine and trainer, written out sequence by sequence in float64."""

import math

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


def per_sequence(function) -> list[float]:
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
def test_levels_and_bounds(level: str, raw: list[float]) -> None:
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": "tokens"}, r"algorithm.correction.weight='tokens'"),
        (
            {"low": 1.5},
            r"algorithm.correction.low=1.5 and high=2.0: a weight of 1 must lie between",
        ),
        ({"reject": "token"}, r"algorithm.correction.reject_above"),
        ({"bypass": True, "weight": "token"}, r"bypass=true with weight=token and reject=none"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CorrectionConfig(**options)  # type: ignore[arg-type]
