"""Starts `mcore-rl doctor` in processes of its own, on a machine with a planted fault."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from mcore_rl.tools.doctor.machine.facts import find_own_address, list_interfaces
from mcore_rl.tools.doctor.machine.finding import Finding
from tests.support.policy import ROOT


@dataclass(frozen=True)
class DoctorRun:
    status: int
    findings: list[Finding]
    summary: dict[str, Any]
    err: str

    def outcome(self, check: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.check == check]


def start_doctor(
    *arguments: str,
    before: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    limit: Callable[[], None] | None = None,
) -> "subprocess.Popen[str]":
    """Start it with --json; `before` are words before Python, `limit` runs in the child."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(environ or {})}
    return subprocess.Popen(
        [*before, sys.executable, "-m", "mcore_rl.tools.doctor", "--json", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limit,
    )


def finish_doctor(process: "subprocess.Popen[str]", timeout_s: float = 60) -> DoctorRun:
    out, err = process.communicate(timeout=timeout_s)
    lines = [json.loads(line) for line in out.splitlines()]
    summary = lines.pop() if lines else {}
    return DoctorRun(process.returncode, [Finding(**line) for line in lines], summary, err)


def run_doctor(*arguments: str, **plant: Any) -> DoctorRun:
    return finish_doctor(start_doctor(*arguments, **plant))


def in_own_mounts(script: str) -> list[str]:
    """Words that run a script, then the command, where nobody else sees what they mount."""
    words = ["unshare", "--mount", "sh", "-c", f'{script} && exec "$@"', "sh"]
    try:
        tried = subprocess.run(
            ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True
        )
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if tried.returncode:
        pytest.skip("this user may not mount")
    return words


def reachable_interface() -> str:
    """The name of the interface of the default route, which other machines could reach."""
    address = find_own_address()
    faces = [face.name for face in list_interfaces().values() if address in face.addresses]
    if not faces or faces[0] == "lo":
        pytest.skip("this machine has no network interface")
    return faces[0]
