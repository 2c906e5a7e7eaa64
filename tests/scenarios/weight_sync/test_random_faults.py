"""Trainer ranks and engines killed or stopped at random moments of a sync."""

import pytest

from tests.support.benchmarks import figures_of


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("victim", ["sender", "relay", "receiver", "engine"])
def test_no_fault_leaves_mixed_weights_or_a_sync_that_hangs(victim: str) -> None:
    """The benchmark fails on either, and if a victim does not serve again."""
    options = ["--times", "2", "--mib", "64", "--victims", victim]
    outcomes = figures_of("sync_faults.py", *options, timeout_s=1200)
    assert {kind: sum(counts.values()) for kind, counts in outcomes.items()} == {
        f"kill {victim}": 2,
        f"stop {victim}": 2,
    }
