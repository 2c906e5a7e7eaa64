"""The tolerance of the parity check: learned from syncs that were read back, bounded, kept for a
resume.
"""

import logging
import math
from pathlib import Path

import pytest
import torch

from mcore_rl.config import ParityCheckConfig
from mcore_rl.run.roles.parity_tolerance import (
    LEAST,
    MIN_TOKENS,
    MOST,
    NUM_TO_JUDGE,
    EngineDifference,
    ParityTolerance,
)

BF16 = "bfloat16"


def difference(rounding: float, *, mean: float = 0.01, num_tokens: int = 2000) -> EngineDifference:
    return EngineDifference(mean, rounding, 1.5 * rounding, num_tokens)


def learned(*roundings: float, config: ParityCheckConfig | None = None) -> ParityTolerance:
    tolerance = ParityTolerance(config or ParityCheckConfig(), BF16)
    for rounding in roundings:
        tolerance.learn([difference(rounding)])
    return tolerance


def test_a_difference_is_measured_per_doubt() -> None:
    """Tokens of p = 0.5, 0.75 and 0.999999, which differ by 0.02, 0.03 and 0.004 nats."""
    expected = torch.tensor([math.log(0.5), math.log(0.75), math.log(0.999999), -9.0])
    answer = (expected + torch.tensor([0.02, -0.03, 0.004, 50.0])).tolist()
    compared = torch.tensor([True, True, True, False])
    found = EngineDifference.measure(
        [expected[:2], expected[2:]], [answer[:2], answer[2:]], [compared[:2], compared[2:]]
    )
    assert found.num_tokens == 3
    assert found.mean == pytest.approx(0.054 / 3, rel=1e-4)
    assert found.typical == pytest.approx(0.12, rel=1e-4)  # the others: 0.04 and 0.4
    assert found.overall == pytest.approx(0.004 / 0.01, rel=1e-4), "the first differs most"


@pytest.mark.parametrize(("num_flips", "is_fault"), [(1, False), (2, True)])
def test_one_sequence_may_differ_by_another_choice_of_experts(
    num_flips: int, is_fault: bool
) -> None:
    """Rounding decides between experts that are almost equally good: by 1 nat at one token."""
    expected = [torch.full((28,), -1.0) for _ in range(37)]
    answers = [(each + 1e-6).tolist() for each in expected]
    for sequence in range(num_flips):
        answers[sequence][5] -= 1.0
    found = EngineDifference.measure(expected, answers, [each < 0 for each in expected])
    assert found.mean > MOST["float32"] / 2
    fault = ParityTolerance(ParityCheckConfig(), "float32").find_fault(found)
    assert (fault is not None) == is_fault


def test_a_sequence_that_alone_has_tokens_to_compare_counts() -> None:
    expected = [torch.full((4,), -1.0), torch.full((4,), -1.0)]
    answers = [[-2.0] * 4, [-1.0] * 4]
    compared = [torch.ones(4).bool(), torch.zeros(4).bool()]
    found = EngineDifference.measure(expected, answers, compared)
    assert found.overall == pytest.approx(1 / (1 - math.exp(-1)), rel=1e-4)


def test_nan_in_one_of_several_sequences_is_a_fault() -> None:
    expected = [torch.full((4,), -1.0), torch.full((4,), -2.0)]
    answers = [expected[0].tolist(), [-2.0, math.nan, -2.0, -2.0]]
    found = EngineDifference.measure(expected, answers, [each < 0 for each in expected])
    assert math.isnan(found.overall) and math.isnan(found.typical)
    assert ParityTolerance(ParityCheckConfig(), "float32").find_fault(found) is not None


def test_nothing_to_compare_is_no_difference() -> None:
    found = EngineDifference.measure([torch.zeros(2)], [[1.0, 1.0]], [torch.zeros(2).bool()])
    assert found == EngineDifference(0.0, 0.0, 0.0, 0)
    assert ParityTolerance(ParityCheckConfig(), BF16).find_fault(found) is None


def test_roundings_of_prompts_and_of_sharp_samples_are_of_one_size() -> None:
    """The same noise in the logits moves likely tokens much less than unlikely ones."""
    generator = torch.Generator().manual_seed(0)
    measured = []
    for sharpness in (0.1, 8.0):
        logits_TV = sharpness * torch.randn(4000, 50, generator=generator)
        noise_TV = 0.01 * torch.randn(4000, 50, generator=generator)
        tokens_T1 = torch.multinomial(logits_TV.softmax(-1), 1, generator=generator)
        one, other = (
            x.log_softmax(-1).gather(-1, tokens_T1)[:, 0] for x in (logits_TV, logits_TV + noise_TV)
        )
        measured.append(
            EngineDifference.measure([one], [other.tolist()], [torch.ones(4000).bool()])
        )
    flat, sharp = measured
    assert flat.mean > 2.5 * sharp.mean
    assert 0.9 < flat.typical / sharp.typical < 1.1
    assert 0.7 < flat.overall / sharp.overall < 1.4


@pytest.mark.parametrize("num_learned", range(NUM_TO_JUDGE))
def test_until_four_syncs_were_read_back_only_the_most_is_a_fault(
    num_learned: int, caplog: pytest.LogCaptureFixture
) -> None:
    tolerance = learned(*[0.01] * num_learned)
    assert tolerance.limits == {}
    assert tolerance.find_fault(difference(0.33)) is None
    assert ("3.30e-01 nats of rounding per logit (typical); 1.00e-02" in caplog.text) == (
        num_learned >= 2
    )
    fault = tolerance.find_fault(difference(0.34))
    assert fault is not None and "5.10e-01 nats of rounding per logit (overall), more than" in fault
    assert "0.5 (the most for engines in bfloat16 unless parity_check.tolerance is set)" in fault


def test_then_a_multiple_of_the_median_is_a_fault_and_three_quarters_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tolerance = learned(0.010, *[0.012] * 2, 0.013)
    assert tolerance.limits["typical"] == (0.012, 0.024)
    assert tolerance.limits["overall"] == pytest.approx((0.018, 0.036))
    with caplog.at_level(logging.WARNING):
        assert tolerance.find_fault(difference(0.017)) is None
        assert not caplog.records
        assert tolerance.find_fault(difference(0.019)) is None
        assert "1.90e-02 nats of rounding per logit (typical)" in caplog.text
    fault = tolerance.find_fault(difference(0.025))
    assert (
        fault is not None and "(typical), more than 0.024 (parity_check.factor=2.0 times" in fault
    )
    few_tokens_of_large_difference = EngineDifference(0.03, 0.012, 0.04, 2000)
    fault = tolerance.find_fault(few_tokens_of_large_difference)
    assert fault is not None and "(overall), more than 0.036" in fault


def test_what_was_right_before_is_no_fault_however_far_from_the_median(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rounding was 0.05 in one sync: 0.07 is a warning, and above 1.5 times 0.05 a fault."""
    tolerance = learned(*[0.01] * 3, 0.05)
    assert tolerance.limits["typical"] == pytest.approx((0.01, 0.075))
    assert tolerance.find_fault(difference(0.07)) is None
    assert "7.00e-02 nats of rounding per logit (typical); 1.00e-02 is usual" in caplog.text
    fault = tolerance.find_fault(difference(0.08))
    assert fault is not None and "more than 0.075" in fault


def test_a_run_learns_from_what_it_only_warns_of() -> None:
    """Prompts round by 0.01, samples by 0.04 from the third sync on: no sync of these fails."""
    tolerance = learned(0.01, 0.01)
    for _ in range(20):
        found = difference(0.04)
        assert tolerance.find_fault(found) is None
        tolerance.learn([found])
    assert tolerance.limits["typical"] == (0.04, 0.08)


def test_the_factor_is_an_option() -> None:
    tolerance = learned(*[0.01] * 4, config=ParityCheckConfig(factor=3.0))
    assert tolerance.find_fault(difference(0.029)) is None
    assert tolerance.find_fault(difference(0.031)) is not None


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "fp8"])
def test_the_tolerance_has_a_lower_and_an_upper_bound(precision: str) -> None:
    tolerance = ParityTolerance(ParityCheckConfig(), precision)
    for _ in range(NUM_TO_JUDGE):
        tolerance.learn([EngineDifference(0.0, 0.0, 0.0, 2000)])
    least = LEAST[precision]
    assert tolerance.find_fault(EngineDifference(1e-9, 0.9 * least, 0.9 * least, 2000)) is None
    assert tolerance.find_fault(EngineDifference(1e-9, 1.1 * least, 1.1 * least, 2000)) is not None
    generous = ParityTolerance(ParityCheckConfig(factor=1e6), precision)
    for _ in range(NUM_TO_JUDGE):
        generous.learn([EngineDifference(0.0, 1.0, 1.0, 2000)])
    most = MOST[precision]
    assert generous.find_fault(EngineDifference(0.1, 1.0, 0.99 * most, 2000)) is None
    assert generous.find_fault(EngineDifference(0.1, 1.0, 1.01 * most, 2000)) is not None


@pytest.mark.parametrize(("precision", "mean"), [("bfloat16", 0.148), ("fp8", 5 * 0.148)])
def test_what_right_weights_showed_on_a_gpu_passes_at_the_first_sync(
    precision: str, mean: float
) -> None:
    """0.148 nats in the mean from the warm start, in tokens that the policy doubts: docs/status.md.

    Log-probs of samples differed in the mean by 0.0151 with engines in bfloat16, by 0.072 in fp8.
    """
    expected = torch.full((200,), math.log(0.25))
    measured = EngineDifference.measure([expected], [(expected + mean).tolist()], [expected < 0])
    assert measured.mean == pytest.approx(mean) and measured.overall < MOST[precision]
    assert ParityTolerance(ParityCheckConfig(), precision).find_fault(measured) is None


@pytest.mark.parametrize("name", ["typical", "overall"])
def test_a_nan_is_a_fault(name: str) -> None:
    numbers = {"mean": 0.01, "typical": 0.01, "overall": 0.01, name: math.nan}
    nan = EngineDifference(**numbers, num_tokens=2000)
    for tolerance in (learned(), learned(*[0.01] * NUM_TO_JUDGE)):
        fault = tolerance.find_fault(nan)
        assert fault is not None and fault.startswith("nan nats")


def test_a_nan_of_an_engine_is_a_fault_by_hand_too() -> None:
    expected = torch.full((3,), -1.0)
    nan = EngineDifference.measure([expected], [[-1.0, math.nan, -1.0]], [expected < 0])
    for config in (ParityCheckConfig(), ParityCheckConfig(tolerance=0.5)):
        fault = ParityTolerance(config, BF16).find_fault(nan)
        assert fault is not None and fault.startswith("nan nats")


def test_by_hand_the_mean_alone_counts_and_nothing_is_learned() -> None:
    tolerance = learned(*[0.01] * NUM_TO_JUDGE, config=ParityCheckConfig(tolerance=0.2))
    assert tolerance.limits == {}
    assert tolerance.find_fault(difference(9.0, mean=0.19)) is None
    fault = tolerance.find_fault(difference(0.01, mean=0.21))
    assert fault == "2.10e-01 nats on average, more than 0.2 (parity_check.tolerance)"


def test_few_tokens_neither_teach_nor_judge() -> None:
    few = difference(0.3, num_tokens=MIN_TOKENS - 1)
    tolerance = learned(*[0.01] * NUM_TO_JUDGE)
    tolerance.learn([few])
    assert tolerance.limits["typical"] == (0.01, 0.02)
    assert tolerance.find_fault(few) is None


def test_a_run_that_continues_goes_on_with_what_it_learned(tmp_path: Path) -> None:
    file = tmp_path / "parity_check.json"
    made_by = {"model": "m", "engine_ranks": 2}
    first = ParityTolerance(ParityCheckConfig(), BF16, file, made_by)
    first.learn([difference(0.01), difference(0.03), difference(0.02)])
    for _ in range(2):
        first.learn([difference(0.02)])
    assert ParityTolerance(ParityCheckConfig(), BF16, file, made_by).limits == {}
    first.learn([difference(0.02)])
    again = ParityTolerance(ParityCheckConfig(), BF16, file, made_by)
    assert again.limits == first.limits == {"typical": (0.02, 0.04), "overall": (0.03, 0.06)}
    other = ParityTolerance(ParityCheckConfig(), BF16, file, {**made_by, "engine_ranks": 4})
    assert other.limits == {}


def test_the_newest_measurements_count() -> None:
    tolerance = learned(*[0.01] * 30, *[0.02] * 16)
    assert tolerance.limits["typical"] == (0.02, 0.04)
