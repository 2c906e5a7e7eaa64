"""Critics that see images: values of a twin with a tower, equal in every layout; freezing, resume.

The oracle is transformers' model of the same files, whose output layer gives hidden states.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mcore_rl.algo.values import value_loss
from mcore_rl.config import ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from mcore_rl.train.critic import CriticModel
from mcore_rl.train.runtime import init_distributed
from mcore_rl.types import StepStats, TrainBatch
from mcore_rl.weights.models.value_head import SCORE
from tests.support.distributed import run_each, run_ranks
from tests.support.gradients import boxed_gradients, check_gradients, whole_gradients
from tests.support.tiny_glm4v import write_glm4v_model
from tests.support.tiny_kimi_vl import write_kimi_k25_model, write_kimi_vl_model
from tests.support.tiny_qwen3_vl import (
    write_qwen3_5_model,
    write_qwen3_5_moe_model,
    write_qwen3_vl_model,
    write_qwen3_vl_moe_model,
)
from tests.support.tiny_training import my_batches
from tests.support.tiny_vision import (
    batches_of,
    load_vision_model,
    num_tokens,
    split_batch,
    write_vision_model,
)

pytestmark = pytest.mark.gloo
Layout = dict[str, Any]
STAGES: Layout = {"pp": 2, "stage_layers": [3, 1]}
WRITERS: dict[str, Callable[..., Path]] = {
    "qwen2_5_vl": partial(write_vision_model, tie_word_embeddings=True),
    "glm4v_moe": write_glm4v_model,
    "qwen3_vl": write_qwen3_vl_model,
    "qwen3_vl_moe": write_qwen3_vl_moe_model,
    "qwen3_5": write_qwen3_5_model,
    "qwen3_5_moe": write_qwen3_5_moe_model,
    "kimi_vl": write_kimi_vl_model,
    "kimi_k25": write_kimi_k25_model,
}
SLOW = pytest.mark.slow
CASES = [
    pytest.param("qwen2_5_vl", [{"tp": 2}, {"pp": 2}], id="qwen2_5_vl", marks=SLOW),
    pytest.param("qwen2_5_vl", [{"cp": 2}, {"dp": 2}], id="qwen2_5_vl-others", marks=SLOW),
    pytest.param("glm4v_moe", [{"tp": 2, "ep": 2}, {"pp": 2}], id="glm4v_moe", marks=SLOW),
    pytest.param("qwen3_vl", [{"tp": 2}, STAGES], id="qwen3_vl", marks=SLOW),
    pytest.param("qwen3_vl_moe", [{"tp": 2, "ep": 2}, STAGES], id="qwen3_vl_moe", marks=SLOW),
    pytest.param("qwen3_5", [{"tp": 2}, {"pp": 2}], id="qwen3_5", marks=SLOW),
    pytest.param("qwen3_5_moe", [{"tp": 2, "ep": 2}, {"pp": 2}], id="qwen3_5_moe", marks=SLOW),
    pytest.param("kimi_vl", [{"tp": 2, "ep": 2}, {"pp": 2}], id="kimi_vl", marks=SLOW),
    pytest.param("kimi_k25", [{"tp": 2, "ep": 2}, {"pp": 2}], id="kimi_k25", marks=SLOW),
]
LOSS = partial(value_loss, clip=0.2)


def batches(folder: str) -> list[TrainBatch]:
    return [
        replace(b, returns_T=b.advantages_T, values_T=torch.zeros(sum(b.lens_N)))
        for b in batches_of(folder)
    ]


def make_critic(
    rank: int, world_size: int, port: int, path: str, layout: Layout, vision: Any = "all"
) -> CriticModel:
    parallel = ParallelConfig(**layout)
    init_distributed(rank, world_size, "127.0.0.1", port, parallel, seed=0, timeout_s=60)
    train = TrainConfig(router_aux_loss_coef=0.0, vision=vision)
    optimizer = OptimizerConfig(lr=1e-3, clip_grad=0.0)
    return CriticModel(ModelConfig(path=path), parallel, train, optimizer, 6, seed=0)


def step(critic: CriticModel, folder: str) -> StepStats | None:
    """Take a step; the first one moves only the value head, since it starts at 0."""
    whole = batches(folder)
    return critic.train_step(my_batches(whole), LOSS, num_tokens=num_tokens(whole))


def learn(rank: int, world_size: int, port: int, path: str, layout: Layout) -> dict[str, Any]:
    """Take two steps and export; return values before and after, stats and last gradients."""
    critic = make_critic(rank, world_size, port, path, layout)
    before = critic.compute_values(my_batches(batches(path)))
    stats = [step(critic, path), step(critic, path)]
    gradients = boxed_gradients(critic)
    name = "-".join(f"{key}{value}" for key, value in layout.items()) or "whole"
    critic.export_hf(Path(path).parent / f"critic-{name}")
    after = critic.compute_values(my_batches(batches(path)))
    return {"before": before, "stats": stats, "gradients": gradients, "after": after}


@pytest.fixture(scope="module")
def singles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Return a model directory, and what one process reported of its critic."""

    @cache
    def of_kind(kind: str) -> tuple[Path, Any]:
        folder = WRITERS[kind](tmp_path_factory.mktemp(kind) / "model")
        return folder, run_ranks(learn, 1, str(folder), {})[0]

    return of_kind


Singles = Callable[[str], tuple[Path, Any]]


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k == "qwen2_5_vl" else SLOW) for k in WRITERS]
)
def test_values_and_export_are_those_of_transformers(singles: Singles, kind: str) -> None:
    folder, one_process = singles(kind)
    assert all(not values.any() for values in one_process["before"])
    export = folder.parent / "critic-whole"
    config = json.loads((export / "config.json").read_text())
    [architecture] = config["architectures"]
    assert architecture.endswith("ForSequenceClassification") and config["id2label"] == {
        "0": "value"
    }
    wanted = transformers_values(export, folder)
    assert max(float(values.abs().max()) for values in wanted) > 1e-3
    for got, want in zip(one_process["after"], wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "layouts"), CASES)
def test_layouts_agree_with_one_process(singles: Singles, kind: str, layouts: list[Layout]) -> None:
    folder, one_process = singles(kind)
    wanted = whole_gradients(one_process["gradients"])
    assert max(float(wanted[name].abs().max()) for name in tower_names(wanted)) > 0
    per_layout = run_each(learn, 2, layouts, str(folder), timeout_s=300.0)
    # run_each appends the case to the arguments, so it is the layout of `learn`.
    for layout, ranks in zip(layouts, per_layout, strict=True):
        check_gradients([rank["gradients"] for rank in ranks], wanted, layout)
        owners = [rank for rank in ranks if rank["after"] is not None]
        assert len(owners) == layout.get("dp", 1), layout
        for dp, owner in enumerate(owners):
            for got, want in zip(owner["stats"], one_process["stats"], strict=True):
                assert got.loss == pytest.approx(want.loss, abs=1e-6), layout
                assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-5), layout
            expected = one_process["after"][dp :: len(owners)]
            for got, want in zip(owner["after"], expected, strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def start_again(rank: int, world_size: int, port: int, path: str, folder: str) -> list[Any]:
    """Train a part of the tower from an exported critic; resume its checkpoint in another layout.

    Returns values at first, those saved and resumed, stats of the steps behind them, and which
    parts of the model moved.
    """
    critic = make_critic(rank, world_size, port, path, {"tp": 2}, vision="projector")
    weights = {name: value.clone() for name, value in critic.weight_layout()[1].items()}
    first = critic.compute_values(my_batches(batches(path)))
    step(critic, path)
    moved = {
        "projector" if ".merger." in name else "tower" if ".visual." in f".{name}" else "text"
        for name, value in critic.weight_layout()[1].items()
        if not torch.equal(value, weights[name])
    }
    critic.save(Path(folder), {"step": 7})
    critic.finish_save()
    saved = critic.compute_values(my_batches(batches(path)))
    stats = step(critic, path)
    critic = make_critic(rank, world_size, port, path, {"pp": 2}, vision="projector")
    extra = critic.load(Path(folder))
    resumed = critic.compute_values(my_batches(batches(path)))
    return [first, saved, stats, moved, resumed, step(critic, path), extra]


@pytest.mark.slow
def test_a_frozen_tower_and_a_resumed_critic(singles: Singles, tmp_path: Path) -> None:
    folder, one_process = singles("qwen2_5_vl")
    export = str(folder.parent / "critic-whole")
    results = run_ranks(start_again, 2, export, str(tmp_path / "step"), timeout_s=300.0)
    first, saved, stats, moved, *_ = results[0]
    *_, resumed, next_stats, extra = results[1]
    assert moved == {"text", "projector"}
    assert extra == {"step": 7}
    for got, want in zip(first, one_process["after"], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    for got, want in zip(resumed, saved, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert next_stats.loss == pytest.approx(stats.loss, rel=1e-5)


def tower_names(tensors: dict[str, Tensor]) -> list[str]:
    names = [name for name in tensors if name.startswith(("visual.", "model.visual.", "vision_"))]
    assert names
    return names


def transformers_values(export: Path, folder: Path) -> list[Tensor]:
    """Return the values of all tokens: the model's at the preceding token, at the first that of the
    whole sequence.
    """
    model = load_vision_model(export)
    getattr(model, "text", model).lm_head = nn.Identity()
    files = [load_file(file) for file in export.glob("*.safetensors")]
    [score_1H] = [tensors[SCORE] for tensors in files if SCORE in tensors]
    values = []
    for batch in batches_of(folder):
        parts = []
        for ids_T, images in split_batch(batch):
            kinds = (ids_T == model.config.image_token_id).int()[None]
            more = {"mm_token_type_ids": kinds, **images} if images else {}
            with torch.no_grad():
                hidden_TH = model(ids_T[None], **more).logits[0]
            parts.append((hidden_TH @ score_1H[0]).roll(1))
        values.append(torch.cat(parts))
    return values
