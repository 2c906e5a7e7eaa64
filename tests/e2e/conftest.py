"""A tiny model with random weights, and a SLURM, each made once for whole-run tests."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mcore_rl.process.network import find_free_port
from mcore_rl.tasks.arithmetic import prepare_arithmetic
from tests.support.runs import Run, tiny_settings
from tests.support.slurm import missing_commands, two_nodes


@pytest.fixture(scope="session")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, tokenizer and a model with random weights."""
    folder = tmp_path_factory.mktemp("arithmetic")
    prepare_arithmetic(folder, seed=0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder / "model"), dtype=torch.float32
    )
    model.save_pretrained(folder / "model")
    return folder


@pytest.fixture
def start(arithmetic: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """start(command, *overrides, run_dir=None) -> Run; leftovers of a run are killed at the end."""
    runs: list[Run] = []

    def start_run(command: str, *overrides: str, run_dir: Path | None = None) -> Run:
        settings = (command, *tiny_settings(arithmetic), *overrides)
        runs.append(Run(settings, run_dir or tmp_path / f"run{len(runs)}"))
        return runs[-1]

    yield start_run
    for run in runs:
        run.kill_all()


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    """A list of runs; what those in it leave behind is killed at the end."""
    started: list[Run] = []
    yield started
    for run in started:
        run.kill_all()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start a SLURM of two nodes, to which commands submit."""
    if missing := missing_commands():
        pytest.skip(f"SLURM is not installed (apt-get install slurm-wlm): no {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("slurmd of several nodes on one machine needs root")
    ports = [find_free_port("127.0.0.1") for _ in range(3)]
    with (
        two_nodes(tmp_path_factory.mktemp("slurm"), ports) as config,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SLURM_CONF", str(config))
        yield
