"""One rank's end of a link: meets the other ranks, at the link's store and on the rank's machine.

Each rank publishes its facts at the store, and all ranks get the roster. Ranks of one machine also
meet at an abstract socket (`RankServer`), over which they share memory.
"""

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from uuid import uuid4

import torch

from mcore_rl.device.gpu_memory import gpu_id, readable_gpus
from mcore_rl.weight_sync.link_store import FACTS, LinkStore
from mcore_rl.weight_sync.roster import RankFacts, Roster, read_machine_id
from mcore_rl.weight_sync.transports.host.one_pass import find_library
from mcore_rl.weight_sync.transports.host.segment import Segment
from mcore_rl.weight_sync.verify import list_sum_kinds
from mcore_rl.weight_sync.waits import FAILURE_POLL_S, TransferError, wait_until
from mcore_rl.weight_sync.wire import Link

_RETRY_S = 0.005
NUM_SETS = 2
"""Sets of an engine's tensors, which take turns."""


@dataclass(frozen=True)
class LinkEnd:
    """A rank of a link, and the place and deadline of its meeting with the other ranks.

    rank        number over the whole link: senders first, then the engine's ranks
    deadline_s  time.monotonic() by which all ranks must have connected; transfers have their own
    device      of this rank's tensors
    memory      of an engine rank that opens its memory to trainer ranks of the same machine
    roster      of the link; None until this rank has it
    """

    store: LinkStore
    link: Link
    rank: int
    deadline_s: float
    device: torch.device
    memory: "OpenMemory | None" = None
    roster: Roster | None = None

    @staticmethod
    def open(
        link: Link,
        rank: int,
        device: torch.device,
        memory: "OpenMemory | None" = None,
        roster: Roster | None = None,
    ) -> "LinkEnd":
        """Return an end; from now on all ranks have link.timeout_s to meet."""
        deadline_s = time.monotonic() + link.timeout_s
        return LinkEnd(LinkStore.open(link), link, rank, deadline_s, device, memory, roster)

    @property
    def name(self) -> str:
        return self.link.name_rank(self.rank)

    @property
    def is_sender(self) -> bool:
        return self.rank < self.link.num_senders

    @property
    def side_rank(self) -> int:
        """The rank counted among the ranks of its own side."""
        return self.rank if self.is_sender else self.rank - self.link.num_senders

    def collect(self, topic: str, ranks: Sequence[int] | None = None) -> list[bytes]:
        """LinkStore.collect from `ranks` (default: all of the link), by this end's deadline."""
        names = self.link.names
        if ranks is None:
            ranks = range(len(names))
        return self.store.collect(topic, ranks, names, self.name, self.deadline_s)

    def wait_joined(self, topic: str) -> bytes:
        """LinkStore.wait_joined of all ranks of the link, by this end's deadline."""
        return self.store.wait_joined(topic, self.link.names, self.name, self.deadline_s)

    def make_lost_error(self, what: str, reason: str, began_s: float) -> TransferError:
        """Return the error of a wait for `what` that began at time.monotonic() `began_s`."""
        waited_s = time.monotonic() - began_s
        return TransferError(
            f"{self.name} waited {waited_s:.1f} s for {what}: {reason}", peer_lost=True
        )


def describe_rank(
    device: torch.device, *, is_sender: bool, memory: "OpenMemory | None" = None
) -> RankFacts:
    """Return the facts of the calling rank, whose tensors are on `device`."""
    has_compiler = find_library() is not None
    return RankFacts(
        read_machine_id(),
        tuple(list_sum_kinds(device)),
        gpu_id(device),
        tuple(readable_gpus(device)),
        memory.name if memory is not None and has_compiler else "",
        is_sender and has_compiler,
    )


def publish_facts(end: LinkEnd) -> None:
    """Publish this rank's facts to the other ranks, unless `end` has the roster already."""
    if end.roster is not None:
        return
    with end.store.publish_errors(FACTS, end.rank, end.name):
        facts = describe_rank(end.device, is_sender=end.is_sender, memory=end.memory)
        end.store.publish(FACTS, end.rank, facts.encode())


def await_roster(end: LinkEnd) -> LinkEnd:
    """Return `end` with the roster, once all ranks of the link have published their facts.

    Raises TransferError, which names the ranks that have not by end.deadline_s.
    """
    if end.roster is not None:
        return end
    return replace(end, roster=Roster.decode(end.wait_joined(FACTS)))


class OpenMemory:
    """An engine rank's two sets of tensors, and the abstract socket for requests of access."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        assert len(segments) == NUM_SETS, f"{len(segments)} segments"
        self.segments = segments
        self.server = RankServer()
        self.name = self.server.name


class RankServer:
    """An abstract socket of one rank, to which ranks of the same machine connect once each.

    The socket listens under `name`, by default a random one, which the other ranks must know.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name or f"mcore_rl-{uuid4().hex}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen()

    def accept(
        self, end: LinkEnd, ranks: Collection[int], purpose: str
    ) -> Iterator[tuple[int, socket.socket]]:
        """Yield each of `ranks` and the socket to it, in the order in which ranks connect.

        Afterwards no rank can connect. Raises TransferError, which names the `purpose` and the
        ranks that did not connect by end.deadline_s or before the link failed.
        """
        missing = set(ranks)
        accepted: list[socket.socket] = []

        def has_come(seconds: float) -> bool:
            self._listener.settimeout(max(0.001, seconds))
            try:
                accepted.append(self._listener.accept()[0])
            except TimeoutError:
                return False
            return True

        with self._listener:
            while missing:
                reason = wait_until(has_come, end.deadline_s, end.store.failure)
                if reason is not None:
                    late = ", ".join(end.link.name_rank(rank) for rank in sorted(missing))
                    message = f"{end.name} waited in vain for {late} to {purpose}: {reason}"
                    raise TransferError(message, peer_lost=True)
                peer = accepted.pop()
                rank = _check_user(peer)
                assert rank in missing, f"rank {rank} came uninvited to {purpose}"
                missing.remove(rank)
                yield rank, peer


def connect(peer: socket.socket, end: LinkEnd, server: str, *, comes_later: bool = False) -> None:
    """Connect `peer` to the RankServer named `server` by end.deadline_s; send this rank's number.

    With `comes_later` the server may not listen yet. Raises OSError.
    """

    def has_connected(seconds: float) -> bool:
        until_s = time.monotonic() + seconds
        while True:
            try:
                peer.connect(f"\0{server}")
                return True
            except ConnectionRefusedError:
                if not comes_later:
                    raise
                if time.monotonic() > until_s:
                    return False
                time.sleep(_RETRY_S)

    peer.settimeout(max(0.001, end.deadline_s - time.monotonic()))
    reason = wait_until(has_connected, end.deadline_s, end.store.failure)
    if reason is not None:
        raise ConnectionRefusedError(reason)
    peer.sendall(struct.pack("q", end.rank))


def _check_user(peer: socket.socket) -> int:
    """Return the number that a peer sends; refuse processes of other users."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    user = struct.unpack("3i", credentials)[1]
    assert user == os.getuid(), f"a process of user {user} asked for shared memory"
    peer.settimeout(FAILURE_POLL_S)
    return struct.unpack("q", peer.recv(8, socket.MSG_WAITALL))[0]


def send_table(peer: socket.socket, message: bytes, table: bytes, name: str) -> None:
    """Send `message`, and memory that holds `table`; a later wait reports a peer that is gone.

    name  of the memory, for tools of the system
    """
    descriptor = os.memfd_create(name)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(table)
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(peer, [message], [descriptor])
    finally:
        os.close(descriptor)


def recv_table(
    end: LinkEnd,
    peer: socket.socket,
    num_bytes: int,
    what: str,
    deadline_s: float,
    failure: Callable[[], str | None],
) -> tuple[bytes, bytes]:
    """Return a message of `num_bytes`, and the table that came with it, empty without one.

    Raises TransferError, which names `what`, as Transport.run does.
    """
    poll = select.poll()
    poll.register(peer, select.POLLIN)

    def has_come(seconds: float) -> bool:
        return bool(poll.poll(max(1.0, 1000 * seconds)))

    began_s = time.monotonic()
    reason = wait_until(has_come, deadline_s, failure)
    if reason is not None:
        raise end.make_lost_error(what, reason, began_s)
    try:
        message, descriptors, _, _ = socket.recv_fds(peer, num_bytes, 1)
    except OSError as error:
        raise end.make_lost_error(what, "the process is gone", began_s) from error
    if len(message) < num_bytes:
        raise end.make_lost_error(what, "the process is gone", began_s)
    if not descriptors:
        return message, b""
    with open(descriptors[0], "rb") as file:
        return message, os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
