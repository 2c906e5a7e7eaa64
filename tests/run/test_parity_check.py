"""The parity check of a run: what it goes on with when the run continues, and what it calls too
much.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from mcore_rl.config import Config
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.process import versions
from mcore_rl.run.roles import parity_tolerance
from mcore_rl.run.roles.parity_tolerance import (
    EngineDifference,
    ParityTolerance,
    describe_kernels,
)

GPU = ["NVIDIA H100 80GB HBM3"]
Change = Callable[[Config], None]


def change_backend(config: Config) -> None:
    config.rollout.sglang["attention_backend"] = "triton"


def change_ranks(config: Config) -> None:
    config.rollout.tp = 2


def change_kernels(config: Config) -> None:
    config.train.megatron["bias_activation_fusion"] = False


def make_parity_tolerance(
    config: Config, folder: RunFolder, devices: Sequence[str]
) -> ParityTolerance:
    made_by = describe_kernels(config.model, config.rollout, config.train, devices)
    precision = config.engine_precision
    return ParityTolerance(config.parity_check, precision, folder.parity_check, made_by)


def learn(folder: RunFolder) -> None:
    first = make_parity_tolerance(Config(), folder, GPU)
    for _ in range(4):
        first.learn([EngineDifference(0.02, 0.02, 0.03, 2000)])
    assert first.limits["typical"] == (0.02, 0.04)


def test_a_run_that_continues_knows_its_rounding(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    learn(folder)
    assert make_parity_tolerance(Config(), folder, GPU).limits["typical"] == (0.02, 0.04)


@pytest.mark.parametrize("change", [change_backend, change_ranks, change_kernels])
def test_rounding_is_learned_anew_once_the_recipe_computes_otherwise(
    tmp_path: Path, change: Change
) -> None:
    folder, config = RunFolder(tmp_path), Config()
    learn(folder)
    change(config)
    assert make_parity_tolerance(config, folder, GPU).limits == {}


def test_rounding_is_learned_anew_on_another_gpu(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    learn(folder)
    assert make_parity_tolerance(Config(), folder, ["NVIDIA A100-SXM4-80GB"]).limits == {}


def test_rounding_is_learned_anew_with_another_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    learn(folder)
    newer = {**versions.find_versions(), "sglang": "99.0"}
    monkeypatch.setattr(parity_tolerance, "find_versions", lambda names: newer)
    assert make_parity_tolerance(Config(), folder, GPU).limits == {}


@pytest.mark.parametrize(("quantization", "passes"), [("none", False), ("fp8", True)])
def test_engines_in_fp8_may_differ_more_at_the_first_sync(
    tmp_path: Path, quantization: str, passes: bool
) -> None:
    config = Config()
    config.model.dtype = "bfloat16"
    config.rollout.quantization = cast(Any, quantization)
    tolerance = make_parity_tolerance(config, RunFolder(tmp_path), GPU)
    assert (tolerance.find_fault(EngineDifference(0.3, 0.5, 0.7, 2000)) is None) == passes
