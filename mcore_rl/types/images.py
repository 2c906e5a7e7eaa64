"""The images of a prompt, encoded, and of a batch, as a model's processor makes numbers of them."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class PromptImage:
    """An image of a prompt as its file has it, and how far it is shrunk.

    digest        names its patches: a hash of the content and of the limit
    data          the encoded image
    num_tokens    placeholders that it takes in the prompt
    most_tokens   the limit of tokens that it is shrunk to
    where         file, row and number of the image, for error messages
    """

    digest: str
    data: bytes = field(repr=False)
    num_tokens: int
    most_tokens: int
    where: str


@dataclass(frozen=True)
class Patches:
    """One image as a tower reads it.

    pixels_PD   float32, one row per patch; on the meta device where no tower reads them
    grid        patches along time, height and width
    """

    pixels_PD: Tensor
    grid: tuple[int, int, int]

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
    """

    pixels_PD: Tensor
    grids_I3: Tensor
    nums_N: tuple[int, ...]

    def __post_init__(self) -> None:
        num_patches = int(self.grids_I3.prod(-1).sum())
        if num_patches != len(self.pixels_PD) or sum(self.nums_N) != len(self.grids_I3):
            raise ValueError(
                f"Images: {len(self.pixels_PD)} patches and {sum(self.nums_N)} images of sequences,"
                f" but grids_I3 describes {num_patches} patches of {len(self.grids_I3)} images"
            )
