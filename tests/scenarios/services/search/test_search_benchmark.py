"""The benchmark of the search index runs at its smallest size and finds what it shall."""

import pytest

from tests.support.benchmarks import figures_of


@pytest.mark.slow
def test_the_benchmark_ends_with_its_numbers() -> None:
    options = ["--passages", "3000", "--rival-passages", "2000", "--seconds", "0.5"]
    options += ["--rivals", "bm25s", "sqlite", "--shard-len", "1500"]
    numbers = figures_of("search.py", *options, timeout_s=300)
    assert numbers["passages"] == 3000 and numbers["recall_at_3"] >= 0.95
    assert numbers["build_s"] > 0 and numbers["queries_per_s"] > 0 and numbers["index_mib"] > 0
    assert numbers["build_peak_mib"] > 0 and numbers["query_private_mib"] > 0
    check_rivals(numbers, ["ours", "bm25s", "sqlite"])


@pytest.mark.slow
def test_tantivy_is_installed_and_finds_the_same() -> None:
    options = ["--passages", "2000", "--rival-passages", "2000", "--seconds", "0.5"]
    numbers = figures_of("search.py", *options, "--rivals", "tantivy", timeout_s=300)
    check_rivals(numbers, ["ours", "tantivy"])


def check_rivals(numbers: dict, names: list[str]) -> None:
    """All engines were given the same passages, so all find what was hidden among them."""
    assert numbers["rival_passages"] == 2000 and list(numbers["rivals"]) == names
    for name, figures in numbers["rivals"].items():
        assert figures["recall_at_3"] >= 0.95, name
        assert min(figures.values()) > 0, name
