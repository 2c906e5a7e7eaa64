"""Counted operations of towers are those that torch counts while transformers runs the same one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.flops import TowerFlops
from tests.support.tiny_glm4v import write_glm4v_model
from tests.support.tiny_kimi_vl import write_kimi_k25_model, write_kimi_vl_model
from tests.support.tiny_qwen3_vl import write_qwen3_vl_model, write_qwen3_vl_moe_model
from tests.support.tiny_vision import batches_of, load_vision_model, write_vision_model

WRITERS: dict[str, Callable[[Path], Path]] = {
    "qwen2_5_vl": write_vision_model,
    "glm4v_moe": write_glm4v_model,
    "kimi_vl": write_kimi_vl_model,
    "kimi_k25": write_kimi_k25_model,
    "qwen3_vl": write_qwen3_vl_model,
    "qwen3_vl_moe": write_qwen3_vl_moe_model,
}
PUBLISHED = {
    "qwen2_5_vl_7b": 0.68e9,
    "kimi_vl_a3b": 0.44e9,
    "kimi_k25": 0.47e9,
}
"""Parameters of the tower, its projector included."""


def tower_of(folder: str) -> TowerFlops:
    flops = TowerFlops.from_facts(ModelFacts.read(f"recipes/model/{folder}"))
    assert flops is not None
    return flops


def run_tower(model: Any, pixels: torch.Tensor, grids_I3: torch.Tensor) -> None:
    if model.config.model_type in ("kimi_vl", "kimi_k25"):
        patches = pixels.unflatten(-1, (3, 14, 14))
        model.projector(model.vision(patches, grids_I3).pooler_output)
        return
    model.model.visual(pixels, grid_thw=grids_I3)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_forward_pass_has_the_operations_that_torch_counts(kind: str, tmp_path: Path) -> None:
    folder = WRITERS[kind](tmp_path / "model")
    model = load_vision_model(folder)
    tower = model.vision if kind.startswith("kimi") else model.model.visual
    tower.set_attn_implementation("eager")
    flops = TowerFlops.from_facts(ModelFacts.read(folder))
    assert flops is not None
    for batch in batches_of(folder)[:2]:
        assert batch.images is not None
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            run_tower(model, batch.images.pixels_PD, batch.images.grids_I3)
        assert flops.count_forward(batch.images.grids_I3.tolist()) == counter.get_total_flops()


def test_a_model_of_text_has_no_tower() -> None:
    assert TowerFlops.from_facts(ModelFacts.read("recipes/model/qwen3_30b_a3b")) is None


def test_what_is_not_trained_has_no_backward_pass() -> None:
    flops = tower_of("qwen3_vl_8b")
    grids = [(1, 8, 12), (1, 4, 4)]
    forward = flops.count_forward(grids)
    assert flops.count_training(grids, "none") == forward
    assert flops.count_training(grids, "projector") == forward + 2 * flops.projectors(grids)
    assert flops.count_training(grids, "all") == 3 * forward


@pytest.mark.parametrize("folder", PUBLISHED)
def test_a_published_tower_has_two_operations_per_parameter(folder: str) -> None:
    """The image is small, so pairs of patches are few; positions are looked up."""
    flops = tower_of(folder)
    weights = flops.per_patch + flops.per_token
    assert weights / 2 == pytest.approx(PUBLISHED[folder], rel=0.06)


@given(st.integers(1, 40), st.integers(1, 40))
def test_windows_save_pairs(rows: int, columns: int) -> None:
    """Windows of 8 patches a side: no pair is between two of them."""
    flops = tower_of("qwen2_5_vl_7b")
    grid = (1, 2 * rows, 2 * columns)
    pairs = sum((i // 8 == k // 8) for i in range(2 * rows) for k in range(2 * rows)) * sum(
        (i // 8 == k // 8) for i in range(2 * columns) for k in range(2 * columns)
    )
    num_patches = 4 * rows * columns
    wanted = flops.per_patch * num_patches + flops.per_pair * num_patches**2
    assert flops.blocks([grid]) == pytest.approx(wanted + flops.per_window_pair * pairs)


@given(st.integers(1, 5000))
def test_a_square_image_has_the_tokens_that_were_asked_for(num_tokens: int) -> None:
    frames, rows, columns = tower_of("qwen3_vl_8b").square(num_tokens)
    assert frames * rows * columns == 4 * num_tokens
    assert rows <= columns and rows % 2 == columns % 2 == 0
