"""Knows which nodes have joined Ray, from a process that asks its head."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from mcore_rl.process.process_state import wait_killed
from mcore_rl.process.safe_path import safe_module


class JoinedNodes:
    """The nodes in the Ray at `address`; `end` ends the process that asks it."""

    def __init__(self, address: str, num_nodes: int, folder: Path) -> None:
        self._path = folder / "joined.json"
        self._path.unlink(missing_ok=True)
        with (folder / "roll_call.log").open("w") as log:
            self._process = subprocess.Popen(
                [
                    *safe_module("mcore_rl.cluster.node_agent.roll_call"),
                    *(address, str(num_nodes), str(self._path)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def names(self) -> Sequence[str]:
        """Return the names of the nodes that have joined; none while the head does not answer."""
        return json.loads(self._path.read_text()) if self._path.exists() else []

    def end(self) -> None:
        self._process.kill()
        wait_killed(self._process, "the watcher of joined nodes")
