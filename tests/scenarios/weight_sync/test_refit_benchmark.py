"""The benchmark of weight syncs beside other ways runs in its smallest size, results compared."""

import pytest

from tests.support.benchmarks import figures_of


@pytest.mark.e2e
@pytest.mark.slow
def test_all_ways_leave_the_same_weights_and_the_benchmark_ends_in_its_figures() -> None:
    options = ["--sizes", "1", "--kinds", "large", "--repeats", "1"]
    figures = figures_of("refit.py", *options, timeout_s=280)["1 MiB large"]
    ways = [value for value in figures.values() if isinstance(value, dict)]
    assert len(ways) == 4
    assert all(way["seconds"] > 0 and way["first_sync_seconds"] >= 0 for way in ways)
    assert figures["share of a plain copy by shared memory"] > 0
