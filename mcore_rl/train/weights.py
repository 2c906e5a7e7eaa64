"""Fills this rank's parameters from an HF directory or at random, alike in every layout."""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

import torch
from torch import Tensor

from mcore_rl.config import ModelConfig
from mcore_rl.train.shards import local_parts, local_tensors, zero_padding
from mcore_rl.weights.box import Shard
from mcore_rl.weights.hf.facts import ModelFacts
from mcore_rl.weights.hf.files import load_into
from mcore_rl.weights.layouts.training import training_padding, training_shards
from mcore_rl.weights.models import family_of, hf_tensor_shapes
from mcore_rl.weights.models.table import HfConfig
from mcore_rl.weights.models.value_head import SCORE, has_value_head
from mcore_rl.weights.plan.coverage import check_coverage

DRAWN_AT_ONCE = min(8, os.cpu_count() or 1)


@torch.no_grad()
def fill_weights(
    chunks: Sequence[torch.nn.Module],
    model: ModelConfig,
    stored: ModelFacts,
    hf_config: HfConfig,
    seed: int,
) -> None:
    """Give every parameter of the chunks its initial value.

    A value head that starts from a policy's weights starts at 0, so every value is 0 at first.
    Raises ValueError unless every element gets exactly one value.

    stored      the model in `model.path`
    hf_config   config.json of the model that is built; it may have a value head that `stored` lacks
    """
    parts = local_parts(chunks)
    family = family_of(hf_config)
    shards = training_shards(parts, family, hf_config)
    tensors = local_tensors(chunks)
    padding = training_padding(parts, family, hf_config)
    check_coverage(shards, padding, {name: t.numel() for name, t in tensors.items()})
    zero_padding(chunks, hf_config)
    if model.init == "random":
        draw_weights(shards, tensors, hf_config, seed)
        return
    if has_value_head(hf_config) and not stored.has_value_head:
        heads = [shard for shard in shards if shard.box.name == SCORE]
        shards = [shard for shard in shards if shard.box.name != SCORE]
        for head in heads:
            head.view(tensors).zero_()
    load_into(shards, tensors, stored)


@torch.no_grad()
def draw_weights(
    shards: Iterable[Shard], tensors: Mapping[str, Tensor], hf_config: HfConfig, seed: int
) -> None:
    """Draw weights from Normal(0, initializer_range); set norms to 1 and biases to 0.

    Each HF tensor has a generator of its own, so that all layouts draw the same values. Peak
    memory: DRAWN_AT_ONCE HF tensors in float32.
    """
    shapes = hf_tensor_shapes(hf_config)
    std = hf_config.get("initializer_range", 0.02)
    by_name = sorted(shards, key=lambda shard: shard.box.name)

    @torch.no_grad()  # a setting of each thread
    def draw(named: tuple[str, list[Shard]]) -> None:
        name, group = named
        full = _initial(name, shapes[name], std, seed)
        for shard in group:
            box = tuple(map(slice, shard.box.start, shard.box.stop))
            shard.view(tensors).copy_(full[box])

    groups = groupby(by_name, key=lambda shard: shard.box.name)
    with ThreadPoolExecutor(DRAWN_AT_ONCE) as pool:  # torch draws numbers on one thread
        for _ in pool.map(draw, [(name, list(group)) for name, group in groups]):
            pass


def _initial(name: str, shape: tuple[int, ...], std: float, seed: int) -> Tensor:
    if len(shape) > 1:
        return _normal(name, shape, std, seed)
    return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)


def _normal(name: str, shape: tuple[int, ...], std: float, seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.randn(shape, generator=generator) * std
