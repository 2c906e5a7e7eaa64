"""Placeholders become parts of messages, one for each image and as many as a video has pieces."""

import pytest

from mcore_rl.data.images.encoded import BadImageError, placeholders_of, with_image_parts

IMAGE = {"type": "image"}


def test_placeholders_become_parts_in_several_turns() -> None:
    messages = [
        {"role": "user", "content": "<image>what?"},
        {"role": "assistant", "content": "a cat"},
        {"role": "user", "content": "and <image><image>"},
    ]
    parts = with_image_parts(messages, 3, "row 0")
    assert parts[0]["content"] == [{"type": "image"}, {"type": "text", "text": "what?"}]
    assert parts[1] == messages[1]
    assert [part["type"] for part in parts[2]["content"]] == ["text", "image", "image"]


@pytest.mark.parametrize("num_images", [0, 2])
def test_placeholders_and_images_must_agree(num_images: int) -> None:
    with pytest.raises(BadImageError, match=f"row 0 has {num_images} images and 1 placeholders"):
        with_image_parts([{"role": "user", "content": "<image>?"}], num_images, "row 0")


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def test_videos_become_their_parts_in_order() -> None:
    messages = [
        {"role": "user", "content": "<video>Is <image> in it?"},
        {"role": "user", "content": "<video>"},
    ]
    assert placeholders_of(messages, 1, 2, "row 0") == ["<video>", "<image>", "<video>"]
    videos = [[text("0"), IMAGE, text("1"), IMAGE], [IMAGE]]
    first, second = with_image_parts(messages, 1, "row 0", videos)
    assert first["content"] == [*videos[0], text("Is "), IMAGE, text(" in it?")]
    assert second["content"] == videos[1]


def test_a_video_is_text_in_a_row_without_videos() -> None:
    messages = [
        {"role": "user", "content": "<video>"},
        {"role": "user", "content": "<video><image>"},
    ]
    assert placeholders_of(messages, 1, 0, "row 0") == ["<image>"]
    first, second = with_image_parts(messages, 1, "row 0")
    assert first == messages[0]
    assert second["content"] == [text("<video>"), IMAGE]


@pytest.mark.parametrize("num_videos", [1, 3])
def test_placeholders_and_videos_must_agree(num_videos: int) -> None:
    messages = [{"role": "user", "content": "<video> and <video>"}]
    with pytest.raises(
        BadImageError, match=f"row 0 has {num_videos} videos and 2 placeholders <video>"
    ):
        with_image_parts(messages, 0, "row 0", [[IMAGE]] * num_videos)
