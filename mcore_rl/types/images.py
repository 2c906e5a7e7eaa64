"""The images and videos of a prompt, encoded, and of a batch, as numbers that a tower reads."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Clip:
    """A piece of a video, but for its first frame.

    frames     the encoded frames after the first
    height     pixels that every frame is resized to
    width      the same
    interval   rotary positions from one patch to the next along time
    """

    frames: tuple[bytes, ...] = field(repr=False)
    height: int
    width: int
    interval: float


@dataclass(frozen=True)
class PromptImage:
    """An image of a prompt as its file has it, and how far it is shrunk; or a piece of a video.

    digest        names its patches: a hash of the content and of the limit
    data          the encoded image; the first frame of a piece of a video
    num_tokens    placeholders that it takes in the prompt
    most_tokens   the limit of tokens that it is shrunk to
    where         file, row and number of the image, for error messages
    clip          the rest of a piece of a video; None: an image
    """

    digest: str
    data: bytes = field(repr=False)
    num_tokens: int
    most_tokens: int
    where: str
    clip: Clip | None = None


@dataclass(frozen=True)
class Patches:
    """One image, or one piece of a video, as a tower reads it.

    pixels_PD   float32, one row per patch; on the meta device where no tower reads them
    grid        patches along time, height and width
    interval    rotary positions from one patch to the next along time
    """

    pixels_PD: Tensor
    grid: tuple[int, int, int]
    interval: float = 1.0

    @property
    def num_bytes(self) -> int:
        return self.pixels_PD.nbytes


@dataclass(frozen=True)
class Images:
    """The images of N sequences, in the order in which their placeholders stand in the tokens.

    pixels_PD   float32, the patches of all images one after another; a row is one patch of one
                image, laid out as the model's processor does. On the meta device where no tower
                reads them
    grids_I3    int64, patches of each image along time, height and width; their products sum to P
    nums_N      images of each sequence; they sum to I
    intervals_I   float32, rotary positions from one patch to the next along time; None: 1 in all
    """

    pixels_PD: Tensor
    grids_I3: Tensor
    nums_N: tuple[int, ...]
    intervals_I: Tensor | None = None

    def __post_init__(self) -> None:
        num_patches = int(self.grids_I3.prod(-1).sum())
        if num_patches != len(self.pixels_PD) or sum(self.nums_N) != len(self.grids_I3):
            raise ValueError(
                f"Images: {len(self.pixels_PD)} patches and {sum(self.nums_N)} images of sequences,"
                f" but grids_I3 describes {num_patches} patches of {len(self.grids_I3)} images"
            )

    def intervals(self) -> Tensor:
        """Return `intervals_I`, with the ones that None stands for."""
        return torch.ones(len(self.grids_I3)) if self.intervals_I is None else self.intervals_I
