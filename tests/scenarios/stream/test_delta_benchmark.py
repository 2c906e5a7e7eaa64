"""The benchmark of differences runs in its smallest size, without a link of its own."""

import json
import subprocess
import sys

from tests.support.policy import ROOT


def test_the_benchmark_of_differences_ends_in_its_figures() -> None:
    sizes = ["--steps", "2", "--gbit", "", "--mib", "4", "--repeats", "1"]
    done = subprocess.run(
        [sys.executable, "benchmarks/delta_sync.py", *sizes],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert 0 < figures["steps"]["mean_share"] < 0.5
    assert figures["shared memory"]["bytes_share"] == 1.0
    assert figures["shared memory"]["broadcast_s"] > 0
