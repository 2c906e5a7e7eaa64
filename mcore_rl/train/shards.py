"""Finds which boxes of Megatron's global tensors and of HF tensors the model chunks hold."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.utils import unwrap_model
from torch import Tensor

from mcore_rl.weights.box import Shard
from mcore_rl.weights.layouts.training import LocalPart, training_padding, training_shards
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.table import HfConfig


def local_tensors(chunks: Sequence[torch.nn.Module]) -> dict[str, Tensor]:
    """Return this rank's parameters and saved buffers, not copied, by "<chunk>.<name>"."""
    return {
        f"{i}.{name}": tensor
        for i, chunk in enumerate(chunks)
        for name, tensor in _weights(unwrap_model(chunk)).items()
    }


def _weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return what a checkpoint holds: parameters, and buffers such as the experts' bias."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
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
    shards = training_shards(local_parts(chunks), family_of(hf_config), hf_config)
    return shards, local_tensors(chunks)


@torch.no_grad()
def zero_padding(chunks: Sequence[torch.nn.Module], hf_config: HfConfig) -> None:
    """Set the rows of vocabulary padding, which no HF tensor fills, to 0."""
    tensors = local_tensors(chunks)
    for part in training_padding(local_parts(chunks), family_of(hf_config), hf_config):
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
