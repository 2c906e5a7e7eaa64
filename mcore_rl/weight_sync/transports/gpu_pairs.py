"""Sends bytes by NCCL between GPUs that cannot read each other's memory.

Each pair of ranks has a communicator. A pair's messages arrive in the order in which both ends
start them. NCCL keeps a stream per communicator: an operation begins once the work queued before it
on the caller's stream is done, and `run` has the caller's stream wait for arrived messages. An
operation without its peer blocks the GPU's queue until the communicator is aborted. So all waits
here poll, and a caller that stops waiting must call `close`.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from mcore_rl.device.gpu_groups import make_group
from mcore_rl.device.threads import start_thread
from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.link_store import LinkStore
from mcore_rl.weight_sync.transports.transport import WholeBuckets
from mcore_rl.weight_sync.waits import TransferError, wait_until

PrefixStore: Any = distributed.PrefixStore  # pyright: ignore[reportPrivateImportUsage]

_POLL_S = 0.0002
MAX_CTAS = 4
"""Blocks of a pair's kernels: a network card needs few, and decoding loses each block."""
_ABORT_S = 5.0
"""How long `close` waits for NCCL, whose abort may itself hang."""


def order_meetings(
    rank: int, peers: Iterable[int], num_senders: int, num_receivers: int
) -> list[int]:
    """Return the peers in the order in which `rank` meets them.

    Pairs meet in rounds, as in a tournament: in round k, sender s meets receiver s + k. All pairs
    of a round meet at once, and since every rank goes through the rounds in one order, no ring of
    ranks waits for itself.
    """
    num_rounds = max(num_senders, num_receivers)

    def find_round(peer: int) -> int:
        sender, receiver = sorted((rank, peer))
        return (receiver - num_senders - sender) % num_rounds

    return sorted(peers, key=find_round)


@dataclass(frozen=True)
class _Message:
    work: Any
    tensor_u8: Tensor
    """Must outlive the operation."""
    what: str


class GpuPairTransport(WholeBuckets):
    """Connects to all peers at once, so that no later operation blocks its caller.

    Over a staged link it connects when the first message starts: engines behind a relay get no
    message from the trainer ranks, and their idle communicators would take GPU memory.
    """

    def __init__(self, end: LinkEnd, peers: Iterable[int]) -> None:
        """Connect to all `peers`, which do the same; all messages lie on end.device.

        Raises TransferError, which names a peer that does not connect by end.deadline_s. Over a
        staged link the first `send` or `recv` raises it, after link.timeout_s.
        """
        self._end = end
        self._name_of = end.link.name_rank
        self._device = end.device
        self._groups: dict[int, Any] = {}
        self._started: list[_Message] = []
        link = end.link
        self._unmet = order_meetings(end.rank, peers, link.num_senders, link.num_receivers)
        self._is_closed = False
        if not end.link.staged:
            self._meet_all(end.deadline_s)

    def _meet_all(self, deadline_s: float) -> None:
        """Connect to the peers, unless they are connected already."""
        if not self._unmet:
            return
        peers, self._unmet = self._unmet, []
        # A thread that waits in a store keeps all others of its client waiting, so pairs meet over
        # a client of their own.
        meeting_store = PrefixStore("pair", LinkStore.open(self._end.link).make_torch_store())
        try:
            # A rank meets one peer at a time: setting up a pair may wait for the GPU, where another
            # pair's first message waits for its peer. Other ranks meet their peers meanwhile.
            for peer in peers:
                self._connect(meeting_store, peer, deadline_s)
        except TransferError:
            self.close()
            raise

    def device(self, peer: int) -> torch.device:
        return self._device

    def send(self, tensor_u8: Tensor, peer: int, what: str, number: int = 0) -> None:
        self._meet_all(time.monotonic() + self._end.link.timeout_s)
        self._start(
            self._groups[peer].send, tensor_u8, peer, f"{self._name_of(peer)} to take {what}"
        )

    def recv(self, tensor_u8: Tensor, peer: int, what: str, number: int = 0) -> None:
        self._meet_all(time.monotonic() + self._end.link.timeout_s)
        self._start(self._groups[peer].recv, tensor_u8, peer, f"{what} from {self._name_of(peer)}")

    def run(self, deadline_s: float, failure: Callable[[], str | None], pending: int = 0) -> None:
        while len(self._started) > pending:
            self._wait(self._started[0], deadline_s, failure)
            self._started.pop(0)

    def close(self) -> None:
        self._is_closed = True
        # Aborting ends the operations on the GPU; until then the thread keeps their memory.
        groups = list(self._groups.values())
        started = self._started
        self._groups = {}
        self._started = []
        if not groups:
            return
        arguments = (groups, started)
        start_thread(self._device, _abort, arguments, name="gpu-abort").join(_ABORT_S)

    def _connect(self, meeting_store: Any, peer: int, deadline_s: float) -> None:
        # NCCL connects in the first operation and blocks there, so a thread starts it.
        end = self._end
        began_s = time.monotonic()
        sender, receiver = sorted((end.rank, peer))
        pair_store = PrefixStore(f"{sender}-{receiver}", meeting_store)
        meeting: Future[_Message] = Future()
        arguments = (meeting, pair_store, peer)
        start_thread(self._device, self._meet, arguments, name="gpu-meet")

        def has_met(seconds: float) -> bool:
            return bool(wait([meeting], max(0.0, seconds)).done)

        reason = wait_until(has_met, deadline_s, end.store.failure)
        if reason is None and meeting.exception() is not None:
            reason = str(meeting.exception())
        if reason is not None:
            raise end.make_lost_error(
                f"{self._name_of(peer)} to meet it over NCCL", reason, began_s
            )
        self._wait(meeting.result(), deadline_s, end.store.failure)

    def _meet(self, meeting: "Future[_Message]", pair_store: Any, peer: int) -> None:
        is_receiver = self._end.rank > peer
        rank_in_pair = int(is_receiver)
        try:
            group = make_group(pair_store, rank_in_pair, 2, MAX_CTAS)
            self._groups[peer] = group
            token_u8 = torch.zeros(1, dtype=torch.uint8, device=self._device)
            verb = group.recv if is_receiver else group.send
            work = verb([token_u8], 1 - rank_in_pair, 0)
            meeting.set_result(
                _Message(work, token_u8, f"{self._name_of(peer)} to answer over NCCL")
            )
            if self._is_closed:  # `close` did not see this group, so it is aborted here.
                _abort([group], [])
        except Exception as error:
            meeting.set_exception(error)

    def _start(self, verb: Callable[..., Any], tensor_u8: Tensor, peer: int, what: str) -> None:
        assert tensor_u8.is_contiguous() and tensor_u8.dim() == 1, (
            f"{what}: bytes must lie contiguous"
        )
        try:
            work = verb([tensor_u8], int(self._end.rank < peer), 0)
        except RuntimeError as error:
            raise self._end.make_lost_error(what, str(error), time.monotonic()) from error
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
            raise self._end.make_lost_error(message.what, reason, began_s)


def _abort(groups: list[Any], started: list[_Message]) -> None:
    for group in groups:
        with suppress(RuntimeError):  # a group that fails to abort must not keep the others
            group.abort()
    started.clear()
