"""Images travel in messages as data: URLs."""

import pytest

from mcore_rl.agents.environments.environment import find_images, make_image_part, read_image_bytes


def test_bytes_come_back_as_they_went() -> None:
    data = bytes(range(256))
    part = make_image_part(data, "jpeg")
    assert part["image_url"]["url"].startswith("data:image/jpeg;base64,")
    assert read_image_bytes(part) == data
    assert read_image_bytes({"type": "image_url", "image_url": part["image_url"]["url"]}) == data


def test_images_are_found_in_order() -> None:
    text = {"type": "text", "text": "and"}
    messages = [
        {"role": "user", "content": "words"},
        {"role": "user", "content": [make_image_part(b"a"), text, make_image_part(b"b")]},
        {"role": "tool", "content": None},
        {"role": "tool", "content": [make_image_part(b"c")]},
    ]
    assert find_images(messages) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("url", ["https://x/y.png", "data:image/png,raw", None, 7])
def test_nothing_is_fetched(url: object) -> None:
    with pytest.raises(ValueError, match="nothing is fetched"):
        read_image_bytes({"type": "image_url", "image_url": {"url": url}})


def test_damaged_base64_is_refused() -> None:
    with pytest.raises(ValueError, match="base64 is damaged"):
        read_image_bytes({"image_url": {"url": "data:image/png;base64,a"}})
