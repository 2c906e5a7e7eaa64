"""Ranks and engines are counted into nodes."""

import pytest

from mcore_rl.config.recipe import load_recipe
from mcore_rl.planning.bundles import NodeNeeds, NodeSize, RunSize, plan_nodes

JOINED = ["cluster.address=auto", "cluster.cpus_per_rank=1"]
APART = "cluster.separate_nodes=true"


def nodes_of(command: str, node: NodeSize, *settings: str) -> NodeNeeds:
    config = load_recipe("tiny_moe_grpo", [*JOINED, *settings])
    return plan_nodes(RunSize.make(config, command), config.rollout, config.cluster, node)


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
    assert nodes_of("train", node, *settings) == expected


def test_a_command_counts_what_it_starts() -> None:
    for command, nodes in (("train", 6), ("sft", 2), ("eval", 4)):
        assert nodes_of(command, NodeSize(1), "rollout.engines=4").nodes == nodes


def test_a_process_larger_than_a_node_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 4 CPUs and 0 GPUs of one node, which has 2 CPUs"):
        nodes_of("train", NodeSize(0, 2), "rollout.tp=4")
