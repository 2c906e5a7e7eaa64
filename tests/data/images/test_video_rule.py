"""Sizes, times and texts of videos are those of transformers' processors for the same frames."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.data.images.decode import ImageSize
from mcore_rl.data.images.video_rule import FORMS, VideoRule, read_video_rule

OWN = {"patch_size": 14, "image_mean": [0.5, 0.5, 0.5]}
UNLIMITED = 1 << 30


def rule_of(kind: str, shortest: int = 4000, longest: int = 300_000, side: int = 28) -> VideoRule:
    return VideoRule(FORMS[kind], side, 2, shortest, longest, 2.0)


def transformers_size(kind: str, frames: int, height: int, width: int, rule: VideoRule) -> Any:
    limits = {"factor": rule.side, "min_pixels": rule.shortest, "max_pixels": rule.longest}
    if kind == "qwen2_5_vl":
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        return smart_resize(height, width, **limits)
    if kind == "glm4v_moe":
        from transformers.models.glm4v.video_processing_glm4v import smart_resize
    else:
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    return smart_resize(frames, height, width, 2, **limits)


@given(
    st.sampled_from(sorted(FORMS)),
    st.integers(1, 40).map(lambda pairs: 2 * pairs),
    st.integers(4, 700),
    st.integers(4, 700),
)
def test_sizes_are_those_of_transformers(kind: str, frames: int, height: int, width: int) -> None:
    rule = rule_of(kind)
    found = rule.frame_size(ImageSize(width, height), frames, UNLIMITED)
    wanted = transformers_size(kind, frames, height, width, rule)
    assert (found.height, found.width) == wanted
    same = rule.frame_size(ImageSize(width, height), frames, rule.most_tokens(frames))
    assert same == found


@given(st.sampled_from(sorted(FORMS)), st.integers(1, 9), st.integers(1, 60))
def test_frames_are_shrunk_to_the_limit_or_to_the_least(kind: str, frames: int, limit: int) -> None:
    rule = rule_of(kind)
    size = ImageSize(400, 300)
    tokens = rule.tokens(size, frames, limit)
    assert tokens <= max(limit, rule.shortest // rule.side**2 + 1)
    assert tokens <= rule.tokens(size, frames, limit + 1)


def test_an_odd_frame_is_counted_twice() -> None:
    rule = rule_of("qwen3_vl")
    assert (rule.num_patches(5), rule.num_patches(6)) == (3, 3)
    size = ImageSize(400, 300)
    assert rule.frame_size(size, 5, UNLIMITED) == rule.frame_size(size, 6, UNLIMITED)


def text_of(rule: VideoRule, frames: int, fps: float, image: str) -> str:
    parts = rule.parts(frames, fps)
    return "".join(part["text"] if part["type"] == "text" else image for part in parts)


TIMES = [(4, 2.0), (5, 2.0), (8, 0.7), (1, 1.0), (12, 3.0)]


def video_inputs(frames: int, fps: float) -> dict[str, Any]:
    """The result of a video processor of transformers, 3 tokens for each pair of frames."""
    import torch
    from transformers.video_utils import VideoMetadata

    indices = list(range(frames)) + [frames - 1] * (frames % 2)
    metadata = VideoMetadata(total_num_frames=frames, fps=fps, frames_indices=indices)
    grid = torch.tensor([[(frames + 1) // 2, 2, 6]])
    return {"video_grid_thw": grid, "video_metadata": [metadata]}


@pytest.mark.parametrize(("frames", "fps"), TIMES)
def test_texts_of_qwen3_vl_are_those_of_its_processor(frames: int, fps: float) -> None:
    from transformers import Qwen3VLProcessor

    processor: Any = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token="[",
        video_token="v",
        vision_end_token="]",
        _calculate_timestamps=lambda *a: Qwen3VLProcessor._calculate_timestamps(processor, *a),
    )
    wanted = Qwen3VLProcessor.replace_video_token(processor, video_inputs(frames, fps), 0)
    assert text_of(rule_of("qwen3_vl_moe"), frames, fps, "[vvv]") == wanted


@pytest.mark.parametrize(("frames", "fps"), TIMES)
def test_texts_of_glm_are_those_of_its_processor(frames: int, fps: float) -> None:
    from transformers.models.glm4v.processing_glm4v import Glm4vProcessor

    processor: Any = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2),
        image_token="v",
        replace_frame_token_id=lambda *a, **k: Glm4vProcessor.replace_frame_token_id(
            processor, *a, **k
        ),
    )
    wanted = Glm4vProcessor.replace_video_token(processor, video_inputs(frames, fps), 0)
    found = text_of(rule_of("glm4v_moe"), frames, fps, "<|begin_of_image|>vvv<|end_of_image|>")
    assert found == f"<|begin_of_video|>{wanted}<|end_of_video|>"


def test_a_video_of_qwen2_5_vl_is_one_image_in_seconds() -> None:
    rule = rule_of("qwen2_5_vl")
    assert rule.parts(7, 2.0) == [{"type": "image"}]
    assert rule.interval(2.0) == 2.0
    assert rule.interval(8.0) == 0.5


def write(folder: Path, name: str, **content: Any) -> None:
    (folder / name).write_text(json.dumps(content))


def test_settings_come_from_the_first_file_that_has_them(tmp_path: Path) -> None:
    write(tmp_path, "config.json", model_type="qwen2_5_vl", vision_config={"tokens_per_second": 2})
    write(tmp_path, "preprocessor_config.json", min_pixels=3136, max_pixels=12845056)
    rule = read_video_rule(tmp_path, 28, 2, OWN)
    assert rule == VideoRule(FORMS["qwen2_5_vl"], 28, 2, 3136, 12845056, 2)
    size = {"shortest_edge": 4096, "longest_edge": 25165824}
    write(tmp_path, "video_preprocessor_config.json", size=size)
    rule = read_video_rule(tmp_path, 28, 2, OWN)
    assert rule is not None and (rule.shortest, rule.longest) == (4096, 25165824)
    write(tmp_path, "processor_config.json", video_processor={"size": {"longest_edge": 5}})
    rule = read_video_rule(tmp_path, 28, 2, OWN)
    assert rule is not None and (rule.shortest, rule.longest) == (128 * 28**2, 5)


def test_other_patches_for_videos_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "config.json", model_type="qwen3_vl")
    write(tmp_path, "video_preprocessor_config.json", patch_size=16)
    with pytest.raises(ValueError, match=r"video_preprocessor_config.json: patch_size=16, but 14"):
        read_video_rule(tmp_path, 28, 2, OWN)


def test_models_without_videos_have_no_rule(tmp_path: Path) -> None:
    assert read_video_rule(tmp_path, 28, 2, OWN) is None
    write(tmp_path, "config.json", model_type="kimi_vl")
    assert read_video_rule(tmp_path, 28, 2, OWN) is None
