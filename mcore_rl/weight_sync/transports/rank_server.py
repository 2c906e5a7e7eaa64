"""An abstract socket of one rank, to which ranks of the same machine connect once each."""

import os
import socket
import struct
import time
from collections.abc import Collection, Iterator
from uuid import uuid4

from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.transports.transport import FAILURE_POLL_S, TransferError, wait_until

_RETRY_S = 0.005


class RankServer:
    """Listens under `name`, which the other ranks must know; by default a random one."""

    def __init__(self, name: str = "") -> None:
        self.name = name or f"mcore_rl-{uuid4().hex}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen()

    def accept(
        self, end: LinkEnd, ranks: Collection[int], purpose: str
    ) -> Iterator[tuple[int, socket.socket]]:
        """Yield each of `ranks` and the socket to it, in the order in which they come.

        Then nobody can connect any more. Raises TransferError, which names those that did not come
        by end.deadline_s, or before the link failed, and the `purpose`.
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
                    late = ", ".join(end.link.name_of(rank) for rank in sorted(missing))
                    message = f"{end.name} waited in vain for {late} to {purpose}: {reason}"
                    raise TransferError(message, peer_lost=True)
                peer = accepted.pop()
                rank = _check_user(peer)
                assert rank in missing, f"rank {rank} came uninvited to {purpose}"
                missing.remove(rank)
                yield rank, peer


def connect(peer: socket.socket, end: LinkEnd, server: str, *, comes_later: bool = False) -> None:
    """Connect `peer` to the RankServer named `server` by end.deadline_s, and say who comes.

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
    """Return the rank that a peer says it is; only processes of the same user are let in."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    user = struct.unpack("3i", credentials)[1]
    assert user == os.getuid(), f"a process of user {user} asked for shared memory"
    peer.settimeout(FAILURE_POLL_S)
    return struct.unpack("q", peer.recv(8, socket.MSG_WAITALL))[0]
