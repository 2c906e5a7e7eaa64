"""Cores are shared on CPUs only."""

import pytest

from mcore_rl.config.assumptions import SimulateConfig


def test_cores_of_a_run_on_gpus_are_refused() -> None:
    assert SimulateConfig(gpu="cpu", cores=2).cores == 2
    with pytest.raises(ValueError, match=r"simulate.cores=2 with simulate.gpu=h100"):
        SimulateConfig(cores=2)
