"""Describes a job to each of its nodes, and the folder in which nodes leave notes for one another.

head.json      where Ray's head listens
token          Ray's authentication token, readable by the owner alone
node_<k>.json  how far node k is
stop           made by the job's script to have the run save and end
done.json      the exit status of the run; all nodes leave once the file exists
"""

import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from mcore_rl.process.shared_values import SharedValues

NAME_LABEL = "mcore-rl/name"
"""The node's name in the job."""
ORDER_LABEL = "mcore-rl/order"
"""The node's place in an order in which neighbors share switches."""


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
        self._values = SharedValues(folder)
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
        self._values.put("head", {"address": address})

    def head_address(self) -> str | None:
        """Return host:port of Ray's head, or None if it is not known yet."""
        content = self._values.get("head")
        return content and content["address"]

    def note(self, rank: int, note: Note) -> None:
        self._values.put(f"node_{rank}", asdict(note))

    def note_of(self, rank: int) -> Note | None:
        content = self._values.get(f"node_{rank}")
        return content and Note(**content)

    def is_asked_to_stop(self) -> bool:
        return "stop" in os.listdir(self.folder)

    def finish(self, status: int) -> None:
        self._values.put("done", {"status": status})

    def status(self) -> int | None:
        """Return the run's exit status once it ended."""
        content = self._values.get("done")
        return content and content["status"]


@dataclass(frozen=True)
class Job:
    """A job, as one of its nodes sees it.

    rank             of this node; node 0 starts Ray's head and the command
    names            of all nodes, in rank order
    addresses        names or addresses at which the nodes reach one another, in the same order
    folder           of this attempt, seen by all nodes
    command          arguments of `mcore-rl`, without cluster.address
    interface        network interface to use; empty: the interface that reaches the other nodes
    topology         switches above this node and its name, as in s0.s3.node7; empty: unknown
    trainer_nodes    number of first nodes kept for trainer and critic; 0: all roles share all nodes
    timeout_s        how long nodes wait for one another
    """

    rank: int
    names: tuple[str, ...]
    addresses: tuple[str, ...]
    folder: Path
    command: tuple[str, ...]
    interface: str = ""
    topology: str = ""
    trainer_nodes: int = 0
    num_cpus: int = 1
    num_gpus: int = 0
    object_store_mib: int = 512
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < len(self.names) == len(self.addresses):
            raise ValueError(
                f"node {self.rank} of a job of {len(self.names)} nodes"
                f" ({', '.join(self.names)}) with {len(self.addresses)} addresses"
            )

    @property
    def name(self) -> str:
        return self.names[self.rank]

    @property
    def order(self) -> str:
        """The node's place in an order in which nodes below one switch are neighbors."""
        switches = self.topology.rpartition(".")[0]
        return f"{switches}.{self.rank:06d}".removeprefix(".")

    @property
    def num_nodes(self) -> int:
        return len(self.names)
