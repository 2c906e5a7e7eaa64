"""Finds which tokens stand for images, and the rotary positions (time, height, width) of all.

A sequence of 6 tokens with an image of 1 x 4 x 4 patches; 2 x 2 patches merge into a token:

    token     text  image  image  image  image  text
    row         -     0      1      2      3      -      row of the merged image embeddings
    time        0     1      1      1      1      3
    height      0     1      1      2      2      3
    width       0     1      2      1      2      3

Text after an image or a video continues behind its largest position (Qwen2-VL, arXiv:2409.12191,
section 2.1). Those of time are as far apart as the seconds of the video's patches in Qwen2.5-VL
(arXiv:2502.13923, section 2.1.3).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.weights.models.settings import read_rope
from mcore_rl.weights.models.table import HfConfig
from mcore_rl.weights.models.tower import PLACEHOLDERS, merge_size, read_placeholder


@dataclass(frozen=True)
class ImageTokens:
    """How a model marks images among its tokens.

    placeholder_id   the token that stands for a piece of an image
    merge            patches along height and along width that become one token
    three_axes       positions in an image have time, height and width; if not, those of an image
                     are counted as those of text are
    """

    placeholder_id: int
    merge: int
    three_axes: bool = True

    @staticmethod
    def from_config(config: HfConfig) -> "ImageTokens":
        """Raises ValueError if config.json does not name the placeholder."""
        placeholder_id = read_placeholder(config)
        if placeholder_id is None:
            names = " or ".join(map(repr, PLACEHOLDERS))
            raise ValueError(f"config.json lacks {names}, the placeholder of images")
        return ImageTokens(
            placeholder_id, merge_size(config), bool(read_rope(config).get("mrope_section"))
        )

    def nums_tokens(self, grids_I3: Tensor) -> list[int]:
        """Return the tokens that each image takes."""
        return (grids_I3.prod(-1) // self.merge**2).tolist()

    def image_starts(self, token_ids_T: Tensor, grids_I3: Tensor) -> list[int]:
        """Return the first token of each image of one sequence.

        A placeholder behind the last image is text: a model may sample it. Raises ValueError if an
        image has fewer placeholders in a row than it takes.
        """
        is_placeholder_T = token_ids_T == self.placeholder_id
        starts = []
        first = 0
        for image, num_tokens in enumerate(self.nums_tokens(grids_I3)):
            found = is_placeholder_T[first:].nonzero()
            start = first + int(found[0]) if len(found) else len(token_ids_T)
            first = start + num_tokens
            if first > len(token_ids_T) or not bool(is_placeholder_T[start:first].all()):
                raise ValueError(
                    f"image {image} of a sequence takes {num_tokens} placeholders (token"
                    f" {self.placeholder_id}) in a row, but from token {start} on there are fewer:"
                    " expand the placeholders with the model's processor, and never cut a prompt"
                    " inside an image"
                )
            starts.append(start)
        return starts

    def rows(self, token_ids_T: Tensor, grids_I3: Tensor) -> Tensor:
        """Return each token's row in the sequence's merged image embeddings, int64; -1 for text.

        Raises ValueError as `image_starts` does.
        """
        rows_T = torch.full((len(token_ids_T),), -1)
        starts = self.image_starts(token_ids_T, grids_I3)
        row = 0
        for start, num_tokens in zip(starts, self.nums_tokens(grids_I3), strict=True):
            rows_T[start : start + num_tokens] = torch.arange(row, row + num_tokens)
            row += num_tokens
        return rows_T

    def rotary(
        self, token_ids_T: Tensor, grids_I3: Tensor, padded_len: int, intervals_I: Tensor
    ) -> Tensor:
        """Return the rotary positions of one sequence, int64 [3, padded_len].

        Padding continues as text would. Raises ValueError as `image_starts` does.

        intervals_I   float32, positions from one patch of an image to the next along time
        """
        if not self.three_axes:
            return _text(0, padded_len)
        parts: list[Tensor] = []
        next_position = 0
        done = 0
        starts = self.image_starts(token_ids_T, grids_I3)
        for start, grid, interval in zip(starts, grids_I3.tolist(), intervals_I, strict=True):
            parts.append(_text(next_position, start - done))
            next_position += start - done
            sides = (grid[0], grid[1] // self.merge, grid[2] // self.merge)
            parts.append(_grid(next_position, sides, interval))
            next_position = int(parts[-1].max()) + 1
            done = start + sides[0] * sides[1] * sides[2]
        parts.append(_text(next_position, padded_len - done))
        return torch.cat(parts, dim=1)


def split_grids(grids_I3: Tensor, nums_N: Sequence[int]) -> tuple[Tensor, ...]:
    """Return the grids of each sequence."""
    return grids_I3.split(list(nums_N))


def _text(first: int, num_tokens: int) -> Tensor:
    return torch.arange(first, first + num_tokens).expand(3, -1)


def _grid(first: int, sides: tuple[int, int, int], interval: Tensor) -> Tensor:
    times = (torch.arange(sides[0]) * interval).long()
    axes = torch.meshgrid(times, torch.arange(sides[1]), torch.arange(sides[2]), indexing="ij")
    return torch.stack(axes).reshape(3, -1) + first
