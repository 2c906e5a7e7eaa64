"""Holds the factors A [rank, in] and B [out, rank] of HF tensors that a chunk of a model has.

A tensor's factors lie whole on every rank that holds a part of the tensor (tensor-parallel ranks,
expert-tensor-parallel ranks for experts), so a checkpoint of them fits any layout:

    lora.<HF tensor>.A, lora.<HF tensor>.B     one entry each, written by one rank

A is drawn as in PEFT, B is 0 (arXiv:2106.09685, section 4.1).
"""

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from mcore_rl.weights.box import Box, Shape, Shard
from mcore_rl.weights.lora.facts import FACTORS, is_of_expert


@dataclass(frozen=True)
class AdaptedMatrix:
    """An HF matrix [out, in] with factors, and where this rank holds parts of it.

    shares   of each shard: the part of its gradient that counts, since tensor-parallel ranks may
             hold the same box, each with its whole gradient
    """

    name: str
    shape: Shape
    shards: tuple[Shard, ...]
    shares: tuple[float, ...]
    is_expert: bool

    @property
    def group(self) -> dist.ProcessGroup:
        """Return the ranks that hold parts of the tensor, in one data-parallel replica."""
        return _find_group(self.is_expert)


class LowRankFactors(torch.nn.Module):
    """The factors of a chunk's targets, as parameters "<number>_A" and "<number>_B"."""

    def __init__(
        self, targets: Sequence[AdaptedMatrix], rank: int, dtype: torch.dtype, seed: int
    ) -> None:
        super().__init__()
        self.targets = tuple(targets)
        for number, target in enumerate(targets):
            out_size, in_size = target.shape
            first = torch.nn.Parameter(_draw_first(target.name, rank, in_size, seed).to(dtype))
            second = torch.nn.Parameter(torch.zeros(out_size, rank, dtype=dtype))
            for parameter in (first, second):
                # Experts go to the buffers that expert data-parallel ranks reduce.
                parameter.allreduce = not target.is_expert  # type: ignore[attr-defined]
            self.register_parameter(f"{number}_A", first)
            self.register_parameter(f"{number}_B", second)

    def list_pairs(self) -> Iterator[tuple[AdaptedMatrix, torch.nn.Parameter, torch.nn.Parameter]]:
        """Yield (target, A, B)."""
        for number, target in enumerate(self.targets):
            yield target, getattr(self, f"{number}_A"), getattr(self, f"{number}_B")

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return the whole factors; one of the ranks that have them writes them."""
        state = {}
        for number, (target, first, second) in enumerate(self.list_pairs()):
            for letter, parameter in (("A", first), ("B", second)):
                state[f"{prefix}{number}_{letter}"] = ShardedTensor.from_rank_offsets(
                    f"{FACTORS}{target.name}.{letter}",
                    parameter,
                    replica_id=(0, target.group.rank(), _find_replica(target)),
                )
        return state


def _find_replica(target: AdaptedMatrix) -> int:
    if target.is_expert:
        return ps.get_expert_data_parallel_rank()
    return ps.get_data_parallel_rank(with_context_parallel=True)


def _draw_first(name: str, rank: int, in_size: int, seed: int) -> Tensor:
    """Return A from a generator of its own: all layouts draw the same."""
    digest = hashlib.sha256(f"{seed} {FACTORS}{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    bound = 1 / math.sqrt(in_size)
    return torch.empty(rank, in_size).uniform_(-bound, bound, generator=generator)


def find_targets(
    shards: Sequence[Shard],
    shapes: Mapping[str, Shape],
    names: Collection[str],
    cut: Collection[str],
) -> list[AdaptedMatrix]:
    """Return the targets among the tensors of this rank's shards; a collective.

    names   HF tensors that have factors
    cut     local tensors whose gradient on a rank is that of its part of each sequence
    """
    held: dict[str, list[Shard]] = {name: [] for name in names}
    for shard in shards:
        if shard.box.name in held:
            held[shard.box.name].append(shard)
    targets = [
        AdaptedMatrix(name, shapes[name], tuple(own), (), is_of_expert(name))
        for name, own in held.items()
        if own
    ]
    copies = {is_expert: _count_copies(targets, is_expert) for is_expert in (False, True)}
    return [
        replace(
            target,
            shares=tuple(
                1.0 if shard.tensor in cut else 1.0 / copies[target.is_expert][shard.box]
                for shard in target.shards
            ),
        )
        for target in targets
    ]


def _count_copies(targets: Sequence[AdaptedMatrix], is_expert: bool) -> Counter[Box]:
    """Return on how many ranks of their group the boxes of targets lie; a collective."""
    own = [
        shard.box for target in targets if target.is_expert == is_expert for shard in target.shards
    ]
    group = _find_group(is_expert)
    held: list[list[Box]] = [[] for _ in range(group.size())]
    dist.all_gather_object(held, own, group=group)
    return Counter(box for boxes in held for box in boxes)


def _find_group(is_expert: bool) -> dist.ProcessGroup:
    if is_expert:
        return ps.get_expert_tensor_parallel_group()
    return ps.get_tensor_model_parallel_group()
