"""The images of a batch, as a model directory's processor turns them into numbers."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Images:
    """The images of N sequences, in the order in which their placeholders stand in the tokens.

    pixels_PD   float32, the patches of all images one after another; a row is one patch of one
                image, laid out as the model's processor does
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
