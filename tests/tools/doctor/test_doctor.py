"""The GPU checks on the CPU, as a user starts it: a line for each check, a summary at the end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.tools.doctor.runner import STAGES
from tests.support.policy import ROOT

pytestmark = [pytest.mark.gloo, pytest.mark.slow]


@pytest.mark.parametrize("stages", ["sync,probes", "all"])
def test_every_check_passes_on_the_cpu_or_says_why_it_is_skipped(
    tmp_path: Path, stages: str
) -> None:
    logs = tmp_path / "logs"
    command = [sys.executable, "-m", "mcore_rl.tools.doctor", "--stages", stages]
    command += ["--logs", str(logs)]
    if stages == "all":
        command += ["--warm-start", str(tmp_path)]  # where there is none
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, summary = [json.loads(line) for line in done.stdout.splitlines()]
    chosen = [stage for stage in STAGES if stages == "all" or stage.name in stages.split(",")]
    expected = [(stage.name, check.name) for stage in chosen for check in stage.checks]
    assert [(line["stage"], line["check"]) for line in lines] == expected
    unmet = {check.name for stage in chosen for check in stage.checks if check.gpu}
    unmet |= {"reward rises"} & {check.name for stage in chosen for check in stage.checks}
    for line in lines:
        assert line["outcome"] == ("skipped" if line["check"] in unmet else "ok"), line
        assert bool(line["why"]) == (line["outcome"] == "skipped")
    figures = {line["check"]: line["figures"] for line in lines}
    assert figures["rate staged"]["swap_ms"] > 0
    assert 0 < figures["rate in place"]["fraction_of_copy"] < 1.5
    assert summary["summary"] == {
        "ok": len(lines) - len(unmet),
        "failed": 0,
        "skipped": len(unmet),
    }
    assert summary["device"] == "CPU" and summary["failed"] == []
    ran = [
        f"{line['stage']}_{line['check'].replace(' ', '_')}" for line in lines if line["seconds"]
    ]
    assert {path.stem for path in logs.glob("*.log")} == set(ran)
    assert {path.name for path in logs.iterdir() if path.is_dir()} == set(ran)
