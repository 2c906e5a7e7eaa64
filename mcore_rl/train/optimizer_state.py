"""The distributed optimizer's state in a checkpoint: each parameter's whole, on one of the ranks that update
it.

megatron-core's own (`DistributedOptimizer.sharded_param_state_fully_reshardable`) gathers the states of all
data-parallel ranks on each of them to write one, reads all of them on each, and takes those of parameters
behind a padded bucket, as tied embeddings over pipeline stages have, from the wrong place. Here a rank writes
and reads what it updates. Names and shapes are megatron-core's, and so is what puts loaded states in place.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

KINDS = ("param", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Part:
    """Elements of a flat parameter that a data-parallel rank updates."""

    rank: int
    start: int
    end: int


@dataclass(frozen=True)
class _Updated:
    """A parameter and who updates it; the owner, who has most of it, writes it."""

    parameter: torch.nn.Parameter
    parts: Sequence[Part]
    group: dist.ProcessGroup

    @property
    def owner(self) -> Part:
        return max(self.parts, key=lambda part: part.end - part.start)

    @property
    def mine(self) -> Part | None:
        return next((part for part in self.parts if part.rank == self.group.rank()), None)


def write_whole_parameters(optimizer: DistributedOptimizer) -> None:
    """From here on `optimizer.sharded_state_dict` is made as this file says."""
    optimizer.sharded_param_state_fully_reshardable = partial(_sharded_state, optimizer)


def split(start: int, end: int, shard_size: int) -> list[Part]:
    """Of a parameter at [start, end) of a bucket, of which every rank updates `shard_size` elements."""
    return [
        Part(rank, max(rank * shard_size - start, 0), min((rank + 1) * shard_size, end) - start)
        for rank in range(start // shard_size, (end - 1) // shard_size + 1)
    ]


def _sharded_state(
    optimizer: DistributedOptimizer,
    model_state: Mapping[str, Any],
    is_loading: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> dict[int, dict[str, ShardedTensor | ShardedTensorFactory]]:
    """{number of the parameter in the optimizer: {kind: tensor of the parameter's shape}}

    To save, of those that this rank owns; to load, of those that it updates. A collective over the
    optimizer's ranks.
    """
    tensors, _ = extract_sharded_tensors_and_factories(model_state)
    of_model = {sharded.data: sharded for sharded in nested_values(tensors)}
    state = {}
    for number, updated in enumerate(_parameters(optimizer)):
        mine = updated.mine
        if mine is None:
            continue
        sharded = of_model[updated.parameter]
        values = _empty(updated) if is_loading else _gather(optimizer, updated, mine)
        if values:
            replica = 0 if mine == updated.owner else 1 + mine.rank
            state[number] = {
                kind: _like(sharded, kind, value, replica) for kind, value in values.items()
            }
    return state


def _parameters(optimizer: DistributedOptimizer) -> Iterator[_Updated]:
    """In the order of `load_parameter_state_from_fully_reshardable`."""
    for buffer in optimizer.buffers:
        group = buffer.data_parallel_group
        for parameter, (start, end, bucket_id) in buffer.param_index_map.items():
            bucket = buffer.buckets[bucket_id]
            shard_size = bucket.grad_data.numel() // group.size()
            parts = split(start - bucket.offset, end - bucket.offset, shard_size)
            yield _Updated(parameter, parts, group)


def _empty(updated: _Updated) -> dict[str, Tensor]:
    return {kind: torch.empty(updated.parameter.shape, dtype=torch.float32) for kind in KINDS}


def _gather(optimizer: DistributedOptimizer, updated: _Updated, mine: Part) -> dict[str, Tensor]:
    """The whole on the owner, empty elsewhere; not a copy where one rank has all."""
    states = optimizer._get_main_param_and_optimizer_states(updated.parameter)
    owned = {kind: states[kind].detach() for kind in KINDS}
    if len(updated.parts) > 1:
        owned = {kind: _gather_one(part, updated, mine) for kind, part in owned.items()}
    if mine != updated.owner:
        return {}
    return {kind: whole.view(updated.parameter.shape) for kind, whole in owned.items()}


def _gather_one(part: Tensor, updated: _Updated, mine: Part) -> Tensor:
    """Every rank takes parameters in the same order, so that what one waits for the other has begun."""
    group, owner = updated.group, updated.owner
    if mine != owner:
        dist.send(part, group=group, group_dst=owner.rank)
        return part
    whole = part.new_empty(updated.parameter.numel())
    for other in updated.parts:
        place = whole[other.start : other.end]
        if other == mine:
            place.copy_(part)
        else:
            dist.recv(place, group=group, group_src=other.rank)
    return whole.cpu()


def _like(
    sharded: ShardedTensor | ShardedTensorFactory, kind: str, value: Tensor, replica: int
) -> ShardedTensor | ShardedTensorFactory:
    """The model's entry with a state of its parameter in it."""
    of_pipeline_and_tensor = sharded.replica_id[:-1]  # type: ignore[index]
    changes: dict[str, Any] = {
        "key": f"optimizer.state.{kind}.{sharded.key}",
        "data": value,
        "replica_id": (*of_pipeline_and_tensor, replica),
    }
    if isinstance(sharded, ShardedTensor):
        changes["dtype"] = value.dtype
    return replace(sharded, **changes)
