"""Gives a distributed optimizer the sharded state of its parameters for a checkpoint.

One of the ranks that update a parameter writes its whole state; each of them reads it. Replaces
`DistributedOptimizer.sharded_param_state_fully_reshardable` of megatron-core, which gathers the
states of all data-parallel ranks on each of them, reads all of them on each, and takes the states
of parameters behind a padded bucket from the wrong place. Tied embeddings over pipeline stages
have such buckets. Names and shapes are megatron-core's, and so is the code that puts loaded states
in place.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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

from mcore_rl.device import device

KINDS = ("param", "exp_avg", "exp_avg_sq")
READABLE = "readable"
Readable = Callable[[Tensor], Tensor]
_PIECE_NUMEL = 1 << 24
"""Elements sent at once: what a gather takes of the device memory, 64 MiB."""


@dataclass(frozen=True)
class Part:
    """Elements [start, end) of a flat parameter, which one data-parallel rank updates."""

    rank: int
    start: int
    end: int


@dataclass(frozen=True)
class _Updated:
    """A parameter and the ranks of `group` that update it; the one that updates most owns it."""

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
    """Replace the function behind `optimizer.sharded_state_dict` by this module's.

    A patch of megatron-core 0.16.1; see the module's docstring for the reasons.
    """
    optimizer.sharded_param_state_fully_reshardable = partial(_sharded_state, optimizer)


def split(start: int, end: int, shard_size: int) -> list[Part]:
    """Return who updates a parameter at [start, end) of a bucket.

    Each rank updates `shard_size` elements of the bucket.
    """
    first_rank = start // shard_size
    last_rank = (end - 1) // shard_size
    parts: list[Part] = []
    for rank in range(first_rank, last_rank + 1):
        shard_start = max(rank * shard_size, start)
        shard_end = min((rank + 1) * shard_size, end)
        parts.append(Part(rank, shard_start - start, shard_end - start))
    return parts


def _sharded_state(
    optimizer: DistributedOptimizer,
    model_state: Mapping[str, Any],
    is_loading: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> dict[int, dict[str, ShardedTensor | ShardedTensorFactory]]:
    """Return {number of the parameter in the optimizer: {kind: tensor of the parameter's shape}}.

    To save, with the parameters that this rank owns; to load, with those that it updates.
    Collective over the optimizer's ranks. `metadata[READABLE]` is a function that returns, for a
    tensor whose memory is moved out, its copy in host memory.
    """
    tensors, _ = extract_sharded_tensors_and_factories(model_state)
    model_entries = {sharded.data: sharded for sharded in nested_values(tensors)}
    readable = (metadata or {}).get(READABLE, as_it_is)
    state = {}
    for number, updated in enumerate(_parameters(optimizer)):
        mine = updated.mine
        if mine is None:
            continue
        sharded = model_entries[updated.parameter]
        values = _empty(updated) if is_loading else _gather(optimizer, updated, mine, readable)
        if values:
            replica = 0 if mine == updated.owner else 1 + mine.rank
            state[number] = {
                kind: _like(sharded, kind, value, replica) for kind, value in values.items()
            }
    return state


def _parameters(optimizer: DistributedOptimizer) -> Iterator[_Updated]:
    """Yield parameters in the order of `load_parameter_state_from_fully_reshardable`."""
    for buffer in optimizer.buffers:
        group = buffer.data_parallel_group
        for parameter, (start, end, bucket_id) in buffer.param_index_map.items():
            bucket = buffer.buckets[bucket_id]
            shard_size = bucket.grad_data.numel() // group.size()
            parts = split(start - bucket.offset, end - bucket.offset, shard_size)
            yield _Updated(parameter, parts, group)


def _empty(updated: _Updated) -> dict[str, Tensor]:
    return {kind: torch.empty(updated.parameter.shape, dtype=torch.float32) for kind in KINDS}


def as_it_is(tensor: Tensor) -> Tensor:
    """Return `tensor`: a `readable` for memory that never moves."""
    return tensor


def _gather(
    optimizer: DistributedOptimizer, updated: _Updated, mine: Part, readable: Readable
) -> dict[str, Tensor]:
    """Return the whole state of a parameter on its owner, {} elsewhere.

    The state is not copied if one rank updates the whole parameter.
    """
    states = _states(optimizer, updated.parameter)
    owned = {kind: states[kind].detach() for kind in KINDS}
    for kind, part in owned.items():
        if part.dtype != torch.float32:
            owned[kind] = readable(part).to("cpu", torch.float32)
    if len(updated.parts) > 1:
        owned = {kind: _gather_one(readable(part), updated, mine) for kind, part in owned.items()}
    if mine != updated.owner:
        return {}
    return {kind: whole.view(updated.parameter.shape) for kind, whole in owned.items()}


def _states(optimizer: DistributedOptimizer, parameter: torch.nn.Parameter) -> Mapping[str, Tensor]:
    """Return this rank's main weight and moments of a parameter where they lie, by KINDS.

    megatron-core copies those of the precision-aware optimizer to float32, but they may have been
    moved to host memory meanwhile.
    """
    if not optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        return optimizer._get_main_param_and_optimizer_states(parameter)
    group, place = optimizer.model_param_group_index_map[parameter]
    shard = optimizer.optimizer.param_groups[group]["params"][place]
    state = optimizer.optimizer.state[shard]
    return {"param": state["master_param"], **state}


def _gather_one(part: Tensor, updated: _Updated, mine: Part) -> Tensor:
    """Return the whole of one kind of state on the owner; other ranks send their part.

    All ranks go through the parameters in the same order, so that no two wait for each other.
    """
    group = updated.group
    owner = updated.owner
    if mine != owner:
        for piece in part.split(_PIECE_NUMEL):
            dist.send(piece.to(device()), group=group, group_dst=owner.rank)
        return part
    whole = torch.empty(updated.parameter.numel(), dtype=part.dtype)
    for other in updated.parts:
        place = whole[other.start : other.end]
        if other == mine:
            place.copy_(part)
            continue
        for piece in place.split(_PIECE_NUMEL):
            received = torch.empty_like(piece, device=device())
            dist.recv(received, group=group, group_src=other.rank)
            piece.copy_(received)
    return whole


def _like(
    sharded: ShardedTensor | ShardedTensorFactory, kind: str, value: Tensor, replica: int
) -> ShardedTensor | ShardedTensorFactory:
    """Return the model's sharded entry with a state of its parameter in place of the parameter."""
    model_replica = sharded.replica_id[:-1]  # type: ignore[index]
    changes: dict[str, Any] = {
        "key": f"optimizer.state.{kind}.{sharded.key}",
        "data": value,
        "replica_id": (*model_replica, replica),
    }
    if isinstance(sharded, ShardedTensor):
        changes["dtype"] = value.dtype
    return replace(sharded, **changes)
