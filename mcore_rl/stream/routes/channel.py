"""Two processes of one machine meet; out come words that both see, and counters that tell who is how far.

sender                       anonymous segment                         receiver
counts   ----------------->  | written, read | message ... |  <------- counts, reads where it lies
packs into its GPU's memory, if the receiver can read that
      \\_____ abstract socket: the segment's descriptor and the handle of GPU memory once, _____/
               then a byte per message

The segment has no name, so it goes with the last of its two processes, however they end; the end of one
shows on the socket at once.
"""

import array
import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor

from mcore_rl.device.gpu_memory import export_memory, open_memory
from mcore_rl.stream.routes.transport import ASK_S, TransferError
from mcore_rl.stream.verify import WORD_BYTES

_COUNTERS_BYTES = mmap.PAGESIZE
_WRITTEN, _READ = 0, 8
"""Counters, each on a cache line of its own: messages the sender wrote, the receiver is done with."""


def machine_id() -> str:
    """Equal for two processes exactly if they run on one kernel and see one another's abstract sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"


@dataclass(frozen=True)
class SegmentSpec:
    """What a pair of ranks shares: int64 words, in the sender's memory on `device`."""

    num_words: int
    device: torch.device

    @property
    def host_bytes(self) -> int:
        """Of the segment, counters included."""
        return _COUNTERS_BYTES + (self.num_words * WORD_BYTES if self.device.type == "cpu" else 0)


class Channel:
    """One end of what two ranks share."""

    def __init__(
        self,
        peer: socket.socket,
        segment: mmap.mmap,
        gpu_words_W: Tensor | None,
        *,
        is_sender: bool,
    ) -> None:
        """`gpu_words_W`: where messages lie if not in the segment."""
        peer.setblocking(False)
        self._peer = peer
        self._sign = select.poll()
        self._sign.register(peer, select.POLLIN)
        self._counters = memoryview(segment)[:_COUNTERS_BYTES].cast("q")
        if gpu_words_W is None:
            gpu_words_W = torch.frombuffer(segment, dtype=torch.int64, offset=_COUNTERS_BYTES)
        self.words_W = gpu_words_W
        self._own, self._others = (_WRITTEN, _READ) if is_sender else (_READ, _WRITTEN)
        self.num_started = 0

    def advance(self) -> None:
        """One more message is written, or done with; ConnectionError if the other process is gone."""
        self._counters[self._own] += 1
        with suppress(BlockingIOError):  # the other end has bytes to wake it, so it will look
            self._peer.send(b".")

    def wait(self, count: int, seconds: float) -> bool:
        """Whether the other end has come to message `count`, waiting at most `seconds` for a sign of it.

        ConnectionError if it has not and its process is gone.
        """
        if self._counters[self._others] >= count:
            return True
        if self._sign.poll(max(1.0, 1000 * seconds)):
            ended = not self._peer.recv(4096)
            if ended and self._counters[self._others] < count:
                raise ConnectionResetError("the process is gone")
        return self._counters[self._others] >= count

    def close(self) -> None:
        with suppress(OSError):  # the other end may have gone first
            self._peer.shutdown(socket.SHUT_RDWR)
        self._peer.close()


class SegmentServer:
    """Where the receivers of one machine come to fetch their segments from a sender."""

    def __init__(self) -> None:
        self.name = f"mcore_rl-{uuid4().hex}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen()

    def serve(
        self,
        rooms: Mapping[int, SegmentSpec],
        names: tuple[str, ...],
        waiting: str,
        deadline_s: float,
    ) -> dict[int, Channel]:
        """A channel to each receiver, by rank, in whatever order they come."""
        channels: dict[int, Channel] = {}
        with self._listener:
            while missing := rooms.keys() - channels.keys():
                self._listener.settimeout(max(0.001, deadline_s - time.monotonic()))
                try:
                    peer = self._listener.accept()[0]
                    rank = _check_owner(peer)
                except TimeoutError as error:
                    late = ", ".join(names[rank] for rank in sorted(missing))
                    message = f"{waiting} waited in vain for {late} to fetch their shared memory"
                    raise TransferError(message, peer_lost=True) from error
                assert rank in missing, f"rank {rank} came to fetch memory that is not for it"
                channels[rank] = _hand_out(peer, rooms[rank])
        return channels


def fetch(name: str, rank: int, room: SegmentSpec, sender: str, deadline_s: float) -> Channel:
    """The receiver's end of its channel to the sender whose doorstep has this name."""
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(max(0.001, deadline_s - time.monotonic()))
    try:
        peer.connect(f"\0{name}")
        peer.sendall(struct.pack("q", rank))
        sizes = array.array("q", [0, 0])
        data, descriptors, _, _ = socket.recv_fds(peer, 2 * sizes.itemsize, 1)
        if not descriptors:
            raise ConnectionResetError("the process is gone")
        sizes.frombytes(data)
        num_words, handle_bytes = sizes[-2:]
        assert num_words == room.num_words, (
            f"{sender} shares {num_words} words, the plan says {room}"
        )
        segment = _map(descriptors[0], room)
        gpu_words_W = (
            open_memory(peer.recv(handle_bytes, socket.MSG_WAITALL)) if handle_bytes else None
        )
    except (OSError, RuntimeError) as error:
        peer.close()
        raise TransferError(f"no shared memory from {sender}: {error}", peer_lost=True) from error
    return Channel(peer, segment, gpu_words_W, is_sender=False)


def _check_owner(peer: socket.socket) -> int:
    """The rank that a peer says it is; only processes of our own user are let in."""
    user = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
    assert user == os.getuid(), f"a process of user {user} asked for shared memory"
    peer.settimeout(ASK_S)
    return struct.unpack("q", peer.recv(8, socket.MSG_WAITALL))[0]


def _hand_out(peer: socket.socket, room: SegmentSpec) -> Channel:
    descriptor = os.memfd_create("mcore_rl_weights")
    os.ftruncate(descriptor, room.host_bytes)
    gpu_words_W, handle = None, b""
    if room.device.type != "cpu":
        gpu_words_W = torch.zeros(room.num_words, dtype=torch.int64, device=room.device)
        try:
            handle = export_memory(gpu_words_W)
        except RuntimeError as error:
            peer.close()
            raise TransferError(f"memory of {room.device} cannot be shared: {error}") from error
    socket.send_fds(peer, [struct.pack("qq", room.num_words, len(handle))], [descriptor])
    peer.sendall(handle)
    return Channel(peer, _map(descriptor, room), gpu_words_W, is_sender=True)


def _map(descriptor: int, room: SegmentSpec) -> mmap.mmap:
    """Closes the descriptor: the mapping keeps the memory. Pages are taken now, not in the first sync."""
    try:
        return mmap.mmap(descriptor, room.host_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)
