"""Images and videos of a row that can be shrunk, in the order of their placeholders.

    image  --> one PromptImage              video  --> one PromptImage for each piece

All take tokens by a limit: of an image, or of the frames that share a patch of a video.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mcore_rl.data.images.decode import ImageSize, read_size
from mcore_rl.data.images.encoded import BadImage, EncodedImage
from mcore_rl.data.images.placeholders import Part
from mcore_rl.data.images.processor import ImageProcessor, digest_of, digest_of_clip
from mcore_rl.data.images.video_rule import EncodedVideo, VideoRule
from mcore_rl.types import Clip, PromptImage


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
        """Return what it is to a model if it is shrunk to `limit` tokens."""
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


def shown_image(
    image: EncodedImage, processor: ImageProcessor, max_pixels: int, max_tokens: int
) -> ShownImage:
    """Raises BadImage as `read_size` does.

    max_tokens   an option's limit; 0: none
    """
    least = min(processor.least_tokens, max_tokens or processor.least_tokens)
    return ShownImage(image, read_size(image, max_pixels), processor, least)


def shown_video(video: EncodedVideo, processor: ImageProcessor, max_pixels: int) -> ShownVideo:
    """Raises BadImage as `read_size` does, or if frames differ in size; ValueError if the model
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
            raise BadImage(
                f"{video.where}: frame {number} has {size.width} x {size.height} pixels, frame 0"
                f" {sizes[0].width} x {sizes[0].height}: give frames of one size"
            )
    return ShownVideo(video, sizes[0], processor.video)
