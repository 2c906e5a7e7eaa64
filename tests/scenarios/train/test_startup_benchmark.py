"""The benchmark of a run's start runs in its smallest size."""

import pytest

from tests.support.benchmarks import figures_of


@pytest.mark.e2e
@pytest.mark.slow
def test_the_benchmark_of_starts_ends_in_its_figures() -> None:
    figures = figures_of("startup.py", "--repeats", "1", timeout_s=400)
    assert 0 < figures["imported_s"] <= figures["ray_s"] <= figures["linked_s"]
    assert figures["linked_s"] <= figures["first_token_s"] == figures["least_s"]
    assert figures["cpu_s"] >= sum(figures["processes"].values()) - 0.1 > 0
