"""Targets of the sync stage are asked of a GPU alone; a missed one comes with its figures."""

import pytest
import yaml

from mcore_rl.config.shipped import RECIPES_DIR
from mcore_rl.tools.doctor import sync_checks
from mcore_rl.tools.doctor.check import MissedTargetError

GOOD = {"fraction_of_copy": 0.6, "swap_ms": 12.0}


def test_buckets_are_those_of_recipes_for_gpus() -> None:
    recipe = yaml.safe_load((RECIPES_DIR / "cluster" / "gpu.yaml").read_text())
    assert recipe["sync"]["bucket_mib"] == sync_checks.GPU_BUCKET_MIB


def test_targets_are_not_asked_of_a_cpu() -> None:
    sync_checks._check_targets({"fraction_of_copy": 0.1, "swap_ms": 500.0}, 0.5)


@pytest.mark.parametrize(
    ("missed", "why"),
    [
        ({"fraction_of_copy": 0.4}, "0.4 of a copy's rate, target 0.5"),
        ({"swap_ms": 21.0}, "21.0 ms, target 20"),
    ],
)
def test_a_gpu_that_misses_a_target_is_told_with_all_figures(
    monkeypatch: pytest.MonkeyPatch, missed: dict[str, float], why: str
) -> None:
    monkeypatch.setattr(sync_checks, "has_cuda", lambda: True)
    sync_checks._check_targets(GOOD, 0.5)
    with pytest.raises(MissedTargetError, match=why) as error:
        sync_checks._check_targets(GOOD | missed, 0.5)
    assert error.value.figures == GOOD | missed


def test_the_large_model_has_eight_gib() -> None:
    numel = sum(
        shape[0] * (shape[1] if len(shape) > 1 else 1)
        for shape in sync_checks.LARGE.shapes.values()
    )
    assert 7.5 < 2 * numel / 2**30 < 8.5


def test_seconds_are_those_of_the_work() -> None:
    calls = []
    seconds = sync_checks._seconds(lambda: calls.append(1), repeats=3)
    assert len(calls) == 4 and 0 <= seconds < 1
