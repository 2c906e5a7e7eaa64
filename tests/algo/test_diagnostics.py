"""Where the difference between trainer and engine comes from, and when it stops a run."""

import logging

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


def test_thresholds_warn_and_stop(caplog: pytest.LogCaptureFixture) -> None:
    metrics = {"logprob_diff/mean": 0.02, "logprob_diff/stale": 0.0, "logprob_diff/router": 0.015}
    with caplog.at_level(logging.WARNING):
        check_drift(DriftConfig(), 3, metrics)
        check_drift(DriftConfig(warn_above=0.03, stop_above=0.03), 3, metrics)
        assert not caplog.records
        check_drift(DriftConfig(warn_above=0.01), 3, metrics)
    assert "step 3" in caplog.text and "router 1.5e-02" in caplog.text
    with pytest.raises(DriftError, match=r"step 3: .* 2\.0e-02 .*drift\.stop_above=0\.01"):
        check_drift(DriftConfig(stop_above=0.01), 3, metrics)
