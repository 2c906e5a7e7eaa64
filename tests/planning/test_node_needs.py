"""Ranks and engines are counted into nodes."""

import pytest

from mcore_rl.config.recipe import load_recipe
from mcore_rl.planning.bundles import NodeNeeds, NodeSize, plan_nodes

JOINED = ["cluster.address=auto", "cluster.cpus_per_rank=1"]
APART = "cluster.separate_nodes=true"


@pytest.mark.parametrize(
    ("settings", "node", "expected"),
    [
        ([], NodeSize(0, 3), NodeNeeds(1, 0, 0, 3)),  # two trainer ranks, one engine
        ([], NodeSize(0, 2), NodeNeeds(2, 0, 0, 2)),
        ([], NodeSize(0), NodeNeeds(1, 0, 0, 3)),
        ([APART], NodeSize(0, 3), NodeNeeds(2, 1, 0, 2)),
        ([], NodeSize(2), NodeNeeds(2, 0, 2, 2)),
        (["rollout.tp=4"], NodeSize(4), NodeNeeds(2, 0, 4, 4)),
        (["rollout.tp=4", "rollout.engines=3"], NodeSize(2), NodeNeeds(7, 0, 2, 2)),
    ],
)
def test_nodes_are_filled(settings: list[str], node: NodeSize, expected: NodeNeeds) -> None:
    config = load_recipe("tiny_moe_grpo", [*JOINED, *settings])
    assert plan_nodes(config, "train", node) == expected


def test_a_command_counts_what_it_starts() -> None:
    config = load_recipe("tiny_moe_grpo", [*JOINED, "rollout.engines=4"])
    assert plan_nodes(config, "train", NodeSize(1)).nodes == 6
    assert plan_nodes(config, "sft", NodeSize(1)).nodes == 2
    assert plan_nodes(config, "eval", NodeSize(1)).nodes == 4


def test_a_process_larger_than_a_node_is_refused() -> None:
    config = load_recipe("tiny_moe_grpo", [*JOINED, "rollout.tp=4"])
    with pytest.raises(ValueError, match="needs 4 CPUs and 0 GPUs of one node, which has 2 CPUs"):
        plan_nodes(config, "train", NodeSize(0, 2))
