"""A plan executed by local copies: boxes arrive where the target has them, in its dtype."""

import torch

from mcore_rl.weights.box import Box, Shard
from mcore_rl.weights.plan.whole import Transfer, make_plan
from tests.support.reshard import copy_box, reshard

SOURCE = Shard(Box("w", (1, 0), (3, 2)), "a", 2, (2, 1), "float32")
TARGET = Shard(Box("w", (1, 0), (3, 2)), "b", 0, (1, 2), "bfloat16")


def test_a_box_is_copied_to_its_place_and_cast() -> None:
    source = torch.arange(8.0)
    target = torch.zeros(4, dtype=torch.bfloat16)
    copy_box(Transfer(0, 0, SOURCE, TARGET), {"a": source}, {"b": target})
    assert target.tolist() == [2.0, 4.0, 3.0, 5.0]  # the target holds the box transposed


def test_all_transfers_are_executed_between_their_ranks() -> None:
    def rows(first: int, last: int) -> Shard:
        return Shard(Box("w", (first, 0), (last, 2)), "w", 0, (2, 1), "float32")

    whole = torch.arange(12.0).view(6, 2)
    plan = make_plan([[rows(0, 3)], [rows(3, 6)]], [[rows(2, 5)], [rows(0, 6)]])
    sources = [{"w": whole[:3].clone()}, {"w": whole[3:].clone()}]
    targets = [{"w": torch.zeros(3, 2)}, {"w": torch.zeros(6, 2)}]
    reshard(plan, sources, targets)
    assert torch.equal(targets[0]["w"], whole[2:5])
    assert torch.equal(targets[1]["w"], whole)
