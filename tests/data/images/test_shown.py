"""Videos of rows become ids and pieces that agree and fit whole; a model without them refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.data.images.encoded import BadImageError, EncodedImage
from mcore_rl.data.images.processor import ImageProcessor
from mcore_rl.data.images.prompts import (
    ImagePrompt,
    ImagePrompts,
    ImageRules,
    make_shown_image,
    make_shown_video,
)
from mcore_rl.data.images.video_rule import EncodedVideo
from tests.support.odd_images import (
    PLACEHOLDER,
    encode,
    make_vision_tokenizer,
    noise,
    write_processor,
)

TOKENIZER = make_vision_tokenizer()
PLACEHOLDER_ID = TOKENIZER.convert_tokens_to_ids(PLACEHOLDER)
FRAMES = [encode(noise(40, 24, seed=seed)) for seed in range(5)]
STILL = encode(noise(16, 16))


def encode_messages(messages: list[dict[str, Any]]) -> list[int]:
    return TOKENIZER.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )


def make_prompts(folder: Path, kind: str, **rules: Any) -> ImagePrompts:
    write_processor(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    settings = {"max_prompt_len": 300, "max_pixels": 1 << 20, **rules}
    return ImagePrompts(
        ImageProcessor(folder), encode_messages, PLACEHOLDER_ID, ImageRules(**settings)
    )


def row_of(content: str, videos: list[Any], images: list[Any]) -> dict[str, Any]:
    prompt = [{"role": "user", "content": content}]
    return {"prompt": prompt, "videos": videos, "images": images}


ROW = row_of("<image> in <video>?", [{"video": FRAMES, "fps": 4.0}], [STILL])
MARKED = "<|vision_start|>{}<|vision_end|>"


def text_of(prompt: ImagePrompt) -> str:
    """Return the decoded prompt with the number of placeholders in place of each run of them."""
    text = TOKENIZER.decode(prompt.token_ids)
    for image in prompt.images:
        text = text.replace(PLACEHOLDER * image.num_tokens, str(image.num_tokens), 1)
    return text


def test_a_video_of_qwen2_5_vl_is_one_piece(tmp_path: Path) -> None:
    prompt = make_prompts(tmp_path, "qwen2_5_vl").prompt("row 0", ROW, tmp_path)
    assert prompt is not None
    still, video = prompt.images
    assert text_of(prompt) == f"<|user|>{MARKED.format(4)} in {MARKED.format(45)}?<|assistant|>"
    assert still.clip is None
    assert video.clip is not None and len(video.clip.frames) == 4
    assert video.clip.interval == 4 * 2 / 4.0
    patches = ImageProcessor(tmp_path).patches_of(video)
    assert (patches.grid, patches.interval) == ((3, 6, 10), 2.0)


def test_a_video_of_qwen3_vl_is_an_image_for_each_two_frames(tmp_path: Path) -> None:
    prompt = make_prompts(tmp_path, "qwen3_vl").prompt("row 0", ROW, tmp_path)
    assert prompt is not None
    still, *pieces = prompt.images
    times = ("<0.1 seconds>", "<0.6 seconds>", "<1.0 seconds>")
    tokens = pieces[0].num_tokens
    video = "".join(time + MARKED.format(tokens) for time in times)
    assert text_of(prompt) == f"<|user|>{MARKED.format(4)} in {video}?<|assistant|>"
    assert [piece.data for piece in pieces] == FRAMES[::2]
    assert [piece.clip and piece.clip.frames for piece in pieces] == [
        (FRAMES[1],),
        (FRAMES[3],),
        (),
    ]
    processor = ImageProcessor(tmp_path)
    assert [processor.patches_of(piece).grid[0] for piece in pieces] == [1, 1, 1]
    assert len({piece.digest for piece in (still, *pieces)}) == 4


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "glm4v_moe"])
def test_overlong_videos_are_dropped_shrunk_or_refused(tmp_path: Path, kind: str) -> None:
    frames = [encode(noise(64, 64, seed=seed)) for seed in range(4)]
    row = row_of("<video> and <image>", [frames], [encode(noise(64, 48))])
    whole = make_prompts(tmp_path, kind).prompt("row 0", row, tmp_path)
    assert whole is not None
    limit = len(whole.token_ids) - 1
    dropping = make_prompts(tmp_path, kind, max_prompt_len=limit)
    assert dropping.prompt("row 0", row, tmp_path) is None
    assert dropping.left_out == {"overlong": 1}
    strict = make_prompts(tmp_path, kind, max_prompt_len=limit, overlong="error")
    with pytest.raises(ValueError, match=rf"its prompt has {limit + 1} tokens with 2 images"):
        strict.prompt("row 0", row, tmp_path)
    shrinking = make_prompts(tmp_path, kind, max_prompt_len=limit, overlong="shrink")
    shrunk = shrinking.prompt("row 0", row, tmp_path)
    assert shrunk is not None and len(shrunk.token_ids) <= limit
    assert len(shrunk.images) == len(whole.images)
    processor = ImageProcessor(tmp_path)
    for image in shrunk.images:
        assert len(processor.patches_of(image).pixels_PD) == 4 * image.num_tokens


def test_a_limit_of_tokens_holds_for_each_two_frames(tmp_path: Path) -> None:
    prompt = make_prompts(tmp_path, "qwen2_5_vl", max_tokens=9).prompt("row 0", ROW, tmp_path)
    assert prompt is not None
    assert prompt.images[1].num_tokens == 3 * 6


@pytest.mark.parametrize(("kind", "num_pieces"), [("qwen2_5_vl", 1), ("glm4v_moe", 3)])
def test_pieces_take_the_tokens_of_the_video(tmp_path: Path, kind: str, num_pieces: int) -> None:
    make_prompts(tmp_path, kind)
    frames = tuple(EncodedImage(data, f"frame {k}") for k, data in enumerate(FRAMES))
    video = make_shown_video(EncodedVideo(frames, 2.0, "video"), ImageProcessor(tmp_path), 1 << 20)
    assert video.num_pieces == num_pieces == sum(p["type"] == "image" for p in video.parts)
    for limit in (1, 5, 9, video.most_tokens):
        pieces = video.pieces(limit)
        assert len(pieces) == num_pieces
        assert sum(piece.num_tokens for piece in pieces) == video.num_tokens(limit)


def test_an_image_is_not_shrunk_below_the_least_of_its_processor(tmp_path: Path) -> None:
    make_prompts(tmp_path, "qwen2_5_vl")
    processor = ImageProcessor(tmp_path)
    image = EncodedImage(encode(noise(64, 64)), "image")
    shown = make_shown_image(image, processor, 1 << 20, max_tokens=0)
    assert shown.num_tokens(1) == shown.num_tokens(processor.least_tokens) > 1
    [small] = make_shown_image(image, processor, 1 << 20, max_tokens=1).pieces(1)
    assert (small.num_tokens, small.most_tokens) == (1, 1)


def test_frames_of_unequal_sizes_are_refused(tmp_path: Path) -> None:
    row = row_of("<video>", [[FRAMES[0], STILL]], [])
    message = "row 0, video 0: frame 1 has 16 x 16 pixels, frame 0 40 x 24: give frames of one size"
    with pytest.raises(BadImageError, match=message):
        make_prompts(tmp_path, "qwen2_5_vl").prompt("row 0", row, tmp_path)


def test_a_damaged_frame_is_found_at_the_start(tmp_path: Path) -> None:
    row = row_of("<video>", [[FRAMES[0], FRAMES[1][:-200]]], [])
    with pytest.raises(BadImageError, match="row 0, video 0, frame 1 is damaged"):
        make_prompts(tmp_path, "qwen2_5_vl").prompt("row 0", row, tmp_path)


def test_a_model_without_videos_refuses_them(tmp_path: Path) -> None:
    prompts = make_prompts(tmp_path, "kimi_vl", bad="skip")
    with pytest.raises(ValueError, match="row 0, video 0: the model reads no videos: take another"):
        prompts.prompt("row 0", ROW, tmp_path)
