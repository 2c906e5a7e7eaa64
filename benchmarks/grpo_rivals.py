"""Installs and runs the systems to which benchmarks/grpo_step.py compares this one.

TRL shares torch and transformers with this system; verl has an environment of its own, as the last
version that generates without a GPU needs older packages.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_workload import LEARNING_RATE, Workload
from quiet_command import ROOT, output_of
from rival_packages import install_once, pip_install

TRL_SITE = ROOT / "benchmarks" / ".trl"
_VERL_VENV = ROOT / "benchmarks" / ".verl"
_VERL_REQUIREMENTS = ROOT / "requirements" / "bench_verl.txt"
_CPU_WHEELS = "https://download.pytorch.org/whl/cpu"


_KEEPS_MEMORY = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=0x3fffffffffffffff"
ALLOCATOR = {"GLIBC_TUNABLES": f"{_KEEPS_MEMORY}:glibc.malloc.top_pad=0x4000000"}
"""The settings of mcore_rl/cpu/host_allocator.py, for processes that do not import it."""


@dataclass(frozen=True)
class Resources:
    """How a rival runs: data-parallel processes, threads and sequences of a micro-batch of each."""

    processes: int
    threads: int
    micro_batch: int


@dataclass(frozen=True)
class Rival:
    """One of the other systems.

    run  returns seconds and tokens of the steps but the first
    """

    install: Callable[[], None]
    run: Callable[[Workload, Path, int, Resources], dict[str, Any]]
    is_data_parallel: bool


def run_script(
    python: Path | str,
    name: str,
    options: Sequence[str],
    launcher: Sequence[str] = (),
    **environment: str,
) -> Any:
    """Return the last line of a script of this folder, decoded.

    launcher   arguments of Python that start the script in several processes
    """
    command = [str(python), *launcher, str(ROOT / "benchmarks" / name), *options]
    return json.loads(output_of(command, **environment).strip().splitlines()[-1])


def _run_trl(
    workload: Workload, folder: Path, num_steps: int, resources: Resources
) -> dict[str, Any]:
    options = ["--workload", workload.name, *_options(folder, num_steps, resources)]
    environment = ALLOCATOR | {
        "OMP_NUM_THREADS": str(resources.threads),
        "PYTHONPATH": str(TRL_SITE),
    }
    if resources.processes == 1:
        return run_script(sys.executable, "grpo_trl.py", options, **environment)
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(resources.processes)]
    return run_script(sys.executable, "grpo_trl.py", options, launcher, **environment)


def _run_verl(
    workload: Workload, folder: Path, num_steps: int, resources: Resources
) -> dict[str, Any]:
    sizes = {
        "--prompts": workload.num_prompts,
        "--samples-per-prompt": workload.samples_per_prompt,
        "--max-len": workload.max_len,
        "--lr": LEARNING_RATE,
    }
    options = [str(word) for pair in sizes.items() for word in pair]
    options += _options(folder, num_steps, resources)
    return run_script(_VERL_VENV / "bin" / "python", "grpo_verl.py", options, **ALLOCATOR)


def _options(folder: Path, num_steps: int, resources: Resources) -> list[str]:
    values = {
        "--folder": folder,
        "--steps": num_steps,
        "--threads": resources.threads,
        "--micro-batch": resources.micro_batch,
    }
    return [str(word) for pair in values.items() for word in pair]


def install_trl() -> None:
    """Install TRL and the packages only it needs beside the environment."""
    requirements = ROOT / "requirements" / "bench.txt"
    arguments = ["--upgrade", "--target", str(TRL_SITE), "-r", str(requirements)]
    install_once(
        TRL_SITE, requirements.read_text(), lambda: pip_install(sys.executable, *arguments)
    )


def _install_verl() -> None:
    wanted = _VERL_REQUIREMENTS.read_text()
    install_once(_VERL_VENV, wanted, _make_verl_environment)


def _make_verl_environment() -> None:
    """Make it; torch goes first, from the index of CPU builds if that is reached."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(_VERL_VENV)], check=True)
    python = _VERL_VENV / "bin" / "python"
    lines = _VERL_REQUIREMENTS.read_text().splitlines()
    (torch,) = [line for line in lines if line.startswith("torch==")]
    try:
        pip_install(python, "--retries", "0", "--index-url", _CPU_WHEELS, torch)
    except subprocess.CalledProcessError:
        pip_install(python, torch)
    pip_install(python, "-r", str(_VERL_REQUIREMENTS))


RIVALS = {
    "trl": Rival(install_trl, _run_trl, is_data_parallel=True),
    "verl": Rival(_install_verl, _run_verl, is_data_parallel=False),
}
