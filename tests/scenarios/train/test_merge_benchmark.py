"""The benchmark of merges runs in its smallest size: the files are right, also after a kill."""

import json
import subprocess
import sys

import pytest

from tests.support.policy import ROOT


@pytest.mark.gloo
def test_the_benchmark_of_merges_ends_in_its_figures() -> None:
    sizes = ["--layers", "2", "--experts", "4", "--vocab", "1024", "--repeats", "1"]
    done = subprocess.run(
        [sys.executable, "benchmarks/merge.py", *sizes],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["resumed_equal"]
    for way in ("page_cache", "fsync"):
        assert figures[way]["best_ratio"] > 0
        assert figures[way]["cp_s"] > 0
