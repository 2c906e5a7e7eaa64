"""Lets the nodes meet in a shared folder and exchange values there, with deadlines that name nodes.

    node 0                      folder                      node r
                 <--  hello_r: a number drawn now  <--
    all came     -->  session: id, all numbers     -->      its own number is in it
                 <--  ack_r: id, number            <--
    <id>/facts_0 ... one file per node and step, written under another name first

Numbers drawn anew tell this meeting from files that an earlier one left. Options, or the variables
of SLURM, say which node this process is.
"""

import shutil
import socket
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from mcore_rl.process.shared_values import SharedValues


@dataclass(frozen=True)
class NodePlace:
    """The number of this node, of how many, and its name in the report."""

    rank: int
    size: int
    name: str


def read_place(
    nodes: int | None, node_rank: int | None, node_name: str, environ: Mapping[str, str]
) -> NodePlace:
    """Return the place that the options give; SLURM's task gives what they leave out.

    Raises ValueError naming the option that is missing or out of range.
    """
    size = _read_number("--nodes", nodes, "SLURM_NTASKS", environ)
    rank = _read_number("--node-rank", node_rank, "SLURM_PROCID", environ)
    if size < 1:
        raise ValueError(f"--nodes={size}: there is at least one")
    if not 0 <= rank < size:
        raise ValueError(f"--node-rank={rank}: nodes are counted from 0 to {size - 1}")
    return NodePlace(rank, size, node_name or environ.get("SLURMD_NODENAME") or _find_host())


def _read_number(option: str, given: int | None, variable: str, environ: Mapping[str, str]) -> int:
    if given is not None:
        return given
    value = environ.get(variable, "")
    if not value.isdigit():
        raise ValueError(
            f"{option} is not given and {variable} is not set: give {option}, or start one task on"
            " each node by `srun mcore-rl doctor --rendezvous <shared folder>`"
        )
    return int(value)


def _find_host() -> str:
    return socket.gethostname().partition(".")[0]


POLL_S = 0.02
VERDICT = "verdict"


class MissingNodesError(RuntimeError):
    """Nodes did not do their part in time; the message names them, the folder and the part."""


class MeetingOverError(RuntimeError):
    """Node 0 ended the meeting before this node's next step."""


class Meeting:
    """The exchange between the nodes; `names` are theirs by rank, numbers until they are known."""

    def __init__(self, root: Path, place: NodePlace, timeout_s: float) -> None:
        self.place = place
        self.token = uuid.uuid4().hex
        self.names = [f"node {rank}" for rank in range(place.size)]
        self._root = SharedValues(root)
        self._timeout_s = timeout_s
        self._values = self._root
        self._numbers: dict[str, str] = {}

    def __enter__(self) -> "Meeting":
        """Wait for all nodes. Raises MissingNodesError, or OSError if the folder cannot be used."""
        self._root.folder.mkdir(parents=True, exist_ok=True)
        try:
            session = self._call_together() if self.place.rank == 0 else self._come()
        except BaseException:
            self._remove_own()
            raise
        self.token = session
        self._values = SharedValues(self._root.folder / f"doctor_{session}")
        self._values.folder.mkdir(exist_ok=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.place.rank == 0:
            self._remove_own()
            shutil.rmtree(self._values.folder, ignore_errors=True)

    def exchange(self, what: str, own: Any, timeout_s: float | None = None) -> list[Any]:
        """Give `own` to all nodes and return what all gave, by rank.

        Raises MissingNodesError naming those that gave nothing in time.
        """
        self.put(f"{what}_{self.place.rank}", own)
        return self.take([f"{what}_{rank}" for rank in range(self.place.size)], what, timeout_s)

    def put(self, name: str, value: Any) -> None:
        self._values.put(name, value)

    def take(self, names: Sequence[str], what: str, timeout_s: float | None = None) -> list[Any]:
        """Return the values put under these names, whose last parts are the ranks that put them.

        Raises MissingNodesError naming who put nothing in time, MeetingOverError if node 0 ended
        the meeting meanwhile.
        """
        found = dict(self.arrivals(names, what, timeout_s))
        return [found[name] for name in names]

    def arrivals(
        self, names: Sequence[str], what: str, timeout_s: float | None = None
    ) -> Iterator[tuple[str, Any]]:
        """Yield name and value as they come; errors as in `take`."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        waiting = set(names)

        def list_arrived() -> list[str]:
            here = self._values.list_names()
            if f"{VERDICT}_0" in here and not waiting <= here:
                raise MeetingOverError(f"node 0 ended the meeting before {what}")
            return sorted(waiting & here)

        deadline_s = time.monotonic() + limit_s
        while waiting:
            if not wait_until(lambda: bool(list_arrived()), deadline_s - time.monotonic()):
                absent = sorted(int(name.rpartition("_")[2]) for name in waiting)
                raise MissingNodesError(
                    f"{self._name_nodes(absent)} did not put {what} into {self.folder} in"
                    f" {limit_s:g} s"
                )
            for name in list_arrived():
                value = self._values.get(name)
                if value is not None:
                    waiting.remove(name)
                    yield name, value

    def end(self, failed: bool) -> None:
        """Tell all nodes, as node 0, how the checks ended, and wait until they know."""
        self.put(f"{VERDICT}_0", {"failed": failed})
        others = {f"ack_{rank}" for rank in range(1, self.place.size)}
        wait_until(lambda: not others & self._root.list_names(), min(self._timeout_s, 10.0))

    def read_end(self) -> bool:
        """Return, as another node, whether node 0 says that a check failed."""
        [verdict] = self.take([f"{VERDICT}_0"], "the end of the checks", 2 * self._timeout_s)
        self._remove_own()
        return bool(verdict["failed"])

    @property
    def folder(self) -> Path:
        """The folder of this meeting, which is removed at its end."""
        return self._values.folder

    def _call_together(self) -> str:
        """As node 0: list who came until all have seen that they are listed."""
        session, others = self.token, range(1, self.place.size)
        came: dict[str, str] = {}

        def all_know() -> bool:
            here = self._root.list_names()
            for rank in others:
                if f"hello_{rank}" in here:
                    came[str(rank)] = self._root.get(f"hello_{rank}") or ""
            if len(came) == len(others) and self._numbers != came:
                self._numbers = dict(came)
                self._root.put("session", {"id": session, "numbers": came})
            acks = {str(r): self._root.get(f"ack_{r}") for r in others if f"ack_{r}" in here}
            knowing = {rank: [session, number] for rank, number in self._numbers.items()}
            return len(knowing) == len(others) and acks == knowing

        if self.place.size == 1 or wait_until(all_know, self._timeout_s):
            return session
        here = self._root.list_names()
        absent = [rank for rank in others if f"hello_{rank}" not in here]
        raise MissingNodesError(
            f"{self._name_nodes(absent or list(others))} did not come to {self._root.folder} in"
            f" {self._timeout_s:g} s"
        )

    def _come(self) -> str:
        """As another node: say that it is here until node 0 lists it."""
        rank = self.place.rank
        self._root.put(f"hello_{rank}", self.token)
        session: dict[str, Any] = {}

        def is_listed() -> bool:
            session.update(self._root.get("session") or {})
            return session.get("numbers", {}).get(str(rank)) == self.token

        if not wait_until(is_listed, self._timeout_s):
            raise MissingNodesError(
                f"node 0 did not come to {self._root.folder} in {self._timeout_s:g} s, or waits for"
                " others"
            )
        self._root.put(f"ack_{rank}", [session["id"], self.token])
        return session["id"]

    def _remove_own(self) -> None:
        """Remove this node's files; as node 0 also those of nodes that ended before the others."""
        if self.place.rank:
            self._remove_of(self.place.rank)
            return
        self._root.remove("session")
        for rank, number in self._numbers.items():
            # Not those of a node that has come again, for the next meeting.
            if self._root.get(f"hello_{rank}") == number:
                self._remove_of(int(rank))

    def _remove_of(self, rank: int) -> None:
        self._root.remove(f"hello_{rank}")
        self._root.remove(f"ack_{rank}")

    def _name_nodes(self, ranks: Collection[int]) -> str:
        names = [
            self.names[r] if self.names[r] == f"node {r}" else f"node {r} ({self.names[r]})"
            for r in ranks
        ]
        return f"{', '.join(names)} of {self.place.size}"


def wait_until(is_done: Callable[[], bool], timeout_s: float) -> bool:
    """Poll until `is_done` or until the deadline; return whether it is done."""
    deadline_s = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)
    return True
