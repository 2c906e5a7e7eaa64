"""The benchmark of links runs in its smallest size."""

import pytest

from tests.support.benchmarks import figures_of


@pytest.mark.e2e
def test_the_benchmark_of_links_ends_in_its_figures() -> None:
    options = ["--layers", "1", "--repeats", "1"]
    figures = figures_of("link.py", *options, timeout_s=170)["1 layers"]
    assert figures["expert_tensors"] == 768
    for way in ("recorded", "listed"):
        assert figures[f"{way}_link_s"] >= figures[f"{way}_least_s"] > 0
        assert figures[f"{way}_first_sync_s"] > 0
