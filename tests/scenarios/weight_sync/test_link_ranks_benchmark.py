"""The benchmark of what ranks compute for a link runs in its smallest size."""

import pytest

from tests.support.benchmarks import figures_of


@pytest.mark.gloo
@pytest.mark.slow
def test_the_benchmark_of_ranks_that_link_ends_in_its_figures() -> None:
    options = ["--layers", "1", "--trainers", "1,2", "--engines", "2", "--repeats", "1"]
    figures = figures_of("link_ranks.py", *options, timeout_s=120)
    assert list(figures) == ["768 1->2", "768 2->2"]
    assert all(sides["trainer_s"] > 0 and sides["engine_s"] > 0 for sides in figures.values())
