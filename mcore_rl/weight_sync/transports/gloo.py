"""Sends bytes between hosts by TCP through gloo, with one process group per link."""

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor, distributed

from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.transports.transport import WholeBuckets
from mcore_rl.weight_sync.waits import FAILURE_POLL_S, TransferError

ProcessGroupGloo: Any = distributed.ProcessGroupGloo  # stubs lack options and point-to-point verbs
PrefixStore: Any = distributed.PrefixStore  # pyright: ignore[reportPrivateImportUsage]


@dataclass(frozen=True)
class GlooMessage:
    """A started message; `tensor_u8` must outlive the operation."""

    work: Any
    tensor_u8: Tensor
    what: str


class GlooTransport(WholeBuckets):
    """TCP through a gloo process group of all ranks of a link, apart from other process groups.

    All pairs of ranks connect at the start, because gloo's lazy connections sometimes lose
    messages.
    """

    def __init__(self, end: LinkEnd) -> None:
        """Join the group, as all ranks of the link must; RuntimeError after link.timeout_s."""
        link = end.link
        local_host = find_local_address(link.store_host, link.store_port)
        options = ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=link.timeout_s)
        options._threads = 1
        options._devices = [ProcessGroupGloo.create_device(hostname=local_host, lazy_init=False)]
        store = PrefixStore("gloo", end.store.make_torch_store())
        self._group = ProcessGroupGloo(store, end.rank, link.num_ranks, options)
        self._end = end
        self._name_of = link.name_rank
        self._started: list[GlooMessage] = []
        """Messages that `run` waits for."""
        self._unfinished: list[GlooMessage] = []

    def device(self, peer: int) -> torch.device:
        return torch.device("cpu")

    def send(self, tensor_u8: Tensor, peer: int, what: str, number: int = 0) -> None:
        self._started.append(self.start_send(tensor_u8, peer, what))

    def recv(self, tensor_u8: Tensor, peer: int, what: str, number: int = 0) -> None:
        self._started.append(self.start_recv(tensor_u8, peer, what))

    def run(self, deadline_s: float, failure: Callable[[], str | None], pending: int = 0) -> None:
        due = self._started[: max(0, len(self._started) - pending)]
        if due:
            self.wait(due, deadline_s, failure)
            del self._started[: len(due)]

    def start_send(self, tensor_u8: Tensor, peer: int, what: str, tag: int = 0) -> GlooMessage:
        """Start to send a message, for `wait`; messages of one pair and tag arrive in order."""
        what = f"{self._name_of(peer)} to take {what}"
        return self._start(self._group.send, tensor_u8, peer, what, tag)

    def start_recv(self, tensor_u8: Tensor, peer: int, what: str, tag: int = 0) -> GlooMessage:
        """Start to receive a message, for `wait`."""
        what = f"{what} from {self._name_of(peer)}"
        return self._start(self._group.recv, tensor_u8, peer, what, tag)

    def wait(
        self, due: Sequence[GlooMessage], deadline_s: float, failure: Callable[[], str | None]
    ) -> None:
        """Wait until the messages `due` have arrived; raise errors as `run` does."""
        # Gloo forgets some sends whose connection broke and then waits until its timeout. So a
        # thread waits for gloo, while this thread checks for failures.
        outcome: SimpleQueue[TransferError | None] = SimpleQueue()
        arguments = (due, deadline_s, outcome)
        Thread(target=self._wait, args=arguments, name="gloo-wait", daemon=True).start()
        reason = None
        while reason is None:
            with suppress(Empty):
                _raise_if(outcome.get(timeout=FAILURE_POLL_S))
                self._forget(due)
                return
            reason = failure() or _describe_overdue(deadline_s)
        # A timeout of this rank closes the peers' connections, and the peers may report that before
        # this rank's wait returns. The wait's error says more, so it gets a moment.
        with suppress(Empty):
            _raise_if(outcome.get(timeout=FAILURE_POLL_S))
            self._forget(due)
            return
        raise TransferError(f"{self._end.name} stopped waiting: {reason}", peer_lost=True)

    def _forget(self, due: Sequence[GlooMessage]) -> None:
        done = set(map(id, due))
        self._unfinished = [m for m in self._unfinished if id(m) not in done]

    def close(self) -> None:
        # While bytes arrive for a freed buffer, gloo's thread never ends: connections go before
        # buffers. A wait that times out closes all connections of a group.
        for message in self._unfinished:
            with suppress(RuntimeError):
                message.work.wait(timedelta(milliseconds=1))
        self._group.abort()
        del self._group
        self._started.clear()
        self._unfinished.clear()

    def _wait(
        self,
        due: Sequence[GlooMessage],
        deadline_s: float,
        outcome: "SimpleQueue[TransferError | None]",
    ) -> None:
        for message in due:
            began_s = time.monotonic()
            try:
                message.work.wait(timedelta(seconds=max(0.001, deadline_s - began_s)))
            except RuntimeError as error:
                outcome.put(
                    self._end.make_lost_error(message.what, _shorten_reason(error), began_s)
                )
                return
        outcome.put(None)

    def _start(
        self, verb: Callable[..., Any], tensor_u8: Tensor, peer: int, what: str, tag: int
    ) -> GlooMessage:
        assert tensor_u8.is_contiguous() and tensor_u8.dim() == 1, (
            f"{what}: bytes must lie contiguous"
        )
        try:
            work = verb([tensor_u8], peer, tag)
        except RuntimeError as error:
            raise self._end.make_lost_error(
                what, _shorten_reason(error), time.monotonic()
            ) from error
        self._unfinished.append(GlooMessage(work, tensor_u8, what))
        return self._unfinished[-1]


def _raise_if(error: TransferError | None) -> None:
    if error is not None:
        raise error


def _describe_overdue(deadline_s: float) -> str | None:
    over_s = time.monotonic() - deadline_s
    return None if over_s < FAILURE_POLL_S else f"gloo went {over_s:.1f} s over the deadline"


def _shorten_reason(error: RuntimeError) -> str:
    """Return gloo's message without its source location and advice."""
    return str(error).split("] ", 1)[-1].split(" This is typically")[0]


def find_local_address(host: str, port: int) -> str:
    """Return this machine's address toward `host`, at which other ranks reach this rank."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]
