"""Bytes between processes of one machine: messages lie in memory that both map, only word of them travels.

sender                       anonymous segment                           receiver
packs into it  ----------->  | written, read | message | message ... |   reads it where it lies
      \\_____ abstract socket: the segment's descriptor once, then a byte per message _____/

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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor

from mcore_rl.stream.transport import ASK_S, TransferError
from mcore_rl.stream.verify import WORD_BYTES

_COUNTERS_BYTES = mmap.PAGESIZE
_WRITTEN, _READ = 0, 8
"""Counters, each on a cache line of its own: messages the sender wrote, the receiver is done with."""


def machine_id() -> str:
    """Equal for two processes exactly if they run on one kernel and see one another's abstract sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"


class Channel:
    """One end of a segment that two ranks share."""

    def __init__(self, peer: socket.socket, segment: mmap.mmap, *, is_sender: bool) -> None:
        peer.setblocking(False)
        self._peer = peer
        self._sign = select.poll()
        self._sign.register(peer, select.POLLIN)
        self._counters = memoryview(segment)[:_COUNTERS_BYTES].cast("q")
        self.words_W = torch.frombuffer(segment, dtype=torch.int64, offset=_COUNTERS_BYTES)
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


class Doorstep:
    """Where the receivers of one machine come to fetch their segments from a sender."""

    def __init__(self) -> None:
        self.name = f"mcore_rl-{uuid4().hex}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen()

    def serve(
        self, sizes: Mapping[int, int], names: tuple[str, ...], waiting: str, deadline_s: float
    ) -> dict[int, Channel]:
        """A channel to each receiver of `sizes`, rank -> int64 words, in whatever order they come."""
        channels: dict[int, Channel] = {}
        with self._listener:
            while missing := sizes.keys() - channels.keys():
                self._listener.settimeout(max(0.001, deadline_s - time.monotonic()))
                try:
                    peer = self._listener.accept()[0]
                    rank = _check_owner(peer)
                except TimeoutError as error:
                    late = ", ".join(names[rank] for rank in sorted(missing))
                    message = f"{waiting} waited in vain for {late} to fetch their shared memory"
                    raise TransferError(message, peer_lost=True) from error
                assert rank in missing, f"rank {rank} came to fetch memory that is not for it"
                channels[rank] = _hand_out(peer, sizes[rank])
        return channels


def fetch(name: str, rank: int, num_words: int, sender: str, deadline_s: float) -> Channel:
    """The receiver's end of its channel to the sender whose doorstep has this name."""
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(max(0.001, deadline_s - time.monotonic()))
    try:
        peer.connect(f"\0{name}")
        peer.sendall(struct.pack("q", rank))
        size = array.array("q", [0])
        data, descriptors, _, _ = socket.recv_fds(peer, size.itemsize, 1)
    except OSError as error:
        peer.close()
        raise TransferError(f"no shared memory from {sender}: {error}", peer_lost=True) from error
    if not descriptors:
        raise TransferError(f"no shared memory from {sender}: the process is gone", peer_lost=True)
    size.frombytes(data)
    assert size[-1] == num_words, f"{sender} shares {size[-1]} words, the plan says {num_words}"
    return Channel(peer, _map(descriptors[0], num_words), is_sender=False)


def _check_owner(peer: socket.socket) -> int:
    """The rank that a peer says it is; only processes of our own user are let in."""
    user = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
    assert user == os.getuid(), f"a process of user {user} asked for shared memory"
    peer.settimeout(ASK_S)
    return struct.unpack("q", peer.recv(8, socket.MSG_WAITALL))[0]


def _hand_out(peer: socket.socket, num_words: int) -> Channel:
    descriptor = os.memfd_create("mcore_rl_weights")
    os.ftruncate(descriptor, _COUNTERS_BYTES + num_words * WORD_BYTES)
    socket.send_fds(peer, [struct.pack("q", num_words)], [descriptor])
    return Channel(peer, _map(descriptor, num_words), is_sender=True)


def _map(descriptor: int, num_words: int) -> mmap.mmap:
    """Closes the descriptor: the mapping keeps the memory. Pages are taken now, not in the first sync."""
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    try:
        return mmap.mmap(descriptor, _COUNTERS_BYTES + num_words * WORD_BYTES, flags=flags)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class _Message:
    """Number `count` of its channel, counted from 1."""

    channel: Channel
    count: int
    what: str
    is_incoming: bool


class SharedMemoryTransport:
    """Messages must lie in `memory(peer)`, where sending and receiving only tell of them."""

    def __init__(self, rank: int, names: tuple[str, ...], channels: Mapping[int, Channel]) -> None:
        self._rank, self._names, self._channels = rank, names, channels
        self._started: list[_Message] = []
        self._valid: list[_Message] = []
        """Received; from the next `run` on they may be overwritten."""

    def memory(self, peer: int) -> Tensor:
        return self._channels[peer].words_W

    def send(self, tensor_u8: Tensor, peer: int, what: str) -> None:
        message = self._start(peer, f"{self._names[peer]} to take {what}", is_incoming=False)
        try:
            message.channel.advance()
        except ConnectionError as error:
            raise self._failure(message, "the process is gone", 0.0) from error

    def recv(self, tensor_u8: Tensor, peer: int, what: str) -> None:
        self._start(peer, f"{what} from {self._names[peer]}", is_incoming=True)

    def run(self, deadline_s: float, failure: Callable[[], str | None], pending: int = 0) -> None:
        for message in self._valid:
            with suppress(ConnectionError):  # a sender that is gone needs no answer
                message.channel.advance()
        self._valid = []
        while len(self._started) > pending:
            self._wait(self._started[0], deadline_s, failure)
            message = self._started.pop(0)
            if message.is_incoming:
                self._valid.append(message)

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def _start(self, peer: int, what: str, *, is_incoming: bool) -> _Message:
        channel = self._channels[peer]
        channel.num_started += 1
        self._started.append(_Message(channel, channel.num_started, what, is_incoming))
        return self._started[-1]

    def _wait(self, message: _Message, deadline_s: float, failure: Callable[[], str | None]) -> None:
        began_s = time.monotonic()
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                if message.channel.wait(message.count, min(left_s, ASK_S)):
                    return
            except OSError as error:
                raise self._failure(message, "the process is gone", time.monotonic() - began_s) from error
            reason = "the time is up" if left_s <= 0 else failure()
            if reason is not None:
                raise self._failure(message, reason, time.monotonic() - began_s)

    def _failure(self, message: _Message, reason: str, waited_s: float) -> TransferError:
        text = f"{self._names[self._rank]} waited {waited_s:.1f} s for {message.what}: {reason}"
        return TransferError(text, peer_lost=True)
