"""Towers train at their own rate, stay as they were if frozen, and survive a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint_tools.cli import main
from mcore_rl.config import LoraConfig, ModelConfig, OptimizerConfig, ParallelConfig
from mcore_rl.train.actor import Actor
from tests.support.distributed import run_each, run_ranks
from tests.support.tiny_glm4v import write_glm4v_model
from tests.support.tiny_kimi_vl import write_kimi_k25_model, write_kimi_vl_model
from tests.support.tiny_qwen3_vl import (
    write_qwen3_5_model,
    write_qwen3_5_moe_model,
    write_qwen3_vl_model,
    write_qwen3_vl_moe_model,
)
from tests.support.tiny_training import make_actor, my_batches, token_loss
from tests.support.tiny_vision import make_vision_batches, num_tokens, write_vision_model

LR = 1e-3
TOWER_LR = 1e-5
PARTS = ("projector", "none")
WRITERS = {
    "glm4v_moe": write_glm4v_model,
    "kimi_vl": write_kimi_vl_model,
    "kimi_k25": write_kimi_k25_model,
    "qwen3_vl": write_qwen3_vl_model,
    "qwen3_vl_moe": write_qwen3_vl_moe_model,
    "qwen3_5": write_qwen3_5_model,
    "qwen3_5_moe": write_qwen3_5_moe_model,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("vision"), tie_word_embeddings=True)


def largest_changes(actor: Actor, before: dict[str, Tensor]) -> dict[str, float]:
    """Return part of the model -> how far its weights moved at most, on this rank."""
    changes: dict[str, float] = {}
    for name, after in actor.weight_layout()[1].items():
        part = "text"
        if ".visual." in f".{name}":
            part = "projector" if ".merger." in name else "tower"
        change = float((after - before[name]).abs().max())
        changes[part] = max(changes.get(part, 0.0), change)
    return changes


def copy_weights(actor: Actor) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in actor.weight_layout()[1].items()}


def step(actor: Actor) -> dict[str, float]:
    """Take a step whose last micro-batch has no images; return the largest changes."""
    batches = make_vision_batches()[::-1]
    batches = [batch for batch in batches if batch.images is not None] + [
        batch for batch in batches if batch.images is None
    ]
    before = copy_weights(actor)
    actor.train_step(
        my_batches(batches), token_loss, temperature=1.0, num_tokens=num_tokens(batches)
    )
    return largest_changes(actor, before)


def train_at_own_rate(
    rank: int, world_size: int, port: int, model: ModelConfig, folder: Path
) -> dict[str, Any]:
    """Step, save, step; then load into another actor and step again."""
    optimizer = OptimizerConfig(lr=LR, vision_lr=TOWER_LR, clip_grad=0.0)
    parallel = ParallelConfig(pp=2)
    make = (rank, world_size, port, model, parallel, optimizer)
    actor = make_actor(*make, ddp={"overlap_grad_reduce": True})
    changes = step(actor)
    actor.save(folder / "saved", {})
    actor.finish_save(60.0)
    step(actor)
    resumed = make_actor(*make)
    resumed.load(folder / "saved")
    step(resumed)
    return {"changes": changes, "resumed": largest_changes(resumed, copy_weights(actor))}


@pytest.mark.gloo
def test_a_tower_has_its_own_rate_and_resumes(folder: Path, tmp_path: Path) -> None:
    model = ModelConfig(path=str(folder))
    first, last = run_ranks(train_at_own_rate, 2, model, tmp_path, timeout_s=300.0)
    assert first["changes"]["text"] == pytest.approx(LR, rel=0.05)
    assert first["changes"]["tower"] == pytest.approx(TOWER_LR, rel=0.05)
    assert first["changes"]["projector"] == pytest.approx(TOWER_LR, rel=0.05)
    assert last["changes"].keys() == {"text"}
    for result in (first, last):
        assert max(result["resumed"].values()) < 1e-7


@pytest.mark.gloo
@pytest.mark.parametrize(
    "kind",
    [
        "qwen2_5_vl",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in WRITERS),
    ],
)
def test_checkpoints_go_to_hf_and_back(folder: Path, tmp_path: Path, kind: str) -> None:
    """A sharded checkpoint of an untrained model holds the tower, and so does one made of HF."""
    if kind != "qwen2_5_vl":
        folder = WRITERS[kind](tmp_path / "model")
    model = ModelConfig(path=str(folder))
    run_ranks(save_untrained, 2, model, tmp_path, timeout_s=300.0)
    tools("to-hf", tmp_path / "saved", tmp_path / "hf", "--source-hf", folder)
    tools("verify", tmp_path / "hf", folder)
    tools("from-hf", folder, tmp_path / "megatron")
    tools("verify", tmp_path / "megatron", tmp_path / "saved")


def save_untrained(rank: int, world_size: int, port: int, model: ModelConfig, folder: Path) -> None:
    actor = make_actor(rank, world_size, port, model, ParallelConfig(tp=2))
    actor.save(folder / "saved", {})
    actor.finish_save(60.0)


def tools(*arguments: object) -> None:
    assert main(list(map(str, arguments))) == 0


def train_part(rank: int, world_size: int, port: int, model: ModelConfig, part: str) -> Any:
    actor = make_actor(
        rank, world_size, port, model, ParallelConfig(tp=2), vision=part, recompute="full"
    )
    return step(actor)


@pytest.mark.gloo
@pytest.mark.slow
def test_a_frozen_part_stays_bit_for_bit(folder: Path) -> None:
    model = ModelConfig(path=str(folder))
    results = run_each(train_part, 2, PARTS, model, timeout_s=300.0)
    for part, ranks in zip(PARTS, results, strict=True):
        for changes in ranks:
            assert changes["text"] > 0
            assert changes["tower"] == 0
            assert (changes["projector"] > 0) == (part == "projector")


def train_factors(
    rank: int, world_size: int, port: int, model: ModelConfig, folder: Path
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the changes of two steps, and how far a resumed actor is from this one."""
    options: dict[str, Any] = {"lora": LoraConfig(rank=4), "router_aux_loss_coef": 0.0}
    make = (rank, world_size, port, model, ParallelConfig())
    actor = make_actor(*make, **options)
    before = copy_weights(actor)
    step(actor)
    actor.save(folder / "saved", {})
    actor.finish_save(60.0)
    resumed = make_actor(*make, **options)
    resumed.load(folder / "saved")
    for each in (actor, resumed):
        step(each)
    return largest_changes(actor, before), largest_changes(resumed, copy_weights(actor))


@pytest.mark.slow
@pytest.mark.gloo
def test_factors_train_the_text_beside_a_frozen_tower(folder: Path, tmp_path: Path) -> None:
    [(changes, resumed)] = run_ranks(train_factors, 1, ModelConfig(path=str(folder)), tmp_path)
    assert changes["text"] > 0 == changes["tower"] == changes["projector"]
    assert max(resumed.values()) == 0


@pytest.mark.gloo
@pytest.mark.slow
def test_bfloat16_scores_are_near_those_of_float32(folder: Path) -> None:
    [exact], [rounded] = run_each(
        score, 1, [ModelConfig(path=str(folder), dtype=d) for d in ("float32", "bfloat16")]
    )
    difference = (exact - rounded).abs()
    assert 0 < difference.mean() < 0.03


def score(rank: int, world_size: int, port: int, model: ModelConfig) -> Tensor:
    scores = make_actor(rank, world_size, port, model, ParallelConfig()).compute_logprobs(
        make_vision_batches()
    )
    assert scores is not None
    return torch.cat([each.logprobs_T for each in scores])
