"""Counts the floating-point operations of a vision tower, from config.json and grids of images.

    patches --> blocks --> projectors --> tokens
    P x per_patch, pairs   P / merge**2 x per_token

As in flops.py a product of [m, k] and [k, n] counts 2 m k n. Norms, activations, rotations and the
interpolation of positions are left out.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from mcore_rl.weights.hf.facts import ModelFacts
from mcore_rl.weights.hf.flops import BACKWARD
from mcore_rl.weights.models.tower import PREFIX, merge_size, vision_settings
from mcore_rl.weights.models.value_head import stem_of

PER_PATCH = (PREFIX + "blocks.", PREFIX + "patch_embed.")
"""Where keys of tensors begin that every patch is multiplied with; the rest multiply tokens."""
TABLES = {"tower_positions", "tower_rows"}
"""Axes of tables, whose rows are looked up."""
WITH_WINDOWS = "Qwen2_5_VL"
WINDOW, WHOLE_BLOCKS = 112, (7, 15, 23, 31)
"""Pixels along its windows, and its blocks without windows, if config.json does not name them."""

Grid = Sequence[int]
"""Frames, rows and columns of an image's patches."""


@dataclass(frozen=True)
class TowerFlops:
    """Floating-point operations of a tower's forward pass.

    per_patch         of all products with weights in the blocks and before them
    per_token         of all products with weights in projectors, by token of the language model
    per_pair          of two patches of a frame, in all blocks that see whole frames
    per_window_pair   of two patches of a window, in all blocks with windows
    merge             patches along each side that become one token
    window            patches along each side of a window
    """

    per_patch: float
    per_token: float
    per_pair: float
    per_window_pair: float
    merge: int
    window: int

    @staticmethod
    def of(facts: ModelFacts) -> "TowerFlops | None":
        """Return the operations of a model's tower; None if it has none."""
        if not facts.has_tower:
            return None
        sizes = facts.sizes
        merge = merge_size(facts.config)
        vision = vision_settings(facts.config)
        num_whole = _whole_blocks(facts)
        per_block = 4.0 * sizes["tower_hidden"]  # queries with keys, and weights with values
        window = vision.get("window_size", WINDOW) // sizes["patch"] // merge * merge
        return TowerFlops(
            per_patch=2.0 * _weights(facts, per_patch=True),
            per_token=2.0 * _weights(facts, per_patch=False),
            per_pair=num_whole * per_block,
            per_window_pair=(sizes["tower_blocks"] - num_whole) * per_block,
            merge=merge,
            window=window,
        )

    def blocks(self, grids: Iterable[Grid]) -> float:
        """Return the operations of a forward pass apart from projectors."""
        operations = 0.0
        for frames, rows, columns in grids:
            operations += self.per_patch * frames * rows * columns
            operations += self.per_pair * frames * (rows * columns) ** 2
            if self.per_window_pair:
                in_windows = _squares(rows, self.window) * _squares(columns, self.window)
                operations += self.per_window_pair * frames * in_windows
        return operations

    def projectors(self, grids: Iterable[Grid]) -> float:
        """Return the operations of a forward pass through projectors."""
        num_patches = sum(frames * rows * columns for frames, rows, columns in grids)
        return self.per_token * num_patches / self.merge**2

    def forward(self, grids: Iterable[Grid]) -> float:
        """Return the operations of a forward pass over images of these grids."""
        grids = list(grids)
        return self.blocks(grids) + self.projectors(grids)

    def training(self, grids: Iterable[Grid], part: str) -> float:
        """Return the operations of a forward pass, and of the backward pass of what is trained.

        Recomputed activations are not counted.

        part   train.vision; what it leaves out has no backward pass
        """
        grids = list(grids)
        backward = {
            "all": self.forward(grids),
            "projector": self.projectors(grids),
            "none": 0.0,
        }
        return self.forward(grids) + BACKWARD * backward[part]

    def square(self, num_tokens: int) -> Grid:
        """Return the grid of the most nearly square image of so many tokens."""
        rows = next(n for n in range(int(num_tokens**0.5), 0, -1) if num_tokens % n == 0)
        return 1, self.merge * rows, self.merge * (num_tokens // rows)


def _weights(facts: ModelFacts, *, per_patch: bool) -> int:
    """Return the numbers of the matrices that patches, or else tokens, are multiplied with."""
    sizes = facts.sizes
    total = 0
    for rule, tensor, _, _ in facts.family.places(facts.config, sizes):
        if not rule.key.startswith(PREFIX) or len(tensor.axes) < 2 or TABLES & set(tensor.axes):
            continue
        if rule.key.startswith(PER_PATCH) == per_patch:
            total += prod(sizes[axis] for axis in tensor.axes)
    return total


def _whole_blocks(facts: ModelFacts) -> int:
    """Return the blocks whose patches see all others of their frame."""
    blocks = range(facts.sizes["tower_blocks"])
    if stem_of(facts.architecture) != WITH_WINDOWS:
        return len(blocks)
    whole = vision_settings(facts.config).get("fullatt_block_indexes", WHOLE_BLOCKS)
    return len(set(whole) & set(blocks))


def _squares(length: int, window: int) -> int:
    """Return the sum of the squares of the parts into which windows cut a side."""
    rest = length % window
    return length // window * window**2 + rest**2
