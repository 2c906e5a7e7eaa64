"""Bytes between hosts: TCP through gloo, one process group per link."""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor, distributed

from mcore_rl.stream.routes.transport import ASK_S, TransferError

ProcessGroupGloo: Any = distributed.ProcessGroupGloo  # stubs lack options and point-to-point verbs
PrefixStore: Any = distributed.PrefixStore  # pyright: ignore[reportPrivateImportUsage]


class GlooTransport:
    """TCP through a gloo process group of its own, beside any other group of the process.

    All pairs of ranks connect at the start: gloo's lazy connections lose messages now and then.
    """

    def __init__(
        self, store: Any, rank: int, names: tuple[str, ...], local_host: str, timeout_s: float
    ) -> None:
        """`names`: one per rank, for errors; `local_host`: this process's address as the others reach it."""
        options = ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        options._devices = [ProcessGroupGloo.create_device(hostname=local_host, lazy_init=False)]
        self._group = ProcessGroupGloo(PrefixStore("gloo", store), rank, len(names), options)
        self._names = names
        self._rank = rank
        self._started: list[tuple[Any, Tensor, str]] = []

    def memory(self, peer: int) -> None:
        return None

    def device(self, peer: int) -> torch.device:
        return torch.device("cpu")

    def send(self, tensor_u8: Tensor, peer: int, what: str) -> None:
        self._start(self._group.send, tensor_u8, peer, f"{self._names[peer]} to take {what}")

    def recv(self, tensor_u8: Tensor, peer: int, what: str) -> None:
        self._start(self._group.recv, tensor_u8, peer, f"{what} from {self._names[peer]}")

    def run(self, deadline_s: float, failure: Callable[[], str | None], pending: int = 0) -> None:
        due = self._started[: max(0, len(self._started) - pending)]
        if due:
            self._run(due, deadline_s, failure)
            del self._started[: len(due)]

    def _run(self, due: list[Any], deadline_s: float, failure: Callable[[], str | None]) -> None:
        # Gloo forgets some sends whose connection broke and then waits out its time, so it waits beside us.
        outcome: SimpleQueue[TransferError | None] = SimpleQueue()
        Thread(
            target=self._wait, args=(due, deadline_s, outcome), name="gloo-wait", daemon=True
        ).start()
        reason = None
        while reason is None:
            with suppress(Empty):
                self._end(outcome.get(timeout=ASK_S))
                return
            reason = failure() or self._overdue(deadline_s)
        # Our own timeout closes the connections of our peers, who may tell of that before we do.
        with suppress(Empty):
            self._end(outcome.get(timeout=ASK_S))
            return
        raise TransferError(f"{self._names[self._rank]} stopped waiting: {reason}", peer_lost=True)

    def _end(self, error: TransferError | None) -> None:
        if error is not None:
            raise error

    def _overdue(self, deadline_s: float) -> str | None:
        over_s = time.monotonic() - deadline_s
        return None if over_s < ASK_S else f"gloo went {over_s:.1f} s over the deadline"

    def close(self) -> None:
        # While bytes come in for a buffer that is gone, gloo's thread never ends: connections go before
        # buffers. A wait that times out closes all connections of a group.
        for work, _, _ in self._started:
            with suppress(RuntimeError):
                work.wait(timedelta(milliseconds=1))
        self._group.abort()
        del self._group
        self._started.clear()

    def _wait(
        self, due: list[Any], deadline_s: float, outcome: "SimpleQueue[TransferError | None]"
    ) -> None:
        for work, _, what in due:
            began_s = time.monotonic()
            try:
                work.wait(timedelta(seconds=max(0.001, deadline_s - began_s)))
            except RuntimeError as error:
                outcome.put(self._failure(error, what, time.monotonic() - began_s))
                return
        outcome.put(None)

    def _start(self, verb: Callable[..., Any], tensor_u8: Tensor, peer: int, what: str) -> None:
        assert tensor_u8.is_contiguous() and tensor_u8.dim() == 1, (
            f"{what}: bytes must lie contiguous"
        )
        try:
            self._started.append((verb([tensor_u8], peer, 0), tensor_u8, what))
        except RuntimeError as error:
            raise self._failure(error, what, 0.0) from error

    def _failure(self, error: RuntimeError, what: str, waited_s: float) -> TransferError:
        reason = str(error).split("] ", 1)[-1].split(" This is typically")[0]
        message = f"{self._names[self._rank]} waited {waited_s:.1f} s for {what}: {reason}"
        return TransferError(message, peer_lost=True)


def route_to(host: str, port: int) -> str:
    """The local address from which `host` is reached: what other ranks of the cluster can reach us at."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]
