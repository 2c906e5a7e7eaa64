"""Exchanges values between processes of several nodes, as JSON files in a folder.

A file exists whole or not at all. Each read lists the folder first, because a listing makes clients
of network file systems ask the server again.
"""

import json
import os
from pathlib import Path
from typing import Any

from mcore_rl.process.disk import write_whole


class SharedValues:
    """The values in one folder, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, name: str, value: Any) -> None:
        """Write a value; replace an earlier value of the same name."""
        write_whole(self.folder / f"{name}.json", json.dumps(value))

    def get(self, name: str) -> Any:
        """Return the value; None if this node does not see it, or not yet."""
        if f"{name}.json" not in self._list_files():
            return None
        try:
            return json.loads((self.folder / f"{name}.json").read_text())
        except (OSError, ValueError):  # The file is gone, or the client's view of it is old.
            return None

    def list_names(self) -> set[str]:
        """Return the names of all values; none if the folder is not there."""
        return {name.removesuffix(".json") for name in self._list_files() if name.endswith(".json")}

    def remove(self, name: str) -> None:
        (self.folder / f"{name}.json").unlink(missing_ok=True)

    def _list_files(self) -> set[str]:
        try:
            return set(os.listdir(self.folder))
        except FileNotFoundError:
            return set()
