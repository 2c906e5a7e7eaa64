"""Where the difference between trainer and engine comes from, and when it stops a run."""

import logging
import math

import pytest
import torch

from mcore_rl.algo.diagnostics import DriftError, attribute_diff, check_drift
from mcore_rl.config import DriftConfig


def test_every_token_has_one_cause() -> None:
    difference_T = torch.tensor([0.1, -0.2, 0.3, -0.4])
    stale_T = torch.tensor([True, True, False, False])
    flips_T = torch.tensor([0, 2, 1, 0])
    metrics = attribute_diff(difference_T, stale_T, flips_T)
    assert metrics["logprob_diff/stale"].tolist() == pytest.approx([0.1, 0.2, 0, 0])
    assert metrics["logprob_diff/router"].tolist() == pytest.approx([0, 0, 0.3, 0])
    assert metrics["logprob_diff/arithmetic"].tolist() == pytest.approx([0, 0, 0, 0.4])
    assert metrics["logprob_diff/stale_share"].tolist() == [1, 1, 0, 0]
    assert metrics["logprob_diff/router_flip_share"].tolist() == [0, 1, 1, 0]


def test_without_the_engines_experts_nothing_is_said_of_the_router() -> None:
    metrics = attribute_diff(torch.tensor([0.5]), torch.tensor([False]), None)
    assert not any("router" in name for name in metrics)
    assert metrics["logprob_diff/arithmetic"].tolist() == [0.5]


def make_metrics(mean: float, *, num_tokens: int = 1000, **parts: float) -> dict[str, float]:
    """Metrics of a step of 4 samples; `parts` are named without their logprob_diff/."""
    return {
        "rollout/samples": 4.0,
        "rollout/response_len": num_tokens / 4,
        "logprob_diff/mean": mean,
        **{f"logprob_diff/{name}": value for name, value in parts.items()},
    }


def test_thresholds_warn_and_stop(caplog: pytest.LogCaptureFixture) -> None:
    metrics = make_metrics(0.02, stale=0.0, router=0.015)
    with caplog.at_level(logging.WARNING):
        check_drift(DriftConfig(warn_above=0, stop_above=0), "float32", 3, metrics)
        check_drift(DriftConfig(warn_above=0.03, stop_above=0.03), "float32", 3, metrics)
        assert not caplog.records
        check_drift(DriftConfig(warn_above=0.01), "bfloat16", 3, metrics)
    assert "step 3" in caplog.text and "router 1.5e-02" in caplog.text
    with pytest.raises(DriftError, match=r"step 3: .* 2\.0e-02 .*drift\.stop_above=0\.01"):
        check_drift(DriftConfig(stop_above=0.01), "bfloat16", 3, metrics)


@pytest.mark.parametrize(
    ("dtype", "usual", "warned", "stopped"),
    [
        ("float32", 9e-4, 1.1e-3, 0.011),
        ("bfloat16", 0.0151, 0.039, 0.31),
        ("fp8", 0.072, 0.16, 0.51),
    ],
)
def test_without_a_choice_a_run_warns_and_stops_by_what_engines_compute_in(
    dtype: str, usual: float, warned: float, stopped: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Usual is what right weights showed on an H200; 0.039 is what old ones made of a model."""
    check_drift(DriftConfig(), dtype, 1, make_metrics(usual))
    assert not caplog.records
    check_drift(DriftConfig(), dtype, 2, make_metrics(warned))
    assert "drift.warn_above" in caplog.text
    with pytest.raises(DriftError, match=r"step 3: .*drift\.stop_above"):
        check_drift(DriftConfig(), dtype, 3, make_metrics(stopped))


def test_tokens_of_older_weights_do_not_count() -> None:
    """Half of the tokens are stale and differ by 0.8; the others differ by 0.02."""
    metrics = make_metrics(0.41, stale=0.4, arithmetic=0.01, stale_share=0.5)
    check_drift(DriftConfig(), "bfloat16", 4, metrics)
    with pytest.raises(DriftError, match=r"differ by 2\.0e-02 .*stale 4\.0e-01"):
        check_drift(DriftConfig(), "float32", 4, metrics)
    check_drift(DriftConfig(), "float32", 4, {})  # the critic warms up: the policy took no step


@pytest.mark.parametrize(("num_fresh", "stops"), [(4, False), (255, False), (256, True)])
def test_a_handful_of_fresh_tokens_ends_no_run(num_fresh: int, stops: bool) -> None:
    """Fresh tokens differ by 2 nats, as if a router sent them elsewhere; stale ones by 0.1."""
    fresh_share = num_fresh / 10_000
    stale = 0.1 * (1 - fresh_share)
    metrics = make_metrics(
        stale + 2 * fresh_share, num_tokens=10_000, stale=stale, stale_share=1 - fresh_share
    )
    if not stops:
        check_drift(DriftConfig(), "bfloat16", 5, metrics)
        return
    with pytest.raises(DriftError, match=r"differ by 2\.0e\+00 .*more than drift\.stop_above=0\.3"):
        check_drift(DriftConfig(), "bfloat16", 5, metrics)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_where_all_tokens_are_stale_wider_bounds_count(
    dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    """rollout.mode=one_step_off from step 2 on: tokens differ as far as a step moved the policy."""

    def check(mean: float, config: DriftConfig | None = None) -> None:
        metrics = make_metrics(mean, stale=mean, arithmetic=0.0, stale_share=1.0)
        check_drift(config or DriftConfig(), dtype, 6, metrics)

    check(0.49)
    assert not caplog.records
    check(0.51)
    assert "more than 0.5 (drift.warn_above, widened: docs/async.md#details)" in caplog.text
    with pytest.raises(DriftError, match=r"all tokens, .*1\.5 \(drift\.stop_above, widened"):
        check(1.51)
    check(1.51, DriftConfig(stop_above=0.4))
    with pytest.raises(DriftError, match=r"2 \(drift\.stop_above, widened"):
        check(2.01, DriftConfig(stop_above=0.4))
    check(9.0, DriftConfig(stop_above=0))


def test_few_tokens_in_all_are_held_to_the_wider_bounds_too() -> None:
    check_drift(DriftConfig(), "float32", 1, make_metrics(0.3, num_tokens=255))
    with pytest.raises(DriftError, match=r"fewer than 256 .*1\.5 \(drift\.stop_above, widened"):
        check_drift(DriftConfig(), "float32", 1, make_metrics(1.6, num_tokens=255))
    with pytest.raises(DriftError, match=r"drift\.stop_above=0\.01"):
        check_drift(DriftConfig(), "float32", 1, make_metrics(0.3, num_tokens=256))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("stale_share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("stop_above", [None, 0.0])
def test_a_nan_ends_a_run_in_every_mode(
    value: float, stale_share: float, stop_above: float | None
) -> None:
    stale = value if stale_share == 1 else 0.0
    metrics = make_metrics(value, stale=stale, stale_share=stale_share)
    with pytest.raises(DriftError, match=r"step 7: .*(nan|inf) nats .*whatever drift\.stop_above"):
        check_drift(DriftConfig(stop_above=stop_above), "float32", 7, metrics)
