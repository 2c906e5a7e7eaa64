"""The benchmark of faults in its smallest size: two faults in a run of every kind of process."""

from pathlib import Path

import pytest

from tests.support.benchmarks import figures_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.timeout(1800)
def test_a_fault_is_done_checked_and_counted_and_not_done_twice(tmp_path: Path) -> None:
    """As root one of the two is a slow network; for others, both are of the server."""
    sizes = ["--sft", "20", "--alone", "3", "--faults", "2", "--every", "2"]
    options = [*sizes, "--kinds", "search,network", "--dir", str(tmp_path)]
    figures = figures_of("faults.py", *options, timeout_s=1500)
    assert figures["faults"] == 2 and figures["problems"] == []
    assert figures["hangs"] == 0 and figures["books_balance"] and figures["finished"]
    assert 0 < figures["effective"] <= 1.5 and figures["median_s"]["search"] >= 0
    assert (tmp_path / "faults.png").stat().st_size > 1000
    again = figures_of("faults.py", *options, timeout_s=600)
    assert again == figures, "it has no fault to do, and both runs are finished"
