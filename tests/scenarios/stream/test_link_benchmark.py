"""The benchmark of links runs in its smallest size."""

import json
import subprocess
import sys

import pytest

from tests.support.policy import ROOT


@pytest.mark.e2e
def test_the_benchmark_of_links_ends_in_its_figures() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/link.py", "--layers", "1", "--repeats", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])["1 layers"]
    assert figures["expert_tensors"] == 768
    for way in ("recorded", "listed"):
        assert figures[f"{way}_link_s"] >= figures[f"{way}_least_s"] > 0
        assert figures[f"{way}_first_sync_s"] > 0
