"""Names and storage of local tensors; tests/scenarios/train/test_families.py checks the boxes."""

from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from mcore_rl.train.weights import _leaves, _part, local_tensors


def make_chunk() -> torch.nn.Module:
    chunk = torch.nn.Linear(3, 2)
    chunk.register_buffer("expert_bias", torch.ones(2))
    chunk.register_buffer("scratch", torch.ones(2), persistent=False)
    return chunk


def test_parameters_and_saved_buffers_are_found_by_chunk() -> None:
    tensors = local_tensors([make_chunk(), make_chunk()])
    names = ("bias", "expert_bias", "weight")
    assert sorted(tensors) == [f"{chunk}.{name}" for chunk in (0, 1) for name in names]


def test_tensors_are_views_without_gradients() -> None:
    chunk = cast(Any, make_chunk())
    tensors = local_tensors([chunk])
    tensors["0.weight"].fill_(7.0)
    assert (chunk.weight == 7).all() and not tensors["0.weight"].requires_grad


def test_a_part_of_a_parameter_is_a_box_at_an_offset() -> None:
    """The second half of linear_fc1 is expert 3's up projection."""
    whole = torch.zeros(4, 3)
    shard = ShardedTensor.from_rank_offsets(
        "experts.fc1", whole[2:], (0, 3, 8), prepend_axis_num=1, replica_id=0
    )
    part = _part(shard, "0.fc1", whole)
    assert (part.key, part.tensor, part.offset, part.dtype) == (
        "experts.fc1",
        "0.fc1",
        6,
        "float32",
    )
    assert part.global_shape == (8, 2, 3) and part.global_offset == (3, 0, 0)
    assert part.local_shape == (1, 2, 3)


def test_leaves_of_nested_factories_are_found() -> None:
    shards = [ShardedTensor.from_rank_offsets(str(i), torch.zeros(2)) for i in range(3)]
    tree = {"a": [shards[0], {"b": shards[1]}], "c": shards[2]}
    assert list(_leaves(tree)) == shards
