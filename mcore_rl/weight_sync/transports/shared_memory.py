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
import logging
import mmap
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mcore_rl.device.gpu_memory import LENT, DeviceStream, export_memory, open_memory
from mcore_rl.weight_sync.link_end import LinkEnd, RankServer, connect
from mcore_rl.weight_sync.transports.host.segment import map_segment, populate
from mcore_rl.weight_sync.transports.transport import WholeBuckets
from mcore_rl.weight_sync.verify import WORD_BYTES
from mcore_rl.weight_sync.waits import TransferError, wait_until

_log = logging.getLogger(__name__)

_COUNTERS_BYTES = mmap.PAGESIZE
_WRITTEN = 0
_READ = 8
"""Indices of the two counters, each on a cache line of its own: messages written by the sender, and
messages done by the receiver.
"""
_OPENED = b"y"
_NOT_OPENED = b"n"
"""A receiver's answer to the handle of GPU memory."""


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
        self._lent_W = gpu_words_W if is_sender else None
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
        """Drop the connection. Nothing queued on a GPU may write a sender's words any more."""
        with suppress(OSError):  # The other end may be gone.
            self._peer.shutdown(socket.SHUT_RDWR)
        self._peer.close()
        if self._lent_W is not None:
            LENT.give_back(self._lent_W)
            self._lent_W = None


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

    Receivers that cannot open this rank's GPU memory are left out. Raises TransferError, which
    names the receivers that did not connect by end.deadline_s.
    """
    server = RankServer(make_server_name(end, end.rank, "segments"))
    channels: dict[int, Channel] = {}
    with close_on_error(channels):
        for rank, peer in server.accept(end, segments, "fetch their shared memory"):
            channel = _serve_segment(end, rank, peer, segments[rank])
            if channel is not None:
                channels[rank] = channel
    return channels


@contextmanager
def close_on_error(channels: Mapping[int, Channel]) -> Iterator[None]:
    """Close the channels if the block raises, so that the memory lent to them is lent again."""
    try:
        yield
    except BaseException:
        for channel in channels.values():
            channel.close()
        raise


def make_server_name(end: LinkEnd, sender: int, what: str) -> str:
    """Return the name of a sender's server of `what`, known only to ranks of the link."""
    secret = f"{end.link.store_key} {what} of rank {sender}"
    return f"mcore_rl-{hashlib.sha256(secret.encode()).hexdigest()[:32]}"


def fetch_channels(end: LinkEnd, segments: Mapping[int, SegmentSpec]) -> dict[int, Channel]:
    """Return the receiver's end of the channel to each sender in `segments`, once it serves them.

    Senders whose GPU memory cannot be opened are left out, and the log says why. Raises
    TransferError if a sender does not answer by end.deadline_s.
    """
    channels: dict[int, Channel] = {}
    with close_on_error(channels):
        for sender, segment in segments.items():
            channel = _fetch_channel(end, sender, segment)
            if channel is not None:
                channels[sender] = channel
    return channels


def _fetch_channel(end: LinkEnd, sender: int, segment: SegmentSpec) -> Channel | None:
    """Return the channel to rank `sender`; None if its GPU memory cannot be opened."""
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
        if segment.device.type != "cpu":
            handle = peer.recv(handle_bytes, socket.MSG_WAITALL) if handle_bytes else b""
            gpu_words_W = _open_words(handle, num_words, end, name)
            peer.sendall(_NOT_OPENED if gpu_words_W is None else _OPENED)
            if gpu_words_W is None:
                peer.close()
                Bells(*bells).close()
                return None
    except (OSError, RuntimeError) as error:
        peer.close()
        raise TransferError(f"no shared memory from {name}: {error}", peer_lost=True) from error
    return Channel(peer, mapped, Bells(*bells), gpu_words_W, is_sender=False)


def _open_words(handle: bytes, num_words: int, end: LinkEnd, sender: str) -> Tensor | None:
    """Return the sender's words in its GPU memory; None, and log why, if they cannot be opened."""
    if not handle:
        return None  # The sender has logged why.
    try:
        return open_memory(handle, end.device)[:num_words]
    except RuntimeError as error:
        _log.warning("%s cannot open GPU memory of %s: %s", end.name, sender, _find_cause(error))
        return None


def _serve_segment(
    end: LinkEnd, rank: int, peer: socket.socket, segment: SegmentSpec
) -> Channel | None:
    """Send the segment to receiver `rank`; None if it cannot open this rank's GPU memory."""
    descriptor = os.memfd_create("mcore_rl_weights")
    os.ftruncate(descriptor, segment.host_bytes)
    gpu_words_W = None
    handle = b""
    if segment.device.type != "cpu":
        gpu_words_W = LENT.take(segment.num_words, segment.device)
        handle = _export_words(gpu_words_W, end)
    bells = Bells.make()
    descriptors = [descriptor, bells.of_receiver, bells.of_sender]
    socket.send_fds(peer, [struct.pack("qq", segment.num_words, len(handle))], descriptors)
    if handle:
        peer.sendall(handle)
    mapped = _map(descriptor, segment)
    channel = Channel(peer, mapped, bells, gpu_words_W, is_sender=True)
    if gpu_words_W is None:
        return channel
    with close_on_error({rank: channel}):
        if _await_opened(end, rank, peer):
            return channel
    channel.close()
    return None


def _export_words(words_W: Tensor, end: LinkEnd) -> bytes:
    """Return the handle of the words; empty, and log why, if they cannot be shared."""
    try:
        return export_memory(words_W)
    except RuntimeError as error:
        _log.warning("%s cannot share GPU memory: %s", end.name, _find_cause(error))
        return b""


def _await_opened(end: LinkEnd, rank: int, peer: socket.socket) -> bool:
    """Return whether the receiver has opened the memory. Raises TransferError if it is lost."""
    began_s = time.monotonic()
    what = f"{end.link.name_rank(rank)} to open its GPU memory"
    answers: list[bytes] = []
    poll = select.poll()
    poll.register(peer, select.POLLIN)

    def has_answered(seconds: float) -> bool:
        if poll.poll(max(1.0, 1000 * seconds)):
            answers.append(peer.recv(1))
        return bool(answers)

    try:
        reason = wait_until(has_answered, end.deadline_s, end.store.failure)
    except OSError as error:
        raise end.make_lost_error(what, "the process is gone", began_s) from error
    if reason is None and answers == [b""]:
        reason = "the process is gone"
    if reason is not None:
        raise end.make_lost_error(what, reason, began_s)
    return answers == [_OPENED]


def _find_cause(error: RuntimeError) -> str:
    """Return the first line of an error of CUDA, whose others are advice for its developers."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


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
        with suppress(RuntimeError):  # a GPU that failed runs nothing more
            self._stream.synchronize()
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
