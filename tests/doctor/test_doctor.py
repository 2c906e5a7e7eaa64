"""The kit on the CPU, as a user starts it: a line for each check, a summary at the end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.doctor.stages import STAGES
from tests.support.policy import ROOT

pytestmark = pytest.mark.gloo


@pytest.mark.parametrize("stages", ["sync,probes", pytest.param("all", marks=pytest.mark.slow)])
def test_every_check_passes_on_the_cpu_or_says_why_it_is_skipped(
    tmp_path: Path, stages: str
) -> None:
    logs = tmp_path / "logs"
    command = [sys.executable, "-m", "mcore_rl.doctor", "--stages", stages]
    command += ["--logs", str(logs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, summary = [json.loads(line) for line in done.stdout.splitlines()]
    chosen = [stage for stage in STAGES if stages == "all" or stage.name in stages.split(",")]
    expected = [(stage.name, check.name) for stage in chosen for check in stage.checks]
    assert [(line["stage"], line["check"]) for line in lines] == expected
    needs_gpu = {check.name for stage in chosen for check in stage.checks if check.gpu}
    for line in lines:
        assert line["outcome"] == ("skipped" if line["check"] in needs_gpu else "ok"), line
        assert bool(line["why"]) == (line["outcome"] == "skipped")
    figures = {line["check"]: line["figures"] for line in lines}
    assert figures["rate staged"]["swap_ms"] > 0
    assert 0 < figures["rate in place"]["fraction_of_copy"] < 1.5
    assert summary["summary"] == {
        "ok": len(lines) - len(needs_gpu),
        "failed": 0,
        "skipped": len(needs_gpu),
    }
    assert summary["device"] == "CPU" and summary["failed"] == []
    assert len(list(logs.iterdir())) == len(lines) - len(needs_gpu)
