"""Bytes between GPUs that cannot read each other's memory: NCCL, a communicator for each pair of ranks.

A pair's messages arrive in the order in which both ends start them. NCCL keeps a stream per communicator: an
operation begins when the work queued before it on the caller's stream is done, and `run` has that stream
wait for what arrived. An operation whose peer does not come holds its GPU's queue until its communicator is
aborted, so all waits here poll, and whoever stops waiting must `close`.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch
from torch import Tensor, distributed

from mcore_rl.device.gpu_pair import make_pair_group
from mcore_rl.stream.link_store import LinkStore
from mcore_rl.stream.routes.transport import TransferError, wait_until
from mcore_rl.stream.wire import Link

PrefixStore: Any = distributed.PrefixStore  # pyright: ignore[reportPrivateImportUsage]

_POLL_S = 0.0002
_ABORT_S = 5.0
"""How long `close` waits for NCCL, whose abort may itself hang."""


@dataclass(frozen=True)
class _Message:
    work: Any
    tensor_u8: Tensor
    """Must outlive the operation."""
    what: str


class GpuPairTransport:
    """Connects to every peer at the start, so that no later operation blocks its caller."""

    def __init__(
        self,
        store: LinkStore,
        rank: int,
        link: Link,
        peers: Iterable[int],
        device: torch.device,
        deadline_s: float,
    ) -> None:
        """`peers`, who do the same; `device`: where all messages lie.

        TransferError names the peer that does not come by `deadline_s`.
        """
        self._rank, self._names, self._device = rank, link.names, device
        meeting_store = LinkStore.open(
            link
        ).tcp_store  # who waits in a store keeps all others from it
        self._groups: dict[int, Any] = {}
        self._started: list[_Message] = []
        self._is_closed = False
        try:
            for peer in sorted(
                peers
            ):  # one order of all pairs, so that no ring of ranks waits for itself
                self._connect(store, PrefixStore("pair", meeting_store), peer, deadline_s)
        except TransferError:
            self.close()
            raise

    def memory(self, peer: int) -> None:
        return None

    def device(self, peer: int) -> torch.device:
        return self._device

    def send(self, tensor_u8: Tensor, peer: int, what: str) -> None:
        self._start(self._groups[peer].send, tensor_u8, peer, f"{self._names[peer]} to take {what}")

    def recv(self, tensor_u8: Tensor, peer: int, what: str) -> None:
        self._start(self._groups[peer].recv, tensor_u8, peer, f"{what} from {self._names[peer]}")

    def run(self, deadline_s: float, failure: Callable[[], str | None], pending: int = 0) -> None:
        while len(self._started) > pending:
            self._wait(self._started[0], deadline_s, failure)
            self._started.pop(0)

    def close(self) -> None:
        self._is_closed = True
        # Aborting ends what is on the GPU; until then the thread keeps its memory.
        ending = (list(self._groups.values()), self._started)
        self._groups, self._started = {}, []
        aborting = Thread(target=_abort, args=ending, name="gpu-abort", daemon=True)
        aborting.start()
        aborting.join(_ABORT_S)

    def _connect(self, store: LinkStore, meeting_store: Any, peer: int, deadline_s: float) -> None:
        """NCCL connects in the first operation and blocks there, so a thread of its own does that."""
        began_s = time.monotonic()
        sender, receiver = sorted((self._rank, peer))
        pair_store = PrefixStore(f"{sender}-{receiver}", meeting_store)
        meeting: Future[_Message] = Future()
        Thread(
            target=self._meet, args=(meeting, pair_store, peer), name="gpu-meet", daemon=True
        ).start()
        reason = wait_until(
            lambda s: bool(wait([meeting], max(0.0, s)).done), deadline_s, store.failure
        )
        what = f"{self._names[peer]} to meet it over NCCL"
        if reason is None and meeting.exception() is not None:
            reason = str(meeting.exception())
        if reason is not None:
            raise self._failure(what, reason, time.monotonic() - began_s)
        self._wait(meeting.result(), deadline_s, store.failure)

    def _meet(self, meeting: "Future[_Message]", pair_store: Any, peer: int) -> None:
        own = int(self._rank > peer)
        try:
            group = self._groups[peer] = make_pair_group(pair_store, own)
            token_u8 = torch.zeros(1, dtype=torch.uint8, device=self._device)
            work = (group.recv if own else group.send)([token_u8], 1 - own, 0)
            meeting.set_result(_Message(work, token_u8, f"{self._names[peer]} to answer over NCCL"))
            if self._is_closed:  # nobody waited for the end of this
                _abort([group], [])
        except Exception as error:
            meeting.set_exception(error)

    def _start(self, verb: Callable[..., Any], tensor_u8: Tensor, peer: int, what: str) -> None:
        assert tensor_u8.is_contiguous() and tensor_u8.dim() == 1, (
            f"{what}: bytes must lie contiguous"
        )
        try:
            work = verb([tensor_u8], int(self._rank < peer), 0)
        except RuntimeError as error:
            raise self._failure(what, str(error), 0.0) from error
        self._started.append(_Message(work, tensor_u8, what))

    def _wait(
        self, message: _Message, deadline_s: float, failure: Callable[[], str | None]
    ) -> None:
        began_s = time.monotonic()

        def is_done(seconds: float) -> bool:
            until_s = time.monotonic() + seconds
            while not message.work.is_completed():
                if time.monotonic() >= until_s:
                    return False
                time.sleep(_POLL_S)
            return True

        try:
            reason = wait_until(is_done, deadline_s, failure)
            if reason is None and message.work.exception() is not None:
                reason = str(message.work.exception())
            if reason is None:
                message.work.synchronize()
        except RuntimeError as error:
            reason = str(error)
        if reason is not None:
            raise self._failure(message.what, reason, time.monotonic() - began_s)

    def _failure(self, what: str, reason: str, waited_s: float) -> TransferError:
        message = f"{self._names[self._rank]} waited {waited_s:.1f} s for {what}: {reason}"
        return TransferError(message, peer_lost=True)


def _abort(groups: list[Any], started: list[_Message]) -> None:
    for group in groups:
        with suppress(RuntimeError):  # those of the others are to end all the same
            group.abort()
    started.clear()
