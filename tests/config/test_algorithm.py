"""Options of the algorithm that contradict one another are refused."""

from collections.abc import Callable
from typing import Any

import pytest

from mcore_rl.config.algorithm import (
    CorrectionConfig,
    CovarianceConfig,
    KLConfig,
)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (KLConfig, {"target": 0.1, "coef": 0.1}, "algorithm.kl.target=0.1 with in_reward=False"),
        (KLConfig, {"target": 0.1, "in_reward": True}, "in_reward=True and coef=0.0: only"),
        (CorrectionConfig, {"low": 1.5}, "correction.low=1.5 and high=2.0: a weight of 1 must lie"),
        (CorrectionConfig, {"high": 0.5}, "correction.low=0.0 and high=0.5: a weight of 1 must"),
        (CorrectionConfig, {"reject": "token"}, "algorithm.correction.reject=token: everything"),
        (CorrectionConfig, {"bypass": True, "weight": "token"}, "bypass=true with weight=token"),
        (
            CorrectionConfig,
            {"bypass": True, "reject": "sequence", "reject_above": 0.1},
            "bypass=true with weight=none and reject=sequence: .* set both to none",
        ),
        (CovarianceConfig, {"low": 5.0}, "covariance.low=5.0 is not below .*covariance.high=5.0"),
    ],
)
def test_options_that_contradict_one_another_are_refused(
    make: Callable[..., object], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (KLConfig, {"target": 0.1, "coef": 0.1, "in_reward": True}),
        (CorrectionConfig, {"low": 1.0, "high": 1.0}),
        (CorrectionConfig, {"reject": "token", "reject_above": 0.1}),
    ],
)
def test_what_the_messages_ask_for_is_allowed(
    make: Callable[..., object], options: dict[str, Any]
) -> None:
    made = make(**options)
    assert {name: getattr(made, name) for name in options} == options


@pytest.mark.parametrize(
    ("options", "is_on"),
    [
        ({}, False),
        ({"reject": "token", "reject_above": 0.1}, False),
        ({"weight": "sequence"}, True),
        ({"bypass": True}, True),
    ],
)
def test_a_correction_is_on_if_the_loss_uses_the_engines_probabilities(
    options: dict[str, Any], is_on: bool
) -> None:
    assert CorrectionConfig(**options).is_on == is_on
