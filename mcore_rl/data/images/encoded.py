"""Finds the images of a row, turns placeholders into message parts, and says how far to shrink.

Images are in verl's `images` column. An entry is bytes, a path, or an object that holds one of
these under `bytes`, `path` or `image`. Paths are relative to the folder of the data file.

    "<video> Which of <image> <image> is in it?"
    --> parts of the video, text, image, text, image, text

An overlong prompt fits if its images are shrunk to a common limit of tokens:

    text 40, images 300 + 20 + 90 tokens, at most 200 in all
    budget of the images: 160  -->  limit 70 tokens each: 70 + 20 + 70
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.data.rows import Row

_URL = re.compile(r"(?!file:)[a-zA-Z][a-zA-Z0-9+.-]*://|data:")
"""How a URL begins, other than that of a file."""
IMAGE = "<image>"
VIDEO = "<video>"
IMAGE_PART = {"type": "image"}
Part = dict[str, str]
"""Text, or the place of an image: {"type": "image"}."""


def limit_that_fits(
    num_tokens: Callable[[int, int], int], num_images: int, budget: int, least: int, most: int
) -> int | None:
    """Return the largest limit of tokens per image at which all images take at most `budget`.

    None if they do not fit even at `least`.

    num_tokens   (image, limit) -> tokens of the image if it is shrunk to `limit` tokens; it does
                 not fall as the limit rises
    most         the limit that shrinks no image
    """

    def fits(limit: int) -> bool:
        return sum(num_tokens(image, limit) for image in range(num_images)) <= budget

    most = max(least, most)
    if fits(most):
        return most
    if not fits(least):
        return None
    low = least
    high = most
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def expand_placeholders(
    token_ids: Sequence[int], placeholder_id: int, counts: Sequence[int]
) -> list[int]:
    """Return token ids in which the i-th placeholder stands `counts[i]` times.

    The number of placeholders must be that of `counts`.
    """
    out: list[int] = []
    remaining = iter(counts)
    for token in token_ids:
        out.extend([token] * (next(remaining) if token == placeholder_id else 1))
    assert next(remaining, None) is None, "more counts than placeholders"
    return out


class BadImageError(ValueError):
    """An image or its placeholder cannot be used; the message names file, row and image."""


@dataclass(frozen=True)
class EncodedImage:
    """An image as its file has it.

    where   place for error messages: file, row and number of the image
    """

    data: bytes
    where: str


def read_encoded_images(
    row: Row, where: str, folder: Path, column: str = "images", max_bytes: int = 64 << 20
) -> list[EncodedImage]:
    """Return the images of a row in order; none if it lacks the column.

    Raises BadImageError for an entry of another kind, a missing file, or more than `max_bytes`
    bytes.
    """
    return [
        read_encoded_image(entry, f"{where}, image {number}", folder, max_bytes)
        for number, entry in enumerate(entries_of(row, column, where, "images"))
    ]


def entries_of(row: Row, column: str, where: str, name: str) -> Sequence[Any]:
    """Return the list in a column; () if the row lacks it.

    Raises BadImageError for anything but a list, which the message calls a list of `name`.
    """
    entries = row.get(column)
    if entries is None:
        return ()
    if not isinstance(entries, Sequence) or isinstance(entries, str | bytes):
        raise BadImageError(f"{where}: `{column}` is {entries!r:.100}, not a list of {name}")
    return entries


def read_encoded_image(entry: Any, place: str, folder: Path, max_bytes: int) -> EncodedImage:
    """Return the image of an entry. Raises BadImageError as `read_encoded_images` does."""
    data = _data(entry, place, folder, max_bytes)
    if len(data) > max_bytes:
        raise BadImageError(
            f"{place} has {len(data)} bytes, {max_bytes} are allowed: shrink it, or remove the row"
        )
    return EncodedImage(data, place)


def _data(entry: Any, place: str, folder: Path, max_bytes: int) -> bytes:
    if isinstance(entry, Mapping):
        for key in ("bytes", "path", "image"):
            if entry.get(key) is not None:
                return _data(entry[key], place, folder, max_bytes)
        for key in ("image_url", "url"):
            value = entry.get(key)
            refuse_url(value.get("url") if isinstance(value, Mapping) else value, place)
        raise BadImageError(f"{place} has none of `bytes`, `path` and `image`: {sorted(entry)}")
    if isinstance(entry, bytes | bytearray | memoryview):
        return bytes(entry)
    if isinstance(entry, str):
        refuse_url(entry, place)
        return _read(folder / entry.removeprefix("file://"), place, max_bytes)
    raise BadImageError(
        f"{place} is a {type(entry).__name__}, not bytes, a path or an object with them"
    )


def refuse_url(entry: Any, place: str) -> None:
    """Raise BadImageError if an entry is a URL, save that of a file."""
    if isinstance(entry, str) and _URL.match(entry):
        raise BadImageError(
            f"{place} is a URL, {entry!r:.100}: nothing is downloaded or decoded from one; save it"
            " as a file and give its path, or give its bytes"
        )


def _read(path: Path, place: str, max_bytes: int) -> bytes:
    """Return at most one byte more than `max_bytes` of a file."""
    try:
        with path.open("rb") as file:
            return file.read(max_bytes + 1)
    except (OSError, ValueError) as error:  # a name with a null character is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise BadImageError(f"{place}: {str(path)!r:.300} cannot be read: {reason}") from error


def placeholders_of(
    messages: Sequence[Mapping[str, Any]], num_images: int, num_videos: int, where: str
) -> list[str]:
    """Return the placeholders in the messages, in order. `<video>` is text in a row without videos.

    Raises BadImageError unless there is one for each image and video.
    """
    found = [
        text
        for message in messages
        for is_mark, text in _split(message.get("content"), num_videos)
        if is_mark
    ]
    for placeholder, wanted, name in ((IMAGE, num_images, "images"), (VIDEO, num_videos, "videos")):
        if (count := found.count(placeholder)) != wanted:
            raise BadImageError(
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
    several turns. Raises BadImageError as `placeholders_of` does.
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
