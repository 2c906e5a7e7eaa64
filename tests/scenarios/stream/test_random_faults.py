"""Trainer ranks and engines killed or stopped at random moments of a sync."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("victim", ["sender", "relay", "receiver", "engine"])
def test_no_fault_leaves_mixed_weights_or_a_sync_that_hangs(victim: str) -> None:
    """The benchmark fails on either, and if a victim does not serve again."""
    options = ["--times", "2", "--mib", "64", "--victims", victim]
    run = subprocess.run(
        [sys.executable, "benchmarks/sync_faults.py", *options],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    outcomes = json.loads(run.stdout.splitlines()[-1])
    assert {kind: sum(counts.values()) for kind, counts in outcomes.items()} == {
        f"kill {victim}": 2,
        f"stop {victim}": 2,
    }
