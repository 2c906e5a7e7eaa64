"""A trainer rank's experts as words and scales, for as long as they are sent."""

import pytest
import torch

from mcore_rl.weight_sync.packed_experts import PackedExperts
from mcore_rl.weights.box import Box, Shard
from tests.support.int4_oracle import compress_with_library

UP = "model.layers.0.mlp.experts.0.up_proj.weight"
DOWN = "model.layers.0.mlp.experts.0.down_proj.weight"
NORM = "model.norm.weight"
SHAPES = {UP: (64, 128), DOWN: (128, 64), NORM: (128,)}
FC1 = torch.randn(128, 128, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
"""Gate and up of the expert; the second half is UP."""
TENSORS = {"fc1": FC1, "fc2": FC1[:, 32:64].clone(), "norm": torch.ones(128)}
SHARDS = [
    Shard(Box(UP, (0, 0), (64, 128)), "fc1", 64 * 128, (128, 1), "bfloat16"),
    Shard(Box(DOWN, (0, 32), (128, 64)), "fc2", 0, (32, 1), "bfloat16"),
    Shard(Box(NORM, (0,), (128,)), "norm", 0, (1,), "float32"),
]
"""A rank that holds the second half of the columns of DOWN."""


def test_words_and_scales_are_those_of_the_current_weights() -> None:
    tensors = {name: tensor.clone() for name, tensor in TENSORS.items()}
    packed = PackedExperts(SHARDS, tensors, SHAPES, rank=0)
    shard_of = {shard.box.name: shard for shard in packed.shards}
    assert shard_of[NORM] == SHARDS[2]
    assert shard_of[f"{DOWN}_packed"].box == Box(f"{DOWN}_packed", (0, 4), (128, 8))
    assert shard_of[f"{DOWN}_scale"].box == Box(f"{DOWN}_scale", (0, 1), (128, 2))
    for _ in range(2):
        with packed.swap_in():
            for name, weights in ((UP, tensors["fc1"][64:]), (DOWN, tensors["fc2"])):
                wanted = compress_with_library(weights)
                for suffix in ("_packed", "_scale"):
                    held = shard_of[name + suffix].view(packed.tensors)
                    assert torch.equal(held, wanted["weight" + suffix])
        tensors["fc1"].mul_(-1.25)


def test_they_have_memory_only_while_they_are_sent() -> None:
    packed = PackedExperts(SHARDS, TENSORS, SHAPES, rank=0)
    own = [tensor for name, tensor in packed.tensors.items() if name not in TENSORS]

    def count_bytes() -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in own)

    assert count_bytes() == 0
    with pytest.raises(KeyError), packed.swap_in():
        assert count_bytes() == (64 * 128 + 128 * 32) * 9 // 16
        raise KeyError
    assert count_bytes() == 0


def test_a_part_that_cuts_a_group_is_refused_by_rank_and_name() -> None:
    cut = Shard(Box(DOWN, (0, 48), (128, 64)), "fc2", 0, (32, 1), "bfloat16")
    with pytest.raises(ValueError, match=r"trainer rank 3 holds '.*down_proj.* groups of 32"):
        PackedExperts([cut], TENSORS, SHAPES, rank=3)
