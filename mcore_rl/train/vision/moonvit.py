"""MoonViT, the vision tower of Kimi-VL, and its projector; transformers has neither.

    pixels_PD --> patches + table of positions --> blocks --> 2 x 2 patches side by side
        --> projector (merger) --> embeddings_RH, R = P / merge**2

Modules have the names of the checkpoint. Kimi-VL, arXiv:2504.07491, section 2.1.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mcore_rl.weights.models.table import HfConfig
from mcore_rl.weights.models.tower import merge_size

EPSILON = 1e-5
"""All norms have it; config.json does not give it."""
ROTARY_BASE = 10_000.0

Sides = tuple[int, int]
"""Patches along height and along width of an image."""


class PositionTable(nn.Module):
    """A learned table of positions, interpolated to the sides of each image."""

    def __init__(self, rows: int, columns: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns, hidden))

    def forward(self, sides: Sides) -> Tensor:
        """Return [height * width, hidden], row by row."""
        if sides == self.weight.shape[:2]:
            return self.weight.flatten(0, 1)
        table_1Dhw = self.weight.permute(2, 0, 1)[None]
        image_Dhw = functional.interpolate(table_1Dhw, size=sides, mode="bicubic")[0]
        return image_Dhw.permute(1, 2, 0).flatten(0, 1)


class PatchEmbedding(nn.Module):
    """Embeds patches."""

    def __init__(self, hidden: int, patch: int, table: Sides) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, hidden, kernel_size=patch, stride=patch)
        self.pos_emb = PositionTable(*table, hidden)

    def forward(self, pixels_PD: Tensor, images: Sequence[Sides]) -> Tensor:
        """Return [P, hidden]."""
        weight = self.proj.weight.flatten(1)  # a patch is as large as the kernel
        patches = functional.linear(pixels_PD.to(weight.dtype), weight, self.proj.bias)
        return patches + torch.cat([self.pos_emb(sides) for sides in images])


class TowerMlp(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.fc0 = nn.Linear(hidden, ffn)
        self.fc1 = nn.Linear(ffn, hidden)

    def forward(self, hidden_PD: Tensor) -> Tensor:
        return self.fc1(functional.gelu(self.fc0(hidden_PD), approximate="tanh"))


class TowerBlock(nn.Module):
    """A transformer block; patches attend to all patches of their own image."""

    def __init__(self, hidden: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.norm0 = nn.LayerNorm(hidden, eps=EPSILON)
        self.norm1 = nn.LayerNorm(hidden, eps=EPSILON)
        self.wqkv = nn.Linear(hidden, 3 * hidden)
        self.wo = nn.Linear(hidden, hidden)
        self.mlp = TowerMlp(hidden, ffn)

    def forward(self, hidden_PD: Tensor, turns_PF: Tensor, images: Sequence[Sides]) -> Tensor:
        """`turns_PF`: complex, by how much each pair of a head turns at each patch."""
        attended_PD = self._attend(self.norm0(hidden_PD), turns_PF, images)
        hidden_PD = hidden_PD + self.wo(attended_PD)
        return hidden_PD + self.mlp(self.norm1(hidden_PD))

    def _attend(self, hidden_PD: Tensor, turns_PF: Tensor, images: Sequence[Sides]) -> Tensor:
        parts_3PhC = self.wqkv(hidden_PD).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        query, key = (turned(part, turns_PF) for part in parts_3PhC[:2])
        lens = [height * width for height, width in images]
        heads_first = (part.transpose(0, 1) for part in (query, key, parts_3PhC[2]))
        per_image = zip(*(part.split(lens, 1) for part in heads_first), strict=True)
        attended = [functional.scaled_dot_product_attention(*each) for each in per_image]
        return torch.cat(attended, 1).transpose(0, 1).flatten(1)


class Projector(nn.Module):
    """Makes an embedding of the language model from the patches that merge into it."""

    def __init__(self, hidden: int, merged: int, out: int) -> None:
        super().__init__()
        self.pre_norm = nn.LayerNorm(hidden, eps=EPSILON)
        self.linear_1 = nn.Linear(merged, merged)
        self.linear_2 = nn.Linear(merged, out)

    def forward(self, patches_RKD: Tensor) -> Tensor:
        """K patches of each of R embeddings."""
        merged = self.linear_1(self.pre_norm(patches_RKD).flatten(1))
        return self.linear_2(functional.gelu(merged))


class MoonViT(nn.Module):
    """Tower and projector. It takes the sizes that `kimi_vl.sizes` returns.

    With `recompute`, each block is computed again in the backward pass.
    """

    def __init__(self, config: HfConfig, sizes: Mapping[str, int], *, recompute: bool) -> None:
        super().__init__()
        hidden, heads = sizes["tower_hidden"], sizes["tower_heads"]
        table = (sizes["tower_rows"], sizes["tower_columns"])
        self._merge = merge_size(config)
        self._num_pairs = hidden // heads // 2
        self._recompute = recompute
        self.patch_embed = PatchEmbedding(hidden, sizes["patch"], table)
        self.blocks = nn.ModuleList(
            TowerBlock(hidden, heads, sizes["tower_ffn"]) for _ in range(sizes["tower_blocks"])
        )
        self.final_layernorm = nn.LayerNorm(hidden, eps=EPSILON)
        self.merger = Projector(hidden, sizes["merged"], sizes["hidden"])

    def forward(self, pixels_PD: Tensor, grids_I3: Tensor) -> Tensor:
        """Return the embeddings [R, hidden] of all images; `grids_I3` is in host memory."""
        assert bool((grids_I3[:, 0] == 1).all()), "MoonViT knows no frames"
        images: list[Sides] = [(height, width) for _, height, width in grids_I3.tolist()]
        hidden_PD = self.patch_embed(pixels_PD, images)
        turns = [turns_of(sides, self._num_pairs, hidden_PD.device) for sides in images]
        turns_PF = torch.cat(turns)
        for block in self.blocks:
            if self._recompute and torch.is_grad_enabled():
                hidden_PD = checkpoint(block, hidden_PD, turns_PF, images, use_reentrant=False)
            else:
                hidden_PD = block(hidden_PD, turns_PF, images)
        return self.merger(self._merged(self.final_layernorm(hidden_PD), images))

    def _merged(self, hidden_PD: Tensor, images: Sequence[Sides]) -> Tensor:
        """Return [R, merge**2, hidden], the patches that merge into each embedding."""
        merge = self._merge
        parts = []
        lens = [height * width for height, width in images]
        for patches, (height, width) in zip(hidden_PD.split(lens), images, strict=True):
            squares = patches.unflatten(0, (height // merge, merge, width // merge, merge))
            parts.append(squares.transpose(1, 2).flatten(2, 3).flatten(0, 1))
        return torch.cat(parts)


def turns_of(sides: Sides, num_pairs: int, device: torch.device) -> Tensor:
    """Return how far each pair of a head turns at each patch, complex64 [P, num_pairs].

    Pairs turn by the column and by the row of the patch in turns.
    """
    powers = torch.arange(0, num_pairs, 2, dtype=torch.float32, device=device) / num_pairs
    frequencies_F = 1.0 / ROTARY_BASE**powers
    rows, columns = (torch.arange(side, dtype=torch.float32, device=device) for side in sides)
    places_hw2 = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).flip(-1)
    angles = places_hw2.flatten(0, 1)[:, None, :] * frequencies_F[:, None]
    angles_PF = angles.flatten(1)
    return torch.polar(torch.ones_like(angles_PF), angles_PF)


def turned(heads_PhC: Tensor, turns_PF: Tensor) -> Tensor:
    """Return queries or keys with their pairs turned; computed in float32."""
    pairs_PhF = torch.view_as_complex(heads_PhC.float().unflatten(-1, (-1, 2)))
    turned_PhF2 = torch.view_as_real(pairs_PhF * turns_PF[:, None])
    return turned_PhF2.flatten(-2).to(heads_PhC.dtype)
