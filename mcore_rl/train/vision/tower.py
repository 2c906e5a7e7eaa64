"""Builds a vision tower, transformers' module or MoonViT, for Megatron's gradients and checkpoints.

    pixels_PD --> blocks --> projector (merger) --> embeddings_RH, R = P / merge**2
                    +------> further projectors --> inner features (Qwen3-VL)

docs/vision.md says why none of them is megatron-core's vision model.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from mcore_rl.train.vision.moonvit import MoonViT
from mcore_rl.types import Images
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.table import HfConfig
from mcore_rl.weights.models.tower import is_frozen, vision_settings
from mcore_rl.weights.models.value_head import stem_of

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
}
"""Architecture, as stem_of has it -> transformers' module, its classes of config and tower."""


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

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(fn(tensor).device)

        super()._apply(moved, recurse)
        return self


def make_tower(config: TransformerConfig, hf_config: HfConfig) -> torch.nn.Module:
    """Return the tower of a model, parameters not yet filled.

    Every tensor-parallel rank holds the whole tower. Under sequence parallelism each rank takes the
    embeddings of its own tokens, so the ranks' gradients are added up, as those of norms are. With
    any recomputation of layers, each block of the tower is computed again in the backward pass.
    """
    recompute = config.recompute_granularity is not None
    family = family_of(hf_config)
    stem = stem_of(family.architecture)
    tower: Any
    with torch.random.fork_rng(devices=[]):
        if stem in TOWERS:
            tower = _of_transformers(stem, hf_config, config.params_dtype, recompute)
        else:
            tower = MoonViT(hf_config, family.sizes(hf_config), recompute=recompute)
            tower.to(config.params_dtype)
    for parameter in tower.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return tower


def _of_transformers(
    stem: str, hf_config: HfConfig, dtype: torch.dtype, recompute: bool
) -> torch.nn.Module:
    config_class, tower_class = _classes(stem)
    whole = config_class(vision_config=dict(vision_settings(hf_config)))
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
