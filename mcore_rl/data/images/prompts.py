"""Turns rows with images and videos into token ids with expanded placeholders, and references to
patches.

    row --> encoded images --> sizes by their headers --> tokens; too many? drop or shrink
        --> ids with placeholders, images by the hash of their content

    image  --> one PromptImage              video  --> one PromptImage for each piece

A limit bounds the tokens of each image, and of the frames that share a patch of a video. Patches
are made later, near the engines (shared_patches.py). No prompt is cut inside an image.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mcore_rl.data.images.decode import ImageSize, decode, read_size
from mcore_rl.data.images.encoded import (
    IMAGE,
    VIDEO,
    BadImageError,
    EncodedImage,
    Part,
    expand_placeholders,
    limit_that_fits,
    placeholders_of,
    read_encoded_images,
    with_image_parts,
)
from mcore_rl.data.images.processor import ImageProcessor, digest_of, digest_of_clip
from mcore_rl.data.images.video_rule import EncodedVideo, VideoRule, read_encoded_videos
from mcore_rl.data.rows import Row, messages_of
from mcore_rl.types import Clip, PromptImage

Encode = Callable[[list[dict[str, Any]]], list[int]]
"""Chat messages -> token ids by the model's template, one placeholder for each image."""
BAD = ("error", "skip")


class Shown(Protocol):
    """An image or a video.

    num_pieces    placeholders that the chat template renders for it
    most_tokens   the limit that does not shrink it
    """

    @property
    def num_pieces(self) -> int: ...
    @property
    def most_tokens(self) -> int: ...
    @property
    def encoded(self) -> Sequence[EncodedImage]: ...

    def num_tokens(self, limit: int) -> int:
        """Return the tokens that it takes if it is shrunk to `limit` tokens."""
        ...

    def pieces(self, limit: int) -> list[PromptImage]:
        """Return the images that a model gets for it if it is shrunk to `limit` tokens."""
        ...


@dataclass(frozen=True)
class ShownImage:
    """An image that is not shrunk below `least` tokens."""

    image: EncodedImage
    size: ImageSize
    processor: ImageProcessor
    least: int
    num_pieces: int = 1

    @property
    def most_tokens(self) -> int:
        return self.processor.most_tokens

    @property
    def encoded(self) -> Sequence[EncodedImage]:
        return (self.image,)

    def num_tokens(self, limit: int) -> int:
        return self.processor.num_tokens(self.size, max(limit, self.least))

    def pieces(self, limit: int) -> list[PromptImage]:
        limit = max(limit, self.least)
        data = self.image.data
        digest = digest_of(data, limit)
        return [PromptImage(digest, data, self.num_tokens(limit), limit, self.image.where)]


@dataclass(frozen=True)
class ShownVideo:
    """A video whose frames have one size."""

    video: EncodedVideo
    size: ImageSize
    rule: VideoRule

    @property
    def num_pieces(self) -> int:
        return 1 if self.rule.form.is_whole else self._num_patches

    @property
    def most_tokens(self) -> int:
        return self.rule.most_tokens(len(self.video.frames))

    @property
    def encoded(self) -> Sequence[EncodedImage]:
        return self.video.frames

    @property
    def parts(self) -> list[Part]:
        """Parts of a message that show it."""
        return self.rule.parts(len(self.video.frames), self.video.fps)

    @property
    def _num_patches(self) -> int:
        return self.rule.num_patches(len(self.video.frames))

    def num_tokens(self, limit: int) -> int:
        num_frames = len(self.video.frames)
        return self._num_patches * self.rule.tokens(self.size, num_frames, limit)

    def pieces(self, limit: int) -> list[PromptImage]:
        frames = self.video.frames
        size = self.rule.frame_size(self.size, len(frames), limit)
        num_tokens = self.num_tokens(limit) // self.num_pieces
        step = len(frames) if self.rule.form.is_whole else self.rule.depth
        made = []
        for start in range(0, len(frames), step):
            first, *others = frames[start : start + step]
            data = tuple(frame.data for frame in others)
            clip = Clip(data, size.height, size.width, self._interval)
            digest = digest_of_clip(first.data, clip)
            made.append(PromptImage(digest, first.data, num_tokens, limit, first.where, clip))
        return made

    @property
    def _interval(self) -> float:
        return self.rule.interval(self.video.fps) if self.rule.form.is_whole else 1.0


def make_shown_image(
    image: EncodedImage, processor: ImageProcessor, max_pixels: int, max_tokens: int
) -> ShownImage:
    """Return an image that can be shrunk. Raises BadImageError as `read_size` does.

    max_tokens   an option's limit; 0: none
    """
    least = min(processor.least_tokens, max_tokens or processor.least_tokens)
    return ShownImage(image, read_size(image, max_pixels), processor, least)


def make_shown_video(video: EncodedVideo, processor: ImageProcessor, max_pixels: int) -> ShownVideo:
    """Return a video that can be shrunk.

    Raises BadImageError as `read_size` does, or if frames differ in size; ValueError if the model
    reads no videos.
    """
    if processor.video is None:
        raise ValueError(
            f"{video.where}: the model reads no videos: take another as model.path, or give frames"
            " as `images` with a placeholder <image> for each"
        )
    sizes = [read_size(frame, max_pixels) for frame in video.frames]
    for number, size in enumerate(sizes):
        if size != sizes[0]:
            raise BadImageError(
                f"{video.where}: frame {number} has {size.width} x {size.height} pixels, frame 0"
                f" {sizes[0].width} x {sizes[0].height}: give frames of one size"
            )
    return ShownVideo(video, sizes[0], processor.video)


@dataclass(frozen=True)
class ImageRules:
    """The rules for images that are unusual.

    max_prompt_len   tokens of a prompt, images and videos included
    overlong         "filter" drops longer prompts and counts them; "shrink" makes their images
                     smaller, and drops prompts that do not fit even so; "error" refuses them
    bad              "error" refuses a row with an image that cannot be used, "skip" counts it
    max_pixels       pixels of an image, which are decoded at once
    max_bytes        bytes of an encoded image
    max_tokens       tokens of an image, or of the frames that share a patch of a video; larger
                     ones are shrunk. 0: the processor's own limit
    verify           decode each image, so that damage behind its header is found here
    """

    max_prompt_len: int
    overlong: str = "filter"
    bad: str = "error"
    max_pixels: int = 64 << 20
    max_bytes: int = 64 << 20
    max_tokens: int = 0
    verify: bool = True

    def __post_init__(self) -> None:
        for name, allowed in (("overlong", ("filter", "shrink", "error")), ("bad", BAD)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected one of {allowed}")


@dataclass(frozen=True)
class ImagePrompt:
    """A prompt with its images.

    where       file and row
    token_ids   every placeholder stands as often as its image takes tokens
    images      images and pieces of videos, in the order of the placeholders
    messages    those of the row, with parts in place of images and videos
    """

    where: str
    token_ids: tuple[int, ...]
    images: tuple[PromptImage, ...]
    messages: tuple[Mapping[str, Any], ...]


class ImagePrompts:
    """Makes prompts of rows, and counts the rows that it left out: `left_out` by reason."""

    def __init__(
        self,
        processor: ImageProcessor,
        encode: Encode,
        placeholder_id: int,
        rules: ImageRules,
        column: str = "prompt",
    ) -> None:
        """`column`: the messages of a row."""
        self._column = column
        self._processor = processor
        self._encode = encode
        self._placeholder_id = placeholder_id
        self._rules = rules
        self.left_out: Counter[str] = Counter()
        """"overlong" and "bad" -> rows."""

    def prompts(self, rows: Iterable[tuple[str, Row]], folder: Path) -> Iterator[ImagePrompt]:
        """Yield the prompts of (place, row) pairs; `folder` is where paths of images begin.

        Raises BadImageError, or ValueError for an overlong prompt, if the rules say so.
        """
        for where, row in rows:
            prompt = self.prompt(where, row, folder)
            if prompt is not None:
                yield prompt

    def prompt(self, where: str, row: Row, folder: Path) -> ImagePrompt | None:
        """Return the prompt of a row; None if it is left out."""
        try:
            return self._prompt(where, row, folder)
        except BadImageError:
            if self._rules.bad == "error":
                raise
            self.left_out["bad"] += 1
            return None

    def _prompt(self, where: str, row: Row, folder: Path) -> ImagePrompt | None:
        rules = self._rules
        messages = messages_of(row, where, self._column)
        shown, messages = self._read_shown(row, messages, where, folder)
        num_pieces = sum(each.num_pieces for each in shown)
        ids = self._token_ids(messages, num_pieces, where)
        text_len = len(ids) - num_pieces

        def num_tokens(index: int, limit: int) -> int:
            return shown[index].num_tokens(limit)

        most = max((each.most_tokens for each in shown), default=1)
        most = min(most, rules.max_tokens or most)
        least = 1 if rules.overlong == "shrink" else most
        budget = rules.max_prompt_len - text_len
        limit = limit_that_fits(num_tokens, len(shown), budget, least, most)
        if limit is None:
            whole_len = text_len + sum(num_tokens(index, most) for index in range(len(shown)))
            self._leave_out_overlong(where, whole_len, shown)
            return None
        if rules.verify:
            for each in shown:
                for image in each.encoded:
                    decode(image)
        images = tuple(piece for each in shown for piece in each.pieces(limit))
        counts = [image.num_tokens for image in images]
        token_ids = tuple(expand_placeholders(ids, self._placeholder_id, counts))
        assert len(token_ids) <= rules.max_prompt_len, (where, counts)
        return ImagePrompt(where, token_ids, images, tuple(messages))

    def _read_shown(
        self, row: Row, messages: Sequence[Mapping[str, Any]], where: str, folder: Path
    ) -> tuple[list[Shown], list[dict[str, Any]]]:
        """Return the row's images and videos, in order, and its messages with parts for them."""
        rules = self._rules
        images = [
            make_shown_image(image, self._processor, rules.max_pixels, rules.max_tokens)
            for image in read_encoded_images(row, where, folder, max_bytes=rules.max_bytes)
        ]
        videos = [
            make_shown_video(video, self._processor, rules.max_pixels)
            for video in read_encoded_videos(row, where, folder, max_bytes=rules.max_bytes)
        ]
        order = placeholders_of(messages, len(images), len(videos), where)
        parts = [video.parts for video in videos]
        remaining: dict[str, Iterator[Shown]] = {IMAGE: iter(images), VIDEO: iter(videos)}
        shown = [next(remaining[placeholder]) for placeholder in order]
        return shown, with_image_parts(messages, len(images), where, parts)

    def _token_ids(self, messages: list[dict[str, Any]], num_pieces: int, where: str) -> list[int]:
        ids = list(self._encode(messages))
        found = ids.count(self._placeholder_id)
        if found != num_pieces:
            raise BadImageError(
                f"{where} has {num_pieces} images and pieces of videos, but its rendered prompt has"
                f" {found} of the model's placeholder (token {self._placeholder_id}): remove that"
                " token from the text, and take a chat template that renders images"
            )
        return ids

    def _leave_out_overlong(self, where: str, num_tokens: int, shown: Sequence[Shown]) -> None:
        if self._rules.overlong == "error":
            raise ValueError(
                f"{where}: its prompt has {num_tokens} tokens with {len(shown)} images and videos,"
                f" at most {self._rules.max_prompt_len} are allowed: raise the limit, or let"
                " overlong prompts be filtered or their images shrunk"
            )
        self.left_out["overlong"] += 1
