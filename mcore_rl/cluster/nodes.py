"""Lists the nodes of the joined Ray cluster, and waits for nodes to join."""

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import ray

from mcore_rl.cluster.node_agent.job import NAME_LABEL, ORDER_LABEL

POLL_S = 0.5
CONNECT_S = 2.0


@dataclass(frozen=True)
class Node:
    """A live node of the cluster; `id` is Ray's. Nodes are in the order of `order`, then `id`."""

    order: str
    id: str
    name: str
    address: str
    gpus: int
    port: int
    """The port of Ray's process on the node."""

    def answers(self) -> bool:
        """Return whether Ray's process there takes a connection.

        Ray itself notices only after some seconds that a node is lost.
        """
        try:
            with socket.create_connection((self.address, self.port), CONNECT_S):
                return True
        except OSError:
            return False


def list_alive_nodes() -> list[Node]:
    """Return the live nodes in their order."""
    return sorted(
        (
            Node(
                node["Labels"].get(ORDER_LABEL, ""),
                node["NodeID"],
                node["Labels"].get(NAME_LABEL, node["NodeName"]),
                node["NodeManagerAddress"],
                int(node["Resources"].get("GPU", 0)),
                node["NodeManagerPort"],
            )
            for node in ray.nodes()
            if node["Alive"]
        ),
        key=lambda node: (node.order, node.id),
    )


def wait_for_nodes(num_nodes: int, timeout_s: float, names: Sequence[str] = ()) -> list[Node]:
    """Return the live nodes once there are `num_nodes`.

    Raises ValueError after `timeout_s`. The error names the nodes that joined and, if all `names`
    are known, the missing ones.
    """
    until = time.monotonic() + timeout_s
    while len(nodes := list_alive_nodes()) < num_nodes:
        if time.monotonic() > until:
            came = [node.name for node in nodes]
            missing = [name for name in names if name not in came]
            missed = f"; missing: {', '.join(missing)}" if missing else ""
            raise ValueError(
                f"after {timeout_s:g} s Ray has {len(nodes)} of {num_nodes} nodes:"
                f" {', '.join(came)}{missed}"
            )
        time.sleep(POLL_S)
    return nodes
