"""The benchmarks of differences run in their smallest sizes, without a link of their own."""

import pytest

from tests.support.benchmarks import figures_of


@pytest.mark.slow
def test_the_benchmark_of_differences_ends_in_its_figures() -> None:
    sizes = ["--gbit", "", "--mib", "4", "--repeats", "1"]
    figures = figures_of("delta_sync.py", *sizes, timeout_s=170)
    assert figures["shared memory"]["bytes_share"] == 1.0
    assert figures["shared memory"]["broadcast_s"] > 0


@pytest.mark.slow
def test_the_benchmark_of_changes_ends_in_its_figures() -> None:
    figures = figures_of("delta_changes.py", "--models", "mixture", "--steps", "2", timeout_s=170)
    assert 0 < figures["models"]["mixture"]["mean_share"] < 0.5
