"""The benchmark of the search index runs at its smallest size and finds what it shall."""

import importlib.util

from tests.support.benchmarks import figures_of


def test_the_benchmark_ends_with_its_numbers() -> None:
    options = ["--passages", "3000", "--plain-passages", "2000", "--seconds", "0.5"]
    numbers = figures_of("search.py", *options, "--shard-len", "1500", timeout_s=300)
    assert numbers["passages"] == 3000 and numbers["recall_at_3"] >= 0.95
    assert numbers["build_s"] > 0 and numbers["queries_per_s"] > 0 and numbers["index_mib"] > 0
    assert numbers["build_peak_mib"] > 0 and numbers["query_private_mib"] > 0
    if importlib.util.find_spec("rank_bm25"):
        assert numbers["query_ratio"] > 1
