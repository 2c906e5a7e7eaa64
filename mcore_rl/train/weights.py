"""Finds which parts of HF tensors the model chunks hold, and fills them, alike in every layout.

    parameter --sharded_state_dict--> box of a Megatron tensor --> boxes of HF tensors

Values come from an HF directory, or are drawn at random.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.utils import unwrap_model
from torch import Tensor

from mcore_rl.config import ModelConfig
from mcore_rl.weights.box import Shard
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.files import load_into
from mcore_rl.weights.layouts.training import LocalPart, list_training_padding, make_training_shards
from mcore_rl.weights.lora.facts import FACTORS
from mcore_rl.weights.models import family_of, hf_tensor_shapes
from mcore_rl.weights.models.mtp import TRAINED
from mcore_rl.weights.models.table import HfConfig
from mcore_rl.weights.models.value_head import SCORE, has_value_head
from mcore_rl.weights.plan.coverage import check_coverage

DRAWN_AT_ONCE = min(8, os.cpu_count() or 1)


def local_tensors(chunks: Sequence[torch.nn.Module]) -> dict[str, Tensor]:
    """Return this rank's parameters and saved buffers, not copied, by "<chunk>.<name>"."""
    return {
        f"{i}.{name}": tensor
        for i, chunk in enumerate(chunks)
        for name, tensor in _weights(unwrap_model(chunk)).items()
    }


def _weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return what a checkpoint holds: parameters, and buffers such as the experts' bias."""
    weights = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if not name.startswith(FACTORS)
    }
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                weights[name] = buffer
    return weights


def local_parts(chunks: Sequence[torch.nn.Module]) -> list[LocalPart]:
    """Return the box of a Megatron global tensor that each parameter holds.

    They are read off megatron-core's sharded_state_dict. A parameter may hold several boxes.
    """
    tensors = local_tensors(chunks)
    return [
        _part(shard, name, tensors[name])
        for i, chunk in enumerate(chunks)
        for name, shard in _weight_shards(chunk, f"{i}.")
    ]


def weight_layout(
    chunks: Sequence[torch.nn.Module], hf_config: HfConfig
) -> tuple[list[Shard], dict[str, Tensor]]:
    """Return (shards of HF tensors, the local tensors that hold them); use the tensors in place."""
    shards = make_training_shards(local_parts(chunks), family_of(hf_config), hf_config)
    return shards, local_tensors(chunks)


@torch.no_grad()
def zero_padding(chunks: Sequence[torch.nn.Module], hf_config: HfConfig) -> None:
    """Set the rows of vocabulary padding, which no HF tensor fills, to 0."""
    tensors = local_tensors(chunks)
    for part in list_training_padding(local_parts(chunks), family_of(hf_config), hf_config):
        part.view(tensors).zero_()


def _weight_shards(chunk: torch.nn.Module, prefix: str) -> Iterator[tuple[str, ShardedTensor]]:
    model = unwrap_model(chunk)
    metadata = {"dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True)}
    state: Mapping[str, Any] = model.sharded_state_dict(metadata=metadata)
    weights = _weights(model)
    missing = weights.keys() - state.keys()
    assert not missing, f"sharded_state_dict lacks {sorted(missing)}"
    for name, tensor in weights.items():
        entry = state[name]
        if isinstance(entry, ShardedTensorFactory):
            built = entry.build_fn(entry.key, tensor, entry.replica_id, entry.flattened_range)
            yield from ((prefix + name, shard) for shard in _leaves(built))
        else:
            entry.data = tensor
            yield prefix + name, entry


def _leaves(tree: Any) -> Iterator[ShardedTensor]:
    if isinstance(tree, ShardedTensor):
        yield tree
    else:
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _leaves(value)


def _part(shard: ShardedTensor, name: str, tensor: Tensor) -> LocalPart:
    data = shard.data
    assert data is not None and data.is_contiguous(), f"{name} is not contiguous"
    return LocalPart(
        key=shard.key,
        global_shape=tuple(shard.global_shape),
        global_offset=tuple(shard.global_offset),
        local_shape=(1,) * shard.prepend_axis_num + tuple(shard.local_shape),
        tensor=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        offset=data.storage_offset() - tensor.storage_offset(),
    )


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
    shards = make_training_shards(parts, family, hf_config)
    tensors = local_tensors(chunks)
    padding = list_training_padding(parts, family, hf_config)
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
    if TRAINED in hf_config:
        stored = replace(stored, config=hf_config)
    load_into(shards, tensors, stored)


@torch.no_grad()
def draw_weights(
    shards: Iterable[Shard], tensors: Mapping[str, Tensor], hf_config: HfConfig, seed: int
) -> None:
    """Draw weights from Normal(0, initializer_range); set norms to 1 and biases to 0.

    Other tensors of one axis are as the family's table says. Each HF tensor has a generator of its
    own, so that all layouts draw the same values. Peak memory: DRAWN_AT_ONCE HF tensors in float32.
    """
    shapes = hf_tensor_shapes(hf_config)
    initial = family_of(hf_config).list_initial(hf_config)
    std = hf_config.get("initializer_range", 0.02)
    by_name = sorted(shards, key=lambda shard: shard.box.name)

    @torch.no_grad()  # a setting of each thread
    def draw(named: tuple[str, list[Shard]]) -> None:
        name, group = named
        full = _initial(name, shapes[name], initial[name], std, seed)
        for shard in group:
            box = tuple(map(slice, shard.box.start, shard.box.stop))
            shard.view(tensors).copy_(full[box])

    groups = groupby(by_name, key=lambda shard: shard.box.name)
    with ThreadPoolExecutor(DRAWN_AT_ONCE) as pool:  # torch draws numbers on one thread
        for _ in pool.map(draw, [(name, list(group)) for name, group in groups]):
            pass


def _initial(name: str, shape: tuple[int, ...], kind: str | None, std: float, seed: int) -> Tensor:
    if len(shape) > 1:
        return _normal(name, shape, std, seed)
    if kind == "log":  # of 1 to 16, where Megatron draws them
        return torch.linspace(1.0, 16.0, *shape).log()
    if kind is not None:
        return {"zeros": torch.zeros, "ones": torch.ones}[kind](shape)
    return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)


def _normal(name: str, shape: tuple[int, ...], std: float, seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.randn(shape, generator=generator) * std
