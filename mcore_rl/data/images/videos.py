"""Finds the videos of a row in verl's `videos` column: lists of frames.

An entry is a list of frames, or an object that holds one under `video`, with the frames per second
under `fps` or `sample_fps`. A frame is what an entry of `images` may be. Files of videos are not
decoded: Pillow has no decoder for them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from mcore_rl.data.images.encoded import (
    BadImage,
    EncodedImage,
    encoded_image,
    entries_of,
    refuse_url,
)
from mcore_rl.data.rows import Row

FPS = 2.0
"""Frames per second of a list that does not tell them, as in qwen_vl_utils."""
RATES = ("sample_fps", "fps")
KNOWN = {"type", "video", *RATES}
REMEDY = (
    "extract its frames, for example with `ffmpeg -i FILE -vf fps=2 frames/%05d.jpg`, and list"
    " their paths"
)


@dataclass(frozen=True)
class EncodedVideo:
    """The frames of a video as the row has them.

    where   place for error messages: file, row and number of the video
    """

    frames: tuple[EncodedImage, ...]
    fps: float
    where: str


def encoded_videos(
    row: Row, where: str, folder: Path, column: str = "videos", max_bytes: int = 64 << 20
) -> list[EncodedVideo]:
    """Return the videos of a row in order; none if it lacks the column.

    Raises BadImage for an entry of another kind, a file of a video, or a frame that cannot be read
    or has more than `max_bytes` bytes.
    """
    return [
        _video(entry, f"{where}, video {number}", folder, max_bytes)
        for number, entry in enumerate(entries_of(row, column, where, "videos"))
    ]


def _video(entry: Any, place: str, folder: Path, max_bytes: int) -> EncodedVideo:
    settings: dict[str, Any] = {}
    frames = entry
    if isinstance(entry, Mapping):
        settings = {key: value for key, value in entry.items() if value is not None}
        frames = settings.get("video")
        if unknown := sorted(set(settings) - KNOWN):
            raise BadImage(
                f"{place} has {unknown}, which are not read: give `video` as a list of the frames"
                " to be shown, and their `fps`; data.images.max_tokens bounds their size"
            )
    refuse_url(frames, place)
    if isinstance(frames, str | bytes | bytearray | memoryview):
        named = f" {frames!r:.300}" if isinstance(frames, str) else ""
        raise BadImage(f"{place} is a file{named}, which is not decoded: {REMEDY}")
    if not isinstance(frames, Sequence) or not frames:
        raise BadImage(f"{place} is {frames!r:.100}, not a list of frames: {REMEDY}")
    encoded = tuple(
        encoded_image(frame, f"{place}, frame {number}", folder, max_bytes)
        for number, frame in enumerate(frames)
    )
    return EncodedVideo(encoded, _fps(settings, place), place)


def _fps(settings: Mapping[str, Any], place: str) -> float:
    name = next((name for name in RATES if name in settings), None)
    if name is None:
        return FPS
    value = settings[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not isfinite(value) or value <= 0:
        raise BadImage(f"{place} has {name}={value!r:.100}: give the frames per second, above 0")
    return float(value)
