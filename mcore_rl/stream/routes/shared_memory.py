"""Bytes between processes of one machine: messages lie in memory that both see, only word of them travels."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mcore_rl.device.gpu_memory import DeviceStream
from mcore_rl.stream.routes.channel import Channel
from mcore_rl.stream.routes.transport import TransferError, wait_until


@dataclass(frozen=True)
class _Message:
    """Number `count` of its channel, counted from 1."""

    channel: Channel
    count: int
    what: str
    is_incoming: bool


class SharedMemoryTransport:
    """Messages must lie in `memory(peer)`, where sending and receiving only tell of them."""

    def __init__(
        self,
        rank: int,
        names: tuple[str, ...],
        channels: Mapping[int, Channel],
        stream: DeviceStream,
    ) -> None:
        """`stream`: what this rank writes and reads messages with; word goes out when that is done."""
        self._rank, self._names, self._channels, self._stream = rank, names, channels, stream
        self._started: list[_Message] = []
        self._valid: list[_Message] = []
        """Received; from the next `run` on they may be overwritten."""

    def memory(self, peer: int) -> Tensor:
        return self._channels[peer].words_W

    def device(self, peer: int) -> torch.device:
        return self._channels[peer].words_W.device

    def send(self, tensor_u8: Tensor, peer: int, what: str) -> None:
        message = self._start(peer, f"{self._names[peer]} to take {what}", is_incoming=False)
        self._stream.synchronize()
        try:
            message.channel.advance()
        except ConnectionError as error:
            raise self._failure(message, "the process is gone", 0.0) from error

    def recv(self, tensor_u8: Tensor, peer: int, what: str) -> None:
        self._start(peer, f"{what} from {self._names[peer]}", is_incoming=True)

    def run(self, deadline_s: float, failure: Callable[[], str | None], pending: int = 0) -> None:
        if self._valid:
            self._stream.synchronize()
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

    def _wait(
        self, message: _Message, deadline_s: float, failure: Callable[[], str | None]
    ) -> None:
        began_s = time.monotonic()
        try:
            reason = wait_until(partial(message.channel.wait, message.count), deadline_s, failure)
        except OSError as error:
            raise self._failure(
                message, "the process is gone", time.monotonic() - began_s
            ) from error
        if reason is not None:
            raise self._failure(message, reason, time.monotonic() - began_s)

    def _failure(self, message: _Message, reason: str, waited_s: float) -> TransferError:
        text = f"{self._names[self._rank]} waited {waited_s:.1f} s for {message.what}: {reason}"
        return TransferError(text, peer_lost=True)
