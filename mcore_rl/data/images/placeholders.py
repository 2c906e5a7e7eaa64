"""Turns `<image>` and `<video>` in chat messages into parts, as chat templates ask.

"<video> Which of <image> <image> is in it?"
--> parts of the video, text, image, text, image, text
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mcore_rl.data.images.encoded import BadImage

IMAGE = "<image>"
VIDEO = "<video>"
IMAGE_PART = {"type": "image"}
Part = dict[str, str]
"""Text, or the place of an image: {"type": "image"}."""


def placeholders_of(
    messages: Sequence[Mapping[str, Any]], num_images: int, num_videos: int, where: str
) -> list[str]:
    """Return the placeholders in the messages, in order. `<video>` is text in a row without videos.

    Raises BadImage unless there is one for each image and video.
    """
    found = [
        text
        for message in messages
        for is_mark, text in _split(message.get("content"), num_videos)
        if is_mark
    ]
    for placeholder, wanted, name in ((IMAGE, num_images, "images"), (VIDEO, num_videos, "videos")):
        if (count := found.count(placeholder)) != wanted:
            raise BadImage(
                f"{where} has {wanted} {name} and {count} placeholders {placeholder} in its"
                " messages: give one for each"
            )
    return found


def with_image_parts(
    messages: Sequence[Mapping[str, Any]],
    num_images: int,
    where: str,
    videos: Sequence[Sequence[Part]] = (),
) -> list[dict[str, Any]]:
    """Return chat messages in which placeholders are parts of kind image, and videos their parts.

    Messages without a placeholder are left as they are. Images and videos may be spread over
    several turns. Raises BadImage as `placeholders_of` does.
    """
    placeholders_of(messages, num_images, len(videos), where)
    remaining = iter(videos)
    out = []
    for message in messages:
        texts = list(_split(message.get("content"), len(videos)))
        if any(is_mark for is_mark, _ in texts):
            message = {**message, "content": list(_parts(texts, remaining))}
        out.append(dict(message))
    return out


def _split(content: Any, num_videos: int) -> Iterator[tuple[bool, str]]:
    """Yield what a text consists of, and whether it is a placeholder."""
    if not isinstance(content, str):
        return
    marks = f"({IMAGE}|{VIDEO})" if num_videos else f"({IMAGE})"
    for number, text in enumerate(re.split(marks, content)):
        if text:
            yield number % 2 == 1, text


def _parts(texts: Sequence[tuple[bool, str]], videos: Iterator[Sequence[Part]]) -> Iterator[Part]:
    for is_mark, text in texts:
        if not is_mark:
            yield {"type": "text", "text": text}
        elif text == IMAGE:
            yield dict(IMAGE_PART)
        else:
            yield from (dict(part) for part in next(videos))
