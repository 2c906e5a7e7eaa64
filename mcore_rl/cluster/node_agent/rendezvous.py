"""Keeps what the nodes of a job tell one another, as files in a folder that all of them see.

head.json      where Ray's head listens
token          Ray's authentication token, readable by the owner alone
node_<k>.json  how far node k is
stop           made by the job's script to have the run save and end
done.json      the exit status of the run; all nodes leave once it is there
"""

import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcore_rl.process.disk import write_whole

STARTED = "started"
FAILED = "failed"
LEFT = "left"


@dataclass(frozen=True)
class Note:
    """How far a node is: STARTED, FAILED (`text` says why) or LEFT."""

    phase: str
    text: str = ""


class Rendezvous:
    """The folder of one attempt of a job; another attempt has another folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = folder / "token"

    def open(self) -> None:
        """Make the folder. Raises ValueError if it cannot be made or written to."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ValueError(
                f"the job's folder {self.folder}: {error}; it must lie where every node can write,"
                " so choose another run.dir"
            ) from None

    def make_token(self) -> None:
        descriptor = os.open(self.token, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))

    def publish(self, address: str) -> None:
        self._write("head.json", {"address": address})

    def head_address(self) -> str | None:
        """Return host:port of Ray's head, or None if it is not known yet."""
        content = self._read("head.json")
        return content and content["address"]

    def note(self, rank: int, note: Note) -> None:
        self._write(f"node_{rank}.json", asdict(note))

    def note_of(self, rank: int) -> Note | None:
        content = self._read(f"node_{rank}.json")
        return content and Note(**content)

    def is_asked_to_stop(self) -> bool:
        return "stop" in os.listdir(self.folder)

    def finish(self, status: int) -> None:
        self._write("done.json", {"status": status})

    def status(self) -> int | None:
        """Return the run's exit status once it ended."""
        content = self._read("done.json")
        return content and content["status"]

    def _write(self, name: str, content: dict[str, Any]) -> None:
        write_whole(self.folder / name, json.dumps(content))

    def _read(self, name: str) -> Any:
        # A listing makes clients of network file systems look at the server again.
        if name not in os.listdir(self.folder):
            return None
        return json.loads((self.folder / name).read_text())
