"""Who sits on which node, in words."""

from typing import Any

from mcore_rl.cluster.nodes import Node
from mcore_rl.cluster.placement import report_placement
from mcore_rl.planning.slots import RunSlots, Slot

NO_GROUP: Any = None
NODES = [Node(str(k), name, name, f"10.0.0.{k}", 8, 0) for k, name in enumerate("abcd")]


def on(nodes: str) -> list[Slot]:
    return [Slot(NO_GROUP, 0, {"CPU": 1.0}, node) for node in nodes]


def test_each_node_with_processes_has_a_line() -> None:
    slots = RunSlots(
        trainer=on("aab"),
        critic=on("aba"),
        engines=[on("bc"), on("c")],
        served={"judge": [on("c")]},
    )
    assert report_placement(slots, NODES) == [
        "node a (10.0.0.0): trainer ranks 0-1; critic ranks 0, 2",
        "node b (10.0.0.1): trainer rank 2; critic rank 1; engine 0 (part 1 of 2)",
        "node c (10.0.0.2): engine 0 (part 2 of 2); engine 1; judge 0",
    ]
