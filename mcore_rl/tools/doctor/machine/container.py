"""Checks that a container runtime is there and answers."""

import os
import shutil
import subprocess

from mcore_rl.tools.doctor.machine.finding import Finding, failed, ok, warning
from mcore_rl.tools.doctor.machine.needs import MachineNeeds

DEADLINE_S = 10.0


def check_container(needs: MachineNeeds) -> list[Finding]:
    """Whether the runtime that --container names can start containers here."""
    if not needs.container:
        return []
    return [{"pyxis": _pyxis, "apptainer": _apptainer, "docker": _docker}[needs.container]()]


def _docker() -> Finding:
    if missing := _missing("docker", "install docker and NVIDIA's container toolkit"):
        return missing
    status, words = _ask("docker", "info", "--format", "{{.ServerVersion}} {{json .Runtimes}}")
    if status:
        text = f"docker's daemon does not answer: {words[-200:]}"
        remedy = "start it (systemctl start docker), or join the group docker"
        return failed("container", text, remedy)
    from mcore_rl.device.inventory import has_driver  # imports torch

    version, _, runtimes = words.partition(" ")
    if has_driver() and "nvidia" not in runtimes:
        text = f"docker {version} has no runtime for NVIDIA GPUs"
        remedy = "nvidia-ctk runtime configure --runtime=docker, then restart docker"
        return warning("container", text, remedy)
    return ok("container", f"docker {version}")


def _apptainer() -> Finding:
    name = "singularity" if shutil.which("singularity") else "apptainer"  # its former name
    if missing := _missing(name, "module load apptainer, or install it"):
        return missing
    status, words = _ask(name, "--version")
    if status:
        return failed("container", f"{name} --version: {words[-200:]}", f"install {name} again")
    return ok("container", words)


def _pyxis() -> Finding:
    for name in ("srun", "enroot"):
        if missing := _missing(name, "ask the cluster's operators for pyxis and enroot"):
            return missing
    status, words = _ask("srun", "--help")
    if status or "--container-image" not in words:
        text = "srun has no --container-image: the pyxis plugin is not loaded"
        remedy = "add pyxis to SLURM's plugstack.conf, or take --container apptainer"
        return failed("container", text, remedy)
    return ok("container", "srun with pyxis, enroot")


def _missing(program: str, remedy: str) -> Finding | None:
    if shutil.which(program):
        return None
    path = os.environ.get("PATH", "")
    return failed("container", f"{program} is not on PATH ({path or 'empty'})", remedy)


def _ask(*command: str) -> tuple[int, str]:
    """The exit status and output of a command; 124 if it does not answer in time."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        return 124, f"no answer in {DEADLINE_S:g} s"
    return done.returncode, " ".join((done.stdout + done.stderr).split())
