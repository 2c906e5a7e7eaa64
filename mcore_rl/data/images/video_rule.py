"""Finds the videos of a row, and says how a family of models reads them.

Videos are in verl's `videos` column. An entry is a list of frames, or an object that holds one
under `video`, with the frames per second under `fps` or `sample_fps`. A frame is what an entry of
`images` may be. Files of videos are not decoded: Pillow has no decoder for them.

    frames 0 1 2 3 4 --> the last one twice --> pairs 0 1 | 2 3 | 4 4, all resized to one size

    Qwen2.5-VL   one image of three patches along time, which are `interval` positions apart
    Qwen3-VL     <0.2 seconds> image  <1.2 seconds> image  <2.0 seconds> image
    GLM-4.5V     <|begin_of_video|> image 0  image 1  image 2 <|end_of_video|>

"Image" is what the chat template renders for an image, whose placeholder stands for a piece of a
video. The models' own processors write the placeholder of videos there (but for GLM-4.5V's), and
its embedding is replaced as well.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, sqrt
from pathlib import Path
from typing import Any

from mcore_rl.data.images.decode import ImageSize
from mcore_rl.data.images.encoded import (
    IMAGE_PART,
    BadImageError,
    EncodedImage,
    Part,
    entries_of,
    read_encoded_image,
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
SETTINGS = (
    ("processor_config.json", "video_processor"),
    ("video_preprocessor_config.json", None),
    ("preprocessor_config.json", None),
)
"""Files that may have the settings of a video processor, under which key; the first one counts."""
TOKENS_PER_SECOND = 4
"""Positions per second of Qwen2.5-VL if its vision_config does not give them."""


@dataclass(frozen=True)
class EncodedVideo:
    """The frames of a video as the row has them.

    where   place for error messages: file, row and number of the video
    """

    frames: tuple[EncodedImage, ...]
    fps: float
    where: str


def read_encoded_videos(
    row: Row, where: str, folder: Path, column: str = "videos", max_bytes: int = 64 << 20
) -> list[EncodedVideo]:
    """Return the videos of a row in order; none if it lacks the column.

    Raises BadImageError for an entry of another kind, a file of a video, or a frame that cannot be
    read or has more than `max_bytes` bytes.
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
            raise BadImageError(
                f"{place} has {unknown}, which are not read: give `video` as a list of the frames"
                " to be shown, and their `fps`; data.images.max_tokens bounds their size"
            )
    refuse_url(frames, place)
    if isinstance(frames, str | bytes | bytearray | memoryview):
        named = f" {frames!r:.300}" if isinstance(frames, str) else ""
        raise BadImageError(f"{place} is a file{named}, which is not decoded: {REMEDY}")
    if not isinstance(frames, Sequence) or not frames:
        raise BadImageError(f"{place} is {frames!r:.100}, not a list of frames: {REMEDY}")
    encoded = tuple(
        read_encoded_image(frame, f"{place}, frame {number}", folder, max_bytes)
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
        raise BadImageError(
            f"{place} has {name}={value!r:.100}: give the frames per second, above 0"
        )
    return float(value)


@dataclass(frozen=True)
class VideoForm:
    """How the models of a family read videos.

    parts         (time of each piece in seconds) -> parts of a message, an image for each piece
    is_whole      a video is one piece
    of_all        limits of pixels hold for all frames together, else for each
    shortest      least pixels, if the settings do not tell them
    longest       most pixels, likewise
    """

    parts: Callable[[Sequence[tuple[float, float]]], list[Part]]
    is_whole: bool
    of_all: bool
    shortest: int
    longest: int


def _whole(times: Sequence[tuple[float, float]]) -> list[Part]:
    return [IMAGE_PART]


def _stamp_before(times: Sequence[tuple[float, float]]) -> list[Part]:
    parts: list[Part] = []
    for first, last in times:
        parts += [_text(f"<{(first + last) / 2:.1f} seconds>"), IMAGE_PART]
    return parts


def _stamp_behind(times: Sequence[tuple[float, float]]) -> list[Part]:
    parts = [_text("<|begin_of_video|>")]
    for first, _ in times:
        parts += [IMAGE_PART, _text(str(int(first)))]
    return [*parts, _text("<|end_of_video|>")]


def _text(text: str) -> Part:
    return {"type": "text", "text": text}


QWEN3 = VideoForm(_stamp_before, False, True, 128 * 32**2, 768 * 32**2)
FORMS = {
    "qwen2_5_vl": VideoForm(_whole, True, False, 128 * 28**2, 768 * 28**2),
    "qwen3_vl": QWEN3,
    "qwen3_vl_moe": QWEN3,
    "qwen3_5": QWEN3,
    "qwen3_5_moe": QWEN3,
    "glm4v_moe": VideoForm(_stamp_behind, False, True, 112**2, 60_000 * 28**2),
}
"""model_type -> how it reads videos. Numbers of pixels are those of transformers' classes."""


@dataclass(frozen=True)
class VideoRule:
    """Decides how a video of a model becomes pieces.

    side        pixels along a side of a token
    depth       frames of a patch
    shortest    least pixels, see VideoForm.of_all
    longest     most pixels, likewise
    per_second  rotary positions of a second
    """

    form: VideoForm
    side: int
    depth: int
    shortest: int
    longest: int
    per_second: float

    def num_patches(self, num_frames: int) -> int:
        """Return the patches along time; the last frame is repeated to fill the last of them."""
        return ceil(num_frames / self.depth)

    def parts(self, num_frames: int, fps: float) -> list[Part]:
        """Return the parts of a message that show a video."""
        last = num_frames - 1
        starts = range(0, self.num_patches(num_frames) * self.depth, self.depth)
        times = [(i / fps, min(i + self.depth - 1, last) / fps) for i in starts]
        return self.form.parts(times)

    def interval(self, fps: float) -> float:
        """Return the rotary positions from one patch to the next along time."""
        return self.per_second * self.depth / fps

    def most_tokens(self, num_frames: int) -> int:
        """Return the tokens of a patch's frames that shrink none."""
        return ceil(self._limits(num_frames)[1] / self.side**2)

    def tokens(self, size: ImageSize, num_frames: int, most_tokens: int) -> int:
        """Return the tokens of a patch's frames, which are shrunk to `most_tokens`."""
        shown = self.frame_size(size, num_frames, most_tokens)
        return shown.height * shown.width // self.side**2

    def frame_size(self, size: ImageSize, num_frames: int, most_tokens: int) -> ImageSize:
        """Return the size of each frame, multiples of `side`, which keeps its shape nearly.

        No frame is shrunk below the least pixels.

        Source: smart_resize in video_processing_qwen2_vl.py and video_processing_qwen3_vl.py of
        transformers.
        """
        shortest, longest = self._limits(num_frames)
        longest = max(min(longest, most_tokens * self.side**2), shortest)
        height, width = size.height, size.width
        if self.form.of_all and min(height, width) < self.side:
            scale = self.side / min(height, width)
            height, width = int(height * scale), int(width * scale)
        rows = round(height / self.side)
        columns = round(width / self.side)
        pixels = rows * columns * self.side**2
        if pixels > longest:
            shrink = sqrt(height * width / longest)
            rows = max(1, floor(height / shrink / self.side))
            columns = max(1, floor(width / shrink / self.side))
        elif pixels < shortest:
            grow = sqrt(shortest / (height * width))
            rows = ceil(height * grow / self.side)
            columns = ceil(width * grow / self.side)
        return ImageSize(columns * self.side, rows * self.side)

    def _limits(self, num_frames: int) -> tuple[float, float]:
        """Return the least and most pixels of a frame."""
        share = self.num_patches(num_frames) * self.depth if self.form.of_all else 1
        return self.shortest / share, self.longest / share


def read_video_rule(folder: Path, side: int, depth: int, own: dict[str, Any]) -> VideoRule | None:
    """Return how the model in a directory reads videos; None if it does not, or is not known to.

    Raises ValueError if its settings make other patches of frames than of images.

    own   patch_size, merge_size, temporal_patch_size, image_mean and image_std of images
    """
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text()) if config_file.is_file() else {}
    form = FORMS.get(config.get("model_type", ""))
    if form is None:
        return None
    file, settings = _settings(folder)
    for name, value in own.items():
        if settings.get(name, value) != value:
            raise ValueError(
                f"{file}: {name}={settings[name]}, but {value} for images: frames of videos are"
                " patched as images are; make them equal"
            )
    size = settings.get("size") or {}
    shortest = settings.get("min_pixels") or size.get("shortest_edge") or form.shortest
    longest = settings.get("max_pixels") or size.get("longest_edge") or form.longest
    vision = config.get("vision_config") or {}
    per_second = vision.get("tokens_per_second", TOKENS_PER_SECOND) if form.is_whole else 0.0
    return VideoRule(form, side, depth, shortest, longest, per_second)


def _settings(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the name and the content of the file with the settings of a video processor."""
    for name, key in SETTINGS:
        file = folder / name
        found = json.loads(file.read_text()) if file.is_file() else None
        if found is not None and (key is None or key in found):
            return str(file), found if key is None else found[key]
    return str(folder), {}
