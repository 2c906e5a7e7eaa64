"""The benchmark of merges runs in its smallest size: the files are right, also after a kill."""

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
