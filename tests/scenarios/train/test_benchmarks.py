"""The benchmarks of merges and of a run's start run in their smallest sizes."""

import pytest

from tests.support.benchmarks import figures_of


@pytest.mark.gloo
@pytest.mark.slow
def test_the_benchmark_of_merges_ends_in_its_figures() -> None:
    sizes = ["--layers", "2", "--experts", "4", "--vocab", "1024", "--repeats", "1"]
    figures = figures_of("merge.py", *sizes, timeout_s=280)
    assert figures["resumed_equal"]
    for way in ("page_cache", "fsync"):
        assert figures[way]["best_ratio"] > 0
        assert figures[way]["cp_s"] > 0


@pytest.mark.e2e
@pytest.mark.slow
def test_the_benchmark_of_starts_ends_in_its_figures() -> None:
    figures = figures_of("startup.py", "--repeats", "1", timeout_s=400)
    assert 0 < figures["imported_s"] <= figures["ray_s"] <= figures["linked_s"]
    assert figures["linked_s"] <= figures["first_token_s"] == figures["least_s"]
    assert figures["cpu_s"] >= sum(figures["processes"].values()) - 0.1 > 0
