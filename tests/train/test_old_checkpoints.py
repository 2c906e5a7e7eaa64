"""Checkpoints of megatron-core 0.16 load, continue with the same loss, and merge the same."""

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config import ModelConfig, ParallelConfig
from tests.support.distributed import run_ranks
from tests.support.old_checkpoint import (
    EXTRA,
    LAYOUT,
    OPTIMIZER,
    hash_merged,
    take_step,
    unpack_old_checkpoints,
)
from tests.support.tiny_training import make_actor


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_old_checkpoints(tmp_path_factory.mktemp("old"))


def resume(rank: int, world_size: int, port: int, root: Path, cases: list[Any]) -> list[Any]:
    """Load each folder in its layout and take two steps; return (extra, stats) of each."""
    model, results = ModelConfig(path=str(root / "model")), []
    for folder, layout in cases:
        actor = make_actor(rank, world_size, port, model, ParallelConfig(**layout), OPTIMIZER)
        extra = actor.load(root / folder)
        for group in actor._turns.chosen.optimizer.param_groups:
            group["weight_decay"] = OPTIMIZER.weight_decay  # norms and biases decayed then
        results.append((extra, [take_step(actor), take_step(actor)]))
    return results


@pytest.mark.gloo
def test_a_run_continues(written: Path) -> None:
    wanted = json.loads((written / "expected.json").read_text())["stats"]
    cases = [("run", LAYOUT), ("plain", LAYOUT), ("run", {"pp": 2}), ("plain", {"ep": 2})]
    results = run_ranks(resume, 2, written, cases, timeout_s=240)
    for case, of_ranks in zip(cases, zip(*results, strict=True), strict=True):
        assert all(extra == EXTRA for extra, _ in of_ranks)
        stats = next(stats for _, stats in of_ranks if stats[0] is not None)
        for got, (loss, grad_norm) in zip(stats, wanted, strict=True):
            assert got.loss == pytest.approx(loss, abs=1e-6), case
            assert got.grad_norm == pytest.approx(grad_norm, abs=1e-5), case


@pytest.mark.parametrize("folder", ["run", "plain"])
def test_a_model_is_merged_bit_for_bit(written: Path, tmp_path: Path, folder: str) -> None:
    merged = hash_merged(written / folder, written / "model", tmp_path / "merged")
    assert merged == json.loads((written / "expected.json").read_text())["merged"]
