"""Image tokens and rotary positions are those of transformers, for any sequence of images."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.data.images.places import ImageTokens, split_grids
from tests.support.tiny_vision import END, PLACEHOLDER, START, TEXT, VISION

TOKENS = ImageTokens(PLACEHOLDER, 2)
ONES = torch.ones(99)
GRIDS = st.tuples(st.just(1), st.sampled_from([2, 4, 6]), st.sampled_from([2, 4, 8]))
RUNS = st.lists(st.tuples(st.integers(0, 4), st.none() | GRIDS), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def oracle() -> Any:
    from transformers import Qwen2_5_VLConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    config: Any = Qwen2_5_VLConfig(text_config=TEXT, vision_config=VISION)
    with torch.device("meta"):
        return Qwen2_5_VLModel(config)


@given(RUNS, st.integers(0, 3))
def test_positions_are_those_of_transformers(
    oracle: Any, runs: list[Any], padding_len: int
) -> None:
    ids_T, grids_I3 = make_sequence(runs)
    rotary_3T = TOKENS.rotary(ids_T, grids_I3, len(ids_T) + padding_len, ONES[: len(grids_I3)])
    kinds = (ids_T == PLACEHOLDER).int()[None]
    wanted, _ = oracle.get_rope_index(ids_T[None], kinds, image_grid_thw=grids_I3)
    assert torch.equal(rotary_3T[:, : len(ids_T)], wanted[:, 0])
    assert rotary_3T.shape == (3, len(ids_T) + padding_len)
    if padding_len:
        assert torch.equal(rotary_3T[:, -1], (wanted.max() + padding_len).expand(3))


@given(st.integers(1, 4), st.sampled_from([0.5, 1.0, 4 / 3]), st.integers(0, 3))
def test_positions_of_a_video_are_those_of_transformers(
    oracle: Any, frames: int, seconds: float, text_len: int
) -> None:
    """As long as its time does not exceed its width, behind which transformers goes on."""
    grid = (frames, 4, 40)
    ids_T, grids_I3 = make_sequence([(text_len, grid), (3, (1, 4, 2)), (1, None)])
    rotary_3T = TOKENS.rotary(ids_T, grids_I3, len(ids_T), torch.tensor([4.0 * seconds, 1.0]))
    kinds = (ids_T == PLACEHOLDER).int()
    kinds[: text_len + 2 + frames * 40] *= 2
    wanted, _ = oracle.get_rope_index(
        ids_T[None],
        kinds[None],
        image_grid_thw=grids_I3[1:],
        video_grid_thw=grids_I3[:1],
        second_per_grid_ts=torch.tensor([seconds]),
    )
    assert torch.equal(rotary_3T, wanted[:, 0])


def test_text_goes_on_behind_the_time_of_a_video() -> None:
    ids_T = torch.tensor([5, *[PLACEHOLDER] * 6, 6, 7])
    rotary_3T = TOKENS.rotary(ids_T, torch.tensor([[3, 2, 4]]), 9, torch.tensor([2.5]))
    assert rotary_3T[0].tolist() == [0, 1, 1, 3, 3, 6, 6, 7, 8]
    assert rotary_3T[1].tolist() == [0, *[1] * 6, 7, 8]
    assert rotary_3T[2].tolist() == [0, 1, 2, 1, 2, 1, 2, 7, 8]


@given(RUNS)
def test_rows_number_the_placeholders(runs: list[Any]) -> None:
    ids_T, grids_I3 = make_sequence(runs)
    rows_T = TOKENS.rows(ids_T, grids_I3)
    assert torch.equal(rows_T >= 0, ids_T == PLACEHOLDER)
    assert rows_T[rows_T >= 0].tolist() == list(range(sum(TOKENS.nums_tokens(grids_I3))))


def test_a_placeholder_behind_the_last_image_is_text() -> None:
    ids_T = torch.tensor([5, PLACEHOLDER, PLACEHOLDER])
    assert TOKENS.rows(ids_T, torch.tensor([[1, 2, 2]])).tolist() == [-1, 0, -1]
    assert TOKENS.rotary(ids_T, torch.tensor([[1, 2, 2]]), 3, ONES[:1])[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("ids", [[5, PLACEHOLDER], [PLACEHOLDER, 5, PLACEHOLDER], [5]])
def test_an_image_cut_short_is_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"image 0 .* takes 2 placeholders"):
        TOKENS.rows(torch.tensor(ids), torch.tensor([[1, 2, 4]]))


def test_the_placeholder_comes_from_the_config() -> None:
    config = {
        "image_token_id": 7,
        "vision_config": {"spatial_merge_size": 3},
        "rope_parameters": {"mrope_section": [2, 3, 3]},
    }
    assert ImageTokens.from_config(config) == ImageTokens(7, 3)
    kimi = {"media_placeholder_token_id": 8, "vision_config": {"merge_kernel_size": [4, 4]}}
    assert ImageTokens.from_config(kimi) == ImageTokens(8, 4, three_axes=False)
    with pytest.raises(ValueError, match="image_token_id"):
        ImageTokens.from_config({"vision_config": {}})


def test_positions_of_one_axis_count_images_as_text() -> None:
    tokens = ImageTokens(PLACEHOLDER, 2, three_axes=False)
    ids_T = torch.tensor([5, PLACEHOLDER, PLACEHOLDER, 5])
    rotary_3T = tokens.rotary(ids_T, torch.tensor([[1, 2, 4]]), 6, ONES[:1])
    assert rotary_3T.tolist() == [list(range(6))] * 3


def test_grids_are_split_by_sequence() -> None:
    parts = split_grids(torch.arange(9).reshape(3, 3), (1, 0, 2))
    assert [len(part) for part in parts] == [1, 0, 2]


def make_sequence(runs: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids with each image between its marks, and the grids; at least one token."""
    ids = [3]
    grids = []
    for text_len, grid in runs:
        ids += [5] * text_len
        if grid is not None:
            ids += [START, *[PLACEHOLDER] * (grid[0] * grid[1] * grid[2] // 4), END]
            grids.append(grid)
    return torch.tensor(ids), torch.tensor(grids, dtype=torch.int64).reshape(-1, 3)
