"""A run continues exactly from its checkpoint, in any layout; a save cut short does no harm."""

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from mcore_rl.train import checkpoint_save
from mcore_rl.train.actor import Actor
from mcore_rl.train.checkpoint_save import INCOMPLETE
from mcore_rl.types import StepStats
from tests.support.distributed import run_ranks
from tests.support.tiny_training import (
    NUM_TOKENS,
    make_actor,
    my_batches,
    token_loss,
    write_hf_model,
)

OPTIMIZER = OptimizerConfig(
    lr=1e-3, schedule="cosine", warmup_steps=1, weight_decay=0.1, clip_grad=0.5
)
EXTRA = {"prompts": {"position": 7}, "step": 2}


def step(actor: Actor) -> StepStats | None:
    return actor.train_step(my_batches(), token_loss, temperature=1.0, num_tokens=NUM_TOKENS)


def save_midway(
    rank: int, world_size: int, port: int, model: ModelConfig, layout: Any, root: Path
) -> Any:
    """Take two steps, save, take two more before anything of the save is written; then save again.

    The process ends before the last save is complete.
    """
    trained = threading.Event()
    write = checkpoint_save._write_buckets

    def write_late(*args: Any, **kwargs: Any) -> Any:
        trained.wait(60)
        return write(*args, **kwargs)

    checkpoint_save._write_buckets = write_late
    actor = make_actor(rank, world_size, port, model, ParallelConfig(**layout), OPTIMIZER)
    actor.save(root / "step_0", {})
    trained.set()
    before = [step(actor), step(actor)]
    torch.rand(rank + 1)
    actor.finish_save()
    trained.clear()
    actor.save(root / "step_2", EXTRA)
    drawn = torch.rand(3)
    stats = [*before, step(actor), step(actor)]
    trained.set()
    actor.finish_save()
    actor.save(root / "step_4", {})
    return stats, drawn


def resume(
    rank: int, world_size: int, port: int, model: ModelConfig, layouts: list[Any], root: Path
) -> Any:
    results = []
    for layout in layouts:
        actor = make_actor(rank, world_size, port, model, ParallelConfig(**layout), OPTIMIZER)
        extra = actor.load(root / "step_2")
        results.append((layout, extra, torch.rand(3), [step(actor), step(actor)]))
    return results


def save_again(rank: int, world_size: int, port: int, model: ModelConfig, root: Path) -> int:
    """Refuse an incomplete and a damaged checkpoint, load an intact one and save it again."""
    actor = make_actor(rank, world_size, port, model, ParallelConfig(), OPTIMIZER)
    with pytest.raises(ValueError, match="step_4 is not a complete checkpoint"):
        actor.load(root / "step_4")
    damaged = shutil.copytree(root / "step_0", root / "damaged")
    file = damaged / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"damaged/__0_0\.distcp: .* does not agree with checksums"
    ):
        actor.load(damaged)
    actor.load(root / "step_0")
    actor.save(root / "step_4", {})
    actor.finish_save()
    return actor.step


@pytest.mark.gloo
def test_a_run_continues_in_any_layout(tmp_path: Path) -> None:
    model = ModelConfig(path=str(write_hf_model(tmp_path / "model")))
    saved_in = {"tp": 2, "ep": 2}
    straight = run_ranks(save_midway, 2, model, saved_in, tmp_path)
    wanted = straight[0][0]

    resumed = run_ranks(
        resume, 2, model, [saved_in, {"pp": 2, "vpp": 2}, {"ep": 2}], tmp_path, timeout_s=200
    )
    alone = run_ranks(resume, 1, model, [{}], tmp_path)
    for results in (*zip(*resumed, strict=True), *zip(*alone, strict=True)):
        layout, extra, _, _ = results[0]
        assert extra == EXTRA
        stats = next(r[3] for r in results if r[3][0] is not None)
        for got, want in zip(stats, wanted[2:], strict=True):
            assert got.loss == pytest.approx(want.loss, abs=1e-6), layout
            assert got.grad_norm == pytest.approx(want.grad_norm, abs=1e-5), layout
            assert got.learning_rate == want.learning_rate, layout
    for (_, drawn), results in zip(straight, resumed, strict=True):
        assert torch.equal(results[0][2], drawn)

    assert (tmp_path / f"step_4{INCOMPLETE}").is_dir()
    assert not (tmp_path / "step_4").exists()
    assert run_ranks(save_again, 1, model, tmp_path) == [0]
    assert (tmp_path / "step_4").is_dir()
    assert not (tmp_path / f"step_4{INCOMPLETE}").exists()
