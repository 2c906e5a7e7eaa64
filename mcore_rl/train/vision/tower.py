"""Builds a vision tower, transformers' module or MoonViT, for Megatron's gradients and checkpoints.

    pixels_PD --> blocks --> projector (merger) --> embeddings_RH, R = P / merge**2
                    +------> further projectors --> inner features (Qwen3-VL)

docs/vision.md says why none of them is megatron-core's vision model. transformers has no MoonViT,
the tower of Kimi-VL (arXiv:2504.07491, section 2.1), so it is here:

    pixels_PD --> patches + table of positions --> blocks --> 2 x 2 patches side by side
        --> projector (merger) --> embeddings_RH

Its modules have the names of the checkpoint.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mcore_rl.types import Images
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.table import HfConfig
from mcore_rl.weights.models.tower import is_frozen, merge_size, read_vision_settings
from mcore_rl.weights.models.value_head import find_stem

EPSILON = 1e-5
"""All norms have it; config.json does not give it."""
ROTARY_BASE = 10_000.0

Sides = tuple[int, int]
"""Patches along height and along width of an image."""
TOWERS = {
    "Qwen2_5_VL": (
        "qwen2_5_vl",
        "Qwen2_5_VLConfig",
        "Qwen2_5_VisionTransformerPretrainedModel",
    ),
    "Glm4vMoe": ("glm4v_moe", "Glm4vMoeConfig", "Glm4vMoeVisionModel"),
    "Qwen3VL": ("qwen3_vl", "Qwen3VLConfig", "Qwen3VLVisionModel"),
    "Qwen3VLMoe": (
        "qwen3_vl_moe",
        "Qwen3VLMoeConfig",
        "Qwen3VLMoeVisionModel",
    ),
    "Qwen3_5": ("qwen3_5", "Qwen3_5Config", "Qwen3_5VisionModel"),
    "Qwen3_5Moe": ("qwen3_5_moe", "Qwen3_5MoeConfig", "Qwen3_5MoeVisionModel"),
}
"""Architecture, as find_stem has it -> transformers' module, its classes of config and tower."""


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
        query, key = (turn(part, turns_PF) for part in parts_3PhC[:2])
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
    """Tower and projector. It takes the sizes that `read_kimi_vl_sizes` returns.

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
        return self.merger(self._group_patches(self.final_layernorm(hidden_PD), images))

    def _group_patches(self, hidden_PD: Tensor, images: Sequence[Sides]) -> Tensor:
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


def turn(heads_PhC: Tensor, turns_PF: Tensor) -> Tensor:
    """Return queries or keys with their pairs turned; computed in float32."""
    pairs_PhF = torch.view_as_complex(heads_PhC.float().unflatten(-1, (-1, 2)))
    turned_PhF2 = torch.view_as_real(pairs_PhF * turns_PF[:, None])
    return turned_PhF2.flatten(-2).to(heads_PhC.dtype)


class Float32Buffers(torch.nn.Module):
    """A module whose buffers are computed from config.json, kept in float32 when weights are not.

    A rotary embedding's frequencies in bfloat16 would turn patches by wrong angles.
    """

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        assert not list(inner.parameters()), "parameters take the model's dtype"
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> "Float32Buffers":
        """Let `fn` move the buffers to another device, but not cast them."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(fn(tensor).device)

        super()._apply(move, recurse)
        return self


def make_tower(config: TransformerConfig, hf_config: HfConfig) -> torch.nn.Module:
    """Return the tower of a model, parameters not yet filled.

    Every tensor-parallel rank holds the whole tower. Under sequence parallelism each rank takes the
    embeddings of its own tokens, so the ranks' gradients are added up, as those of norms are. With
    any recomputation of layers, each block of the tower is computed again in the backward pass.
    """
    recompute = config.recompute_granularity is not None
    family = family_of(hf_config)
    stem = find_stem(family.architecture)
    tower: Any
    with torch.random.fork_rng(devices=[]):
        if stem in TOWERS:
            tower = _make_transformers_tower(stem, hf_config, config.params_dtype, recompute)
        else:
            tower = MoonViT(hf_config, family.sizes(hf_config), recompute=recompute)
            tower.to(config.params_dtype)
    for parameter in tower.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return tower


def _make_transformers_tower(
    stem: str, hf_config: HfConfig, dtype: torch.dtype, recompute: bool
) -> torch.nn.Module:
    config_class, tower_class = _classes(stem)
    whole = config_class(vision_config=dict(read_vision_settings(hf_config)))
    tower = tower_class._from_config(whole.vision_config, dtype=dtype)
    tower.rotary_pos_emb = Float32Buffers(tower.rotary_pos_emb)
    if recompute:
        tower.gradient_checkpointing_enable()
    return tower


def _classes(stem: str) -> tuple[Any, Any]:
    """Return transformers' class of the whole model's config, and that of its tower."""
    module, config_class, tower_class = TOWERS[stem]
    package = f"transformers.models.{module}"
    configs = import_module(f"{package}.configuration_{module}")
    models = import_module(f"{package}.modeling_{module}")
    return getattr(configs, config_class), getattr(models, tower_class)


@dataclass(frozen=True)
class Embedded:
    """All images of a micro-batch, one after another, as the language model reads them.

    embeddings_RH   what replaces the embeddings of placeholders
    inner           [R, H] each: features of inner blocks of the tower, which are added behind the
                    first layers in this order
    """

    embeddings_RH: Tensor
    inner: tuple[Tensor, ...] = ()


def embed_images(tower: torch.nn.Module, images: Images) -> Embedded:
    """Return the embeddings and inner features of all images."""
    if isinstance(tower, MoonViT):
        return Embedded(tower(images.pixels_PD, images.grids_I3))
    grids_I3 = images.grids_I3.to(images.pixels_PD.device)
    out = tower(images.pixels_PD, grid_thw=grids_I3)
    return Embedded(out.pooler_output, tuple(getattr(out, "deepstack_features", ())))


def zero_of(tower: torch.nn.Module) -> Tensor:
    """Return 0 in a way that gives every trained parameter of the tower a gradient, of 0.

    Megatron's overlapped reduction waits for the gradient of every parameter, in micro-batches
    without images, too.
    """
    trained = [p for p in tower.parameters() if p.requires_grad]
    return sum((p.view(-1)[:1].sum() * 0.0 for p in trained), torch.zeros(()))


def train_only(chunks: Iterable[torch.nn.Module], part: str) -> None:
    """Stop training those parameters of towers that train.vision=`part` leaves out.

    Call it before DDP and the optimizer are made.
    """
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if is_frozen(name, part):
                parameter.requires_grad_(False)
