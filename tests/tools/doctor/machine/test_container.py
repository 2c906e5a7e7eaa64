"""Container runtimes: planted programs on PATH, and none."""

from pathlib import Path

import pytest

from mcore_rl.tools.doctor.machine.hardware import check_container
from mcore_rl.tools.doctor.machine.needs import MachineNeeds
from tests.support.machine_doctor import run_doctor


def plant(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    "runtime",
    ["docker", *(pytest.param(name, marks=pytest.mark.slow) for name in ("apptainer", "pyxis"))],
)
def test_a_runtime_that_is_not_there_is_a_failure(runtime: str, tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path)}
    run = run_doctor("--only", "container", "--container", runtime, environ=environ)
    [finding] = run.outcome("container")
    assert run.status == 1
    assert finding.outcome == "failed"
    program = "srun" if runtime == "pyxis" else runtime
    assert finding.text == f"{program} is not on PATH ({tmp_path})"


def test_none_is_looked_for_unless_one_is_asked_for() -> None:
    assert check_container(MachineNeeds()) == []


@pytest.mark.parametrize(
    ("runtime", "scripts", "outcome", "text"),
    [
        ("docker", {"docker": "echo '28.2 {\"runc\":{}}'"}, "ok", "docker 28.2"),
        ("docker", {"docker": "echo no daemon >&2; exit 1"}, "failed", "daemon does not answer"),
        ("apptainer", {"apptainer": "echo apptainer version 1.4"}, "ok", "apptainer version 1.4"),
        ("apptainer", {"singularity": "echo singularity-ce 4"}, "ok", "singularity-ce 4"),
        ("pyxis", {"srun": "echo --container-image=x", "enroot": ":"}, "ok", "srun with pyxis"),
        ("pyxis", {"srun": "echo --help", "enroot": ":"}, "failed", "no --container-image"),
    ],
)
def test_a_runtime_is_asked_whether_it_works(
    runtime: str, scripts, outcome: str, text: str, tmp_path: Path, monkeypatch
) -> None:
    for name, script in scripts.items():
        plant(tmp_path, name, script)
    monkeypatch.setenv("PATH", str(tmp_path))
    [finding] = check_container(MachineNeeds(container=runtime))
    assert finding.outcome == outcome, finding
    assert text in finding.text
