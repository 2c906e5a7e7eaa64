"""The benchmark of a run's start runs in its smallest size."""

import json
import subprocess
import sys

import pytest

from tests.support.policy import ROOT


@pytest.mark.e2e
def test_the_benchmark_of_starts_ends_in_its_figures() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/startup.py", "--repeats", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert 0 < figures["imported_s"] <= figures["ray_s"] <= figures["linked_s"]
    assert figures["linked_s"] <= figures["first_token_s"] == figures["least_s"]
    assert figures["cpu_s"] >= sum(figures["processes"].values()) - 0.1 > 0
