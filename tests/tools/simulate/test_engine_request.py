"""Requests of a simulated engine, and the versions that sampled them."""

from typing import Any

import pytest

from mcore_rl.tools.simulate.kv_cache import EngineRequest, EngineSpeed
from mcore_rl.types import VersionSpan, WeightVersion

NOBODY: Any = None


def test_spans_cover_the_response_once_and_leave_out_versions_without_a_token() -> None:
    request = EngineRequest(1, 5, 10, 20, NOBODY)
    request.edges = [(start, WeightVersion(v)) for v, start in enumerate((0, 0, 4, 10))]
    spans = [(1, 0, 4), (2, 4, 10)]
    assert request.spans(10) == tuple(VersionSpan(a, b, WeightVersion(v)) for v, a, b in spans)


def test_spans_of_a_request_that_ends_early_stop_there() -> None:
    request = EngineRequest(1, 5, 10, 20, NOBODY)
    assert request.spans(0) == ()
    request.edges = [(0, WeightVersion(1)), (4, WeightVersion(2))]
    assert request.spans(6)[-1] == VersionSpan(4, 6, WeightVersion(2))


def test_tokens_are_counted_by_the_engines_steps() -> None:
    assert EngineRequest(1, 5, 10, 20, NOBODY, began_at=7.5).count_generated(10.0) == 2.5
    assert EngineSpeed([0.0, 0.1, 0.2], 0.0, float, 1).max_running == 2


def test_slow_engines_take_that_many_times_longer() -> None:
    speed = EngineSpeed([0.0, 0.1], 0.01, lambda num_tokens: num_tokens / 10, 100)
    slow = speed.slow_down(3)
    assert list(slow.fixed_s) == pytest.approx([0, 0.3])
    assert (slow.per_context_s, slow.prefill_s(20)) == pytest.approx((0.03, 6))
