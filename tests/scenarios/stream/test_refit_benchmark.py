"""The benchmark of weight syncs beside other ways runs in its smallest size, results compared."""

import json
import subprocess
import sys

import pytest

from tests.support.policy import ROOT


@pytest.mark.e2e
def test_all_ways_leave_the_same_weights_and_the_benchmark_ends_in_its_figures() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "benchmarks/refit.py",
            "--sizes",
            "1",
            "--kinds",
            "large",
            "--repeats",
            "1",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])["1 MiB large"]
    ways = [value for value in figures.values() if isinstance(value, dict)]
    assert len(ways) == 4
    assert all(way["seconds"] > 0 and way["first_sync_seconds"] >= 0 for way in ways)
    assert figures["share of a plain copy by shared memory"] > 0
