"""Lets trainer ranks write slices straight into the memory of an engine rank on their machine.

engine rank: OpenMemory                                   trainer rank: WriteAccess
keeps its tensors in segments
opens them or declines  <---------- abstract socket ----> asks, once
descriptors of the segments ----------------------------> maps them
WriteGrant, once per version: where its slices go ------> writes, then tells by a message

A rank writes only to the targets of a grant, and a grant names tensors that the engine does not
use. A link whose transfer failed is never used again, and the next link does not open memory into
which ranks of the failed link may still write.
"""

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np

from mcore_rl.types import Array
from mcore_rl.weight_sync.link_end import LinkEnd, connect
from mcore_rl.weight_sync.transports.host.one_pass import Targets
from mcore_rl.weight_sync.transports.host.segment import Segment, map_segment, populate
from mcore_rl.weight_sync.waits import TransferError, wait_until

_OFFER = struct.Struct("qq")
"""Bytes of the two segments; 0 for the first means no access."""
_GRANT = struct.Struct("qqq")
"""Version, number of the set of tensors, slices of the table that follows; 0: no table follows."""
_NUM_SETS = 2
_MOVE_FIELDS = 6
_ADDRESS, _OWN_STRIDE, _AT, _STRIDE, _ROWS, _ROW_BYTES = range(_MOVE_FIELDS)


def open_memory_to(end: LinkEnd, opens_to: Mapping[int, bool]) -> dict[int, "WriteGrants"]:
    """Open this rank's memory to the trainer ranks with `opens_to` true; decline all others.

    Raises TransferError, which names the ranks that did not ask by end.deadline_s.
    """
    assert end.memory is not None, "this rank offered its memory"
    segments = end.memory.segments
    grants: dict[int, WriteGrants] = {}
    for rank, peer in end.memory.server.accept(end, opens_to, "ask for its memory"):
        if opens_to[rank]:
            sizes = [segment.num_bytes for segment in segments]
            descriptors = [segment.descriptor for segment in segments]
            socket.send_fds(peer, [_OFFER.pack(*sizes)], descriptors)
            grants[rank] = WriteGrants(peer, segments)
        else:
            peer.sendall(_OFFER.pack(0, 0))
            peer.close()
    return grants


class WriteGrants:
    """An engine rank's end: sends the targets of a version's slices to one trainer rank."""

    def __init__(self, peer: socket.socket, segments: Sequence[Segment]) -> None:
        self._peer = peer
        self._segments = segments
        self._known: list[int] = []
        """Sets whose tables the peer has."""

    def grant(self, version: int, number: int, targets: Targets) -> None:
        """Have the peer write `version` to `targets`, which lie in set `number` of tensors."""
        table = b""
        if number not in self._known:
            table = self._encode(targets)
            self._known = [*self._known[1 - _NUM_SETS :], number]
        message = _GRANT.pack(version, number, len(targets.counts) if table else 0)
        with suppress(BrokenPipeError, ConnectionResetError):  # A later wait reports the peer.
            if not table:
                self._peer.sendall(message)
                return
            descriptor = os.memfd_create("mcore_rl_targets")
            try:
                with open(descriptor, "wb", closefd=False) as file:
                    file.write(table)
                socket.send_fds(self._peer, [message], [descriptor])
            finally:
                os.close(descriptor)

    def close(self) -> None:
        self._peer.close()

    def _encode(self, targets: Targets) -> bytes:
        """Return counts and moves as bytes; addresses become offsets into the joined segments."""
        first, second = self._segments
        moves = targets.moves.copy()
        in_first = _are_inside(moves, first.address, first.num_bytes)
        in_second = _are_inside(moves, second.address, second.num_bytes)
        assert (in_first | in_second).all(), "a slice belongs outside the shared memory"
        moves[in_first, _ADDRESS] -= first.address
        moves[in_second, _ADDRESS] -= second.address - first.num_bytes
        return targets.counts.tobytes() + moves.tobytes()


class WriteAccess:
    """A trainer rank's end: the mapped memory of one engine rank."""

    def __init__(self, end: LinkEnd, receiver: int, peer: socket.socket, maps: Sequence[Array]):
        self._end = end
        self._receiver = receiver
        self._peer = peer
        self._maps = maps
        self._poll = select.poll()
        self._poll.register(peer, select.POLLIN)
        self._tables: dict[int, Targets] = {}

    @staticmethod
    def ask(end: LinkEnd, receiver: int, server: str) -> "WriteAccess | None":
        """Return the access to the memory that rank `receiver` opens at `server`.

        Returns None if the receiver declines. Raises TransferError if it does not answer by
        end.deadline_s.
        """
        peer = socket.socket(socket.AF_UNIX)
        try:
            connect(peer, end, server)
            data, descriptors, _, _ = socket.recv_fds(peer, _OFFER.size, _NUM_SETS)
            if len(data) < _OFFER.size:
                raise ConnectionResetError("the process is gone")
        except OSError as error:
            peer.close()
            name = end.link.name_rank(receiver)
            raise TransferError(f"no memory of {name}: {error}", peer_lost=True) from error
        sizes = _OFFER.unpack(data)
        if not descriptors:
            peer.close()
            return None
        maps = []
        for descriptor, num_bytes in zip(descriptors, sizes, strict=True):
            maps.append(np.frombuffer(map_segment(descriptor, num_bytes), np.uint8))
            os.close(descriptor)
        return WriteAccess(end, receiver, peer, maps)

    def wait(self, version: int, deadline_s: float, failure: Callable[[], str | None]) -> Targets:
        """Return the targets of the slices of `version`.

        Raises TransferError as Transport.run does, or if the grant is for another version.
        """
        name = self._end.link.name_rank(self._receiver)
        what = f"{name} to say where version {version} goes"
        began_s = time.monotonic()
        reason = wait_until(self._is_ready, deadline_s, failure)
        if reason is not None:
            raise self._end.make_lost_error(what, reason, began_s)
        try:
            data, descriptors, _, _ = socket.recv_fds(self._peer, _GRANT.size, 1)
        except OSError as error:
            raise self._end.make_lost_error(what, "the process is gone", began_s) from error
        if len(data) < _GRANT.size:
            raise self._end.make_lost_error(what, "the process is gone", began_s)
        granted, number, num_slices = _GRANT.unpack(data)
        if num_slices:
            table = _read(descriptors[0])
            self._tables = dict([*self._tables.items()][1 - _NUM_SETS :])
            self._tables[number] = self._decode(table, num_slices)
        if granted != version:
            raise TransferError(f"{name} waits for version {granted}, not for version {version}")
        return self._tables[number]

    def close(self) -> None:
        self._peer.close()

    def _is_ready(self, seconds: float) -> bool:
        return bool(self._poll.poll(max(1.0, 1000 * seconds)))

    def _decode(self, table: Array, num_slices: int) -> Targets:
        counts = table[:num_slices]
        moves = table[num_slices:].reshape(-1, _MOVE_FIELDS).copy()
        first, second = self._maps
        in_first = _are_inside(moves, 0, len(first))
        in_second = _are_inside(moves, len(first), len(second))
        if not (in_first | in_second).all():
            raise TransferError(
                f"{self._end.link.name_rank(self._receiver)} wants slices outside its shared memory"
            )
        moves[in_first, _ADDRESS] += first.ctypes.data
        moves[in_second, _ADDRESS] += second.ctypes.data - len(first)
        populate(moves[:, _ADDRESS], _find_stops(moves))
        return Targets(counts, moves)


def _are_inside(moves: Array, start: int, num_bytes: int) -> Array:
    """Return for each move whether it lies wholly in `num_bytes` from address `start` on."""
    return (moves[:, _ADDRESS] >= start) & (_find_stops(moves) <= start + num_bytes)


def _find_stops(moves: Array) -> Array:
    """Return for each move the address behind its last byte."""
    last_rows = moves[:, _ADDRESS] + (moves[:, _ROWS] - 1) * moves[:, _OWN_STRIDE]
    return last_rows + moves[:, _ROW_BYTES]


def _read(descriptor: int) -> Array:
    """Return the int64 numbers in a file, and close it."""
    try:
        return np.frombuffer(os.pread(descriptor, os.fstat(descriptor).st_size, 0), np.int64)
    finally:
        os.close(descriptor)
