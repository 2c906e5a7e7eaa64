"""Sends bytes between processes of one machine through shared memory; only notices travel."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mcore_rl.device.gpu_memory import DeviceStream
from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.transports.channel import Channel
from mcore_rl.weight_sync.transports.transport import wait_until


@dataclass(frozen=True)
class _Message:
    """Message number `count` of its channel, counted from 1."""

    channel: Channel
    count: int
    what: str
    is_incoming: bool


class SharedMemoryTransport:
    """Messages must lie in `memory(peer)`; to send is to give notice, to receive is to await it."""

    def __init__(self, end: LinkEnd, channels: Mapping[int, Channel], stream: DeviceStream) -> None:
        """`stream` writes and reads this rank's messages; notice is given when its work is done."""
        self._end = end
        self._name_of = end.link.name_of
        self._channels = channels
        self._stream = stream
        self._started: list[_Message] = []
        self._valid: list[_Message] = []
        """Received messages still in use here; the next `run` lets their senders overwrite them."""

    def memory(self, peer: int) -> Tensor:
        return self._channels[peer].words_W

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

    def take_saved(self) -> int:
        return 0

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
            raise self._end.lost(message.what, "the process is gone", began_s) from error
        if reason is not None:
            raise self._end.lost(message.what, reason, began_s)
