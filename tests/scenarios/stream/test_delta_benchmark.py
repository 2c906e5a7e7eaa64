"""The benchmark of differences runs in its smallest size, without a link of its own."""

from tests.support.benchmarks import figures_of


def test_the_benchmark_of_differences_ends_in_its_figures() -> None:
    sizes = ["--steps", "2", "--gbit", "", "--mib", "4", "--repeats", "1"]
    figures = figures_of("delta_sync.py", *sizes, timeout_s=170)
    assert 0 < figures["steps"]["mean_share"] < 0.5
    assert figures["shared memory"]["bytes_share"] == 1.0
    assert figures["shared memory"]["broadcast_s"] > 0
