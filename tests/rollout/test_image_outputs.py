"""SGLang's processors get patches in the form that each of them reads."""

from typing import Any

import torch

from mcore_rl.rollout.image_outputs import ProcessorOutput, choose_output
from mcore_rl.types import Images

QWEN = {
    "model_type": "qwen2_5_vl",
    "image_token_id": 90,
    "vision_config": {"spatial_merge_size": 2},
    "text_config": {"rope_parameters": {"mrope_section": [2, 3, 3]}},
}
GLM = {**QWEN, "model_type": "glm4v_moe", "video_start_token_id": 7, "video_end_token_id": 8}
KIMI = {
    "model_type": "kimi_vl",
    "media_placeholder_token_id": 90,
    "vision_config": {"merge_kernel_size": [2, 2]},
}


def images_of(*grids: tuple[int, int, int], interval: float = 1.0) -> Images:
    grids_I3 = torch.tensor(grids)
    num_patches = int(grids_I3.prod(-1).sum())
    pixels_PD = torch.arange(num_patches * 12.0).reshape(num_patches, 12)
    return Images(pixels_PD, grids_I3, (len(grids),), torch.full((len(grids),), interval))


def output(config: dict[str, Any], ids: list[int], images: Images) -> ProcessorOutput:
    [found] = choose_output(config)({"input_ids": ids}, images)
    assert found["format"] == "processor_output"
    assert found["input_ids"].tolist() == ids
    return found


def test_images_of_qwen_leave_positions_to_sglang() -> None:
    images = images_of((1, 2, 2))
    found = output(QWEN, [5, 90, 6], images)
    assert "mrope_positions" not in found
    assert found["pixel_values"] is images.pixels_PD
    assert found.image_grid_thw is found["image_grid_thw"] is images.grids_I3


def test_a_video_of_qwen_brings_the_positions_of_its_times() -> None:
    found = output(QWEN, [5, 90, 90, 90, 6], images_of((3, 2, 2), interval=1.5))
    assert found["mrope_positions"].tolist() == [
        [0, 1, 2, 4, 5],
        [0, 1, 1, 1, 5],
        [0, 1, 1, 1, 5],
    ]
    assert int(found["mrope_position_delta"]) == 1


def test_each_time_of_a_video_of_qwen_is_an_image_with_its_place() -> None:
    images = images_of((1, 2, 2), (2, 2, 4), (1, 2, 4))
    ids = [90, 5, *[90] * 4, 5, 90, 90]
    found = output(QWEN, ids, images)
    assert found["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 4], [1, 2, 4], [1, 2, 4]]
    assert found["offsets"].tolist() == [[0, 0], [2, 3], [4, 5], [7, 8]]
    assert found["pixel_values"] is images.pixels_PD
    assert images.grids_I3.tolist() == [[1, 2, 2], [2, 2, 4], [1, 2, 4]]


def test_pieces_of_a_video_of_glm_are_videos() -> None:
    """GLM's processors in SGLang 0.5.23 read grids as attributes, and are silent without them."""
    images = images_of((1, 2, 2), (1, 2, 4), (1, 2, 4), (1, 4, 2))
    ids = [90, 5, 7, 90, 90, 1, 90, 90, 1, 8, 90, 90]
    found = output(GLM, ids, images)
    first, one, two, last = images.pixels_PD.split([4, 8, 8, 8])
    assert torch.equal(found["pixel_values"], torch.cat([first, last]))
    assert torch.equal(found["pixel_values_videos"], torch.cat([one, two]))
    assert found.image_grid_thw is found["image_grid_thw"]
    assert found["image_grid_thw"].tolist() == [[1, 2, 2], [1, 4, 2]]
    assert found.video_grid_thw is found["video_grid_thw"]
    assert found["video_grid_thw"].tolist() == [[1, 2, 4], [1, 2, 4]]


def test_glm_gets_one_kind_alone_where_there_is_one() -> None:
    found = output(GLM, [5, 90], images_of((1, 2, 2)))
    assert "video_grid_thw" not in found and found.video_grid_thw is None
    found = output(GLM, [7, 90, 8], images_of((1, 2, 2)))
    assert "image_grid_thw" not in found and found.image_grid_thw is None


def test_moonvit_gets_patches_as_pictures_without_frames() -> None:
    images = images_of((1, 2, 2))
    found = output(KIMI, [90], images)
    assert found["image_grid_hws"].tolist() == [[2, 2]]
    assert found["pixel_values"].shape == (4, 3, 2, 2)
    assert torch.equal(found["pixel_values"].flatten(1), images.pixels_PD)


def test_moonvit_of_kimi_k25_gets_pictures_of_one_frame() -> None:
    images = images_of((1, 2, 2), (1, 4, 2))
    found = output({**KIMI, "model_type": "kimi_k25"}, [90, 5, 90, 90], images)
    assert found["image_grid_thw"].tolist() == [[1, 2, 2], [1, 4, 2]]
    assert "image_grid_hws" not in found
    assert found["pixel_values"].shape == (12, 3, 2, 2)
