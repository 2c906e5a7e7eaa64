"""Asks a Ray head which nodes have joined, in a process of its own, until all have.

Run as `python -m mcore_rl.cluster.node_agent.roll_call <address> <number of nodes> <file>`; the
file has the names as JSON. Ray ends a connected process when its raylet dies, and the agent must
survive that.
"""

import json
import logging
import sys
import time
from pathlib import Path

import ray

from mcore_rl.cluster.nodes import list_alive_nodes

POLL_S = 0.5


def main(address: str, num_nodes: int, path: Path) -> None:
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    names: list[str] = []
    while len(names) < num_nodes:
        names = [node.name for node in list_alive_nodes()]
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(names))
        partial.rename(path)
        time.sleep(POLL_S)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
