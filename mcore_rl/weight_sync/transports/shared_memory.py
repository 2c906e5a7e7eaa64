"""Sends bytes between processes of one machine through shared memory; only notices travel.

sender                       anonymous segment                         receiver
counts   ----------------->  | written, read | message ... |  <------- counts, reads it in place
packs into its GPU's memory, if the receiver can read that
rings the receiver's bell ----- eventfds, once per message -----> rings the sender's
      \\___ abstract socket: once, the descriptors of segment and bells, and the handle of ___/
             GPU memory

The segment has no name, so it ends with the last of its two processes, however they end. The end of
either process shows on the socket at once. A bell wakes its process on the process's last core; a
byte through the socket would move it to the core of the sending process, which is still busy.
"""

import array
import hashlib
import mmap
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mcore_rl.device.gpu_memory import DeviceStream, export_memory, open_memory
from mcore_rl.weight_sync.link_end import LinkEnd, RankServer, connect
from mcore_rl.weight_sync.transports.host.segment import map_segment, populate
from mcore_rl.weight_sync.transports.transport import WholeBuckets
from mcore_rl.weight_sync.verify import WORD_BYTES
from mcore_rl.weight_sync.waits import TransferError, wait_until

_COUNTERS_BYTES = mmap.PAGESIZE
_WRITTEN = 0
_READ = 8
"""Indices of the two counters, each on a cache line of its own: messages written by the sender, and
messages done by the receiver.
"""


@dataclass(frozen=True)
class SegmentSpec:
    """The memory that a pair of ranks shares: `num_words` int64 words on the sender's `device`."""

    num_words: int
    device: torch.device

    @property
    def host_bytes(self) -> int:
        """Size in host memory: the counters, and the words unless they lie on a GPU."""
        words_bytes = self.num_words * WORD_BYTES if self.device.type == "cpu" else 0
        return _COUNTERS_BYTES + words_bytes


class Channel:
    """One end of the memory that two ranks share."""

    def __init__(
        self,
        peer: socket.socket,
        segment: mmap.mmap,
        bells: "Bells",
        gpu_words_W: Tensor | None,
        *,
        is_sender: bool,
    ) -> None:
        """Take over `peer` and `bells`; `gpu_words_W`: memory of messages, if not in `segment`."""
        peer.setblocking(False)
        self._peer = peer
        self._own_bell = bells.of_sender if is_sender else bells.of_receiver
        self._peer_bell = bells.of_receiver if is_sender else bells.of_sender
        # Not in `close`: a thread that still waits must not see other files under these numbers.
        weakref.finalize(self, bells.close)
        self._poll = select.poll()
        self._poll.register(peer, select.POLLIN)
        self._poll.register(self._own_bell, select.POLLIN)
        self._counters = memoryview(segment)[:_COUNTERS_BYTES].cast("q")
        if gpu_words_W is None:
            self.words_W = torch.frombuffer(segment, dtype=torch.int64, offset=_COUNTERS_BYTES)
        else:
            self.words_W = gpu_words_W
        self._own_counter = _WRITTEN if is_sender else _READ
        self._peer_counter = _READ if is_sender else _WRITTEN
        self.num_started = 0
        """Messages started on this end, counted by the transport."""

    def advance(self) -> None:
        """Count one more message as written or read."""
        self._counters[self._own_counter] += 1
        os.eventfd_write(self._peer_bell, 1)

    def wait(self, count: int, seconds: float) -> bool:
        """Wait for up to `seconds`; return whether the other end has reached message `count`.

        Raises ConnectionError if it has not and its process is gone.
        """
        until_s = time.monotonic() + seconds
        while self._counters[self._peer_counter] < count:
            left_s = until_s - time.monotonic()
            events = dict(self._poll.poll(max(1.0, 1000 * left_s)))
            if not events:
                return self._counters[self._peer_counter] >= count
            # A bell may ring for a message that was seen before; then the wait goes on.
            if self._own_bell in events:
                os.eventfd_read(self._own_bell)
            elif self._counters[self._peer_counter] < count:
                raise ConnectionResetError("the process is gone")
        return True

    def close(self) -> None:
        with suppress(OSError):  # The other end may be gone.
            self._peer.shutdown(socket.SHUT_RDWR)
        self._peer.close()


@dataclass(frozen=True)
class Bells:
    """The eventfds of both ends; an end's own eventfd signals that the other end has advanced."""

    of_receiver: int
    of_sender: int

    @staticmethod
    def make() -> "Bells":
        flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
        return Bells(os.eventfd(0, flags), os.eventfd(0, flags))

    def close(self) -> None:
        os.close(self.of_receiver)
        os.close(self.of_sender)


def serve_segments(end: LinkEnd, segments: Mapping[int, SegmentSpec]) -> dict[int, Channel]:
    """Return a channel to each receiver in `segments`, by rank; they may come in any order.

    Raises TransferError, which names the receivers that did not connect by end.deadline_s.
    """
    server = RankServer(make_server_name(end, end.rank, "segments"))
    peers = server.accept(end, segments, "fetch their shared memory")
    return {rank: _serve_segment(peer, segments[rank]) for rank, peer in peers}


def make_server_name(end: LinkEnd, sender: int, what: str) -> str:
    """Return the name of a sender's server of `what`, known only to ranks of the link."""
    secret = f"{end.link.store_key} {what} of rank {sender}"
    return f"mcore_rl-{hashlib.sha256(secret.encode()).hexdigest()[:32]}"


def fetch_channel(end: LinkEnd, sender: int, segment: SegmentSpec) -> Channel:
    """Return the receiver's end of the channel to rank `sender`, once the sender serves segments.

    Raises TransferError if the sender does not by end.deadline_s.
    """
    name = end.link.name_rank(sender)
    peer = socket.socket(socket.AF_UNIX)
    try:
        connect(peer, end, make_server_name(end, sender, "segments"), comes_later=True)
        sizes = array.array("q", [0, 0])
        data, descriptors, _, _ = socket.recv_fds(peer, 2 * sizes.itemsize, 3)
        if not descriptors:
            raise ConnectionResetError("the process is gone")
        memory, *bells = descriptors
        for bell in bells:
            os.set_inheritable(bell, False)
        sizes.frombytes(data)
        num_words, handle_bytes = sizes[-2:]
        assert num_words == segment.num_words, (
            f"{name} shares {num_words} words, the plan says {segment}"
        )
        mapped = _map(memory, segment)
        gpu_words_W = None
        if handle_bytes:
            gpu_words_W = open_memory(peer.recv(handle_bytes, socket.MSG_WAITALL), end.device)
    except (OSError, RuntimeError) as error:
        peer.close()
        raise TransferError(f"no shared memory from {name}: {error}", peer_lost=True) from error
    return Channel(peer, mapped, Bells(*bells), gpu_words_W, is_sender=False)


def _serve_segment(peer: socket.socket, segment: SegmentSpec) -> Channel:
    descriptor = os.memfd_create("mcore_rl_weights")
    os.ftruncate(descriptor, segment.host_bytes)
    gpu_words_W = None
    handle = b""
    if segment.device.type != "cpu":
        gpu_words_W = torch.zeros(segment.num_words, dtype=torch.int64, device=segment.device)
        try:
            handle = export_memory(gpu_words_W)
        except RuntimeError as error:
            peer.close()
            raise TransferError(f"memory of {segment.device} cannot be shared: {error}") from error
    bells = Bells.make()
    descriptors = [descriptor, bells.of_receiver, bells.of_sender]
    socket.send_fds(peer, [struct.pack("qq", segment.num_words, len(handle))], descriptors)
    peer.sendall(handle)
    return Channel(peer, _map(descriptor, segment), bells, gpu_words_W, is_sender=True)


def _map(descriptor: int, segment: SegmentSpec) -> mmap.mmap:
    """Map the segment and close its descriptor; the mapping keeps the memory."""
    try:
        mapped = map_segment(descriptor, segment.host_bytes)
    finally:
        os.close(descriptor)
    start = np.frombuffer(mapped, np.uint8).ctypes.data
    populate(np.array([start]), np.array([start + segment.host_bytes]))
    return mapped


@dataclass(frozen=True)
class _Message:
    """Message number `count` of its channel, counted from 1."""

    channel: Channel
    count: int
    what: str
    is_incoming: bool


class SharedMemoryTransport(WholeBuckets):
    """Messages lie in shared memory: the sender gives notice, and the receiver waits for notice."""

    def __init__(
        self,
        end: LinkEnd,
        channels: Mapping[int, Channel],
        stream: DeviceStream,
        slots: Sequence[slice] = (),
    ) -> None:
        """Take over `channels`, by peer.

        stream  writes and reads this rank's messages; notice is given once its work is done
        slots   place of each of the rank's buckets in the words of the peer's channel
        """
        self._slots = slots
        self._end = end
        self._name_of = end.link.name_rank
        self._channels = channels
        self._stream = stream
        self._started: list[_Message] = []
        self._valid: list[_Message] = []
        """Received messages still in use here; the next `run` lets their senders overwrite them."""

    def memory(self, peer: int) -> Tensor:
        """Return the int64 words shared with `peer`."""
        return self._channels[peer].words_W

    def message(self, number: int, peer: int) -> Tensor:
        return self._channels[peer].words_W[self._slots[number]]

    def device(self, peer: int) -> torch.device:
        return self._channels[peer].words_W.device

    def send(self, tensor_u8: Tensor, peer: int, what: str, number: int = 0) -> None:
        message = self._start(peer, f"{self._name_of(peer)} to take {what}", is_incoming=False)
        self._stream.synchronize()
        message.channel.advance()

    def recv(self, tensor_u8: Tensor, peer: int, what: str, number: int = 0) -> None:
        self._start(peer, f"{what} from {self._name_of(peer)}", is_incoming=True)

    def run(self, deadline_s: float, failure: Callable[[], str | None], pending: int = 0) -> None:
        self._release_valid()
        while len(self._started) > pending:
            self._wait(self._started[0], deadline_s, failure)
            message = self._started.pop(0)
            if message.is_incoming:
                self._valid.append(message)

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def _release_valid(self) -> None:
        """Tell the senders of received messages that they may overwrite them."""
        if self._valid:
            self._stream.synchronize()
        for message in self._valid:
            message.channel.advance()
        self._valid = []

    def _start(self, peer: int, what: str, *, is_incoming: bool) -> _Message:
        channel = self._channels[peer]
        channel.num_started += 1
        message = _Message(channel, channel.num_started, what, is_incoming)
        self._started.append(message)
        return message

    def _wait(
        self, message: _Message, deadline_s: float, failure: Callable[[], str | None]
    ) -> None:
        began_s = time.monotonic()
        try:
            reason = wait_until(partial(message.channel.wait, message.count), deadline_s, failure)
        except OSError as error:
            raise self._end.make_lost_error(message.what, "the process is gone", began_s) from error
        if reason is not None:
            raise self._end.make_lost_error(message.what, reason, began_s)
