"""MoonViT computes what transformers' tower of Kimi-K2.5 does with images of one frame."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from mcore_rl.train.vision.tower import MoonViT, turn, turns_of
from mcore_rl.weights.hf.config import read_hf_config
from mcore_rl.weights.models import family_of
from tests.support.tiny_kimi_vl import PIXELS, KimiVl, write_kimi_vl_model

GRIDS_I3 = torch.tensor([[1, 4, 4], [1, 2, 6], [1, 8, 10], [1, 2, 2]])


def fill(tower: MoonViT, folder: Path) -> MoonViT:
    weights = load_file(folder / "model.safetensors")
    prefixes = {"merger.": "multi_modal_projector.", "patch_embed.": "vision_tower.patch_embed."}
    for name, parameter in tower.named_parameters():
        old = next((each for each in prefixes if name.startswith(each)), "")
        new = prefixes.get(old, "vision_tower.encoder.")
        parameter.data.copy_(weights[new + name.removeprefix(old)])
    return tower


def make_tower(folder: Path, *, recompute: bool) -> MoonViT:
    config = read_hf_config(folder)
    tower = MoonViT(config, family_of(config).sizes(config), recompute=recompute)
    return fill(tower, folder)


def make_pixels() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(int(GRIDS_I3.prod(-1).sum()), PIXELS, generator=generator)


def gradients_of(tower: MoonViT) -> dict[str, Tensor]:
    tower(make_pixels(), GRIDS_I3).square().sum().backward()
    return {name: p.grad for name, p in tower.named_parameters() if p.grad is not None}


def test_embeddings_are_those_of_kimi_k25(tmp_path: Path) -> None:
    folder = write_kimi_vl_model(tmp_path)
    oracle: Any = KimiVl(folder)
    pixels_PD = make_pixels()
    with torch.no_grad():
        found_RH = make_tower(folder, recompute=False)(pixels_PD, GRIDS_I3)
        seen = oracle.vision(pixels_PD.unflatten(-1, (3, 14, 14)), GRIDS_I3)
        wanted_RH = oracle.projector(seen.pooler_output)[:, 0]
    torch.testing.assert_close(found_RH, wanted_RH, rtol=0, atol=1e-5)


def test_recomputed_blocks_have_the_same_gradients(tmp_path: Path) -> None:
    folder = write_kimi_vl_model(tmp_path)
    kept, recomputed = (gradients_of(make_tower(folder, recompute=way)) for way in (False, True))
    assert (
        kept.keys()
        == recomputed.keys()
        == dict(make_tower(folder, recompute=False).named_parameters()).keys()
    )
    assert all(torch.equal(kept[name], recomputed[name]) for name in kept)


def test_an_image_does_not_see_its_neighbors(tmp_path: Path) -> None:
    tower = make_tower(write_kimi_vl_model(tmp_path), recompute=False)
    pixels_PD = make_pixels()
    with torch.no_grad():
        together = tower(pixels_PD, GRIDS_I3)
        lens = GRIDS_I3.prod(-1).tolist()
        alone = [
            tower(part, grid[None])
            for part, grid in zip(pixels_PD.split(lens), GRIDS_I3, strict=True)
        ]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-5)


def test_frames_are_refused(tmp_path: Path) -> None:
    tower = make_tower(write_kimi_vl_model(tmp_path), recompute=False)
    with pytest.raises(AssertionError, match="no frames"):
        tower(torch.zeros(8, PIXELS), torch.tensor([[2, 2, 2]]))


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))
def test_scores_depend_on_distances_alone(rows: int, columns: int, fours: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    query, key = torch.randn(2, 1, 1, 4 * fours, generator=generator)
    sides = (rows + 1, columns + 1)
    turns_PF = turns_of(sides, 2 * fours, torch.device("cpu"))
    grid = turns_PF.unflatten(0, sides)

    def score(at: tuple[int, int], other: tuple[int, int]) -> Tensor:
        return (turn(query, grid[at][None]) * turn(key, grid[other][None])).sum()

    corner = score((rows, columns), (rows - 1, columns - 1))
    torch.testing.assert_close(score((1, 1), (0, 0)), corner, rtol=1e-4, atol=1e-4)
